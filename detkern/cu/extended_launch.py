"""Launches that need attributes: kernels whose operands are tensor maps, started while an earlier kernel still ends.

CuPy's launchKernel takes no launch attributes, so these go through the driver's cuLaunchKernelEx (cuda-bindings).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Protocol

from .. import config
from . import tensor_map
from .geometry import Maps
from .loader import KernelBuild

__all__ = ["ExtendedLaunch", "LaunchFailure", "Launched", "launch_dependent"]

_KEPT = 64  # configurations (one a stream) and sets of maps of one plan, at most
# Addresses of a kernel's parameters. Bytes stand for where they lie.
_Parameters: Any = ctypes.c_char_p * 4


class LaunchFailure(Exception):
    """What the driver answered, by its name; launch.py makes a DeviceError of it."""


class Launched(Protocol):
    """What there is to know of a launch but its pointers and its stream: `geometry.Launch` has it."""

    @property
    def build(self) -> KernelBuild: ...

    @property
    def grid(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def cluster(self) -> int: ...

    @property
    def maps(self) -> Maps | None: ...


class ExtendedLaunch:
    """A kernel of (a block of parameters, maps of a, b and the output), with its launch configurations, one for each
    stream that it was used on, and the maps of the operands that it was used with: a call packs four pointers and
    enqueues."""

    __slots__ = ("_configurations", "_driver", "_maps", "function", "launch")

    def __init__(self, function: int, launch: Launched) -> None:
        self._driver = tensor_map.bindings()
        self.function = function  # CUfunction
        self.launch = launch
        self._configurations: dict[tuple[int, bool], Any] = {}
        # The maps' addresses, and the maps, which must live as long.
        self._maps: dict[tuple[int, int, int], tuple[int, int, int, tuple[Any, ...]]] = {}

    def __call__(self, params: bytes, a: int, b: int, out: int, stream: int) -> None:
        """Enqueue it on `stream`; a, b and out are addresses. Raises LaunchFailure."""
        where = (stream, config.dependent_launch)
        configuration = self._configurations.get(where) or self._keep(
            self._configurations, where, self._configure(*where)
        )
        maps = self._maps.get((a, b, out)) or self._keep(self._maps, (a, b, out), self._maps_of(a, b, out))
        # Pointers to the four parameters; the driver copies these before it returns.
        parameters = _Parameters(params, maps[0], maps[1], maps[2])
        (error,) = self._driver.cuLaunchKernelEx(configuration, self.function, ctypes.addressof(parameters), 0)
        if error:
            raise LaunchFailure(error.name)

    @staticmethod
    def _keep(kept: dict[Any, Any], key: Any, value: Any) -> Any:
        if len(kept) >= _KEPT:
            kept.clear()
        kept[key] = value
        return value

    def _maps_of(self, a: int, b: int, out: int) -> tuple[int, int, int, tuple[Any, ...]]:
        shapes = self.launch.maps
        assert shapes is not None
        map_a, map_b = shapes.a.at(a), shapes.b.at(b)
        # Where the kernel does not look at the third map any will do.
        map_out = map_a
        if shapes.rest is not None:
            map_out = shapes.rest.at(b)
        elif shapes.out is not None:
            map_out = shapes.out.at(out)
        return map_a.getPtr(), map_b.getPtr(), map_out.getPtr(), (map_a, map_b, map_out)

    def _configure(self, stream: int, dependent: bool) -> Any:
        chosen = self.launch
        return _configuration(
            self._driver, chosen.grid, chosen.threads, chosen.build.shared_bytes, chosen.cluster, stream, dependent
        )


def launch_dependent(function: int, grid: int, threads: int, params: bytes, stream: int) -> None:
    """Enqueue a kernel (a CUfunction) of one block of parameters that may start while the one before it still ends, and
    waits for it (config.dependent_launch). Raises LaunchFailure."""
    driver = tensor_map.bindings()
    configuration = _configuration(driver, grid, threads, 0, 1, stream, config.dependent_launch)
    parameters = (ctypes.c_char_p * 1)(params)
    (error,) = driver.cuLaunchKernelEx(configuration, function, ctypes.addressof(parameters), 0)
    if error:
        raise LaunchFailure(error.name)


# Shared by plans: numbers of rows differ more than grids do. Nothing changes one after it is made.
@functools.lru_cache(maxsize=1024)
def _configuration(
    driver: Any, grid: int, threads: int, shared_bytes: int, cluster: int, stream: int, dependent: bool
) -> Any:
    result = driver.CUlaunchConfig()
    result.gridDimX, result.gridDimY, result.gridDimZ = grid, 1, 1
    result.blockDimX, result.blockDimY, result.blockDimZ = threads, 1, 1
    result.sharedMemBytes = shared_bytes
    result.hStream = stream
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster, 1, 1
        attributes.append(attribute)
    if dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    result.attrs, result.numAttrs = attributes, len(attributes)
    return result
