"""The tile tables, the choice of a tile, load paths and what is compiled: no device needed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from detkern.contracts import CONTRACTS, FMA, FP8_BLOCK128, MMA8, MMA16, TREE, TREE_MMA16, Contract
from detkern.cu import ahead, geometry
from detkern.cu.geometry import Load, choose, fits, launch_for, load_paths, tiles_for
from detkern.dtypes import BF16, F16, F32, DType
from detkern.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView

DEVICE = Device("cuda", 0)
HOPPER = (9, 0)
KERNELS = (FMA, MMA16, MMA8, TREE, TREE_MMA16)


def _view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, pointer: int = 4096) -> TensorView:
    return TensorView(pointer, shape, strides, dtype, DEVICE)


def _problem(
    contract: Contract, m: int, n: int, k: int, dtype: DType = BF16, batch: tuple[int, ...] = ()
) -> GemmProblem:
    """Row-major a, b and out."""

    def view(rows: int, columns: int) -> TensorView:
        shape = (*batch, rows, columns)
        return _view(shape, tuple(np.cumprod((1, *shape[:0:-1]), dtype=int)[::-1].tolist()), dtype)

    return gemm_problem(contract, view(m, k), view(k, n), view(m, n), None, False)


def test_every_contract_but_fp8_has_tiles_for_all_its_operands() -> None:
    for contract in CONTRACTS.values():
        if contract != FP8_BLOCK128:
            for operand in contract.operands:
                tiles = tiles_for(contract, operand)
                for loads in itertools.product(Load, Load):
                    assert any(loads in tile.loads for tile in tiles), "some tile must take any strides"
                for tile in tiles:
                    assert 32 <= tile.threads <= 1024
                    assert 0 < tile.alone_us <= tile.wave_us
                    assert (tile.alone_us == tile.wave_us) == (tile["CTAS_PER_SM"] == 1)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
@pytest.mark.parametrize("contract", KERNELS, ids=str)
def test_every_capability_has_a_tile_for_all_load_paths(contract: Contract, capability: tuple[int, int]) -> None:
    for operand in contract.operands:
        for loads in itertools.product(Load, Load):
            assert any(loads in tile.loads and fits(tile, capability) for tile in tiles_for(contract, operand))


@pytest.mark.parametrize(
    ("strides", "pointer", "expected"),
    [
        ((4096, 1), 4096, Load.K_MAJOR),
        ((1, 4096), 4096, Load.MN_MAJOR),
        ((0, 1), 4096, Load.K_MAJOR),  # one row, broadcast
        ((-4096, 1), 4096, Load.K_MAJOR),
        ((4096, 1), 4098, Load.STRIDED),  # the address
        ((4096, 1), 4096 + 8, Load.STRIDED),
        ((4097, 1), 4096, Load.STRIDED),  # the line
        ((4100, 1), 4096, Load.STRIDED),
        ((4104, 1), 4096, Load.K_MAJOR),
        ((1, 4097), 4096, Load.STRIDED),
        ((8192, 2), 4096, Load.STRIDED),
        ((4096, -1), 4096, Load.STRIDED),
        ((4096, 0), 4096, Load.STRIDED),
        ((1, 1), 4096, Load.STRIDED),
    ],
)
def test_load_path_of_strides_and_alignment(strides: tuple[int, int], pointer: int, expected: Load) -> None:
    """A [M, K] of bf16 lines of 16 bytes are multiples of 8 elements; b [K, N] is the same the other way round."""
    out = _view((64, 64), (64, 1), BF16)
    plain = _view((64, 64), (64, 1), BF16)
    a = _view((64, 64), strides, BF16, pointer)
    b = _view((64, 64), strides[::-1], BF16, pointer)
    assert load_paths(gemm_problem(FMA, a, plain, out, None, False))[0] == expected
    assert load_paths(gemm_problem(FMA, plain, b, out, None, False))[1] == expected


def test_load_path_counts_elements_of_the_type_and_batch_strides() -> None:
    out = _view((3, 64, 64), (4096, 64, 1), F32)
    b = _view((3, 64, 64), (4096, 64, 1), F32)
    for batch_stride, line, expected in ((4096, 68, Load.K_MAJOR), (4096, 66, Load.STRIDED), (4098, 68, Load.STRIDED)):
        a = _view((3, 64, 64), (batch_stride, line, 1), F32)
        assert load_paths(gemm_problem(FMA, a, b, out, None, False))[0] == expected


def test_a_single_row_column_or_k_needs_no_aligned_line() -> None:
    row = gemm_problem(
        FMA, _view((1, 63), (63, 1), F16), _view((63, 8), (8, 1), F16), _view((1, 8), (8, 1), F16), None, False
    )
    assert load_paths(row)[0] == Load.K_MAJOR
    outer = gemm_problem(
        FMA, _view((63, 1), (1, 1), F16), _view((1, 9), (9, 1), F16), _view((63, 9), (9, 1), F16), None, False
    )
    assert load_paths(outer) == (Load.MN_MAJOR, Load.MN_MAJOR)


def test_choice_covers_the_device_before_it_takes_the_largest_tile() -> None:
    largest = choose(_problem(MMA16, 8192, 8192, 4096), HOPPER, 132).tile
    small = choose(_problem(MMA16, 64, 2048, 4096), HOPPER, 132).tile
    assert largest["TILE_M"] * largest["TILE_N"] == max(t["TILE_M"] * t["TILE_N"] for t in tiles_for(MMA16, BF16))
    assert small["TILE_M"] * small["TILE_N"] < largest["TILE_M"] * largest["TILE_N"]


def test_gathered_operands_get_a_tile_that_takes_them() -> None:
    a = _view((4096, 4096), (4097, 1), BF16)
    b = _view((4096, 4096), (4096, 1), BF16)
    problem = gemm_problem(MMA16, a, b, _view((4096, 4096), (4096, 1), BF16), None, False)
    launch = choose(problem, HOPPER, 132)
    assert launch.load_a == Load.STRIDED
    assert (launch.load_a, launch.load_b) in launch.tile.loads


@pytest.mark.parametrize("contract", KERNELS, ids=str)
def test_a_launch_names_everything_that_its_kernel_needs(contract: Contract) -> None:
    launch = choose(_problem(contract, 1000, 1000, 1000), HOPPER, 132)
    macros = dict(launch.build.macros)
    assert launch.build.source == f"{launch.tile.table}.cu"
    assert macros["OPERAND"] == BF16.code
    assert (macros["LOAD_A"], macros["LOAD_B"]) == (1, 2)
    assert macros["SMEM_BYTES"] == launch.build.shared_bytes
    assert ("MMA_K" in macros) == (contract in (MMA16, MMA8))
    assert launch.threads == 32 * macros["WARPS_M"] * macros["WARPS_N"]
    assert len(macros) == len(launch.build.macros)


def test_wgmma_computes_tree_mma16_on_hopper_alone_and_not_what_must_be_gathered() -> None:
    problem = _problem(TREE_MMA16, 4096, 4096, 4096)
    assert choose(problem, HOPPER, 132).build.source == "tree_wgmma.cu"
    for capability in ((10, 0), (12, 0)):
        assert choose(problem, capability, 132).build.source == geometry.source_of(TREE_MMA16) == "tree_mma.cu"
    assert choose(_problem(TREE_MMA16, 64, 64, 4096), HOPPER, 132).build.source == "tree_mma.cu"
    a, b = _view((4096, 4096), (4097, 1), BF16), _view((4096, 4096), (4096, 1), BF16)
    gathered = gemm_problem(TREE_MMA16, a, b, _view((4096, 4096), (4096, 1), BF16), None, False)
    assert choose(gathered, HOPPER, 132).build.source == "tree_mma.cu"


def test_grid_is_a_cta_a_tile_up_to_what_a_grid_can_count() -> None:
    tile = tiles_for(FMA, F32)[-1]
    rows, columns = tile["TILE_M"], tile["TILE_N"]
    assert launch_for(_problem(FMA, rows * 3 + 1, columns * 2, 5, F32, (7,)), tile, 132).grid == 4 * 2 * 7
    assert launch_for(_problem(FMA, rows * 2**20, columns * 2**20, 5, F32), tile, 132).grid == 2**31 - 1


@pytest.mark.parametrize(("contract", "in_registers"), [(TREE, 0), (TREE_MMA16, 2)], ids=str)
def test_scratch_of_a_tree_is_its_upper_levels_for_each_cta_that_runs(contract: Contract, in_registers: int) -> None:
    for tile in tiles_for(contract, BF16):
        level = 2 * tile["TILE_M"] * tile["TILE_N"]
        for leaves, levels in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7), (2**20, 20), (2**20 + 1, 21)):
            for k in (32 * leaves, 32 * leaves - 31):
                launch = launch_for(_problem(contract, 10_000, 10_000, k), tile, 132)
                outside = max(0, max(0, levels - in_registers) - tile["SHARED_LEVELS"])
                assert launch.scratch_bytes == launch.grid * outside * level
                if outside:
                    assert launch.grid == 132 * tile["CTAS_PER_SM"]
    assert launch_for(_problem(contract, 100, 100, 0), tile, 132).scratch_bytes == 0


def test_plain_chains_need_no_scratch() -> None:
    for contract in (FMA, MMA16, MMA8):
        assert choose(_problem(contract, 100, 100, 10**6), HOPPER, 132).scratch_bytes == 0


@pytest.mark.parametrize("contract", KERNELS, ids=str)
def test_what_is_compiled_ahead_is_all_that_a_choice_may_need(contract: Contract) -> None:
    """Over shapes, layouts and alignments, every chosen kernel is in the list."""
    known = set(ahead.builds([contract], HOPPER))
    layouts = [((1024, 1), 4096), ((1, 1024), 4096), ((1025, 1), 4096), ((1024, 1), 4098)]
    for operand in contract.operands:
        for (a_layout, b_layout), size in itertools.product(itertools.product(layouts, layouts), (1, 64, 200, 1024)):
            a = _view((size, 1024), a_layout[0], operand, a_layout[1])
            b = _view((1024, size), b_layout[0], operand, b_layout[1])
            out = _view((size, size), (size, 1), operand)
            assert choose(gemm_problem(contract, a, b, out, None, False), HOPPER, 132).build in known
