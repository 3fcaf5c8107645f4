"""The tuner without a GPU: which row of tuned.json a product belongs to, rows put together, and the file that is
written."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import forced, tune
from detkern.cu import geometry, tuned
from detkern.measure import shapes
from detkern.measure.operands import Operands
from detkern.measure.shapes import Layer, Product, Shapes
from detkern.operations.gemm.problem import gemm_problem

LAYER = Layer("model", "layer", 1000, 4104)


def _product(op: str, m: int, contract: str = "mma16") -> Product:
    return Product(LAYER, m, op, contract, "bfloat16")


@pytest.mark.parametrize("op", shapes.OPS)
@pytest.mark.parametrize("m", [1, 8, 200])
def test_a_products_key_is_its_problems(op: str, m: int) -> None:
    """What tile_choice.py looks up for the operands that the tuner measures."""
    product = _product(op, m)
    operands = Operands([product], {product: 1}, "cpu")
    a, b, out = (operands.rotating(product, name)[0] for name in (*product.operands, "out"))
    problem = gemm_problem(forced.contract_of(product), *forced._views(product, a, b, out), None, False)
    loads = "".join(load.name[0] for load in geometry.load_paths(problem))
    assert tune.key(product) == (("mma16", loads, problem.n, problem.k), problem.m)


def test_the_key_names_the_contract() -> None:
    assert tune.key(_product("forward", 8, "tree-mma16"))[0][0] == "tree-mma16"


def test_rows_that_were_not_measured_again_are_kept() -> None:
    before = [
        {"contract": "mma16", "loads": "KK", "n": 256, "k": 7168, "tiles": [[1, "a"], [8, "b"]]},
        {"contract": "mma16", "loads": "KM", "n": 512, "k": 512, "tiles": [[4096, "c"]]},
    ]
    found = {
        ("mma16", "KK", 256, 7168): {8: "new", 2: "between"},
        ("tree-mma16", "KK", 256, 7168): {4096: "tree", 16: "small"},
    }
    rows = tune.merged(before, found)
    by_key = {(row["contract"], row["loads"], row["n"], row["k"]): [tuple(one) for one in row["tiles"]] for row in rows}
    assert by_key == {
        ("mma16", "KK", 256, 7168): [(1, "a"), (2, "between"), (8, "new")],
        ("mma16", "KM", 512, 512): [(4096, "c")],
        ("tree-mma16", "KK", 256, 7168): [(16, "small"), (4096, "tree")],
    }
    assert list(by_key) == sorted(by_key)
    assert before[0]["tiles"] == [[1, "a"], [8, "b"]], "what was read is not changed"
    assert tune.merged(json.loads(json.dumps(rows)), {}) == rows
    assert tune.merged([], {}) == []


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_what_is_written_is_read_back(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.json"
    content = {
        "gpu": "a GPU", "multiprocessors": 132, "date": "2026-01-01T00:00:00+00:00",
        "command": "python -m benchmarks.tune",
        "rows": tune.merged([], {("mma16", "KK", n, 64): {1: f"tile {n}", 16: "last"} for n in range(rows)}),
    }  # fmt: skip
    tune.write(path, content)
    assert json.loads(path.read_text()) == json.loads(json.dumps(content))
    lines = path.read_text().splitlines()
    assert sum('"contract"' in line for line in lines) == rows, "a row a line, so that changes can be read"
    monkeypatch.setattr(tuned, "_FILE", path)
    tuned._rows.cache_clear()
    try:
        for n in range(rows):
            assert tuned.labels("mma16", "KK", 4, n, 64, 132) == (f"tile {n}", "last")
        assert tuned.labels("mma16", "KK", 4, rows, 64, 132) == ()
    finally:
        tuned._rows.cache_clear()


def test_tiles_are_timed_in_turn_and_the_fastest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    product = _product("forward", 8)
    operands = Operands([product], {product: 2}, "cpu")
    us = {"slow": 3.0, "fast": 1.0, "between": 2.0, "untried": 0.5}
    made: list[tuple[str, int]] = []

    def forced_call(product: Product, tile: str, a: Any, b: Any, out: Any) -> str:
        made.append((tile, out.data_ptr()))
        return tile

    monkeypatch.setattr(tune, "tiles_of", lambda *arguments: list(us))
    monkeypatch.setattr(tune, "forced_call", forced_call)
    monkeypatch.setattr(tune.timing, "capture", lambda device, calls: calls)
    monkeypatch.setattr(
        tune.timing,
        "interleave",
        lambda device, captured, turns, warm, turn_us: {
            name: [us[name], us[name] + 0.1, us[name] + 9] for name in captured
        },
    )
    found = tune.fastest(None, product, operands, 3)
    assert list(found) == ["fast", "between", "slow"]
    assert found["fast"] == pytest.approx(1.1)
    places = [tensor.data_ptr() for tensor in operands.rotating(product, "out")]
    assert made == [(tile, place) for tile in ("slow", "fast", "between") for place in places]


def test_a_run_writes_the_file_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from detkern.cu import device

    small = Shapes((1, 8), 16, (Layer("m", "a", 24, 40), Layer("m", "b", 16, 32)))
    host = types.SimpleNamespace(name="cpu", cache_bytes=4096, active=lambda: torch.no_grad())
    monkeypatch.setattr(tune.shapes, "load", lambda: small)
    monkeypatch.setattr(tune.timing, "Cuda", lambda: host)
    monkeypatch.setattr(tune.timing, "missing", lambda: None)
    monkeypatch.setattr(device, "describe", lambda index: device.CudaDevice(0, "Made-up GPU", "", (9, 0), 132, "1"))
    monkeypatch.setattr(tune, "fastest", lambda device, product, operands, count: {f"{product.op} {product.m}": 1.0})
    path, log = tmp_path / "tuned.json", tmp_path / "log"
    kept = {"contract": "mma16", "loads": "KK", "n": 7, "k": 9, "tiles": [[1, "kept"]]}
    path.write_text(json.dumps({"rows": [kept]}))
    monkeypatch.setattr(sys, "argv", ["tune", "--output", str(path), "--log", str(log), "--what", "forward,da,db,tree"])
    assert tune.main() == 0
    content = json.loads(path.read_text())
    assert (content["gpu"], content["multiprocessors"]) == ("Made-up GPU", 132)
    rows = {(row["contract"], row["loads"], row["n"], row["k"]): row["tiles"] for row in content["rows"]}
    assert rows["mma16", "KK", 7, 9] == [[1, "kept"]]
    assert rows["mma16", "KK", 24, 40] == [[1, "forward 1"], [8, "forward 8"]]
    assert rows["mma16", "KM", 40, 24] == [[16, "da 16"]]
    assert rows["mma16", "MM", 40, 16] == [[24, "db 16"]]
    assert rows["tree-mma16", "KK", 24, 40] == [[16, "forward 16"]]
    assert len(log.read_text().splitlines()) == 2 * (2 + 1 + 1 + 1)
    # From logs alone, the same again.
    monkeypatch.setattr(sys, "argv", ["tune", "--output", str(path), "--choose", str(log), str(log)])
    assert tune.main() == 0
    again = json.loads(path.read_text())
    assert again["rows"] == content["rows"]
    assert "2 runs" in again["command"]
    # Where the time is over, the status says that something is missing.
    monkeypatch.setattr(sys, "argv", ["tune", "--output", str(path), "--seconds", "-1"])
    assert tune.main() == 1
    assert json.loads(path.read_text())["rows"] == content["rows"]


def test_the_least_of_several_runs() -> None:
    """A run that is slower as a whole weighs no more, and what only one run timed is not chosen."""
    quick = {"steady": 1.01, "once": 1.0, "slow": 1.2, "absent": 0.9}
    throttled = {"once": 11.0, "steady": 10.0, "slow": 9.0}
    assert tune.least([quick, throttled]) == "steady"
    assert tune.least([throttled, quick]) == "steady"
    assert tune.least([quick]) == "absent"
    with pytest.raises(ValueError, match="all runs"):
        tune.least([{"one": 1.0}, {"other": 1.0}])


def _line(us: dict[str, float], **other: Any) -> dict[str, Any]:
    layer = shapes.load().layers[0].name
    line = {
        "gpu": "A GPU",
        "multiprocessors": 132,
        "layer": layer,
        "op": "forward",
        "contract": "mma16",
        "m": 8,
        "us": us,
    }
    return line | other


def _choose(monkeypatch: pytest.MonkeyPatch, folder: Path, *logs: list[Any]) -> tuple[int, Path]:
    """The status of --choose from these logs (lines, or text as it is), and the file that it writes."""
    paths = [folder / f"log{number}" for number in range(len(logs))]
    for path, log in zip(paths, logs, strict=True):
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in log))
    output = folder / "chosen.json"
    monkeypatch.setattr(sys, "argv", ["tune", "--output", str(output), "--choose", *map(str, paths)])
    return tune.main(), output


def test_several_logs_are_chosen_from_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither run's fastest, but the tile that is good in both; products that one of them has alone are its own."""
    status, output = _choose(
        monkeypatch,
        tmp_path,
        [_line({"one": 1.0, "both": 1.1, "two": 2.0})],
        [_line({"one": 4.0, "both": 2.1, "two": 2.0}), _line({"two": 1.0, "one": 3.0}, m=16)],
    )
    assert status == 0
    content = json.loads(output.read_text())
    assert [row["tiles"] for row in content["rows"]] == [[[8, "both"], [16, "two"]]]
    assert (content["gpu"], content["multiprocessors"]) == ("A GPU", 132)
    # Another GPU's log is not put into this table.
    before = output.read_text()
    assert _choose(monkeypatch, tmp_path, [_line({"one": 1.0}, multiprocessors=78)])[0] == 1
    assert _choose(monkeypatch, tmp_path, [_line({"one": 1.0}, gpu="Another GPU")])[0] == 1
    assert output.read_text() == before


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ([[]], "nothing was measured"),
        ([["not JSON"]], "log0:1"),
        ([[_line({"a": 1.0}), ""]], "log0:2"),
        ([[[1, 2]]], "log0:1"),
        ([[{"layer": "x"}]], "log0:1"),
        ([[_line({})]], "log0:1"),
        ([[_line({"a": 1.0}, contract="mma17")]], "log0:1"),
        ([[_line({"a": 1.0}, op="backward")]], "log0:1"),
        ([[_line({"a": 1.0}, layer="gpt")]], "gpt"),
        ([[_line({"a": 1.0}), _line({"b": 1.0})]], "twice"),
        ([[_line({"a": 1.0})], [_line({"b": 1.0})]], "m=8: no tile"),
        ([[_line({"a": 1.0})], [_line({"a": 1.0}, gpu="Another GPU")]], "Another GPU"),
        ([[_line({"a": 1.0})], [_line({"a": 1.0}, multiprocessors=78)]], "78"),
    ],
)
def test_logs_that_are_refused(
    logs: list[list[Any]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, output = _choose(monkeypatch, tmp_path, *logs)
    assert status == 1
    assert said in capsys.readouterr().out
    assert not output.exists()


def test_a_log_that_is_read_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(sys, "argv", ["tune", "--choose", str(log), "--log", str(log)])
    with pytest.raises(SystemExit):
        tune.main()
    assert "--log" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["tune", "--choose", str(log)])
    assert tune.main() == 1
    assert str(log) in capsys.readouterr().out


def test_without_a_gpu_the_tuner_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune.timing, "missing", lambda: "there is no CUDA device")
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit) as ended:
        tune.main()
    assert ended.value.code == 2
    assert "cannot run here: there is no CUDA device" in capsys.readouterr().err
