"""From checked arguments to a plan: the problem, the backend that takes it, and what the result will be.

A plan depends on shapes, strides, types, alignment and flags, never on data, so it is kept and used again. All errors
that a call can give before its launch are raised here or in tensors/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

from . import config, registry
from .backend import Backend
from .contracts import FP8_BLOCK128, Contract, get_contract
from .dtypes import F32, DType
from .errors import ArgumentError, ContractUnsupported, DTypeError, ShapeError
from .operations.bias_gradient.problem import ColumnSumProblem, column_sum_problem
from .operations.block_scaled.problem import BlockScaledProblem, block_scaled_problem
from .operations.gemm.problem import GemmProblem, gemm_problem
from .operations.rows.problem import RowProblem
from .tensors import Device, TensorView, contiguous_strides, describe
from .tensors.overlap import self_overlapping
from .tensors.types import FP8, OUTPUTS

__all__ = [
    "Names", "Plan", "forget_plans", "on_forget", "plan_block_scaled", "plan_column_sum", "plan_gemm", "result_type",
    "result_view",
]  # fmt: skip

_P = TypeVar("_P", GemmProblem, BlockScaledProblem, ColumnSumProblem, RowProblem)

# Plans kept at once; when there are more, all are forgotten (a loop over that many shapes gains nothing from any).
_KEPT = 4096
_plans: dict[object, Plan[Any]] = {}
_derived: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Names:
    """How the caller knows the operands: the function, its left and its right operand."""

    function: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class Plan(Generic[_P]):
    """What one kind of call will do. shape, strides and dtype are those of a new result."""

    problem: _P
    backend: Backend
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    empty: bool


def forget_plans() -> None:
    """Drop every plan, after the table of backends or what a backend offers has changed."""
    _plans.clear()
    for forget in _derived:
        forget()


def on_forget(forget: Callable[[], None]) -> None:
    """Have `forget` called with the plans' own end, for whoever keeps something that was made of them."""
    _derived.append(forget)


def plan_gemm(
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
) -> Plan[GemmProblem]:
    """The plan of a product of views as the caller gave them."""
    configured = None if contract is not None else config.configured_contract(left.dtype)
    key = (
        names.function,
        trans_left,
        trans_right,
        accumulate,
        contract,
        None if configured is None else configured.name,
        backend,
        None if out_dtype is None else out_dtype.code,
        left.device,
        left.shape,
        left.strides,
        left.dtype.code,
        left.pointer & 15,
        right.shape,
        right.strides,
        right.dtype.code,
        right.pointer & 15,
        None if bias is None else (bias.shape, bias.strides, bias.dtype.code, bias.pointer & 15),
        None if out is None else (out.shape, out.strides, out.dtype.code, out.pointer & 15, out.readonly),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(
            names, left, right, trans_left, trans_right, bias, out, out_dtype, accumulate, contract, configured, backend
        )
        _keep(key, plan)
    return plan


def _keep(key: object, plan: Plan[Any]) -> None:
    if len(_plans) >= _KEPT:
        _plans.clear()
    _plans[key] = plan


def _make_plan(
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
    configured: Contract | None,
    backend: str | None,
) -> Plan[GemmProblem]:
    _check_operand_types(names, left, right)
    if names.function == "linear" and len(right.shape) != 2:
        raise ShapeError(f"{names.right} has shape {list(right.shape)}; linear needs [N, K], two dimensions")
    if names.function in ("gemm_da", "gemm_db"):
        for view, argument in ((left, names.left), (right, names.right)):
            if len(view.shape) < 2:
                raise ShapeError(
                    f"{argument} has shape {list(view.shape)}; {names.function} needs at least two dimensions"
                )
    rows = _matrix(left, trans_left, names.left, vector_is_row=True)
    columns = _matrix(right, trans_right, names.right, vector_is_row=False)
    if rows.shape[-1] != columns.shape[-2]:
        raise _inner_sizes(names, left, right, trans_left, trans_right)
    batch = _broadcast(names, left, right, rows.shape[:-2], columns.shape[:-2])
    m, n = rows.shape[-2], columns.shape[-1]
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
    chosen = _contract(names, left, contract, configured, backend)
    problem = gemm_problem(
        chosen,
        _expand(rows, batch),
        _expand(columns, batch),
        _result_matrix(result, len(left.shape) > 1, len(right.shape) > 1),
        bias,
        accumulate,
    )
    chosen_backend = registry.select("gemm", problem, backend)
    return Plan(problem, chosen_backend, shape, contiguous_strides(shape), dtype, 0 in shape)


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


def plan_block_scaled(
    a: TensorView,
    scale_a: TensorView,
    b: TensorView,
    scale_b: TensorView,
    out: TensorView | None,
    out_dtype: DType | None,
    accumulate: bool,
    backend: str | None,
) -> Plan[BlockScaledProblem]:
    """The plan of an `fp8-block128` product."""
    for view, argument in ((a, "a"), (b, "b")):
        if view.dtype not in FP8:
            raise DTypeError(f"{argument} is {view.dtype}; block_scaled_gemm takes float8_e4m3fn and float8_e5m2")
        _need_matrix(view, argument)
    for view, argument in ((scale_a, "scale_a"), (scale_b, "scale_b")):
        if view.dtype != F32:
            raise DTypeError(f"{argument} is {view.dtype}; scales are float32")
        _need_matrix(view, argument)
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k:
        raise ShapeError(f"a {list(a.shape)} and b {list(b.shape)} do not fit: K is {k} in a and {b.shape[0]} in b")
    block = FP8_BLOCK128.k_multiple
    if k % block:
        raise ShapeError(
            f"a {list(a.shape)} has K = {k}, which is no multiple of {block}; pad a and b with zeros along K"
        )
    _need_shape(scale_a, "scale_a", (m, k // block), f"one scale per row of a and block of {block} k")
    _need_shape(scale_b, "scale_b", (k // block, n), f"one scale per block of {block} k and column of b")
    dtype = result_type(out, out_dtype, accumulate, F32)
    result = result_view(out, (m, n), dtype, a.device)
    problem = block_scaled_problem(FP8_BLOCK128, a, scale_a, b, scale_b, result, accumulate)
    chosen = registry.select("block_scaled_gemm", problem, backend)
    return Plan(problem, chosen, (m, n), contiguous_strides((m, n)), dtype, 0 in (m, n))


def _need_matrix(view: TensorView, argument: str) -> None:
    if len(view.shape) != 2:
        raise ShapeError(f"{argument} has shape {list(view.shape)}; block_scaled_gemm needs two dimensions")


def _need_shape(view: TensorView, argument: str, shape: Sequence[int], meaning: str) -> None:
    if view.shape != tuple(shape):
        raise ShapeError(f"{argument} has shape {list(view.shape)}; it needs {list(shape)}, {meaning}")


def plan_column_sum(
    dc: TensorView, out: TensorView | None, out_dtype: DType | None, accumulate: bool, backend: str | None
) -> Plan[ColumnSumProblem]:
    """The plan of a bias gradient."""
    key = (
        "bias_gradient",
        accumulate,
        backend,
        None if out_dtype is None else out_dtype.code,
        dc.device,
        dc.shape,
        dc.strides,
        dc.dtype.code,
        dc.pointer & 15,
        None if out is None else (out.shape, out.strides, out.dtype.code, out.pointer & 15, out.readonly),
    )
    plan: Plan[ColumnSumProblem] | None = _plans.get(key)
    if plan is None:
        plan = _make_column_sum_plan(dc, out, out_dtype, accumulate, backend)
        _keep(key, plan)
    return plan


def _make_column_sum_plan(
    dc: TensorView, out: TensorView | None, out_dtype: DType | None, accumulate: bool, backend: str | None
) -> Plan[ColumnSumProblem]:
    if dc.dtype not in OUTPUTS:
        raise DTypeError(
            f"dc is {dc.dtype}; bias_gradient takes float32, float16 and bfloat16: cast dc to one of them (exact)"
        )
    if not dc.shape:
        raise ShapeError("dc has no dimensions; bias_gradient needs [.., M, N] or [N]")
    if 0 not in dc.shape and prod(dc.shape[:-1]) >= 1 << 63:
        raise ShapeError(f"dc has shape {list(dc.shape)}; bias_gradient takes fewer than 2^63 rows")
    shape = dc.shape[-1:]
    dtype = result_type(out, out_dtype, accumulate, dc.dtype)
    result = result_view(out, shape, dtype, dc.device)
    problem = column_sum_problem(dc, result, accumulate)
    chosen = registry.select("column_sum", problem, backend)
    return Plan(problem, chosen, shape, contiguous_strides(shape), dtype, 0 in shape)
