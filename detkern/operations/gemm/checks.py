"""From checked arguments of a product to its plan. No data is read."""

from __future__ import annotations

from typing import NamedTuple

from ... import config
from ...dispatch import registry
from ...dispatch.plan import FREE_COLUMNS, FREE_ROWS, Planned, new_plan, plans, result_type, result_view, rows_of
from ...errors import ArgumentError, ContractUnsupported, DTypeError, ShapeError
from ...tensors import TensorView, describe
from ...tensors.types import FP8, OUTPUTS
from ...vocabulary.contracts import FP8_BLOCK128, Contract, get_contract
from ...vocabulary.dtypes import DType
from .problem import gemm_problem

__all__ = ["GEMM", "LINEAR", "Names", "plan_product"]


class Names(NamedTuple):
    """How the caller knows the operands: the function, its left and its right operand."""

    function: str
    left: str
    right: str


GEMM = Names("gemm", "a", "b")
LINEAR = Names("linear", "x", "weight")


def plan_product(
    names: Names,
    left: TensorView,
    right: TensorView,
    trans_left: bool,
    trans_right: bool,
    bias: TensorView | None,
    out: TensorView | None,
    out_dtype: DType | None,
    accumulate: bool,
    contract: str | None,
    backend: str | None,
) -> Planned:
    """The plan of a product of views as the caller gave them, the rows of the product and the shape of its result."""
    shape, strides = left.shape, left.strides
    rank = len(shape)
    rows: tuple[int, int] | None = None  # of the product, as one dimension: how many, and their stride
    target: tuple[object, ...] | None = None
    if len(right.shape) == 2 and (rank == 2 or (rank > 2 and not trans_left)):
        if trans_right:
            (n, depth), (column, down) = right.shape, right.strides
        else:
            (depth, n), (down, column) = right.shape, right.strides
        result: tuple[int, ...]
        if rank > 2:
            k, step = shape[-1], strides[-1]
            result = (shape[0], shape[1], n) if rank == 3 else (*shape[:-1], n)
            rows = rows_of(shape, strides)
        elif trans_left:
            (k, m), (step, row) = shape, strides
            result = m, n
            rows = (m, row) if 0 < m < FREE_ROWS else None
        else:
            (m, k), (row, step) = shape, strides
            result = m, n
            rows = (m, row) if 0 < m < FREE_ROWS else None
        if k != depth or n >= FREE_COLUMNS:
            rows = None
        elif rows is not None and out is not None:
            # Whether an output overlaps itself depends on its sizes, unless its rows are dense and apart.
            apart = rows_of(out.shape, out.strides) if out.shape == result and out.strides[-1] == 1 else None
            if apart is None or (apart[0] > 1 and apart[1] < n):
                rows = None
            else:
                target = None if apart[0] == 1 else apart[1], out.dtype.code, out.pointer & 15, out.readonly
    column_key = None if bias is None else (bias.shape, bias.strides, bias.dtype.code, bias.pointer & 15)
    key: tuple[object, ...]
    if rows is not None:
        m, row = rows
        key = (
            contract, None if contract is not None else config._stated, backend,
            None if out_dtype is None else out_dtype.code, accumulate, left.device.kind, left.device.index,
            k, None if m == 1 else row, step, left.dtype.code, left.pointer & 15,
            n, down, column, right.dtype.code, right.pointer & 15, column_key, target,
        )  # fmt: skip
        plan = plans.get(key) or plans.recall(key)
        if plan is not None:
            return plan, m, result
    else:
        # Batches whose strides hold the number of rows, vectors, and what is refused.
        key = (
            names.function, trans_left, trans_right, contract, config._stated, backend,
            None if out_dtype is None else out_dtype.code, accumulate, left.device.kind, left.device.index,
            shape, strides, left.dtype.code, left.pointer & 15,
            right.shape, right.strides, right.dtype.code, right.pointer & 15, column_key,
            None if out is None else (out.shape, out.strides, out.dtype.code, out.pointer & 15, out.readonly),
        )  # fmt: skip
        plan = plans.get(key) or plans.recall(key)
        if plan is not None and plan.shape is not None:
            return plan, plan.problem.m, plan.shape
    return _make(
        key, names, left, right, trans_left, trans_right, bias, out, out_dtype, accumulate, contract, backend, rows
    )


def _make(
    key: object,
    names: Names,
    left: TensorView,
    right: TensorView,
    trans_left: bool,
    trans_right: bool,
    bias: TensorView | None,
    out: TensorView | None,
    out_dtype: DType | None,
    accumulate: bool,
    contract: str | None,
    backend: str | None,
    rows: tuple[int, int] | None,
) -> Planned:
    """A new plan. rows: of the product, where they are one dimension in memory: how many, and their stride."""
    _check_operand_types(names, left, right)
    if names.function == "linear" and len(right.shape) != 2:
        raise ShapeError(f"{names.right} has shape {list(right.shape)}; linear needs [N, K], two dimensions")
    if names.function in ("gemm_da", "gemm_db"):
        for view, argument in ((left, names.left), (right, names.right)):
            if len(view.shape) < 2:
                raise ShapeError(
                    f"{argument} has shape {list(view.shape)}; {names.function} needs at least two dimensions"
                )
    lines = _matrix(left, trans_left, names.left, vector_is_row=True)
    columns = _matrix(right, trans_right, names.right, vector_is_row=False)
    if lines.shape[-1] != columns.shape[-2]:
        raise _inner_sizes(names, left, right, trans_left, trans_right)
    batch = _broadcast(names, left, right, lines.shape[:-2], columns.shape[:-2])
    m, n = lines.shape[-2], columns.shape[-1]
    shape = batch + ((m,) if len(left.shape) > 1 else ()) + ((n,) if len(right.shape) > 1 else ())

    if bias is not None:
        if accumulate:
            raise ArgumentError(
                "bias together with accumulate=True is refused; add the bias in the last call's own product"
            )
        if bias.dtype not in OUTPUTS:
            raise DTypeError(f"bias is {bias.dtype}; it can be float32, float16 or bfloat16")
        if len(right.shape) < 2 or bias.shape != (n,):
            wanted = (
                f"[{n}], one value per column of the result"
                if len(right.shape) > 1
                else f"a {names.right} with columns"
            )
            raise ShapeError(f"bias has shape {list(bias.shape)}; {names.function} needs {wanted}")
    dtype = result_type(out, out_dtype, accumulate, left.dtype)
    result = result_view(out, shape, dtype, left.device)
    configured = None if contract is not None else config.configured_contract(left.dtype)
    chosen = _contract(names, left, contract, configured, backend)
    if rows is not None:
        m, row = rows
        lines = TensorView(left.pointer, (m, lines.shape[-1]), (row, lines.strides[-1]), left.dtype, left.device)
        stride = n if out is None else (rows_of(out.shape, out.strides) or (m, n))[1]
        target = TensorView(result.pointer, (m, n), (stride, 1), dtype, result.device)
    else:
        lines, columns = _expand(lines, batch), _expand(columns, batch)
        target = _result_matrix(result, len(left.shape) > 1, len(right.shape) > 1)
    problem = gemm_problem(chosen, lines, columns, target, bias, accumulate)
    plan = new_plan(key, problem, backend, dtype, None if rows is not None else shape)
    return plan, problem.m, shape


def _check_operand_types(names: Names, left: TensorView, right: TensorView) -> None:
    for view, argument in ((left, names.left), (right, names.right)):
        if view.dtype in FP8:
            raise DTypeError(
                f"{argument} is {view.dtype}, which needs scales: use detkern.api.block_scaled_gemm, or cast "
                f"{argument} to float16 or bfloat16 first (exact)"
            )
    if left.dtype != right.dtype:
        raise DTypeError(
            f"{names.left} is {left.dtype} and {names.right} is {right.dtype}, and operands of different types are not "
            f"mixed: cast {names.right} to {left.dtype} or {names.left} to {right.dtype}"
        )


def _matrix(view: TensorView, transpose: bool, argument: str, vector_is_row: bool) -> TensorView:
    """The stack of matrices that an operand stands for, as numpy.matmul reads it."""
    shape, strides = view.shape, view.strides
    if not shape:
        raise ShapeError(f"{argument} has no dimensions; give at least one, as in {argument}.reshape(1)")
    if len(shape) == 1:
        if transpose:
            raise ArgumentError(
                f"trans_{argument}=True needs two dimensions or more; {argument} has shape {list(shape)}"
            )
        shape, strides = ((1, *shape), (0, *strides)) if vector_is_row else ((*shape, 1), (*strides, 0))
    elif transpose:
        shape, strides = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
    return TensorView(view.pointer, shape, strides, view.dtype, view.device)


def _inner_sizes(names: Names, left: TensorView, right: TensorView, trans_left: bool, trans_right: bool) -> ShapeError:
    sizes = f"{names.left} {list(left.shape)} and {names.right} {list(right.shape)} do not fit"
    k = left.shape[-2 if trans_left else -1]
    if names.function == "linear":
        text = f"{sizes}: {names.left} ends in K = {k}, {names.right} is [N, K] with K = {right.shape[1]}"
        hint = f"; if {names.right} is [K, N], give {names.right}.T" if right.shape[0] == k else ""
        return ShapeError(text + hint)
    other = right.shape[0] if len(right.shape) == 1 else right.shape[-1 if trans_right else -2]
    if names.function == "gemm_da":
        return ShapeError(f"{sizes}: gemm_da takes dc [.., M, N] and b [.., K, N], here with N = {k} and {other}")
    if names.function == "gemm_db":
        return ShapeError(f"{sizes}: gemm_db takes a [.., M, K] and dc [.., M, N], here with M = {k} and {other}")
    flags = "".join(f", trans_{x}=True" for x, on in ((names.left, trans_left), (names.right, trans_right)) if on)
    text = f"{sizes}{flags}: K is {k} in {names.left} and {other} in {names.right}"
    if len(right.shape) > 1 and right.shape[-2 if trans_right else -1] == k:
        text += f"; trans_{names.right}={not trans_right} would fit"
    elif len(left.shape) > 1 and left.shape[-1 if trans_left else -2] == other:
        text += f"; trans_{names.left}={not trans_left} would fit"
    return ShapeError(text)


def _broadcast(
    names: Names, left: TensorView, right: TensorView, first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[int, ...]:
    """The batch dimensions of the result, by NumPy's rule."""
    rank = max(len(first), len(second))
    batch = []
    for x, y in zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True):
        if x != y and x != 1 and y != 1:
            raise ShapeError(
                f"{names.left} {list(left.shape)} and {names.right} {list(right.shape)} have batch dimensions "
                f"{list(first)} and {list(second)}, which do not broadcast: each pair must be equal, or one of them 1"
            )
        batch.append(y if x == 1 else x)
    return tuple(batch)


def _expand(view: TensorView, batch: tuple[int, ...]) -> TensorView:
    """The view with the batch dimensions of the result; broadcast ones get stride 0."""
    missing = len(batch) - (len(view.shape) - 2)
    own = zip(batch[missing:], view.shape[:-2], view.strides[:-2], strict=True)
    strides = (0,) * missing + tuple(step if size == wanted else 0 for wanted, size, step in own) + view.strides[-2:]
    return TensorView(view.pointer, batch + view.shape[-2:], strides, view.dtype, view.device)


def _result_matrix(view: TensorView, has_rows: bool, has_columns: bool) -> TensorView:
    """The result with the row or column that a one-dimensional operand left out."""
    shape, strides = view.shape, view.strides
    if not has_columns:
        shape, strides = (*shape, 1), (*strides, 0)
    if not has_rows:
        shape, strides = (*shape[:-1], 1, shape[-1]), (*strides[:-1], 0, strides[-1])
    return TensorView(view.pointer, shape, strides, view.dtype, view.device)


def _contract(
    names: Names, left: TensorView, asked: str | None, configured: Contract | None, backend: str | None
) -> Contract:
    if asked is not None and backend == "native":
        raise ContractUnsupported("backend='native' follows no contract; leave contract away, or leave backend away")
    chosen = registry.contract_for(left.dtype, left.device, None if asked is None else get_contract(asked), configured)
    if left.dtype not in chosen.operands:
        takes = " and ".join(dtype.short for dtype in chosen.operands)
        hint = "use detkern.api.block_scaled_gemm for it" if chosen is FP8_BLOCK128 else "contract='fma' takes it"
        raise ContractUnsupported(
            f"contract={chosen.name!r} takes {takes} operands, {names.left} is {describe(left)}; {hint}"
        )
    return chosen
