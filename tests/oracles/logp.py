"""linear_logp of docs/contracts.md, "linear_logp", in exact rational arithmetic, a row at a time. Scalars, slow,
plain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .elementary import exp, log, product, quotient
from .rational import add, fma

__all__ = ["Scales", "delta", "edges", "merged", "results", "scaled", "shard_state"]

State = tuple[float, float, float]
NOTHING: State = (-math.inf, 0.0, 0.0)


@dataclass(frozen=True)
class Scales:
    """tau of the temperature, the softcap and C; None where there is no such step."""

    tau: float | None = None
    cap: float | None = None
    inverse: float | None = None


def scaled(z: float, scales: Scales) -> tuple[float, float | None]:
    """y of a logit, and t."""
    t = None
    if scales.cap is not None and scales.inverse is not None:
        u = product(z, scales.inverse)
        q = exp(product(-2.0, abs(u)))
        t = math.nan if math.isnan(q) else math.copysign(quotient(add(1.0, -q), add(1.0, q)), u)
        z = product(scales.cap, t)
    return (z if scales.tau is None else product(z, scales.tau)), t


def edges(vocabulary: int) -> list[int]:
    padded = vocabulary
    while padded % 64:
        padded += 1
    return [min(i * (padded // 8), vocabulary) for i in range(9)]


def bounded(d: float) -> float:
    return d if math.isnan(d) else max(d, -104.0)


def unit_state(y: list[float]) -> State:
    y = y + [-math.inf] * (64 - len(y))
    m = add(max((v for v in y if not math.isnan(v)), default=-math.inf), 0.0)
    d = [v if m == -math.inf else add(v, -m) for v in y]
    e = [exp(v) for v in d]
    return m, _tree_of_64(e), _tree_of_64([product(a, bounded(b)) for a, b in zip(e, d, strict=True)])


def _tree_of_64(terms: list[float]) -> float:
    """Places that differ in bit 3 first, then 4, 5, 0, 1, 2."""
    sums = dict(enumerate(terms))
    for bit in (3, 4, 5, 0, 1, 2):
        sums = {place: add(sums[place], sums[place | 1 << bit]) for place in sums if not place >> bit & 1}
    assert list(sums) == [0]
    return sums[0]


def merge(left: State, right: State) -> State:
    low, high = (left, right) if right[0] > left[0] else (right, left)
    delta = 0.0 if low[0] == high[0] else bounded(add(low[0], -high[0]))
    f = exp(delta)
    return high[0], fma(low[1], f, high[1]), fma(f, fma(delta, low[1], low[2]), high[2])


def _tree(states: list[State]) -> State:
    while len(states) > 1:
        states = [merge(*states[i : i + 2]) if i + 1 < len(states) else states[i] for i in range(0, len(states), 2)]
    return states[0]


def shard_state(y: list[float], vocabulary: int, first: int = 0, count: int = 8) -> State:
    """The state of parts; y holds the logits of these alone. As it is handed on."""
    cuts = edges(vocabulary)
    parts = []
    for part in range(first, first + count):
        columns = y[cuts[part] - cuts[first] : cuts[part + 1] - cuts[first]]
        parts.append(_tree([unit_state(columns[i : i + 64]) for i in range(0, len(columns), 64)] or [NOTHING]))
    m, s, w = _tree(parts)
    return add(m, 0.0), add(s, 0.0), add(w, 0.0)


def merged(states: list[State]) -> State:
    m, s, w = _tree(states)
    return add(m, 0.0), add(s, 0.0), add(w, 0.0)


def valid(state: State) -> bool:
    return math.isfinite(state[0]) and not math.isnan(state[1])


def results(state: State, y: list[float], targets: list[int], ignored: int) -> list[float]:
    """logp of each target, lse, entropy."""
    m, s, w = state
    found = []
    for target in targets:
        if target == ignored:
            found.append(0.0)
        elif not 0 <= target < len(y) or not valid(state):
            found.append(math.nan)
        else:
            found.append(add(add(add(y[target], -m), -log(s)), 0.0))
    if not valid(state):
        return [*found, math.nan, math.nan]
    return [*found, add(add(m, log(s)), 0.0), add(add(log(s), -quotient(w, s)), 0.0)]


def delta(
    state: State, z: list[float], scales: Scales, targets: list[int], ignored: int, grads: list[float], entropy: bool
) -> list[float]:
    """The gradient of each logit before its last rounding; grads: of the targets, of lse and, with entropy, of that."""
    m, s, w = state
    counted = [target for target in targets if target != ignored]
    if not valid(state) or any(not 0 <= target < len(z) for target in counted):
        return [math.nan] * len(z)
    given = [0.0 if target == ignored else g for target, g in zip(targets, grads, strict=False)]
    total = 0.0
    for g in given:
        total = add(total, g)
    a = add(grads[len(targets)], -total)
    if entropy:
        back = -grads[len(targets) + 1]
        a = fma(back, add(log(s), -quotient(w, s)), a)
    r = quotient(1.0, s)
    found = []
    for column, logit in enumerate(z):
        y, t = scaled(logit, scales)
        d = add(y, -m)
        x = fma(back, add(bounded(d), -log(s)), a) if entropy else a
        value = product(product(exp(d), r), x)
        for target, g in zip(targets, given, strict=True):
            if target == column and target != ignored:
                value = add(value, g)
        if scales.tau is not None:
            value = product(value, scales.tau)
        if t is not None:
            value = product(value, fma(-t, t, 1.0))
        found.append(add(value, 0.0))
    return found
