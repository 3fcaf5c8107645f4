"""Which tile is chosen, on which devices and operands."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from cu_problems import HOPPER, KERNELS, laid_out, problem_of, tma_tiles, view

from detkern.cu import ahead, gemm_tile, geometry, tile_choice
from detkern.cu.gemm_tile import Load, Tile, fits, tiles_for
from detkern.cu.geometry import launch_for, load_paths, takes
from detkern.cu.tile_choice import Chooser, candidates, choose, predicted_us
from detkern.errors import DeviceError
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import TensorView
from detkern.vocabulary.contracts import FMA, MMA16, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F32, DType


def test_choice_covers_the_device_before_it_takes_the_largest_tile() -> None:
    def area(tile: Tile) -> int:
        return tile["TILE_M"] * tile["TILE_N"]

    for capability in (HOPPER, (10, 0)):
        largest = choose(problem_of(MMA16, 8192, 8192, 4096), capability, 132).tile
        small = choose(problem_of(MMA16, 64, 2048, 4096), capability, 132)
        all_areas = [area(tile) for tile in tiles_for(MMA16, BF16) if fits(tile, capability)]
        assert area(largest) >= 0.75 * max(all_areas)
        assert area(small.tile) < area(largest) / 4
        assert small.grid > 132 // 5
    assert area(largest) == max(all_areas), "of the general kernel, whose tiles lose less the larger they are"


def test_gathered_operands_get_a_tile_that_takes_them() -> None:
    a = view((4096, 4096), (4097, 1), BF16)
    b = view((4096, 4096), (4096, 1), BF16)
    problem = gemm_problem(MMA16, a, b, view((4096, 4096), (4096, 1), BF16), None, False)
    launch = choose(problem, HOPPER, 132)
    assert launch.load_a == Load.STRIDED
    assert (launch.load_a, launch.load_b) in launch.tile.loads


def test_wgmma_computes_tree_mma16_on_hopper_alone_and_not_what_must_be_gathered() -> None:
    problem = problem_of(TREE_MMA16, 4096, 4096, 4096)
    assert choose(problem, HOPPER, 132).build.source == "tree_wgmma.cu"
    for capability in ((10, 0), (12, 0)):
        assert choose(problem, capability, 132).build.source == gemm_tile.source_of(TREE_MMA16) == "tree_mma.cu"
    a, b = view((4096, 4096), (4097, 1), BF16), view((4096, 4096), (4096, 1), BF16)
    gathered = gemm_problem(TREE_MMA16, a, b, view((4096, 4096), (4096, 1), BF16), None, False)
    assert choose(gathered, HOPPER, 132).build.source == "tree_mma.cu"


def test_a_single_column_is_no_broken_line() -> None:
    """Its stride is nothing's distance: the tile of one column is that of eight."""
    both = (Load.K_MAJOR, Load.K_MAJOR)
    tile = next(tile for tile in tma_tiles() if both in tile.loads)
    one, eight = (predicted_us(laid_out(MMA16, 64, n, 4096, both), tile, 132) for n in (1, 8))
    assert one == pytest.approx(eight, rel=0.01)


def _unusual() -> list[tuple[str, GemmProblem]]:
    """Operands on the vector load paths that TMA cannot describe."""
    b, out = view((256, 256), (1, 256), BF16), view((256, 256), (256, 1), BF16)

    def with_a(a: TensorView, b: TensorView = b, out: TensorView = out) -> GemmProblem:
        return gemm_problem(MMA16, a, b, out, None, False)

    batch = (2, 3)
    return [
        ("reversed rows", with_a(view((256, 256), (-256, 1), BF16))),
        ("overlapping rows", with_a(view((256, 256), (128, 1), BF16))),
        ("one row for all", with_a(view((256, 256), (0, 1), BF16))),
        (
            "three batch dimensions",
            with_a(
                view((2, *batch, 256, 256), (2**22, 256 * 256, 3 * 2**17, 256, 1), BF16),
                view((2, *batch, 256, 256), (2**23, 256 * 256, 2**18, 1, 256), BF16),
                view((2, *batch, 256, 256), (2**24, 256 * 256, 2**19, 256, 1), BF16),
            ),
        ),
        (
            "a batch that runs backwards",
            with_a(
                view((3, 256, 256), (-256 * 256, 256, 1), BF16),
                view((3, 256, 256), (2**17, 1, 256), BF16),
                view((3, 256, 256), (2**18, 256, 1), BF16),
            ),
        ),
        ("no k", laid_out(MMA16, 256, 256, 0, (Load.K_MAJOR, Load.K_MAJOR))),
    ]


@pytest.mark.parametrize(("what", "problem"), _unusual(), ids=[what for what, _ in _unusual()])
def test_what_tma_cannot_describe_goes_to_the_general_kernel(what: str, problem: GemmProblem) -> None:
    loads = load_paths(problem)
    assert Load.STRIDED not in loads
    assert choose(problem, HOPPER, 132).build.source == "mma.cu"
    for tile in tma_tiles():
        assert not takes(problem, tile, loads)
    with pytest.raises(DeviceError, match="TMA cannot describe the operands"):
        launch_for(problem, tma_tiles()[0], 132)


def test_without_cuda_bindings_there_are_no_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (geometry, tile_choice):
        monkeypatch.setattr(module, "available", lambda: False)
    for contract, source in ((MMA16, "mma.cu"), (TREE_MMA16, "tree_mma.cu")):
        assert choose(problem_of(contract, 4096, 4096, 4096), HOPPER, 132).build.source == source


def test_what_was_measured_goes_before_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that time_model.py knows nothing of."""
    problem = laid_out(TREE_MMA16, 40, 4096, 4096, (Load.K_MAJOR, Load.K_MAJOR))
    loads = load_paths(problem)
    predicted = min(candidates(problem, HOPPER, loads), key=lambda tile: predicted_us(problem, tile, 132))
    others = [tile for tile in candidates(problem, HOPPER, loads) if tile != predicted]
    asked = []
    known: list[str] = []

    def labels(*arguments: object) -> tuple[str, ...]:
        asked.append(arguments)
        return tuple(known)

    monkeypatch.setattr(tile_choice, "labels", labels)
    known[:] = [str(others[0])]
    assert choose(problem, HOPPER, 132).tile == others[0]
    assert asked[-1] == ("tree-mma16", "KK", 40, 4096, 4096, 132)
    known[:] = [str(others[1]), str(predicted), "1x2x3x4"]
    assert choose(problem, HOPPER, 132).tile == predicted, "of several, the one that is predicted to be fastest"
    for found in (["1x2x3x4"], []):
        known[:] = found
        assert choose(problem, HOPPER, 132).tile == predicted, "there is no such tile"
    asked.clear()
    choose(laid_out(TREE_MMA16, 40, 4096, 4096, (Load.K_MAJOR, Load.K_MAJOR), batch=(7,)), HOPPER, 132)
    assert asked == [], "batches were not measured"


@pytest.mark.parametrize("out_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("loads", ["KK", "KM", "MK", "MM"])
def test_the_choice_is_the_least_predicted_time_of_all_candidates(loads: str, out_dtype: DType) -> None:
    """Also where a choice stands for the other m between two multiples of 8, to what it may be off by there."""
    letters = {"K": Load.K_MAJOR, "M": Load.MN_MAJOR}
    both = (letters[loads[0]], letters[loads[1]])
    sizes = itertools.product((2, 16, 65, 72, 137, 1000, 4099), ((104, 72), (1000, 4104), (65_024, 64)))
    for m, (n, k), batch in [*((m, size, ()) for m, size in sizes), (137, (4096, 4096), (5,))]:
        problem = laid_out(MMA16, m, n, k, both, out_dtype=out_dtype, batch=batch)
        able = [tile for tile in candidates(problem, HOPPER, both) if tile.table == "mma_wgmma"]
        assert able
        chosen = choose(problem, HOPPER, 132).tile
        assert chosen in able
        predicted = {tile: predicted_us(problem, tile, 132) for tile in able}
        assert 0 < predicted[chosen] <= min(predicted.values()) * (1.0001 if m <= 64 or m % 8 == 0 else 1.02)


def test_a_grid_that_is_too_large_gets_larger_tiles() -> None:
    both = (Load.K_MAJOR, Load.K_MAJOR)
    huge = laid_out(MMA16, 2**31 - 8, 2**12, 8, both)
    tile = choose(huge, HOPPER, 132).tile
    assert tile.table == "mma_wgmma"
    assert takes(huge, tile, both)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), HOPPER, (12, 0)])
def test_few_outputs_of_a_chain_go_to_small_tiles_and_many_do_not(capability: tuple[int, int]) -> None:
    for loads in itertools.product((Load.K_MAJOR, Load.MN_MAJOR), repeat=2):
        for dtype in (F32, BF16):
            for m, n, k in ((64, 256, 4096), (1, 4096, 4096), (32, 1024, 1024), (64, 64, 64), (256, 256, 4096)):
                if m == 1 and loads[0] == Load.MN_MAJOR:
                    continue  # a row apart from no other
                launch = choose(laid_out(FMA, m, n, k, loads, dtype, dtype), capability, 132)
                assert launch.build.source == "fma_narrow.cu"
            for m, n, k in ((4096, 4096, 4096), (2048, 2048, 512), (8192, 1024, 4096)):
                launch = choose(laid_out(FMA, m, n, k, loads, dtype, dtype), capability, 132)
                assert launch.build.source == gemm_tile.source_of(FMA) == "fma.cu"
    few = choose(laid_out(FMA, 64, 256, 4096, (Load.K_MAJOR, Load.K_MAJOR), F32, F32), capability, 132)
    assert few.grid >= 0.9 * 132
    gathered = laid_out(FMA, 64, 256, 4096, (Load.STRIDED, Load.K_MAJOR), F32, F32)
    assert choose(gathered, capability, 132).build.source == "fma.cu"


def test_no_tile_of_a_chain_is_predicted_to_beat_the_chain() -> None:
    """4 cycles a k at 1.98 GHz, the most that an H200 has."""
    both = (Load.K_MAJOR, Load.K_MAJOR)
    for k in (64, 4096, 100_000):
        problem = laid_out(FMA, 64, 256, k, both, F32, F32)
        for tile in candidates(problem, HOPPER, both):
            assert predicted_us(problem, tile, 132) > 4 * k / 1980


@pytest.mark.parametrize("contract", KERNELS, ids=str)
def test_what_is_compiled_ahead_is_all_that_a_choice_may_need(contract: Contract) -> None:
    """Over shapes, layouts and alignments, every chosen kernel is in the list."""
    known = set(ahead.builds([contract], HOPPER))
    layouts = [((1024, 1), 4096), ((1, 1024), 4096), ((1025, 1), 4096), ((1024, 1), 4098)]
    for operand in contract.operands:
        for (a_layout, b_layout), size in itertools.product(itertools.product(layouts, layouts), (1, 64, 200, 1024)):
            a = view((size, 1024), a_layout[0], operand, a_layout[1])
            b = view((1024, size), b_layout[0], operand, b_layout[1])
            out = view((size, size), (size, 1), operand)
            assert choose(gemm_problem(contract, a, b, out, None, False), HOPPER, 132).build in known


_KINDS = {
    "linear": {"loads": (Load.K_MAJOR, Load.K_MAJOR)},
    "gemm": {"loads": (Load.K_MAJOR, Load.MN_MAJOR)},
    "a turned": {"loads": (Load.MN_MAJOR, Load.K_MAJOR)},
    "f32 out": {"loads": (Load.K_MAJOR, Load.K_MAJOR), "out_dtype": F32},
    "batch": {"loads": (Load.K_MAJOR, Load.K_MAJOR), "batch": (5,)},
    "strided": {"loads": (Load.STRIDED, Load.K_MAJOR)},
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("contract", [MMA16, TREE_MMA16, FMA], ids=str)
def test_a_layout_launches_each_m_as_if_it_had_come_alone(kind: str, contract: Contract) -> None:
    """Whatever m came before, and whichever the layout was made with."""
    rng = random.Random(kind)
    for n, k in ((1536, 4096), (24, 200), (8192, 1000)):
        first, *others = (laid_out(contract, m, n, k, **_KINDS[kind]) for m in (2, 300, 9000))
        # One layout is one layout: strides do not say how many rows there are.
        layouts = [Chooser(base, HOPPER, 132) for base in (first, *(replace(first, m=other.m) for other in others))]
        for m in (*rng.sample(range(2, 70), 12), *rng.sample(range(70, 20_000), 12)):
            problem = replace(first, m=m)
            alone = choose(problem, HOPPER, 132)
            for layout in layouts:
                assert layout(problem) == alone
            assert alone == launch_for(problem, alone.tile, 132)
            if alone.maps is not None:
                at = load_paths(problem)[0] == Load.K_MAJOR
                assert (alone.maps.b if alone.tile.swapped else alone.maps.a).sizes[at] == m


def test_a_choice_is_made_for_so_many_rows_as_there_are_and_a_multiple_of_8() -> None:
    """Every m up to 64; above, multiples of 8 and what is between two of them."""
    for m in (*range(1, 400), 1023, 1024, 1025, 2**31 - 1):
        whole, rows = tile_choice._rows_of_choice(tile_choice._choice(m))
        assert (whole, rows) == ((m, m) if m <= 64 else (m // 8 * 8, -(-m // 8) * 8))
