"""Language models of Hugging Face with random weights, of the sizes that whole steps are measured on."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from detkern.measure import timing

__all__ = ["LARGE", "MODELS", "SMALL", "attend", "cache_argument", "leave_if_missing", "make", "mode", "tokens"]

MODELS = ("llama", "qwen3")  # Qwen3 also normalises queries and keys
LARGE = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def leave_if_missing(cpu: bool) -> None:
    """End with status 2 and a sentence where transformers, PyTorch or, without `cpu`, a CUDA device is missing."""
    from detkern.dispatch.requirements import Package, install

    timing.leave_if(timing.no_torch() if cpu else timing.missing())
    timing.leave_if(Package("transformers", "transformers", install("examples")).missing())


def make(name: str, device: str, sizes: dict[str, int]) -> Any:
    """A model in bfloat16, in training; the weights of embedding and head are two parameters."""
    import torch
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[name]
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # nothing is drawn in float32 and copied
    try:
        with torch.device(device):
            config = config_class(
                **sizes, max_position_embeddings=4096, tie_word_embeddings=False, attn_implementation="eager"
            )
            return model_class(config).train()
    finally:
        torch.set_default_dtype(before)


def attend(model: Any, implementation: str) -> None:
    """The attention of the next forward, "eager" or "sdpa": the layers read it at each call."""
    model.config._attn_implementation = implementation


def cache_argument(model: Any) -> str:
    """The name of the forward's argument for the KV cache, which has changed between versions of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def tokens(model: Any, batch: int, length: int) -> Any:
    """Random ones [batch, length]."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def mode(on: bool) -> contextlib.AbstractContextManager[Any]:
    """batch_invariant_mode, strict, or nothing."""
    from detkern.torch import batch_invariant_mode

    return batch_invariant_mode(strict=True) if on else contextlib.nullcontext()
