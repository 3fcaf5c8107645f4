"""The ops of products and of the bias gradient, but for their gradients: kernels, fake kernels, vmap.

On plain tensors each gives the bits of the function of `detkern` that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import api
from ...errors import DTypeError, ShapeError
from . import batching, main_grads
from .casting import OPERANDS

__all__ = [
    "batched_bias_gradient", "batched_linear", "batched_matmul", "bias_gradient", "bias_gradient_accumulate",
    "fake_bias_gradient",
    "fake_linear", "fake_matmul", "fake_nothing", "linear", "matmul", "matmul_accumulate",
]  # fmt: skip

Call = Callable[..., Any]
Dims = Sequence[int | None]


def linear(
    x: Any, weight: Any, bias: Any, main_grad: Any, bias_main_grad: Any, contract: Any, out_dtype: Any, backend: Any
) -> Any:
    return api.linear(x, weight, bias, out_dtype=out_dtype, contract=contract, backend=backend)


def matmul(a: Any, b: Any, contract: Any, out_dtype: Any, backend: Any) -> Any:
    return api.gemm(a, b, out_dtype=out_dtype, contract=contract, backend=backend)


def bias_gradient(dc: Any, out_dtype: Any, backend: Any) -> Any:
    return api.bias_gradient(dc, out_dtype=out_dtype, backend=backend)


def matmul_accumulate(out: Any, a: Any, b: Any, contract: Any, backend: Any) -> None:
    out = main_grads.running_destination(out)
    if out is not None:
        api.gemm(a, b, out=out, accumulate=True, contract=contract, backend=backend)


def bias_gradient_accumulate(out: Any, dc: Any, backend: Any) -> None:
    out = main_grads.running_destination(out)
    if out is not None:
        api.bias_gradient(dc, out=out, accumulate=True, backend=backend)


def _check_operands(first: Any, first_name: str, second: Any, second_name: str) -> None:
    for tensor, name in ((first, first_name), (second, second_name)):
        if tensor.dtype not in OPERANDS:
            raise DTypeError(f"{name} is {tensor.dtype}; detkern takes float32, float16 and bfloat16")
        if tensor.dim() == 0:
            raise ShapeError(f"{name} has no dimensions; give at least one, as in {name}.reshape(1)")
    if first.dtype != second.dtype:
        raise DTypeError(
            f"{first_name} is {first.dtype} and {second_name} is {second.dtype}, and operands of different types are "
            f"not "
            f"mixed: cast {second_name} to {first.dtype} or {first_name} to {second.dtype}"
        )


def fake_linear(
    x: Any, weight: Any, bias: Any, main_grad: Any, bias_main_grad: Any, contract: Any, out_dtype: Any, backend: Any
) -> Any:
    _check_operands(x, "x", weight, "weight")
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit: [.., K] and [N, K] are needed")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
        raise ShapeError(f"bias has shape {list(bias.shape)}; weight {list(weight.shape)} needs [{weight.shape[0]}]")
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


def fake_matmul(a: Any, b: Any, contract: Any, out_dtype: Any, backend: Any) -> Any:
    _check_operands(a, "a", b, "b")
    if a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        raise ShapeError(f"a {list(a.shape)} and b {list(b.shape)} do not fit: a ends in K, b is [.., K, N]")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty(
        (*batch, *(a.shape[-2:-1] if a.dim() > 1 else ()), *(b.shape[-1:] if b.dim() > 1 else ())),
        dtype=out_dtype or a.dtype,
    )


def fake_bias_gradient(dc: Any, out_dtype: Any, backend: Any) -> Any:
    return dc.new_empty(dc.shape[-1:], dtype=out_dtype or dc.dtype)


def fake_nothing(*arguments: Any) -> None:
    return None


def batched_linear(
    call: Call,
    size: int,
    dims: Dims,
    x: Any,
    weight: Any,
    bias: Any,
    main_grad: Any,
    bias_main_grad: Any,
    *settings: Any,
) -> tuple[Any, int]:
    batching.refuse_main_grads(main_grad, bias_main_grad)

    def one(x: Any, weight: Any, bias: Any) -> Any:
        return call(x, weight, bias, None, None, *settings)

    return batching.linear(one, size, dims[:3], x, weight, bias)


def batched_matmul(call: Call, size: int, dims: Dims, a: Any, b: Any, *settings: Any) -> tuple[Any, int]:
    return batching.matmul(lambda a, b: call(a, b, *settings), dims, a, b)


def batched_bias_gradient(call: Call, size: int, dims: Dims, dc: Any, *settings: Any) -> tuple[Any, int]:
    return batching.each(lambda dc: call(dc, *settings), size, dims[:1], dc)
