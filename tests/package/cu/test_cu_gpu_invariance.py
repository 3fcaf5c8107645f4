"""Rows that do not depend on how many there are, over every M; one result in 10,000 repetitions; rows of large products
against the replay. All comparisons of whole outputs are made on the device."""

from __future__ import annotations

from typing import Any

import cu_device
import numpy as np
import pytest
from cu_device import DEVICE, allocate, bfloat16_view, differing, random_bfloat16, replay, run

from detkern.cu import gemm_tile, geometry
from detkern.cu.device import describe
from detkern.dispatch.backend import Execution
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import MMA16, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F32

pytestmark = pytest.mark.gpu

CONTRACTS = (MMA16, TREE_MMA16)
# (N, K): a router, a ragged layer, a square one, a tall K. On the first two cuBLAS without split-K changes bits.
LAYERS = ((256, 7168), (1000, 4104), (4096, 4096), (1280, 8192))
SIZES = (*range(1, 521), 1000, 1024, 2048, 3000, 4096, 8192)
POISON = 0xFFAD
AROUND = 64  # rows behind the output that must stay as they were


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_all()


def _random(shape: tuple[int, int], seed: int) -> Any:
    import cupy

    memory = cupy.empty(shape, np.uint16)
    random_bfloat16(memory, seed)
    return memory


@pytest.mark.parametrize(("n", "k"), LAYERS, ids=lambda size: str(size))
@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_rows_are_those_of_the_largest_m(contract: Contract, n: int, k: int) -> None:
    """x [M, K] @ w [N, K].T for every M from 1 to 520 and some larger ones: all rows are the first of M = 8192."""
    import cupy

    x, w = _random((SIZES[-1], k), 1), bfloat16_view(_random((n, k), 2).T)
    largest, out = (cupy.full((SIZES[-1] + AROUND, n), POISON, np.uint16) for _ in range(2))
    run(contract, bfloat16_view(x), w, bfloat16_view(largest[: SIZES[-1]]))
    assert not bool((largest[: SIZES[-1]] == POISON).any())
    assert len(cupy.unique(largest[: SIZES[-1]])) > 1000, "results that differ from one another"
    different = cupy.zeros((len(SIZES), 2), np.int64)
    geometries = set()
    for place, m in enumerate(SIZES):
        out[: m + AROUND].fill(POISON)
        launched = run(contract, bfloat16_view(x[:m]), w, bfloat16_view(out[:m]))
        geometries.add((launched.tile.table, str(launched.tile), launched.grid))
        different[place, 0] = cupy.count_nonzero(out[:m] != largest[:m])
        different[place, 1] = cupy.count_nonzero(out[m : m + AROUND] != POISON)
    found = cupy.asnumpy(different)
    assert [(SIZES[place], *found[place].tolist()) for place in np.nonzero(found.any(axis=1))[0]] == []
    assert len(geometries) > 1, "M was to change the geometry"


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(16, 1280, 8192), (520, 256, 7168), (3000, 1000, 4104), (4096, 4096, 512)],
    ids=lambda size: str(size),
)
@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_rows_of_large_products_are_the_replays(contract: Contract, m: int, n: int, k: int) -> None:
    """By the default geometry, 64 rows at random."""
    import cupy

    x, w = _random((m, k), 3), _random((n, k), 4)
    out = cupy.full((m, n), POISON, np.uint16)
    run(contract, bfloat16_view(x), bfloat16_view(w.T), bfloat16_view(out))
    rows = np.sort(np.random.default_rng(5).choice(m, min(m, 64), replace=False))
    host_x, host_w = (cupy.asnumpy(memory).view(BF16.numpy) for memory in (x[cupy.asarray(rows)], w))
    wanted = replay(contract, np.ascontiguousarray(host_x), np.ascontiguousarray(host_w.T))
    assert differing(wanted, cupy.asnumpy(out[cupy.asarray(rows)])) == 0


def _kinds() -> list[tuple[Contract, gemm_tile.Tile]]:
    """A tile of each organisation of the wgmma kernels."""
    return [
        (contract, tile)
        for contract in CONTRACTS
        for tile in cu_device.one_of_each_organisation(list(gemm_tile.tiles_for(contract, BF16)))
        if tile.by_tma and (gemm_tile.Load.K_MAJOR, gemm_tile.Load.K_MAJOR) in tile.loads
    ]


@pytest.mark.parametrize(("contract", "tile"), _kinds(), ids=str)
def test_ten_thousand_repetitions_give_one_result(contract: Contract, tile: gemm_tile.Tile) -> None:
    """Outputs are poisoned, with another pattern each time, before each launch; every difference from the replay is
    gathered on the device."""
    import cupy

    from detkern.cu import launch

    cu_device.skip_without_wgmma()
    # Of the tree: nodes of seven and of eight leaves.
    m, n, k = tile["TILE_M"] if tile["TILE_M"] < 64 else 300, 264, 4000 if contract == TREE_MMA16 else 1100
    line = k // 8 * 8 + 8
    a, b = operands.generate("normal", BF16, (m, k), 6), operands.generate("normal", BF16, (k, n), 7)
    out_dtype = F32 if tile.f32_out else BF16
    expected = replay(contract, a, b, out_dtype=out_dtype)
    x, w = cupy.full((m, line), POISON, np.uint16), cupy.full((n, line), POISON, np.uint16)
    x[:, :k], w[:, :k] = cupy.asarray(a.view(np.uint16)), cupy.asarray(np.ascontiguousarray(b.T).view(np.uint16))
    out = cupy.full((m, n), POISON, out_dtype.bits)
    result = TensorView(out.data.ptr, (m, n), (n, 1), out_dtype, DEVICE, array=out)
    views = bfloat16_view(x[:, :k]), bfloat16_view(w[:, :k].T), result
    problem = gemm_problem(contract, *views, None, False)
    facts = describe(DEVICE.index)
    assert geometry.takes(problem, tile, geometry.load_paths(problem))
    chosen = geometry.launch_for(problem, tile, facts.multiprocessors)
    wanted, gathered = cupy.asarray(expected), cupy.zeros_like(out)
    gather = cupy.ElementwiseKernel("T got, T wanted", "T all", "all |= got ^ wanted", "gather_differences")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()  # what was put into memory on the other stream is there
        plan = launch.plan_for(problem, facts, stream.ptr, chosen)
        execution = Execution(DEVICE, stream.ptr, allocate)
        for repetition in range(10_000):
            out.fill(0x5A5A + repetition % 1000)
            launch.enqueue(plan, *views, None, execution)
            gather(out, wanted, gathered)
        stream.synchronize()
    assert int(cupy.count_nonzero(gathered)) == 0
