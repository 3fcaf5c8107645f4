"""beta * input + alpha * product, as torch.addmm has it: fma(beta, input, alpha * acc) on finished accumulators.

docs/contracts.md, "alpha and beta": alpha * acc is rounded to binary32, then one fused multiply-add, then one rounding
to the result's type. PyTorch has no elementwise fma that is one on every device, so it is made of binary64 operations:
the product of two binary32 numbers is exact there, and the sum is rounded to odd, which makes the rounding to binary32
that follows the only one (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd", IEEE Transactions on Computers 57, 2008).
"""

from __future__ import annotations

from typing import Any

import torch

from . import route
from .broadcasting import sum_to
from .registration import Op, call

__all__ = ["OPS", "affine"]


def affine(acc: Any, input: Any, alpha: float, beta: float, out_dtype: Any) -> Any:
    """fma(beta, input, alpha * acc), rounded to out_dtype, with gradients.

    Args:
        acc: [*shape], float32: products with out_dtype=float32.
        input: broadcastable to acc's shape, of any operand type; None where beta is 0 and it needs no gradient.
        alpha, beta: rounded to binary32. Where one is 0 then, what it multiplies is not read, whatever it holds.
        out_dtype: a torch dtype.
    """
    if input is None and alpha == 1:
        return acc.to(out_dtype)
    return call(AFFINE, (acc, input, alpha, beta, out_dtype), acc, acc, input)


def _evaluate(acc: Any, input: Any, alpha: float, beta: float, out_dtype: Any) -> Any:
    """The bits, on plain tensors."""
    if input is not None:
        route.refuse_cut(input, "input")
    total = None if _rounds_to_zero(alpha) else acc if alpha == 1 else acc * alpha
    if input is not None and not _rounds_to_zero(beta):
        x = input.float()
        if total is None:
            total = torch.empty_like(acc).copy_(x if beta == 1 else x * beta)
        else:
            total = total + x if beta == 1 else _fma(x, beta, total)
    elif total is None:
        total = torch.zeros_like(acc)
    nan = torch.full((), 0x7FFFFFFF, dtype=torch.int32, device=acc.device).view(torch.float32)
    total = torch.where(total.isnan(), nan, total)
    if out_dtype is torch.float32:
        return total
    result = total.to(out_dtype)
    nan16 = torch.full((), 0x7FFF, dtype=torch.int16, device=acc.device).view(out_dtype)
    return torch.where(result.isnan(), nan16, result)


def _rounds_to_zero(factor: float) -> bool:
    """In binary32: half of its smallest number is the last that does."""
    return abs(factor) <= 2.0**-150


def _fma(x: Any, factor: float, addend: Any) -> Any:
    """x * factor + addend in float32, rounded once."""
    scalar = torch.full((), factor, dtype=torch.float32, device=x.device).double()
    product, addend = x.double() * scalar, addend.double()
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    # An inexact sum whose last bit is even is moved by one unit towards the exact value, whose bits are odd there. In
    # sign and magnitude the magnitude grows where sum and error have one sign. Infinities and NaN have no finite error.
    bits = total.view(torch.int64)
    step = torch.where((total < 0) == (error < 0), 1, -1)
    inexact = total.isfinite() & error.isfinite() & (error != 0) & (bits & 1 == 0)
    return torch.where(inexact, bits + step, bits).view(torch.float64).float()


def _gradients(ctx: Any, dc: Any) -> tuple[Any, Any]:
    needs_acc, needs_input = ctx.needs_input_grad[:2]
    dc = dc.float()
    dacc = dinput = None
    if needs_acc:
        dacc = dc if ctx.alpha == 1 else dc * ctx.alpha
    if needs_input and ctx.shape is not None:
        scaled = dc if ctx.beta == 1 else dc * ctx.beta
        dinput = sum_to(scaled, ctx.shape).to(ctx.dtype)
    return dacc, dinput


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, input, ctx.alpha, ctx.beta, ctx.out_dtype = inputs
    ctx.shape, ctx.dtype = (None, None) if input is None else (input.shape, input.dtype)
    ctx.full = output.shape


def _jvp(ctx: Any, dacc: Any, dinput: Any, *_: Any) -> Any:
    dacc, dinput = route.tangents((dacc, dinput), (torch.float32, ctx.dtype))
    zero = torch.zeros(ctx.full, device=(dacc if dacc is not None else dinput).device)
    return affine(dacc if dacc is not None else zero, dinput, ctx.alpha, ctx.beta, ctx.out_dtype)


def _batched(call: Any, size: int, dims: Any, acc: Any, input: Any, *settings: Any) -> tuple[Any, int]:
    acc = acc.expand(size, *acc.shape) if dims[0] is None else acc.movedim(dims[0], 0)
    if input is not None and dims[1] is not None:
        input = input.movedim(dims[1], 0)
        input = input.reshape(size, *(1,) * (acc.dim() - input.dim()), *input.shape[1:])
    return call(acc, input, *settings), 0


def _fake(acc: Any, input: Any, alpha: float, beta: float, out_dtype: Any) -> Any:
    return acc.new_empty(acc.shape, dtype=out_dtype)


AFFINE = Op(
    "affine",
    "(Tensor acc, Tensor? input, float alpha, float beta, ScalarType out_dtype) -> Tensor",
    _evaluate,
    _fake,
    setup=_setup,
    backward=_gradients,
    jvp=_jvp,
    vmap=_batched,
)
OPS = (AFFINE,)
