"""shapes.toml: the layers are those of the models; products and their reference line."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_products import SHAPES

from detkern.measure import shapes
from detkern.measure.shapes import Layer, Product


def test_the_shapes_are_those_of_the_models() -> None:
    found = shapes.load()
    assert found.m == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    sizes = {layer.name: (layer.n, layer.k) for layer in found.layers}
    assert len(sizes) == len(found.layers) == 18
    # hidden_size, intermediate_size, heads, key-value heads, tensor-parallel degree; heads are of 128
    for model, (h, f, q, kv, p) in {
        "llama3-8b": (4096, 14336, 32, 8, 1),
        "llama3-70b-tp8": (8192, 28672, 64, 8, 8),
        "qwen3-1.7b": (2048, 6144, 16, 8, 1),
        "qwen3-32b": (5120, 25600, 64, 8, 1),
    }.items():
        assert sizes[f"{model}.qkv"] == ((q + 2 * kv) * 128 // p, h)
        assert sizes[f"{model}.o"] == (h, q * 128 // p)
        assert sizes[f"{model}.gate_up"] == (2 * f // p, h)
        assert sizes[f"{model}.down"] == (h, f // p)
    assert sizes["router.256"] == (256, 7168)
    assert sizes["odd.1000x4104"] == (1000, 4104)


def test_shapes_are_chosen_by_pattern(tmp_path: Path) -> None:
    found = shapes.load()
    assert [layer.name for layer in found.named(["odd.*", "llama3-8b.o"])] == ["llama3-8b.o", "odd.1000x4104"]
    with pytest.raises(ValueError, match=r"no shape is called gpt.*llama3-8b\.qkv"):
        found.named(["odd.*", "gpt"])
    twice = tmp_path / "shapes.toml"
    twice.write_text("m = [1]\ntraining_m = 1\n" + '[[layer]]\nmodel = "a"\nlayer = "b"\nn = 1\nk = 1\n' * 2)
    with pytest.raises(ValueError, match="one name"):
        shapes.load(twice)


def test_the_parts_of_a_run() -> None:
    layer = SHAPES.layers[0]
    found = shapes.products(layer, SHAPES, ("forward", "da", "db", "tree"))
    assert [(product.op, product.m, product.contract) for product in found] == [
        ("forward", 1, "mma16"), ("forward", 3, "mma16"), ("forward", 8, "mma16"),
        ("da", 8, "mma16"), ("db", 8, "mma16"), ("forward", 8, "tree-mma16"),
    ]  # fmt: skip
    assert [product.m for product in shapes.products(layer, SHAPES, ("forward", "db"), m=[3])] == [3]


def test_the_reference_line_is_the_slower_of_memory_and_arithmetic() -> None:
    layer = Layer("a", "b", 4096, 4096)
    one, many = (Product(layer, m, "forward", "mma16", "bfloat16") for m in (1, 4096))
    assert one.reference_us == pytest.approx(2 * (4096 + 4096 * 4096 + 4096) / 4.3e6)
    assert many.reference_us == pytest.approx(2 * 4096**3 / 790e6)
