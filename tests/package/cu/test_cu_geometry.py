"""Launches of tiles: load paths, grids, clusters, maps, scratch memory."""

from __future__ import annotations

import itertools

import pytest
from cu_problems import HOPPER, KERNELS, laid_out, problem_of, tma_tiles, view

from detkern.cu.gemm_tile import Load, tiles_for
from detkern.cu.geometry import SHARED_A, SHARED_B, launch_for, load_paths, oriented, takes
from detkern.cu.tile_choice import candidates, choose
from detkern.errors import DeviceError
from detkern.operations.gemm.problem import gemm_problem
from detkern.vocabulary.contracts import FMA, MMA8, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32


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
    out = view((64, 64), (64, 1), BF16)
    plain = view((64, 64), (64, 1), BF16)
    a = view((64, 64), strides, BF16, pointer)
    b = view((64, 64), strides[::-1], BF16, pointer)
    assert load_paths(gemm_problem(FMA, a, plain, out, None, False))[0] == expected
    assert load_paths(gemm_problem(FMA, plain, b, out, None, False))[1] == expected


def test_load_path_counts_elements_of_the_type_and_batch_strides() -> None:
    out = view((3, 64, 64), (4096, 64, 1), F32)
    b = view((3, 64, 64), (4096, 64, 1), F32)
    for batch_stride, line, expected in ((4096, 68, Load.K_MAJOR), (4096, 66, Load.STRIDED), (4098, 68, Load.STRIDED)):
        a = view((3, 64, 64), (batch_stride, line, 1), F32)
        assert load_paths(gemm_problem(FMA, a, b, out, None, False))[0] == expected


def test_a_single_row_column_or_k_needs_no_aligned_line() -> None:
    row = gemm_problem(
        FMA, view((1, 63), (63, 1), F16), view((63, 8), (8, 1), F16), view((1, 8), (8, 1), F16), None, False
    )
    assert load_paths(row)[0] == Load.K_MAJOR
    outer = gemm_problem(
        FMA, view((63, 1), (1, 1), F16), view((1, 9), (9, 1), F16), view((63, 9), (9, 1), F16), None, False
    )
    assert load_paths(outer) == (Load.MN_MAJOR, Load.MN_MAJOR)


@pytest.mark.parametrize("contract", KERNELS, ids=str)
def test_a_launch_names_everything_that_its_kernel_needs(contract: Contract) -> None:
    launch = choose(problem_of(contract, 1000, 1000, 1000), HOPPER, 132)
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


def test_grid_is_a_cta_a_tile_up_to_what_a_grid_can_count() -> None:
    tile = tiles_for(FMA, F32)[-1]
    rows, columns = tile["TILE_M"], tile["TILE_N"]
    assert launch_for(problem_of(FMA, rows * 3 + 1, columns * 2, 5, F32, (7,)), tile, 132).grid == 4 * 2 * 7
    assert launch_for(problem_of(FMA, rows * 2**20, columns * 2**20, 5, F32), tile, 132).grid == 2**31 - 1


@pytest.mark.parametrize("contract", [TREE, TREE_MMA16], ids=str)
def test_scratch_of_a_tree_is_its_upper_levels_for_each_cta_that_runs(contract: Contract) -> None:
    for tile in tiles_for(contract, BF16):
        # Of the tensor-core trees, nodes of up to four leaves; by wgmma of up to eight, and one that waits for its
        # sibling.
        in_registers = 0 if contract == TREE else 4 if tile.table == "tree_wgmma" else 2
        level = 2 * tile["TILE_M"] * tile["TILE_N"]
        for leaves, levels in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7), (2**20, 20), (2**20 + 1, 21)):
            for k in (32 * leaves, 32 * leaves - 31):
                launch = launch_for(problem_of(contract, 10_000, 10_000, k), tile, 132)
                outside = max(0, max(0, levels - in_registers) - tile["SHARED_LEVELS"])
                assert launch.scratch_bytes == launch.grid * outside * level
                if outside:
                    assert launch.grid == 132 * tile["CTAS_PER_SM"]
    assert not tile.by_tma, "the last tile takes a product without k"
    assert launch_for(problem_of(contract, 100, 100, 0), tile, 132).scratch_bytes == 0


def test_ctas_of_tma_kernels_are_those_that_run_at_once() -> None:
    for contract in (MMA16, TREE_MMA16):
        for tile in tma_tiles(contract):
            loads = min(tile.loads)
            for m, n in ((1, 1), (1, 3000), (8000, 8000), (tile["TILE_M"], 3 * tile["TILE_N"])):
                problem = laid_out(contract, m, n, 200, loads)
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
        for tile in tma_tiles(contract):
            loads = min(tile.loads)
            for m in (tile["TILE_M"], tile["TILE_M"] + 1, 5 * tile["TILE_M"]):
                sizes = (1000, m) if tile.swapped else (m, 1000)
                cluster = launch_for(laid_out(contract, *sizes, 200, loads), tile, 132).cluster
                pairs = tile.shares or (contract is MMA16 and m > tile["TILE_M"])
                assert cluster == (2 if pairs else 1)
    for tile in tiles_for(MMA16, BF16):
        if not tile.by_tma:
            assert launch_for(laid_out(MMA16, 1000, 1000, 200, (Load.K_MAJOR, Load.K_MAJOR)), tile, 132).cluster == 1


def test_a_tile_whose_ctas_share_an_operand_is_not_launched_for_fewer_rows() -> None:
    shared = next(tile for tile in tma_tiles() if tile.shares and not tile.swapped)
    problem = laid_out(MMA16, shared["TILE_M"] - 1, 512, 512, (Load.K_MAJOR, Load.K_MAJOR))
    with pytest.raises(DeviceError, match=r"shared copies parts of whole tiles of rows"):
        launch_for(problem, shared, 132)


def test_a_cta_asks_ahead_for_a_part_of_what_it_reads_of_b() -> None:
    both = (Load.K_MAJOR, Load.K_MAJOR)
    tile = next(tile for tile in tma_tiles() if str(tile) == "32x64x128x8")
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
        assert launch_for(laid_out(MMA16, m, n, k, both), tile, 132).prefetch_bytes == kib * 1024
    shared = next(tile for tile in tma_tiles() if tile.shares and both in tile.loads)
    assert launch_for(laid_out(MMA16, shared["TILE_M"], 8192, 14336, both), shared, 132).prefetch_bytes == 32 * 1024


def test_kernels_that_do_not_ask_ahead_are_told_of_nothing() -> None:
    both = (Load.K_MAJOR, Load.K_MAJOR)
    for contract in (MMA16, TREE_MMA16):
        problem = laid_out(contract, 256, 4096, 4096, both)
        for tile in tiles_for(contract, BF16):
            if takes(problem, tile, both):
                asks = launch_for(problem, tile, 132).prefetch_bytes > 0
                assert asks == (tile.table == "mma_wgmma")
        batched = laid_out(contract, 256, 4096, 4096, both, batch=(2,))
        assert choose(batched, HOPPER, 132).prefetch_bytes == 0


def test_ctas_share_rows_where_there_is_a_tile_of_them() -> None:
    """Of fewer rows each is copied as a box of its own, which halves cannot be."""
    both = (Load.K_MAJOR, Load.K_MAJOR)
    assert {tile.shares for tile in tma_tiles()} == {0, 1, 2}
    for tile in tma_tiles():
        # A swapped tile's rows are columns of the output, whose lines are of 16 bytes.
        by = 8 if tile.swapped else 1
        for m in (by, tile["TILE_M"] - by, tile["TILE_M"], tile["TILE_M"] + by, 1000):
            sizes = (512, m) if tile.swapped else (m, 512)
            problem = laid_out(MMA16, *sizes, 512, both, out_dtype=F32 if tile.f32_out else BF16)
            expected = both in tile.loads and (not tile.shares or m >= tile["TILE_M"])
            assert takes(problem, tile, both) == expected
            assert (tile in candidates(problem, HOPPER, load_paths(problem))) == expected


def test_a_tile_takes_the_outputs_that_its_kernel_writes() -> None:
    """Rows of binary32 by 16 bytes go to kernels of their own, what has no tensor map to those for strided outputs."""
    tiles = [tile for tile in tma_tiles() if tile.table == "mma_wgmma"]
    assert {(tile.swapped, tile.f32_out, bool(tile["STRIDED_OUT"])) for tile in tiles} == {
        (False, False, False), (False, False, True), (False, True, False), (True, False, False)
    }  # fmt: skip
    operand = view((512, 512), (512, 1), BF16, 256)
    bias = view((512,), (1,), F32, 256)
    outs = [
        ((view((512, 512), (512, 1), BF16, 256), None), "mapped"),
        ((view((512, 512), (512, 1), F16, 256), bias), "mapped"),
        ((view((512, 512), (513, 1), BF16, 256), None), "any"),
        ((view((512, 512), (512, 1), F32, 256), None), "quads"),
        ((view((512, 512), (516, 1), F32, 272), None), "quads"),
        ((view((512, 512), (514, 1), F32, 256), None), "any"),  # the line is not of 16 bytes
        ((view((512, 512), (512, 1), F32, 256), bias), "any"),
        ((view((512, 512), (512, 1), F32, 264), None), "any"),  # nor the address
        ((view((512, 512), (1, 512), F32, 256), None), "any"),
    ]  # fmt: skip
    for (out, added), kind in outs:
        problem = gemm_problem(MMA16, operand, operand, out, added, False)
        loads = load_paths(problem)
        for tile in tiles:
            writes = tile.f32_out if kind == "quads" else not tile.f32_out and (kind == "mapped" or tile["STRIDED_OUT"])
            assert takes(problem, tile, loads) == (bool(writes) and loads in tile.loads), (str(tile), kind)


def test_a_swapped_tile_takes_no_fewer_tokens_than_its_columns() -> None:
    """Its boxes of tokens are whole; fewer are other tiles'."""
    for tile in tma_tiles():
        if tile.swapped:
            loads = min(tile.loads)
            assert not takes(laid_out(MMA16, tile["TILE_N"] - 1, 512, 512, loads), tile, loads)
            assert takes(laid_out(MMA16, tile["TILE_N"], 512, 512, loads), tile, loads)


def test_a_swapped_tile_has_the_transposed_problem() -> None:
    tile = next(tile for tile in tma_tiles() if tile.swapped)
    problem = laid_out(MMA16, 200, 512, 96, (Load.K_MAJOR, Load.MN_MAJOR), batch=(3,))
    turned = oriented(problem, tile)
    assert (turned.m, turned.n, turned.k) == (512, 200, 96)
    for theirs, ours in ((turned.a, problem.b), (turned.b, problem.a), (turned.out, problem.out)):
        assert (theirs.row_stride, theirs.col_stride) == (ours.col_stride, ours.row_stride)
        assert theirs.batch_strides == ours.batch_strides
    build = launch_for(problem, tile, 132).build
    macros = dict(build.macros)
    assert (macros["LOAD_A"], macros["LOAD_B"]) == (Load.MN_MAJOR, Load.K_MAJOR)
    other = next(tile for tile in tma_tiles() if not tile.swapped)
    assert oriented(problem, other) is problem


def test_tiles_take_the_load_paths_of_their_table_alone() -> None:
    for tile in tma_tiles():
        for loads in itertools.product(Load, Load):
            problem = laid_out(MMA16, 512, 512, 512, loads, out_dtype=F32 if tile.f32_out else BF16)
            assert load_paths(problem) == loads
            assert takes(problem, tile, loads) == (loads in tile.loads)


def test_boxes_are_those_that_the_kernel_counts_the_bytes_of() -> None:
    """A box of a has no more rows than m (K_MAJOR). Where lines are of whole boxes, one copy takes a stage's; CTAs that
    share an operand copy half of its boxes each, or of a single one half of the rows. Boxes of mma_wgmma.cu that are
    not shared have no more k than there are, in steps of 16, nor more of a line, in 16 bytes."""
    for contract in (MMA16, TREE_MMA16):
        for tile in tma_tiles(contract):
            narrows = tile.table == "mma_wgmma" and not tile.shares
            for loads, m, (n, k) in itertools.product(
                sorted(tile.loads),
                (1, 7, 9, 16, 24, 33, 64, 100, 128, 300),
                ((104, 72), (128, 192), (104, 24), (40, 64)),
            ):
                problem = laid_out(contract, m, n, k, loads)
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
                    cut = boxes % 64 != 0
                    boxes //= 64
                    few = operand == 0 and along and there < rows and not (tile.fills and k % 64 == 0)
                    if tile.shares == operand + 1:
                        boxes, rows = (boxes // 2, rows) if boxes > 1 else (1, rows // 2)
                    if narrows and not along:
                        rows = min(rows, -(-k // 16) * 16) if k < 64 else rows
                        cut = cut or k < 64
                    whole = (k if along else there) % 64 == 0 and not few and not cut
                    assert (shape.rows, shape.boxes) == (there if few else rows, boxes if whole else None)
                    unit = 16 if along else 8
                    width = -(-(k if along else there) // unit) * unit
                    assert shape.width == (min(width, 64, 64 if along else size) if narrows else 64)
                    assert shape.rows <= 256
                assert (maps.out is not None) == (tile.table == "mma_wgmma")
                if maps.out is not None:
                    rows = tile["TILE_N"] if tile.swapped else 16
                    assert (maps.out.rows, maps.out.boxes, maps.out.sizes) == (rows, None, (n, m, 1))
                odd = (
                    launch_for(laid_out(contract, m, 100, k, loads), tile, 132) if tile.get("STRIDED_OUT", 1) else None
                )
                assert odd is None or (odd.maps and odd.maps.out is None), "rows of 100 are not of whole 16 bytes"
