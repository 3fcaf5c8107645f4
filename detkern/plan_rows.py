"""From checked operands of a row operation to a plan. As in plan.py, no data is read and plans are kept."""

from __future__ import annotations

from math import prod

from . import registry
from .dtypes import DType
from .errors import DTypeError, ShapeError
from .operations.rows.problem import RowKind, RowProblem, row_problem
from .plan import Plan, on_forget, result_type, result_view
from .tensors import TensorView, contiguous_strides
from .tensors.types import OUTPUTS

__all__ = ["plan_rows"]

_KEPT = 4096
_plans: dict[object, Plan[RowProblem]] = {}
on_forget(_plans.clear)


def plan_rows(
    kind: RowKind,
    names: tuple[str, ...],
    a: TensorView,
    b: TensorView | None,
    width: int | None,
    out: TensorView | None,
    out_dtype: DType | None,
    backend: str | None,
) -> Plan[RowProblem]:
    """The plan of a row operation on views as the caller gave them.

    names: of the operands, for messages. width: of a kind that has no operand with columns.
    """
    key = (
        kind,
        width,
        backend,
        None if out_dtype is None else out_dtype.code,
        a.device,
        _layout(a),
        None if b is None else _layout(b),
        None if out is None else (*_layout(out), out.readonly),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(kind, names, a, b, width, out, out_dtype, backend)
        if len(_plans) >= _KEPT:
            _plans.clear()
        _plans[key] = plan
    return plan


def _layout(view: TensorView) -> tuple[object, ...]:
    return view.shape, view.strides, view.dtype.code, view.pointer & 15


def _make_plan(
    kind: RowKind,
    names: tuple[str, ...],
    a: TensorView,
    b: TensorView | None,
    width: int | None,
    out: TensorView | None,
    out_dtype: DType | None,
    backend: str | None,
) -> Plan[RowProblem]:
    for view, argument in zip((a,) if b is None else (a, b), names, strict=True):
        if view.dtype not in OUTPUTS:
            raise DTypeError(
                f"{argument} is {view.dtype}; {kind.label} takes float32, float16 and bfloat16: cast {argument} to one "
                "of them"
            )
    wide = a if b is None else b
    if not kind.spreads or b is not None:
        argument = names[-1]
        if not wide.shape:
            raise ShapeError(f"{argument} has no dimensions; {kind.label} needs [.., N]")
        lead, width = wide.shape[:-1], wide.shape[-1]
    else:
        lead = a.shape
        assert width is not None
    if b is not None:
        _check_pair(kind, names, a, b)
    shape = lead if kind.reduces else (*lead, width)
    dtype = result_type(out, out_dtype, False, wide.dtype)
    result = result_view(out, shape, dtype, a.device)
    problem = row_problem(
        kind,
        _one_a_row(a) if kind.spreads else a,
        b,
        _one_a_row(result) if kind.reduces else result,
        width,
    )
    chosen = registry.select("rows", problem, backend)
    return Plan(problem, chosen, shape, contiguous_strides(shape), dtype, prod(shape) == 0)


def _check_pair(kind: RowKind, names: tuple[str, ...], a: TensorView, b: TensorView) -> None:
    if kind.spreads:
        if a.shape != b.shape[:-1]:
            raise ShapeError(
                f"{names[0]} has shape {list(a.shape)}; {kind.label} of {names[1]} {list(b.shape)} needs "
                f"{list(b.shape[:-1])}, one number a row"
            )
        return
    if a.shape != b.shape:
        raise ShapeError(
            f"{names[0]} has shape {list(a.shape)} and {names[1]} {list(b.shape)}; {kind.label} needs equal ones"
        )
    if a.dtype != b.dtype:
        raise DTypeError(
            f"{names[0]} is {a.dtype} and {names[1]} is {b.dtype}, and operands of different types are not mixed: cast "
            f"{names[1]} to {a.dtype} or {names[0]} to {b.dtype}"
        )


def _one_a_row(view: TensorView) -> TensorView:
    """A view with a column that is one wide."""
    return TensorView(view.pointer, (*view.shape, 1), (*view.strides, 0), view.dtype, view.device)
