"""Training on the emulated NPU libraries: detkern.torch on CPU tensors with the backend named, every bit the CPU backend's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from emulated import library_path
from frameworks import same_bits, tensor

import detkern
from detkern.dtypes import BF16, F16, F32, DType
from detkern.npu import ascend, musa

torch = pytest.importorskip("torch", reason="torch is not installed")

SUBJECTS = pytest.mark.parametrize(
    ("backend", "contract", "dtype"),
    [
        ("musa", "fma", F32),
        ("musa", "fma", BF16),
        ("musa", "tree", F16),
        ("ascend", "fma", F16),
        ("ascend", "tree", BF16),
    ],
    ids=str,
)


@pytest.fixture(autouse=True, scope="module")
def libraries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for platform in (musa.PLATFORM, ascend.PLATFORM):
            patch.setenv(platform.variable, str(library_path(platform.name)))
        yield


def trained(backend: str, contract: str, dtype: DType, out_dtype: Any) -> list[Any]:
    """One step of a linear layer and a product: outputs, and the gradients of all operands."""
    import detkern.torch

    x, weight = tensor("normal", dtype, (3, 17, 33), 1, grad=True), tensor("normal", dtype, (20, 33), 2, grad=True)
    bias, right = tensor("normal", F32, (20,), 3, grad=True), tensor("normal", dtype, (20, 9), 4, grad=True)
    options = {"contract": contract, "backend": backend}
    hidden = detkern.torch.linear(x, weight, bias, **options)
    result = detkern.torch.matmul(hidden, right, out_dtype=out_dtype, **options)
    result.backward(tensor("normal", dtype if out_dtype is None else F32, (3, 17, 9), 5))
    return [hidden, result, x.grad, weight.grad, bias.grad, right.grad]


@SUBJECTS
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["operand output", "float32 output"])
def test_outputs_and_gradients_have_the_cpus_bits(backend: str, contract: str, dtype: DType, out_dtype: Any) -> None:
    ours, cpus = (trained(name, contract, dtype, out_dtype) for name in (backend, "cpu"))
    for index, (left, right) in enumerate(zip(ours, cpus, strict=True)):
        assert same_bits(left, right), index


@SUBJECTS
def test_gradients_gathered_in_float32(backend: str, contract: str, dtype: DType) -> None:
    import detkern.torch

    results = []
    for name in (backend, "cpu"):
        x = tensor("normal", dtype, (24, 33), 6, grad=True)
        weight, bias = tensor("normal", dtype, (20, 33), 7, grad=True), tensor("normal", dtype, (20,), 8, grad=True)
        for parameter in (weight, bias):
            parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
        dy = tensor("normal", dtype, (24, 20), 9)
        for rows in (slice(0, 10), slice(10, 24)):
            y = detkern.torch.linear(x[rows], weight, bias, accumulate=True, contract=contract, backend=name)
            y.backward(dy[rows])
        results.append([weight.main_grad, bias.main_grad, x.grad])
    for left, right in zip(*results, strict=True):
        assert same_bits(left, right)


@SUBJECTS
def test_float32_gradients_in_both_directions(backend: str, contract: str, dtype: DType) -> None:
    """The products of a backward themselves, kept in float32: da, and db in both layouts."""
    a, b, dc = (tensor("wide", dtype, shape, seed) for seed, shape in enumerate([(31, 40), (40, 21), (31, 21)], 10))
    options = {"contract": contract, "out_dtype": "float32"}
    for call in (
        lambda name: detkern.gemm_da(dc, b, backend=name, **options),
        lambda name: detkern.gemm_db(a, dc, backend=name, **options),
        lambda name: detkern.gemm_db(a, dc, transposed=True, backend=name, **options),
    ):
        assert same_bits(call(backend), call("cpu"))
