"""The logs that the choice of tiles is fitted to: what they hold, and the recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fit, fit_log
from detkern.measure.drawn import FITTING_SEEDS, draw

TILES = set(map(str, fit.table()))
RECORDED = Path(fit.__file__).parent / "results" / "h200"


def test_products_are_the_seeds_first_without_the_largest() -> None:
    found = list(fit_log.products(1, 60))
    assert [one.index for one in found] == sorted(one.index for one in found)
    assert {one.index for one in found} == {
        index for index in range(60) if draw(1, index).bytes <= fit_log.LARGEST_BYTES
    }
    assert 40 < len(found) <= 60


def test_a_line_is_one_that_fit_reads(tmp_path: Path) -> None:
    import json

    drawn = next(one for one in fit_log.products(1, 60) if one.part == "db_f32")
    line = fit_log.line_of(1, drawn, "MM", "128x128x64x6", {"cublas": 10.1234, "128x128x64x6": 12.34567, "other": 13.0})
    log = tmp_path / "log"
    log.write_text(json.dumps(line) + "\n")
    (read,) = fit.read(log)
    assert (read["m"], read["n"], read["k"]) == drawn.sizes
    assert read["us"] == {"128x128x64x6": 12.346, "other": 13.0}
    assert read["cublas"] == 10.123
    assert read["f32"] is True


LOGS = sorted(RECORDED.glob("tile-times-seed*.jsonl"))


@pytest.mark.parametrize("log", LOGS, ids=[log.stem for log in LOGS])
def test_the_recorded_logs_are_of_their_seed_and_its_products(log: Path) -> None:
    lines = fit.read(log)
    seed = int(log.stem.removeprefix("tile-times-seed"))
    assert seed in FITTING_SEEDS
    assert {line["seed"] for line in lines} == {seed}
    assert len({line["index"] for line in lines}) == len(lines)
    for line in lines[:: max(1, len(lines) // 40)]:
        drawn = draw(seed, line["index"])
        assert (line["m"], line["n"], line["k"]) == drawn.sizes
        assert line["part"] == drawn.part
        assert len(set(line["us"]) & TILES) > 1


def test_the_table_is_fitted_to_many_products() -> None:
    """Of which every tile that is chosen often was timed."""
    lines = [line for log in LOGS for line in fit.read(log)]
    assert len(lines) > 1500
    assert len({label for line in lines for label in line["us"]} & TILES) > 0.7 * len(TILES)
