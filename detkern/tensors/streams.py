"""Order between two CUDA streams, for calls whose operands come from several frameworks. CuPy's runtime does the
work."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from ..errors import DeviceError
from .view import Device

__all__ = ["cupy_runtime", "cupy_stream", "keep", "order", "synchronize"]

# Objects whose memory work in flight still reads, each with the event that follows that work.
_kept: deque[tuple[Any, Any]] = deque()
_lock = threading.Lock()


class _StreamHandle:
    """A raw handle in the protocol by which CUDA libraries hand streams to each other."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def cupy_runtime(device: Device) -> Any:
    """CuPy, imported here if the caller has not; DeviceError where the device is none of CUDA's or CuPy is missing."""
    if device.kind != "cuda":
        raise DeviceError(
            f"arrays of different frameworks on {device} cannot be ordered; give all operands in one framework"
        )
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"arrays on {device} from this framework need CuPy, which does not import: {error}") from None
    return cupy


def cupy_stream(cupy: Any, device: Device, handle: int) -> Any:
    """A CuPy stream object, usable as a context, over a raw handle."""
    from_external = getattr(cupy.cuda.Stream, "from_external", None)
    if from_external is None:  # before CuPy 14
        return cupy.cuda.ExternalStream(handle, device.index)
    return from_external(_StreamHandle(handle))


def _event(cupy: Any, stream: int) -> Any:
    event = cupy.cuda.Event(disable_timing=True)
    cupy.cuda.runtime.eventRecord(event.ptr, stream)
    return event


def order(device: Device, first: int, then: int) -> None:
    """Work enqueued on stream `then` from now on waits for what is on stream `first` now. Both are raw handles."""
    if first == then:
        return
    cupy = cupy_runtime(device)
    with cupy.cuda.Device(device.index):
        event = _event(cupy, first)  # named, so that it lives until the wait is enqueued
        cupy.cuda.runtime.streamWaitEvent(then, event.ptr)


def keep(device: Device, stream: int, owner: Any) -> None:
    """Hold `owner` until the work that is on `stream` now has finished, for producers whose allocators know nothing of
    our stream. In a graph capture the caller must hold the operands for the graph's life anyway, so nothing is held."""
    cupy = cupy_runtime(device)
    with cupy.cuda.Device(device.index):
        if cupy.cuda.runtime.streamIsCapturing(stream):
            return
        event = _event(cupy, stream)
    finished = []
    with _lock:
        _kept.append((event, owner))
        while _kept and _kept[0][0].done:
            finished.append(_kept.popleft())
    # Their destructors may run any code, so they run here, outside of the lock.
    finished.clear()


def synchronize(device: Device, stream: int) -> None:
    """Wait on the host for `stream`, where a consumer has no way to learn which stream to wait for."""
    cupy = cupy_runtime(device)
    with cupy.cuda.Device(device.index):
        if not cupy.cuda.runtime.streamIsCapturing(stream):
            cupy.cuda.runtime.streamSynchronize(stream)
