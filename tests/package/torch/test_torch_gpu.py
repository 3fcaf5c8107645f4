"""What holds of detkern.torch on a GPU alone: the shapes of real models, CUDA graphs, streams, PyTorch's allocator. The
tests of test_torch_*.py that take a device run there too."""

from __future__ import annotations

from typing import Any

import cu_device
import numpy as np
import pytest
from frameworks import from_torch, same, same_bits, tensor

import detkern
from detkern.vocabulary.contracts import FMA, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

torch = pytest.importorskip("torch", reason="torch is not installed")
import detkern.torch as dt

pytestmark = pytest.mark.gpu

# K, N of the projections of an 8-billion-parameter transformer: qkv, output, up, down, and its vocabulary.
PROJECTIONS = [(4096, 4096), (4096, 12288), (4096, 14336), (14336, 4096), (4096, 32000)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_all()


def randn(*shape: int, seed: int) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16()


def equal(left: Any, right: Any) -> bool:
    """Equal bits, compared where they lie."""
    return torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))


@pytest.mark.parametrize(("k", "n"), PROJECTIONS, ids=str)
def test_projections_do_not_depend_on_batch_chunks_or_padding(k: int, n: int) -> None:
    """Forward and the gradient of x, in the default contract."""
    m = 4096
    weight = randn(n, k, seed=1) / k**0.5
    x, dy = randn(m, k, seed=2).requires_grad_(), randn(m, n, seed=3)
    y = dt.linear(x, weight)
    (dx,) = torch.autograd.grad(y, x, dy)
    for size in (1, 2, 3, 8, 16, 17, 64, 127, 128, 255, 512, 1000, 2048, 4095):
        part = x.detach()[:size].clone().requires_grad_()
        whole = dt.linear(part, weight)
        assert equal(whole, y[:size])  # row 0 of every M, and all others
        if size in (1, 17, 128, 1000):
            assert equal(torch.autograd.grad(whole, part, dy[:size])[0], dx[:size])
    with torch.no_grad():
        for chunk in (1000, 512):
            assert equal(torch.cat([dt.linear(part, weight) for part in x.split(chunk)]), y)
        order = torch.randperm(m, generator=torch.Generator().manual_seed(4)).cuda()
        assert equal(dt.linear(x[order], weight), y[order])
        padded = torch.full((m + 100, k), float("nan"), dtype=x.dtype, device="cuda")
        padded[50 : 50 + m] = x
        assert equal(dt.linear(padded, weight)[50 : 50 + m], y)
        assert equal(dt.linear(x.view(8, 512, k), weight).view(m, n), y)
        for _ in range(3):
            assert equal(dt.linear(x, weight), y)


@pytest.mark.parametrize(
    ("contract", "dtype"),
    [(FMA, F32), (FMA, BF16), (MMA16, BF16), (MMA16, F16), (TREE, BF16), (TREE_MMA16, F16)],
    ids=str,
)
def test_a_larger_layer_is_the_cpu_replay_on_the_same_operands(contract: Contract, dtype: DType) -> None:
    """Sizes that no tile divides; K deep enough for trees to take scratch."""
    m, n, k = 330, 264, 3000
    x, weight = tensor("normal", dtype, (m, k), 1, "cuda", True), tensor("normal", dtype, (n, k), 2, "cuda", True)
    bias, dy = tensor("normal", F32, (n,), 3, "cuda", True), tensor("normal", dtype, (m, n), 4, "cuda")
    y = dt.linear(x, weight, bias, contract=contract.name)
    y.backward(dy)
    hx, hw, hb, hdy = (from_torch(t) for t in (x, weight, bias, dy))
    options = {"contract": contract.name, "backend": "cpu"}
    assert same(from_torch(y), detkern.linear(hx, hw, hb, **options))
    assert same(from_torch(x.grad), detkern.gemm(hdy, hw, **options))
    assert same(from_torch(weight.grad), detkern.gemm(hdy, hx, trans_a=True, **options))
    assert same(from_torch(bias.grad), detkern.bias_gradient(hdy, out_dtype=np.float32, backend="cpu"))


@pytest.mark.parametrize("contract", ["mma16", "fma", "tree", "tree-mma16"])
def test_a_captured_forward_replays_equal(contract: str) -> None:
    """The tree takes its scratch from the graph's pool."""
    weight, bias = randn(520, 3000, seed=1), randn(520, seed=2)
    static = randn(330, 3000, seed=3)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dt.linear(static, weight, bias, contract=contract)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = dt.linear(static, weight, bias, contract=contract)
        for seed in (4, 5, 6):
            static.copy_(randn(330, 3000, seed=seed))
            filler = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
            y.fill_(float("nan"))
            graph.replay()
            assert equal(y, dt.linear(static, weight, bias, contract=contract))
            del filler


def _mlp(**options: Any) -> Any:
    layers = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.ReLU(), torch.nn.Linear(160, 64))
    with torch.no_grad():
        for seed, parameter in enumerate(layers.parameters()):
            parameter.copy_(tensor("normal", F32, tuple(parameter.shape), 50 + seed) / 8)
    return dt.convert(layers.cuda().bfloat16(), **options)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_captured_training_step_replays_equal(accumulate: bool) -> None:
    model = _mlp(accumulate=accumulate)
    static = randn(64, 96, seed=1)

    def step() -> list[Any]:
        model(static).float().square().sum().backward()
        return [parameter.main_grad if accumulate else parameter.grad for parameter in model.parameters()]

    dt.zero_main_grads(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step()
    for seed in (2, 3):
        static.copy_(randn(64, 96, seed=seed))
        for gradient in gradients:
            gradient.zero_()
        graph.replay()
        got = [gradient.clone() for gradient in gradients]
        fresh = _mlp(accumulate=accumulate)
        dt.zero_main_grads(fresh)
        fresh(static).float().square().sum().backward()
        expected = [parameter.main_grad if accumulate else parameter.grad for parameter in fresh.parameters()]
        assert all(same_bits(left, right) for left, right in zip(got, expected, strict=True))


def test_reduce_overhead_has_the_bits_of_eager() -> None:
    """torch.compile's own CUDA graphs, forward and backward."""
    torch._dynamo.reset()
    model = _mlp()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):  # warm-up, capture, replay
        x = randn(48, 96, seed=seed).requires_grad_()
        results = []
        for function in (compiled, model):
            y = function(x)
            leaves = [x, *model.parameters()]
            gradients = torch.autograd.grad(y.float().square().sum(), leaves)
            results.append([t.detach().clone() for t in (y, *gradients)])
        assert all(equal(left, right) for left, right in zip(*results, strict=True))


def test_work_goes_to_the_current_stream() -> None:
    """A layer on a side stream is ordered after what that stream does before, and its backward too."""
    weight = randn(512, 1024, seed=1).requires_grad_()
    expected_y = dt.linear(randn(256, 1024, seed=2), weight)
    (expected,) = torch.autograd.grad(expected_y.float().sum(), weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(side):
            x = torch.full((256, 1024), float("nan"), dtype=torch.bfloat16, device="cuda")
            torch.cuda._sleep(2_000_000)
            x.copy_(randn(256, 1024, seed=2))
            y = dt.linear(x, weight)
            (gradient,) = torch.autograd.grad(y.float().sum(), weight)
        side.synchronize()
        assert equal(y, expected_y)
        assert equal(gradient, expected)


def test_results_and_scratch_are_of_pytorchs_allocator() -> None:
    x, weight = randn(512, 14336, seed=1), randn(4096, 14336, seed=2)
    scratches = {}
    for contract in ("mma16", "tree"):
        scratch = detkern.explain(x, weight, trans_b=True, contract=contract).scratch_bytes
        dt.linear(x, weight, contract=contract)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        y = dt.linear(x, weight, contract=contract)
        after = torch.cuda.memory_stats()
        held, result = before["requested_bytes.all.current"], y.numel() * y.element_size()
        assert after["requested_bytes.all.current"] - held == result
        assert after["requested_bytes.all.peak"] - held == result + scratch
        assert after["allocation.all.allocated"] - before["allocation.all.allocated"] == (2 if scratch else 1)
        scratches[contract] = scratch
        del y
    assert scratches["mma16"] == 0 < scratches["tree"]


def test_tensors_on_the_host_and_on_the_gpu_do_not_mix() -> None:
    with pytest.raises(detkern.DeviceError, match="weight"):
        dt.linear(torch.ones(4, 8, device="cuda"), torch.ones(6, 8))
    with pytest.raises(detkern.DeviceError, match="bias"):
        dt.linear(torch.ones(4, 8, device="cuda"), torch.ones(6, 8, device="cuda"), torch.ones(6))
