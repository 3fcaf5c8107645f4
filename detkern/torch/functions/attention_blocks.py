"""Scaled dot-product attention and its gradients on plain tensors, a block of heads and query rows at a time.

Every block is the formula of attention.py. A query row's result and its gradient depend on that row alone. The
gradients of keys and values are chains over the query rows of one head, so blocks end where the contract lets a chain
be cut: at multiples of 16 rows it goes on in binary32 from block to block, and a tree's blocks are its own subtrees. So
no bit depends on where the cuts are. `SCORES`, `PIECES` and `MASKED` bound what is held beside operands, results and
gradients; the smallest block is 16 query rows (of a tree 32) of one head against all keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ... import api, rows
from ...vocabulary.contracts import get_contract
from . import eager
from .broadcasting import sum_to

__all__ = ["MASKED", "PIECES", "SCORES", "Formula", "backward", "forward"]

# Bytes: for the scores of a block and what is made of them; for the gradients of keys and values before they are
# rounded and summed over a group of heads; for the gradients of scores before they are summed to those of a mask.
SCORES = 80 << 20
PIECES = 112 << 20
MASKED = 32 << 20
_PER_SCORE = 16  # bytes, at most: the backward holds weights and gradients, in binary32 and in the operands' type
_SUMMED = 1 << 20  # how many gradients of keys or values are summed over their group at once


class Formula(NamedTuple):
    """What is fixed beside the tensors. contract: a name; first: the number of the first query row, for the causal
    mask."""

    scale: float
    causal: bool
    contract: str
    first: int = 0


def forward(q: Any, k: Any, v: Any, mask: Any, formula: Formula) -> Any:
    """softmax(q @ k.T * scale, masked) @ v.

    Args:
        q: [.., H * G, L, E]; G query heads, one after the other, share a head of k and v.
        k: [.., H, S, E], of q's type, with the leading dimensions of q.
        v: [.., H, S, F].
        mask: None, or broadcastable to [.., H * G, L, S]: boolean, True where a key takes part, or added to the scores.

    Returns:
        [.., H * G, L, F], contiguous.
    """
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if not out.numel() or not k.shape[-2]:
        return out.zero_()
    for (queries, results), (keys, values), hiding in _stacks([q, out], [k, v], _ranked(mask, q.dim())):
        step, fit = _fitting(queries, keys)
        pieces = _pieces(queries.shape[3], step, formula.contract)
        for b, h, g in _heads(queries.shape[:3], fit):
            for piece, _ in pieces:
                scores = _Scores(queries[b, h, g, piece], keys[b, h], _cut(hiding, b, h, g, piece), piece, formula)
                api.gemm(scores.weights(q.dtype), values[b, h], out=results[b, h, g, piece], contract=formula.contract)
    return out


def backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any, formula: Formula, needs: tuple[bool, ...]
) -> tuple[Any, Any, Any, Any]:
    """The gradients of q, k, v and mask for dout [.., H * G, L, F]; None where `needs` says that one is not needed.

    A mask's is a sum over that of the scores, which is held as a whole where the mask has their size or is one row for
    all query rows.
    """
    operands = q, k, v, mask
    if not dout.numel() or not k.shape[-2]:
        dq, dk, dv, dmask = (torch.zeros_like(x) if need else None for x, need in zip(operands, needs, strict=True))
        return dq, dk, dv, dmask
    dq, dk, dv = (x.new_empty(x.shape) if need else None for x, need in zip(operands[:3], needs[:3], strict=True))
    dscores = dmask = None
    by_rows = False
    if needs[3]:
        shape, dtype = (*q.shape[:-1], k.shape[-2]), torch.promote_types(q.dtype, mask.dtype)
        fits = math.prod(shape) * dtype.itemsize <= MASKED or tuple(mask.shape) == shape
        by_rows = not fits and mask.shape[-2] == q.shape[-2]
        dscores = None if by_rows else q.new_empty(shape, dtype=dtype)
    for of_queries, of_keys, hiding in _stacks([q, dout, dq, dscores], [k, v, dk, dv], _ranked(mask, q.dim())):
        _Backward(of_queries, of_keys, hiding, formula).run()
    if by_rows:
        dmask = _mask_by_rows(dout, q, k, v, mask, formula)
    elif dscores is not None:
        dmask = sum_to(dscores, mask.shape).to(mask.dtype)
    return dq, dk, dv, dmask


def _mask_by_rows(dout: Any, q: Any, k: Any, v: Any, mask: Any, formula: Formula) -> Any:
    """The gradient of a mask, a few query rows of all heads at a time, whose scores are computed once more."""
    dmask, dtype = mask.new_empty(mask.shape), torch.promote_types(q.dtype, mask.dtype)
    length, keys = q.shape[-2], k.shape[-2]
    step = max(1, MASKED // (math.prod(q.shape[:-2]) * keys * dtype.itemsize))
    for start in range(0, length, step):
        q_rows, dout_rows, mask_rows, to = (x[..., start : start + step, :] for x in (q, dout, mask, dmask))
        dscores = q.new_empty((*q_rows.shape[:-1], keys), dtype=dtype)
        of_queries, of_keys = [q_rows, dout_rows, None, dscores], [k, v, None, None]
        for queries, others, hiding in _stacks(of_queries, of_keys, _ranked(mask_rows, q.dim())):
            _Backward(queries, others, hiding, formula._replace(first=start)).run()
        to.copy_(sum_to(dscores, mask_rows.shape).to(mask.dtype))
    return dmask


class _Scores:
    """The scores of a block [b, h, g, rows, S], scaled and masked, as they enter the softmax.

    hidden: where a boolean or the causal mask hides a key; dead: rows [.., 1] whose every score is -inf.
    """

    def __init__(self, q: Any, k: Any, mask: Any, piece: slice, formula: Formula) -> None:
        scores = eager.matmul(q, k.mT, formula.contract, None, None).mul_(formula.scale)
        self.hidden = None
        if formula.causal:
            columns = torch.arange(k.shape[-2], device=q.device)
            numbers = torch.arange(formula.first + piece.start, formula.first + piece.stop, device=q.device)
            self.hidden = columns > numbers[:, None]
        if mask is not None and mask.dtype is torch.bool:
            self.hidden = ~mask if self.hidden is None else self.hidden.logical_or(~mask)
        elif mask is not None:
            scores = scores + mask
        if self.hidden is not None:
            scores.masked_fill_(self.hidden, -math.inf)
        self.values = scores
        self.dead = scores.amax(-1, keepdim=True) == -math.inf

    def weights(self, dtype: Any) -> Any:
        """Their softmax; a dead row is +0."""
        return rows.softmax(self.values, out_dtype=dtype).masked_fill_(self.dead, 0)


class _Backward:
    """The gradients of one stack [B, H, G, ..], written to dq, dk, dv and dscores, each of which may be None."""

    def __init__(self, of_queries: list[Any], of_keys: list[Any], mask: Any, formula: Formula) -> None:
        self.q, self.dout, self.dq, self.dscores = of_queries
        self.k, self.v, self.dk, self.dv = of_keys
        self.mask, self.formula = mask, formula

    def run(self) -> None:
        batch, heads, group, length, _ = self.q.shape
        keys = self.k.shape[-2]
        step, fit = _fitting(self.q, self.k)
        self.pieces = _pieces(length, step, self.formula.contract)
        held = self._bytes_per_key()
        # Groups as a whole, where their gradients are to be summed.
        wide = max(1, min(fit // group, PIECES // (held * keys)))
        columns = max(1, min(keys, PIECES // held))
        for b, h, _ in _heads((batch, heads, 1), wide):
            for start in range(0, keys, columns):
                self._columns(b, h, slice(start, min(start + columns, keys)), min(group, fit))

    def _bytes_per_key(self) -> int:
        """What is held for a key of one head beside its gradients."""
        group, pieces = self.q.shape[2], len(self.pieces)
        each = self.q.element_size() * group if group > 1 else 0
        if pieces > 1:  # an accumulator, or subtrees that wait for their other halves
            each += 4 if get_contract(self.formula.contract).accumulates is not None else 4 + 2 * pieces.bit_length()
        return max(1, each * int(self.k.shape[-1] + self.v.shape[-1]))

    def _columns(self, b: slice, h: slice, keys: slice, together: int) -> None:
        """The gradients of some keys and values, and in the first pass those of queries and scores."""
        group = self.q.shape[2]
        wholes = [None if x is None else x[b, h, :, keys] for x in (self.dk, self.dv)]
        parts = [x if x is None or group == 1 else x.new_empty((*x.shape[:2], group, *x.shape[3:])) for x in wholes]
        for start in range(0, group, together):
            g = slice(start, min(start + together, group))
            dk, dv = (None if x is None else _Chain(x[:, :, g], self.formula.contract, len(self.pieces)) for x in parts)
            for piece, merges in self.pieces:
                self._block(b, h, g, piece, merges, keys, dk, dv)
            for chain in (dk, dv):
                if chain is not None:
                    chain.finish()
        for whole, part in zip(wholes, parts, strict=True):
            if part is not whole:
                _sum_heads(part, whole)

    def _block(
        self, b: slice, h: slice, g: slice, piece: slice, merges: int, keys: slice, dk: _Chain | None, dv: _Chain | None
    ) -> None:
        formula, contract = self.formula, self.formula.contract
        q, k, v, dout = self.q[b, h, g, piece], self.k[b, h], self.v[b, h], self.dout[b, h, g, piece]
        scores = _Scores(q, k, _cut(self.mask, b, h, g, piece), piece, formula)
        weights = scores.weights(torch.float32)
        if dv is not None:
            dv.add(weights.to(q.dtype)[..., keys].mT, dout, merges)
        first = keys.start == 0
        if dk is None and not (first and (self.dq is not None or self.dscores is not None)):
            return
        dweights = eager.matmul(dout, v.mT, contract, None, None).float()
        dtype, hidden, dead = scores.values.dtype, scores.hidden, scores.dead
        del scores
        dscores = rows.softmax_backward(dweights, weights, out_dtype=dtype)
        del dweights, weights
        # Nothing reaches a hidden score, not even NaN out of its row.
        dscores.masked_fill_(dead, 0)
        if hidden is not None:
            dscores.masked_fill_(hidden, 0)
        if self.dscores is not None and first:
            self.dscores[b, h, g, piece] = dscores
        dscores = dscores.to(q.dtype).mul_(formula.scale)
        if self.dq is not None and first:
            api.gemm(dscores, k, out=self.dq[b, h, g, piece], contract=contract)
        if dk is not None:
            dk.add(dscores[..., keys].mT, q, merges)


class _Chain:
    """The products of a gradient over all query rows, gathered piece by piece into `out`,
    whose type is the operands'."""

    def __init__(self, out: Any, contract: str, pieces: int) -> None:
        self.out, self.contract, self.whole = out, contract, pieces == 1
        self.continues = get_contract(contract).accumulates is not None
        self.total: Any = None
        self.waiting: list[Any] = []

    def add(self, left: Any, right: Any, merges: int) -> None:
        if self.whole:
            api.gemm(left, right, out=self.out, contract=self.contract)
        elif not self.continues:
            self.waiting.append(eager.matmul(left, right, self.contract, None, None))
            for _ in range(merges):
                second, first = self.waiting.pop(), self.waiting.pop()
                self.waiting.append((first.float() + second.float()).to(self.out.dtype))
        elif self.total is None:
            # A float32 result is its own accumulator.
            into = self.out if self.out.dtype is torch.float32 else torch.empty_like(self.out, dtype=torch.float32)
            self.total = api.gemm(left, right, out=into, contract=self.contract)
        else:
            api.gemm(left, right, out=self.total, accumulate=True, contract=self.contract)

    def finish(self) -> None:
        """The ending of the contract: +0 is added, one rounding, NaN is canonical."""
        if self.whole or self.total is self.out:
            return
        total = self.total if self.continues else self.waiting.pop().add_(0)
        self.out.copy_(total)
        nan = torch.full((), 0x7FFF, dtype=torch.int16, device=total.device).view(self.out.dtype)
        self.out.copy_(torch.where(total.isnan(), nan, self.out))


def _sum_heads(parts: Any, out: Any) -> None:
    """The gradients [b, h, G, keys, E] of each query head, already rounded, summed exactly up to one rounding."""
    out = out.squeeze(2)
    step = max(1, _SUMMED // max(1, parts.numel() // parts.shape[-2]))
    for start in range(0, parts.shape[-2], step):
        there = slice(start, start + step)
        rows.sum(parts[..., there, :].movedim(2, -1), out=out[..., there, :])


# How the work is cut.


def _stacks(q_like: list[Any], k_like: list[Any], mask: Any) -> Iterator[tuple[list[Any], list[Any], Any]]:
    """Each stack of four dimensions, heads apart: [B, H, G, ..] of what has the heads of queries, [B, H, 1, ..] of what
    has those of keys, and the mask, whose sizes of 1 stay."""
    rank = q_like[0].dim()
    if rank == 3:
        q_like, k_like, mask = [_map(x, 0) for x in q_like], [_map(x, 0) for x in k_like], _map(mask, 0)
    if rank > 4:
        for i in range(q_like[0].shape[0]):
            one, other = ([None if x is None else x[i] for x in some] for some in (q_like, k_like))
            yield from _stacks(one, other, None if mask is None else mask[i if mask.shape[0] > 1 else 0])
        return
    heads = k_like[0].shape[1]
    group = q_like[0].shape[1] // heads
    grouped = [None if x is None else x.unflatten(1, (heads, group)) for x in q_like]
    if mask is not None:
        mask = mask.unflatten(1, (heads, group) if mask.shape[1] > 1 else (1, 1))
    yield grouped, [_map(x, 2) for x in k_like], mask


def _map(x: Any, dim: int) -> Any:
    return None if x is None else x.unsqueeze(dim)


def _ranked(mask: Any, rank: int) -> Any:
    """The mask with as many dimensions as the scores."""
    return None if mask is None else mask.reshape(*(1,) * (rank - mask.dim()), *mask.shape)


def _cut(mask: Any, *block: slice) -> Any:
    if mask is None:
        return None
    return mask[tuple(at if size > 1 else slice(None) for at, size in zip(block, mask.shape, strict=False))]


def _fitting(q: Any, k: Any) -> tuple[int, int]:
    """How many query rows go together, and how many heads where all rows do."""
    length, keys = q.shape[-2], k.shape[-2]
    scores = SCORES // _PER_SCORE
    step = length if length * keys <= scores else max(16, scores // keys // 16 * 16)
    return step, max(1, scores // (length * keys))


def _heads(sizes: Any, fit: int) -> Iterator[tuple[slice, slice, slice]]:
    """The heads [B, H, G] in blocks of at most `fit`."""
    batch, heads, group = sizes
    g = min(group, fit)
    h = max(1, min(heads, fit // group))
    b = max(1, min(batch, fit // (group * heads)))
    for i in range(0, batch, b):
        for j in range(0, heads, h):
            for n in range(0, group, g):
                yield slice(i, min(i + b, batch)), slice(j, min(j + h, heads)), slice(n, min(n + g, group))


def _pieces(length: int, step: int, contract: str) -> list[tuple[slice, int]]:
    """Pieces of the query rows, at most `step` (of a tree at least 32) each, and after each how many pairs of subtrees
    are complete."""
    if step >= length:
        return [(slice(0, length), 0)]
    leaf = get_contract(contract).leaf
    if leaf is None:
        return [(slice(start, min(start + step, length)), 0) for start in range(0, length, step)]
    found: list[tuple[slice, int]] = []

    def split(first: int, last: int, merges: int) -> None:
        if last - first == 1 or (last - first) * leaf <= step:
            found.append((slice(first * leaf, min(last * leaf, length)), merges))
            return
        middle = first + (last - first) // 2
        split(first, middle, 0)
        split(middle, last, merges + 1)

    split(0, -(-length // leaf), 0)
    return found
