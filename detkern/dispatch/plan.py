"""Plans: what a call of one layout will do, worked out once and used by every later one.

A plan depends on strides, types, alignment, sizes and flags, never on data, and where the rows of a call are one
dimension in memory not on their number: that is an argument of `run`. NumPy, CuPy and JAX callers, PyTorch's fast path
and the engine find their plans here, under keys that the operation's own module builds (operations/*/checks.py). All
errors that a call can give before its launch are raised there or in tensors/.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Generic, TypeVar

from ..errors import ArgumentError, DTypeError, ShapeError
from ..operations.problem import Operands, Problem
from ..tensors import Device, TensorView, contiguous_strides
from ..tensors.overlap import self_overlapping
from ..tensors.types import OUTPUTS
from ..vocabulary.dtypes import F32, DType
from . import registry
from .backend import Backend, Execution, Implementation
from .plan_cache import PlanCache

__all__ = [
    "FREE_COLUMNS",
    "FREE_ROWS",
    "Plan",
    "Planned",
    "forget_plans",
    "new_plan",
    "on_forget",
    "plans",
    "result_type",
    "result_view",
    "rows_of",
]

P = TypeVar("P", bound=Problem)

_derived: list[Callable[[], None]] = []


class Plan(Generic[P]):
    """What calls of one layout do.

    problem: with the number of rows of the call that made the plan. dtype: of a new result.
    shape:   of the result, where the layout fixes the number of rows; else None.
    run:     the backend's own (see backend.Run), prepared at the first call: until then nothing is compiled or loaded.
    """

    __slots__ = ("backend", "dtype", "implementation", "problem", "run", "shape")

    def __init__(
        self,
        problem: P,
        backend: Backend,
        implementation: Implementation[P],
        dtype: DType,
        shape: tuple[int, ...] | None,
    ) -> None:
        self.problem, self.backend, self.implementation = problem, backend, implementation
        self.dtype, self.shape = dtype, shape
        self.run: Callable[[int, Operands, TensorView, Execution], None] = self._first

    def _first(self, m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        run = self.implementation.prepare(self.problem, execution)
        run(m, operands, out, execution)
        self.run = run


# A plan, the rows of this call, and the shape of its result.
Planned = tuple[Plan[Any], int, tuple[int, ...]]

plans: PlanCache[object, Plan[Any]] = PlanCache(4096)


def new_plan(key: object, problem: P, backend: str | None, dtype: DType, shape: tuple[int, ...] | None) -> Plan[P]:
    """A new plan, by the backend that dispatch chooses or the one named, which is kept. shape: as in Plan."""
    plan = Plan(problem, *registry.select(problem, backend), dtype, shape)
    plans.keep(key, plan)
    return plan


def forget_plans() -> None:
    """Drop every plan, after the table of backends or what a backend offers has changed."""
    plans.clear()
    for forget in _derived:
        forget()


def on_forget(forget: Callable[[], None]) -> None:
    """Have `forget` called with the plans' own end,
    for whoever keeps something that was made of what backends offer."""
    _derived.append(forget)


# Where there are more, sizes have to be checked at each call: a result may go beyond the address space.
FREE_ROWS, FREE_COLUMNS = 1 << 31, 1 << 29


def rows_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int] | None:
    """All dimensions but the last as one: how many rows there are and the stride between them; None where no one stride
    leads through them, where there are none, and where there are very many."""
    rank = len(shape)
    if rank == 2:
        m, row = shape[0], strides[0]
    elif rank == 3 and strides[0] == shape[1] * strides[1] and shape[1] > 1:
        m, row = shape[0] * shape[1], strides[1]
    else:
        m, row = 1, 0
        for size, stride in zip(shape[-2::-1], strides[-2::-1], strict=True):
            if size == 1:
                continue
            if m == 1:
                m, row = size, stride
            elif stride == m * row:
                m *= size
            else:
                return None
    return (m, row) if 0 < m < FREE_ROWS else None


def result_type(out: TensorView | None, out_dtype: DType | None, accumulate: bool, operand: DType) -> DType:
    """The type of a result: out's, else the one asked for, else the operands'."""
    if out is None:
        if accumulate:
            raise ArgumentError("accumulate=True adds to out, so it needs out=, a float32 array of the result's shape")
        return out_dtype or operand
    if out.dtype not in OUTPUTS:
        raise DTypeError(f"out is {out.dtype}; a result can be float32, float16 or bfloat16")
    if out_dtype is not None and out_dtype != out.dtype:
        raise DTypeError(f"out_dtype={out_dtype} but out is {out.dtype}; out decides, so leave out_dtype away")
    if accumulate and out.dtype != F32:
        raise DTypeError(
            f"accumulate=True needs a float32 out, this one is {out.dtype}; its bits are those of the chain's start"
        )
    return out.dtype


def result_view(out: TensorView | None, shape: tuple[int, ...], dtype: DType, device: Device) -> TensorView:
    """The caller's `out`, checked, or a view of the memory that a new result will have."""
    if out is not None:
        _check_out(out, shape)
        return out
    if 0 not in shape and prod(shape) * dtype.itemsize >= 1 << 63:
        raise ShapeError(f"the result would have shape {list(shape)}, beyond the address space; compute it in pieces")
    return TensorView(0, shape, contiguous_strides(shape), dtype, device)


def _check_out(out: TensorView, shape: tuple[int, ...]) -> None:
    """Errors for an `out` of another shape than the result's, or one that cannot be written as it is."""
    if out.shape != shape:
        raise ShapeError(f"out has shape {list(out.shape)}; the result has {list(shape)}, and out is never broadcast")
    if out.readonly:
        raise ArgumentError("out is read-only; give an array that can be written")
    if self_overlapping(out.shape, out.strides):
        raise ArgumentError(
            f"out {list(out.shape)} with strides {list(out.strides)} puts several elements at one address; "
            "give one without overlap"
        )
