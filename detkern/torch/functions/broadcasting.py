"""The gradient of an operand that elementwise arithmetic broadcasts, under batch_invariant_mode.

PyTorch sums it in its backward, below Python, by a reduction whose order depends on the number of rows: that of the row's
factor in an RMSNorm, of a norm's weight, of keys repeated for grouped queries. The mode makes the broadcast a step of its
own, with the same values, whose backward sums by `affine.sum_to`. Where nothing is recorded nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import route
from .affine import sum_to

__all__ = ["NAMES", "expanded", "handler_of"]

# With these names alone, and with an underscore for in place.
_BINARY = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "maximum", "minimum", "where", "pow",
    "rsub", "addcmul", "addcdiv", "lerp",
)  # fmt: skip
_IN_PLACE = ("add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_")
_EXPANDING = ("expand", "expand_as", "broadcast_to")
_OPERATORS = ("__rsub__", "__rdiv__", "__rtruediv__", "__rpow__", "__pow__")
NAMES = (*_BINARY, *_IN_PLACE, *_EXPANDING, *_OPERATORS)


class _Expand(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any) -> Any:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return sum_to(dy, ctx.shape).to(ctx.dtype), None


def expanded(x: Any, shape: Any) -> Any:
    """x.expand(shape), whose gradient is summed by detkern where that is not the compiler's to do."""
    return (
        _Expand.apply(x, shape) if torch.is_grad_enabled() and x.requires_grad and not _watched() else x.expand(shape)
    )


def _needs(mode: Any, x: Any) -> bool:
    return bool(
        isinstance(x, torch.Tensor)
        and x.requires_grad
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type in mode.row_devices
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    )


def _watched() -> bool:
    return torch.compiler.is_compiling() or route.transformed()


def handler_of(func: Any, name: str) -> Callable[..., Any]:
    """The handler of one function, method or operator of PyTorch's, whose name is `name`."""

    def expand(mode: Any, x: Any, *sizes: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled() or not _needs(mode, x) or named or _watched() or not sizes:
            return NotImplemented
        target = func(x.detach(), *sizes).shape
        return _Expand.apply(x, target) if target != x.shape else NotImplemented

    def arithmetic(mode: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return NotImplemented
        if not any(_needs(mode, x) for x in args) or kwargs.get("out") is not None or _watched():
            return NotImplemented
        shapes = [x.shape for x in args if isinstance(x, torch.Tensor)]
        if all(shape == shapes[0] for shape in shapes):
            return NotImplemented
        try:
            target = torch.broadcast_shapes(*shapes)
        except RuntimeError:
            return NotImplemented
        kept = 1 if name in _IN_PLACE else 0  # what is changed in place keeps its shape
        operands = [
            _Expand.apply(x, target) if i >= kept and _needs(mode, x) and x.shape != target else x
            for i, x in enumerate(args)
        ]
        return func(*operands, **kwargs)

    return expand if name in _EXPANDING else arithmetic
