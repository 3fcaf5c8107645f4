"""backend="native": each framework's own matmul, on the caller's memory."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import FRAMEWORKS, framework, same

import detkern
from detkern.dispatch import registry
from detkern.dispatch.native import BACKEND
from detkern.operations.gemm.operation import GEMM
from detkern.tensors import Device
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType


def frameworks_matmul(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The framework's matmul, called by hand."""
    f = framework(name)
    if name == "torch":
        import torch

        return f.read(torch.matmul(f.make(a), f.make(b)))
    if name == "jax":
        import jax.numpy as jnp

        return f.read(jnp.matmul(f.make(a), f.make(b)))
    if a.dtype == BF16.numpy:
        return np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
    return np.matmul(a, b)


@pytest.mark.parametrize("name", list(FRAMEWORKS))
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_it_is_the_frameworks_own_product(name: str, dtype: DType) -> None:
    f = framework(name)
    a, b = operands.generate("normal", dtype, (2, 5, 300), 1), operands.generate("normal", dtype, (300, 7), 2)
    result = detkern.gemm(f.make(a), f.make(b), backend="native")
    # The batch is merged into M before the framework sees it.
    assert same(f.read(result), frameworks_matmul(name, a.reshape(10, 300), b).reshape(2, 5, 7))


@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_bias_accumulate_layouts_and_types(name: str) -> None:
    f = framework(name)
    a = operands.generate("integers", F32, (3, 4, 6), 1)
    b = operands.generate("integers", F32, (3, 6, 5), 2)
    bias = operands.generate("integers", F32, (5,), 3)
    exact = np.matmul(a, b)
    run = lambda *x, **k: f.read(detkern.gemm(*x, backend="native", **k))
    assert (run(f.make(a), f.make(b), bias=f.make(bias)) == exact + bias).all()
    swapped = run(f.make(a.swapaxes(1, 2).copy()), f.make(b.swapaxes(1, 2).copy()), trans_a=True, trans_b=True)
    assert (swapped == exact).all()
    low = run(f.make(a), f.make(b), out_dtype="bfloat16")
    assert same(low, exact.astype(BF16.numpy))
    assert (run(f.make(a[0]), f.make(b[0, :, 0])) == exact[0, :, 0]).all()
    assert run(f.make(a[:, :, :0].copy()), f.make(b[:, :0].copy())).tolist() == np.zeros((3, 4, 5)).tolist()
    if f.writable:
        out = f.make(np.full((3, 4, 5), 100, np.float32))
        detkern.gemm(f.make(a), f.make(b), out=out, accumulate=True, backend="native")
        assert (f.read(out) == exact + 100).all()
    out = np.full((3, 4, 5), 100, np.float32)
    detkern.gemm(f.make(a), f.make(b), out=out, accumulate=True, backend="native")
    assert (out == exact + 100).all()


def test_strided_and_reversed_operands() -> None:
    a = operands.generate("integers", F32, (8, 12), 1)
    b = operands.generate("integers", F32, (6, 5), 2)
    out = np.zeros((4, 10), np.float32)[:, ::-2]
    detkern.gemm(a[::-2, ::2], b, out=out, backend="native")
    assert (out == a[::-2, ::2] @ b).all()
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.from_numpy(a)[1::2, 1::2]
    assert (detkern.gemm(x, torch.from_numpy(b), backend="native").numpy() == a[1::2, 1::2] @ b).all()
    mixed = np.zeros((4, 5), np.float32)
    detkern.gemm(x, torch.from_numpy(b), out=mixed, backend="native")
    assert (mixed == a[1::2, 1::2] @ b).all()


def test_operands_of_two_frameworks_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(detkern.DeviceError, match="one framework, these are of memory and torch"):
        detkern.gemm(np.ones((2, 2), np.float32), torch.ones(2, 2), backend="native")


def test_what_it_says_of_itself() -> None:
    assert BACKEND.deterministic is False
    assert registry.computed(BACKEND, GEMM, Device("cpu")) == []
    assert registry.operations(BACKEND) == ["gemm"]
    assert "ascend" in (BACKEND.unavailable(Device("ascend")) or "")
    assert BACKEND.unavailable(Device("cuda")) is None
