"""No tile, load path, grid or batch layout changes a bit; and sizes beyond 2^31 elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import cu_device
import numpy as np
import pytest
from cu_device import (
    DEVICE,
    PAIR_IDS,
    PAIRS,
    Placed,
    allocate,
    batched,
    differing,
    output,
    random_bfloat16,
    replay,
    run,
    tiles_here,
)

from detkern.cu import ahead, loader
from detkern.cu.device import describe
from detkern.cu.gemm_tile import Load
from detkern.dispatch.backend import Execution
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import FMA, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F32, DType

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_all()


def test_no_kernel_of_products_uses_local_memory() -> None:
    """What the driver says of all tiles on all load paths; test_cu_compile.py reads the compiler's log of some."""
    import cupy
    from cupy.cuda import driver

    capability = describe(DEVICE.index).capability
    builds = ahead.builds([contract for contract, _ in PAIRS], capability)
    assert len(builds) > 100
    spilling = []
    with cupy.cuda.Device(DEVICE.index):
        for build in builds:
            kernel = loader.load_function(DEVICE.index, capability, build, 0)
            if driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, kernel.ptr):
                spilling.append(str(build))
    assert spilling == []


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_every_tile_on_every_load_path(contract: Contract, dtype: DType) -> None:
    m, n, k = 300, 290, 1100
    a = operands.generate("wide", dtype, (m, k), 41)
    b = operands.generate("wide", dtype, (k, n), 42)
    initial = operands.generate("wide", F32, (m, n), 43)
    expected = replay(contract, a, b, out_dtype=F32, initial=initial)
    # A in rows is K_MAJOR, B in rows is MN_MAJOR; the gathering path takes either.
    modes = {Load.K_MAJOR: ("rows", "columns"), Load.MN_MAJOR: ("columns", "rows"), Load.STRIDED: ("rows", "columns")}
    placed = {(mode, side): Placed((a, b)[side], mode) for mode in ("rows", "columns") for side in (0, 1)}
    probe = output((m, n), F32, "rows").view
    for loads in itertools.product(Load, Load):
        left, right = placed[modes[loads[0]][0], 0], placed[modes[loads[1]][1], 1]
        for tile in tiles_here(gemm_problem(contract, left.view, right.view, probe, None, True), loads):
            for grid in (None, 5):  # one tile a CTA, and CTAs that walk over several
                out = output((m, n), F32, "rows", initial)
                launched = run(
                    contract, left.view, right.view, out.view, accumulate=True, tile=tile, loads=loads, grid=grid
                )
                assert (launched.tile, launched.load_a, launched.load_b) == (tile, *loads)
                assert differing(expected, out.bits()) == 0, f"{tile} {loads} grid {launched.grid}"


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_batches_are_products_one_by_one(contract: Contract, dtype: DType) -> None:
    """Batches in two dimensions stored in odd orders, more of them than a grid's y or z could count, nine dimensions
    (one more than a launch takes), and b broadcast over a batch."""
    import cupy

    from detkern.cu import launch

    cases = [
        ((3, 5), 17, 9, 40, (2, 1, 3, 0), (1, 0, 3, 2), False),
        ((70001,), 1, 3, 16, (0, 1, 2), (0, 1, 2), False),
        ((2, 3, 2, 2, 2, 2, 2, 2, 3), 2, 3, 8, (8, 7, 6, 5, 4, 3, 2, 1, 0, 9, 10), tuple(range(11)), False),
        ((6,), 20, 12, 33, (1, 0, 2), (1, 2, 0), True),
    ]
    for batch, m, n, k, a_axes, b_axes, broadcast in cases:
        a = operands.generate("normal", dtype, (*batch, m, k), 51)
        b = operands.generate("normal", dtype, (*(() if broadcast else batch), k, n), 52)
        a_view = batched(a, dtype, a_axes)
        if broadcast:
            b_view = batched(b, dtype, (0, 1))
            b_view = TensorView(
                b_view.pointer,
                (*batch, k, n),
                (*(0 for _ in batch), *b_view.strides),
                dtype,
                DEVICE,
                array=b_view.array,
            )
        else:
            b_view = batched(b, dtype, b_axes)
        memory = cupy.asarray(cu_device.poison(math.prod(batch) * m * n, dtype).reshape(*batch, m, n))
        strides = tuple(stride // dtype.itemsize for stride in memory.strides)
        out = TensorView(memory.data.ptr, memory.shape, strides, dtype, DEVICE, array=memory)
        problem = gemm_problem(contract, a_view, b_view, out, None, False)
        launch.launch(problem, a_view, b_view, out, None, Execution(DEVICE, 0, allocate))
        expected = cu_device.replay(contract, a, b)
        assert differing(expected, cupy.asnumpy(memory)) == 0, f"batch {batch}"


def _large_cases() -> Iterator[tuple[Contract, str]]:
    for contract in (FMA, MMA16, TREE, TREE_MMA16):
        for mode in ("rows", "columns", "rows-odd"):
            yield contract, mode


@pytest.fixture(scope="module")
def large_memory() -> Iterator[TensorView]:
    """More than 2^31 bf16 elements of finite random bits."""
    import cupy

    count = 2**31 + 2**26
    memory = cupy.empty(count, np.uint16)
    random_bfloat16(memory)
    yield TensorView(memory.data.ptr, (count,), (1,), BF16, DEVICE, array=memory)
    del memory
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize(("contract", "mode"), list(_large_cases()), ids=lambda value: str(value))
def test_operands_beyond_2_to_the_31_elements(contract: Contract, mode: str, large_memory: TensorView) -> None:
    """a [M, K] spans the large memory; rows from its whole length are compared with the replay."""
    import cupy

    memory, n = large_memory.array, 5
    if mode == "rows":
        m, k, strides, first = 2**20 + 2**15, 2048, (2048, 1), 0
    elif mode == "columns":
        m, k, strides, first = 2**20 + 2**15, 2048, (1, 2**20 + 2**15), 0
    else:
        m, k, strides, first = 2**20, 2049, (2049, 1), 1
    a = TensorView(large_memory.pointer + 2 * first, (m, k), strides, BF16, DEVICE, array=memory)
    b = operands.generate("normal", BF16, (k, n), 61)
    out = output((m, n), BF16, "rows")
    run(contract, a, Placed(b, "columns").view, out.view)
    rows = np.unique(np.concatenate([np.arange(0, m, m // 97), np.arange(m - 40, m)]))
    sample = np.empty((len(rows), k), np.uint16)
    for place, row in enumerate(map(int, rows)):
        start = first + row * strides[0]
        sample[place] = cupy.asnumpy(memory[start : start + (k - 1) * strides[1] + 1 : strides[1]])
    assert differing(replay(contract, sample.view(BF16.numpy), b), out.bits()[rows]) == 0


@pytest.mark.parametrize("contract", [FMA, MMA16, TREE, TREE_MMA16], ids=str)
def test_output_beyond_2_to_the_31_elements(contract: Contract) -> None:
    import cupy

    m, n, k = 46_500, 46_400, 16
    a = operands.generate("normal", BF16, (m, k), 71)
    b = operands.generate("normal", BF16, (k, n), 72)
    memory = cupy.full((m, n), 0xFFAD, np.uint16)
    assert memory.size > 2**31
    out = TensorView(memory.data.ptr, (m, n), (n, 1), BF16, DEVICE, array=memory)
    run(contract, Placed(a, "rows").view, Placed(b, "rows").view, out)
    rows = np.unique(np.concatenate([np.arange(0, m, m // 97), np.arange(m - 140, m)]))
    got = np.stack([cupy.asnumpy(memory[row]) for row in map(int, rows)])
    del memory, out
    cupy.get_default_memory_pool().free_all_blocks()
    assert differing(replay(contract, a[rows], b), got) == 0
