"""A rollout and its trainer compute the same log-probabilities: with PyTorch almost, with detkern exactly.

A causal language model of Hugging Face (Llama and Qwen3, random weights from a configuration; nothing is downloaded)
writes tokens one at a time with a KV cache, in groups of mixed sizes. The trainer then computes the log-probabilities
of what was written in one forward over whole sequences, laid out in several ways:

    right      padded on the right to one length
    left       every sequence starts at some multiple of 16, padding before and after it
    packed     all sequences in one row, each starting at a multiple of 16
    left, any / packed, any     at any offset, with the attention's products by the contract "fma"

Printed for each: the largest difference of a token's log-probability between rollout and trainer, and the mean
KL divergence of the two distributions, with PyTorch alone and under detkern.torch.batch_invariant_mode, where both are
0.0.

    pip install ".[examples]"
    python examples/rollout_vs_trainer.py                                   # small, on the CPU
    python examples/rollout_vs_trainer.py --device cuda --dtype bfloat16    # an NVIDIA GPU, with ".[cuda13]"
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import packages, peak_memory, torch_device

with packages():
    import click
    import torch
    import transformers
    from rich.console import Console
    from rich.table import Table
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from detkern.torch import batch_invariant_mode, convert, revert, zero_main_grads

STEP = 16  # k of one mma16 group: where a sequence may start without a change to its bits
SIZES = (1, 2, 5, 8, 16)  # the rollout's batch sizes, in turn
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
Sequences = list[torch.Tensor]


@dataclass
class Layout:
    """One forward of the trainer: tokens [rows, L], their positions, an additive or a padding mask, and where in it
    each sequence lies: (row, start)."""

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    places: list[tuple[int, int]]


@dataclass
class Result:
    """Differences between rollout and trainer. differences: |log p| of each written token, by layout, [sequence,
    token].
    gradients: elements of all parameters' gradients that differ from those of the first layout. memory: the most at
    once."""

    kl: dict[str, float] = field(default_factory=dict)
    differences: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    memory: dict[str, str] = field(default_factory=dict)


def make_model(
    name: str, layers: int, large: bool, device: torch.device, dtype: torch.dtype, attention: str = "sdpa"
) -> Any:
    config_class, model_class = MODELS[name]
    sizes = LARGE if large else SMALL
    torch.manual_seed(0)
    config = config_class(
        **sizes,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        initializer_range=0.05,  # larger than the default, so that the distributions are not flat
        attn_implementation=attention,
    )
    return model_class(config).to(device, dtype).eval()


def prompts(count: int, vocabulary: int, device: torch.device) -> Sequences:
    """Of lengths between 5 and 43; a group of the rollout shares one."""
    generator = torch.Generator().manual_seed(1)
    found: Sequences = []
    for group, size in enumerate(group_sizes(count)):
        length = 5 + group * 19 % 39
        found += torch.randint(0, vocabulary, (size, length), generator=generator).to(device).unbind()
    return found


def group_sizes(count: int) -> list[int]:
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(SIZES[len(sizes) % len(SIZES)], count - sum(sizes)))
    return sizes


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1, dtype=torch.float32)


@torch.no_grad()
def rollout(model: Any, start: Sequences, tokens: int) -> tuple[Sequences, list[torch.Tensor]]:
    """Each prompt with `tokens` more, and the log-probabilities [tokens, vocabulary] that they were drawn from."""
    # The name of the argument for the KV cache has changed between versions of transformers.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    generator = torch.Generator(start[0].device).manual_seed(2)
    sequences: Sequences = []
    distributions: list[torch.Tensor] = []
    first = 0
    for size in group_sizes(len(start)):
        batch = torch.stack(start[first : first + size])
        first += size
        cache = DynamicCache(config=model.config)
        step, written, found = batch, [batch], []
        for _ in range(tokens):
            logits = model(step, **{cache_name: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
            found.append(log_probabilities(logits))
            step = torch.multinomial(found[-1].exp(), 1, generator=generator)
            written.append(step)
        sequences += torch.cat(written, 1).unbind()
        distributions += torch.stack(found, 1).unbind()
    return sequences, distributions


def right_padded(sequences: Sequences, _: int) -> Layout:
    return _padded(sequences, [0] * len(sequences))


def left_padded(sequences: Sequences, step: int) -> Layout:
    """The longest starts latest."""
    return _padded(sequences, [step * (1 + i % 3) for i in range(len(sequences))])


def _padded(sequences: Sequences, starts: list[int]) -> Layout:
    longest = max(start + len(x) for start, x in zip(starts, sequences, strict=True))
    longest = -(-longest // STEP) * STEP  # so that every row begins at a multiple, as gradients of weights need it
    tokens = sequences[0].new_zeros(len(sequences), longest)
    mask, positions = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for row, (start, x) in enumerate(zip(starts, sequences, strict=True)):
        tokens[row, start : start + len(x)] = x
        mask[row, start : start + len(x)] = 1
        positions[row, start : start + len(x)] = torch.arange(len(x), device=x.device)
    return Layout(tokens, positions, mask, list(enumerate(starts)))


def packed(sequences: Sequences, step: int) -> Layout:
    """One row; a token sees its own sequence, up to itself."""
    starts, end = [], 0
    for x in sequences:
        starts.append(-(-end // step) * step)
        end = starts[-1] + len(x)
    end = -(-end // step) * step
    tokens = sequences[0].new_zeros(1, end)
    positions, owner = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    for i, (start, x) in enumerate(zip(starts, sequences, strict=True)):
        tokens[0, start : start + len(x)] = x
        positions[0, start : start + len(x)] = torch.arange(len(x), device=x.device)
        owner[0, start : start + len(x)] = i
    seen = (owner == owner.T) & torch.ones(end, end, dtype=torch.bool, device=tokens.device).tril()
    return Layout(tokens, positions, seen[None, None], [(0, start) for start in starts])


def trainer(model: Any, layout: Layout, sequences: Sequences, tokens: int) -> list[torch.Tensor]:
    """The log-probabilities [tokens, vocabulary] that the whole sequences give to what was written."""
    mask = layout.mask
    if mask.dim() == 4:
        dtype = model.dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    logits = model(layout.tokens, attention_mask=mask, position_ids=layout.positions, use_cache=False).logits
    found = []
    for (row, start), x in zip(layout.places, sequences, strict=True):
        end = start + len(x) - 1  # the last token is predicted by the one before it
        found.append(log_probabilities(logits[row, end - tokens : end]))
    return found


def gradients(model: Any, layout: Layout, sequences: Sequences, tokens: int, detkern: bool) -> list[torch.Tensor]:
    """Of all parameters, float32: those of the mean log-probability of what was written."""
    mode: Any = contextlib.nullcontext()
    if detkern:
        convert(model, accumulate=True)
        zero_main_grads(model)
        mode = batch_invariant_mode(strict=True)
    model.zero_grad()
    with mode:
        distributions = torch.stack(trainer(model, layout, sequences, tokens))
        written = torch.stack([x[-tokens:] for x in sequences])[..., None]
        (-distributions.gather(-1, written).sum() / written.numel()).backward()
    found = [p.main_grad.clone() if detkern else p.grad.float() for p in model.parameters()]
    if detkern:
        revert(model)
    model.zero_grad()
    return found


# Where sequences start at any offset only attention has another contract, and weights' gradients are not asked for.
LAYOUTS = {
    "right": (right_padded, STEP, False),
    "left": (left_padded, STEP, False),
    "packed": (packed, STEP, False),
    "left, any": (left_padded, 7, True),
    "packed, any": (packed, 1, True),
}


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str, device: torch.device) -> Iterator[None]:
    start = _now(device)
    yield
    seconds[name] = seconds.get(name, 0.0) + _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def compare(model: Any, start: Sequences, tokens: int, detkern: bool) -> Result:
    """Rollout against trainer in every layout."""
    device, result = start[0].device, Result()
    rollouts: dict[bool, tuple[Sequences, list[torch.Tensor]]] = {}
    first: list[torch.Tensor] = []
    for name, (make, step, any_offset) in LAYOUTS.items():
        contract = {"bmm": "fma"} if any_offset else None
        mode: Any = batch_invariant_mode(contract=contract, strict=True) if detkern else contextlib.nullcontext()
        with mode, torch.no_grad():
            own = any_offset and detkern
            if own not in rollouts:
                rollout(model, start[:3], 2)  # compiles kernels
                with timed(result.seconds, "rollout" + (" (fma attention)" if own else ""), device):
                    rollouts[own] = rollout(model, start, tokens)
            sequences, distributions = rollouts[own]
            layout = make(sequences, step)
            trainer(model, layout, sequences, tokens)
            with timed(result.seconds, f"trainer, {name}", device):
                trained = trainer(model, layout, sequences, tokens)
        p, q = torch.stack(distributions).double(), torch.stack(trained).double()
        written = torch.stack([x[-tokens:] for x in sequences])[..., None]
        result.differences[name] = (p - q).gather(-1, written)[..., 0].abs().cpu()
        # With p - q of masses that are not quite 1 after rounding: never negative, and 0.0 for equal distributions
        # alone.
        result.kl[name] = float((p.exp() * (p - q) - p.exp() + q.exp()).sum(-1).mean())
        if any_offset:
            continue
        gradients(model, layout, sequences, tokens, detkern)
        with peak_memory(device, result.memory, name), timed(result.seconds, f"gradients, {name}", device):
            found = gradients(model, layout, sequences, tokens, detkern)
        first = first or found
        result.gradients[name] = sum(
            int((one.view(torch.int32) != other.view(torch.int32)).sum())
            for one, other in zip(first, found, strict=True)
        )
    return result


def report(console: Console, title: str, results: dict[str, Result]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("trainer's layout")
    for library in results:
        table.add_column(f"{library}: largest difference", justify="right")
        table.add_column("mean KL", justify="right")
    for name in LAYOUTS:
        cells = []
        for result in results.values():
            largest = float(result.differences[name].max())
            cells += [f"{largest:.3g}" if largest else "0.0", f"{result.kl[name]:.3g}" if result.kl[name] else "0.0"]
        table.add_row(name, *cells)
    console.print(table)
    trained = Table(
        title="gradients of all parameters: elements that differ between layouts, peak memory", title_justify="left"
    )
    trained.add_column("trainer's layout")
    for library in results:
        trained.add_column(library, justify="right")
        trained.add_column("peak", justify="right")
    for name in list(results.values())[-1].gradients:
        trained.add_row(name, *(x for r in results.values() for x in (f"{r.gradients[name]:,}", r.memory[name])))
    console.print(trained)
    times = Table(title="seconds", title_justify="left")
    times.add_column("")
    for library in results:
        times.add_column(library, justify="right")
    for name in list(results.values())[-1].seconds:
        taken = [result.seconds.get(name) for result in results.values()]
        times.add_row(name, *("" if seconds is None else f"{seconds:.3f}" for seconds in taken))
    console.print(times)


def draw(path: Path, model: str, results: dict[str, Result]) -> None:
    """The difference of every token, and the largest, by how many tokens were written before it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(11, 4), sharey=True)
    top = max(float(x.max()) for result in results.values() for x in result.differences.values()) or 1.0
    for axis, (library, result) in zip(axes, results.items(), strict=True):
        for name, values in result.differences.items():
            x = torch.arange(values.shape[1]).expand_as(values)
            axis.scatter(x.flatten(), values.flatten(), s=4, alpha=0.5, label=name)
        largest = max(float(x.max()) for x in result.differences.values())
        axis.set_title(f"{model}, {library}: at most {largest:.2g}")
        axis.set_xlabel("token written")
        axis.set_yscale("symlog", linthresh=top / 100)
        axis.set_ylim(-top / 200, top * 2)
    axes[0].set_ylabel("|log p of rollout − log p of trainer|")
    axes[0].legend(loc="center right", fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@click.command()
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True, help="Default: both.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32", show_default=True)
@click.option("--attention", type=click.Choice(["sdpa", "eager"]), default="sdpa", show_default=True)
@click.option("--sequences", type=click.IntRange(1), help="Default: 8 on the CPU, else 32.")
@click.option("--tokens", type=click.IntRange(1), help="To write in each. Default: 12 on the CPU, else 64.")
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True)
@click.option("--picture", type=click.Path(path_type=Path), help="A folder for one picture a model.")
def main(
    models: tuple[str, ...],
    device: str,
    dtype: str,
    attention: str,
    sequences: int | None,
    tokens: int | None,
    layers: int,
    picture: Path | None,
) -> None:
    """Compare a rollout with its trainer, with PyTorch alone and with detkern. Exit code 1 where detkern differs."""
    console = Console(width=120)
    place, large = torch_device(device), device != "cpu"
    sequences, tokens = sequences or (32 if large else 8), tokens or (64 if large else 12)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    console.print(f"{versions}, {device}, {dtype}, {attention}: "
                  f"{sequences} sequences, {tokens} tokens written in each, {layers} layers")  # fmt: skip
    differs = False
    for name in models or MODELS:
        model = make_model(name, layers, large, place, getattr(torch, dtype), attention)
        start = prompts(sequences, model.config.vocab_size, place)
        results = {library: compare(model, start, tokens, library == "detkern") for library in ("PyTorch", "detkern")}
        report(console, f"{name}: rollout against trainer", results)
        ours = results["detkern"]
        differs |= any(bool(x.any()) for x in ours.differences.values()) or any(ours.kl.values())
        differs |= any(ours.gradients.values())
        if picture:
            draw(picture / f"rollout-{name}.png", name, results)
            console.print(f"picture: {picture / f'rollout-{name}.png'}")
    console.print("detkern: rollout and trainer " + ("DIFFER" if differs else "agree to the bit"))
    sys.exit(differs)


if __name__ == "__main__":
    main()
