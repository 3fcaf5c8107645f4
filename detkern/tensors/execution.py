"""Where a call runs: what adapters find out and backends are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .view import Device, TensorView

__all__ = ["Execution"]


@dataclass(frozen=True)
class Execution:
    """Where a call runs: the caller's device and stream, and its allocator for scratch memory.

    stream:   the raw handle of the caller's current stream (0 is the default stream; always 0 on the CPU).
    allocate: bytes -> a writable one-byte-element view from the caller's own allocator, valid until the work that was
              enqueued on `stream` so far has finished.
    """

    device: Device
    stream: int
    allocate: Callable[[int], TensorView]
