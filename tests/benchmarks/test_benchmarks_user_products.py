"""Products of benchmarks.user_products: how they lie, what is drawn, what a run measures and when it ends."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import user_products
from benchmarks.user_products import Case, Lies, attention, draw
from detkern.measure import records, timing


def made(lies: Lies) -> Any:
    """An operand of whole numbers, each at its own place in memory."""
    return torch.arange(lies.elements, dtype=torch.float64).as_strided(lies.shape, lies.strides)


def like_a_model(layout: str, batch: int, heads: int, rows: int, depth: int) -> Any:
    """[B, H, L, D] as PyTorch's own views of a model's tensors have it."""
    if layout == "bhld":
        return torch.empty(batch, heads, rows, depth)
    if layout == "blhd":
        return torch.empty(batch, rows, heads, depth).transpose(1, 2)
    if layout == "packed":
        return torch.empty(batch, rows, 3, heads, depth)[:, :, 0].transpose(1, 2)
    return torch.empty(batch, heads, 4, depth)[:, :, :rows]


@pytest.mark.parametrize("layout", user_products.LAYOUTS)
def test_heads_lie_as_models_keep_them(layout: str) -> None:
    case = attention("values", layout, "bfloat16", 2, 5, 1, 3, 3, 8)
    assert case.a.strides == torch.empty(2, 5, 3, 3).stride()
    assert (case.b.shape, case.b.strides) == ((2, 5, 3, 8), like_a_model(layout, 2, 5, 3, 8).stride())
    scores = attention("scores", layout, "bfloat16", 2, 5, 1, 3, 3, 8)
    queries = like_a_model("blhd" if layout == "cache" else layout, 2, 5, 3, 8)
    assert (scores.a.shape, scores.a.strides) == ((2, 5, 3, 8), queries.stride())
    assert (scores.b.shape, scores.b.strides) == ((2, 5, 8, 3), like_a_model(layout, 2, 5, 3, 8).mT.stride())


@pytest.mark.parametrize("what", ["scores", "values"])
def test_heads_that_share_one_are_those_of_repeat_interleave(what: str) -> None:
    case = attention(what, "blhd", "bfloat16", 2, 3, 4, 5, 7, 8)
    a, b = made(case.a), made(case.b)
    alone = attention(what, "blhd", "bfloat16", 2, 12, 1, 5, 7, 8)
    kept = attention(what, "blhd", "bfloat16", 2, 3, 1, 5, 7, 8)
    wanted = made(alone.a) @ made(kept.b).repeat_interleave(4, 1)
    assert torch.equal((a @ b).reshape(wanted.shape), wanted)
    assert case.result == (2, 3, 4, *wanted.shape[-2:])
    assert case.bytes == 2 * (alone.a.read + kept.b.read + wanted.numel())
    assert case.flops == 2 * wanted.numel() * alone.a.shape[-1]


def test_a_draw_is_a_function_of_seed_and_index() -> None:
    drawn = [draw(7, index) for index in range(100)]
    assert drawn == [draw(7, index) for index in range(100)]
    assert drawn != [draw(8, index) for index in range(100)]
    assert [case.what for case in drawn[:5]] == ["scores", "values", "scores", "values", "batch"]
    assert {case.layout for case in drawn} == {*user_products.LAYOUTS, "nt", "nn"}
    assert {case.dtype for case in drawn} == {"bfloat16", "float16", "float32"}
    assert any(0 in case.b.strides for case in drawn)
    for case in drawn:
        assert case.bytes <= user_products.LARGEST_BYTES
        assert case.flops <= (user_products.LARGEST_F32_FLOPS if case.what == "batch" else user_products.LARGEST_FLOPS)
        assert not case.name


@pytest.mark.parametrize("case", [*user_products.NAMED, *(draw(3, index) for index in range(10))])
def test_the_problem_is_that_of_matmul(case: Case) -> None:
    problem = user_products.problem_of(case)
    outputs = problem.m * problem.n * math.prod(problem.batch)  # rows of heads that share v may be rows of one product
    assert (outputs, problem.k) == (math.prod(case.result), case.a.shape[-1])


def row(ratio: float, what: str = "values", rows: int = 1, name: str = "drawn") -> dict[str, Any]:
    return {"name": name, "what": what, "a": [2, rows, 9], "ratio": ratio}


def test_a_summary_is_of_drawn_rows_by_kind() -> None:
    rows = [row(0.5), row(2.0), row(1.0), row(3.0, rows=9), row(4.0, "batch"), row(9.0, name="f32 of few rows")]
    assert user_products.summary(rows) == {
        "values, few rows": {"count": 3, "mean": 1.0, "p90": 2.0, "p99": 2.0, "worst": 2.0},
        "values, whole sequences": {"count": 1, "mean": 3.0, "p90": 3.0, "p99": 3.0, "worst": 3.0},
        "batch, whole sequences": {"count": 1, "mean": 4.0, "p90": 4.0, "p99": 4.0, "worst": 4.0},
    }


def test_no_product_is_begun_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    begun = []

    def measure(case: Case) -> dict[str, Any]:
        nonlocal now
        now += 4
        begun.append(case)
        return {"ratio": 1.0}

    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert len(user_products.run(user_products.NAMED, measure, 110.0)) == 3
    assert begun == list(user_products.NAMED[:3])
    assert len(user_products.run(user_products.NAMED, measure)) == len(user_products.NAMED)


def test_without_a_gpu_it_says_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "missing", lambda: "there is no CUDA device")
    monkeypatch.setattr(sys, "argv", ["user_products", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        user_products.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "cannot run here: there is no CUDA device\n"
    assert list(tmp_path.iterdir()) == []


def test_sources_are_what_the_kernels_are_made_of() -> None:
    names = {str(path.relative_to(records.ROOT)) for path in user_products.sources()}
    assert {"detkern/cu/kernels/fma.cu", "detkern/cu/tensor_map.py", "detkern/cu/tile_choice.py"} <= names
    assert all(path.is_file() for path in user_products.sources())
