"""A driver that only takes notes, in place of cuda.bindings.driver,
for the tests of tensor maps and launches by TMA."""

from __future__ import annotations

import ctypes
import sys
import types
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from detkern.cu import tensor_map

MAP_BYTES = 128


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class _Names:
    """An enumeration of which only the names matter."""

    def __getattr__(self, name: str) -> str:
        return name


class TensorMap:
    """128 bytes that name the call that made them."""

    def __init__(self, number: int) -> None:
        self._memory = ctypes.create_string_buffer(number.to_bytes(8, "little"), MAP_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self._memory)


class _Configuration:
    def __init__(self) -> None:
        self.attrs: list[Any] = []
        self.numAttrs = 0


class _Attribute:
    def __init__(self) -> None:
        self.id = None
        self.value = types.SimpleNamespace(clusterDim=types.SimpleNamespace())


@dataclass(frozen=True)
class Kernel:
    """One cuLaunchKernelEx. maps: the numbers of the maps in the order of the kernel's parameters."""

    configuration: Any
    function: int
    params: bytes
    maps: tuple[int, ...]


@dataclass(eq=False)  # one is what another is not, as modules are
class Bindings:
    """cuda.bindings.driver. failure: what its functions answer."""

    params_bytes: int = 0
    failure: CUresult = CUresult.CUDA_SUCCESS
    maps: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[Kernel] = field(default_factory=list)

    CUtensorMapDataType = _Names()
    CUtensorMapInterleave = _Names()
    CUtensorMapSwizzle = _Names()
    CUtensorMapL2promotion = _Names()
    CUtensorMapFloatOOBfill = _Names()
    CUlaunchAttributeID = _Names()
    CUlaunchConfig = _Configuration
    CUlaunchAttribute = _Attribute
    cuuint32_t = cuuint64_t = int

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[CUresult, TensorMap | None]:
        self.maps.append(arguments)
        return self.failure, None if self.failure else TensorMap(len(self.maps) - 1)

    def cuLaunchKernelEx(self, configuration: Any, function: int, parameters: int, extra: int) -> tuple[CUresult]:
        assert extra == 0
        block, *maps = (ctypes.c_void_p * 4).from_address(parameters)
        numbers = tuple(int.from_bytes(ctypes.string_at(one, 8), "little") for one in maps)
        self.launches.append(Kernel(configuration, function, ctypes.string_at(block, self.params_bytes), numbers))
        return (self.failure,)


def install(monkeypatch: pytest.MonkeyPatch, params_bytes: int = 0) -> Bindings:
    """Put a new one in the place of cuda-bindings, which may be missing."""
    bindings = Bindings(params_bytes)
    module = types.ModuleType("cuda.bindings")
    module.__spec__ = ModuleSpec("cuda.bindings", None)
    module.driver = bindings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)
    monkeypatch.setattr(tensor_map, "bindings", lambda: bindings)
    return bindings
