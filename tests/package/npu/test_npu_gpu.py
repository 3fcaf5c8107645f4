"""npu/musa/det_gemm.mu compiled by nvcc against a shim that calls musa* cuda*, on an NVIDIA GPU: the `cuda` backend's
bits."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from emulated import library_for_cuda, nvcc

import detkern
from detkern.abi import mirror
from detkern.abi.descriptors import column_sum_descriptors, gemm_descriptors
from detkern.abi.library import Library
from detkern.operations.bias_gradient.problem import column_sum_problem
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu

PAIRS = [(CONTRACTS["fma"], F32), (CONTRACTS["fma"], F16), (CONTRACTS["fma"], BF16),
         (CONTRACTS["tree"], F16), (CONTRACTS["tree"], BF16)]  # fmt: skip
NAMES = [f"{contract}-{dtype.short}" for contract, dtype in PAIRS]


@pytest.fixture(scope="module")
def library() -> Library:
    import cupy

    if nvcc() is None:
        pytest.skip("gpu: nvcc is not installed")
    return Library(library_for_cuda(f"sm_{cupy.cuda.Device().compute_capability}"))


def on_device(array: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(np.ascontiguousarray(array).view(f"u{array.itemsize}")).view(array.dtype)


def empty(like: Any) -> Any:
    """Of the same shape and type; zeros."""
    import cupy

    return cupy.zeros(like.shape, f"u{like.dtype.itemsize}").view(like.dtype)


def bits(array: Any) -> Any:
    return array.view(f"u{array.dtype.itemsize}")


def view(array: Any) -> TensorView:
    strides = tuple(stride // array.dtype.itemsize for stride in array.strides)
    dtype = next(d for d in (F32, F16, BF16) if d.numpy == array.dtype)
    return TensorView(array.data.ptr, array.shape, strides, dtype, Device("cuda", 0), False, array)


def run(
    library: Library, contract: Contract, a: Any, b: Any, out: Any, bias: Any = None, accumulate: bool = False
) -> Any:
    """The library's product on CuPy's current stream, through the C ABI."""
    import cupy

    views = [view(a), view(b), view(out)]
    problem = gemm_problem(contract, *views, None if bias is None else view(bias), accumulate)
    ((template, _),) = gemm_descriptors(problem)
    descriptor = mirror.GemmDescriptor.from_buffer_copy(template)
    descriptor.a, descriptor.b, descriptor.out = (v.pointer for v in views)
    descriptor.bias = None if bias is None else bias.data.ptr
    descriptor.stream = cupy.cuda.get_current_stream().ptr
    size = library.scratch(1, descriptor)
    scratch = cupy.empty(size, np.uint8)
    descriptor.scratch, descriptor.scratch_bytes = scratch.data.ptr, size
    library.run(1, descriptor)
    cupy.cuda.get_current_stream().synchronize()
    return out


def test_the_library_sees_the_gpu(library: Library) -> None:
    import cupy

    assert library.host_memory is False
    assert library.device_count() == cupy.cuda.runtime.getDeviceCount()
    about = library.device(0)
    assert about.units == cupy.cuda.Device(0).attributes["MultiProcessorCount"]
    assert about.name.decode() == cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    data = np.arange(1000, dtype=np.int32)
    back = np.zeros_like(data)
    with library.memory(0, data.nbytes) as pointer:
        library.copy(0, pointer, data.ctypes.data, data.nbytes, mirror.TO_DEVICE)
        library.copy(0, back.ctypes.data, pointer, data.nbytes, mirror.TO_HOST)
    assert (back == data).all()


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=NAMES)
def test_every_kind_of_operands_and_odd_sizes(library: Library, contract: Contract, dtype: DType) -> None:
    shapes = ((1, 1, 1), (5, 33, 19), (130, 515, 70), (257, 64, 129), (3, 4100, 40))
    for (m, k, n), kind in product(shapes, operands.KINDS):
        a = on_device(operands.generate(kind, dtype, (m, k), 1))
        b = on_device(operands.generate(kind, dtype, (k, n), 2))
        start = on_device(operands.generate(kind, F32, (m, n), 3))
        for out_dtype in ("float32", dtype.name):
            want = detkern.gemm(a, b, contract=contract.name, out_dtype=out_dtype, backend="cuda")
            got = run(library, contract, a, b, empty(want))
            assert (bits(got) == bits(want)).all(), (m, k, n, kind, out_dtype)
        want = detkern.gemm(a, b, contract=contract.name, out=start.copy(), accumulate=True, backend="cuda")
        got = run(library, contract, a, b, start.copy(), accumulate=True)
        assert (bits(got) == bits(want)).all(), (m, k, n, kind, "accumulate")


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=NAMES)
def test_entry_points_layouts_and_bias(library: Library, contract: Contract, dtype: DType) -> None:
    m, k, n = 200, 333, 170
    host_a, host_b = operands.generate("normal", dtype, (m, k), 4), operands.generate("normal", dtype, (k, n), 5)
    a, b = on_device(host_a), on_device(host_b)
    dc = on_device(operands.generate("normal", dtype, (m, n), 6))
    bias = on_device(operands.generate("normal", F32, (n,), 7))
    weight = on_device(host_b.T)
    spaced = on_device(np.repeat(np.repeat(host_a, 3, axis=1), 2, axis=0))[::2, ::3]
    backwards = on_device(host_a[::-1, ::-1])[::-1, ::-1]
    options = {"contract": contract.name, "backend": "cuda"}
    for out_dtype in ("float32", dtype.name):
        cases = (
            (detkern.gemm(a, b, bias=bias, out_dtype=out_dtype, **options), (a, b, bias)),
            (detkern.linear(a, weight, out_dtype=out_dtype, **options), (a, weight.T, None)),
            (detkern.gemm_da(dc, b, out_dtype=out_dtype, **options), (dc, b.T, None)),
            (detkern.gemm_db(a, dc, out_dtype=out_dtype, **options), (a.T, dc, None)),
            (detkern.gemm_db(a, dc, transposed=True, out_dtype=out_dtype, **options), (dc.T, a, None)),
            (detkern.gemm(a, b, out_dtype=out_dtype, **options), (spaced, b, None)),
            (detkern.gemm(a, b, out_dtype=out_dtype, **options), (backwards, b, None)),
        )
        for number, (want, (left, right, added)) in enumerate(cases):
            got = run(library, contract, left, right, empty(want), added)
            assert (bits(got) == bits(want)).all(), (number, out_dtype)


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=NAMES)
def test_large_products(library: Library, contract: Contract, dtype: DType) -> None:
    a = on_device(operands.generate("normal", dtype, (1030, 2050), 8))
    b = on_device(operands.generate("normal", dtype, (2050, 777), 9))
    want = detkern.gemm(a, b, contract=contract.name, backend="cuda")
    assert (bits(run(library, contract, a, b, empty(want))) == bits(want)).all()
    first = run(library, contract, a[7:8], b, empty(want[7:8]))
    assert (bits(first) == bits(want[7:8])).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda dtype: dtype.short)
def test_the_bias_gradient(library: Library, dtype: DType) -> None:
    import cupy

    for kind, shape in product(operands.KINDS, ((1, 1), (515, 70), (4, 33, 300))):
        dc = on_device(operands.generate(kind, dtype, shape, 10))
        want = detkern.bias_gradient(dc, backend="cuda")
        out = empty(want)
        problem = column_sum_problem(view(dc), view(out), False)
        descriptor = mirror.ColumnSumDescriptor.from_buffer_copy(column_sum_descriptors(problem)[0][0])
        descriptor.dc, descriptor.out = dc.data.ptr, out.data.ptr
        library.run(3, descriptor)
        cupy.cuda.Device().synchronize()
        assert (bits(out) == bits(want)).all(), (kind, shape)
