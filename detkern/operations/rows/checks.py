"""From checked arguments of a row operation to its plan. No data is read."""

from __future__ import annotations

from ...dispatch.plan import FREE_COLUMNS, FREE_ROWS, Planned, new_plan, plans, result_type, result_view, rows_of
from ...errors import DTypeError, ShapeError
from ...tensors import TensorView
from ...tensors.types import OUTPUTS
from ...vocabulary.dtypes import DType
from .problem import RowKind, one_a_row, operand_names, row_problem

__all__ = ["plan_rows"]


def plan_rows(
    kind: RowKind,
    a: TensorView,
    b: TensorView | None,
    width: int | None,
    out: TensorView | None,
    out_dtype: DType | None,
    backend: str | None,
) -> Planned:
    """The plan of a row operation on views as the caller gave them, its rows and the shape of its result.

    width: of a kind that has no operand with columns.
    """
    code = None if out_dtype is None else out_dtype.code
    if b is None and out is None and len(a.shape) == 2 and not kind.spreads:
        # What most calls are, with nothing done twice: the key is that of the general case below.
        (m, columns), (row, step) = a.shape, a.strides
        plan = plans.get(
            (
                kind, None, backend, code, a.device.kind, a.device.index, columns, None if m == 1 else row, step,
                a.dtype.code, a.pointer & 15, None, None,
            )
        )  # fmt: skip
        if plan is not None and 0 < m < FREE_ROWS and columns < FREE_COLUMNS:
            return plan, m, (m,) if kind.reduces else (m, columns)
    wide = a if b is None else b
    lead = a.shape if kind.spreads else wide.shape[:-1]
    columns = width if width is not None else wide.shape[-1] if wide.shape else 0
    shape = lead if kind.reduces else (*lead, columns)
    first = one_a_row(a) if kind.spreads else a
    rows = rows_of(first.shape, first.strides) if first.shape and columns < FREE_COLUMNS else None
    second: tuple[object, ...] | None = None
    target: tuple[object, ...] | None = None
    if rows is not None and b is not None:
        other = rows_of(b.shape, b.strides)
        if other is None or b.shape[:-1] != lead:
            rows = None
        else:
            stride = None if rows[0] == 1 else other[1]
            second = columns, stride, b.strides[-1], b.dtype.code, b.pointer & 15
    if rows is not None and out is not None:
        lines = one_a_row(out) if kind.reduces else out
        # Whether an output overlaps itself depends on its sizes, unless its rows are dense and apart.
        apart = rows_of(lines.shape, lines.strides) if out.shape == shape and lines.shape else None
        if apart is None or (
            apart[0] > 1 and (apart[1] < 1 if kind.reduces else lines.strides[-1] != 1 or apart[1] < columns)
        ):
            rows = None
        else:
            stride = None if apart[0] == 1 else apart[1]
            target = stride, lines.strides[-1], out.dtype.code, out.pointer & 15, out.readonly
    key: tuple[object, ...]
    if rows is not None:
        key = (
            kind, width, backend, code, a.device.kind, a.device.index, first.shape[-1],
            None if rows[0] == 1 else rows[1], first.strides[-1], a.dtype.code, a.pointer & 15, second, target,
        )  # fmt: skip
    else:
        key = (
            kind, width, backend, code, a.device.kind, a.device.index, _layout(a),
            None if b is None else _layout(b), None if out is None else (*_layout(out), out.readonly),
        )  # fmt: skip
    plan = plans.get(key) or plans.recall(key)
    if plan is not None:
        return plan, plan.problem.m if rows is None else rows[0], shape
    return _make(key, kind, a, b, width, out, out_dtype, backend, rows is not None)


def _layout(view: TensorView) -> tuple[object, ...]:
    return view.shape, view.strides, view.dtype.code, view.pointer & 15


def _make(
    key: object,
    kind: RowKind,
    a: TensorView,
    b: TensorView | None,
    width: int | None,
    out: TensorView | None,
    out_dtype: DType | None,
    backend: str | None,
    free: bool,
) -> Planned:
    """A new plan. free: whether the rows are one dimension in the memory of each."""
    names = operand_names(kind)
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
    views: list[TensorView | None] = [
        one_a_row(a) if kind.spreads else a, b, one_a_row(result) if kind.reduces else result
    ]  # fmt: skip
    if free:
        views = [None if view is None else _lines(view) for view in views]
    first, second, target = views
    assert first is not None
    assert target is not None
    problem = row_problem(kind, first, second, target, width)
    return new_plan(key, problem, backend, dtype, None if free else shape), problem.m, shape


def _lines(view: TensorView) -> TensorView:
    """A view whose rows are one dimension, as a matrix."""
    rows = rows_of(view.shape, view.strides)
    assert rows is not None
    return TensorView(view.pointer, (rows[0], view.shape[-1]), (rows[1], view.strides[-1]), view.dtype, view.device)


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
