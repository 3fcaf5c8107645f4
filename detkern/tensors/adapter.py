"""What detkern needs of an array framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..vocabulary.dtypes import DType
from .execution import Execution
from .view import Device, TensorView

__all__ = ["Adapter"]


class Adapter(ABC):
    """One array framework. `argument` is always the name under which the caller gave the array, for messages."""

    name: str
    # Whether the framework's arrays are ordered on its current stream, the one that `execution` gives.
    stream_ordered = True

    @abstractmethod
    def view(
        self, array: Any, argument: str, stream: int | None = None, planned_copies: list[str] | None = None
    ) -> TensorView:
        """The memory of an operand.

        stream:         the raw handle of the stream that will read it; None: the framework's own current stream. Only
                        frameworks that hand memory over per stream (DLPack) use it.
        planned_copies: None: where no element strides describe the array, a copy is made. A list: nothing is copied,
                        the reason is appended, and the view has the copy's strides and no memory.
        """

    @abstractmethod
    def out_view(self, array: Any, argument: str, stream: int | None = None) -> TensorView:
        """The memory of an array that will be written; it is never a copy. `readonly` tells whether it may be."""

    @abstractmethod
    def execution(self, device: Device) -> Execution:
        """The framework's current stream on `device` and its allocator."""

    @abstractmethod
    def empty(
        self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, execution: Execution
    ) -> TensorView:
        """New row-major memory (`strides` says so) for a result, at an address that 16 divides."""

    def result(self, like: Any, view: TensorView, execution: Execution) -> Any:
        """What the caller gets for memory that `empty` made: an array of the framework of `like`, without a copy."""
        return view.array

    def wrote(self, array: Any) -> None:  # noqa: B027  most frameworks need not be told
        """Told once the caller's own array has been written by work on the stream."""

    def join(self, array: Any, execution: Execution) -> None:  # noqa: B027  DLPack orders when memory is handed over
        """Make the execution's stream wait for whatever produces the array. Not called on the CPU."""

    @abstractmethod
    def release(self, array: Any, view: TensorView, execution: Execution, written: bool) -> None:
        """Make later uses of the array's memory, by readers and by the allocator, wait for the work on the execution's
        stream. Not called on the CPU."""

    @abstractmethod
    def cast(self, argument: str, dtype: DType) -> str:
        """What the caller would write to cast the array."""
