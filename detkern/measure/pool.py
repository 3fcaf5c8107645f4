"""Memory for drawn products, made once for a visit: random operands are windows of one buffer, results of another.

Filling memory for each of thousands of products would take longer than timing them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from . import timing
from .drawn import Drawn
from .shapes import ITEM_BYTES

__all__ = ["MOST_SETS", "Pool", "Set", "sets"]

# Of operands that a product rotates through. Products of less than 0.25 MB therefore find what they read in the L2
# cache, for every peer alike: more calls in a graph would take the host longer than all else.
MOST_SETS = 512

POISON = 0xFF  # in every byte: a NaN in either type that no peer writes
LOOKED_AT = 256  # rows at either end of a result

_ALIGNMENT = 256  # bytes: each matrix begins where an allocation could
_FILL = 1 << 30  # elements filled at a time


class Set(NamedTuple):
    """Operands and result as `Product` has them. peer_out: the same memory as a 16-bit result, for peers that have no
    float32 one; it is `out` where that is 16 bits wide."""

    a: Any
    b: Any
    out: Any
    peer_out: Any


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _operand_bytes(drawn: Drawn) -> int:
    """Of one set of operands."""
    product = drawn.product
    return sum(_aligned(ITEM_BYTES * rows * columns) for rows, columns in map(product.matrix, product.operands))


def sets(drawn: Drawn, cache_bytes: int) -> int:
    """How many sets a product rotates through: they pass twice the cache, as far as MOST_SETS allows."""
    return min(MOST_SETS, timing.sets(drawn.bytes, cache_bytes))


class Pool:
    """Operands (normal, standard deviation 1) and results for any of some products, one product at a time."""

    def __init__(self, products: Iterable[Drawn], cache_bytes: int, device: str) -> None:
        import torch

        self._torch = torch
        self._cache_bytes = cache_bytes
        counted = [(drawn, sets(drawn, cache_bytes)) for drawn in products]
        operands = max(count * _operand_bytes(drawn) for drawn, count in counted)
        results = max(count * _aligned(drawn.output_bytes) for drawn, count in counted)
        self._operands = torch.empty(operands // ITEM_BYTES, dtype=torch.bfloat16, device=device)
        self._results = torch.empty(results, dtype=torch.uint8, device=device)
        generator = torch.Generator(device).manual_seed(operands)
        for start in range(0, self._operands.numel(), _FILL):
            self._operands[start : start + _FILL].normal_(generator=generator)

    def sets(self, drawn: Drawn) -> list[Set]:
        """The sets of a product."""
        product, torch = drawn.product, self._torch
        operand = at = 0

        def matrix(name: str) -> Any:
            nonlocal operand
            rows, columns = product.matrix(name)
            found = self._operands[operand : operand + rows * columns].view(rows, columns)
            operand += _aligned(ITEM_BYTES * rows * columns) // ITEM_BYTES
            return found

        found = []
        shape = product.matrix("out")
        for _ in range(sets(drawn, self._cache_bytes)):
            a, b = map(matrix, product.operands)
            memory = self._results[at : at + drawn.output_bytes]
            at += _aligned(drawn.output_bytes)
            peer_out = memory[: ITEM_BYTES * shape[0] * shape[1]].view(torch.bfloat16).view(shape)
            found.append(Set(a, b, memory.view(torch.float32).view(shape) if drawn.output_f32 else peer_out, peer_out))
        return found

    def spoil(self, out: Any) -> None:
        """Poison a result."""
        out.view(self._torch.uint8).fill_(POISON)

    def ends(self, out: Any) -> tuple[Any, int]:
        """The first and last rows of a result as float32, and how many of their elements still hold the poison."""
        torch = self._torch
        rows = out if out.shape[0] <= 2 * LOOKED_AT else torch.cat((out[:LOOKED_AT], out[-LOOKED_AT:]))
        bits = rows.contiguous().view(torch.int32 if rows.dtype == torch.float32 else torch.int16)
        return rows.to(torch.float32, copy=True), int((bits == -1).sum())
