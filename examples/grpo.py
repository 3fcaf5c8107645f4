"""A step of GRPO whose policy ratio is exactly 1: rollout and trainer compute the same log-probabilities, to the bit.

A small Llama of Hugging Face (random weights from a configuration; nothing is downloaded) samples completions of
prompts of several lengths, token by token with a KV cache. The trainer computes the log-probabilities of all of them
again in one forward over padded sequences, and the loss of GRPO: group-relative advantages, the clipped ratio of new
and old probabilities, an entropy bonus. Before the first update the policy is the one that sampled, so every ratio
should be 1. With PyTorch it is near 1; with detkern it is 1.0, and no logits are made for the loss:

    detkern.torch.convert(model, logits="fused", accumulate=True)
    logp, entropy = model(tokens).logits.logp(targets, return_entropy=True)

The gradients are computed twice, of the whole batch and in micro-batches, and compared.

    pip install ".[examples]"
    python examples/grpo.py                                    # small, on the CPU
    python examples/grpo.py --device cuda --dtype bfloat16     # an NVIDIA GPU, with ".[cuda13]"
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from machine import packages, torch_device

with packages():
    import click
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import detkern.torch as dt

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
IGNORED = -100
CLIP, ENTROPY = 0.2, 0.01
TEMPERATURE = 0.8


@dataclass
class Rollout:
    """Sequences [N, L] padded on the right, L a multiple of 16, the targets of every position [N, L] (IGNORED in
    prompts and padding), the log-probabilities with which they were sampled, float32, 0 where ignored, and rewards
    [N]."""

    tokens: torch.Tensor
    targets: torch.Tensor
    logp: torch.Tensor
    rewards: torch.Tensor


def make_model(device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2)).to(device, dtype).eval()


def log_probabilities(logits: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of targets, 0 where ignored, and the entropy: of a fused head, or by PyTorch of its logits."""
    if not isinstance(logits, torch.Tensor):
        return logits.logp(targets, temperature=TEMPERATURE, return_entropy=True)
    every = torch.log_softmax(logits.float() / TEMPERATURE, -1)
    chosen = every.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(targets == IGNORED, 0.0), -(every.exp() * every).sum(-1)


@torch.no_grad()
def rollout(model: Any, prompts: list[torch.Tensor], group: int, length: int) -> Rollout:
    """`group` completions of each prompt, one prompt after the other, token by token."""
    generator = torch.Generator().manual_seed(1)
    sequences, sampled = [], []
    for prompt in prompts:
        written, cache, found = prompt.repeat(group, 1), None, []
        step = written
        for _ in range(length):
            outputs = model(input_ids=step, past_key_values=cache, use_cache=True)
            cache, logits = outputs.past_key_values, outputs.logits[:, -1, :]
            scores = logits if isinstance(logits, torch.Tensor) else logits.made()
            probabilities = torch.softmax(scores.float() / TEMPERATURE, -1).cpu()
            step = torch.multinomial(probabilities, 1, generator=generator).to(prompt.device)
            found.append(log_probabilities(logits, step[:, 0])[0])
            written = torch.cat([written, step], 1)
        sequences += list(written)
        sampled += list(torch.stack(found, 1))
    # The bits of the whole batch need micro-batches of multiples of 16 tokens.
    longest = -(-max(map(len, sequences)) // 16) * 16
    tokens = torch.zeros(len(sequences), longest, dtype=torch.long, device=sequences[0].device)
    targets, logp = torch.full_like(tokens, IGNORED), torch.zeros(tokens.shape, device=tokens.device)
    for row, (sequence, old) in enumerate(zip(sequences, sampled, strict=True)):
        tokens[row, : len(sequence)] = sequence
        places = slice(len(sequence) - length - 1, len(sequence) - 1)
        targets[row, places], logp[row, places] = sequence[-length:], old
    rewards = (tokens % 7 == 0).float().mean(1)  # some rule that can be checked
    return Rollout(tokens, targets, logp, rewards)


def loss_of(model: Any, batch: Rollout, rows: slice, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO's loss of some rows, as their share of the whole batch's, and the ratios of their tokens."""
    grouped = batch.rewards.view(-1, group)
    advantages = ((grouped - grouped.mean(1, True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)[rows]
    targets = batch.targets[rows]
    logp, entropy = log_probabilities(model(input_ids=batch.tokens[rows]).logits, targets)
    ratio = torch.exp(logp - batch.logp[rows])
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages) + ENTROPY * entropy
    kept = targets != IGNORED
    return -gain[kept].sum() / (batch.targets != IGNORED).sum(), ratio[kept].detach()


def gathered(model: Any, batch: Rollout, group: int, cuts: int) -> dict[str, torch.Tensor]:
    """The gradients of a step in `cuts` micro-batches, accumulated in float32."""
    dt.zero_main_grads(model)
    step = len(batch.tokens) // cuts
    for row in range(0, len(batch.tokens), step):
        loss_of(model, batch, slice(row, row + step), group)[0].backward()
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.main_grad.clone()
    return found


@click.command()
@click.option("--device", default="cpu", help="cpu or cuda.")
@click.option("--dtype", default="float32", type=click.Choice(["float32", "float16", "bfloat16"]))
@click.option("--prompts", "count", default=4, help="Prompts, each of another length.")
@click.option("--group", default=4, help="Completions of each.")
@click.option("--tokens", default=12, help="Tokens of a completion.")
def main(device: str, dtype: str, count: int, group: int, tokens: int) -> None:
    """Sample, compute the log-probabilities again, and compare."""
    where = torch_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 1000, (5 + 6 * i,), generator=generator).to(where) for i in range(count)]
    model = make_model(where, getattr(torch, dtype))
    exact = True
    for name in ("PyTorch", "detkern"):
        ours = name == "detkern"
        if ours:
            dt.convert(model, logits="fused", accumulate=True)
            dt.zero_main_grads(model)
        with dt.batch_invariant_mode() if ours else contextlib.nullcontext():
            batch = rollout(model, prompts, group, tokens)
            _, ratios = loss_of(model, batch, slice(None), group)
            off = (ratios - 1).abs().max().item()
            click.echo(
                f"{name:8} {ratios.numel()} tokens, ratio exactly 1: {int((ratios == 1).sum())}, "
                f"furthest from 1: {off:g}"
            )
            if ours:
                exact = off == 0
                whole, parts = (gathered(model, batch, group, cuts) for cuts in (1, 2))
                equal = sum(torch.equal(whole[key], parts[key]) for key in whole)
                click.echo(
                    f"gradients in micro-batches: {equal} of {len(whole)} parameters have the whole batch's bits"
                )
                exact = exact and equal == len(whole)
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
