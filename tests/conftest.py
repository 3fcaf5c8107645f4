"""What all tests share: the `gpu` marker skips itself, saying so, where no CUDA device is; the two CPU implementations
of the contracts under one signature."""

from __future__ import annotations

import os
from functools import cache

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before PyTorch comes in: threads of OpenMP that wait for one another by spinning take the cores of the other
    # workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

import detkern
from detkern.cpu import backend
from detkern.operations.block_scaled.replay import block_scaled_gemm as replayed_block_scaled
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary.contracts import Contract
from detkern.vocabulary.dtypes import F32, DType, from_numpy


@cache
def missing_gpu() -> str | None:
    """Why no CUDA device can be used here, or None where one can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return None if count else "no device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := missing_gpu()):
            item.add_marker(pytest.mark.skip(reason=f"gpu: {reason}"))


class NumpyImplementation:
    """The contracts in NumPy."""

    gemm = staticmethod(numpy_replay.gemm)
    block_scaled_gemm = staticmethod(replayed_block_scaled)


class CppImplementation:
    """The contracts in the C++ library, through the public functions; numpy_replay's signatures."""

    @staticmethod
    def gemm(
        contract: Contract,
        a: np.ndarray,
        b: np.ndarray,
        *,
        initial: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        out_dtype: DType | None = None,
    ) -> np.ndarray:
        options = {"bias": bias, "contract": contract.name, "backend": "cpu"}
        if initial is not None:
            return detkern.gemm(a, b, out=initial.copy(), accumulate=True, **options)
        return detkern.gemm(a, b, out_dtype=(out_dtype or from_numpy(a.dtype)).numpy, **options)

    @staticmethod
    def block_scaled_gemm(
        a: np.ndarray,
        scale_a: np.ndarray,
        b: np.ndarray,
        scale_b: np.ndarray,
        *,
        initial: np.ndarray | None = None,
        out_dtype: DType = F32,
    ) -> np.ndarray:
        from detkern.api import block_scaled_gemm

        if initial is not None:
            out = initial.copy()
            return block_scaled_gemm(a, scale_a, b, scale_b, out=out, accumulate=True, backend="cpu")
        return block_scaled_gemm(a, scale_a, b, scale_b, out_dtype=out_dtype.numpy, backend="cpu")


@pytest.fixture(scope="session", params=["numpy", "c++"])
def implementation(request: pytest.FixtureRequest) -> type[NumpyImplementation | CppImplementation]:
    """Each CPU implementation in turn. The C++ library must build where the tests run: its absence is an error here."""
    if request.param == "numpy":
        return NumpyImplementation
    assert backend.library() is not None
    return CppImplementation


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where PyTorch's tensors are: a test that uses it is one for the CPU and one for the GPU suite."""
    name: str = request.param
    return name
