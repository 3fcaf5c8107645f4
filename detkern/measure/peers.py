"""Who computes the products of the GEMM benchmark: detkern, and what it is compared with."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from . import cublaslt, timing
from .shapes import Product

__all__ = ["NAMES", "Peer", "Unserved", "detkern_call", "here"]

Call = Callable[[], Any]


class Unserved(Exception):
    """A peer does not compute a product."""


@dataclass(frozen=True)
class Peer:
    """bind: from a product and its a, b and out, as they lie in memory (`Product.trans_a` and `trans_b` say how they
    are meant), to the call; raises Unserved. detkern's takes `accumulate` too. setting: what holds while it is called
    and captured.
    alternatives: of a peer that has several ways to compute a product, instead of bind: from the product and all sets
    of its a, b and out, for each way the calls.
    """

    name: str
    bind: Callable[..., Call]
    setting: Callable[[Product], AbstractContextManager[Any]] = lambda product: contextlib.nullcontext()
    alternatives: Callable[[Product, Sequence[tuple[Any, Any, Any]]], Sequence[Sequence[Call]]] | None = None

    def calls(self, device: timing.Device, product: Product, sets: Sequence[tuple[Any, Any, Any]]) -> Sequence[Call]:
        """The call for each set of a, b and out; of alternatives those that are fastest."""
        if self.alternatives is None:
            return [self.bind(product, *one) for one in sets]
        found = self.alternatives(product, sets)
        return found[timing.fastest(device, found)]


def _views(product: Product, a: Any, b: Any) -> tuple[Any, Any]:
    return a.t() if product.trans_a else a, b.t() if product.trans_b else b


def detkern_call(
    product: Product, a: Any, b: Any, out: Any, backend: str | None = None, accumulate: bool = False
) -> Call:
    """detkern's call of a product."""
    from .. import gemm

    return functools.partial(
        gemm, a, b, trans_a=product.trans_a, trans_b=product.trans_b, out=out, contract=product.contract,
        backend=backend, accumulate=accumulate,
    )  # fmt: skip


@contextlib.contextmanager
def _independent(product: Product) -> Iterator[None]:
    """detkern with programmatic dependent launch off."""
    from .. import config

    before = config.dependent_launch
    config.dependent_launch = False
    try:
        yield
    finally:
        config.dependent_launch = before


def _cublas(product: Product, a: Any, b: Any, out: Any) -> Call:
    import torch

    left, right = _views(product, a, b)
    return functools.partial(torch.matmul, left, right, out=out)


@contextlib.contextmanager
def _no_split(product: Product) -> Iterator[None]:
    """PyTorch with split-K switched off: the pair (reduced precision, split-K) of its matmul settings. It takes effect
    in cuBLASLt, by a reduction scheme of none, and PyTorch refuses it with plain cuBLAS."""
    import torch

    matmul = torch.backends.cuda.matmul
    setting = f"allow_{'bf16' if product.dtype == 'bfloat16' else 'fp16'}_reduced_precision_reduction"
    reduction, split = getattr(matmul, setting), getattr(matmul, f"{setting}_split_k")
    library = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    setattr(matmul, setting, (False, False))
    try:
        yield
    finally:
        setattr(matmul, setting, (reduction, split))
        torch.backends.cuda.preferred_blas_library(library)


def _deep_gemm(product: Product, a: Any, b: Any, out: Any) -> Call:
    """DeepGEMM's product of [M, K] and [N, K]; it takes either operand in columns too, and bf16 alone."""
    import deep_gemm

    if product.dtype != "bfloat16":
        raise Unserved(f"DeepGEMM has no product of {product.dtype}")
    left, right = _views(product, a, b)
    return functools.partial(deep_gemm.bf16_gemm_nt, left, right.t(), out)


@functools.cache
def _sgemm_bi_engine() -> Any:
    import sgemm_bi

    return sgemm_bi.Engine(0)


def _sgemm_bi(product: Product, a: Any, b: Any, out: Any) -> Call:
    """sgemm-bi with tensor cores. It keeps weights as [K, N]: the copy is made here, outside what is timed."""
    import torch

    m, n, k = product.m, product.layer.n, product.layer.k
    if product.op == "db":
        raise Unserved("sgemm-bi's gradient of a weight is added to a float32 array, another product than this one")
    weight = b.t().contiguous()
    engine = _sgemm_bi_engine()
    # It cannot allocate in a capture; this is its own formula for what it may need.
    engine.presize_upcast_scratch(max(m * k, m * n), max(k * n, m * k), max(m * n, m * k))
    forward = product.op == "forward"

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        sizes = (m, k, n)
        if forward:
            engine.forward((out.data_ptr(), a.data_ptr(), weight.data_ptr(), None), sizes, product.dtype, stream, True)
        else:
            engine.backward_dx((out.data_ptr(), a.data_ptr(), weight.data_ptr()), sizes, product.dtype, stream, True)

    return call


def _one_of_a_list(product: Product, a: Any, b: Any, out: Any) -> Call:
    """cuBLASLt's first algorithm."""
    return cublaslt.alternatives(product, [(a, b, out)])[0][0]


def _vllm_triton(product: Product, a: Any, b: Any, out: Any) -> Call:
    from . import persistent_triton

    return persistent_triton.call(*_views(product, a, b), out)


_PEERS = {
    "cublas": Peer("cublas", _cublas),
    "detkern": Peer("detkern", detkern_call),
    "cublas_no_split": Peer("cublas_no_split", _cublas, _no_split),
    "cublaslt": Peer("cublaslt", _one_of_a_list, alternatives=cublaslt.alternatives),
    "detkern_independent": Peer("detkern_independent", detkern_call, _independent),
    "triton": Peer("triton", functools.partial(detkern_call, backend="triton")),
    "vllm_triton": Peer("vllm_triton", _vllm_triton),
    "deep_gemm": Peer("deep_gemm", _deep_gemm),
    "sgemm_bi": Peer("sgemm_bi", _sgemm_bi),
}
NAMES = tuple(_PEERS)


def _missing(name: str) -> str | None:
    """Why a peer is not here."""
    if name == "cublas_no_split":
        import torch

        if not hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k"):
            return f"PyTorch {torch.__version__} cannot switch split-K off"
    if name in ("deep_gemm", "sgemm_bi"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AssertionError, AttributeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    elif name == "cublaslt":
        return cublaslt.missing()
    elif name == "vllm_triton":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
    elif name == "detkern_independent":
        from .. import config

        if not hasattr(config, "dependent_launch"):
            return "detkern.config has no dependent_launch"
    elif name == "triton":
        from ..dispatch import registry

        if name not in registry.backend_names():
            return "detkern has no backend called triton"
    return None


def here(names: Iterable[str]) -> tuple[list[Peer], dict[str, str]]:
    """Those of the named peers that can be called, cublas first and detkern next, and why the others cannot."""
    wanted = ["detkern", "cublas", *names]
    missing = {name: reason for name in wanted if (reason := _missing(name))}
    return [peer for name, peer in _PEERS.items() if name in wanted and name not in missing], missing
