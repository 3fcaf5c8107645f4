"""Broadcasting as a step of its own, whose gradient is summed by detkern.

PyTorch sums the gradient of an operand that arithmetic broadcasts below Python, by a reduction whose order depends on the number of
rows.
"""

from __future__ import annotations

from typing import Any

import torch

from . import gradients, route, rows

__all__ = ["Expand", "expanded", "sum_to", "watched"]


class Expand(torch.autograd.Function):  # type: ignore[misc]
    """x.expand(shape)."""

    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any) -> Any:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return sum_to(dy, ctx.shape).to(ctx.dtype), None


def expanded(x: Any, shape: Any) -> Any:
    """x.expand(shape), whose gradient is summed by detkern where that is not the compiler's to do."""
    summed = torch.is_grad_enabled() and x.requires_grad and not watched()
    return Expand.apply(x, shape) if summed else x.expand(shape)


def watched() -> bool:
    """Whether a compiler or a transform is at work."""
    return torch.compiler.is_compiling() or route.transformed()


def sum_to(x: Any, shape: Any) -> Any:
    """x summed, in float32, to a shape that broadcasts to its own.

    To [N] by the chain of the bias gradient, which accumulates; else what was broadcast is one row of `rows.sum`.
    """
    lead = x.dim() - len(shape)
    summed = [*range(lead), *(i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1)]
    if not summed:
        return x
    if len(shape) == 1 and summed == list(range(lead)):
        return gradients.bias_gradient(x, torch.float32, None)
    kept = [i for i in range(x.dim()) if i not in summed]
    moved = x.permute(*kept, *summed).flatten(len(kept))
    return rows.sum(moved, out_dtype=torch.float32).reshape(shape)
