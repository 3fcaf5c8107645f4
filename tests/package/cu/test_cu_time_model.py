"""The model of a tile's time: its limits, what it must not do off the sizes that it was fitted to, and its stored
numbers."""

from __future__ import annotations

import itertools
import json

import numpy as np
import numpy.typing as npt
import pytest

from detkern.cu import gemm_tile, tile_choice, time_model
from detkern.cu.time_model import OWN, SHARED, Numbers, Product, TileShapes, prepare, times_us
from detkern.vocabulary.contracts import MMA16
from detkern.vocabulary.dtypes import BF16

KK = (True, True)
TABLE = [tile for tile in gemm_tile.tiles_for(MMA16, BF16) if tile.table == "mma_wgmma"]
SHAPES = tile_choice.model_shapes(TABLE)
STORED = time_model.numbers(tuple(map(str, TABLE)))


def _plain(count: int) -> Numbers:
    return Numbers(SHARED, {name: np.full(count, one) for name, one in OWN.items()})


def _times(
    m: int, n: int, k: int, multiprocessors: int = 132, numbers: Numbers = STORED, **about: int
) -> npt.NDArray[np.float64]:
    product = Product(n, k, KK, (False, False), False, False, **about)
    return times_us(prepare(SHAPES, numbers, product, multiprocessors), m)


def test_every_tile_has_numbers_and_no_other_has() -> None:
    content = json.loads(time_model._FILE.read_text())
    assert content["own"] == list(OWN)
    assert set(content["shared"]) == set(SHARED)
    assert set(content["tiles"]) == {str(tile) for tile in TABLE}
    for row in content["tiles"].values():
        own = dict(zip(OWN, row, strict=True))
        assert min(own["step"], own["tile"], own["fixed"], own["memory"]) > 0
    for name in ("pair_a", "pair_b", "shared_a", "shared_b", "alone", "half", "over"):
        assert 0 < content["shared"][name] < 1


def test_a_tile_without_numbers_has_those_expected() -> None:
    numbers = time_model.numbers(("1x2x3x4", str(TABLE[0])))
    assert [numbers.own[name][0] for name in OWN] == list(OWN.values())
    assert numbers.own["step"][1] == STORED.own["step"][0]


@pytest.mark.parametrize("numbers", [STORED, _plain(len(TABLE))], ids=["stored", "expected"])
def test_times_are_finite_and_grow_with_k_and_m(numbers: Numbers) -> None:
    for n, multiprocessors in itertools.product((8, 1000, 4096, 128_256), (132, 114, 16)):
        for k in (8, 100, 4096, 60_000):
            found = np.array([_times(m, n, k, multiprocessors, numbers) for m in (1, 64, 1024, 16_384, 200_000)])
            assert np.all(np.isfinite(found))
            assert np.all(found > 0)
            # But for a slope, and for what comes from memory faster where more CTAs read it.
            assert np.all(found[1:] > 0.7 * found[:-1]), "more rows take no less"
        for m in (1, 100, 5000):
            more = np.array([_times(m, n, k, multiprocessors, numbers) for k in (64, 1024, 16_384, 60_032)])
            assert np.all(more[1:] > 0.85 * more[:-1])


def test_no_time_is_below_what_memory_and_the_products_take() -> None:
    """At 4.9 TB/s and 132 x 4096 products a cycle at 1.98 GHz, which no H200 exceeds."""
    for m, n, k in itertools.product((1, 128, 4096), (1024, 8192), (4096, 16_384)):
        least = max(2e-6 * (m * k + n * k + m * n) / 4.9, m * n * k / (132 * 4096 * 1980))
        assert np.min(_times(m, n, k)) > 0.9 * least


def test_fewer_multiprocessors_take_longer_and_a_batch_is_as_many_products() -> None:
    for m, n, k in ((4096, 4096, 4096), (100, 8192, 1024)):
        assert np.all(_times(m, n, k, 66) > 0.95 * _times(m, n, k, 132))
        assert np.min(_times(m, n, k, 66)) > np.min(_times(m, n, k, 132))
        once, batch = _times(m, n, k), _times(m, n, k, batch=8)
        assert np.all(batch > once)
        assert np.all(batch < 8.5 * once)


def test_one_m_and_many_at_once_are_the_same() -> None:
    """The choice takes shortcuts that the fit does not."""
    four = ((True, True), (True, False), (False, True), (False, False))
    for n, k, loads in itertools.product((8, 520, 4096), (72, 4096), four):
        product = Product(n, k, loads, (False, True), True, True)
        prepared = prepare(SHAPES, STORED, product, 132)
        for m in (1, 16, 64, 65, 256, 257, 5000):
            many = times_us(prepared, np.full(len(TABLE), float(m)))
            assert times_us(prepared, m) == pytest.approx(many, rel=1e-9)


def test_a_swapped_tile_has_the_transposes_rows() -> None:
    """A swapped 128 x 64 takes as many units for 64 tokens as the plain one for 64 columns, and weights by 128; but it
    writes 128 columns of the output side by side."""
    rows, columns, stage_k, share, band = (np.array([one, one], dtype=float) for one in (128, 64, 64, 0, 16))
    shape = TileShapes(rows, columns, stage_k, share, band, np.array([False, True]), np.zeros(2, dtype=bool))
    expected = _plain(2)._replace(shared=SHARED | {"segment": 0.0})
    plain = times_us(prepare(shape, expected, Product(640, 4096, KK, (False, False), False, False), 132), 1280)[0]
    swapped = times_us(prepare(shape, expected, Product(1280, 4096, KK, (False, False), False, False), 132), 640)[1]
    assert swapped == pytest.approx(plain, rel=1e-9)
    product = Product(640, 64, KK, (False, False), False, False)
    assert np.diff(times_us(prepare(shape, _plain(2), product, 132), 64_000))[0] < 0


def _one(rows: int, columns: int, swapped: bool = False) -> TileShapes:
    sizes = (np.array([one], dtype=float) for one in (rows, columns, 64, 0, 16))
    return TileShapes(*sizes, np.array([swapped]), np.zeros(1, dtype=bool))


def _of_one(shape: TileShapes, m: int, n: int, k: int = 4096) -> float:
    prepared = prepare(shape, _plain(1), Product(n, k, KK, (False, False), False, False), 132)
    return float(times_us(prepared, m)[0])


def test_ctas_that_have_a_pair_of_multiprocessors_each_are_faster() -> None:
    """From 66 CTAs to 67 the time rises by far more than from 65 to 66 or from 67 to 68."""
    steps = np.diff([_of_one(_one(64, 64), 64, 64 * columns) for columns in (65, 66, 67, 68)])
    assert steps[1] > 5 * max(steps[0], steps[2])


def test_a_pair_reads_what_both_of_its_tiles_need_once() -> None:
    """TileWalk's order: below one another, the last of an odd number alone; of few columns beside one another where
    these are even."""
    numbers = _plain(1)

    def read(shape: TileShapes, m: int, n: int) -> tuple[float, float]:
        prepared = prepare(shape, numbers, Product(n, 4096, KK, (False, False), False, False), 132)
        a, b, _ = time_model._read(prepared, np.array([float(m)]))
        return float(a[0]), float(b[0])

    once_a, once_b = 1 - SHARED["pair_a"], 1 - SHARED["pair_b"]
    plain, turned = _one(64, 32), _one(64, 32, swapped=True)
    assert read(plain, 64, 1024) == (64, 32)  # tiles beside one another alone are no pairs
    assert read(plain, 128, 1024) == pytest.approx((64, 32 * once_b))
    assert read(plain, 192, 1024) == pytest.approx((64, 32 * (1 - SHARED["pair_b"] * 2 / 3)))
    assert read(plain, 192 + 16 * 64, 1024) == pytest.approx((64, 32 * once_b))
    assert read(turned, 64, 1024) == pytest.approx((64 * once_a, 32))
    assert read(turned, 96, 1024) == pytest.approx((64, 32 * once_b))
    assert read(turned, 32 * 9, 1024) == pytest.approx((64, 32 * once_b))


def test_lines_that_are_not_there_take_time() -> None:
    """Of B by k: a tile of 128 columns takes longer for 32 than the columns alone would say."""
    with_all = _of_one(_one(64, 128), 4096, 128)
    assert _of_one(_one(64, 128), 4096, 32) > 1.1 * with_all
    assert _of_one(_one(128, 64, swapped=True), 128, 32) < with_all  # A's boxes have what there is


@pytest.mark.parametrize("k", [100, 4096])
def test_the_times_of_many_m_are_those_of_each(k: int) -> None:
    """To the last bit: a tile must not depend on the m that it is chosen beside."""
    for n, about in itertools.product((24, 4096, 128_256), ({}, {"batch": 7})):
        prepared = prepare(SHAPES, STORED, Product(n, k, KK, (False, False), False, False, **about), 132)
        for rows in (
            (1, 1, 2, 3, 17, 63),
            (200, 256, 256, 264),
            (248, 256, 264),
            (300, 4096, 90_000),
            (90_000, 90_008),
        ):
            found = time_model.times_us_of_each(prepared, rows)
            assert found.shape == (len(rows), len(TABLE))
            for m, times in zip(rows, found, strict=True):
                assert times.tobytes() == times_us(prepared, m).tobytes()
