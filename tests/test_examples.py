"""The examples of whole models, small, on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import numpy as np
import torch

import detkern

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 76,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FOLDER = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """PyTorch's threads cost more than they bring at these sizes, much more where other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(name: str) -> Any:
    """An example's module, as running it would import it: with its folder on sys.path."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("model", "attention"), [("llama", "sdpa"), ("qwen3", "eager")])
def test_rollout_and_trainer_agree_to_the_bit(
    model: str, attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load("rollout_vs_trainer")
    monkeypatch.setattr(example, "SMALL", SMALL)
    done = CliRunner().invoke(
        example.main,
        ["--model", model, "--attention", attention, "--sequences", "4", "--tokens", "3", "--layers", "2", "--picture",
            str(tmp_path)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "rollout and trainer agree to the bit" in done.output
    for layout in example.LAYOUTS:
        assert layout in done.output
    assert (tmp_path / f"rollout-{model}.png").stat().st_size > 5000


def test_the_rollouts_comparison_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("rollout_vs_trainer")
    monkeypatch.setattr(example, "SMALL", SMALL)
    model = example.make_model("llama", 1, False, torch.device("cpu"), torch.float32)
    start = example.prompts(4, 100, torch.device("cpu"))
    sequences, _ = example.rollout(model, start, 3)
    layout = example.packed(sequences, 16)
    assert [start % 16 for _, start in layout.places] == [0] * 4
    trained = example.trainer(model, layout, sequences, 3)
    layout.positions[0, layout.places[1][1] + 2] += 1
    moved = example.trainer(model, layout, sequences, 3)
    assert [torch.equal(a, b) for a, b in zip(trained, moved, strict=True)] == [True, False, True, True]


def test_training_twice_and_in_micro_batches(tmp_path: Path) -> None:
    example = load("train_deterministic")
    picture = tmp_path / "training.png"
    done = CliRunner().invoke(
        example.main,
        ["--width", "32", "--layers", "1", "--batch", "4", "--steps", "2", "--cuts", "2", "--picture", str(picture)],
    )  # fmt: skip
    torch.use_deterministic_algorithms(False)
    assert done.exit_code == 0, done.output
    assert "every parameter is equal to the bit" in done.output
    assert "DIFFERS" not in done.output
    assert done.output.count(" equal ") == 13  # parameters
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_ratio_of_grpo_is_one(dtype: str) -> None:
    done = CliRunner().invoke(load("grpo").main, ["--dtype", dtype, "--prompts", "2", "--group", "2", "--tokens", "4"])
    torch.use_deterministic_algorithms(False)
    assert done.exit_code == 0, done.output
    assert "detkern  16 tokens, ratio exactly 1: 16, furthest from 1: 0\n" in done.output
    assert "21 of 21 parameters have the whole batch's bits" in done.output


def test_a_policy_that_has_changed_has_other_ratios() -> None:
    example = load("grpo")
    model = example.make_model(torch.device("cpu"), torch.float32)
    batch = example.rollout(model, [torch.arange(1, 6)], 2, 4)
    with torch.no_grad():
        model.lm_head.weight[::2] *= 1.1
    _, ratios = example.loss_of(model, batch, slice(None), 2)
    assert (ratios != 1).all()


def test_a_width_that_no_head_fits_is_refused() -> None:
    done = CliRunner().invoke(load("train_deterministic").main, ["--width", "65"])
    assert done.exit_code == 2
    assert "65 is not a multiple of 32" in done.output


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(load("embeddings").main, ["--model", str(tmp_path)])
    assert done.exit_code == 2
    assert f"no model in {tmp_path}" in done.output


def test_a_changed_micro_batch_is_seen() -> None:
    example = load("train_deterministic")
    settings = example.Settings(torch.device("cpu"), torch.float32, 32, 1, 4, 1, True)
    model, tokens = settings.model(), settings.tokens(0)
    whole = {name: x.clone() for name, x in example.gradients(model, tokens, 1, settings)[0].items()}
    tokens[3, 5] += 1
    parts, _ = example.gradients(model, tokens % 256, 2, settings)
    assert all(example.differing(whole, parts).values())


@pytest.mark.parametrize("published", [False, True], ids=["random", "published"])
def test_embeddings_are_the_same_in_any_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bool) -> None:
    example = load("embeddings")
    monkeypatch.setattr(example, "LENGTHS", (33,))
    monkeypatch.setattr(example, "BATCHES", (3,))
    monkeypatch.setattr(example, "SENTENCES", example.SENTENCES[:5])
    if not published:
        _encoder(tmp_path)
    picture = tmp_path / "embeddings.png"
    model = [] if published else ["--model", str(tmp_path)]
    done = CliRunner().invoke(example.main, [*model, "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    assert "has its own bits everywhere" in done.output
    assert picture.stat().st_size > 5000


def _encoder(folder: Path) -> None:
    """A small encoder of random weights in the files that a published one has; its widths fill no vector evenly."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel

    words = sorted({word for sentence in load("embeddings").SENTENCES for word in sentence.replace(",", " ,").split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words) + 1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=77,
        initializer_range=0.2,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)


@pytest.mark.parametrize("device", ["cuda", "cuda:99", "meta", "abacus"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "real_weights"])
def test_a_device_that_is_not_here_is_one_sentence_and_status_2(name: str, device: str) -> None:
    """No GPU, a device that PyTorch has and no backend serves, and no device at all."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("gpu: there is one")
    done = CliRunner().invoke(load(name).main, ["--device", device])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"cannot run on --device {device}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_one_sentence_and_status_2(name: str) -> None:
    package = "tokenizers" if name == "real_weights" else "torch"
    path = FOLDER / f"{name}.py"
    code = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.path.insert(0, {str(FOLDER)!r}); "
        f"runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f'{package} is not installed: pip install ".[examples]"\n'


@pytest.mark.parametrize("agrees", [True, False])
def test_where_numpy_agrees_with_itself_the_example_says_what_to_set(
    agrees: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("real_weights")

    def by_rows(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        result = np.array(detkern.linear(x, weight, bias))
        result[0, 0] += 0 if agrees else len(x)
        return result

    monkeypatch.setattr(example, "numpy_linear", by_rows)
    monkeypatch.setattr(example, "SENTENCES", example.SENTENCES[-2:])
    monkeypatch.setattr(example, "BATCHES", (2,))
    monkeypatch.setattr(example, "TYPES", {"f32": np.dtype(np.float32)})
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.setattr(sys, "argv", ["real_weights.py"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert not ended.value.code
    said = capsys.readouterr().out
    assert ("happens to agree with itself" in said) == agrees
    openblas = "openblas" in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    assert ("set OPENBLAS_CORETYPE=Haswell" in said) == (agrees and openblas)
