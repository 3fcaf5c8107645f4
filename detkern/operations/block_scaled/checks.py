"""From checked arguments of an FP8 product with scales to its plan. No data is read."""

from __future__ import annotations

from collections.abc import Sequence

from ...dispatch.plan import Planned, new_plan, plans, result_type, result_view
from ...errors import DTypeError, ShapeError
from ...tensors import TensorView
from ...tensors.types import FP8
from ...vocabulary.contracts import FP8_BLOCK128
from ...vocabulary.dtypes import F32, DType
from .problem import block_scaled_problem

__all__ = ["plan_block_scaled"]


def plan_block_scaled(
    a: TensorView,
    scale_a: TensorView,
    b: TensorView,
    scale_b: TensorView,
    out: TensorView | None,
    out_dtype: DType | None,
    accumulate: bool,
    backend: str | None,
) -> Planned:
    """The plan of an `fp8-block128` product, its rows and the shape of its result."""
    # Shapes stay in the key: the scales' own depend on the number of rows.
    key = (
        "block_scaled_gemm", backend, None if out_dtype is None else out_dtype.code, accumulate, a.device.kind,
        a.device.index,
        *((view.shape, view.strides, view.dtype.code, view.pointer & 15) for view in (a, scale_a, b, scale_b)),
        None if out is None else (out.shape, out.strides, out.dtype.code, out.pointer & 15, out.readonly),
    )  # fmt: skip
    plan = plans.get(key) or plans.recall(key)
    if plan is not None and plan.shape is not None:
        return plan, plan.problem.m, plan.shape
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
            f"a {list(a.shape)} has K = {k}, which is not a multiple of {block}; pad a and b with zeros along K"
        )
    _need_shape(scale_a, "scale_a", (m, k // block), f"one scale per row of a and block of {block} k")
    _need_shape(scale_b, "scale_b", (k // block, n), f"one scale per block of {block} k and column of b")
    dtype = result_type(out, out_dtype, accumulate, F32)
    result = result_view(out, (m, n), dtype, a.device)
    problem = block_scaled_problem(FP8_BLOCK128, a, scale_a, b, scale_b, result, accumulate)
    return new_plan(key, problem, backend, dtype, (m, n)), m, (m, n)


def _need_matrix(view: TensorView, argument: str) -> None:
    if len(view.shape) != 2:
        raise ShapeError(f"{argument} has shape {list(view.shape)}; block_scaled_gemm needs two dimensions")


def _need_shape(view: TensorView, argument: str, shape: Sequence[int], meaning: str) -> None:
    if view.shape != tuple(shape):
        raise ShapeError(f"{argument} has shape {list(view.shape)}; it needs {list(shape)}, {meaning}")
