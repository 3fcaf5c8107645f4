"""Products drawn from the layers of published models (models.toml): what `python -m benchmarks.gemm --drawn` measures.

A draw is a function of a seed and an index alone: every choice is a SHA-256 of both and of the choice's name, so that
it does not depend on Python's version, on the number of products or on what was drawn before. Of eight products four
are forward at an M that is log-uniform, one is forward at an M near a multiple of 64, and one each is the gradient of
x, that of the weight, and that of the weight into float32, new or accumulated in turn. A model, a tensor-parallel
degree and a layer are equally likely each; LoRA counts as one layer of a model.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from . import models
from .shapes import ITEM_BYTES, Layer, Product

__all__ = ["FITTING_SEEDS", "LARGEST_BYTES", "LARGEST_M", "PARTS", "Drawn", "Head", "draw", "draw_head"]

# What tables are fitted on and what a fit is judged on before it is written (benchmarks/fit.py): no record is of these.
FITTING_SEEDS = tuple(range(1, 9))

PARTS = ("forward", "forward", "forward", "forward", "near", "da", "db", "db_f32")
LARGEST_M = 16_384
NEAR, NEAR_BY = 64, 8
FIRST_OF_GRADIENTS = 128  # tokens: the fewest at which gradients are judged
LARGEST_BYTES = 40 * 10**9  # of a product's operands and result; a larger one is drawn again
# Of what makes logits, and the most float32 logits that a peer is made to keep.
HEAD_WIDTHS = (896, 8192)
LARGEST_LOGITS_BYTES = 12 * 10**9

_OPS = {"forward": "forward", "near": "forward", "da": "da", "db": "db", "db_f32": "db"}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A product and how it was drawn. part: of PARTS. layer: what it does in its model. output_f32: the result is
    float32, and accumulate: added to what is there."""

    index: int
    part: str
    kind: str
    product: Product
    output_f32: bool = False
    accumulate: bool = False

    @property
    def m(self) -> int:
        """Tokens."""
        return self.product.m

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and summands of the product as it is computed."""
        rows, columns = self.product.matrix("out")
        return (
            rows,
            columns,
            {"forward": self.product.layer.k, "da": self.product.layer.n, "db": self.m}[self.product.op],
        )

    @property
    def output_bytes(self) -> int:
        """Of the result."""
        rows, columns = self.product.matrix("out")
        return rows * columns * (4 if self.output_f32 else ITEM_BYTES)

    @property
    def bytes(self) -> int:
        """Of both operands and the result, once each."""
        rows, columns = self.product.matrix("out")
        return self.product.bytes - ITEM_BYTES * rows * columns + self.output_bytes


def _uniform(seed: int, index: int, what: str) -> float:
    """In [0, 1)."""
    digest = hashlib.sha256(f"{seed}/{index}/{what}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / (1 << 48)


def _of(seed: int, index: int, what: str, count: int) -> int:
    """In [0, count)."""
    return int(_uniform(seed, index, what) * count)


def _log_uniform(seed: int, index: int, what: str, first: int, last: int) -> int:
    """In [first, last]."""
    size = first * math.exp(_uniform(seed, index, what) * math.log((last + 1) / first))
    return min(int(size), last)


def _m(seed: int, index: int, part: str) -> int:
    if part == "near":
        multiple = NEAR * _log_uniform(seed, index, "multiple", 1, LARGEST_M // NEAR)
        return min(multiple - NEAR_BY + _of(seed, index, "beside", 2 * NEAR_BY + 1), LARGEST_M)
    return _log_uniform(seed, index, "m", 1 if part == "forward" else FIRST_OF_GRADIENTS, LARGEST_M)


def _layer(seed: int, index: int, attempt: int) -> tuple[Layer, str]:
    """The layer, and what it does."""

    def of(what: str, count: int) -> int:
        return _of(seed, index, f"{what}/{attempt}", count)

    all_models = models.load()
    model = all_models[of("model", len(all_models))]
    degree = model.cuts[of("degree", len(model.cuts))]
    found = models.layers(model, degree)
    kind = [*found, "lora"][of("layer", len(found) + 1)]
    name = model.name if degree == 1 else f"{model.name}-tp{degree}"
    if kind == "lora":
        base = list(found)[of("base", len(found))]
        rank = models.RANKS[of("rank", len(models.RANKS))]
        kind = ("lora_a", "lora_b")[of("factor", 2)]
        return Layer(name, f"{base}.{kind}{rank}", *models.lora(found[base], rank)[kind]), kind
    return Layer(name, kind, *found[kind]), kind


def draw(seed: int, index: int) -> Drawn:
    """Product number `index` of a seed. Its matrices take at most LARGEST_BYTES."""
    part = PARTS[index % len(PARTS)]
    for attempt in range(1000):
        layer, kind = _layer(seed, index, attempt)
        drawn = Drawn(
            index,
            part,
            kind,
            Product(layer, _m(seed, index, part), _OPS[part], "mma16", "bfloat16"),
            output_f32=part == "db_f32",
            accumulate=part == "db_f32" and index // len(PARTS) % 2 == 1,
        )
        if drawn.bytes <= LARGEST_BYTES:
            return drawn
    raise AssertionError("no layer is small enough")  # at the largest M nearly all are


@dataclass(frozen=True, slots=True)
class Head:
    """The last layer of a model, [vocabulary, width], and how many rows it is given."""

    index: int
    model: str
    vocabulary: int
    width: int
    rows: int


def draw_head(seed: int, index: int) -> Head:
    """Head number `index` of a seed: a whole model of those whose width and vocabulary are in range, rows log-uniform
    from 1 on."""
    able = [
        model
        for model in models.load()
        if HEAD_WIDTHS[0] <= model.hidden <= HEAD_WIDTHS[1]
        and models.VOCABULARIES[0] <= model.vocab <= models.VOCABULARIES[1]
    ]
    for attempt in range(1000):
        model = able[_of(seed, index, f"head/{attempt}", len(able))]
        rows = _log_uniform(seed, index, f"rows/{attempt}", 1, LARGEST_M)
        if 4 * rows * model.vocab <= LARGEST_LOGITS_BYTES:
            return Head(index, model.name, model.vocab, model.hidden, rows)
    raise AssertionError("no head is small enough")  # at the largest M a few are
