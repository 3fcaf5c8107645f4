"""The tile tables, the choice of a tile, load paths and what is compiled: no device needed."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from detkern.cu import ahead, geometry
from detkern.cu.geometry import (
    SHARED_A,
    SHARED_B,
    Chooser,
    Load,
    Tile,
    candidates,
    choose,
    fits,
    launch_for,
    load_paths,
    oriented,
    predicted_us,
    takes,
    tiles_for,
)
from detkern.errors import DeviceError
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import CONTRACTS, FMA, FP8_BLOCK128, MMA8, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

DEVICE = Device("cuda", 0)
HOPPER = (9, 0)
KERNELS = (FMA, MMA16, MMA8, TREE, TREE_MMA16)


def _view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, pointer: int = 4096) -> TensorView:
    return TensorView(pointer, shape, strides, dtype, DEVICE)


def _problem(
    contract: Contract, m: int, n: int, k: int, dtype: DType = BF16, batch: tuple[int, ...] = ()
) -> GemmProblem:
    """Row-major a, b and out, rows at multiples of 16 bytes."""
    return _laid_out(contract, m, n, k, (Load.K_MAJOR, Load.MN_MAJOR), dtype, dtype, batch)


def _laid_out(
    contract: Contract,
    m: int,
    n: int,
    k: int,
    loads: tuple[Load, Load],
    dtype: DType = BF16,
    out_dtype: DType = BF16,
    batch: tuple[int, ...] = (),
) -> GemmProblem:
    """a and b for these load paths, lines at multiples of 16 bytes (STRIDED: rows that are not), and a row-major out."""

    def view(rows: int, columns: int, by_columns: bool, dtype: DType, padding: int = 0) -> TensorView:
        lines, length = (columns, rows) if by_columns else (rows, columns)
        unit = 16 // dtype.itemsize
        line = -(-length // unit) * unit + padding
        strides = [1, line] if by_columns else [line, 1]
        step = line * lines
        for size in reversed(batch):
            strides.insert(0, step)
            step *= size
        return _view((*batch, rows, columns), tuple(strides), dtype)

    return gemm_problem(
        contract,
        view(m, k, loads[0] == Load.MN_MAJOR, dtype, loads[0] == Load.STRIDED),
        view(k, n, loads[1] == Load.K_MAJOR, dtype, loads[1] == Load.STRIDED),
        view(m, n, False, out_dtype),
        None,
        False,
    )


def _by_tma(contract: Contract = MMA16) -> list[Tile]:
    return [tile for tile in tiles_for(contract, BF16) if tile.by_tma]


def test_every_contract_but_fp8_has_tiles_for_all_its_operands() -> None:
    for contract in CONTRACTS.values():
        if contract != FP8_BLOCK128:
            for operand in contract.operands:
                tiles = tiles_for(contract, operand)
                for loads in itertools.product(Load, Load):
                    assert any(loads in tile.loads for tile in tiles), "some tile must take any strides"
                for tile in tiles:
                    assert 32 <= tile.threads <= 1024
                    if tile.table == "mma_wgmma":
                        assert tile.alone_us == tile.wave_us == 0, "time_model.py predicts instead"
                        assert tile["CTAS_PER_SM"] == 1, "which it takes for granted"
                        continue
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
    def area(tile: Tile) -> int:
        return tile["TILE_M"] * tile["TILE_N"]

    for capability in (HOPPER, (10, 0)):
        largest = choose(_problem(MMA16, 8192, 8192, 4096), capability, 132).tile
        small = choose(_problem(MMA16, 64, 2048, 4096), capability, 132)
        all_areas = [area(tile) for tile in tiles_for(MMA16, BF16) if fits(tile, capability)]
        assert area(largest) >= 0.75 * max(all_areas)
        assert area(small.tile) < area(largest) / 4
        assert small.grid > 132 // 5
    assert area(largest) == max(all_areas), "of the general kernel, whose tiles lose less the larger they are"


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
    assert (macros["LOAD_A"], macros["LOAD_B"]) == ((2, 1) if launch.tile.swapped else (1, 2))
    assert macros["SMEM_BYTES"] == launch.build.shared_bytes
    assert ("MMA_K" in macros) == (contract in (MMA16, MMA8))
    if launch.tile.table == "tree_wgmma":
        assert launch.threads == 128 * (macros["GROUPS_M"] * macros["GROUPS_N"] + 1)
    else:
        assert launch.threads == 32 * (macros["WARPS_M"] * macros["WARPS_N"] + macros.get("COPYING_WARPS", 0))
    assert (launch.maps is not None) == launch.tile.by_tma
    assert len(macros) == len(launch.build.macros)


def test_wgmma_computes_tree_mma16_on_hopper_alone_and_not_what_must_be_gathered() -> None:
    problem = _problem(TREE_MMA16, 4096, 4096, 4096)
    assert choose(problem, HOPPER, 132).build.source == "tree_wgmma.cu"
    for capability in ((10, 0), (12, 0)):
        assert choose(problem, capability, 132).build.source == geometry.source_of(TREE_MMA16) == "tree_mma.cu"
    a, b = _view((4096, 4096), (4097, 1), BF16), _view((4096, 4096), (4096, 1), BF16)
    gathered = gemm_problem(TREE_MMA16, a, b, _view((4096, 4096), (4096, 1), BF16), None, False)
    assert choose(gathered, HOPPER, 132).build.source == "tree_mma.cu"


def test_grid_is_a_cta_a_tile_up_to_what_a_grid_can_count() -> None:
    tile = tiles_for(FMA, F32)[-1]
    rows, columns = tile["TILE_M"], tile["TILE_N"]
    assert launch_for(_problem(FMA, rows * 3 + 1, columns * 2, 5, F32, (7,)), tile, 132).grid == 4 * 2 * 7
    assert launch_for(_problem(FMA, rows * 2**20, columns * 2**20, 5, F32), tile, 132).grid == 2**31 - 1


@pytest.mark.parametrize("contract", [TREE, TREE_MMA16], ids=str)
def test_scratch_of_a_tree_is_its_upper_levels_for_each_cta_that_runs(contract: Contract) -> None:
    for tile in tiles_for(contract, BF16):
        # Of the tensor-core trees, nodes of up to four leaves; by wgmma of up to eight, and one that waits for its sibling.
        in_registers = 0 if contract == TREE else 4 if tile.table == "tree_wgmma" else 2
        level = 2 * tile["TILE_M"] * tile["TILE_N"]
        for leaves, levels in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7), (2**20, 20), (2**20 + 1, 21)):
            for k in (32 * leaves, 32 * leaves - 31):
                launch = launch_for(_problem(contract, 10_000, 10_000, k), tile, 132)
                outside = max(0, max(0, levels - in_registers) - tile["SHARED_LEVELS"])
                assert launch.scratch_bytes == launch.grid * outside * level
                if outside:
                    assert launch.grid == 132 * tile["CTAS_PER_SM"]
    assert not tile.by_tma, "the last tile takes a product without k"
    assert launch_for(_problem(contract, 100, 100, 0), tile, 132).scratch_bytes == 0


def test_labels_tell_the_tiles_of_a_contract_apart() -> None:
    """tuned.json names tiles by them."""
    for contract in KERNELS:
        for operand in contract.operands:
            labels = [str(tile) for tile in tiles_for(contract, operand)]
            assert len(set(labels)) == len(labels)


def test_ctas_of_tma_kernels_are_those_that_run_at_once() -> None:
    for contract in (MMA16, TREE_MMA16):
        for tile in _by_tma(contract):
            loads = min(tile.loads)
            for m, n in ((1, 1), (1, 3000), (8000, 8000), (tile["TILE_M"], 3 * tile["TILE_N"])):
                problem = _laid_out(contract, m, n, 200, loads)
                if not takes(problem, tile, loads):
                    continue
                rows = tile["TILE_M"] * (2 if tile.shares == SHARED_B else 1)
                columns = tile["TILE_N"] * (2 if tile.shares == SHARED_A else 1)
                laid = oriented(problem, tile)
                units = -(-laid.m // rows) * -(-laid.n // columns)  # tiles, or pairs of them
                ctas = units * (2 if tile.shares else 1)
                for multiprocessors in (132, 113, 1):
                    launch = launch_for(problem, tile, multiprocessors)
                    clusters = max(1, multiprocessors * tile["CTAS_PER_SM"] // launch.cluster)  # a cluster is whole
                    assert launch.grid == launch.cluster * min(-(-ctas // launch.cluster), clusters)


def test_tiles_below_one_another_are_launched_in_pairs() -> None:
    """Of one kernel: what both read of B comes faster. A kernel whose CTAs share an operand has no others."""
    for contract in (MMA16, TREE_MMA16):
        for tile in _by_tma(contract):
            loads = min(tile.loads)
            for m in (tile["TILE_M"], tile["TILE_M"] + 1, 5 * tile["TILE_M"]):
                sizes = (1000, m) if tile.swapped else (m, 1000)
                cluster = launch_for(_laid_out(contract, *sizes, 200, loads), tile, 132).cluster
                pairs = tile.shares or (contract is MMA16 and m > tile["TILE_M"])
                assert cluster == (2 if pairs else 1)
    for tile in tiles_for(MMA16, BF16):
        if not tile.by_tma:
            assert launch_for(_laid_out(MMA16, 1000, 1000, 200, (Load.K_MAJOR, Load.K_MAJOR)), tile, 132).cluster == 1


def test_a_tile_whose_ctas_share_an_operand_is_not_launched_for_fewer_rows() -> None:
    shared = next(tile for tile in _by_tma() if tile.shares and not tile.swapped)
    problem = _laid_out(MMA16, shared["TILE_M"] - 1, 512, 512, (Load.K_MAJOR, Load.K_MAJOR))
    with pytest.raises(DeviceError, match=r"shared copies parts of whole tiles of rows"):
        launch_for(problem, shared, 132)


def test_a_cta_asks_ahead_for_a_part_of_what_it_reads_of_b() -> None:
    both = (Load.K_MAJOR, Load.K_MAJOR)
    tile = next(tile for tile in _by_tma() if str(tile) == "32x64x128x8")
    for m, n, k, kib in (
        (1, 8192, 512, 32),  # of 64 KiB
        (32, 8192, 1024, 32),  # of 128
        (1, 8192, 1536, 64),  # of 192
        (1, 8192, 2048, 64),  # of 256
        (1, 8192, 7168, 128),  # of 896
        (1, 16384, 1024, 64),  # two tiles of 128
        (33, 8192, 7168, 32),  # two rows of tiles read the same
        (1, 12 * 132 - 8, 7168, 32),  # the chain takes longer than memory
        (1, 12 * 132, 7168, 128),
    ):
        assert launch_for(_laid_out(MMA16, m, n, k, both), tile, 132).prefetch_bytes == kib * 1024
    shared = next(tile for tile in _by_tma() if tile.shares and both in tile.loads)
    assert launch_for(_laid_out(MMA16, shared["TILE_M"], 8192, 14336, both), shared, 132).prefetch_bytes == 32 * 1024


def test_kernels_that_do_not_ask_ahead_are_told_of_nothing() -> None:
    both = (Load.K_MAJOR, Load.K_MAJOR)
    for contract in (MMA16, TREE_MMA16):
        problem = _laid_out(contract, 256, 4096, 4096, both)
        for tile in tiles_for(contract, BF16):
            if takes(problem, tile, both):
                asks = launch_for(problem, tile, 132).prefetch_bytes > 0
                assert asks == (tile.table == "mma_wgmma")
        batched = _laid_out(contract, 256, 4096, 4096, both, batch=(2,))
        assert choose(batched, HOPPER, 132).prefetch_bytes == 0


def test_a_single_column_is_no_broken_line() -> None:
    """Its stride is nothing's distance: the tile of one column is that of eight."""
    both = (Load.K_MAJOR, Load.K_MAJOR)
    tile = next(tile for tile in _by_tma() if both in tile.loads)
    one, eight = (predicted_us(_laid_out(MMA16, 64, n, 4096, both), tile, 132) for n in (1, 8))
    assert one == pytest.approx(eight, rel=0.01)


def test_ctas_share_rows_where_there_is_a_tile_of_them() -> None:
    """Of fewer rows each is copied as a box of its own, which halves cannot be."""
    both = (Load.K_MAJOR, Load.K_MAJOR)
    assert {tile.shares for tile in _by_tma()} == {0, 1, 2}
    for tile in _by_tma():
        # A swapped tile's rows are columns of the output, whose lines are of 16 bytes.
        by = 8 if tile.swapped else 1
        for m in (by, tile["TILE_M"] - by, tile["TILE_M"], tile["TILE_M"] + by, 1000):
            sizes = (512, m) if tile.swapped else (m, 512)
            problem = _laid_out(MMA16, *sizes, 512, both, out_dtype=F32 if tile.f32_out else BF16)
            expected = both in tile.loads and (not tile.shares or m >= tile["TILE_M"])
            assert takes(problem, tile, both) == expected
            assert (tile in candidates(problem, HOPPER, load_paths(problem))) == expected


def test_a_tile_takes_the_outputs_that_its_kernel_writes() -> None:
    """Pairs of binary32 go to kernels of their own, and what has no tensor map to those for strided outputs."""
    tiles = [tile for tile in _by_tma() if tile.table == "mma_wgmma"]
    assert {(tile.swapped, tile.f32_out, bool(tile["STRIDED_OUT"])) for tile in tiles} == {
        (False, False, False), (False, False, True), (False, True, False), (True, False, False)
    }  # fmt: skip
    operand = _view((512, 512), (512, 1), BF16, 256)
    bias = _view((512,), (1,), F32, 256)
    outs = [
        ((_view((512, 512), (512, 1), BF16, 256), None), "mapped"),
        ((_view((512, 512), (512, 1), F16, 256), bias), "mapped"),
        ((_view((512, 512), (513, 1), BF16, 256), None), "any"),
        ((_view((512, 512), (512, 1), F32, 256), None), "pairs"),
        ((_view((512, 512), (514, 1), F32, 264), None), "pairs"),
        ((_view((512, 512), (512, 1), F32, 256), bias), "any"),
        ((_view((512, 512), (513, 1), F32, 256), None), "any"),  # the line
        ((_view((512, 512), (512, 1), F32, 260), None), "any"),  # the address
        ((_view((512, 512), (1, 512), F32, 256), None), "any"),
    ]  # fmt: skip
    for (out, added), kind in outs:
        problem = gemm_problem(MMA16, operand, operand, out, added, False)
        loads = load_paths(problem)
        for tile in tiles:
            writes = tile.f32_out if kind == "pairs" else not tile.f32_out and (kind == "mapped" or tile["STRIDED_OUT"])
            assert takes(problem, tile, loads) == (bool(writes) and loads in tile.loads), (str(tile), kind)


def test_a_swapped_tile_takes_no_fewer_tokens_than_its_columns() -> None:
    """Its boxes of tokens are whole; fewer are other tiles'."""
    for tile in _by_tma():
        if tile.swapped:
            loads = min(tile.loads)
            assert not takes(_laid_out(MMA16, tile["TILE_N"] - 1, 512, 512, loads), tile, loads)
            assert takes(_laid_out(MMA16, tile["TILE_N"], 512, 512, loads), tile, loads)


def test_a_swapped_tile_has_the_transposed_problem() -> None:
    tile = next(tile for tile in _by_tma() if tile.swapped)
    problem = _laid_out(MMA16, 200, 512, 96, (Load.K_MAJOR, Load.MN_MAJOR), batch=(3,))
    turned = oriented(problem, tile)
    assert (turned.m, turned.n, turned.k) == (512, 200, 96)
    for theirs, ours in ((turned.a, problem.b), (turned.b, problem.a), (turned.out, problem.out)):
        assert (theirs.row_stride, theirs.col_stride) == (ours.col_stride, ours.row_stride)
        assert theirs.batch_strides == ours.batch_strides
    build = launch_for(problem, tile, 132).build
    macros = dict(build.macros)
    assert (macros["LOAD_A"], macros["LOAD_B"]) == (Load.MN_MAJOR, Load.K_MAJOR)
    other = next(tile for tile in _by_tma() if not tile.swapped)
    assert oriented(problem, other) is problem


def test_tiles_take_the_load_paths_of_their_table_alone() -> None:
    for tile in _by_tma():
        for loads in itertools.product(Load, Load):
            problem = _laid_out(MMA16, 512, 512, 512, loads, out_dtype=F32 if tile.f32_out else BF16)
            assert load_paths(problem) == loads
            assert takes(problem, tile, loads) == (loads in tile.loads)


def test_boxes_are_those_that_the_kernel_counts_the_bytes_of() -> None:
    """A box of a has no more rows than m (K_MAJOR). Where lines are of whole boxes, one copy takes a stage's; CTAs that share
    an operand copy half of its boxes each, or of a single one half of the rows."""
    for contract in (MMA16, TREE_MMA16):
        for tile in _by_tma(contract):
            for loads, m, (n, k) in itertools.product(
                sorted(tile.loads), (1, 7, 9, 16, 24, 33, 64, 100, 128, 300), ((104, 72), (128, 192))
            ):
                problem = _laid_out(contract, m, n, k, loads)
                if not takes(problem, tile, loads):
                    continue
                maps = launch_for(problem, tile, 132).maps
                assert maps is not None
                rows_there, columns_there = (n, m) if tile.swapped else (m, n)
                sides = ((tile["TILE_M"], rows_there), (tile["TILE_N"], columns_there))
                lines = zip((maps.a, maps.b), loads[::-1] if tile.swapped else loads, sides, strict=True)
                for operand, (shape, load, (size, there)) in enumerate(lines):
                    along = load == Load.K_MAJOR
                    boxes, rows = (tile["TILE_K"], size) if along else (size, tile["TILE_K"])
                    boxes //= 64
                    few = operand == 0 and along and there < rows and not (tile.fills and k % 64 == 0)
                    if tile.shares == operand + 1:
                        boxes, rows = (boxes // 2, rows) if boxes > 1 else (1, rows // 2)
                    whole = (k if along else there) % 64 == 0 and not few
                    assert (shape.rows, shape.boxes) == (there if few else rows, boxes if whole else None)
                    assert shape.rows <= 256
                assert (maps.out is not None) == (tile.table == "mma_wgmma")
                if maps.out is not None:
                    rows = tile["TILE_N"] if tile.swapped else 16
                    assert (maps.out.rows, maps.out.boxes, maps.out.sizes) == (rows, None, (n, m, 1))
                odd = (
                    launch_for(_laid_out(contract, m, 100, k, loads), tile, 132) if tile.get("STRIDED_OUT", 1) else None
                )
                assert odd is None or (odd.maps and odd.maps.out is None), "rows of 100 are not of whole 16 bytes"


def _unusual() -> list[tuple[str, GemmProblem]]:
    """Operands on the vector load paths that TMA cannot describe."""
    b, out = _view((256, 256), (1, 256), BF16), _view((256, 256), (256, 1), BF16)

    def with_a(a: TensorView, b: TensorView = b, out: TensorView = out) -> GemmProblem:
        return gemm_problem(MMA16, a, b, out, None, False)

    batch = (2, 3)
    return [
        ("reversed rows", with_a(_view((256, 256), (-256, 1), BF16))),
        ("overlapping rows", with_a(_view((256, 256), (128, 1), BF16))),
        ("one row for all", with_a(_view((256, 256), (0, 1), BF16))),
        (
            "three batch dimensions",
            with_a(
                _view((2, *batch, 256, 256), (2**22, 256 * 256, 3 * 2**17, 256, 1), BF16),
                _view((2, *batch, 256, 256), (2**23, 256 * 256, 2**18, 1, 256), BF16),
                _view((2, *batch, 256, 256), (2**24, 256 * 256, 2**19, 256, 1), BF16),
            ),
        ),
        (
            "a batch that runs backwards",
            with_a(
                _view((3, 256, 256), (-256 * 256, 256, 1), BF16),
                _view((3, 256, 256), (2**17, 1, 256), BF16),
                _view((3, 256, 256), (2**18, 256, 1), BF16),
            ),
        ),
        ("no k", _laid_out(MMA16, 256, 256, 0, (Load.K_MAJOR, Load.K_MAJOR))),
    ]


@pytest.mark.parametrize(("what", "problem"), _unusual(), ids=[what for what, _ in _unusual()])
def test_what_tma_cannot_describe_goes_to_the_general_kernel(what: str, problem: GemmProblem) -> None:
    loads = load_paths(problem)
    assert Load.STRIDED not in loads
    assert choose(problem, HOPPER, 132).build.source == "mma.cu"
    for tile in _by_tma():
        assert not takes(problem, tile, loads)
    with pytest.raises(DeviceError, match="TMA cannot describe the operands"):
        launch_for(problem, _by_tma()[0], 132)


def test_without_cuda_bindings_there_are_no_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "available", lambda: False)
    for contract, source in ((MMA16, "mma.cu"), (TREE_MMA16, "tree_mma.cu")):
        assert choose(_problem(contract, 4096, 4096, 4096), HOPPER, 132).build.source == source


def test_what_was_measured_goes_before_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels that time_model.py knows nothing of."""
    problem = _laid_out(TREE_MMA16, 40, 4096, 4096, (Load.K_MAJOR, Load.K_MAJOR))
    loads = load_paths(problem)
    predicted = min(candidates(problem, HOPPER, loads), key=lambda tile: predicted_us(problem, tile, 132))
    others = [tile for tile in candidates(problem, HOPPER, loads) if tile != predicted]
    asked = []
    known: list[str] = []

    def labels(*arguments: object) -> tuple[str, ...]:
        asked.append(arguments)
        return tuple(known)

    monkeypatch.setattr(geometry, "labels", labels)
    known[:] = [str(others[0])]
    assert choose(problem, HOPPER, 132).tile == others[0]
    assert asked[-1] == ("tree-mma16", "KK", 40, 4096, 4096, 132)
    known[:] = [str(others[1]), str(predicted), "1x2x3x4"]
    assert choose(problem, HOPPER, 132).tile == predicted, "of several, the one that is predicted to be fastest"
    for found in (["1x2x3x4"], []):
        known[:] = found
        assert choose(problem, HOPPER, 132).tile == predicted, "there is no such tile"
    asked.clear()
    choose(_laid_out(TREE_MMA16, 40, 4096, 4096, (Load.K_MAJOR, Load.K_MAJOR), batch=(7,)), HOPPER, 132)
    assert asked == [], "batches were not measured"


@pytest.mark.parametrize("out_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("loads", ["KK", "KM", "MK", "MM"])
def test_the_choice_is_the_least_predicted_time_of_all_candidates(loads: str, out_dtype: DType) -> None:
    """Also where a choice stands for the other m between two multiples of 8, to what it may be off by there."""
    letters = {"K": Load.K_MAJOR, "M": Load.MN_MAJOR}
    both = (letters[loads[0]], letters[loads[1]])
    sizes = itertools.product((2, 16, 65, 72, 137, 1000, 4099), ((104, 72), (1000, 4104), (65_024, 64)))
    for m, (n, k), batch in [*((m, size, ()) for m, size in sizes), (137, (4096, 4096), (5,))]:
        problem = _laid_out(MMA16, m, n, k, both, out_dtype=out_dtype, batch=batch)
        able = [tile for tile in candidates(problem, HOPPER, both) if tile.table == "mma_wgmma"]
        assert able
        chosen = choose(problem, HOPPER, 132).tile
        assert chosen in able
        predicted = {tile: predicted_us(problem, tile, 132) for tile in able}
        assert 0 < predicted[chosen] <= min(predicted.values()) * (1.0001 if m <= 64 or m % 8 == 0 else 1.02)


def test_a_grid_that_is_too_large_gets_larger_tiles() -> None:
    both = (Load.K_MAJOR, Load.K_MAJOR)
    huge = _laid_out(MMA16, 2**31 - 8, 2**12, 8, both)
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
                launch = choose(_laid_out(FMA, m, n, k, loads, dtype, dtype), capability, 132)
                assert launch.build.source == "fma_narrow.cu"
            for m, n, k in ((4096, 4096, 4096), (2048, 2048, 512), (8192, 1024, 4096)):
                launch = choose(_laid_out(FMA, m, n, k, loads, dtype, dtype), capability, 132)
                assert launch.build.source == geometry.source_of(FMA) == "fma.cu"
    few = choose(_laid_out(FMA, 64, 256, 4096, (Load.K_MAJOR, Load.K_MAJOR), F32, F32), capability, 132)
    assert few.grid >= 0.9 * 132
    gathered = _laid_out(FMA, 64, 256, 4096, (Load.STRIDED, Load.K_MAJOR), F32, F32)
    assert choose(gathered, capability, 132).build.source == "fma.cu"


def test_no_tile_of_a_chain_is_predicted_to_beat_the_chain() -> None:
    """4 cycles a k at 1.98 GHz, the most that an H200 has."""
    both = (Load.K_MAJOR, Load.K_MAJOR)
    for k in (64, 4096, 100_000):
        problem = _laid_out(FMA, 64, 256, k, both, F32, F32)
        for tile in candidates(problem, HOPPER, both):
            assert predicted_us(problem, tile, 132) > 4 * k / 1980


def test_what_a_self_check_vouches_for_are_all_kernels_of_every_device() -> None:
    assert geometry.portable_sources(FMA) == ("fma.cu", "fma_narrow.cu")
    for contract in (MMA16, MMA8, TREE, TREE_MMA16):
        assert geometry.portable_sources(contract) == (geometry.source_of(contract),)


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
        first, *others = (_laid_out(contract, m, n, k, **_KINDS[kind]) for m in (2, 300, 9000))
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
        whole, rows = geometry._rows_of_choice(geometry._choice(m))
        assert (whole, rows) == ((m, m) if m <= 64 else (m // 8 * 8, -(-m // 8) * 8))
