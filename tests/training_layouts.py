"""One batch of sequences for training, cut and laid out in several ways; every sequence starts at a multiple of 16
tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import detkern.torch as dt


@dataclass(frozen=True)
class Part:
    """One forward: tokens, positions and labels [rows, L], -100 where there is none, and an additive mask."""

    tokens: Any
    positions: Any
    labels: Any
    mask: Any


def sequences(lengths: list[int], vocabulary: int, device: str) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocabulary, (length,), generator=generator).to(device) for length in lengths]


def _labels(x: Any) -> Any:
    return torch.cat([x[1:], x.new_full((1,), -100)])


def _additive(seen: Any, dtype: Any) -> Any:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def packed(given: list[Any], dtype: Any) -> Part:
    """One row; a token sees its own sequence, up to itself."""
    owner = torch.cat([torch.full_like(x, i) for i, x in enumerate(given)])
    seen = (owner[:, None] == owner) & torch.ones(len(owner), len(owner), dtype=torch.bool, device=owner.device).tril()
    positions = torch.cat([torch.arange(len(x), device=x.device) for x in given])
    tokens, labels = torch.cat(given), torch.cat([_labels(x) for x in given])
    return Part(tokens[None], positions[None], labels[None], _additive(seen[None, None], dtype))


def padded(given: list[Any], dtype: Any) -> Part:
    """A row for each sequence, filled up on the right."""
    longest = max(len(x) for x in given)

    def rows(values: list[Any], fill: int) -> Any:
        return torch.stack([F.pad(x, (0, longest - len(x)), value=fill) for x in values])

    real = rows([torch.ones_like(x) for x in given], 0).bool()
    seen = torch.ones(longest, longest, dtype=torch.bool, device=real.device).tril() & real[:, None, None]
    positions = rows([torch.arange(len(x), device=x.device) for x in given], 0)
    return Part(rows(given, 0), positions, rows([_labels(x) for x in given], -100), _additive(seen, dtype))


Layout = Callable[[list[Any], Any], Part]


def layouts(given: list[Any], dtype: Any) -> dict[str, list[Part]]:
    """The batch whole, packed and padded, and in two cuts of micro-batches, each again packed and padded."""
    count = len(given)
    cuts = {"whole": [given], "cut": [given[:1], given[1:]], "another cut": [given[: count - 2], given[count - 2 :]]}
    ways: dict[str, Layout] = {"packed": packed, "padded": padded}
    return {
        f"{cut}, {way}": [lay(part, dtype) for part in parts]
        for cut, parts in cuts.items()
        for way, lay in ways.items()
    }


def gather(model: Any, parts: list[Part], mode: Any) -> None:
    """The gradients of a batch in its parts, into main_grad where the model is converted, else .grad."""
    count = sum(int((part.labels != -100).sum()) for part in parts)
    for part in parts:
        with mode:
            logits = model(
                part.tokens, attention_mask=part.mask, position_ids=part.positions, use_cache=False
            ).logits  # fmt: skip
            losses = F.cross_entropy(logits.flatten(0, 1).float(), part.labels.flatten(), reduction="sum")
            (losses / count).backward()


def main_gradients(model: Any, parts: list[Part], mode: Any) -> dict[str, Any]:
    """Those of a converted model, by parameter: main_grad and what further uses gathered."""
    dt.zero_main_grads(model)
    model.zero_grad()
    gather(model, parts, mode)
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, f"autograd has a gradient of {name}"
        for i, gathered in enumerate((parameter.main_grad, *parameter.further_main_grads)):
            found[f"{name}.{i}"] = gathered.clone()
    return found


def trained(model: Any, parts: list[Part], mode: Any, steps: int) -> dict[str, Any]:
    """The weights after so many steps of AdamW on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        dt.zero_main_grads(model)
        gather(model, parts, mode)
        dt.main_grads_to_grad(model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, int]:
    """How many elements differ in their bits, of the tensors where some do."""
    assert one.keys() == other.keys()
    integers = {4: torch.int32, 2: torch.int16}
    found = {
        name: int((x.view(integers[x.element_size()]) != other[name].view(integers[x.element_size()])).sum())
        for name, x in one.items()
    }
    return {name: count for name, count in found.items() if count}
