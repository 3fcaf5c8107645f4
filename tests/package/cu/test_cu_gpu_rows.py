"""The row operations of rows.cu on a GPU against the CPU's bits: every tile forced, layouts, ragged sizes, specials,
wide rows, streams, graphs."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import cu_device
import numpy as np
import pytest
from cu_device import DEVICE, Placed, allocate, differing, poison

import detkern
from detkern.cpu import backend as cpu_backend
from detkern.cu import implementation, rows
from detkern.cu.device import describe
from detkern.cu.rows import RowLoad, RowTile
from detkern.dispatch import selfcheck
from detkern.dispatch.backend import Execution
from detkern.operations.rows.operation import ROWS
from detkern.operations.rows.problem import RowKind, row_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType, from_numpy

pytestmark = pytest.mark.gpu

DTYPES = (F32, F16, BF16)
IDS = [kind.label for kind in RowKind]
# How operands lie for each load path; some have it only for kinds with one operand.
MODES = {
    RowLoad.VECTOR: ("rows", "packed", "rows-odd"),
    RowLoad.STRIDED: ("spread", "reversed"),
    RowLoad.ACROSS: ("columns", "columns-odd"),
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_rows()


def _operands(kind: RowKind, values: str, dtype: DType, shape: tuple[int, int], seed: int) -> list[np.ndarray]:
    made = []
    for number in range(kind.operands):
        full = (shape[0], 1) if kind.spreads and number == 0 else shape
        if values == "logits":
            made.append((6 * operands.generate("normal", F32, full, seed + 50 * number)).astype(dtype.numpy))
        else:
            made.append(operands.generate(values, dtype, full, seed + 50 * number))
    return made


def _replay(kind: RowKind, arrays: list[np.ndarray], width: int, out_dtype: DType) -> np.ndarray:
    """The CPU's result, [M, 1] or [M, N], as bits."""
    assert cpu_backend.library() is not None
    given = [arrays[0][:, 0], *arrays[1:]] if kind.spreads else arrays
    extra = [width] if kind.spreads and kind.operands == 1 else []
    result = getattr(detkern.rows, kind.label)(*given, *extra, out_dtype=out_dtype.name, backend="cpu")
    return (result[:, None] if kind.reduces else result).view(out_dtype.bits)


def _placed(kind: RowKind, arrays: list[np.ndarray], mode: str) -> list[Placed]:
    return [Placed(array, "spread" if kind.spreads and number == 0 else mode) for number, array in enumerate(arrays)]


def _out(kind: RowKind, shape: tuple[int, int], dtype: DType, mode: str) -> Placed:
    columns = 1 if kind.reduces else shape[1]
    host = poison(shape[0] * columns, dtype).view(dtype.numpy).reshape(shape[0], columns)
    return Placed(host, "spread" if kind.reduces else mode)


def _choose(kind: RowKind, views: list[TensorView], out: TensorView, width: int, tile: RowTile | None = None) -> Any:
    """(problem, launch)."""
    problem = row_problem(kind, views[0], views[1] if len(views) > 1 else None, out, width)
    device = describe(DEVICE.index)
    return problem, rows.choose(problem, device.capability, device.multiprocessors, tile)


def _run(
    kind: RowKind,
    views: list[TensorView],
    out: TensorView,
    width: int,
    tile: RowTile | None = None,
    stream: int = 0,
    grid: int | None = None,
) -> None:
    problem, chosen = _choose(kind, views, out, width, tile)
    if grid is not None:
        chosen = replace(chosen, grid=grid)
    rows.launch(
        problem, views[0], views[1] if len(views) > 1 else None, out, Execution(DEVICE, stream, allocate), chosen
    )


def _shapes(kind: RowKind, tile: RowTile) -> list[tuple[int, int]]:
    """Rows around a tile's; columns around a piece's and the tile's, or several times as many where it may loop."""
    most = tile.columns
    loops = not tile.held or kind.spreads
    widths = [1, 9, min(most, 20_000) - 13, 2 * most + 5 if loops else most - 8]
    return [(tile.rows + 1 if width < 3000 else 2, width) for width in widths if width > 0]


@pytest.mark.parametrize("load", RowLoad, ids=lambda load: load.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", rows.KINDS, ids=lambda kind: kind.label)
def test_every_tile_and_layout(kind: RowKind, dtype: DType, load: RowLoad) -> None:
    number = 0
    for tile in rows.tiles_for(kind, load, describe(DEVICE.index).capability):
        ran = 0
        for shape in _shapes(kind, tile):
            for values in ("logits", "cancel", "special", "bits")[: 4 if shape[1] < 3000 else 2]:
                number += 1
                arrays = _operands(kind, values, dtype, shape, number)
                mode = MODES[load][number % len(MODES[load])]
                placed = _placed(kind, arrays, mode)
                out_dtype = DTYPES[number // 2 % 3]
                # Where no operand has columns, out's decide how they are written.
                out_mode = mode if kind.operands == 1 or number % 3 else "rows-odd"
                out = _out(kind, shape, out_dtype, out_mode)
                views = [each.view for each in placed]
                problem, _ = _choose(kind, views, out.view, shape[1])
                if rows.load_path(problem) != load and load == RowLoad.VECTOR:
                    continue
                if tile.held and not kind.spreads and not rows.holds(problem, tile):
                    continue
                _run(kind, views, out.view, shape[1], tile, grid=None if number % 2 else tile.cluster)
                expected = _replay(kind, arrays, shape[1], out_dtype)
                assert differing(expected, out.bits()) == 0, (tile, shape, values, mode, out_mode)
                ran += 1
        assert ran > 3, tile


@pytest.mark.parametrize("kind", rows.KINDS, ids=lambda kind: kind.label)
def test_every_kind_of_operands(kind: RowKind) -> None:
    for number, values in enumerate(operands.KINDS):
        for dtype in DTYPES:
            arrays = _operands(kind, values, dtype, (65, 264), number)
            expected = _replay(kind, arrays, 264, dtype)
            for mode in ("rows", "columns", "rows-odd"):
                out = _out(kind, (65, 264), dtype, mode)
                _run(kind, [each.view for each in _placed(kind, arrays, mode)], out.view, 264)
                assert differing(expected, out.bits()) == 0, (values, dtype, mode)


@pytest.mark.parametrize("kind", rows.KINDS, ids=lambda kind: kind.label)
def test_wide_rows(kind: RowKind) -> None:
    for dtype, count, width in (
        (BF16, 3, 151_936),
        (F32, 2, 151_936),
        (BF16, 2, 262_144),
        (F16, 20, 50_257),
        (F32, 2, 600_001),
    ):
        arrays = _operands(kind, "logits", dtype, (count, width), 3)
        expected = _replay(kind, arrays, width, F32)
        for mode in ("rows", "packed"):
            out = _out(kind, (count, width), F32, mode)
            _run(kind, [each.view for each in _placed(kind, arrays, mode)], out.view, width)
            assert differing(expected, out.bits()) == 0, (dtype, width, mode)


def test_a_sum_that_leaves_64_bits() -> None:
    """Two million of the largest terms of an exponent; the same and one that brings them down; one unit, the last of 65
    bits, that lifts the sum over the half of its last place."""
    import cupy

    width = (1 << 21) + 5
    host = np.full((3, width), np.float32(2 - 2**-23))
    host[1, 7] = -(2.0**40)
    host[2] = 1
    host[2, 1 << 21 :] = 2.0**-3, 0, 2.0**-43, 0, 0
    x = cupy.asarray(host)
    expected = detkern.rows.sum(host)
    assert bool((detkern.rows.sum(x).get().view(np.uint32) == expected.view(np.uint32)).all())
    assert float(expected[2]) == 2**21 + 0.25
    for tile in (tile for load in RowLoad for tile in rows.tiles_for(RowKind.SUM, load, describe(0).capability)):
        if tile.held:
            continue
        view = TensorView(x.data.ptr, x.shape, (width, 1), F32, DEVICE, array=x)
        out = _out(RowKind.SUM, (3, width), F32, "rows")
        _run(RowKind.SUM, [view], out.view, width, tile)
        assert differing(expected.view(np.uint32)[:, None], out.bits()) == 0


def _torch(array: np.ndarray) -> Any:
    import torch

    dtype = from_numpy(array.dtype)
    assert dtype is not None
    whole = {4: np.int32, 2: np.int16}[dtype.itemsize]
    return torch.from_numpy(array.view(whole)).cuda().view(getattr(torch, dtype.name))


def _bits(tensor: Any) -> np.ndarray:
    import torch

    kinds = {4: (torch.int32, np.uint32), 2: (torch.int16, np.uint16)}[tensor.element_size()]
    return tensor.contiguous().view(kinds[0]).cpu().numpy().view(kinds[1])


@pytest.mark.parametrize("kind", RowKind, ids=IDS)
def test_torch_tensors_with_leading_dimensions_that_cannot_be_merged(kind: RowKind) -> None:
    pytest.importorskip("torch")
    host = [array.reshape(6, 5, -1) for array in _operands(kind, "logits", BF16, (30, 72), 8)]
    turned = [array.transpose(1, 0, 2) for array in host]
    given = [_torch(array).transpose(0, 1) for array in host]
    extra = [72] if kind.spreads and kind.operands == 1 else []
    operation = getattr(detkern.rows, kind.label)
    if kind.spreads:
        turned[0], given[0] = turned[0][..., 0], given[0][..., 0]
    result = operation(*given, *extra)
    expected = operation(*(np.ascontiguousarray(array) for array in turned), *extra, backend="cpu")
    assert result.is_cuda
    assert differing(expected.view(np.uint16), _bits(result)) == 0


def test_a_row_is_the_same_in_every_batch() -> None:
    import cupy

    host = (5 * operands.generate("normal", F32, (4500, 1000), 4)).astype(np.float32)
    whole = detkern.rows.log_softmax(cupy.asarray(host))
    for count in (1, 2, 7, 32, 600):
        part = detkern.rows.log_softmax(cupy.asarray(host[:count]))
        assert bool((part.view(np.uint32) == whole[:count].view(np.uint32)).all()), count
    padded = np.full((4500, 1500), -np.inf, np.float32)
    padded[:, 300:1300] = host
    wide = detkern.rows.log_softmax(cupy.asarray(padded))
    assert bool((wide[:, 300:1300].view(np.uint32) == whole.view(np.uint32)).all())


def test_more_than_two_billion_elements() -> None:
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 16 << 30:
        pytest.skip("gpu: less than 16 GiB of memory are free")
    x = cupy.zeros((70_000, 32_000), np.uint16)
    last = operands.generate("normal", BF16, (40, 32_000), 11)
    x[-40:] = cupy.asarray(last.view(np.uint16))
    view = TensorView(x.data.ptr, x.shape, (32_000, 1), BF16, DEVICE, array=x)
    out = cupy.empty((70_000, 32_000), np.uint16)
    target = TensorView(out.data.ptr, out.shape, (32_000, 1), BF16, DEVICE, array=out)
    _run(RowKind.SOFTMAX, [view], target, 32_000)
    assert differing(_replay(RowKind.SOFTMAX, [last], 32_000, BF16), cupy.asnumpy(out[-40:])) == 0
    assert bool((out[:-40] == out[0, 0]).all())


@pytest.mark.parametrize("kind", [RowKind.SOFTMAX, RowKind.SOFTMAX_BACKWARD, RowKind.SUM], ids=lambda kind: kind.label)
def test_a_thousand_repetitions_give_one_result(kind: RowKind) -> None:
    import cupy

    arrays = _operands(kind, "logits", BF16, (300, 1032), 12)
    expected = cupy.asarray(_replay(kind, arrays, 1032, BF16))
    for mode in ("rows", "columns", "rows-odd"):
        placed = _placed(kind, arrays, mode)
        out = cupy.empty(expected.shape, np.uint16)
        target = TensorView(out.data.ptr, out.shape, (out.shape[1], 1), BF16, DEVICE, array=out)
        wrong = cupy.zeros((), np.int64)
        for repetition in range(1000):
            out.fill(0x5A5A + repetition)
            _run(kind, [each.view for each in placed], target, 1032, None, cupy.cuda.get_current_stream().ptr)
            wrong += (out != expected).sum()
        assert int(wrong) == 0, mode


def test_a_torch_graph_is_captured_and_replayed() -> None:
    torch = pytest.importorskip("torch")
    hosts = [_operands(RowKind.SOFTMAX, "logits", BF16, (200, 1024), seed)[0] for seed in (13, 14)]
    x, dy = _torch(hosts[0]), _torch(hosts[1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        detkern.rows.softmax_backward(dy, detkern.rows.softmax(x))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = detkern.rows.softmax(x)
        dx = detkern.rows.softmax_backward(dy, y)
    for host in hosts:
        x.copy_(_torch(host))
        graph.replay()
        expected = detkern.rows.softmax(host, backend="cpu")
        assert differing(expected.view(np.uint16), _bits(y)) == 0
        gradient = detkern.rows.softmax_backward(hosts[1], expected, backend="cpu")
        assert differing(gradient.view(np.uint16), _bits(dx)) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", RowKind, ids=IDS)
def test_the_self_check_passes_here(kind: RowKind, dtype: DType) -> None:
    compute = functools.partial(implementation.computed, describe(0), ROWS, rows.Rows())
    outcome = selfcheck.check(ROWS, kind.label, dtype, compute)
    assert str(outcome).startswith("agrees with the CPU replay on")
