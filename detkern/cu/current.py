"""What every launch has around it: the problem's device made current, faults as DeviceError, scratch memory. Imports
CuPy, so it comes in once a device is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from cupy import ndarray
from cupy.cuda import driver, runtime

from ..errors import DeviceError
from ..operations.problem import Problem
from ..tensors.execution import Execution
from ..tensors.view import TensorView
from .extended_launch import LaunchFailure

__all__ = ["on_device", "scratch_memory"]

_Arguments = TypeVarTuple("_Arguments")
_T = TypeVar("_T")

# Scratch memory that captured graphs refer to. CuPy's pool would hand it to others while a graph may still be replayed
# (PyTorch gives each graph a pool of its own); nothing tells when a graph is gone, so it stays for good.
_captured: list[Any] = []


def on_device(
    problem: Problem,
    call: Callable[[*_Arguments], _T],
    *arguments: *_Arguments,
) -> _T:
    """call(*arguments) while the problem's device, and its primary context, are current in this thread; the earlier
    device is afterwards.

    Raises DeviceError where the device or its driver reports a fault.
    """
    # No context manager: entering and leaving one takes as long as a third of a launch.
    index = problem.device.index
    try:
        before = runtime.getDevice()
        # A thread that has made no CUDA call yet has no context, even on the right device.
        if before != index or not driver.ctxGetCurrent():
            runtime.setDevice(index)
        try:
            return call(*arguments)
        finally:
            if before != index:
                runtime.setDevice(before)
    except (driver.CUDADriverError, runtime.CUDARuntimeError, LaunchFailure) as error:
        raise DeviceError(f"cuda:{index} reported {error} at {problem.about}") from error


def scratch_memory(execution: Execution, size: int) -> TensorView:
    """`size` bytes from the caller's allocator, for what is enqueued on the execution's stream now. To be held until it
    is: not every allocator keeps what it gets back (`cupy.cuda.set_allocator(None)`)."""
    scratch = execution.allocate(size)
    if isinstance(scratch.array, ndarray) and runtime.streamIsCapturing(execution.stream):
        _captured.append(scratch.array)
    return scratch
