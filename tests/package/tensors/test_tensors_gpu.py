"""The adapters on a CUDA device: bits, the result's framework and device, and order on streams with slow producers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from frameworks import from_torch, same, to_torch

import detkern
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import get_contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType, from_numpy

pytestmark = pytest.mark.gpu

A, B = operands.generate("normal", BF16, (33, 200), 1), operands.generate("normal", BF16, (200, 40), 2)


def replay(a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
    """By `fma`, which every CUDA device has."""
    return numpy_replay.gemm(get_contract("fma"), np.ascontiguousarray(a), np.ascontiguousarray(b), **options)


def product(a: Any, b: Any, **options: Any) -> Any:
    return detkern.gemm(a, b, contract="fma", **options)


@dataclass(frozen=True)
class OnDevice:
    """make, read: as in frameworks.Framework, on cuda:0. result: what a product of such arrays is.
    stream: a context in which the framework's current stream is another one than the default."""

    make: Callable[[np.ndarray], Any]
    read: Callable[[Any], np.ndarray]
    result: Callable[[], type]
    stream: Callable[[], AbstractContextManager[Any]]
    writable: bool = True


class Interface:
    """A CuPy array seen through __cuda_array_interface__ alone."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class Capsule:
    """A CuPy array seen through DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)


def to_cupy(array: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(array.view(f"u{array.itemsize}")).view(array.dtype)


def from_cupy(array: Any) -> np.ndarray:
    import cupy

    inner = getattr(array, "array", array)
    return cupy.asnumpy(inner.view(f"u{inner.itemsize}")).view(inner.dtype)


def cupy_array() -> type:
    import cupy

    return cupy.ndarray


def cupy_stream() -> AbstractContextManager[Any]:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def torch_tensor() -> type:
    import torch

    return torch.Tensor


def torch_stream() -> AbstractContextManager[Any]:
    import torch

    return torch.cuda.stream(torch.cuda.Stream())


def to_jax(array: np.ndarray) -> Any:
    import jax

    return jax.device_put(array, jax.devices("cuda")[0])


def jax_array() -> type:
    import jax

    return jax.Array


ON_DEVICE = {
    "torch": OnDevice(lambda x: to_torch(x).cuda(), from_torch, torch_tensor, torch_stream),
    "cupy": OnDevice(to_cupy, from_cupy, cupy_array, cupy_stream),
    "jax": OnDevice(to_jax, np.asarray, jax_array, nullcontext, writable=False),
    "dlpack": OnDevice(lambda x: Capsule(to_cupy(x)), from_cupy, cupy_array, cupy_stream),
    # bfloat16 has no type string in this protocol.
    "interface": OnDevice(lambda x: Interface(to_cupy(x)), from_cupy, cupy_array, cupy_stream),
}


def on_device(name: str) -> OnDevice:
    if name in ("torch", "jax"):
        module = pytest.importorskip(name, reason=f"{name} is not installed")
        if name == "torch" and not module.cuda.is_available():
            pytest.skip("gpu: this PyTorch has no CUDA")
        if name == "jax":
            try:
                module.devices("cuda")
            except RuntimeError as error:
                pytest.skip(f"gpu: this JAX has no CUDA ({error})")
    return ON_DEVICE[name]


def types_of(name: str) -> tuple[DType, ...]:
    return (F32, F16) if name == "interface" else (F32, F16, BF16)


@pytest.mark.parametrize("name", list(ON_DEVICE))
@pytest.mark.parametrize("other_stream", [False, True])
def test_bits_and_framework(name: str, other_stream: bool) -> None:
    f = on_device(name)
    with f.stream() if other_stream else nullcontext():
        for dtype in types_of(name):
            a, b = operands.generate("normal", dtype, (33, 200), 1), operands.generate("normal", dtype, (200, 40), 2)
            bias = operands.generate("normal", F32, (40,), 3)
            result = product(f.make(a), f.make(b), bias=f.make(bias))
            assert isinstance(result, f.result())
            assert same(f.read(result), replay(a, b, bias=bias))
            assert same(f.read(product(f.make(a), f.make(b), out_dtype="f32")), replay(a, b, out_dtype=F32))
            assert f.read(product(f.make(a[:0]), f.make(b))).shape == (0, 40)
            if f.writable:
                start = operands.generate("normal", F32, (33, 40), 4)
                out = f.make(start)
                assert product(f.make(a), f.make(b), out=out, accumulate=True) is out
                assert same(f.read(out), replay(a, b, initial=start, out_dtype=F32))


@pytest.mark.parametrize("name", list(ON_DEVICE))
def test_native(name: str) -> None:
    f = on_device(name)
    a, b = operands.generate("integers", F32, (5, 8), 1), operands.generate("integers", F32, (8, 3), 2)
    result = detkern.gemm(f.make(a), f.make(b), backend="native")
    assert isinstance(result, f.result())
    assert (f.read(result) == a @ b).all()


@pytest.mark.parametrize("left", list(ON_DEVICE))
@pytest.mark.parametrize("right", list(ON_DEVICE))
def test_operands_of_two_frameworks(left: str, right: str) -> None:
    f, g = on_device(left), on_device(right)
    a, b = operands.generate("normal", F16, (33, 200), 1), operands.generate("normal", F16, (200, 40), 2)
    for _ in range(5):
        with f.stream(), g.stream():
            result = product(f.make(a), g.make(b))
            assert isinstance(result, f.result())
            assert same(f.read(result), replay(a, b))


def slow(torch: Any) -> None:
    torch.cuda._sleep(50_000_000)  # tens of milliseconds of the device


def test_work_waits_for_a_slow_producer_on_each_stream() -> None:
    on_device("torch")
    import cupy
    import torch

    a, b = to_torch(A).cuda(), to_torch(B).cuda()
    expected = replay(A, B)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    product(a, b)
    with torch.cuda.stream(first):
        x = torch.zeros_like(a)
        slow(torch)
        x.copy_(a)
        result = product(x, b)
        x.zero_()  # after the product, in stream order
        assert same(from_torch(result), expected)
    # b is made late on another framework's stream.
    late = cupy.cuda.Stream(non_blocking=True)
    y = cupy.zeros(B.shape, np.uint16)
    with torch.cuda.stream(torch.cuda.ExternalStream(late.ptr)):
        slow(torch)
    with late, torch.cuda.stream(second):
        y[...] = cupy.asarray(B.view(np.uint16))
        result = product(a, y.view(B.dtype))
        y[...] = 0  # on `late`, which must wait for the product
        assert same(from_torch(result), expected)


def test_memory_freed_right_after_the_call() -> None:
    on_device("torch")
    import torch

    expected = replay(A, B)
    results = []
    for _ in range(50):
        with torch.cuda.stream(torch.cuda.Stream()):
            x, y = to_torch(A).cuda(), to_torch(B).cuda()
            slow(torch) if not results else None
            results.append(product(x, y))
            del x, y
            torch.full(A.shape, 7, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    assert all(same(from_torch(result), expected) for result in results)


def test_a_cupy_array_beyond_its_memory_is_refused() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    small, b = cupy.ones((8, 8), cupy.float32), cupy.ones((8, 3), cupy.float32)
    beyond = cupy.lib.stride_tricks.as_strided(small, (1 << 20, 8), (32, 4))
    with pytest.raises(detkern.ArgumentError, match=r"a \[1048576, 8\] goes beyond its memory"):
        product(beyond, b)
    reversed_rows = small[::-1]
    assert (product(reversed_rows, b) == 8).all()
    small.data.mem.free()
    with pytest.raises(detkern.ArgumentError, match="a has had its memory freed"):
        product(small, b)


def test_jax_orders_both_sides() -> None:
    on_device("jax")
    import jax
    import jax.numpy as jnp

    big = jax.device_put(np.ones((4096, 4096), np.float32), jax.devices("cuda")[0])

    @jax.jit
    def late(x: Any, big: Any) -> Any:
        for _ in range(4):
            big = big @ big * jnp.float32(2.0**-12)
        return x + (big[0, 0] * 0).astype(x.dtype)

    @jax.jit
    def reader(x: Any) -> Any:
        return x * 1

    a, b = to_jax(A), to_jax(B)
    expected = replay(A, B)
    seen = []
    for _ in range(30):
        x, y = late(a, big), late(b, big)
        c = product(x, y)
        del x, y
        seen.append(reader(c))
        del c
        jnp.full(A.shape, 7, jnp.bfloat16)
    assert all(same(np.asarray(c), expected) for c in seen)


def test_capture_and_replay_with_pytorchs_pool() -> None:
    on_device("torch")
    import torch

    a, b = to_torch(A).cuda(), to_torch(B).cuda()
    c = product(a, b)  # kernels are loaded before a capture, those of both products
    product(c[:, :33].contiguous(), c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = product(a, b)
        d = product(c[:, :33].contiguous(), c)
    first = replay(A, B)
    a.zero_()
    graph.replay()
    assert (c == 0).all()
    a.copy_(to_torch(A).cuda())
    graph.replay()
    assert same(from_torch(c), first)
    assert same(from_torch(d), replay(first[:, :33], first))


def test_two_devices_are_refused() -> None:
    on_device("torch")
    import torch

    with pytest.raises(detkern.DeviceError, match="b is bfloat16"):
        product(to_torch(A).cuda(), to_torch(B))
    if torch.cuda.device_count() > 1:
        with pytest.raises(detkern.DeviceError, match="on cuda:1"):
            product(to_torch(A).cuda(), to_torch(B).cuda(1))
        elsewhere = product(to_torch(A).cuda(1), to_torch(B).cuda(1))  # while device 0 is current
        assert elsewhere.device.index == 1
        assert same(from_torch(elsewhere), replay(A, B))


def test_names_of_types_survive(tmp_path: Any) -> None:
    """CuPy holds bfloat16 arrays, and detkern's results are such."""
    f = on_device("cupy")
    assert from_numpy(product(f.make(A), f.make(B)).dtype) is BF16
