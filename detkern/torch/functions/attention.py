"""Attention as one op, by the formula of eager attention:

    scores  = q @ k.T                      by the contract, rounded to the operands' type
    scores  = scores * scale               rounded to the operands' type
    scores  = scores + mask                an additive mask; rounded to the wider type of the two
    scores  = -inf                         where a boolean mask is False, or is_causal hides a key
    weights = softmax(scores)              in binary32, rounded once to the operands' type; +0 where all scores are -inf
    out     = weights @ v                  by the contract

These are the operations, roundings and gradients of Hugging Face's attn_implementation="eager". The gradients follow
the formula backwards: dv is a chain over the query rows of a head, and so is dk; heads that share one of k and v are
rounded first and then summed as one row. attention_blocks.py computes it in blocks, with the same bits. Under
torch.func and where a gradient is differentiated again, the formula runs as it stands here, with memory for all scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ... import config
from ...errors import ArgumentError, DTypeError
from . import attention_blocks, functional, route, rows
from .attention_blocks import Formula
from .broadcasting import expanded
from .registration import Op

__all__ = ["OPS", "attention", "fitted", "repeated"]


def attention(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, contract: str | None) -> Any:
    """The formula on q [.., H, L, E], k [.., G, S, E] and v [.., G, S, F], whose G is H or divides it; -> [.., H, L,
    F].

    mask: boolean, of q's type or float32, broadcastable to [.., H, L, S]; or None.
    contract: the name of the products' contract; None: as `matmul`.
    """
    frozen = route.freeze(contract, q.dtype, q.device, config._stated)
    if not torch.compiler.is_compiling() and route.transformed():
        return _by_formula(q, k, v, mask, scale, causal, frozen)
    return torch.ops.detkern.attention.default(q, k, v, mask, scale, causal, frozen)


def fitted(x: Any, shape: tuple[Any, ...]) -> Any:
    """x itself, or expanded to a shape."""
    return x if tuple(x.shape) == shape else expanded(x, shape)


def repeated(x: Any, heads: Any) -> Any:
    """Each head of x [.., H, S, E] as often as query heads share it."""
    if x.shape[-3] == heads:
        return x
    group = heads // x.shape[-3]
    return expanded(x.unsqueeze(-3), (*x.shape[:-2], group, *x.shape[-2:])).flatten(-4, -3)


def _by_formula(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, contract: str | None) -> Any:
    """The formula in differentiable operations, with memory for all scores."""
    k, v = repeated(k, q.shape[-3]), repeated(v, q.shape[-3])
    if not k.shape[-2]:
        return functional.matmul(q @ k.mT, v, contract=contract)
    scores = functional.matmul(q, k.mT, contract=contract) * scale
    hidden = None
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    if mask is not None and mask.dtype is torch.bool:
        hidden = ~mask if hidden is None else hidden | ~mask
    elif mask is not None:
        scores = scores + fitted(mask, tuple(scores.shape))
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    dead = scores.detach().amax(-1, keepdim=True) == -math.inf
    # Zeroed before too: the softmax of a dead row is NaN, and so would be its gradient.
    weights = rows.softmax(scores.masked_fill(dead, 0), out_dtype=torch.float32).to(q.dtype).masked_fill(dead, 0)
    return functional.matmul(weights, v, contract=contract)


# The registered ops.


def _formula(scale: float, causal: bool, contract: str | None, q: Any) -> Formula:
    frozen = route.freeze(contract, q.dtype, q.device)
    if frozen is None:
        raise DTypeError(
            f"q is {q.dtype} on {q.device}, for which there is no contract: give float32, float16 or bfloat16"
        )
    return Formula(scale, causal, frozen)


def _forward(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, contract: str | None) -> Any:
    return attention_blocks.forward(q, k, v, mask, _formula(scale, causal, contract, q))


def _fake_forward(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, contract: str | None) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any, needs: Any, scale: float, causal: bool, contract: str | None
) -> Any:
    formula = _formula(scale, causal, contract, q)
    found = attention_blocks.backward(dout.to(q.dtype), q, k, v, mask, formula, tuple(needs))
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _fake_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any, needs: Any, scale: float, causal: bool, contract: str | None
) -> Any:
    return tuple(
        x.new_empty(x.shape) if need else q.new_empty(0) for x, need in zip((q, k, v, mask), needs, strict=True)
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, ctx.scale, ctx.causal, contract = inputs
    ctx.save_for_backward(q, k, v, mask)
    ctx.contract = route.freeze(contract, q.dtype, q.device)


def _gradients(ctx: Any, dout: Any) -> Any:
    operands, needs = ctx.saved_tensors, [bool(need) for need in ctx.needs_input_grad[:4]]
    settings = ctx.scale, ctx.causal, ctx.contract
    with torch.autocast(dout.device.type, enabled=False):
        if torch.is_grad_enabled():  # this gradient is to be differentiated
            return _differentiable(dout, operands, needs, settings)
        found = ATTENTION_BACKWARD.overload(dout, *operands, needs, *settings)
    return [x if need else None for x, need in zip(found, needs, strict=True)]


def _differentiable(dout: Any, operands: Any, needs: list[bool], settings: Any) -> list[Any]:
    # Views of their own: one tensor may be several operands.
    views = [x.view_as(x) if need else x for x, need in zip(operands, needs, strict=True)]
    wanted = [x for x, need in zip(views, needs, strict=True) if need]
    found = iter(torch.autograd.grad(_by_formula(*views, *settings), wanted, dout, create_graph=True))
    return [next(found) if need else None for need in needs]


def _refuse(ctx: Any, *_: Any) -> Any:
    raise ArgumentError(
        "the gradient of a compiled scaled_dot_product_attention cannot be differentiated again: call it uncompiled"
    )


def _front(size: int, dims: Sequence[int | None], tensors: Sequence[Any]) -> list[Any]:
    return [
        x if x is None else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, dims, strict=True)
    ]


def _batched_mask(mask: Any, rank: int) -> Any:
    """A mask whose batch comes first, then as many dimensions as the scores have."""
    return None if mask is None else mask.reshape(mask.shape[0], *(1,) * (rank - mask.dim()), *mask.shape[1:])


def _forward_vmap(
    call: Any, size: int, dims: Any, q: Any, k: Any, v: Any, mask: Any, *settings: Any
) -> tuple[Any, int]:
    q, k, v, mask = _front(size, dims[:4], (q, k, v, mask))
    return call(q, k, v, _batched_mask(mask, q.dim()), *settings), 0


def _backward_vmap(
    call: Any, size: int, dims: Any, dout: Any, q: Any, k: Any, v: Any, mask: Any, needs: Any, *settings: Any
) -> tuple[Any, Any]:
    dout, q, k, v, mask = _front(size, dims[:5], (dout, q, k, v, mask))
    found = call(dout, q, k, v, _batched_mask(mask, q.dim()), needs, *settings)
    if needs[3]:
        found = (*found[:3], found[3].reshape(mask.shape))
    return tuple(found), tuple(0 if need else None for need in needs)


_SETTINGS = "float scale, bool is_causal, str? contract=None"
_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? mask"

ATTENTION = Op(
    "attention",
    f"({_OPERANDS}, {_SETTINGS}) -> Tensor",
    _forward,
    _fake_forward,
    setup=_setup,
    backward=_gradients,
    vmap=_forward_vmap,
)
ATTENTION_BACKWARD = Op(
    "attention_backward",
    f"(Tensor dout, {_OPERANDS}, bool[4] needs, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    backward=_refuse,
    vmap=_backward_vmap,
)
OPS = (ATTENTION, ATTENTION_BACKWARD)
