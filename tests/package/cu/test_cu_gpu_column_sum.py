"""The bias gradient on a GPU against the CPU's bits: every build, layouts, ragged sizes, specials, pieces of the rows,
more than 2^31 elements, streams and graphs."""

from __future__ import annotations

import functools
from typing import Any

import cu_device
import numpy as np
import pytest
from cu_device import DEVICE, MODES, Placed, allocate, differing, poison

import detkern
from detkern.cu import column_sum, implementation
from detkern.cu.device import describe
from detkern.cu.gemm_tile import Load
from detkern.dispatch import selfcheck
from detkern.dispatch.backend import Execution
from detkern.operations.bias_gradient.operation import BIAS_GRADIENT
from detkern.operations.bias_gradient.problem import column_sum_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu

DTYPES = (F32, F16, BF16)
SHAPES = [(1, 1), (1, 40), (31, 33), (129, 64), (256, 97), (1025, 8), (700, 4100)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_all()


def _replay(dc: np.ndarray, initial: np.ndarray | None = None, out_dtype: DType | None = None) -> np.ndarray:
    out = None if initial is None else initial.copy()
    result = detkern.bias_gradient(
        dc, out=out, accumulate=out is not None, backend="cpu",
        out_dtype=None if out is not None or out_dtype is None else out_dtype.name,
    )  # fmt: skip
    return result.view(f"u{result.itemsize}")


def _out(n: int, dtype: DType, initial: np.ndarray | None) -> Placed:
    """An output of stride 2 with poison between."""
    host = poison(n, dtype).view(dtype.numpy) if initial is None else initial
    return Placed(host[None], "spread")


def _run(dc: TensorView, out: Placed, accumulate: bool, tile: column_sum.SumTile | None, stream: int = 0) -> Load:
    target = TensorView(out.view.pointer, out.shape[1:], out.strides[1:], out.dtype, DEVICE, array=out.memory)
    problem = column_sum_problem(dc, target, accumulate)
    chosen = column_sum.choose(problem, describe(DEVICE.index).multiprocessors, tile)
    column_sum.launch(problem, dc, target, Execution(DEVICE, stream, allocate), chosen)
    return chosen.tile.load


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_build_and_layout(dtype: DType, mode: str) -> None:
    loads = set()
    for number, shape in enumerate(SHAPES):
        for kind in ("cancel", "special", "bits"):
            dc = operands.generate(kind, dtype, shape, number)
            placed = Placed(dc, mode)
            fastest = column_sum.load_path(column_sum_problem(placed.view, _out(shape[1], F32, None).view, False))
            for load in {fastest, Load.STRIDED}:
                for tile in (*column_sum.tiles_for(load, dtype), column_sum.FEW):
                    initial = operands.generate(kind, F32, shape[1:], number + 50) if number % 2 else None
                    out_dtype = F32 if initial is not None else DTYPES[number % 3]
                    out = _out(shape[1], out_dtype, initial)
                    loads.add(_run(placed.view, out, initial is not None, tile))
                    assert differing(_replay(dc, initial, out_dtype), out.bits()[0]) == 0, (shape, kind, tile)
    assert Load.STRIDED in loads
    assert mode != "rows" or Load.MN_MAJOR in loads
    assert mode != "columns" or Load.K_MAJOR in loads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_operands(dtype: DType) -> None:
    for kind in operands.KINDS:
        dc = operands.generate(kind, dtype, (515, 264), 7)
        for mode in ("rows", "columns", "rows-odd"):
            out = _out(264, dtype, None)
            _run(Placed(dc, mode).view, out, False, None)
            assert differing(_replay(dc), out.bits()[0]) == 0, (kind, mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leading_dimensions_that_cannot_be_merged(dtype: DType) -> None:
    import cupy

    host = operands.generate("cancel", dtype, (6, 5, 41, 72), 8)
    memory = cupy.asarray(host.view(dtype.bits))
    for name, turned, device in (
        ("cut", host[:, :, :-1], memory[:, :, :-1]),
        ("turned", host.transpose(2, 0, 1, 3), memory.transpose(2, 0, 1, 3)),
        ("every second column", host[:, :, 1:, ::2], memory[:, :, 1:, ::2]),
        ("columns last but one", host.transpose(0, 1, 3, 2)[:, 1:], memory.transpose(0, 1, 3, 2)[:, 1:]),
        ("expanded", np.broadcast_to(host[0, 0, 0], (9, 72)), cupy.broadcast_to(memory[0, 0, 0], (9, 72))),
    ):
        strides = tuple(stride // dtype.itemsize for stride in device.strides)
        view = TensorView(device.data.ptr, device.shape, strides, dtype, DEVICE, array=memory)
        out = _out(turned.shape[-1], dtype, None)
        _run(view, out, False, None)
        assert differing(_replay(turned), out.bits()[0]) == 0, name


def test_pieces_of_the_rows_give_the_whole() -> None:
    import cupy

    dc = operands.generate("cancel", BF16, (3000, 520), 9)
    placed = Placed(dc, "rows")
    out = cupy.zeros(520, np.float32)
    target = TensorView(out.data.ptr, (520,), (1,), F32, DEVICE, array=out)
    for first, last in ((0, 1), (1, 130), (130, 130), (130, 1999), (1999, 3000)):
        view = placed.view
        piece = TensorView(
            view.pointer + 2 * first * view.strides[0],
            (last - first, 520),
            view.strides,
            BF16,
            DEVICE,
            array=view.array,
        )
        problem = column_sum_problem(piece, target, True)
        column_sum.launch(problem, piece, target, Execution(DEVICE, 0, allocate))
    assert differing(_replay(dc, None, F32), cupy.asnumpy(out).view(np.uint32)) == 0


def test_no_rows() -> None:
    memory = Placed(np.zeros((1, 300), np.float32), "rows").memory
    empty = TensorView(memory.data.ptr, (0, 300), (300, 1), F32, DEVICE, array=memory)
    out = _out(300, BF16, None)
    _run(empty, out, False, None)
    assert not out.bits().any()
    initial = operands.generate("special", F32, (300,), 10)
    out = _out(300, F32, initial)
    _run(empty, out, True, None)
    assert differing(_replay(np.empty((0, 300), np.float32), initial), out.bits()[0]) == 0


@pytest.mark.parametrize("strides", [(70_000, 1), (1, 40_000)], ids=["rows", "columns"])
def test_more_than_two_billion_elements(strides: tuple[int, int]) -> None:
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 12 << 30:
        pytest.skip("gpu: less than 12 GiB of memory are free")
    rows, columns = 40_000, 70_000
    memory = cupy.zeros(rows * columns, np.uint16)
    last = operands.generate("cancel", BF16, (rows, 40), 11)
    window = cupy.lib.stride_tricks.as_strided(memory, (rows, columns), (2 * strides[0], 2 * strides[1]))
    window[:, -40:] = cupy.asarray(last.view(np.uint16))
    view = TensorView(memory.data.ptr, (rows, columns), strides, BF16, DEVICE, array=memory)
    out = _out(columns, F32, None)
    _run(view, out, False, None)
    found = out.bits()[0]
    assert differing(_replay(last, None, F32), found[-40:]) == 0
    assert not found[:-40].any()


def test_a_thousand_repetitions_give_one_result() -> None:
    import cupy

    dc = operands.generate("normal", BF16, (1500, 1032), 12)
    expected = cupy.asarray(_replay(dc))
    for mode in ("rows", "columns", "rows-odd"):
        placed = Placed(dc, mode)
        out = cupy.empty(1032, np.uint16)
        target = TensorView(out.data.ptr, (1032,), (1,), BF16, DEVICE, array=out)
        problem = column_sum_problem(placed.view, target, False)
        wrong = cupy.zeros((), np.int64)
        for repetition in range(1000):
            out.fill(0x5A5A + repetition)
            column_sum.launch(
                problem, placed.view, target, Execution(DEVICE, cupy.cuda.get_current_stream().ptr, allocate)
            )
            wrong += (out != expected).sum()
        assert int(wrong) == 0, mode


def _torch(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)


def test_a_torch_graph_is_captured_and_replayed() -> None:
    torch = pytest.importorskip("torch")
    hosts = [operands.generate("cancel", BF16, (4, 500, 1024), seed) for seed in (13, 14)]
    dc, main_grad = _torch(hosts[0]), torch.zeros(1024, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        detkern.bias_gradient(dc)
        detkern.bias_gradient(dc, out=main_grad, accumulate=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh = detkern.bias_gradient(dc)
        detkern.bias_gradient(dc, out=main_grad, accumulate=True)
    main_grad.zero_()
    whole = np.concatenate(hosts)
    for host in hosts:
        dc.copy_(_torch(host))
        graph.replay()
        assert differing(_replay(host), fresh.view(torch.int16).cpu().numpy().view(np.uint16)) == 0
    assert differing(_replay(whole, None, F32), main_grad.view(torch.int32).cpu().numpy().view(np.uint32)) == 0


def test_arrays_of_the_frameworks() -> None:
    torch = pytest.importorskip("torch")
    import cupy

    host = operands.generate("special", BF16, (3, 70, 200), 15)
    result = detkern.bias_gradient(_torch(host), out_dtype=torch.float32)
    assert result.is_cuda
    assert differing(_replay(host, None, F32), result.view(torch.int32).cpu().numpy().view(np.uint32)) == 0
    ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(3, 400, 16)
    assert detkern.bias_gradient(ones, out_dtype="f32").tolist() == [1200.0] * 16
    f16 = operands.generate("special", F16, (70, 200), 16)
    got = detkern.bias_gradient(cupy.asarray(f16))
    assert isinstance(got, cupy.ndarray)
    assert differing(_replay(f16), cupy.asnumpy(got).view(np.uint16)) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_self_check_passes_here(dtype: DType) -> None:
    compute = functools.partial(implementation.computed, describe(0), BIAS_GRADIENT, column_sum.Sums())
    outcome = selfcheck.check(BIAS_GRADIENT, "bias_gradient", dtype, compute)
    assert str(outcome).startswith("agrees with the CPU replay on")
