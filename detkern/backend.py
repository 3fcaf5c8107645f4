"""What a backend is. registry.py holds the table of those that exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .contracts import Contract
    from .dtypes import DType
    from .operations.bias_gradient.problem import ColumnSumProblem
    from .operations.block_scaled.problem import BlockScaledProblem
    from .operations.gemm.problem import GemmProblem
    from .operations.rows.problem import RowProblem
    from .tensors import Device, TensorView

__all__ = ["Backend", "Execution", "Kernel"]


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


@dataclass(frozen=True)
class Kernel:
    """What would run, for `explain`: the kernel's name, its tile, its launch geometry and its scratch bytes."""

    name: str
    tile: str
    geometry: str
    scratch_bytes: int = 0


class Backend(Protocol):
    """The methods that the registry and the API call. A backend knows problems and views, never torch or jax.

    A backend that offers a contract gives every bit of it; one that cannot refuses.
    """

    name: str
    deterministic: bool

    def unavailable(self, device: Device) -> str | None:
        """Why this backend cannot run on `device` at all, or None where it can. Cheap after the first call."""

    def refuses(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem) -> str | None:
        """Why this backend will not take `problem` though it runs on the device, naming what it can do; or None."""

    def contracts(self, device: Device) -> list[tuple[Contract, DType]]:
        """The pairs of contract and operand type that `refuses` lets pass on `device`."""

    def capability(self, device: Device) -> tuple[int, int] | None:
        """The compute capability of a CUDA device; None elsewhere."""

    def kernel(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem) -> Kernel:
        """What the problem's own method would launch for it."""

    def gemm(
        self,
        problem: GemmProblem,
        a: TensorView,
        b: TensorView,
        out: TensorView,
        bias: TensorView | None,
        execution: Execution,
    ) -> None:
        """Enqueue out = contract(a, b) (+ out) (+ bias) on the execution's stream. Sizes and strides are `problem`'s;
        the views give the pointers of the first elements."""

    def block_scaled_gemm(
        self,
        problem: BlockScaledProblem,
        a: TensorView,
        scale_a: TensorView,
        b: TensorView,
        scale_b: TensorView,
        out: TensorView,
        execution: Execution,
    ) -> None:
        """Enqueue the `fp8-block128` product of quantized blocks on the execution's stream."""

    def column_sum(self, problem: ColumnSumProblem, dc: TensorView, out: TensorView, execution: Execution) -> None:
        """Enqueue out = the ascending binary32 chain over the rows of dc, from +0 or from out, on the execution's
        stream."""

    def rows(
        self, problem: RowProblem, a: TensorView, b: TensorView | None, out: TensorView, execution: Execution
    ) -> None:
        """Enqueue the problem's row operation on the execution's stream; b is None where the kind has one operand."""
