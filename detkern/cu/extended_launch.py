"""Launches that need attributes: kernels whose operands are tensor maps, started while an earlier kernel still ends.

CuPy's launchKernel takes no launch attributes, so these go through the driver's cuLaunchKernelEx (cuda-bindings).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from .. import config
from .geometry import Launch

__all__ = ["ExtendedLaunch", "LaunchFailure"]

_CONFIGURATIONS = 64  # kept of one plan at most: one a stream


class LaunchFailure(Exception):
    """What the driver answered, by its name; launch.py makes a DeviceError of it."""


@dataclass(frozen=True, slots=True)
class ExtendedLaunch:
    """A kernel of (GemmParams, maps of a, b and the output) and its launch configurations, one for each stream that it was
    used on."""

    function: int  # CUfunction
    launch: Launch
    _configurations: dict[tuple[int, bool], Any] = field(default_factory=dict)

    def __call__(self, params: bytes, a: int, b: int, out: int, stream: int) -> None:
        """Enqueue it on `stream`; a, b and out are addresses. Raises LaunchFailure."""
        from cuda.bindings import driver

        shapes = self.launch.maps
        assert shapes is not None
        key = (stream, config.dependent_launch)
        configuration = self._configurations.get(key)
        if configuration is None:
            configuration = self._configure(*key)
            if len(self._configurations) >= _CONFIGURATIONS:
                self._configurations.clear()
            self._configurations[key] = configuration
        map_a, map_b = shapes.a.at(a), shapes.b.at(b)
        # Where the kernel does not look at the output's map any will do.
        map_out = map_a if shapes.out is None else shapes.out.at(out)
        block = ctypes.c_char_p(params)
        address = ctypes.cast(block, ctypes.c_void_p).value
        parameters = (ctypes.c_void_p * 4)(address, map_a.getPtr(), map_b.getPtr(), map_out.getPtr())
        # The driver copies the parameters before it returns.
        (error,) = driver.cuLaunchKernelEx(configuration, self.function, ctypes.addressof(parameters), 0)
        if error:
            raise LaunchFailure(error.name)

    def _configure(self, stream: int, dependent: bool) -> Any:
        from cuda.bindings import driver

        result = driver.CUlaunchConfig()
        result.gridDimX, result.gridDimY, result.gridDimZ = self.launch.grid, 1, 1
        result.blockDimX, result.blockDimY, result.blockDimZ = self.launch.threads, 1, 1
        result.sharedMemBytes = self.launch.build.shared_bytes
        result.hStream = stream
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            result.attrs, result.numAttrs = [attribute], 1
        return result
