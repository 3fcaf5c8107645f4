"""Products of a layer that a CPU computes at once, for tests of what measures products."""

from __future__ import annotations

import dataclasses

from detkern.measure.drawn import Drawn, draw
from detkern.measure.shapes import Layer, Product, Shapes

LAYER = Layer("small", "a", 24, 40)
SHAPES = Shapes((1, 3, 8), 8, (LAYER, Layer("small", "b", 16, 33)))


def small_product(op: str = "forward", m: int = 3, contract: str = "mma16", dtype: str = "bfloat16") -> Product:
    return Product(LAYER, m, op, contract, dtype)


def small_drawn(seed: int, index: int) -> Drawn:
    """What `draw` gives, with a small layer and few tokens."""
    whole = draw(seed, index)
    product = dataclasses.replace(whole.product, layer=LAYER, m=1 + whole.m % 9)
    return dataclasses.replace(whole, product=product)
