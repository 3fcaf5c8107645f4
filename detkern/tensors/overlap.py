"""Whether strided windows on memory share an address, exactly, with a bound on the work.

Both questions are one of bounded integers: is there x with sum(c[i] * x[i]) == target and 0 <= x[i] <= u[i]? Most cases
never get there (address ranges apart, or strides that nest). The rest is a depth-first search that prunes by range and
by greatest common divisor; where it has not ended after `WORK` nodes the answer is "they overlap", so that a caller
refuses rather than races. NumPy's shares_memory solves the same problem; this one also works on device addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

from .view import TensorView

__all__ = ["WORK", "byte_range", "overlapping", "self_overlapping"]

WORK = 20_000


@lru_cache(4096)
def byte_range(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Offsets in bytes, from a view's pointer, of the first byte that it touches and of the one after the last."""
    low = high = 0
    for size, step in zip(shape, strides, strict=True):
        if size == 0:
            return 0, 0
        if step < 0:
            low += step * (size - 1)
        else:
            high += step * (size - 1)
    return low * itemsize, (high + 1) * itemsize


def _solutions(terms: list[tuple[int, int]], target: int, budget: list[int]) -> Iterator[None]:
    """Yields once for each x with sum(c * x) == target, 0 <= x <= u, for the (c, u) of `terms`, all c > 0. Stops with
    TimeoutError when the budget of nodes is spent."""
    terms = sorted(terms, reverse=True)
    count = len(terms)
    reach = [0] * (count + 1)
    divisor = [0] * (count + 1)
    for i in range(count - 1, -1, -1):
        reach[i] = reach[i + 1] + terms[i][0] * terms[i][1]
        divisor[i] = gcd(divisor[i + 1], terms[i][0])

    def search(i: int, rest: int) -> Iterator[None]:
        budget[0] -= 1
        if budget[0] < 0:
            raise TimeoutError
        if i == count:
            if rest == 0:
                yield None
            return
        if rest < 0 or rest > reach[i] or rest % divisor[i]:
            return
        coefficient, bound = terms[i]
        first = max(0, -(-(rest - reach[i + 1]) // coefficient))
        last = min(bound, rest // coefficient)
        for x in range(first, last + 1):
            yield from search(i + 1, rest - coefficient * x)

    return search(0, target)


def self_overlapping(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two different indices of an array with these element strides have the same address."""
    if 0 in shape:
        return False
    dims = sorted((abs(step), size) for size, step in zip(shape, strides, strict=True) if size > 1)
    reach = 0
    nested = True
    for step, size in dims:
        if step == 0:
            return True
        nested = nested and step > reach
        reach += step * (size - 1)
    if nested:
        return False
    # Two indices x != y with sum(s * (x - y)) == 0: shift x - y + size - 1 to be non-negative. x == y is one solution,
    # so a second one is what is asked for.
    terms = [(step, 2 * (size - 1)) for step, size in dims]
    try:
        return sum(1 for _, _ in zip(range(2), _solutions(terms, reach, [WORK]), strict=False)) > 1
    except TimeoutError:
        return True


def overlapping(first: TensorView, second: TensorView) -> bool:
    """Whether some byte belongs to an element of each view. Views on different devices never overlap."""
    low, high = byte_range(first.shape, first.strides, first.dtype.itemsize)
    other_low, other_high = byte_range(second.shape, second.strides, second.dtype.itemsize)
    start, other_start = first.pointer + low, second.pointer + other_low
    if first.pointer + high <= other_start or second.pointer + other_high <= start:
        return False
    if first.device != second.device or 0 in first.shape or 0 in second.shape:
        return False
    # All elements begin at multiples of `unit` from `start`, so they share a byte exactly where they share a unit.
    # Larger units than bytes make greatest common divisors that prune.
    target = other_start - start
    unit = gcd(first.dtype.itemsize, second.dtype.itemsize, target)
    target //= unit
    # Unit sum(s * x) + i of the first equals unit target + sum(t * y) + j of the second, with all coefficients made
    # positive: y and j are replaced by bound - y and bound - j.
    terms = []
    for view, sign in ((first, 1), (second, -1)):
        item = view.dtype.itemsize // unit
        for size, step in [*zip(view.shape, (abs(s) * item for s in view.strides), strict=True), (item, 1)]:
            if step and size > 1:
                terms.append((step, size - 1))
                if sign < 0:
                    target += step * (size - 1)
    # Terms with the same coefficient act as one with the sum of the bounds.
    merged: dict[int, int] = {}
    for coefficient, bound in terms:
        merged[coefficient] = merged.get(coefficient, 0) + bound
    try:
        return any(True for _ in _solutions(list(merged.items()), target, [WORK]))
    except TimeoutError:
        return True
