"""Peers compute the product that they are asked for: cuBLASLt's list through a library that reads what it is told, the
persistent Triton kernel in Triton's interpreter, other libraries through fakes; and settings hold only while a peer is
called."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from small_products import LAYER, small_product
from timed_host import Host

import detkern
from detkern.measure import cublaslt, peers, shapes
from detkern.measure.operands import Operands
from detkern.measure.shapes import Product

INTERPRETED = Path(__file__).parents[2] / "triton_interpreted_persistent.py"


class Library:
    """libcublasLt as cublasLt.h describes it, on the CPU: column-major matrices, a list of algorithms of which the last
    one fails. Reads the arguments as the C functions would."""

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
        [sys.executable, str(INTERPRETED)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4 products"


@pytest.mark.parametrize("op", shapes.OPS)
@pytest.mark.parametrize("name", ["cublas", "detkern"])
def test_products_are_what_they_are_called(op: str, name: str) -> None:
    product = small_product(op)
    operands = Operands([product], {product: 1}, "cpu")
    a, b, out = (operands.rotating(product, matrix)[0] for matrix in (*product.operands, "out"))
    peers._PEERS[name].bind(product, a, b, out)()
    left, right = a.double(), b.double()
    exact = {"forward": lambda: left @ right.T, "da": lambda: left @ right, "db": lambda: left.T @ right}[op]()
    assert (a.shape, b.shape) == tuple(torch.Size(product.matrix(matrix)) for matrix in product.operands)
    assert (out.double() - exact).norm() < 0.01 * exact.norm()


def test_split_k_is_off_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU build has the settings, but no cuBLASLt to prefer."""
    libraries = ["default"]

    def preferred(library: str | None = None) -> str:
        if library:
            libraries.append(library)
        return libraries[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    matmul = torch.backends.cuda.matmul
    for dtype, setting in (("bfloat16", "bf16"), ("float16", "fp16")):
        name = f"allow_{setting}_reduced_precision_reduction"
        before = getattr(matmul, name), getattr(matmul, f"{name}_split_k")
        assert before == (True, True)
        with peers._no_split(dataclasses.replace(small_product(), dtype=dtype)):
            assert (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) == (False, False)
            assert libraries[-1] == "cublaslt"
        assert (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) == before
        assert libraries[-1] == "default"


def test_dependent_launch_is_off_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.SimpleNamespace(dependent_launch=True)
    monkeypatch.setattr(detkern, "config", config)
    assert peers._missing("detkern_independent") is None
    with peers._independent(small_product()):
        assert config.dependent_launch is False
    assert config.dependent_launch is True
    monkeypatch.setattr(detkern, "config", types.SimpleNamespace())
    assert peers._missing("detkern_independent") == "detkern.config has no dependent_launch"


def test_peers_that_are_not_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "sgemm_bi", types.ModuleType("sgemm_bi"))
    found, missing = peers.here(["cublas_no_split", "deep_gemm", "sgemm_bi"])
    assert [peer.name for peer in found] == ["cublas", "detkern", "cublas_no_split", "sgemm_bi"]
    assert "deep_gemm" in missing["deep_gemm"]


def test_other_libraries_are_called_as_they_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes that compute what DeepGEMM ([M, K] and [N, K], any strides) and sgemm-bi (pointers, weights [K,
    N]) would."""
    deep = types.ModuleType("deep_gemm")
    deep.bf16_gemm_nt = lambda a, b, d: d.copy_(a @ b.T)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", deep)
    for op in shapes.OPS:
        product = small_product(op)
        operands = Operands([product], {product: 1}, "cpu")
        a, b, out = (operands.rotating(product, name)[0] for name in (*product.operands, "out"))
        peers._PEERS["deep_gemm"].bind(product, a, b, out)()
        expected = torch.empty_like(out)
        peers._PEERS["cublas"].bind(product, a, b, expected)()
        assert torch.equal(out, expected)
    with pytest.raises(peers.Unserved, match="float16"):
        peers._PEERS["deep_gemm"].bind(dataclasses.replace(small_product(), dtype="float16"), a, b, out)

    called: list[Any] = []
    engine = types.SimpleNamespace(
        presize_upcast_scratch=lambda *sizes: called.append(sizes),
        forward=lambda *arguments: called.append(arguments),
        backward_dx=lambda *arguments: called.append(arguments),
    )
    monkeypatch.setattr(peers, "_sgemm_bi_engine", lambda: engine)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=77))
    for op in ("forward", "da"):
        product = small_product(op)
        operands = Operands([product], {product: 1}, "cpu")
        a, b, out = (operands.rotating(product, name)[0] for name in (*product.operands, "out"))
        called.clear()
        peers._PEERS["sgemm_bi"].bind(product, a, b, out)()
        assert called[0] == (3 * 40, 40 * 24, 3 * 40)
        pointers, sizes, *rest = called[1]
        assert pointers[:2] == (out.data_ptr(), a.data_ptr())
        assert sizes == (3, 40, 24)
        assert rest == ["bfloat16", 77, True]
    with pytest.raises(peers.Unserved, match="float32"):
        peers._PEERS["sgemm_bi"].bind(small_product("db"), a, b, out)
