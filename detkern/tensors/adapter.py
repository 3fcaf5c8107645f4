"""What detkern needs of an array framework, and which adapter serves which type."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

from ..dtypes import DType
from ..errors import DTypeError
from .execution import Execution
from .view import Device, TensorView

__all__ = ["Adapter", "adapter_for"]


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


_BY_TYPE: dict[type, Adapter] = {}


def adapter_for(array: Any, argument: str) -> Adapter:
    """The adapter of the array's type; DTypeError, naming what would work, where it is no array."""
    adapter = _BY_TYPE.get(type(array))
    if adapter is None:
        adapter = _find(array, argument)
        _BY_TYPE[type(array)] = adapter
    return adapter


def _is(array: Any, module: str, name: str) -> bool:
    """Whether the array is an instance of a framework's class, if the caller has imported that framework."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(array, kind)


def _find(array: Any, argument: str) -> Adapter:
    if _is(array, "numpy", "ndarray"):
        from .numpy import NUMPY

        return NUMPY
    if _is(array, "torch", "Tensor"):
        from .torch import torch_adapter

        return torch_adapter()
    if _is(array, "cupy", "ndarray"):
        from .cupy import cupy_adapter

        return cupy_adapter()
    if _is(array, "jax", "Array"):
        from .jax import jax_adapter

        return jax_adapter()
    if not isinstance(array, type):
        from .foreign import CUDA_ARRAY_INTERFACE, DLPACK

        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") and not _is(array, "numpy", "generic"):
            return DLPACK
        if hasattr(array, "__cuda_array_interface__"):
            return CUDA_ARRAY_INTERFACE
    kind = type(array)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("scipy.sparse"):
        raise DTypeError(f"{argument} is sparse ({name}); make it dense, as in {argument}.toarray()")
    raise DTypeError(f"{argument} is no array but {name}; give an array, as in np.asarray({argument}, np.float32)")
