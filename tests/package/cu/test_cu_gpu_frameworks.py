"""The public calls on device arrays of every framework, and the self-check run for real."""

from __future__ import annotations

import functools
from typing import Any

import cu_device
import numpy as np
import pytest
from cu_device import replay

import detkern
from detkern.cu import implementation
from detkern.cu.device import describe
from detkern.dispatch import registry, selfcheck
from detkern.operations.gemm.operation import GEMM
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import FMA, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_all()


@functools.cache
def _host(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    return operands.generate("normal", dtype, (45, 320), 1), operands.generate("normal", dtype, (320, 70), 2)


def _bits(array: Any) -> np.ndarray:
    """The bits of a result of any framework."""
    if type(array).__module__.startswith("torch"):
        import torch

        integer = {2: torch.int16, 4: torch.int32}[array.element_size()]
        return array.view(integer).cpu().numpy().view(f"u{array.element_size()}")
    if hasattr(array, "get"):
        array = array.get()
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def _torch(array: np.ndarray) -> Any:
    import torch

    integers = torch.from_numpy(array.view(f"i{array.dtype.itemsize}")).cuda()
    return integers.view(getattr(torch, array.dtype.name))


def _jax(array: np.ndarray) -> Any:
    import jax

    return jax.device_put(array, jax.devices("gpu")[0])


def _cupy(array: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(array)


class _Exporter:
    """An array of no known framework: DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


MAKERS = {"torch": _torch, "jax": _jax, "cupy": _cupy, "dlpack": lambda array: _Exporter(_torch(array))}


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda dtype: dtype.short)
@pytest.mark.parametrize("name", MAKERS)
def test_arrays_of_a_framework(name: str, dtype: DType) -> None:
    pytest.importorskip("torch" if name == "dlpack" else name)
    make = MAKERS[name]
    a, b = _host(dtype)
    try:
        device_a, device_b, bias = make(a), make(b), make(np.ascontiguousarray(a[0, :70]))
    except (TypeError, ValueError, RuntimeError) as error:
        if name == "cupy" and dtype == BF16:
            pytest.skip(f"gpu: this CuPy has no bfloat16 ({error})")
        raise
    for contract in (FMA, MMA16, TREE):
        if dtype not in contract.operands:
            continue
        expected = replay(contract, a, b)
        result = detkern.gemm(device_a, device_b, contract=contract.name)
        assert (_bits(result) == expected).all()
        with_bias = detkern.gemm(device_a, device_b, bias=bias, contract=contract.name, out_dtype="float32")
        assert (_bits(with_bias) == replay(contract, a, b, bias=a[0, :70], out_dtype=F32)).all()


def test_the_result_is_of_the_framework_of_a() -> None:
    torch = pytest.importorskip("torch")
    a, b = _host(F32)
    result = detkern.linear(_torch(a), _cupy(np.ascontiguousarray(b.T)))
    assert isinstance(result, torch.Tensor)
    assert result.device.type == "cuda"
    assert (_bits(result) == replay(FMA, a, b)).all()


def test_views_of_torch_tensors_are_read_in_place() -> None:
    """Transposed, sliced, broadcast and unaligned views, a batch, and the gradients' products."""
    torch = pytest.importorskip("torch")
    a, b = _host(BF16)
    device_a, device_b = _torch(a), _torch(b)
    expected = replay(MMA16, a, b)
    assert (_bits(detkern.gemm(device_a.t().contiguous(), device_b, trans_a=True)) == expected).all()
    assert (_bits(detkern.gemm(device_a, device_b.t().contiguous().t())) == expected).all()
    assert (_bits(detkern.gemm(device_a[3:, 1:], device_b[1:, 5:])) == replay(MMA16, a[3:, 1:], b[1:, 5:])).all()
    row = device_a[:1].expand(9, -1)
    assert (_bits(detkern.gemm(row, device_b)) == np.broadcast_to(expected[:1], (9, 70))).all()
    batch = torch.stack([device_a, device_a.flip(0)])
    assert (_bits(detkern.gemm(batch, device_b)) == np.stack([expected, expected[::-1]])).all()
    out = torch.zeros(45, 70, device="cuda")
    for start in range(0, 320, 64):
        detkern.gemm(device_a[:, start : start + 64], device_b[start : start + 64], out=out, accumulate=True)
    assert (_bits(out) == replay(MMA16, a, b, out_dtype=F32)).all()
    dc = _torch(expected.view(BF16.numpy))
    host_dc = expected.view(BF16.numpy)
    assert (_bits(detkern.gemm_da(dc, device_b)) == replay(MMA16, host_dc, b.T)).all()
    assert (_bits(detkern.gemm_db(device_a, dc)) == replay(MMA16, a.T, host_dc)).all()


def test_explain_says_what_would_run() -> None:
    torch = pytest.importorskip("torch")
    a = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda")
    explanation = detkern.explain(a, a)
    assert explanation.backend == "cuda"
    assert explanation.contract == "mma16"
    assert "mma.cu" in explanation.kernel
    assert explanation.copies == ()


@pytest.mark.parametrize(("contract", "dtype"), [(FMA, F32), (MMA16, F16), (TREE, BF16), (TREE_MMA16, BF16)], ids=str)
def test_the_self_check_passes(contract: Contract, dtype: DType) -> None:
    """What decides on devices that nobody has seen, on one that was seen."""
    products = registry.load("cuda").implementations[GEMM.problem]
    compute = functools.partial(implementation.computed, describe(0), GEMM, products)
    outcome = selfcheck.check(GEMM, contract.name, dtype, compute)
    assert outcome.differing == 0, outcome
    assert outcome.elements > 100_000
