"""The trees of `tree` and `tree-mma16`, one output at a time, as docs/contracts.md words them."""

from __future__ import annotations

from collections.abc import Callable

from detkern.vocabulary.dtypes import DType

from . import rational


def tree(leaf: Callable[[int, int], float], k: int, dtype: DType) -> float:
    """The root over `k` pairs. leaf(lo, hi) is the binary32 value of the chain over the pairs [lo, hi)."""
    if k == 0:
        return 0.0
    values = [rational.round_to(leaf(lo, min(lo + 32, k)), dtype) for lo in range(0, k, 32)]

    def node(leaves: list[float]) -> float:
        if len(leaves) == 1:
            return leaves[0]
        half = len(leaves) // 2
        return rational.round_to(rational.add(node(leaves[:half]), node(leaves[half:])), dtype)

    return node(values)
