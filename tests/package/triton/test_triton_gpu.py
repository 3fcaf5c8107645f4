"""The Triton backend on a GPU: the CUDA backend's bits on odd sizes, layouts, epilogues, batches and the benchmark's
shapes."""

from __future__ import annotations

from typing import Any

import cu_device
import numpy as np
import pytest
import triton_device
from cu_device import PAIR_IDS, PAIRS, Placed, differing, output, replay, vector

import detkern
from detkern.dispatch import registry
from detkern.operations.gemm.operation import GEMM
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    triton_device.skip_if_missing()
    triton_device.compile_all()


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_odd_sizes_have_the_bits_of_the_cuda_backend(contract: Contract, dtype: DType) -> None:
    for turn, ((m, n, k), a_mode, b_mode, out_mode, accumulate) in enumerate(triton_device.cases()):
        kind = operands.KINDS[turn % len(operands.KINDS)]
        a, b = operands.generate(kind, dtype, (m, k), 2 * turn), operands.generate(kind, dtype, (k, n), 2 * turn + 1)
        start = operands.generate(kind, F32, (m, n), 3) if accumulate else None
        bias = operands.generate(kind, (F32, F16, BF16)[turn % 3], (n,), 4) if turn % 2 and not accumulate else None
        out_dtype = F32 if accumulate else (dtype, F32, F16, BF16)[turn % 4]
        left, right = Placed(a, a_mode), Placed(b, b_mode)
        results = []
        for run in (triton_device.run, cu_device.run):
            out = output((m, n), out_dtype, out_mode, start)
            run(
                contract, left.view, right.view, out.view, bias=None if bias is None else vector(bias),
                accumulate=accumulate,
            )  # fmt: skip
            results.append(out.bits())
        wrong = differing(*results)
        assert wrong == 0, f"{wrong} of {m * n}: {kind} {m}x{n}x{k} {a_mode} {b_mode} {out_mode} {accumulate}"


@pytest.mark.parametrize("kind", operands.KINDS)
def test_every_kind_of_operands_against_the_replay(kind: str) -> None:
    for contract, dtype in PAIRS:
        a, b = operands.generate(kind, dtype, (64, 136), 11), operands.generate(kind, dtype, (136, 72), 12)
        out = output((64, 72), F32, "rows")
        triton_device.run(contract, Placed(a, "rows").view, Placed(b, "columns").view, out.view)
        assert differing(replay(contract, a, b, out_dtype=F32), out.bits()) == 0, f"{contract} {dtype}"


@pytest.mark.parametrize("axes", [(0, 1, 2, 3, 4, 5), (3, 1, 0, 2, 5, 4)], ids=str)
def test_batches_of_more_dimensions_than_a_launch_counts(axes: tuple[int, ...]) -> None:
    shape = (2, 3, 1, 2, 5, 8)
    a = operands.generate("normal", BF16, (60, 8), 1).reshape(2, 3, 1, 2, 5, 8)
    b = operands.generate("normal", BF16, (96, 8), 2).reshape(2, 3, 1, 2, 8, 8)
    left, right = cu_device.batched(a, BF16, axes), cu_device.batched(b, BF16, axes)
    import cupy

    for name in ("mma16", "fma", "tree"):
        memory = cupy.full(shape, 0xFFAD, np.uint16)
        strides = tuple(step // 2 for step in memory.strides)
        out = cu_device.TensorView(memory.data.ptr, shape, strides, BF16, cu_device.DEVICE, array=memory)
        triton_device.run(CONTRACTS[name], left, right, out)
        want = detkern.gemm(a, b, contract=name, backend="cpu").view(np.uint16)
        assert differing(want, cupy.asnumpy(memory)) == 0, name


def test_nothing_is_compiled_for_values() -> None:
    """The classes of value that Triton could specialise on (1, multiples of 16, beyond 2^31, aligned and not) share a
    kernel, and have the same bits."""
    from detkern.triton import launch

    contract = CONTRACTS["mma16"]
    kernel = launch._kernel("mma", "mma_gemm")
    a, b = operands.generate("wide", BF16, (33, 40), 1), operands.generate("wide", BF16, (40, 37), 2)
    want = replay(contract, a, b)

    def compiled() -> int:
        return sum(len(entry[0]) for entry in kernel.device_caches.values())

    counts = []
    for m, n, a_mode, b_mode in (
        (33, 37, "rows-odd", "columns-odd"), (16, 16, "spread", "reversed"), (1, 1, "rows-odd", "spread"),
        (17, 32, "columns-odd", "rows-odd"), (32, 1, "reversed", "reversed"),
    ):  # fmt: skip
        out = output((m, n), BF16, "spread")
        triton_device.run(contract, Placed(a[:m], a_mode).view, Placed(b[:, :n], b_mode).view, out.view)
        assert differing(want[:m, :n], out.bits()) == 0
        counts.append(compiled())
    assert len(set(counts)) == 1, counts


def _tensors(layer: Any, m: int, dtype: str) -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator("cuda").manual_seed(layer.n + layer.k)
    kind = getattr(torch, dtype)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda").to(kind)

    return random(m, layer.k), random(layer.n, layer.k), random(m, layer.n)


@pytest.mark.parametrize("m", [1, 64, 512])
@pytest.mark.parametrize("layer", ["qwen3-1.7b.o", "router.256", "odd.1000x4104"])
def test_the_shapes_of_the_benchmark(layer: str, m: int) -> None:
    """Forward and both gradients, by every contract, through the public functions."""
    import torch

    from detkern.measure import shapes

    (found,) = shapes.load().named([layer])
    x, w, dc = _tensors(found, m, "bfloat16")
    for name in ("mma16", "fma", "tree", "tree-mma16"):
        for op in (
            lambda **o: detkern.linear(x, w, **o),
            lambda **o: detkern.gemm_da(dc, w.t(), **o),
            lambda **o: detkern.gemm_db(x, dc, transposed=True, **o),
        ):
            by = [op(contract=name, backend=backend).view(torch.int16) for backend in ("triton", "cuda")]
            assert torch.equal(*by), name


def test_every_layer_of_the_benchmark() -> None:
    """Forward, every layer and every M up to 512, by every contract."""
    import torch

    from detkern.measure import shapes

    wanted = shapes.load()
    sizes = [m for m in wanted.m if m <= 512]
    names = ("mma16", "fma", "tree", "tree-mma16")

    def view(shape: tuple[int, int], strides: tuple[int, int]) -> TensorView:
        return TensorView(1 << 20, shape, strides, BF16, cu_device.DEVICE)

    triton_device.compile_ahead(
        gemm_problem(
            CONTRACTS[name], view((m, layer.k), (layer.k, 1)), view((layer.k, layer.n), (1, layer.k)),
            view((m, layer.n), (layer.n, 1)), None, False,
        )
        for layer in wanted.layers for m in sizes for name in names
    )  # fmt: skip
    for layer in wanted.layers:
        rows, w, _ = _tensors(layer, max(sizes), "bfloat16")
        for m in sizes:
            for name in names:
                by = [
                    detkern.linear(rows[:m], w, contract=name, backend=backend).view(torch.int16)
                    for backend in ("triton", "cuda")
                ]
                assert torch.equal(*by), (layer.name, m, name)


def test_bias_gradients() -> None:
    import cupy

    for dtype in (F32, F16, BF16):
        for shape in ((1, 1), (33, 257), (3, 2, 5, 4, 7, 130)):
            dc = operands.generate("wide", dtype, (int(np.prod(shape[:-1])), shape[-1]), 1).reshape(shape)
            want = detkern.bias_gradient(dc, backend="cpu")
            there = cupy.asarray(dc.view(dtype.bits)).view(dtype.numpy)
            turned = cupy.ascontiguousarray(there.T).T if len(shape) == 2 else there
            for array in (there, turned):
                got = detkern.bias_gradient(array, backend="triton")
                assert np.array_equal(cupy.asnumpy(got.view(dtype.bits)), want.view(dtype.bits)), (dtype, shape)


def test_the_backend_offers_what_it_has_and_says_how_it_found_out() -> None:
    backend = registry.load("triton")
    offered = {(name, dtype.short) for name, dtype in registry.computed(backend, GEMM, cu_device.DEVICE)}
    assert offered == {(contract.name, dtype.short) for contract, dtype in PAIRS}
    facts = backend.facts(cu_device.DEVICE)
    assert facts["self-check of mma16 bf16"].startswith("agrees with the CPU replay on")
    assert "PyTorch" in facts["launcher"]


def test_streams_capture_and_another_framework() -> None:
    """On the caller's stream, in a graph after a first call, and on CuPy's arrays."""
    import cupy
    import torch

    x = torch.randn(200, 512, device="cuda").bfloat16()
    w = torch.randn(264, 512, device="cuda").bfloat16()
    for name in ("mma16", "tree"):
        want = detkern.linear(x, w, contract=name, backend="cuda")
        out = torch.empty_like(want)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            detkern.linear(x, w, out=out, contract=name, backend="triton")
        stream.synchronize()
        assert torch.equal(out.view(torch.int16), want.view(torch.int16))
        out.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            detkern.linear(x, w, out=out, contract=name, backend="triton")
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(torch.int16), want.view(torch.int16))
        theirs = [cupy.from_dlpack(t.view(torch.int16)).view(BF16.numpy) for t in (x, w)]
        with cupy.cuda.Stream(non_blocking=True) as other:
            got = detkern.linear(*theirs, contract=name, backend="triton")
            other.synchronize()
        assert np.array_equal(cupy.asnumpy(got.view(np.int16)), want.view(torch.int16).cpu().numpy())


def test_training_through_triton_has_the_bits_of_cuda() -> None:
    import torch

    import detkern.torch

    x = torch.randn(3, 50, 264, device="cuda").bfloat16()
    w = torch.randn(136, 264, device="cuda").bfloat16()
    bias = torch.randn(136, device="cuda")
    dc = torch.randn(3, 50, 136, device="cuda").bfloat16()
    found = []
    for backend in ("triton", "cuda"):
        leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
        out = detkern.torch.linear(*leaves, contract="mma16", backend=backend)
        out.backward(dc)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
