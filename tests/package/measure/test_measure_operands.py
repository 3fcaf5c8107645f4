"""Operands of a layer's products rotate through memory of their own."""

from __future__ import annotations

import itertools

import torch
from small_products import small_product

from detkern.measure.operands import Operands


def test_operands_rotate_through_memory_of_their_own() -> None:
    product = small_product()
    operands = Operands([product, small_product(m=1)], {product: 3, small_product(m=1): 5}, "cpu")
    matrices = operands.rotating(product, "w")
    starts = [matrix.data_ptr() for matrix in matrices]
    assert len(starts) == 3
    assert all(later - earlier >= 2 * 24 * 40 for earlier, later in itertools.pairwise(starts))
    assert all((start - starts[0]) % 256 == 0 for start in starts)
    assert all(matrix.std() > 0.9 for matrix in matrices)
    operands.poison(product)
    outs = operands.rotating(product, "out")
    assert operands.unwritten(product) == 3 * 3 * 24
    for out in outs:
        out.zero_()
    assert operands.unwritten(product) == 0
    outs[2].view(torch.int16)[1, 5] = -1
    assert operands.unwritten(product) == 1
