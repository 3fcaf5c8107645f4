"""Sums of rows by row_sums.cu on a GPU against the CPU's bits: every tile forced, rows in parts, layouts, ragged sizes,
specials."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cu_device import DEVICE, Placed, allocate, compile_row_sums, differing, poison

import detkern
from detkern.cu import row_sums, rows
from detkern.cu.row_sums import SumTile
from detkern.dispatch.backend import Execution
from detkern.operations.rows.problem import RowKind, RowProblem, row_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu

DTYPES = (F32, F16, BF16)
KINDS = (RowKind.SUM, RowKind.MEAN, RowKind.MEAN_SQUARE)
MODES = ("rows", "packed", "rows-odd", "spread", "reversed", "columns", "columns-odd")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_row_sums()


def _values(values: str, dtype: DType, shape: tuple[int, int], seed: int) -> np.ndarray:
    if values == "logits":
        return (6 * operands.generate("normal", F32, shape, seed)).astype(dtype.numpy)
    return operands.generate(values, dtype, shape, seed)


def _expected(kind: RowKind, host: np.ndarray, dtype: DType) -> np.ndarray:
    result = getattr(detkern.rows, kind.label)(host, out_dtype=dtype.name, backend="cpu")
    return result[:, None].view(dtype.bits)


def _wrong(
    kind: RowKind, host: np.ndarray, mode: str, out_dtype: DType, tile: SumTile | None = None, parts: int | None = None
) -> int | None:
    """Elements that differ from the CPU's; None where the tile does not take the layout."""
    placed = Placed(host, mode)
    out = Placed(poison(host.shape[0], out_dtype).view(out_dtype.numpy)[:, None], "spread")
    problem = row_problem(kind, placed.view, None, out.view, host.shape[1])
    chosen = row_sums.choose(problem, 132, tile, parts)
    if tile is not None and (tile.along, tile.vector) != _lies(problem):
        return None
    if chosen is None:
        return None
    rows.launch(problem, placed.view, None, out.view, Execution(DEVICE, 0, allocate), chosen)
    return differing(_expected(kind, host, out_dtype), out.bits())


def _lies(problem: RowProblem) -> tuple[bool, bool]:
    chosen = row_sums.choose(problem, 132, parts=2)
    assert chosen is not None
    return chosen.tile.along, chosen.tile.vector


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_every_tile_and_layout(kind: RowKind, dtype: DType) -> None:
    number, ran = 0, {str(tile): 0 for tile in row_sums.tiles()}
    for tile in row_sums.tiles():
        most = tile.columns(dtype)
        widths = [1, 3, most - 1, most, *([] if tile.held else [most + 5, 3 * most + 1])]
        heights = [1, 7, tile.rows(dtype), tile.rows(dtype) + 9]
        for width, height, mode in itertools.product(widths, heights, MODES):
            if width < 1 or width * height > 600_000:
                continue
            number += 1
            values = ("logits", "cancel", "special", "bits")[number % 4]
            host = _values(values, dtype, (height, width), number)
            wrong = _wrong(kind, host, mode, DTYPES[number // 4 % 3], tile)
            ran[str(tile)] += wrong is not None
            assert not wrong, (str(tile), height, width, mode, values)
    assert min(ran.values()) > 4, ran


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_rows_in_parts(kind: RowKind, dtype: DType) -> None:
    for number, (mode, parts, shape) in enumerate(
        itertools.product(MODES, (2, 3, 40), ((1, 100_003), (3, 40_960), (37, 9001), (70, 5000)))
    ):
        values = ("logits", "cancel", "special", "bits")[number % 4]
        host = _values(values, dtype, shape, number)
        assert _wrong(kind, host, mode, DTYPES[number % 3], None, parts) == 0, (mode, parts, shape, values)


def test_what_callers_get() -> None:
    """Layouts of a model through the public function: GQA's expand, a mean of everything, sums over rows,
    short rows."""
    cupy = pytest.importorskip("cupy")
    for number, (shape, axis, dtype) in enumerate(
        (
            ((2, 8, 4, 33, 128), 2, BF16), ((3, 5, 7, 9), 1, F16), ((1, 3_000_001), 1, F32), ((5000, 260), 0, F32),
            ((4096, 40), 0, BF16), ((9000, 4), 1, BF16), ((700, 128), 1, BF16), ((3, 300_000), 1, BF16),
            ((6, 2, 5, 2), 0, F32),
        )
    ):  # fmt: skip
        host = operands.generate("normal", dtype, (int(np.prod(shape)), 1), number).reshape(shape)
        given = cupy.asarray(host.view(dtype.bits))
        strides = tuple(stride // dtype.itemsize for stride in host.strides)
        view = TensorView(given.data.ptr, shape, strides, dtype, DEVICE, array=given)
        moved = np.moveaxis(host, axis, -1)
        order = [a for a in range(len(shape)) if a != axis] + [axis]
        turned = TensorView(
            view.pointer, tuple(shape[a] for a in order), tuple(strides[a] for a in order), dtype, DEVICE, array=given
        )
        out = cupy.empty(moved.shape[:-1], dtype.bits)
        out.fill(0x5A5A)
        target = TensorView(
            out.data.ptr,
            (*moved.shape[:-1], 1),
            (*(s // out.itemsize for s in out.strides), 0),
            dtype,
            DEVICE,
            array=out,
        )
        problem = row_problem(RowKind.SUM, turned, None, target, moved.shape[-1])
        run = rows.Rows().prepare(problem, Execution(DEVICE, 0, allocate))
        run(problem.m, (turned,), target, Execution(DEVICE, 0, allocate))
        expected = detkern.rows.sum(np.ascontiguousarray(moved).reshape(-1, moved.shape[-1]), backend="cpu")
        assert bool((cupy.asnumpy(out).reshape(-1) == expected.view(dtype.bits)).all()), (shape, axis)


def test_a_thousand_repetitions_of_parts_give_one_result() -> None:
    import cupy

    host = _values("logits", BF16, (5, 70_000), 3)
    expected = cupy.asarray(_expected(RowKind.SUM, host, F32))
    placed = Placed(host, "rows")
    out = cupy.empty(expected.shape, np.uint32)
    target = TensorView(out.data.ptr, out.shape, (1, 0), F32, DEVICE, array=out)
    problem = row_problem(RowKind.SUM, placed.view, None, target, 70_000)
    chosen = row_sums.choose(problem, 132)
    assert chosen is not None
    assert chosen.parts > 1
    wrong = cupy.zeros((), np.int64)
    for repetition in range(1000):
        out.fill(repetition)
        rows.launch(
            problem, placed.view, None, target, Execution(DEVICE, cupy.cuda.get_current_stream().ptr, allocate), chosen
        )
        wrong += (out != expected).sum()
    assert int(wrong) == 0
