"""cuBLASLt's own list of algorithms for a product, each as a call: what the best of it takes is what cuBLAS could.

The library is the one that PyTorch has loaded. Matrices are column-major there, so the product of row-major ones is
computed transposed: out.T = op(b).T @ op(a).T. Names and numbers are those of cublasLt.h (cuBLAS Library User Guide,
"Using the cuBLASLt API"), which are the same in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from .shapes import Product

__all__ = ["REQUESTED", "alternatives", "library", "missing"]

REQUESTED = 16  # algorithms
WORKSPACE_BYTES = 32 << 20  # what PyTorch gives cuBLASLt on Hopper

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")

_SUCCESS = 0
_COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F
_R_32F = 0  # CUDA_R_32F
_TYPES = {"bfloat16": 14, "float16": 2}  # CUDA_R_16BF, CUDA_R_16F
_DESC_TRANSA, _DESC_TRANSB = 3, 4  # CUBLASLT_MATMUL_DESC_TRANSA, _TRANSB
_OP_N, _OP_T = 0, 1
_PREF_MAX_WORKSPACE_BYTES = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES


class _Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algo", _Algo), ("workspace_size", ctypes.c_size_t), ("state", ctypes.c_int), ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class CublasLtError(RuntimeError):
    """A call of the library that failed."""


@functools.cache
def library() -> Any:
    """The library. Raises OSError where there is none."""
    import torch

    assert torch  # which loads it
    errors = []
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
    raise OSError("; ".join(errors))


def missing() -> str | None:
    """Why it cannot be called here."""
    try:
        library()
    except OSError as error:
        return f"cuBLASLt is not installed ({error})"
    return None


def _check(what: str, status: int) -> None:
    if status != _SUCCESS:
        raise CublasLtError(f"{what}: status {status}")


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(library(), name)(*arguments))


def _made(name: str, *arguments: Any) -> ctypes.c_void_p:
    """What a function that creates something puts at its first argument."""
    found = ctypes.c_void_p()
    _call(name, ctypes.byref(found), *arguments)
    return found


@functools.cache
def _handle() -> ctypes.c_void_p:
    return _made("cublasLtCreate")


@functools.cache
def _workspace() -> Any:
    import torch

    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _set(setter: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(setter, target, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class _Description:
    """A product for the library: its first operand is b, its second a, its result out, each transposed."""

    _KINDS: ClassVar = {
        "matmul": "MatmulDesc", "first": "MatrixLayout", "second": "MatrixLayout", "result": "MatrixLayout",
        "preference": "MatmulPreference",
    }  # fmt: skip

    def __init__(self, product: Product) -> None:
        self._library = library()
        kind = ctypes.c_int(_TYPES[product.dtype])

        def layout(name: str) -> ctypes.c_void_p:
            rows, columns = product.matrix(name)  # row-major; column-major it is [columns, rows]
            return _made(
                "cublasLtMatrixLayoutCreate",
                kind,
                ctypes.c_uint64(columns),
                ctypes.c_uint64(rows),
                ctypes.c_int64(columns),
            )

        self.matmul = _made("cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_R_32F))
        for attribute, transposed in ((_DESC_TRANSA, product.trans_b), (_DESC_TRANSB, product.trans_a)):
            operation = ctypes.c_int32(_OP_T if transposed else _OP_N)
            _set("cublasLtMatmulDescSetAttribute", self.matmul, attribute, operation)
        a, b = product.operands
        self.first, self.second, self.result = layout(b), layout(a), layout("out")
        self.preference = _made("cublasLtMatmulPreferenceCreate")
        size = ctypes.c_uint64(WORKSPACE_BYTES)
        _set("cublasLtMatmulPreferenceSetAttribute", self.preference, _PREF_MAX_WORKSPACE_BYTES, size)

    def algorithms(self) -> list[_Algo]:
        """Those that the library's heuristics name, in their order."""
        found = (_Result * REQUESTED)()
        count = ctypes.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic", _handle(), self.matmul, self.first, self.second, self.result, self.result,
            self.preference, ctypes.c_int(REQUESTED), found, ctypes.byref(count),
        )  # fmt: skip
        return [one.algo for one in found[: count.value] if one.state == _SUCCESS]

    def __del__(self) -> None:
        for what, kind in self._KINDS.items():
            if hasattr(self, what):
                getattr(self._library, f"cublasLt{kind}Destroy")(getattr(self, what))


def alternatives(product: Product, sets: Sequence[tuple[Any, Any, Any]]) -> list[list[Callable[[], None]]]:
    """For each algorithm the call for each set of a, b and out, as `Product` has them, on PyTorch's current stream.

    Raises CublasLtError where the library has none for the product.
    """
    import torch

    described = _Description(product)
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    workspace = ctypes.c_void_p(_workspace().data_ptr())

    def call(algo: _Algo, first: ctypes.c_void_p, second: ctypes.c_void_p, result: ctypes.c_void_p) -> None:
        _call(
            "cublasLtMatmul", _handle(), described.matmul, ctypes.byref(one), first, described.first, second,
            described.second, ctypes.byref(zero), result, described.result, result, described.result,
            ctypes.byref(algo),
            workspace, ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    pointers = [tuple(ctypes.c_void_p(tensor.data_ptr()) for tensor in (b, a, out)) for a, b, out in sets]
    return [[functools.partial(call, algo, *three) for three in pointers] for algo in described.algorithms()]
