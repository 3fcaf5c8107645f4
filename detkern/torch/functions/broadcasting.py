"""Broadcasting as a step of its own, whose gradient is summed by detkern.

PyTorch sums the gradient of an operand that arithmetic broadcasts below Python, by a reduction whose order depends on
the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch

from . import functional, gradients, main_grads, route, rows

__all__ = ["expand", "expanded", "sum_to", "watched"]


class _Expand(torch.autograd.Function):  # type: ignore[misc]
    """x.expand(shape). With a main_grad the gradient is added to it, by one chain for each element of x over what was
    broadcast, in the order of the result's dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, main_grad: Any) -> Any:
        ctx.shape, ctx.dtype, ctx.main_grad = x.shape, x.dtype, main_grad
        return x.expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        main_grad = ctx.main_grad
        if main_grad is not None:
            main_grads.need_no_graph("detkern.torch.revert(model) before create_graph=True")
            asked = main_grads.asked(ctx.next_functions, main_grad)
            if asked is False:
                return None, None, None
            if asked:
                flat = main_grad if main_grad.dim() == 1 else main_grad.view(-1)
                gradients.accumulate_rows(flat, ctx.next_functions, _lines(dy, ctx.shape), None)
                return None, None, None
        return sum_to(dy, ctx.shape).to(ctx.dtype), None, None

    @staticmethod
    def below(x: Any, shape: Any, main_grad: Any) -> Any:
        return _Expand.apply(x, shape, main_grad)


def _lines(x: Any, shape: Any) -> Any:
    """x as [M, N], N the elements of a shape that broadcasts to its own."""
    kept = _kept(x, shape)
    summed = [d for d in range(x.dim()) if d not in kept]
    return x.permute(*summed, *kept).reshape(-1, shape.numel())


def _kept(x: Any, shape: Any) -> list[int]:
    lead = x.dim() - len(shape)
    return [i + lead for i, n in enumerate(shape) if not (n == 1 and x.shape[i + lead] != 1)]


def expand(x: Any, shape: Any) -> Any:
    """x.expand(shape), recorded, with its gradient summed by detkern; of a marked parameter added to its main_grad."""
    main_grad = functional.gathered(x, "a parameter")
    if main_grad is not None and main_grad.dim() != 1 and not main_grad.is_contiguous():
        main_grad = None
    return _Expand.apply(x, shape, main_grad)


def expanded(x: Any, shape: Any) -> Any:
    """x.expand(shape), whose gradient is summed by detkern where that is not the compiler's to do."""
    summed = torch.is_grad_enabled() and x.requires_grad and not watched()
    return expand(x, shape) if summed else x.expand(shape)


def watched() -> bool:
    """Whether a compiler or a transform is at work."""
    return torch.compiler.is_compiling() or route.transformed()


def sum_to(x: Any, shape: Any) -> Any:
    """x summed, in float32, to a shape that broadcasts to its own.

    To [N] by the chain of the bias gradient, which accumulates; else what was broadcast is one row of `rows.sum`.
    """
    kept = _kept(x, shape)
    summed = [d for d in range(x.dim()) if d not in kept]
    if not summed:
        return x
    if len(shape) == 1 and kept:
        return gradients.bias_gradient(x, torch.float32, None)
    moved = x.permute(*kept, *summed).flatten(len(kept))
    return rows.sum(moved, out_dtype=torch.float32).reshape(shape)
