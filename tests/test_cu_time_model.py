"""The model of a tile's time: what it says of rounds, of what is left, and of memory; and how the tables bring its numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from detkern.contracts import MMA16
from detkern.cu import geometry
from detkern.cu.time_model import CLASSES, Coefficients, Work, coefficients_of, time_us
from detkern.dtypes import BF16, F32, DType
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView

NUMBERS = Coefficients(fixed_us=2.0, tile_us=1.0, wave_us=10.0, alone=0.5, memory=1.2)


def _problem(m: int, n: int, k: int, out: DType = BF16) -> GemmProblem:
    device = Device("cuda", 0)
    return gemm_problem(
        MMA16, TensorView(256, (m, k), (k, 1), BF16, device), TensorView(256, (k, n), (1, k), BF16, device),
        TensorView(256, (m, n), (n, 1), out, device), None, False,
    )  # fmt: skip


def test_whole_rounds_and_what_is_left() -> None:
    def of(tiles: int, k: float = 4096.0) -> float:
        return time_us(NUMBERS, Work(tiles, 100, k, 0.0))

    assert of(100) == pytest.approx(2 + 11)
    assert of(300) == pytest.approx(2 + 3 * 11)
    assert of(100, 8192.0) == pytest.approx(2 + 21)
    # A round that is half full takes between what one CTA alone takes and a whole one.
    assert of(50) == pytest.approx(2 + 0.75 * 11)
    assert of(350) == pytest.approx(2 + 3.75 * 11)
    assert of(1) == pytest.approx(2 + 0.505 * 11)
    assert time_us(NUMBERS, Work(0, 100, 4096.0, 0.0)) == 2.0


def test_memory_where_it_takes_longer() -> None:
    waiting = time_us(NUMBERS, Work(1, 100, 16.0, 100.0))
    assert waiting == pytest.approx(2 + 120, rel=1e-3)
    # About as long as computing each holds the other up.
    both = time_us(NUMBERS, Work(100, 100, 4096.0, 11 / 1.2))
    assert both == pytest.approx(2 + 11 * 2 ** (1 / 4))
    assert time_us(NUMBERS, Work(100, 100, 4096.0, 5.0)) < time_us(NUMBERS, Work(100, 100, 4096.0, 6.0))


def test_classes_stand_for_one_another() -> None:
    found = dict(coefficients_of({"KK": list(NUMBERS), "MM": [1.0, 1.0, 20.0, 0.5, 1.0]}))
    assert set(found) == set(CLASSES)
    assert found["KK"] == found["KM"] == found["KKf"] == NUMBERS
    assert found["MM"].wave_us == found["MMf"].wave_us == found["MK"].wave_us == 20.0
    assert dict(coefficients_of({"MM": list(NUMBERS)})).keys() == {"MM", "MK", "MKf", "MMf"}
    assert coefficients_of({}) == ()
    with pytest.raises(ValueError, match="SK"):
        coefficients_of({"SK": list(NUMBERS)})


def test_work_is_what_is_launched() -> None:
    tiles = {str(tile): tile for tile in geometry.tiles_for(MMA16, BF16)}
    tile = tiles["128x128x64x6"]
    problem = _problem(1000, 4096, 512)
    found = geometry.work(problem, tile, 131)
    assert (found.tiles, found.at_once, found.k) == (8 * 32, 130, 512.0)  # in pairs
    assert found.memory_us == pytest.approx(2 * (1000 * 512 + 4096 * 512 + 1000 * 4096) / 4.3e6)
    wide = geometry.work(_problem(1000, 4096, 512, F32), tile, 131)
    assert wide.memory_us - found.memory_us == pytest.approx(2 * 1000 * 4096 / 4.3e6)
    assert geometry.work(_problem(100, 4096, 512), tile, 131).at_once == 131
    assert geometry.work(_problem(300, 4096, 512), tiles["128x128x64x6 b shared"], 132).tiles == 4 * 32
    assert geometry.work(_problem(1000, 4096, 4104), tile, 132).k == pytest.approx(1.6 * 4104)
    assert geometry.time_class(problem) == "KK"
    assert geometry.time_class(_problem(1000, 4096, 512, F32)) == "KKf"


def test_a_table_with_numbers_predicts_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(geometry.__file__).parent / "tiles"
    row = json.loads((folder / "mma_wgmma.json").read_text())[0]
    row.pop("time", None)
    (tmp_path / "new.json").write_text(json.dumps([row | {"time": {"KK": list(NUMBERS)}}, row]))
    monkeypatch.setattr(geometry, "_TABLES", tmp_path)
    with_numbers, without = geometry._table("new")
    assert with_numbers.macros == without.macros
    assert hash(with_numbers) != hash(without)
    problem = _problem(4096, 4096, 4096)
    predicted = geometry.predicted_us(problem, with_numbers, 132)
    assert predicted == time_us(NUMBERS, geometry.work(problem, with_numbers, 132))
    assert predicted != geometry.predicted_us(problem, without, 132)
    assert math.isfinite(geometry.predicted_us(problem, without, 132))
