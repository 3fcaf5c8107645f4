"""Prefix sums by row_scans.cu on a GPU against the CPU's bits: every build forced, rows in parts, layouts, ragged
sizes, specials, wide rows, batches, gradients of torch, graphs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cu_device import DEVICE, Placed, allocate, compile_row_scans, differing, poison
from oracles.halves import halves

import detkern
from detkern.cu import row_scans, rows
from detkern.dispatch.backend import Execution
from detkern.operations.rows.problem import RowKind, row_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu

DTYPES = (F32, F16, BF16)
KINDS = (RowKind.CUMSUM, RowKind.CUMSUM_BACKWARD)
MODES = ("rows", "packed", "rows-odd", "spread", "reversed", "columns", "columns-odd")
VALUES = ("normal", "cancel", "special", "bits", "wide", "subnormal")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_row_scans()


def _expected(kind: RowKind, host: np.ndarray, dtype: DType) -> np.ndarray:
    return getattr(detkern.rows, kind.label)(host, out_dtype=dtype.name, backend="cpu").view(dtype.bits)


def _wrong(
    kind: RowKind, host: np.ndarray, modes: tuple[str, str], out_dtype: DType, team: int | None, parts: int | None
) -> int:
    """Elements that differ from the CPU's."""
    placed = Placed(host, modes[0])
    out = Placed(poison(host.size, out_dtype).reshape(host.shape).view(out_dtype.numpy), modes[1])
    problem = row_problem(kind, placed.view, None, out.view, host.shape[1])
    chosen = row_scans.choose(problem, 132, team, parts)
    rows.launch(problem, placed.view, None, out.view, Execution(DEVICE, 0, allocate), chosen)
    return differing(_expected(kind, host, out_dtype), out.bits())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_every_build_and_layout(kind: RowKind, dtype: DType) -> None:
    number = 0
    for team, values in itertools.product((32, row_scans.THREADS), VALUES):
        slab = 128 if team == 32 else 2048
        for width, height in itertools.product((1, 3, slab - 1, slab, slab + 1, 3 * slab + 5), (1, 9)):
            number += 1
            modes = MODES[number % 7], MODES[number // 3 % 7]
            host = operands.generate(values, dtype, (height, width), number)
            wrong = _wrong(kind, host, modes, DTYPES[number // 4 % 3], team, None)
            assert wrong == 0, (team, height, width, modes, values)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_one_bit_far_below_lifts_a_sum_over_the_half(kind: RowKind, sign: int) -> None:
    host = sign * halves()[:, :: 1 if kind == RowKind.CUMSUM else -1]
    for team in (32, row_scans.THREADS):
        assert _wrong(kind, np.ascontiguousarray(host), ("rows", "packed"), F32, team, None) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_rows_in_parts(kind: RowKind, dtype: DType) -> None:
    for number, (parts, shape) in enumerate(itertools.product((2, 3, 40), ((1, 100_003), (3, 40_960), (37, 4101)))):
        values, modes = VALUES[number % 6], (MODES[number % 7], MODES[-number % 7])
        host = operands.generate(values, dtype, shape, number)
        assert _wrong(kind, host, modes, DTYPES[number % 3], None if number % 2 else 256, parts) == 0, (parts, shape)


def test_what_callers_get() -> None:
    """Prefix sums along any dimension of a CuPy array, wide rows, rows without columns."""
    cupy = pytest.importorskip("cupy")
    for number, (shape, axis, dtype) in enumerate(
        (((3, 5, 7, 9), 1, F16), ((2, 3, 151_936), 2, BF16), ((1, 3_000_001), 1, F32), ((5000, 26), 0, F32),
         ((6, 2, 5, 2), 0, F32), ((4, 0), 1, BF16), ((900, 1024), 1, BF16), ((900, 1025), 1, F16))
    ):  # fmt: skip
        host = operands.generate("normal", dtype, (int(np.prod(shape)), 1), number).reshape(shape)
        moved = np.moveaxis(host, axis, -1)
        if dtype is BF16:
            torch = pytest.importorskip("torch")
            given = torch.from_numpy(host.view(np.int16)).cuda().view(torch.bfloat16).movedim(axis, -1)
            found = detkern.rows.cumsum(given).contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
        else:
            found = detkern.rows.cumsum(cupy.moveaxis(cupy.asarray(host), axis, -1)).get().view(dtype.bits)
        expected = detkern.rows.cumsum(np.ascontiguousarray(moved), backend="cpu")
        assert differing(expected.view(dtype.bits), found) == 0, (shape, axis)


def test_a_column_knows_only_those_before_it() -> None:
    """Columns after it, zeros before it, other rows, and how many there are of either."""
    import cupy

    host = operands.generate("normal", F32, (40, 70_000), 4)
    whole = detkern.rows.cumsum(cupy.asarray(host)).view(np.uint32)
    for count, width in ((1, 70_000), (40, 9), (7, 1024), (2, 1025), (3, 20_000)):
        part = detkern.rows.cumsum(cupy.asarray(host[:count, :width]))
        assert bool((part.view(np.uint32) == whole[:count, :width]).all()), (count, width)
    padded = np.zeros((40, 80_000), np.float32)
    padded[:, 10_000:] = host
    found = detkern.rows.cumsum(cupy.asarray(padded))[:, 10_000:]
    assert bool((cupy.ascontiguousarray(found).view(np.uint32) == whole).all())


def test_a_thousand_repetitions_of_parts_give_one_result() -> None:
    import cupy

    host = operands.generate("cancel", BF16, (5, 70_000), 3)
    expected = cupy.asarray(_expected(RowKind.CUMSUM, host, F32))
    placed = Placed(host, "rows")
    out = cupy.empty(expected.shape, np.uint32)
    target = TensorView(out.data.ptr, out.shape, (70_000, 1), F32, DEVICE, array=out)
    problem = row_problem(RowKind.CUMSUM, placed.view, None, target, 70_000)
    chosen = row_scans.choose(problem, 132)
    assert chosen.parts > 1
    wrong = cupy.zeros((), np.int64)
    execution = Execution(DEVICE, cupy.cuda.get_current_stream().ptr, allocate)
    for repetition in range(1000):
        out.fill(repetition)
        rows.launch(problem, placed.view, None, target, execution, chosen)
        wrong += (out != expected).sum()
    assert int(wrong) == 0


def test_more_than_two_billion_elements() -> None:
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < 20 << 30:
        pytest.skip("gpu: less than 20 GiB of memory are free")
    columns = (1 << 31) + 4096
    x = cupy.zeros((1, columns), np.uint16)
    last = operands.generate("normal", BF16, (1, 4000), 11)
    x[:, -4000:] = cupy.asarray(last.view(np.uint16))
    view = TensorView(x.data.ptr, x.shape, (columns, 1), BF16, DEVICE, array=x)
    out = cupy.full((1, columns), 0xFFAD, np.uint16)
    target = TensorView(out.data.ptr, out.shape, (columns, 1), BF16, DEVICE, array=out)
    problem = row_problem(RowKind.CUMSUM, view, None, target, columns)
    rows.launch(problem, view, None, target, Execution(DEVICE, 0, allocate), row_scans.choose(problem, 132))
    assert differing(_expected(RowKind.CUMSUM, last, BF16), cupy.asnumpy(out[:, -4000:])) == 0
    assert not bool(out[:, :-4000].any())


def test_a_torch_graph_and_its_gradient() -> None:
    torch = pytest.importorskip("torch")
    import detkern.torch

    hosts = [operands.generate("normal", F32, (20, 30_000), seed) for seed in (13, 14)]
    x = torch.from_numpy(hosts[0].copy()).cuda().requires_grad_()
    dy = torch.from_numpy(hosts[1].copy()).cuda()

    def step() -> tuple[object, object]:
        y = detkern.torch.cumsum(x)
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    for host in hosts:
        x.detach().copy_(torch.from_numpy(host.copy()))
        graph.replay()
        assert differing(_expected(RowKind.CUMSUM, host, F32), y.cpu().numpy().view(np.uint32)) == 0
    assert differing(_expected(RowKind.CUMSUM_BACKWARD, hosts[1], F32), dx.cpu().numpy().view(np.uint32)) == 0
