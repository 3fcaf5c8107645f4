"""Fitting the model of the time without a GPU: on times that a model made, from logs, into tables."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timed_host import Host

from benchmarks import drawn, fit, fit_model, tile_times
from benchmarks.fit_model import Observation, Timed
from benchmarks.forced import problem_of_sizes
from detkern.cu import geometry
from detkern.cu.time_model import CLASSES, Coefficients, Work, time_us

TRUE = Coefficients(fixed_us=2.2, tile_us=0.9, wave_us=17.0, alone=0.4, memory=1.06)


def _works(count: int, seed: int = 1) -> list[Work]:
    """Of products of many sizes."""
    source = random.Random(seed)
    return [
        Work(
            int(math.exp(source.uniform(0, 8))) + 1,
            132,
            math.exp(source.uniform(6, 10)),
            math.exp(source.uniform(0, 6)),
        )
        for _ in range(count)
    ]


def _close(found: Coefficients, expected: Coefficients, rel: float) -> None:
    for name, one, other in zip(Coefficients._fields, found, expected, strict=True):
        assert one == pytest.approx(other, rel=rel), name


def test_numbers_come_back_from_the_times_that_they_made() -> None:
    source = random.Random(2)
    seen = [Observation(work, time_us(TRUE, work) * math.exp(source.gauss(0, 0.01)), 1.0) for work in _works(400)]
    _close(fit_model.fit_one(seen, fit_model.start(20.0)), TRUE, 0.06)


def test_a_few_wild_times_change_little() -> None:
    source = random.Random(3)
    seen = [Observation(work, time_us(TRUE, work) * math.exp(source.gauss(0, 0.01)), 1.0) for work in _works(400)]
    wild = [dataclasses.replace(one, us=5 * one.us) if place % 20 == 0 else one for place, one in enumerate(seen)]
    _close(fit_model.fit_one(wild, fit_model.start(20.0)), TRUE, 0.1)


def test_what_was_not_measured_is_what_is_expected() -> None:
    expected = fit_model.start(30.0)
    assert fit_model.fit_one([], expected) == expected
    work = Work(132, 132, 4096.0, 0.01)
    found = fit_model.fit_one([Observation(work, 1.3 * time_us(expected, work), 1.0)], expected)
    assert time_us(found, work) / time_us(expected, work) == pytest.approx(1.3, rel=0.05)
    assert found.memory == pytest.approx(expected.memory, rel=1e-3)
    seen = {("a", "KK"): [Observation(work, 1.3 * time_us(expected, work), 1.0)]}
    both = fit_model.fit(seen, {"a": (30.0, ["KK", "KM"]), "b": (30.0, ["KK"])})
    # A class without times begins from the one that stands for it, a tile without any from the table.
    assert both["a"]["KM"] == both["a"]["KK"] == found
    assert both["b"]["KK"] == expected


def test_times_near_the_fastest_weigh_most() -> None:
    work = Work(1, 132, 64.0, 1.0)
    one = Timed(1, "KK", {"a": 10.0, "b": 11.0}, {"a": 10.5, "b": 11.0, "c": 20.0}, dict.fromkeys("abc", work), "a")
    found = fit_model.observations([one, one])
    assert [(len(some), some[0].us) for some in found.values()] == [(2, 10.0), (2, 11.0), (2, 20.0)]
    assert found["a", "KK"][0].weight == 1.0
    assert found["b", "KK"][0].weight == pytest.approx((10 / 11) ** 2)
    assert found["c", "KK"][0].weight == pytest.approx(fit_model.ROUGH_WEIGHT / 4)


def _true(label: str) -> Coefficients:
    """Numbers for a tile that differ from its table's."""
    tile = fit.tiles()[label]
    source = random.Random(label)
    return Coefficients(
        2.0, source.uniform(0.3, 1.0), tile.wave_us * source.uniform(0.85, 1.15), source.uniform(0.3, 0.8), 1.0
    )


def _lines(seed: int, count: int) -> list[dict[str, Any]]:
    """A log whose times a model made."""
    lines = []
    for one in fit.sampled(seed, count):
        problem = problem_of_sizes(one.product, one.output_f32, one.accumulate)
        chosen, timed, total = tile_times.considered(problem, (9, 0), 132, fit.WITHIN)
        us = {str(tile): time_us(_true(str(tile)), geometry.work(problem, tile, 132)) for tile in timed}
        best = min(us.values())
        close = {label: one for label, one in us.items() if one < 1.15 * best or label == str(chosen)}
        times = tile_times.TileTimes(str(chosen), close, us, total)
        lines.append({"gpu": "A GPU", "multiprocessors": 132, "seed": seed} | fit.log_line(one, times))
    return lines


def test_a_fit_chooses_better_than_the_tables_on_products_it_was_not_fitted_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way from logs to tables."""
    logs = [tmp_path / "fit", tmp_path / "judge"]
    for log, seed, count in zip(logs, drawn.FITTING_SEEDS, (60, 30), strict=True):
        log.write_text("".join(json.dumps(line) + "\n" for line in _lines(seed, count)))
    before = fit.timed(fit.read(logs[0]))
    other = fit.timed(fit.read(logs[1]))
    assert (len(before), len(other)) == (60, 30)
    for name in ("mma_wgmma", "mma"):
        (tmp_path / f"{name}.json").write_text((fit.TABLES / f"{name}.json").read_text())
    monkeypatch.setattr(fit, "TABLES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fit", "--fit", str(logs[0]), "--judge", str(logs[1]), "--write"])
    assert fit.main() == 0
    said = capsys.readouterr().out
    assert "judged on: 30 products" in said
    fitted = fit.fitted_to(before)
    (_, model, tables), *_ = fit.judged(other, fitted)
    assert sum(model) / len(model) < 1.01
    assert sum(model) < sum(tables)
    # What was written is read back as it was fitted, and predicts.
    monkeypatch.setattr(geometry, "_TABLES", tmp_path)
    geometry._table.cache_clear()
    try:
        for name in ("mma_wgmma", "mma"):
            for tile in geometry._table(name):
                written = fitted[str(tile)]
                assert set(tile.coefficients) >= set(written)
                for kind, numbers in written.items():
                    assert tile.coefficients[kind] == pytest.approx(numbers, abs=1e-4)
    finally:
        geometry._table.cache_clear()


def test_logs_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = _lines(1, 1)[0]
    log = tmp_path / "log"
    for bad in ("not JSON", "[1]", json.dumps(line | {"us": {}}), json.dumps({**line, "m": "1"})):
        log.write_text(json.dumps(line) + "\n" + bad + "\n")
        monkeypatch.setattr(sys, "argv", ["fit", "--fit", str(log)])
        assert fit.main() == 1
        assert f"{log}:2" in capsys.readouterr().out
    log.write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(sys, "argv", ["fit", "--fit", str(log), "--judge", str(log)])
    assert fit.main() == 1
    assert "another seed" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["fit", "--fit", str(tmp_path / "none")])
    assert fit.main() == 1
    log.write_text(json.dumps(line | {"us": {"no such tile": 1.0}, "rough": {}}) + "\n")
    monkeypatch.setattr(sys, "argv", ["fit", "--fit", str(log)])
    assert fit.main() == 1
    assert "nothing was timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [[], ["--log", "a", "--fit", "b"], ["--log", "a", "--write"], ["--log", "a", "--seed", "3"]]
)
def test_options_that_do_not_go_together(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fit", *options])
    with pytest.raises(SystemExit):
        fit._arguments()


def test_without_a_gpu_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit.timing, "missing", lambda: "there is no CUDA device")
    monkeypatch.setattr(sys, "argv", ["fit", "--log", str(tmp_path / "log")])
    with pytest.raises(SystemExit) as ended:
        fit.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "cannot run here: there is no CUDA device\n"
    assert not (tmp_path / "log").exists()


def test_what_is_sampled_has_numbers_and_does_not_take_long() -> None:
    found = fit.sampled(2, 200)
    assert len(found) == 200
    assert all(one.product.reference_us <= fit.LONGEST_US for one in found)
    kinds = {geometry.time_class(problem_of_sizes(one.product, one.output_f32, one.accumulate)) for one in found}
    assert kinds <= set(CLASSES)
    assert {"KK", "KM", "MM", "MMf"} <= kinds


def test_a_log_is_written_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    small = dataclasses.replace(drawn.draw(1, 0), product=dataclasses.replace(drawn.draw(1, 0).product, m=3))
    monkeypatch.setattr(fit.timing, "missing", lambda: None)
    monkeypatch.setattr(fit.timing, "Cuda", lambda: host)
    monkeypatch.setattr(fit, "sampled", lambda seed, count: [small] * count)
    monkeypatch.setattr(
        "detkern.cu.device.describe",
        lambda index: types.SimpleNamespace(name="A GPU", capability=(9, 0), multiprocessors=132),
    )

    def forced_calls(problem: Any, tile: Any, views: Any) -> list[Any]:
        return [host.taking(100.0 + tile["TILE_N"], lambda: None) for _ in views]

    monkeypatch.setattr(tile_times, "forced_calls", forced_calls)
    log = tmp_path / "log"
    monkeypatch.setattr(sys, "argv", ["fit", "--log", str(log), "--count", "2"])
    assert fit.main() == 0
    first, second = fit.read(log)
    assert first == second
    assert first["us"][min(first["us"], key=first["us"].__getitem__)] == 108.0
    assert first["chosen"] in first["us"]
    monkeypatch.setattr(sys, "argv", ["fit", "--log", str(log), "--seconds", "0"])
    assert fit.main() == 1
