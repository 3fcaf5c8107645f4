"""torch.nn.functional.scaled_dot_product_attention under batch_invariant_mode: the formula of eager attention.

    scores  = q @ k.T                      by the mode's contract for bmm, rounded to the operands' type
    scores  = scores * scale               rounded to the operands' type
    scores  = scores + mask                an additive mask; rounded to the wider type of the two
    scores  = -inf                         where a boolean mask is False, or is_causal hides a key
    weights = softmax(scores)              in binary32, rounded once to the operands' type; +0 where all scores are -inf
    out     = weights @ v                  by the contract

These are the operations, roundings and gradients of Hugging Face's attn_implementation="eager". The gradients follow the
formula backwards: dv is a chain over the query rows of a head, and so is dk; heads that share one of k and v are rounded
first and then summed as one row. attention_blocks.py computes it in blocks, with the same bits. Under torch.func and where a
gradient is differentiated again, the formula runs as it stands here, with memory for all scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ... import config
from ...errors import ArgumentError, DTypeError
from ..functions import attention_blocks, functional, ops, route, rows
from ..functions.attention_blocks import Formula
from ..functions.broadcasting import expanded

__all__ = ["HANDLERS", "scaled_dot_product_attention"]

_NAME = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    mode: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """A handler, as in products.py. What it leaves to PyTorch it calls itself, unwatched: else each kernel inside would be
    said to be uncovered again."""
    dropout = dropout_p > 0
    if mode.covers(_NAME, query, key, value) and not dropout:
        q, k, v, mask = ops.autocast(query, key, value, attn_mask)
        if dropout_p == 0 and _fits(q, k, v, mask, enable_gqa):
            return _attend(mode.contract_for("bmm", q.dtype), q, k, v, mask, is_causal, scale, enable_gqa)
    if dropout:
        mode.uncovered(_NAME, "dropout_p > 0", query)
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if not dropout and mode.covers(_NAME, query, key, value):  # PyTorch has not refused it
        mode.uncovered(_NAME, "called in this way", query)
    return result


def _fits(q: Any, k: Any, v: Any, mask: Any, gqa: bool) -> bool:
    """Whether PyTorch takes these operands; what it does not is left to its own message."""
    kept = 3 if gqa else 2
    if min(q.dim(), k.dim(), v.dim()) < kept or not q.dtype == k.dtype == v.dtype:
        return False
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or not q.device == k.device == v.device:
        return False
    if gqa and any(x.shape[-3] == 0 or q.shape[-3] % x.shape[-3] for x in (k, v)):
        return False
    batch = _broadcast([x.shape[:-kept] for x in (q, k, v)])
    if batch is None or mask is None:
        return batch is not None
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or mask.device != q.device:
        return False
    scores = (*batch, *q.shape[-kept:-1], k.shape[-2])
    return mask.dtype in (torch.bool, torch.float32, q.dtype) and _broadcast([mask.shape, scores]) == scores


def _broadcast(shapes: Sequence[Any]) -> tuple[Any, ...] | None:
    result: list[Any] = []
    for at in range(1, max(len(shape) for shape in shapes) + 1):
        size = 1
        for shape in shapes:
            if len(shape) >= at and shape[-at] != 1:
                if size not in (1, shape[-at]):
                    return None
                size = shape[-at]
        result.insert(0, size)
    return tuple(result)


def _attend(
    contract: str | None, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None, gqa: bool
) -> Any:
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0
    kept = 3 if gqa else 2
    batch = _broadcast([x.shape[:-kept] for x in (q, k, v)])
    q, k, v = (_expand(x, (*batch, *x.shape[-kept:])) for x in (q, k, v))  # type: ignore[misc]
    if gqa and k.shape[-3] != v.shape[-3]:
        k, v = _repeated(k, q.shape[-3]), _repeated(v, q.shape[-3])
    frozen = route.freeze(contract, q.dtype, q.device, config._stated)
    matrices = q.dim() == 2
    if matrices:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if not torch.compiler.is_compiling() and route.transformed():
        out = _by_formula(q, k, v, mask, float(scale), bool(causal), frozen)
    else:
        out = torch.ops.detkern.attention.default(q, k, v, mask, float(scale), bool(causal), frozen)
    return out.squeeze(0) if matrices else out


def _expand(x: Any, shape: tuple[Any, ...]) -> Any:
    return x if tuple(x.shape) == shape else expanded(x, shape)


def _repeated(x: Any, heads: Any) -> Any:
    """Each head of x [.., H, S, E] as often as query heads share it."""
    if x.shape[-3] == heads:
        return x
    group = heads // x.shape[-3]
    return expanded(x.unsqueeze(-3), (*x.shape[:-2], group, *x.shape[-2:])).flatten(-4, -3)


def _by_formula(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, contract: str | None) -> Any:
    """The formula in differentiable operations, with memory for all scores."""
    k, v = _repeated(k, q.shape[-3]), _repeated(v, q.shape[-3])
    if not k.shape[-2]:
        return functional.matmul(q @ k.mT, v, contract=contract)
    scores = functional.matmul(q, k.mT, contract=contract) * scale
    hidden = None
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    if mask is not None and mask.dtype is torch.bool:
        hidden = ~mask if hidden is None else hidden | ~mask
    elif mask is not None:
        scores = scores + _expand(mask, tuple(scores.shape))
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


def _forward(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, contract: str | None = None) -> Any:
    with torch.no_grad():
        q, k, v, mask = (None if x is None else x.detach() for x in (q, k, v, mask))
        return attention_blocks.forward(q, k, v, mask, _formula(scale, causal, contract, q))


def _fake_forward(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, contract: str | None = None) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any, needs: Any, scale: float, causal: bool, contract: str | None = None
) -> Any:
    with torch.no_grad():
        dout, q, k, v, mask = (None if x is None else x.detach() for x in (dout, q, k, v, mask))
        formula = _formula(scale, causal, contract, q)
        found = attention_blocks.backward(dout.to(q.dtype), q, k, v, mask, formula, tuple(needs))
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _fake_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any, needs: Any, scale: float, causal: bool, contract: str | None = None
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
            return *_differentiable(dout, operands, needs, settings), None, None, None
        found = torch.ops.detkern.attention_backward.default(dout, *operands, needs, *settings)
    return *(x if need else None for x, need in zip(found, needs, strict=True)), None, None, None


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


def _forward_vmap(info: Any, in_dims: Any, q: Any, k: Any, v: Any, mask: Any, *settings: Any) -> tuple[Any, int]:
    q, k, v, mask = _front(info.batch_size, in_dims[:4], (q, k, v, mask))
    return torch.ops.detkern.attention.default(q, k, v, _batched_mask(mask, q.dim()), *settings), 0


def _backward_vmap(
    info: Any, in_dims: Any, dout: Any, q: Any, k: Any, v: Any, mask: Any, needs: Any, *settings: Any
) -> tuple[Any, Any]:
    dout, q, k, v, mask = _front(info.batch_size, in_dims[:5], (dout, q, k, v, mask))
    found = torch.ops.detkern.attention_backward.default(dout, q, k, v, _batched_mask(mask, q.dim()), needs, *settings)
    if needs[3]:
        found = (*found[:3], found[3].reshape(mask.shape))
    return tuple(found), tuple(0 if need else None for need in needs)


_SETTINGS = "float scale, bool is_causal, str? contract=None)"
_BACKWARD = f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, bool[4] needs, {_SETTINGS}"
for _op, _schema, _kernel, _fake, _rule, _vmap in (
    (
        "attention", f"(Tensor q, Tensor k, Tensor v, Tensor? mask, {_SETTINGS} -> Tensor",
        _forward, _fake_forward, _gradients, _forward_vmap,
    ),
    (
        "attention_backward", f"{_BACKWARD} -> (Tensor, Tensor, Tensor, Tensor)",
        _backward, _fake_backward, _refuse, _backward_vmap,
    ),
):  # fmt: skip
    ops.library.define(_op + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    ops.library.impl(_op, ops.guarded(_kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"detkern::{_op}", ops.guarded(_fake), lib=ops.library)
    torch.library.register_autograd(
        f"detkern::{_op}", _rule, setup_context=_setup if _rule is _gradients else None, lib=ops.library
    )
    torch.library.register_vmap(f"detkern::{_op}", _vmap, lib=ops.library)


HANDLERS = {_NAME: scaled_dot_product_attention}
