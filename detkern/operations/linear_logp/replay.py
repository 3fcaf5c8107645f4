"""linear_logp in NumPy: the definition one can run, to be read beside docs/contracts.md. gemm/replay.py says what a
caller has to see to."""

from __future__ import annotations

from functools import reduce

import numpy as np

from ...vocabulary.arithmetic.binary32 import Array, Binary32, add, canonical, fma, round_to
from ...vocabulary.contracts import Contract
from ...vocabulary.dtypes import F32, DType, from_numpy
from ..gemm.replay import gemm
from ..rows.replay import exponential, logarithm
from .problem import PARTS, PLAIN, UNIT, Scaling, part_edges

__all__ = ["State", "delta", "fold", "merge", "merged", "part_state", "results", "tree", "unit_states"]

_PIECE = 1 << 18  # logits worked on at a time
LOWEST = np.float32(-104)  # of a distance: exp of it is +0
ORDER = (3, 4, 5, 0, 1, 2)  # the bits of a column's place in its unit, in which columns that differ are added

# m, s and w, each of one shape.
State = tuple[Binary32, Binary32, Binary32]


def fold(
    contract: Contract,
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    *,
    vocabulary: int,
    first: int = 0,
    count: int = PARTS,
    scaling: Scaling = PLAIN,
    entropy: bool = True,
) -> Binary32:
    """The states [3 + K, M] of the rows of hidden [M, D] over the parts [first, first + count) of a vocabulary.

    weight: the rows of these parts. target: [M, K], columns of the whole vocabulary. bias: of these parts.
    """
    m, begin = hidden.shape[0], (edges := part_edges(vocabulary))[first]
    out = np.empty((3 + target.shape[1], m), np.float32)
    step = max(1, _PIECE // max(edges[1], 1))
    with np.errstate(all="ignore"):
        for row in range(0, m, step):
            rows = slice(row, row + step)
            picked = np.full(target[rows].shape, -np.inf, np.float32)
            states = []
            for part in range(first, first + count):
                low, high = edges[part], edges[part + 1]
                columns = slice(low - begin, high - begin)
                y, _ = logits(contract, hidden[rows], weight[columns], None if bias is None else bias[columns], scaling)
                states.append(part_state(y, entropy))
                inside = (target[rows] >= low) & (target[rows] < high)
                line, which = np.nonzero(inside)
                picked[line, which] = y[line, target[rows][inside] - low]
            out[:3, rows] = tree(states)
            if not entropy:
                out[2, rows] = 0
            out[3:, rows] = picked.T
        return canonical(out + np.float32(0))


def logits(
    contract: Contract, hidden: Array, weight: Array, bias: Array | None, scaling: Scaling
) -> tuple[Binary32, Binary32 | None]:
    """y, what is folded, and under a softcap the hyperbolic tangent that its gradient needs."""
    y: Binary32 = gemm(contract, hidden, weight.T, bias=bias, out_dtype=F32)
    tangent = None
    if scaling.cap is not None:
        assert scaling.inverse is not None
        u = y * np.float32(scaling.inverse)
        q = exponential(np.float32(-2) * np.abs(u))
        tangent = np.copysign((np.float32(1) - q) / (np.float32(1) + q), u)
        y = np.float32(scaling.cap) * tangent
    if scaling.tau is not None:
        y = y * np.float32(scaling.tau)
    return y, tangent


def unit_states(y: Binary32, entropy: bool = True) -> State:
    """The states [.., units] of logits [.., 64 units]."""
    y = y.reshape(*y.shape[:-1], -1, UNIT)
    m = np.fmax.reduce(y, axis=-1, initial=np.float32(-np.inf)) + np.float32(0)
    d = np.where(np.isneginf(m)[..., None], y, y - m[..., None])
    e = exponential(d)
    s = _sum(e)
    return m, s, _sum(e * np.maximum(d, LOWEST)) if entropy else np.zeros_like(s)


def _sum(terms: Binary32) -> Binary32:
    """The sum of 64 by a binary tree over the bits of the place, in the contract's order."""
    cube = terms.reshape(*terms.shape[:-1], *(2,) * 6)  # the last axis is bit 0
    for bit in ORDER:
        axis = cube.ndim - 1 - bit
        zero, one = (np.take(cube, [i], axis) for i in (0, 1))
        cube = add(zero, one)
    return cube.reshape(terms.shape[:-1])


def part_state(y: Binary32, entropy: bool = True) -> State:
    """The states [rows] of a part's logits [rows, columns]; of no columns (-inf, 0, 0)."""
    rows, columns = y.shape
    if columns == 0:
        zero = np.zeros(rows, np.float32)
        return np.full(rows, -np.inf, np.float32), zero, zero
    units = -(-columns // UNIT)
    padded = np.full((rows, units * UNIT), -np.inf, np.float32)
    padded[:, :columns] = y
    m, s, w = unit_states(padded, entropy)
    return tree([(m[:, i], s[:, i], w[:, i]) for i in range(units)])


def tree(states: list[State]) -> State:
    """States 2i and 2i + 1 merged, level by level; an odd last one passes."""
    while len(states) > 1:
        pairs = [merge(*states[i : i + 2]) for i in range(0, len(states) - 1, 2)]
        states = pairs + states[len(pairs) * 2 :]
    return states[0]


def merge(left: State, right: State) -> State:
    """The state of both."""
    swap = right[0] > left[0]
    low = tuple(np.where(swap, a, b) for a, b in zip(left, right, strict=True))
    high = tuple(np.where(swap, b, a) for a, b in zip(left, right, strict=True))
    distance = np.where(low[0] == high[0], np.float32(0), np.maximum(low[0] - high[0], LOWEST))
    f = exponential(distance)
    s = fma(low[1], f, high[1])
    return high[0], s, fma(f, fma(distance, low[1], low[2]), high[2])


def merged(states: Binary32) -> Binary32:
    """The state [3 + K, M] of the whole from those of 1, 2, 4 or 8 shards, [P, 3 + K, M]."""
    with np.errstate(all="ignore"):
        m, s, w = tree([(state[0], state[1], state[2]) for state in states])
        picked = reduce(np.fmax, (state[3:] for state in states))
        return canonical(np.concatenate([np.stack([m, s, w]), picked]) + np.float32(0))


def results(states: Binary32, target: Array, *, vocabulary: int, ignore_index: int, entropy: bool = True) -> Binary32:
    """logp of each target, lse and, where it is asked for, entropy: [K + 1 or K + 2, M] of states [P, 3 + K, M]."""
    m, s, w, *picked = merged(states)
    with np.errstate(all="ignore"):
        valid, log_s = _log(m, s)
        lines = [_logp((y - m) - log_s, valid, target[:, j], vocabulary, ignore_index) for j, y in enumerate(picked)]
        lines.append(np.where(valid, m + log_s, np.float32(np.nan)))
        if entropy:
            lines.append(np.where(valid, log_s - w / s, np.float32(np.nan)))
        return canonical(np.stack(lines) + np.float32(0))


def _log(m: Binary32, s: Binary32) -> tuple[Array, Binary32]:
    """Which rows have results, and log(s) of those."""
    valid = np.isfinite(m) & ~np.isnan(s)
    return valid, logarithm(np.where(valid, s, np.float32(1)))


def _logp(values: Binary32, valid: Array, target: Array, vocabulary: int, ignore_index: int) -> Binary32:
    outside = (target < 0) | (target >= vocabulary)
    values = np.where(valid & ~outside, values, np.float32(np.nan))
    return np.where(target == ignore_index, np.float32(0), values)


def delta(
    contract: Contract,
    hidden: Array,
    weight: Array,
    target: Array,
    state: Binary32,
    grads: Binary32,
    bias: Array | None = None,
    *,
    vocabulary: int,
    start: int = 0,
    ignore_index: int = -100,
    scaling: Scaling = PLAIN,
    entropy: bool = True,
    out_dtype: DType | None = None,
) -> Array:
    """The gradient of the logits before scaling, [M, columns], of the columns from `start` on.

    weight, bias: of these columns. state: [3 or more, M] of the whole vocabulary. grads: those of `results`' lines.
    out_dtype: default the operands' type.
    """
    dtype = out_dtype or from_numpy(hidden.dtype)
    assert dtype is not None
    out = np.empty((hidden.shape[0], weight.shape[0]), dtype.numpy)
    step = max(1, _PIECE // max(out.shape[1], 1))
    with np.errstate(all="ignore"):
        for row in range(0, out.shape[0], step):
            rows = slice(row, row + step)
            y, tangent = logits(contract, hidden[rows], weight, bias, scaling)
            value = _delta(y, target[rows], state[:, rows], grads[:, rows], vocabulary, start, ignore_index, entropy)
            if scaling.tau is not None:
                value = value * np.float32(scaling.tau)
            if tangent is not None:
                value = value * fma(-tangent, tangent, np.ones_like(tangent))
            out[rows] = round_to(add(value, np.zeros_like(value)), dtype)
    return out


def _delta(
    y: Binary32,
    target: Array,
    state: Binary32,
    grads: Binary32,
    vocabulary: int,
    start: int,
    ignore_index: int,
    entropy: bool,
) -> Binary32:
    """The gradient of y."""
    m, s, w = state[:3]
    targets = target.shape[1]
    valid, log_s = _log(m, s)
    ignored = target == ignore_index
    valid &= ~(~ignored & ((target < 0) | (target >= vocabulary))).any(axis=1)
    given = np.where(ignored, np.float32(0), grads[:targets].T)
    total = np.zeros_like(m)
    for j in range(targets):
        total = total + given[:, j]
    factor = grads[targets] - total
    d = y - m[:, None]
    p = exponential(d) * (np.float32(1) / s)[:, None]
    x = np.broadcast_to(factor[:, None], y.shape)
    if entropy:
        back = -grads[targets + 1]
        factor = fma(back, log_s - w / s, factor)
        distance = np.maximum(d, LOWEST) - log_s[:, None]
        x = fma(np.broadcast_to(back[:, None], y.shape), distance, np.broadcast_to(factor[:, None], y.shape))
    value = p * x
    for j in range(targets):
        line = np.flatnonzero((target[:, j] >= start) & (target[:, j] < start + y.shape[1]) & ~ignored[:, j])
        value[line, target[line, j] - start] += given[line, j]
    return np.where(valid[:, None], value, np.float32(np.nan))
