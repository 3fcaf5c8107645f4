"""models.toml as data: the linear layers of published models, whole or as one of several tensor-parallel ranks has
them."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DEGREES", "EXPERTS", "RANKS", "VOCABULARIES", "Model", "layers", "load", "lora"]

PATH = Path(__file__).parent / "models.toml"

DEGREES = (1, 2, 4, 8)  # tensor parallel
RANKS = (8, 16, 32, 64)  # of LoRA
EXPERTS = (8, 256)  # that a router chooses from: fewest and most
VOCABULARIES = (32_000, 262_144)  # smallest and largest


@dataclass(frozen=True, slots=True)
class Model:
    """A row of models.toml, which says what the fields are; 0 where a model has no such thing."""

    name: str
    source: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    intermediate: int = 0
    gated: bool = True
    experts: int = 0
    moe: int = 0
    shared: int = 0
    kv_lora: int = 0
    q_lora: int = 0
    nope: int = 0
    rope: int = 0
    v_dim: int = 0

    @property
    def cuts(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that divide its heads and everything that is cut."""
        whole = (self.heads, self.intermediate, self.moe, self.shared)
        return tuple(
            degree
            for degree in DEGREES
            if all(size % degree == 0 for size in whole)
            and (not self.kv_heads or self.kv_heads % degree == 0 or degree % self.kv_heads == 0)
        )


@functools.cache
def load(path: Path = PATH) -> tuple[Model, ...]:
    """Read models.toml. Raises ValueError for two models of one name."""
    models = tuple(Model(**row) for row in tomllib.loads(path.read_text())["model"])
    if len({model.name for model in models}) != len(models):
        raise ValueError(f"{path} has two models of one name")
    return models


def layers(model: Model, degree: int) -> dict[str, tuple[int, int]]:
    """(N, K) of the weights [N, K] that one of `degree` ranks has, by what the layer does. What makes heads,
    intermediate values or logits is cut by columns (N), what reads them by rows (K); key-value heads of which there are
    fewer than ranks are repeated, vocabularies are padded to 64, and routers and low-rank projections stay whole.

    Layers of one shape in one model stand here once under each name: fused (qkv, gate_up) and as their parts (q, k,
    up).
    """
    h, d = model.hidden, degree
    found = _latent(model, d) if model.kv_lora else _attention(model, d)
    for prefix, size, gated in (
        ("", model.intermediate, model.gated),
        ("expert_", model.moe, True),
        ("shared_", model.shared, True),
    ):
        if size:
            found[f"{prefix}up"] = (size // d, h)
            found[f"{prefix}down"] = (h, size // d)
            if gated:
                found[f"{prefix}gate_up"] = (2 * size // d, h)
    if EXPERTS[0] <= model.experts <= EXPERTS[1]:
        found["router"] = (model.experts, h)
    if VOCABULARIES[0] <= model.vocab <= VOCABULARIES[1]:
        # Whole it is what the checkpoint holds; cut, what servers pad it to.
        found["lm_head"] = (model.vocab if d == 1 else -(-model.vocab // 64) * 64 // d, h)
    return found


def _attention(model: Model, d: int) -> dict[str, tuple[int, int]]:
    h, q, kv = model.hidden, model.heads // d * model.head_dim, max(model.kv_heads // d, 1) * model.head_dim
    return {"qkv": (q + 2 * kv, h), "q": (q, h), "k": (kv, h), "o": (h, q)}


def _latent(model: Model, d: int) -> dict[str, tuple[int, int]]:
    """Multi-head latent attention."""
    h, heads = model.hidden, model.heads // d
    found = {
        "kv_a": (model.kv_lora + model.rope, h),
        "kv_b": (heads * (model.nope + model.v_dim), model.kv_lora),
        "q_b": (heads * (model.nope + model.rope), model.q_lora or h),
        "o": (h, heads * model.v_dim),
    }
    if model.q_lora:
        found["qkv_a"] = (model.q_lora + model.kv_lora + model.rope, h)
    return found


def lora(base: tuple[int, int], rank: int) -> dict[str, tuple[int, int]]:
    """(N, K) of the two factors beside a weight [N, K]."""
    n, k = base
    return {"lora_a": (rank, k), "lora_b": (n, rank)}
