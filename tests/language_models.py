"""Small causal language models of Hugging Face, random weights, and ways to lay their tokens out."""

from __future__ import annotations

from typing import Any

import pytest

MODELS = ("llama", "qwen3")


def make_model(name: str, device: str, dtype: Any, attention: str | None = "eager", **sizes: int) -> Any:
    """attention: Hugging Face's attn_implementation; None for the one that a model comes with."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torch

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[name]
    chosen = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, **sizes,
    }  # fmt: skip
    torch.manual_seed(0)
    config = config_class(
        **chosen,
        head_dim=chosen["hidden_size"] // chosen["num_attention_heads"],
        max_position_embeddings=512,
        initializer_range=0.05,
        **({"attn_implementation": attention} if attention else {}),
    )
    return model_class(config).to(device, dtype).eval()


def prompts(count: int, vocabulary: int, device: str) -> list[Any]:
    """`count` prompts of 3 to 40 tokens; the first has 21."""
    import torch

    generator = torch.Generator().manual_seed(3)
    lengths = [21, *((7 * i) % 38 + 3 for i in range(1, count))]
    return [torch.randint(0, vocabulary, (length,), generator=generator).to(device) for length in lengths]


def logits(model: Any, tokens: list[Any], starts: list[int], length: int | None = None) -> list[Any]:
    """Logits [its length, vocabulary] of each prompt, all in one batch, each starting at its place in a row."""
    import torch

    length = max([length or 0, *(start + len(x) for start, x in zip(starts, tokens, strict=True))])
    batch = torch.zeros(len(tokens), length, dtype=torch.long, device=tokens[0].device)
    mask, positions = torch.zeros_like(batch), torch.zeros_like(batch)
    for row, (start, x) in enumerate(zip(starts, tokens, strict=True)):
        batch[row, start : start + len(x)] = x
        mask[row, start : start + len(x)] = 1
        positions[row, start : start + len(x)] = torch.arange(len(x), device=x.device)
    with torch.no_grad():
        found = model(batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return [found[row, start : start + len(x)] for row, (start, x) in enumerate(zip(starts, tokens, strict=True))]
