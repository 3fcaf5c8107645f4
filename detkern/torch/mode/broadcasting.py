"""The gradient of an operand that elementwise arithmetic broadcasts, under batch_invariant_mode.

PyTorch sums it in its backward, below Python, by a reduction whose order depends on the number of rows: that of the
row's factor in an RMSNorm, of a norm's weight, of keys repeated for grouped queries. The mode makes the broadcast a
step of its own, with the same values, whose backward sums by `sum_to`. Where nothing is recorded nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..functions import broadcasting
from ..functions.broadcasting import watched

__all__ = ["NAMES", "handler_of"]

# With these names alone, and with an underscore for in place.
_BINARY = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "maximum", "minimum", "where", "pow",
    "rsub", "addcmul", "addcdiv", "lerp",
)  # fmt: skip
_IN_PLACE = ("add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_")
_EXPANDING = ("expand", "expand_as", "broadcast_to")
_OPERATORS = ("__rsub__", "__rdiv__", "__rtruediv__", "__rpow__", "__pow__")
_OUTER = ("outer", "ger")
_TOGETHER = ("broadcast_tensors",)
NAMES = (*_BINARY, *_IN_PLACE, *_EXPANDING, *_OPERATORS, *_OUTER, *_TOGETHER)


def _needs(mode: Any, x: Any) -> bool:
    return bool(
        isinstance(x, torch.Tensor)
        and x.requires_grad
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type in mode.row_devices
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    )


def handler_of(func: Any, name: str) -> Callable[..., Any]:
    """The handler of one function, method or operator of PyTorch's, whose name is `name`."""

    def expand(mode: Any, x: Any, *sizes: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled() or not _needs(mode, x) or named or watched() or not sizes:
            return NotImplemented
        target = func(x.detach(), *sizes).shape
        return broadcasting.expand(x, target) if target != x.shape else NotImplemented

    def arithmetic(mode: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return NotImplemented
        if not any(_needs(mode, x) for x in args) or kwargs.get("out") is not None or watched():
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
            broadcasting.expand(x, target) if i >= kept and _needs(mode, x) and x.shape != target else x
            for i, x in enumerate(args)
        ]
        return func(*operands, **kwargs)

    def outer(mode: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or len(args) != 2 or kwargs or watched():
            return NotImplemented
        if not any(_needs(mode, x) for x in args) or any(x.dim() != 1 for x in args):
            return NotImplemented
        column, row = args[0].unsqueeze(1), args[1].unsqueeze(0)
        shape = (column.shape[0], row.shape[1])
        return broadcasting.expanded(column, shape) * broadcasting.expanded(row, shape)

    def together(mode: Any, *tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
            tensors = tuple(tensors[0])
        if not torch.is_grad_enabled() or not any(_needs(mode, x) for x in tensors) or watched():
            return NotImplemented
        plain = func(*(x.detach() for x in tensors))
        return tuple(
            broadcasting.expand(x, p.shape) if _needs(mode, x) and x.shape != p.shape else x.expand(p.shape)
            for x, p in zip(tensors, plain, strict=True)
        )

    for names, handler in ((_EXPANDING, expand), (_OUTER, outer), (_TOGETHER, together)):
        if name in names:
            return handler
    return arithmetic
