"""models.toml: every model is published, and its layers are those of its configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from detkern.measure import models


def test_models_are_published_and_their_layers_those_of_the_configuration() -> None:
    found = {model.name: model for model in models.load()}
    assert len(found) == len(models.load()) >= 40
    assert all("/" in model.source for model in found.values())
    assert {len(model.cuts) for model in found.values()} == {1, 2, 3, 4}
    # Llama 3.1 70B: hidden 8192, intermediate 28672, 64 heads and 8 key-value heads of 128.
    assert models.layers(found["llama3.1-70b"], 8) == {
        "qkv": (1280, 8192), "q": (1024, 8192), "k": (128, 8192), "o": (8192, 1024), "up": (3584, 8192),
        "down": (8192, 3584), "gate_up": (7168, 8192), "lm_head": (16032, 8192),
    }  # fmt: skip
    v3 = models.layers(found["deepseek-v3"], 1)
    assert v3["qkv_a"] == (1536 + 512 + 64, 7168)
    assert v3["kv_a"] == (576, 7168)
    assert v3["q_b"] == (128 * 192, 1536)
    assert v3["kv_b"] == (128 * 256, 512)
    assert v3["o"] == (7168, 128 * 128)
    assert v3["router"] == (256, 7168)
    assert v3["expert_gate_up"] == (4096, 7168)
    assert v3["expert_down"] == (7168, 2048)
    # Four key-value heads on eight ranks are repeated; a vocabulary that eight does not divide is padded when it is
    # cut.
    assert models.layers(found["qwen3-30b-a3b"], 8)["k"] == (128, 2048)
    assert models.layers(found["granite3.0-8b"], 1)["lm_head"] == (49155, 4096)
    assert models.layers(found["granite3.0-8b"], 8)["lm_head"] == (49216 // 8, 4096)
    assert "gate_up" not in models.layers(found["falcon-40b"], 1)
    assert models.lora((1280, 8192), 16) == {"lora_a": (16, 8192), "lora_b": (1280, 16)}
    heads = {size for model in found.values() if (size := models.layers(model, 1).get("lm_head", (0, 0))[0])}
    assert (min(heads), max(heads)) == models.VOCABULARIES
    routers = {model.experts for model in found.values() if "router" in models.layers(model, 1)}
    assert (min(routers), max(routers)) == models.EXPERTS


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = tmp_path / "models.toml"
    row = '{ name = "a", source = "b/c", hidden = 1, vocab = 1, heads = 1 }'
    twice.write_text(f"model = [{row}, {row}]\n")
    with pytest.raises(ValueError, match="one name"):
        models.load(twice)
