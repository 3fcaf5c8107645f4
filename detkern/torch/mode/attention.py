"""torch.nn.functional.scaled_dot_product_attention under batch_invariant_mode: by the formula of
../functions/attention.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..functions.attention import attention, fitted, repeated
from ..functions.casting import autocast

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
    """A handler, as in products.py. What it leaves to PyTorch it calls itself, unwatched: else each kernel inside would
    be said to be uncovered again."""
    dropout = dropout_p > 0
    if mode.covers(_NAME, query, key, value) and not dropout:
        q, k, v, mask = autocast(query, key, value, attn_mask)
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
    heads = q.shape[-3] if gqa else 1
    if gqa and any(heads % x.shape[-3] if x.shape[-3] else heads for x in (k, v)):
        return False
    batch = _broadcast([x.shape[:-kept] for x in (q, k, v)])
    if batch is None or mask is None:
        return batch is not None
    if not isinstance(mask, torch.Tensor) or mask.device != q.device:
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
    q, k, v = (fitted(x, (*batch, *x.shape[-kept:])) for x in (q, k, v))  # type: ignore[misc]
    if gqa and k.shape[-3] != v.shape[-3]:
        k, v = repeated(k, q.shape[-3]), repeated(v, q.shape[-3])
    if mask is not None and mask.dim() < 2:
        mask = mask.reshape(1, -1)
    matrices = q.dim() == 2
    if matrices:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    out = attention(q, k, v, mask, float(scale), bool(causal), contract)
    return out.squeeze(0) if matrices else out


HANDLERS = {_NAME: scaled_dot_product_attention}
