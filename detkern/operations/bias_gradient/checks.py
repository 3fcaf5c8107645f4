"""From checked arguments of a bias gradient to its plan. No data is read."""

from __future__ import annotations

from math import prod

from ...dispatch.plan import FREE_ROWS, Planned, new_plan, plans, result_type, result_view, rows_of
from ...errors import DTypeError, ShapeError
from ...tensors import TensorView
from ...tensors.types import OUTPUTS
from ...vocabulary.dtypes import DType
from .problem import column_sum_problem

__all__ = ["plan_column_sum"]


def plan_column_sum(
    dc: TensorView, out: TensorView | None, out_dtype: DType | None, accumulate: bool, backend: str | None
) -> Planned:
    """The plan of a bias gradient, the rows that it sums and the shape of its result."""
    shape, strides = dc.shape, dc.strides
    rank = len(shape)
    if rank == 2:
        m, row = shape[0], strides[0]
        rows = (m, row) if 0 < m < FREE_ROWS else None
    else:
        rows = rows_of(shape, strides) if rank else None
    sums = (shape[-1],) if rank else ()
    key: tuple[object, ...] = (
        "bias_gradient", accumulate, backend, None if out_dtype is None else out_dtype.code, dc.device.kind,
        dc.device.index,
        dc.dtype.code, dc.pointer & 15,
        None if out is None else (out.shape, out.strides, out.dtype.code, out.pointer & 15, out.readonly),
    )  # fmt: skip
    if rows is None:
        key += shape, strides
    else:
        key += shape[-1], strides[-1], None if rows[0] == 1 else rows[1]
    plan = plans.get(key) or plans.recall(key)
    if plan is not None:
        return plan, plan.problem.m if rows is None else rows[0], sums
    if dc.dtype not in OUTPUTS:
        raise DTypeError(
            f"dc is {dc.dtype}; bias_gradient takes float32, float16 and bfloat16: cast dc to one of them (exact)"
        )
    if not shape:
        raise ShapeError("dc has no dimensions; bias_gradient needs [.., M, N] or [N]")
    if 0 not in shape and prod(shape[:-1]) >= 1 << 63:
        raise ShapeError(f"dc has shape {list(shape)}; bias_gradient takes fewer than 2^63 rows")
    dtype = result_type(out, out_dtype, accumulate, dc.dtype)
    result = result_view(out, sums, dtype, dc.device)
    summed = dc
    if rows is not None:
        summed = TensorView(dc.pointer, (rows[0], shape[-1]), (rows[1], dc.strides[-1]), dc.dtype, dc.device)
    problem = column_sum_problem(summed, result, accumulate)
    plan = new_plan(key, problem, backend, dtype, None if rows is not None else sums)
    return plan, problem.m, sums
