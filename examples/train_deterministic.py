"""A small transformer trained twice from one seed has equal weights; cut into other micro-batches, too.

The model is made of plain modules: embedding, RMSNorm, attention, gated MLP. `detkern.torch.convert` gathers the
gradients of all parameters over micro-batches in float32, and `batch_invariant_mode` computes attention, norms and
loss.

1. Two runs from one seed: every weight must have equal bits.
2. The gradients of one batch, whole and cut into micro-batches: those of every parameter must have equal bits.
3. A whole training in both cuts: every weight must have equal bits.

The same is counted for PyTorch alone, with the time of a training and its peak memory beside.

    pip install ".[examples]"
    python examples/train_deterministic.py
    python examples/train_deterministic.py --device cuda --dtype bfloat16
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import packages, peak_memory, torch_device

with packages():
    import click
    import torch
    import torch.nn.functional as F
    from rich.console import Console
    from rich.table import Table

    from detkern.torch import batch_invariant_mode, convert, zero_main_grads

VOCABULARY, LENGTH = 256, 32  # a sequence is a multiple of 16 tokens, so any split into sequences keeps mma16's bits


class RMSNorm(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scaled.to(x.dtype) * self.weight


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.gate_up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        probabilities = torch.softmax(scores.masked_fill(future, float("-inf")), -1, dtype=torch.float32).to(x.dtype)
        x = x + self.out((probabilities @ v).transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Transformer(torch.nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Settings:
    device: torch.device
    dtype: torch.dtype
    width: int
    layers: int
    batch: int
    steps: int
    detkern: bool

    def model(self) -> Transformer:
        torch.manual_seed(0)
        model = Transformer(self.width, self.layers, self.width // 32).to(self.device, self.dtype)
        if self.detkern:
            convert(model, accumulate=True)
        return model

    def tokens(self, step: int) -> torch.Tensor:
        """Sequences with something to learn: a token follows from the one before it, the first is drawn."""
        generator = torch.Generator().manual_seed(step)
        found = [torch.randint(0, VOCABULARY, (self.batch, 1), generator=generator)]
        for _ in range(LENGTH):
            found.append((5 * found[-1] + 7) % VOCABULARY)
        return torch.cat(found, 1).to(self.device)


def gradients(model: Transformer, tokens: torch.Tensor, cuts: int, settings: Settings) -> tuple[dict[str, Any], float]:
    """The gradients of one batch in `cuts` micro-batches, float32, and the loss."""
    model.zero_grad()
    zero_main_grads(model)
    mode: Any = batch_invariant_mode(strict=True) if settings.detkern else contextlib.nullcontext()
    total = 0.0
    for part in tokens.chunk(cuts):
        with mode:
            logits = model(part[:, :-1])
            losses = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum")
            loss = losses / (tokens.shape[0] * LENGTH)
        loss.backward()  # follows the forward's contracts outside of the mode too
        total += float(loss.detach())
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.main_grad if settings.detkern else parameter.grad
        found[name] = gradient.float()
    return found, total


def train(settings: Settings, cuts: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after all steps, and the losses. AdamW on float32 copies."""
    model = settings.model()
    parameters = dict(model.named_parameters())
    masters = {name: p.detach().float().clone() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=2e-3, foreach=False, fused=False)
    losses = []
    for step in range(settings.steps):
        found, loss = gradients(model, settings.tokens(step), cuts, settings)
        losses.append(loss)
        for name, master in masters.items():
            master.grad = found[name]
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
    return {name: master.cpu() for name, master in masters.items()}, losses


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, int]:
    """How many elements of each tensor differ in their bits."""
    return {name: int((a[name].view(torch.int32) != b[name].view(torch.int32)).sum()) for name in a}


def draw(path: Path, losses: dict[str, list[float]], cut: dict[str, dict[str, int]], sizes: dict[str, int]) -> None:
    """Losses, and for each tensor the share of its gradient that depends on the cut."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for library, values in losses.items():
        left.plot(values, label=library, linestyle="-" if library == "detkern" else "--")
    left.set(xlabel="step", ylabel="loss", title="training")
    left.legend()
    names = list(sizes)
    for offset, (library, counts) in zip((-0.2, 0.2), cut.items(), strict=True):
        shares = [100 * counts[name] / sizes[name] for name in names]
        right.barh([i + offset for i in range(len(names))], shares, height=0.4, label=library)
    right.set_yticks(range(len(names)), names, fontsize=6)
    right.set(xlabel="elements of the gradient that another cut changes (%)", title="micro-batches")
    right.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32", show_default=True)
@click.option("--width", type=click.IntRange(32), default=64, show_default=True, help="A multiple of 32.")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--batch", type=click.IntRange(2), default=8, show_default=True, help="Sequences of 32 tokens.")
@click.option("--steps", type=click.IntRange(1), default=20, show_default=True)
@click.option("--cuts", type=click.IntRange(2), default=4, show_default=True, help="Micro-batches of the other split.")
@click.option("--picture", type=click.Path(path_type=Path))
def main(
    device: str, dtype: str, width: int, layers: int, batch: int, steps: int, cuts: int, picture: Path | None
) -> None:
    """Train twice, then in other micro-batches. Exit code 1 where bits differ that must not."""
    if width % 32:
        raise click.BadParameter(f"{width} is not a multiple of 32", param_hint="--width")
    console, place = Console(width=120), torch_device(device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # for PyTorch alone
    failed = False
    cut: dict[str, dict[str, int]] = {}
    losses: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    rows: dict[str, list[str]] = {}
    for library in ("PyTorch", "detkern"):
        settings = Settings(place, getattr(torch, dtype), width, layers, batch, steps, library == "detkern")
        memory: dict[str, str] = {}
        train(settings, 1)  # compiles kernels
        with peak_memory(place, memory, library):
            begin = time.perf_counter()
            first, losses[library] = train(settings, 1)  # which ends on the CPU
            seconds = time.perf_counter() - begin
        again = sum(differing(first, train(settings, 1)[0]).values())
        model = settings.model()
        whole, _ = gradients(model, settings.tokens(0), 1, settings)
        whole = {name: gradient.clone() for name, gradient in whole.items()}
        parts, _ = gradients(model, settings.tokens(0), cuts, settings)
        cut[library] = differing(whole, parts)
        sizes = {name: gradient.numel() for name, gradient in whole.items()}
        in_gradients = sum(cut[library].values())
        in_weights = sum(differing(first, train(settings, cuts)[0]).values())
        rows[library] = [f"{again:,}", f"{in_gradients:,}", f"{in_weights:,}", f"{seconds:.2f} s", memory[library]]
        failed |= settings.detkern and bool(again or in_gradients or in_weights)
    summary = Table(title=f"{device}, {dtype}: elements whose bits differ", title_justify="left")
    for heading in ("", "two runs", f"1 or {cuts} micro-batches: gradients of all parameters",
                    f"the same: all weights after {steps} steps", "one training", "peak memory"):  # fmt: skip
        summary.add_column(heading, justify="right")
    for library, cells in rows.items():
        summary.add_row(library, *cells)
    console.print(summary)
    tensors = Table(title=f"gradients of one batch, whole or in {cuts} micro-batches", title_justify="left")
    for heading in ("tensor", "elements", "PyTorch: differ", "detkern: differ", "with detkern"):
        tensors.add_column(heading, justify="left" if heading == "tensor" else "right")
    for name, size in sizes.items():
        ours = cut["detkern"][name]
        verdict = "DIFFERS" if ours else "equal"
        tensors.add_row(name, f"{size:,}", f"{cut['PyTorch'][name]:,}", f"{ours:,}", verdict)
    console.print(tensors)
    console.print(f"loss: {losses['detkern'][0]:.4f} to {losses['detkern'][-1]:.4f}")
    if picture:
        draw(picture, losses, cut, sizes)
        console.print(f"picture: {picture}")
    console.print("detkern: " + ("bits DIFFER that must not" if failed else "every parameter is equal to the bit"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
