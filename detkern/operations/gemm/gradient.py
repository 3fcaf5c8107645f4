"""The gradients of a product: which products they are, on which layouts, and in which order they are summed.

For c[*batch, m, n] = contract(a[*batch, m, k], b[*batch, k, n]) + bias[n] and the incoming gradient dc:

- dc is rounded, once, to the operands' type before it enters a product (it is of another type where `out_dtype` was).
- Both gradients are products by the forward's own contract, frozen there, and are of the operands' type:
  da = dc @ b.T, one chain over n for each element; db = a.T @ dc, one chain over the rows m.
- An operand that was broadcast over batch dimensions gets one chain over all of them: (batch, n) ascending for a,
  (batch, m) ascending for b, batch indices in row-major order. No partial sum is rounded. A weight [N, K] of
  a linear layer is such an operand, and its gradient is computed as [N, K], row-major.
- The gradient of bias is one ascending binary32 chain over (batch, m) of dc as it came in (`detkern.bias_gradient`),
  rounded once to bias's type.
- Only what is asked for is computed.

A function here says what the two operands of a gradient's product are: a source ("a", "b" or "dc", for linear layers
"x", "weight" or "dc") and how it is laid. A binding carries that out with its framework's reshape, broadcast and
transpose, which copy only where no strides describe the layout. Sizes may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["GradientProduct", "Layout", "linear_gradient", "matmul_gradient"]

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """How an operand of a gradient's product comes from its source; steps that are None are left out.

    source:    which array.
    view:      it is first read in this shape, which has the same elements in the same order,
    broadcast: then broadcast to this shape,
    order:     then its dimensions are permuted so (as numpy.transpose takes it),
    merged:    and then read in this shape.
    """

    source: str
    view: Shape | None = None
    broadcast: Shape | None = None
    order: tuple[int, ...] | None = None
    merged: Shape | None = None


class GradientProduct(NamedTuple):
    """left @ right, by the forward's contract; `shape`: what the result is then read as, or None where it has the
    operand's shape already."""

    left: Layout
    right: Layout
    shape: Shape | None = None


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result = result * size
    return result


def _swapped(rank: int) -> tuple[int, ...]:
    """The order that swaps the last two of `rank` dimensions."""
    return (*range(rank - 2), rank - 1, rank - 2)


def linear_gradient(of: str, x: Shape, weight: Shape) -> GradientProduct:
    """The gradient of "x" [.., K] or "weight" [N, K] in x @ weight.T."""
    if of == "x":
        return GradientProduct(Layout("dc"), Layout("weight"))
    n, k = weight
    if len(x) == 2:
        return GradientProduct(Layout("dc", order=(1, 0)), Layout("x"))
    m = _product(x[:-1])
    return GradientProduct(Layout("dc", view=(m, n), order=(1, 0)), Layout("x", view=(m, k)))


def matmul_gradient(of: str, a: Shape, b: Shape) -> GradientProduct:
    """The gradient of "a" [.., M, K] or "b" [.., K, N] in a @ b, whose batch dimensions broadcast and whose
    one-dimensional operands are read as by numpy.matmul."""
    left: Shape = (1, *a) if len(a) == 1 else a
    right: Shape = (*b, 1) if len(b) == 1 else b
    (m, k), n = left[-2:], right[-1]
    rank = max(len(left), len(right)) - 2
    left_batch = (1,) * (rank + 2 - len(left)) + left[:-2]
    right_batch = (1,) * (rank + 2 - len(right)) + right[:-2]
    batch = tuple(y if x == 1 else x for x, y in zip(left_batch, right_batch, strict=True))

    own, wanted = (left_batch, a) if of == "a" else (right_batch, b)
    summed = [i for i in range(rank) if own[i] == 1 and batch[i] != 1]
    kept = [i for i in range(rank) if i not in summed]
    # Vectors and dc are given the dimensions that numpy.matmul thinks of; a rank that is there already is left alone.
    a_view = left if len(a) == 1 else None
    b_view = right if len(b) == 1 else None
    dc_view = (*batch, m, n) if a_view or b_view else None
    if not summed:
        shape = wanted if len(wanted) != rank + 2 else None
        if of == "a":
            return GradientProduct(Layout("dc", dc_view), Layout("b", b_view, order=_swapped(len(right))), shape)
        return GradientProduct(Layout("a", a_view, order=_swapped(len(left))), Layout("dc", dc_view), shape)

    sizes = tuple(batch[i] for i in kept)
    chain = _product([batch[i] for i in summed])
    row, column = rank, rank + 1
    if of == "a":
        dc = Layout("dc", dc_view, order=(*kept, row, *summed, column), merged=(*sizes, m, chain * n))
        other = Layout("b", b_view, (*batch, k, n), order=(*kept, *summed, column, row), merged=(*sizes, chain * n, k))
        return GradientProduct(dc, other, wanted)
    other = Layout("a", a_view, (*batch, m, k), order=(*kept, column, *summed, row), merged=(*sizes, k, chain * m))
    dc = Layout("dc", dc_view, order=(*kept, *summed, row, column), merged=(*sizes, chain * m, n))
    return GradientProduct(other, dc, wanted)
