"""Draws: a function of seed and index, of every kind that they should have."""

from __future__ import annotations

from collections import Counter

import pytest
from small_products import LAYER

from detkern.measure import drawn, models
from detkern.measure.drawn import Drawn, draw, draw_head
from detkern.measure.shapes import Product


def test_a_draw_is_that_of_its_seed_and_index_alone() -> None:
    """Written down here: another version of Python, or of this file, must not draw others."""
    expected = [
        ("forward", "qwen2.5-7b-tp4.qkv", 2, 2, 1152, 3584),
        ("forward", "granite3.0-8b-tp2.down", 5113, 5113, 4096, 6400),
        ("forward", "mistral-small-24b.down", 902, 902, 5120, 32768),
        ("forward", "baichuan2-13b-tp4.gate_up", 2, 2, 6848, 5120),
        ("near", "gemma2-9b-tp2.up", 1278, 1278, 7168, 3584),
        ("da", "llama3.2-3b-tp2.qkv", 7776, 7776, 3072, 2560),
        ("db", "qwen2-57b-a14b-tp2.k", 526, 256, 3584, 526),
        ("db_f32", "llama2-70b-tp2.down", 436, 8192, 14336, 436),
    ]
    found = [draw(12345, index) for index in range(8)]
    assert [(one.part, one.product.layer.name, one.m, *one.sizes) for one in found] == expected
    assert [draw(12345, index) for index in (7, 3)] == [found[7], found[3]]
    assert draw(12346, 0) != found[0]


def test_draws_cover_what_they_should() -> None:
    found = [draw(99, index) for index in range(4000)]
    parts = Counter(one.part for one in found)
    assert parts == {"forward": 2000, "near": 500, "da": 500, "db": 500, "db_f32": 500}
    assert sum(one.accumulate for one in found) == 250
    assert all(one.output_f32 == (one.part == "db_f32") and one.accumulate <= one.output_f32 for one in found)
    assert len({one.product.layer.model.partition("-tp")[0] for one in found}) == len(models.load())
    forward = [one.m for one in found if one.part == "forward"]
    assert min(forward) == 1
    assert 15_000 < max(forward) <= drawn.LARGEST_M
    # Log-uniform: 6 of the 14 octaves up to 16,384 are below 64.
    assert sum(m < 64 for m in forward) / 2000 == pytest.approx(6 / 14, abs=0.04)
    near = [one.m for one in found if one.part == "near"]
    assert {(m + 8) % 64 for m in near} == set(range(17))
    assert min(near) >= 56
    assert max(near) <= drawn.LARGEST_M
    assert min(one.m for one in found if one.part in ("da", "db", "db_f32")) in range(128, 140)
    assert max(one.bytes for one in found) <= drawn.LARGEST_BYTES
    kinds = Counter(one.kind for one in found)
    assert {"lora_a", "lora_b", "router", "lm_head", "expert_down", "qkv", "kv_a"} <= set(kinds)
    ranks = {min(one.product.layer.n, one.product.layer.k) for one in found if one.kind.startswith("lora")}
    assert ranks == set(models.RANKS)


def test_products_that_are_too_large_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [draw(5, index) for index in range(40)]
    monkeypatch.setattr(drawn, "LARGEST_BYTES", 50_000_000)
    after = [draw(5, index) for index in range(40)]
    for one, other in zip(before, after, strict=True):
        assert other.bytes <= 50_000_000
        assert (one == other) == (one.bytes <= 50_000_000)
        assert (one.m, one.part) == (other.m, other.part)


def test_bytes_are_of_the_output_that_is_written() -> None:
    product = Product(LAYER, 3, "db", "mma16", "bfloat16")
    one = Drawn(7, "db_f32", "a", product, output_f32=True)
    assert one.bytes == 2 * (3 * 24 + 3 * 40) + 4 * 24 * 40
    assert one.sizes == (24, 40, 3)


def test_heads_are_those_of_whole_models_at_any_number_of_rows() -> None:
    """The first ones are written down, as those of products are."""
    first = [(head.model, head.vocabulary, head.width, head.rows) for head in map(draw_head, [23] * 3, range(3))]
    assert first == [
        ("llama2-7b", 32000, 4096, 434), ("qwen3-8b", 151936, 4096, 305), ("qwen2.5-7b", 152064, 3584, 7098),
    ]  # fmt: skip
    heads = [draw_head(1, index) for index in range(400)]
    assert {head.width for head in heads} >= {896, 8192}
    assert max(head.width for head in heads) == 8192
    assert (min(head.vocabulary for head in heads), max(head.vocabulary for head in heads)) == models.VOCABULARIES
    rows = sorted(head.rows for head in heads)
    assert rows[0] <= 2
    assert 60 < rows[200] < 240
    assert rows[-1] > 12_000
    assert all(4 * head.rows * head.vocabulary <= drawn.LARGEST_LOGITS_BYTES for head in heads)
