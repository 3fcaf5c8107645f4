"""Peers that compute a product in ways of their own: cuBLASLt's list through a library that reads what it is told, and the
persistent Triton kernel in Triton's interpreter."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from timed_host import Graph, Host

from detkern.measure import cublaslt, peers, shapes, timing
from detkern.measure.operands import Operands
from detkern.measure.shapes import Layer, Product

INTERPRETED = Path(__file__).parents[2] / "triton_interpreted_persistent.py"
LAYER = Layer("small", "a", 24, 40)


class Library:
    """libcublasLt as cublasLt.h describes it, on the CPU: column-major matrices, a list of algorithms of which the last one
    fails. Reads the arguments as the C functions would."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.ran: list[int] = []
        self.asked: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"cublasLt has no {name}")

    def _create(self, target: Any, what: Any) -> int:
        number = 1000 + len(self.objects)
        self.objects[number] = what
        target._obj.value = number
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        return self._create(handle, "handle")

    def cublasLtMatmulDescCreate(self, target: Any, compute: Any, scale: Any) -> int:
        assert (compute.value, scale.value) == (68, 0)
        return self._create(target, {})

    def cublasLtMatmulPreferenceCreate(self, target: Any) -> int:
        return self._create(target, {})

    def cublasLtMatrixLayoutCreate(self, target: Any, kind: Any, rows: Any, columns: Any, leading: Any) -> int:
        assert isinstance(rows, ctypes.c_uint64)
        assert isinstance(leading, ctypes.c_int64)
        return self._create(target, (kind.value, rows.value, columns.value, leading.value))

    def cublasLtMatmulDescSetAttribute(self, target: Any, attribute: Any, value: Any, size: Any) -> int:
        assert size.value == 4
        self.objects[target.value][attribute.value] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, target: Any, attribute: Any, value: Any, size: Any) -> int:
        assert size.value == 8
        self.objects[target.value][attribute.value] = value._obj.value
        return 0

    def _destroy(self, target: Any) -> int:
        del self.objects[target.value]
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatmulPreferenceDestroy = cublasLtMatrixLayoutDestroy = _destroy

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, matmul: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, requested: Any, found: Any,
        count: Any,
    ) -> int:  # fmt: skip
        assert self.objects[handle.value] == "handle"
        assert self.objects[preference.value] == {1: cublaslt.WORKSPACE_BYTES}
        assert (c.value, len(found)) == (d.value, requested.value)
        assert ctypes.sizeof(found[0]) == 96
        for place in range(4):
            found[place].algo.data[0] = place
            found[place].state = 15 if place == 1 else 0  # not supported
        count._obj.value = 4
        return 0

    def _matrix(self, pointer: Any, layout: Any) -> torch.Tensor:
        kind, rows, columns, leading = self.objects[layout.value]
        assert leading >= rows
        memory = (ctypes.c_int16 * (leading * columns)).from_address(pointer.value)
        dtype = {14: torch.bfloat16, 2: torch.float16}[kind]
        return torch.frombuffer(memory, dtype=torch.int16).view(dtype).view(columns, leading).t()[:rows]

    def cublasLtMatmul(
        self, handle: Any, matmul: Any, alpha: Any, a: Any, a_layout: Any, b: Any, b_layout: Any, beta: Any, c: Any,
        c_layout: Any, d: Any, d_layout: Any, algo: Any, workspace: Any, size: Any, stream: Any,
    ) -> int:  # fmt: skip
        place = algo._obj.data[0]
        if place == 3:
            return 14
        assert (alpha._obj.value, beta._obj.value, c.value, c_layout.value) == (1.0, 0.0, d.value, d_layout.value)
        assert (size.value, stream.value) == (cublaslt.WORKSPACE_BYTES, 77)
        self.ran.append(place)
        transposed = self.objects[matmul.value]
        first, second = self._matrix(a, a_layout), self._matrix(b, b_layout)
        first = first.t() if transposed[3] else first
        second = second.t() if transposed[4] else second
        self._matrix(d, d_layout).copy_(first.float() @ second.float())
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(cublaslt, "library", lambda: found)
    monkeypatch.setattr(cublaslt, "_workspace", lambda: torch.empty(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=77))
    cublaslt._handle.cache_clear()
    yield found
    cublaslt._handle.cache_clear()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", shapes.OPS)
def test_each_algorithm_of_the_list_computes_the_product(op: str, dtype: str, library: Library) -> None:
    product = Product(LAYER, 3, op, "mma16", dtype)
    operands = Operands([product], {product: 2}, "cpu")
    sets = list(zip(*(operands.rotating(product, name) for name in (*product.operands, "out")), strict=True))
    found = cublaslt.alternatives(product, sets)
    assert [len(calls) for calls in found] == [2, 2, 2]  # of four one is not supported
    for calls in found[:2]:
        operands.poison(product)
        for call in calls:
            call()
        assert operands.unwritten(product) == 0
        for a, b, out in sets:
            expected = torch.empty_like(out)
            peers._PEERS["cublas"].bind(product, a, b, expected)()
            assert (out.float() - expected.float()).norm() < 0.01 * expected.float().norm()
    assert library.ran == [0, 0, 2, 2]
    with pytest.raises(cublaslt.CublasLtError, match="cublasLtMatmul: status 14"):
        found[2][0]()
    del calls, call, found
    assert list(library.objects.values()) == ["handle"]  # everything else was given back


def test_the_best_of_the_list_is_what_is_timed(library: Library) -> None:
    product = Product(LAYER, 3, "forward", "mma16", "bfloat16")
    operands = Operands([product], {product: 2}, "cpu")
    sets = list(zip(*(operands.rotating(product, name) for name in (*product.operands, "out")), strict=True))
    host = Host()
    us = iter((900.0, 700.0, 500.0))

    def alternatives(product: Product, sets: Any) -> list[list[Any]]:
        return [
            [host.taking(one, call) for call in calls]
            for calls, one in zip(cublaslt.alternatives(product, sets), us, strict=True)
        ]

    peer = peers.Peer("cublaslt", peers._PEERS["cublaslt"].bind, alternatives=alternatives)
    calls = peer.calls(host, product, sets)
    before = host.now
    calls[0]()
    assert host.now - before == 700.0  # 500 is the one that fails
    assert library.ran[-1] == 2
    assert peers._PEERS["cublaslt"].alternatives is cublaslt.alternatives


def test_the_fastest_of_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()

    def taking(us: float) -> list[Any]:
        return [host.taking(us, lambda: None)] * 2

    def failing() -> None:
        raise RuntimeError("not this one")

    assert timing.fastest(host, [taking(30.0), [failing], taking(10.0), taking(20.0)]) == 2
    assert timing.fastest(host, [[failing], taking(10.0)]) == 1
    with pytest.raises(RuntimeError, match="not this one"):
        timing.fastest(host, [[failing]])
    with pytest.raises(ValueError, match="nothing"):
        timing.fastest(host, [])
    assert timing.rough(host, timing.Captured(Graph(taking(10.0)), 2)) == 10.0
    # Of the three that are roughly fastest the times in turn decide.
    seen = iter((3.0, 1.0, 2.0, 4.0))
    monkeypatch.setattr(timing, "rough", lambda device, captured: next(seen))
    assert timing.fastest(host, [taking(20.0), taking(40.0), taking(30.0), taking(10.0)]) == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise OSError("libcublasLt.so.13: cannot open shared object file")

    monkeypatch.setattr(cublaslt, "library", absent)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace())
    found, missing = peers.here(["cublaslt", "vllm_triton", "cublas_no_split"])
    assert [peer.name for peer in found] == ["cublas", "detkern"]
    assert "libcublasLt" in missing["cublaslt"]
    assert missing["vllm_triton"] == "Triton is not installed"
    assert "split-K" in missing["cublas_no_split"]


def test_the_persistent_kernel_computes_products() -> None:
    """In Triton's interpreter, which has to be asked for before Triton is imported."""
    done = subprocess.run(
        [sys.executable, str(INTERPRETED)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4 products"
