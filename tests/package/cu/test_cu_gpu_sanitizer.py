"""The launches that compute-sanitizer watches: every kernel × load path × epilogue in small, ragged shapes.

    compute-sanitizer --tool memcheck python -m pytest -m sanitizer tests/package/cu/test_cu_gpu_sanitizer.py

Each array is an allocation of its own that ends where the array ends, so that reading past it is seen; outputs and
scratch start uninitialised for initcheck. Kernels are compiled before (`python -m benchmarks.gpu_tests` does), or here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cu_device import (
    DEVICE,
    Placed,
    allocate,
    differing,
    one_of_each_organisation,
    replay,
    run,
    skip_without_wgmma,
    tiles_here,
    vector,
)

import detkern
from detkern.cu import column_sum, row_scans, row_sums, rows
from detkern.cu.device import describe
from detkern.cu.gemm_tile import Load
from detkern.dispatch.backend import Execution
from detkern.operations.bias_gradient.problem import column_sum_problem
from detkern.operations.gemm.problem import gemm_problem
from detkern.operations.rows.problem import RowKind, row_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import FMA, MMA8, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]

# Each kernel file, each operand width and each step of the tensor core. Types of one width share all indexing.
KERNELS = [(FMA, F32), (FMA, BF16), (TREE, F16), (MMA16, BF16), (TREE_MMA16, BF16), (MMA8, F16)]
MODES_OF = {Load.K_MAJOR: ("rows", "columns"), Load.MN_MAJOR: ("columns", "rows"), Load.STRIDED: ("spread", "reversed")}


@pytest.fixture(autouse=True)
def _one_allocation_an_array() -> Iterator[None]:
    import cupy

    cupy.cuda.set_allocator(None)
    yield
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


def _uninitialised(shape: tuple[int, int], dtype: DType, columns_first: bool) -> TensorView:
    import cupy

    memory = cupy.empty(shape, dtype.bits, order="F" if columns_first else "C")
    strides = tuple(stride // dtype.itemsize for stride in memory.strides)
    return TensorView(memory.data.ptr, shape, strides, dtype, DEVICE, array=memory)


@pytest.mark.parametrize(
    "loads", list(itertools.product(Load, Load)), ids=lambda loads: "-".join(x.name for x in loads)
)
@pytest.mark.parametrize(("contract", "dtype"), KERNELS, ids=lambda value: str(value))
def test_watched(contract: Contract, dtype: DType, loads: tuple[Load, Load]) -> None:
    import cupy

    number = KERNELS.index((contract, dtype)) * 9 + int(loads[0]) * 3 + int(loads[1])
    # Two tiles in a row at least, ragged ends, and for the trees more levels than stay in shared memory.
    m, n, k = (150, 71, 1065 if contract.leaf else 200) if number % 3 == 0 else (37, 139, 90)
    kind = "integers" if contract == MMA8 else "normal"
    a = operands.generate(kind, dtype, (m, k), 1)
    b = operands.generate(kind, dtype, (k, n), 2)
    placed = Placed(a, MODES_OF[loads[0]][0]), Placed(b, MODES_OF[loads[1]][1])
    probe = _uninitialised((m, n), F32, False)
    problem = gemm_problem(contract, placed[0].view, placed[1].view, probe, None, True)
    for turn, tile in enumerate(one_of_each_organisation(tiles_here(problem, loads))):
        epilogue = (number + turn) % 3
        out_dtype = (dtype, F32, F32)[epilogue]
        bias = operands.generate(kind, (F32, F16, BF16)[number % 3], (n,), 3) if epilogue == 1 else None
        initial = operands.generate(kind, F32, (m, n), 4) if epilogue == 2 else None
        if initial is None:
            out = _uninitialised((m, n), out_dtype, number % 2 == 1)
        else:
            memory = cupy.asarray(initial.view(F32.bits))
            out = TensorView(memory.data.ptr, (m, n), (n, 1), F32, DEVICE, array=memory)
        launched = run(
            contract, placed[0].view, placed[1].view, out, bias=None if bias is None else vector(bias),
            accumulate=initial is not None, tile=tile, grid=3 if turn % 2 else None, memory=_scratch,
        )  # fmt: skip
        assert (launched.load_a, launched.load_b) == loads
        if contract == MMA8:
            exact = a.astype(np.int64) @ b.astype(np.int64)
            exact = exact + (0 if bias is None else bias.astype(np.int64)) + (0 if initial is None else initial)
            expected = exact.astype(np.float32).astype(out_dtype.numpy).view(out_dtype.bits)
        else:
            expected = replay(contract, a, b, out_dtype=out_dtype, bias=bias, initial=initial)
        assert differing(expected, cupy.asnumpy(out.array)) == 0


@pytest.mark.parametrize("m", [13, 30, 150])
@pytest.mark.parametrize(
    "loads",
    list(itertools.product((Load.K_MAJOR, Load.MN_MAJOR), repeat=2)),
    ids=lambda loads: "-".join(x.name for x in loads),
)
@pytest.mark.parametrize("contract", [MMA16, TREE_MMA16], ids=str)
def test_wgmma_watched(contract: Contract, loads: tuple[Load, Load], m: int) -> None:
    """Outputs that TMA writes, tiles that hold few rows; more blocks than the ring has stages, and one tile or several
    a CTA."""
    import cupy

    skip_without_wgmma()
    n, k = 136, 1100
    a, b = operands.generate("normal", BF16, (m, k), 7), operands.generate("normal", BF16, (k, n), 8)
    placed = Placed(a, MODES_OF[loads[0]][0]), Placed(b, MODES_OF[loads[1]][1])
    expected = {
        (dtype, biased): replay(
            contract, a, b, out_dtype=dtype, bias=operands.generate("normal", F32, (n,), 9) if biased else None
        )
        for dtype, biased in ((BF16, False), (F16, True), (F32, False))
    }
    bias = vector(operands.generate("normal", F32, (n,), 9))
    tiles = {}
    for dtype in (BF16, F32):
        probe = _uninitialised((m, n), dtype, False)
        problem = gemm_problem(contract, placed[0].view, placed[1].view, probe, None, False)
        tiles |= dict.fromkeys(tile for tile in one_of_each_organisation(tiles_here(problem, loads)) if tile.by_tma)
    assert tiles
    for turn, tile in enumerate(tiles):
        for (dtype, biased), wanted in expected.items():
            if contract == MMA16 and tile.f32_out != (dtype == F32):
                continue
            out = _uninitialised((m, n), dtype, False)
            if tile.table == "mma_wgmma" and not tile.f32_out:
                out.array[...] = 0x5A5A  # initcheck does not see what TMA writes
            launched = run(
                contract, placed[0].view, placed[1].view, out, bias=bias if biased else None, tile=tile,
                grid=2 if turn % 2 else None, memory=_scratch,
            )  # fmt: skip
            assert (launched.load_a, launched.load_b) == loads
            assert differing(wanted, cupy.asnumpy(out.array)) == 0


@pytest.mark.parametrize("load", Load, ids=lambda load: load.name)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_the_bias_gradient_watched(dtype: DType, load: Load) -> None:
    """More columns than a grid's CTAs, rows that end within a stage and fill the ring more than once; with a batch
    where rows are found by division."""
    import cupy

    shape = (3, 190, 72) if load == Load.MN_MAJOR else (1, 570, 72) if load == Load.K_MAJOR else (3, 190, 71)
    dc = operands.generate("normal", dtype, shape, 5)
    memory = cupy.asarray(dc.view(dtype.bits))
    if load == Load.K_MAJOR:
        lines = np.ascontiguousarray(np.pad(dc[0].T, ((0, 0), (0, 6))))  # np.pad alone keeps the order of dc
        memory = cupy.asarray(lines.view(dtype.bits)).T[None, :570]
    cut = memory[:, :-3]
    strides = tuple(stride // dtype.itemsize for stride in cut.strides)
    source = TensorView(cut.data.ptr, cut.shape, strides, dtype, DEVICE, array=memory)
    n = shape[-1]
    for tile in column_sum.tiles_for(load, dtype):
        for initial in (None, operands.generate("normal", F32, (n,), 6)):
            if initial is None:
                out, out_dtype = cupy.empty(n, dtype.bits), dtype
            else:
                out, out_dtype = cupy.asarray(initial.view(F32.bits)), F32
            target = TensorView(out.data.ptr, (n,), (1,), out_dtype, DEVICE, array=out)
            problem = column_sum_problem(source, target, initial is not None)
            assert column_sum.load_path(problem) == load
            chosen = replace(column_sum.choose(problem, 132, tile), grid=1)
            column_sum.launch(problem, source, target, Execution(DEVICE, 0, _scratch), chosen)
            onto = None if initial is None else initial.copy()
            expected = detkern.bias_gradient(dc[:, :-3], out=onto, accumulate=onto is not None, backend="cpu")
            assert differing(expected.view(out_dtype.bits), cupy.asnumpy(out)) == 0


@pytest.mark.parametrize("kind", rows.KINDS, ids=lambda kind: kind.label)
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_the_row_operations_watched(dtype: DType, kind: RowKind) -> None:
    """Every tile, more rows than a grid's CTAs, rows that end within a piece, and where a tile does not hold them,
    several times its columns; with a batch where rows are found by division."""
    import cupy

    def uploaded(host: np.ndarray) -> TensorView:
        memory = cupy.asarray(host.view(dtype.bits))
        strides = tuple(stride // dtype.itemsize for stride in memory.strides)
        return TensorView(memory.data.ptr, host.shape, strides, dtype, DEVICE, array=memory)

    capability = describe(0).capability
    for tile in (tile for load in rows.RowLoad for tile in rows.tiles_for(kind, load, capability)):
        width = min(tile.columns, 9000) - 13 if tile.held and not kind.spreads else 2 * tile.columns + 5
        if width <= 3:
            width = tile.columns - 3
        shape = (2, tile.rows + 1 if width < 2000 else 2, width)
        x = operands.generate("normal", dtype, shape, 5)
        y = operands.generate("normal", dtype, shape, 6)
        whole = [x[..., :1] if kind.spreads else x, y][: kind.operands]
        views = [uploaded(np.ascontiguousarray(array)) for array in whole]
        out = cupy.empty((*shape[:2], 1 if kind.reduces else width), F32.bits)
        strides = tuple(stride // 4 for stride in out.strides)
        target = TensorView(out.data.ptr, out.shape, strides, F32, DEVICE, array=out)
        cut = width - 3  # so that rows do not follow each other
        problem = row_problem(kind, views[0], views[1] if len(views) > 1 else None, target, cut)
        chosen = replace(rows.choose(problem, capability, 132, tile), grid=tile.cluster)
        rows.launch(
            problem, views[0], views[1] if len(views) > 1 else None, target, Execution(DEVICE, 0, _scratch), chosen
        )
        given = [
            array[..., 0] if kind.spreads and not number else array[..., :cut] for number, array in enumerate(whole)
        ]
        extra = [cut] if kind.spreads and kind.operands == 1 else []
        expected = getattr(detkern.rows, kind.label)(*given, *extra, out_dtype="f32", backend="cpu").view(np.uint32)
        got = cupy.asnumpy(out[..., 0] if kind.reduces else out[..., :cut])
        assert differing(expected, got) == 0, tile


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_prefix_sums_watched(dtype: DType) -> None:
    """Every build; rows in turn, and rows in parts."""
    import cupy

    for number, (team, parts) in enumerate(((32, 1), (row_scans.THREADS, 1), (row_scans.THREADS, 3))):
        kind = (RowKind.CUMSUM, RowKind.CUMSUM_BACKWARD)[number % 2]
        host = operands.generate("normal", dtype, (17, 5003), number)
        memory, out = cupy.asarray(host.view(dtype.bits)), cupy.empty(host.shape, F32.bits)
        view = TensorView(memory.data.ptr, host.shape, (5003, 1), dtype, DEVICE, array=memory)
        target = TensorView(out.data.ptr, host.shape, (5003, 1), F32, DEVICE, array=out)
        problem = row_problem(kind, view, None, target, 5003)
        chosen = row_scans.choose(problem, 132, team, parts)
        assert chosen.parts == parts
        chosen = replace(chosen, steps=tuple((build, 2) for build, _ in chosen.steps))
        rows.launch(problem, view, None, target, Execution(DEVICE, 0, _scratch), chosen)
        expected = getattr(detkern.rows, kind.label)(host, out_dtype="f32", backend="cpu").view(np.uint32)
        assert differing(expected, cupy.asnumpy(out)) == 0


def _scratch(size: int) -> TensorView:
    import cupy

    memory = cupy.empty(size, np.uint8)
    return TensorView(memory.data.ptr, (size,), (1,), F32, DEVICE, array=memory)


@pytest.mark.parametrize("mode", ["rows", "columns", "spread", "columns-odd"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_row_sums_watched(dtype: DType, mode: str) -> None:
    """Every tile that takes the layout, with one CTA that takes all of them, and rows in parts."""
    for number, (tile, parts) in enumerate([*((tile, None) for tile in row_sums.tiles()), (None, 3)]):
        width = 1999 if tile is None or not tile.held else tile.columns(dtype) - 1
        host = operands.generate("normal", dtype, (45, max(width, 1)), number)
        placed, out = Placed(host, mode), Placed(np.zeros((45, 1), np.float32), "spread")
        problem = row_problem(RowKind.SUM, placed.view, None, out.view, host.shape[1])
        lies = row_sums.choose(problem, 132, parts=2)
        assert lies is not None
        if tile is not None and (tile.along, tile.vector) != (lies.tile.along, lies.tile.vector):
            continue
        chosen = row_sums.choose(problem, 132, tile, parts)
        assert chosen is not None
        if tile is not None:
            chosen = replace(chosen, steps=((chosen.steps[0][0], 1, tile.threads),))
        rows.launch(problem, placed.view, None, out.view, Execution(DEVICE, 0, allocate), chosen)
        expected = detkern.rows.sum(host, out_dtype="f32", backend="cpu").view(np.uint32)
        assert differing(expected[:, None], out.bits()) == 0, tile
