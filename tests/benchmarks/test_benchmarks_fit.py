"""Fitting the model of a tile's time, without a GPU: made-up times of a known model, and what a log must be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import fit, fit_model
from benchmarks.forced import problem_of_sizes
from detkern.cu import tile_choice, time_model
from detkern.measure.shapes import Layer, Product

TILES = [tile for tile in fit.table() if not tile.swapped][:10]


def _line(m: int, n: int, k: int, us: dict[str, float], **other: Any) -> dict[str, Any]:
    line = {"seed": 1, "part": "forward", "loads": "KK", "m": m, "n": n, "k": k, "f32": False, "acc": False}
    return line | {"chosen": min(us, key=lambda label: us[label]), "us": us} | other


def _log(count: int, seed: int, noise: float) -> list[dict[str, Any]]:
    """Products whose times are a model's, each tile's own step off by up to 30 %."""
    random = np.random.default_rng(seed)
    own = {name: np.full(len(TILES), one) for name, one in time_model.OWN.items()}
    own["step"] = np.exp(np.random.default_rng(7).uniform(-0.3, 0.3, len(TILES)))
    numbers = time_model.Numbers(dict(time_model.SHARED), own)
    sizes = np.exp(random.uniform(np.log(64), np.log(8192), (count, 3))).astype(int) // 8 * 8
    lines = [
        _line(int(m), int(n), int(k), {str(tile): 1.0 for tile in TILES}, seed=seed, loads=loads)
        for (m, n, k), loads in zip(sizes, random.choice(["KK", "KM", "MM"], count), strict=True)
    ]
    times = fit_model.flatten(lines, TILES)
    us = fit_model.predicted(times, numbers, 132) * np.exp(random.normal(0, noise, len(times.us)))
    for product, tile, one in zip(times.product, times.tile, us, strict=True):
        lines[product]["us"][str(TILES[tile])] = float(one)
    return lines


def test_times_are_those_of_the_chooser() -> None:
    """What is fitted is what tile_choice.py computes."""
    line = _line(1000, 4104, 136, {str(tile): 1.0 for tile in fit.table()})
    numbers = time_model.numbers(tuple(map(str, fit.table())))
    times = fit_model.flatten([line], fit.table())
    found = fit_model.predicted(times, numbers, 132)
    problem = problem_of_sizes(Product(Layer("a", "layer", 4104, 136), 1000, "forward", "mma16", "bfloat16"))
    for tile, us in zip(times.tile, found, strict=True):
        assert us == pytest.approx(tile_choice.predicted_us(problem, fit.table()[tile], 132), rel=1e-9)


def test_a_fit_finds_what_made_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "table", lambda: TILES)
    numbers = fit_model.fit(fit_model.flatten(_log(150, 1, 0.01), TILES), TILES, 132)
    other = _log(60, 2, 0.0)
    begin = time_model.Numbers(
        time_model.SHARED, {name: np.full(len(TILES), one) for name, one in time_model.OWN.items()}
    )
    before, after = (float(np.mean(fit.judged(other, one))) for one in (begin, numbers))
    assert before > 1.02, "else there was nothing to find"
    assert after < 1.004
    folded = fit.folded(_log(60, 1, 0.01), 2)
    assert len(folded) == 60
    assert 1 <= np.mean(folded) < before


def test_regret_is_over_the_fastest_tile_of_each_product() -> None:
    one, two = str(TILES[0]), str(TILES[1])
    times = fit_model.flatten([_line(64, 64, 64, {one: 2.0, two: 3.0}), _line(8, 8, 8, {two: 1.0, one: 4.0})], TILES)
    found, chosen = fit_model.regrets(times, np.array([5.0, 4.0, 9.0, 8.0]))
    assert found.tolist() == [1.5, 4.0]
    assert chosen.tolist() == [1, 0]


def test_lines_without_a_choice_are_left_out() -> None:
    one, two = str(TILES[0]), str(TILES[1])
    lines = [_line(8, 8, 8, {one: 1.0, "gone": 2.0}), _line(8, 8, 8, {one: 1.0, two: 2.0, "gone": 0.5})]
    assert [line["us"] for line in fit.useful(lines)] == [{one: 1.0, two: 2.0}]


@pytest.mark.parametrize("bad", ["{", "[]", '{"seed": 1}', json.dumps(_line(8, 8, 8, {"a": 1.0}) | {"us": 3})])
def test_what_is_no_log_is_refused(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(_line(8, 8, 8, {"a": 1.0})) + "\n")
    assert len(fit.read(path)) == 1
    path.write_text(path.read_text() + bad + "\n")
    with pytest.raises(ValueError, match=":2 is no line"):
        fit.read(path)


def test_a_run_fits_judges_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(fit, "table", lambda: TILES)
    monkeypatch.setattr(fit, "FILE", tmp_path / "time_model.json")
    logs = []
    for seed in (1, 2):
        logs.append(str(tmp_path / f"{seed}"))
        Path(logs[-1]).write_text("".join(json.dumps(line) + "\n" for line in _log(30, seed, 0.01)))
    monkeypatch.setattr(sys, "argv", ["fit", "--fit", logs[0], "--judge", logs[0]])
    assert fit.main() == 1
    assert "another seed" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["fit", "--fit", logs[0], "--judge", logs[1], "--write"])
    assert fit.main() == 0
    assert "judged on: 30 products" in capsys.readouterr().out
    monkeypatch.setattr(time_model, "_FILE", tmp_path / "time_model.json")
    time_model._stored.cache_clear()
    try:
        read = time_model.numbers(tuple(map(str, TILES)))
    finally:
        time_model._stored.cache_clear()
    assert set(read.shared) == set(time_model.SHARED)
    assert not np.array_equal(read.own["step"], np.ones(len(TILES)))
    assert (tmp_path / "time_model.json").read_text().count('\n    "') >= len(TILES), "a tile a line"
