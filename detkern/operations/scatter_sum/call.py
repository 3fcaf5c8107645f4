"""The public function of the scattered sum: checks, plan and run."""

from __future__ import annotations

import operator
from typing import Any

from ...dispatch.call import Call
from ...dispatch.plan import FREE_ROWS, Planned, new_plan, plans, result_type, result_view
from ...errors import ArgumentError, DTypeError, ShapeError
from ...tensors import TensorView, dtype_argument
from ...tensors.types import OUTPUTS
from ...vocabulary.arguments import flag
from ...vocabulary.dtypes import INDICES, DType
from .problem import scatter_sum_problem

__all__ = ["scatter_sum"]


def scatter_sum(
    source: Any,
    index: Any,
    rows: int | None = None,
    *,
    out: Any = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> Any:
    """Rows added to the destinations that an index names: out[index[i]] += source[i], for each element one chain of
    binary32 additions, i ascending. The gradient of an embedding's weight, of a selection of rows, and index_add.

    Accumulating pieces of the sources, in order, into one float32 `out` gives the bits of the whole, wherever it is
    cut.

    Args:
        source: [M, N], float32, float16 or bfloat16; any strides.
        index: [M], int32 or int64, on source's device. What is outside of [0, rows), negative numbers too, names no
        row: its
            source is left out.
        rows: of the result; it may be left out where `out` is given.
        out: [rows, N], as in `detkern.gemm`.
        out_dtype: as in `detkern.gemm`; default source's type.
        accumulate: start each chain at out's value, upcast exactly, instead of +0. A row that nothing names is left as
            it is. An `out` of 16 bits is rounded once, at the end of each call.
        backend: as in `detkern.gemm`; "native" has no such op.

    Returns:
        `out`, or a new array [rows, N] of source's framework. Rows that nothing names are +0 where it does not
        accumulate.

    Raises:
        As `detkern.gemm`.
    """
    call = Call(((source, "source"), (index, "index")), out)
    flag(accumulate, "accumulate")
    if backend is not None and type(backend) is not str:
        raise ArgumentError(f"backend={backend!r} must be a backend's name or None")
    dtype = None if out_dtype is None else dtype_argument(out_dtype)
    values, places = call.views
    return call.complete(_plan(values, places, _row_count(rows, call.out), call.out, dtype, accumulate, backend))


def _row_count(rows: Any, out: TensorView | None) -> int:
    if rows is None:
        if out is None:
            raise ArgumentError("scatter_sum needs rows=, the number of rows of the result, or out=")
        return out.shape[0] if out.shape else 0
    try:
        count = operator.index(rows)
    except TypeError:
        raise ArgumentError(f"rows={rows!r} must be a whole number") from None
    if count < 0:
        raise ArgumentError(f"rows={count} must not be negative")
    return count


def _plan(
    source: TensorView,
    index: TensorView,
    rows: int,
    out: TensorView | None,
    out_dtype: DType | None,
    accumulate: bool,
    backend: str | None,
) -> Planned:
    """The plan, the number of sources and the shape of the result."""
    m = source.shape[0] if source.shape else 0
    free = len(source.shape) == 2 and 1 < m < FREE_ROWS and index.shape == (m,)
    key = (
        "scatter_sum", rows, accumulate, backend, None if out_dtype is None else out_dtype.code,
        source.device.kind, source.device.index, source.shape[1:] if free else source.shape, source.strides,
        source.dtype.code,
        source.pointer & 15, None if free else index.shape, index.strides, index.dtype.code, index.pointer & 15,
        None if out is None else (out.shape, out.strides, out.dtype.code, out.pointer & 15, out.readonly),
    )  # fmt: skip
    plan = plans.get(key) or plans.recall(key)
    if plan is not None:
        return plan, m, (rows, source.shape[1])
    _check(source, index)
    shape = (rows, source.shape[1])
    dtype = result_type(out, out_dtype, accumulate and out is None, source.dtype)
    problem = scatter_sum_problem(source, index, result_view(out, shape, dtype, source.device), accumulate)
    return new_plan(key, problem, backend, dtype, None), m, shape


def _check(source: TensorView, index: TensorView) -> None:
    if source.dtype not in OUTPUTS:
        raise DTypeError(
            f"source is {source.dtype}; scatter_sum takes float32, float16 and bfloat16: cast source to one of them "
            "(exact)"
        )
    if index.dtype not in INDICES:
        raise DTypeError(f"index is {index.dtype}; scatter_sum takes int32 and int64")
    if len(source.shape) != 2 or index.shape != source.shape[:1]:
        raise ShapeError(
            f"source has shape {list(source.shape)} and index {list(index.shape)}; scatter_sum needs [M, N] and [M]"
        )
