"""`detkern.preload`: which kernels it loads, what it refuses, and that nothing is loaded afterwards."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

import detkern
from detkern.dispatch import ahead, registry
from detkern.errors import ArgumentError, BackendUnavailable, BuildError, ContractUnsupported, DTypeError
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import FMA, MMA16, TREE_MMA16
from detkern.vocabulary.dtypes import BF16, F16, F32


def test_the_cpus_library_is_loaded() -> None:
    from detkern.cpu import backend

    assert detkern.preload("cpu") == int(backend.library() is not None)


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ArgumentError, match="layouts: 'nx' is none of nn, nt, tn, tt"):
        detkern.preload("cpu", layouts="nx")
    with pytest.raises(ArgumentError, match="device='gpu' is not a device"):
        detkern.preload("gpu")
    with pytest.raises(DTypeError):
        detkern.preload("cpu", dtypes="float64")
    with pytest.raises(ContractUnsupported, match="contract mma16 takes none of float32"):
        detkern.preload("cpu", contracts="mma16", dtypes="float32")
    with pytest.raises(ContractUnsupported, match="fp8-block128"):
        detkern.preload("cpu", contracts="fp8-block128")
    with pytest.raises(ContractUnsupported):
        detkern.preload("cpu", contracts="mma17")


def test_a_device_without_a_backend_says_what_each_one_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(registry.load("cuda")), "unavailable", lambda self, device: "there is no CUDA device")
    with pytest.raises(
        BackendUnavailable, match=r"nothing can be preloaded on cuda:0: cuda: there is no CUDA device; triton: "
    ):
        detkern.preload()


def test_contracts_and_types_reach_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    backend = registry.load("cuda")
    monkeypatch.setattr(type(backend), "unavailable", lambda self, device: None)
    monkeypatch.setattr(type(backend), "capability", lambda self, device: (9, 0))
    monkeypatch.setattr(type(backend), "preload", lambda self, *arguments: asked.append(arguments) or 7)
    monkeypatch.setattr(ahead.registry, "offered", lambda contract, dtype, device, name: True)
    assert detkern.preload(1, layouts=("nt", "tn")) == 7
    assert detkern.preload("cuda:1", contracts=["tree-mma16", "fma"], dtypes="bf16", layouts="tt") == 7
    assert asked == [
        (Device("cuda", 1), [(FMA, F32), (MMA16, F16), (MMA16, BF16)], [(True, True), (False, False)]),
        (Device("cuda", 1), [(TREE_MMA16, BF16), (FMA, BF16)], [(False, True)]),
    ]


@pytest.mark.parametrize("contract", [FMA, MMA16, TREE_MMA16], ids=str)
def test_every_launch_of_a_layout_is_of_a_kernel_that_was_loaded(contract: Any) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from detkern.cu.ahead import of_layouts
    from detkern.cu.tile_choice import choose

    dtype = BF16
    device = Device("cuda", 0)
    rng = random.Random(5)

    def matrix(rows: int, columns: int, in_rows: bool) -> TensorView:
        line = -(-(columns if in_rows else rows) // 8) * 8
        return TensorView(4096, (rows, columns), (line, 1) if in_rows else (1, line), dtype, device)

    for layout, along_k in ahead.LAYOUTS.items():
        builds = set(of_layouts([(contract, dtype)], [along_k], (9, 0)))
        others = set(of_layouts([(contract, dtype)], list(itertools.product((True, False), repeat=2)), (9, 0)))
        assert builds < others
        seen = set()
        for _ in range(300):
            m, n, k = (rng.choice((rng.randint(8, 300), 64 * rng.randint(1, 200))) for _ in range(3))
            a, b = matrix(m, k, layout[0] == "n"), matrix(k, n, layout[1] == "n")
            for out_dtype in (BF16, F32):
                line = -(-n // 8) * 8
                out = TensorView(4096, (m, n), (line, 1), out_dtype, device)
                problem = gemm_problem(contract, a, b, out, None, out_dtype == F32 and rng.random() < 0.5)
                seen.add(choose(problem, (9, 0), 132).build)
        assert seen <= builds
        assert len(seen) > 1


@pytest.mark.gpu
def test_after_it_no_product_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from detkern.cu import loader

    assert detkern.preload(0, dtypes="bfloat16") > 50

    def refuse(*arguments: Any) -> Any:
        raise BuildError(f"loaded {arguments}")

    monkeypatch.setattr(loader, "_load", refuse)
    torch = pytest.importorskip("torch")
    rng = random.Random(6)
    weight = torch.randn(1032, 520, device="cuda", dtype=torch.bfloat16)
    for _ in range(60):
        m = rng.randint(1, 3000)
        x = torch.randn(m, 520, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(m, 1032, device="cuda", dtype=torch.bfloat16)
        y = detkern.linear(x, weight)
        detkern.gemm_da(dy, weight.t())
        detkern.gemm_db(x, dy, transposed=True, out_dtype="float32")
        assert y.shape == (m, 1032)
    # A product that was never called is captured.
    x, out = (
        torch.randn(777, 520, device="cuda", dtype=torch.bfloat16),
        torch.empty(777, 1032, device="cuda", dtype=torch.bfloat16),
    )
    expected = detkern.linear(x, weight)
    fresh = torch.randn(1111, 520, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other = detkern.linear(fresh, weight)
    graph.replay()
    torch.cuda.synchronize()
    assert other.shape == (1111, 1032)
    assert torch.equal(detkern.linear(fresh, weight).view(torch.int16), other.view(torch.int16))
    assert torch.equal(detkern.linear(x, weight, out=out).view(torch.int16), expected.view(torch.int16))
    cupy.cuda.Device(0).synchronize()
