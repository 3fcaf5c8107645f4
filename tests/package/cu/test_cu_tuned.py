"""The table of tiles that were measured: looking one up, and what the shipped file says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detkern.cu import geometry, tile_choice, tuned
from detkern.cu.gemm_tile import Load
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import get_contract
from detkern.vocabulary.dtypes import BF16, F16

CONTENT = {
    "gpu": "a GPU",
    "multiprocessors": 132,
    "rows": [
        {"contract": "mma16", "loads": "KK", "n": 256, "k": 7168, "tiles": [[1, "one"], [8, "eight"], [64, "last"]]},
        {"contract": "mma16", "loads": "KM", "n": 256, "k": 7168, "tiles": [[8, "other"]]},
        {"contract": "tree-mma16", "loads": "KK", "n": 256, "k": 7168, "tiles": [[8, "tree"], [16, "tree"]]},
        {"contract": "mma16", "loads": "KK", "n": 512, "k": 512, "tiles": []},
    ],
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(CONTENT))
    monkeypatch.setattr(tuned, "_FILE", path)
    tuned._rows.cache_clear()
    yield
    tuned._rows.cache_clear()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("m", "found"),
    [
        (1, ("one",)), (8, ("eight",)), (64, ("last",)),
        (2, ("one", "eight")), (7, ("one", "eight")), (9, ("eight", "last")),
        (65, ("last",)), (100_000, ("last",)),
    ],
)  # fmt: skip
def test_the_measured_m_or_those_on_either_side(m: int, found: tuple[str, ...]) -> None:
    assert tuned.labels("mma16", "KK", m, 256, 7168, 132) == found


@pytest.mark.usefixtures("table")
def test_below_the_smallest_and_between_two_of_the_same() -> None:
    assert tuned.labels("mma16", "KM", 4, 256, 7168, 132) == ("other",)
    assert tuned.labels("tree-mma16", "KK", 12, 256, 7168, 132) == ("tree",)


@pytest.mark.usefixtures("table")
def test_what_was_not_measured_has_no_tile() -> None:
    for key in (
        ("mma16", "KK", 8, 256, 7168, 114),  # another GPU
        ("mma16", "KK", 8, 256, 7167, 132),
        ("mma16", "KK", 8, 7168, 256, 132),
        ("mma16", "MK", 8, 256, 7168, 132),
        ("mma16", "SK", 8, 256, 7168, 132),
        ("tree-mma16", "KM", 8, 256, 7168, 132),
        ("mma16", "KK", 8, 512, 512, 132),
        ("mma16", "KM", 3, 256, 7168, 132),  # far fewer rows than the fewest that were
    ):
        assert tuned.labels(*key) == ()


def _shipped() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tuned._FILE.read_text())
    return content


_LOADS = {"K": Load.K_MAJOR, "M": Load.MN_MAJOR}


def _problem(contract: str, loads: tuple[Load, Load], m: int, n: int, k: int, dtype: Any) -> Any:
    def view(rows: int, columns: int, by_columns: bool) -> TensorView:
        strides = (1, rows) if by_columns else (columns, 1)
        return TensorView(4096, (rows, columns), strides, dtype, Device("cuda", 0))

    a, b = view(m, k, loads[0] == Load.MN_MAJOR), view(k, n, loads[1] == Load.K_MAJOR)
    return gemm_problem(get_contract(contract), a, b, view(m, n, False), None, False)


def test_every_label_that_is_shipped_names_a_tile_that_takes_its_problem() -> None:
    content = _shipped()
    keys = [(row["contract"], row["loads"], row["n"], row["k"]) for row in content["rows"]]
    assert len(set(keys)) == len(keys)
    for row, dtype in itertools.product(content["rows"], (BF16, F16)):
        loads = (_LOADS[row["loads"][0]], _LOADS[row["loads"][1]])
        sizes = [m for m, _ in row["tiles"]]
        assert sizes == sorted(set(sizes))
        for m, label in row["tiles"]:
            problem = _problem(row["contract"], loads, m, row["n"], row["k"], dtype)
            assert geometry.load_paths(problem) == loads, row
            known = {str(tile) for tile in tile_choice.candidates(problem, (9, 0), loads)}
            assert label in known, f"{row['contract']} {row['loads']} m={m} n={row['n']} k={row['k']}: {label}"
            launched = tile_choice.choose(problem, (9, 0), content["multiprocessors"])
            assert str(launched.tile) == label, "a size that was measured gets what was fastest"


def test_a_table_that_measured_something_says_on_what() -> None:
    content = _shipped()
    assert set(content) == {"gpu", "multiprocessors", "date", "command", "rows"}
    if content["rows"]:
        assert all(content[name] for name in ("gpu", "date", "command"))
        assert content["multiprocessors"] > 0
