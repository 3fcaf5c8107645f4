"""Kernels that take one block of parameters (the column sum and the row operations): its fields as the kernel file lays
them out, and a driver that writes down what it is asked to launch."""

from __future__ import annotations

import ctypes
import re
from types import ModuleType
from typing import Any

import pytest

from detkern.abi import mirror
from detkern.cu import loader
from detkern.cu.device import CudaDevice
from detkern.dispatch.backend import Execution
from detkern.tensors import Device, TensorView

DEVICE = Device("cuda", 1)
_TYPES = {"void*": ("Q", 8), "uint32_t*": ("Q", 8), "int64_t": ("q", 8), "int32_t": ("i", 4)}


def fields(module: ModuleType, struct: str, source: str | None = None) -> dict[str, tuple[int, str]]:
    """name -> (offset, struct format) of `struct` in the file of the module's kernel, or another one, laid out as C
    does; and its size."""
    text = re.sub(r"//.*", "", (loader.FOLDER / (source or module.SOURCE)).read_text())
    found_rank = re.search(r"MAX_SUM_RANK = (\d+);", text)
    rank = int(found_rank[1]) if found_rank else 0
    assert not rank or rank == module.MAX_SUM_RANK == mirror.MAX_SUM_RANK
    body = re.search(rf"struct {struct} \{{(.*?)\}};", text, re.DOTALL)[1]
    found, offset = {}, 0
    for kind, names in re.findall(r"(?:const\s+)?(void\*|uint32_t\*|int64_t|int32_t)\s+([^;]+);", body):
        code, size = _TYPES[kind]
        for name in names.split(","):
            stem = re.fullmatch(r"\s*(\w+)(?:\[MAX_SUM_RANK\])?\s*", name)[1]
            count = rank if "[" in name else 1
            assert offset % size == 0, "the struct must need no padding"
            found[stem] = (offset, f"<{count}{code}")
            offset += count * size
    found["size"] = (offset, "")
    return found


def launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType, block_bytes: int) -> list[tuple[Any, ...]]:
    """Puts a driver in the module's place of CUDA's: (function, sizes, stream, block) of each launch."""
    from cupy.cuda import driver, runtime

    calls: list[tuple[Any, ...]] = []

    def launch(function: int, *geometry: Any) -> None:
        *sizes, stream, parameters, _ = geometry
        block = ctypes.cast(ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0], ctypes.POINTER(ctypes.c_char))
        calls.append((function, tuple(sizes), stream, block[:block_bytes]))

    class Function:
        ptr = 77

    device = CudaDevice(1, "Made-up GPU", "uuid", (9, 0), 132, "1.0")
    monkeypatch.setattr(driver, "launchKernel", launch)
    monkeypatch.setattr(driver, "ctxGetCurrent", lambda: 1)
    monkeypatch.setattr(runtime, "getDevice", lambda: 1)
    monkeypatch.setattr(module, "describe", lambda index: device)
    monkeypatch.setattr(module, "load_function", lambda *_: Function)
    return calls


def faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every launch fail as the driver does."""
    from cupy.cuda import driver

    class Fault(Exception):
        pass

    def fails(*_: Any) -> None:
        raise Fault("an illegal address")

    monkeypatch.setattr(driver, "CUDADriverError", Fault)
    monkeypatch.setattr(driver, "launchKernel", fails)


def execution() -> Execution:
    """Stream 9, and no scratch memory to be asked for."""

    def allocate(size: int) -> TensorView:
        raise AssertionError("no scratch is needed")

    return Execution(DEVICE, 9, allocate)
