"""The scattered sum on a GPU against the replay's bits: every build, layouts, distributions of the index, specials,
pieces of the sources, streams and graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cu_device import DEVICE, MODES, Placed, allocate, differing, output

import detkern
from detkern.cu import implementation, scatter_sum
from detkern.cu.device import describe
from detkern.dispatch import selfcheck
from detkern.dispatch.backend import Execution
from detkern.operations.scatter_sum.operation import SCATTER_SUM
from detkern.operations.scatter_sum.problem import scatter_sum_problem
from detkern.operations.scatter_sum.replay import scatter_sum as replayed_sum
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType, from_numpy

pytestmark = pytest.mark.gpu

DTYPES = (F32, F16, BF16)
# Sources, columns, rows: one tile of the sort and more, rows of one and of many sources, fewer columns than a piece,
# more than a task, more rows than 16 bits count.
SHAPES = [
    (1, 1, 1), (40, 5, 3), (65, 129, 1), (300, 8, 5), (4096, 4, 300), (4097, 9, 300), (20_000, 1, 70_000),
    (700, 4100, 17),
]  # fmt: skip
DISTRIBUTIONS = ("any", "half of them one", "one", "ascending", "none")


def drawn(m: int, rows: int, distribution: str, seed: int) -> np.ndarray:
    """An index; all but "one" name no row here and there."""
    rng = np.random.default_rng(seed)
    index = rng.integers(-2, rows + 2, m)
    if distribution == "one":
        index[:] = rows - 1
    elif distribution == "none":
        index[:] = rows
    elif distribution == "ascending":
        index.sort()
    elif distribution == "half of them one":
        index = np.where(rng.random(m) < 0.5, rows // 2, index)
    return index.astype((np.int32, np.int64)[seed % 2])


def placed_index(index: np.ndarray) -> TensorView:
    """In device memory, with a hole behind each."""
    import cupy

    memory = cupy.asarray(np.repeat(index, 2))
    dtype = from_numpy(index.dtype)
    assert dtype is not None
    return TensorView(memory.data.ptr, index.shape, (2,), dtype, DEVICE, array=memory)


def compared(
    source: np.ndarray, index: np.ndarray, rows: int, out_dtype: DType, mode: str, start: np.ndarray | None = None
) -> int:
    """How many elements of a launch differ from the replay's."""
    shape = rows, source.shape[1]
    expected = np.zeros(shape, out_dtype.numpy) if start is None else start.copy()
    replayed_sum(source, index, expected, accumulate=start is not None)
    out, placed = output(shape, out_dtype, mode, start), Placed(source, mode)
    views = placed.view, placed_index(index)
    problem = scatter_sum_problem(*views, out.view, start is not None)
    execution = Execution(DEVICE, 0, allocate)
    scatter_sum.ScatterSums().prepare(problem, execution)(problem.m, views, out.view, execution)
    return differing(expected.view(out_dtype.bits), out.bits())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_build_and_layout(dtype: DType, mode: str) -> None:
    for number, (m, n, rows) in enumerate(SHAPES):
        kind = ("cancel", "special", "bits")[number % 3]
        source = operands.generate(kind, dtype, (m, n), number)
        for distribution in DISTRIBUTIONS[:: 1 if rows < 2**16 else 2]:
            index = drawn(m, rows, distribution, number)
            onto = operands.generate(kind, F32, (rows, n), number + 50)
            assert compared(source, index, rows, DTYPES[number % 3], mode) == 0, (m, n, rows, distribution)
            assert compared(source, index, rows, F32, mode, onto) == 0, (m, n, rows, distribution, "onto out")


def test_more_rows_than_24_bits_count() -> None:
    source, index = operands.generate("cancel", F32, (5000, 2), 1), drawn(5000, 2**24 + 3, "any", 1)
    assert compared(source, index, 2**24 + 3, F32, "packed") == 0


@pytest.mark.parametrize("kind", operands.KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_operands(dtype: DType, kind: str) -> None:
    source = operands.generate(kind, dtype, (900, 24), 3)
    for seed, out_dtype in enumerate(DTYPES):
        index = drawn(900, 40, "half of them one", seed)
        assert compared(source, index, 40, out_dtype, "rows") == 0
        assert compared(source, index, 40, out_dtype, "rows", operands.generate(kind, out_dtype, (40, 24), 4)) == 0


def test_chains_of_every_length() -> None:
    """Around those at which a row gets CTAs of its own, at every place in the order."""
    for few in (16, 64):
        counts = [1, few - 1, few, few + 1, 2 * few, 2 * few + 1, 1, few + 1, 5 * few, 3]
        index = np.repeat(np.arange(len(counts)), counts)
        if few == 64:
            index = np.concatenate([index, np.full(70_000, 20)])
        rng = np.random.default_rng(few)
        source = operands.generate("cancel", F32, (len(index), 3), few)
        for order in (slice(None), slice(None, None, -1), rng.permutation(len(index))):
            assert compared(source, index[order], 21, F32, "rows") == 0


def test_the_selfcheck_finds_the_replays_bits() -> None:
    device = describe(DEVICE.index)
    for dtype in DTYPES:
        outcome = selfcheck.check(
            SCATTER_SUM, "scatter_sum", dtype,
            lambda sample: implementation.computed(device, SCATTER_SUM, scatter_sum.ScatterSums(), sample),
        )  # fmt: skip
        assert outcome.elements > 0
        assert outcome.differing == 0, outcome


def test_frameworks_and_pieces() -> None:
    """CuPy's and PyTorch's arrays, in pieces and at once, on streams of their own."""
    import cupy

    torch = pytest.importorskip("torch", reason="torch is not installed")
    source, index = operands.generate("cancel", F32, (5000, 40), 1), drawn(5000, 30, "any", 1)
    expected = detkern.scatter_sum(source, index, 30)
    with cupy.cuda.Stream(non_blocking=True):
        got = detkern.scatter_sum(cupy.asarray(source), cupy.asarray(index), 30)
        assert (cupy.asnumpy(got).view(np.uint32) == expected.view(np.uint32)).all()
    tensors = torch.from_numpy(source).cuda(), torch.from_numpy(index).cuda()
    out = torch.zeros(30, 40, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for low, high in ((0, 1), (1, 4097), (4097, 5000)):
            detkern.scatter_sum(tensors[0][low:high], tensors[1][low:high], out=out, accumulate=True)
        assert (out.cpu().numpy().view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("m", [3000, 9000])
def test_a_captured_graph_replays_on_other_indices(m: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    source = torch.randn(m, 64, device="cuda").bfloat16()
    index, out = torch.randint(0, 50, (m,), device="cuda"), torch.empty(50, 64, device="cuda", dtype=torch.bfloat16)
    detkern.scatter_sum(source, index, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        detkern.scatter_sum(source, index, out=out)
    for _ in range(3):
        index.copy_(torch.randint(-1, 51, (m,), device="cuda"))
        source.normal_()
        out.fill_(float("nan"))
        graph.replay()
        expected: Any = detkern.scatter_sum(source, index, 50)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_the_gradient_of_embedding_in_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import detkern.torch as dt

    tokens, dy = torch.randint(0, 300, (4, 1000)), torch.randn(4, 1000, 64).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(torch.ones(300, 64, device=device, dtype=torch.bfloat16))
        weight.main_grad = torch.zeros(300, 64, device=device)
        with dt.batch_invariant_mode(strict=True):
            y = torch.nn.functional.embedding(tokens.to(device), weight, 7)
        y.backward(dy.to(device))
        for part in (slice(0, 1), slice(1, 4)):
            dt.embedding(tokens[part].to(device), weight, accumulate=True).backward(dy[part].to(device))
        found.append((weight.grad.cpu(), weight.main_grad.cpu()))
    assert torch.equal(found[0][0].view(torch.int16), found[1][0].view(torch.int16))
    assert torch.equal(found[0][1].view(torch.int32), found[1][1].view(torch.int32))
