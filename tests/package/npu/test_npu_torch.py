"""Training on the emulated NPU libraries: detkern.torch on CPU tensors with the backend named, every bit the CPU
backend's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import emulated
import pytest
from frameworks import same_bits, tensor

import detkern
from detkern.abi.library import Library
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

torch = pytest.importorskip("torch", reason="torch is not installed")

# The entry points of get_op("det_gemm") that take a product's two operands, with the shapes of these and of the result.
ENTRY_POINTS = {
    "__call__": ((31, 40), (40, 21), (31, 21)),
    "fwd": ((31, 40), (40, 21), (31, 21)),
    "fwd_rhs_transposed": ((31, 40), (21, 40), (31, 21)),
    "fwd_fp32": ((31, 40), (40, 21), (31, 21)),
    "forward_fp32": ((2, 31, 40), (40, 21), (2, 31, 21)),
    "da": ((31, 21), (40, 21), (31, 40)),
    "db": ((31, 40), (31, 21), (40, 21)),
    "db_transposed": ((31, 40), (31, 21), (21, 40)),
    "linear": ((3, 31, 40), (21, 40), (3, 31, 21)),
}

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
    with emulated.named():
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


@SUBJECTS
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_the_classic_operator_and_its_gradients(
    backend: str, contract: str, dtype: DType, entry_point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """get_op("det_gemm") records gradients, and these too are the library's products: no other library is called."""
    left_shape, right_shape, shape = ENTRY_POINTS[entry_point]
    called: list[str] = []
    real = Library.run

    def run(library: Library, operation: int, descriptor: Any) -> None:
        if operation == 1:
            called.append(library.name)
        real(library, operation, descriptor)

    monkeypatch.setattr(Library, "run", run)
    results = []
    for name in (backend, "cpu"):
        called.clear()
        op = detkern.get_op("det_gemm", contract=contract, backend=name)
        left, right = (
            tensor("normal", dtype, left_shape, 13, grad=True),
            tensor("normal", dtype, right_shape, 14, grad=True),
        )
        result = getattr(op, entry_point)(left, right)
        assert tuple(result.shape) == shape
        out = F32 if "fp32" in entry_point else dtype
        assert result.dtype == getattr(torch, out.name)
        result.backward(tensor("normal", out, shape, 15))
        assert len(called) == 3
        assert all(library.split()[0].rstrip(",") == name for library in called), called
        results.append([result, left.grad, right.grad])
    for ours, cpus in zip(*results, strict=True):
        assert same_bits(ours, cpus)


@pytest.mark.parametrize("backend", ["musa", "ascend"])
def test_the_classic_operators_own_arithmetic(backend: str) -> None:
    """tree, which these have, not tree-mma16; and fma for forward_accum_fp32, of float32 on MUSA alone."""
    op = detkern.get_op("det_gemm", backend=backend)
    a, b = tensor("normal", BF16, (31, 70), 16, grad=True), tensor("normal", BF16, (70, 21), 17, grad=True)
    assert same_bits(op(a, b), detkern.gemm(a.detach(), b.detach(), contract="tree", backend="cpu"))
    with pytest.raises(detkern.ContractUnsupported, match=f"tree-mma16 has no kernel here; {backend} on cpu has fma "):
        op(a, b, contract="tree-mma16")
    gathered = []
    for name in (backend, "cpu"):
        a.grad = b.grad = None
        result = detkern.get_op("det_gemm", backend=name).forward_accum_fp32(a, b)
        result.backward(tensor("normal", BF16, (31, 21), 18))
        gathered.append([result, a.grad, b.grad])
    for ours, cpus in zip(*gathered, strict=True):
        assert same_bits(ours, cpus)
    wide = [x.detach().float() for x in (a, b)]
    if backend == "musa":
        assert same_bits(op.forward_accum_fp32(*wide), detkern.gemm(*wide, contract="fma", backend="cpu"))
    else:
        with pytest.raises(
            detkern.ContractUnsupported,
            match=r"fma for f32 has no kernel here; ascend on cpu has fma \(f16, bf16\), tree",
        ):
            op.forward_accum_fp32(*wide)


@pytest.mark.parametrize(("backend", "dtype"), [("musa", F32), ("musa", BF16), ("ascend", F16)], ids=str)
def test_the_engine_on_raw_pointers(backend: str, dtype: DType) -> None:
    outs = []
    for name in (backend, "cpu"):
        engine = detkern.Engine("cpu", backend=name)
        x, w, dy = (
            tensor("normal", dtype, shape, seed) for seed, shape in enumerate([(31, 40), (40, 21), (31, 21)], 19)
        )
        out, dx = torch.empty_like(dy), torch.empty_like(x)
        dw = torch.ones((40, 21))
        sizes = (31, 40, 21)
        engine.forward((out.data_ptr(), x.data_ptr(), w.data_ptr(), None), sizes, dtype.name, 0)
        engine.backward_dw((dw.data_ptr(), dy.data_ptr(), x.data_ptr()), sizes, dtype.name, 0)
        engine.backward_dx((dx.data_ptr(), dy.data_ptr(), w.data_ptr()), sizes, dtype.name, 0)
        outs.append([out, dw, dx])
    for ours, cpus in zip(*outs, strict=True):
        assert same_bits(ours, cpus)
