"""Small causal language models of Hugging Face, random weights, and ways to lay their tokens out."""

from __future__ import annotations

import inspect
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
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": 4,
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


class Decoder:
    """Greedy decoding with a static cache: what a step reads and writes lies in tensors that stay.

    token [B, 1] and position [1] are read, logits [B, vocabulary] and the cache written.
    """

    def __init__(self, model: Any, prompt: Any, room: int = 48) -> None:
        import torch
        from transformers import StaticCache

        self.model, self.room = model, room
        # The name of the argument for the KV cache has changed between versions of transformers.
        names = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._takes_place = "cache_position" in names
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        places = torch.arange(prompt.shape[1], device=prompt.device)
        self.logits = self._forward(prompt, places)
        self.token = self.logits.argmax(-1, keepdim=True)
        self.position = torch.tensor([prompt.shape[1]], device=prompt.device)

    def _forward(self, tokens: Any, places: Any) -> Any:
        import torch

        seen = torch.arange(self.room, device=tokens.device) <= places[:, None]
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=tokens.device)
        mask = mask.masked_fill(~seen, torch.finfo(self.model.dtype).min).expand(len(tokens), 1, *seen.shape)
        known = {self._cache_argument: self.cache, "use_cache": True, "attention_mask": mask}
        if self._takes_place:
            known["cache_position"] = places
        return self.model(tokens, position_ids=places[None], **known).logits[:, -1]

    def run(self) -> None:
        """One step, without what makes the next one's input of it."""
        self.logits.copy_(self._forward(self.token, self.position))

    def written(self) -> None:
        """The next step's input."""
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def step(self) -> Any:
        self.run()
        self.written()
        return self.logits

    def rehearse(self) -> None:
        """A `run`, and everything in the cache as it was before: what a cache counts itself would be counted twice."""
        import torch

        before = [
            {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in vars(layer).items()}
            for layer in self.cache.layers
        ]
        self.run()
        for layer, kept in zip(self.cache.layers, before, strict=True):
            for name, value in kept.items():
                if isinstance(value, torch.Tensor):
                    getattr(layer, name).copy_(value)  # in place: a graph holds where it lies
                else:
                    setattr(layer, name, value)

    def capture(self) -> Any:
        """A CUDA graph of `run`, whose kernels a step before has compiled."""
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.rehearse()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph
