"""The row operations on a GPU against the CPU's bits: every build, layouts, ragged sizes, specials, wide rows, streams, graphs."""

from __future__ import annotations

from typing import Any

import cu_device
import numpy as np
import pytest
from cu_device import DEVICE, MODES, Placed, allocate, differing, poison

import detkern
from detkern import operands
from detkern.backend import Execution
from detkern.cpu import backend as cpu_backend
from detkern.cu import rows, selfcheck
from detkern.cu.device import describe
from detkern.cu.geometry import Load
from detkern.dtypes import BF16, F16, F32, DType, from_numpy
from detkern.problem import RowKind, row_problem
from detkern.tensors import TensorView

pytestmark = pytest.mark.gpu

DTYPES = (F32, F16, BF16)
IDS = [kind.label for kind in RowKind]
# Rows around a tile's, columns around a chunk's and a piece's.
SHAPES = [(1, 1), (1, 5000), (33, 129), (40, 64), (70, 7), (9, 1029)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_all()


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


def _run(
    kind: RowKind, views: list[TensorView], out: TensorView, width: int, tile: rows.RowTile | None, stream: int = 0
) -> rows.RowLaunch:
    problem = row_problem(kind, views[0], views[1] if len(views) > 1 else None, out, width)
    chosen = rows.choose(problem, describe(DEVICE.index).multiprocessors, tile)
    rows.launch(
        problem, views[0], views[1] if len(views) > 1 else None, out, Execution(DEVICE, stream, allocate), chosen
    )
    return chosen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", RowKind, ids=IDS)
def test_every_build_and_layout(kind: RowKind, dtype: DType, mode: str) -> None:
    vectors = 0
    for number, shape in enumerate(SHAPES):
        for values in ("logits", "cancel", "special", "bits"):
            arrays = _operands(kind, values, dtype, shape, number)
            placed = _placed(kind, arrays, mode)
            out_dtype = DTYPES[number % 3]
            for out_mode in (mode, "rows", "rows-odd"):
                fastest = rows.load_path(_problem(kind, placed, _out(kind, shape, out_dtype, out_mode), shape[1]))
                for vector in {fastest == Load.MN_MAJOR, False}:
                    for tile in rows.tiles_for(vector):
                        out = _out(kind, shape, out_dtype, out_mode)
                        _run(kind, [each.view for each in placed], out.view, shape[1], tile)
                        expected = _replay(kind, arrays, shape[1], out_dtype)
                        assert differing(expected, out.bits()) == 0, (shape, values, tile, out_mode)
                        vectors += vector
    assert mode != "rows" or vectors


def _problem(kind: RowKind, placed: list[Placed], out: Placed, width: int) -> Any:
    return row_problem(kind, placed[0].view, placed[1].view if len(placed) > 1 else None, out.view, width)


@pytest.mark.parametrize("kind", RowKind, ids=IDS)
def test_every_kind_of_operands(kind: RowKind) -> None:
    for number, values in enumerate(operands.KINDS):
        for dtype in DTYPES:
            arrays = _operands(kind, values, dtype, (65, 264), number)
            for mode in ("rows", "columns", "rows-odd"):
                out = _out(kind, (65, 264), dtype, mode)
                _run(kind, [each.view for each in _placed(kind, arrays, mode)], out.view, 264, None)
                assert differing(_replay(kind, arrays, 264, dtype), out.bits()) == 0, (values, dtype, mode)


@pytest.mark.parametrize("kind", RowKind, ids=IDS)
def test_wide_rows(kind: RowKind) -> None:
    for count, width in ((3, 151_936), (2, 262_144), (2, 50_257)):
        arrays = _operands(kind, "logits", BF16, (count, width), 3)
        out = _out(kind, (count, width), F32, "rows")
        _run(kind, [each.view for each in _placed(kind, arrays, "rows")], out.view, width, None)
        assert differing(_replay(kind, arrays, width, F32), out.bits()) == 0, width


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
    _run(RowKind.SOFTMAX, [view], target, 32_000, None)
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
    device = describe(0)
    outcome = selfcheck.check_rows(kind, dtype, lambda *given: rows.rows_on(device, *given))
    assert str(outcome).startswith("agrees with the CPU replay on")
