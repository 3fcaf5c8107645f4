"""Wrong calls: each gives its typed error with a message that names the argument and what would work, leaves `out`
alone, and the next call works."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import detkern
from detkern import ArgumentError, ContractUnsupported, DeviceError, DTypeError, ShapeError
from detkern.api import block_scaled_gemm
from detkern.tensors import dlpack

gemm, linear, da, db = detkern.gemm, detkern.linear, detkern.gemm_da, detkern.gemm_db
bias_gradient = detkern.bias_gradient


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def bf16(*shape: int) -> np.ndarray:
    return np.ones(shape, ml_dtypes.bfloat16)


def e4m3(*shape: int) -> np.ndarray:
    return np.ones(shape, ml_dtypes.float8_e4m3fn)


def readonly(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


A, B = f32(4, 8), f32(8, 3)


def matrix() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.matrix(A)


class WithCapsule:
    """An array that exports whatever it is given."""

    def __init__(self, export: Callable[..., Any], device: tuple[int, int] = (1, 0)) -> None:
        self._export = export
        self._device = device

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._export(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class CudaInterface:
    """Memory that describes itself with __cuda_array_interface__ alone."""

    def __init__(self, **fields: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 8), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None, **fields,
        }  # fmt: skip


@dataclass(frozen=True)
class Bad:
    """`call` takes the `out` that must stay as it is (calls without one ignore it); `said` are parts of the message."""

    name: str
    call: Callable[[Any], Any]
    error: type[Exception]
    said: tuple[str, ...]
    needs: str | None = None


def torch() -> Any:
    import torch

    return torch


def tt(*shape: int, **options: Any) -> Any:
    return torch().ones(shape, **options)


def jnp() -> Any:
    import jax.numpy

    return jax.numpy


def jitted() -> None:
    import jax

    jax.jit(lambda x: gemm(x, x))(jnp().ones((2, 2)))


def deleted() -> Any:
    array = jnp().ones((4, 8))
    array.delete()
    return array


def fake_tensor() -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return tt(4, 8)


def freed(size: int = 0, offset: int = 0, shape: tuple[int, ...] = (4, 8)) -> Any:
    """A tensor over a storage cut to `size` bytes."""
    tensor = torch().ones(offset + int(np.prod(shape)))[offset:].view(shape)
    tensor.untyped_storage().resize_(size)
    return tensor


def quantized() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch().quantize_per_tensor(tt(4, 8), 1.0, 0, torch().qint8)


def lazy_negative() -> Any:
    return torch().zeros(4, 3, dtype=torch().complex64).conj().imag


def dual() -> Any:
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        return gemm(forward.make_dual(tt(4, 8), tt(4, 8)), tt(8, 3))


def under_fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    a, b = tt(4, 8), tt(8, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return gemm(a, b)


def under_make_fx() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: gemm(x, tt(8, 3)))(tt(4, 8))


def under_jit_trace() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch().jit.trace(lambda x: gemm(x, tt(8, 3)), tt(4, 8))


def nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch().nested.nested_tensor([tt(4, 8), tt(4, 8)])


def within_functional_grad() -> Any:
    a, b = tt(4, 8), tt(8, 3)
    return torch().func.grad(lambda x: gemm(a, b).sum() + x)(tt())


def lying(sizes: tuple[int, ...] = (8, 3), **fields: Any) -> Callable[..., Any]:
    """An export of a float32 [8, 3] array whose description has these `fields` and `sizes`."""

    def export(**_: Any) -> Any:
        capsule = f32(8, 3).__dlpack__()
        tensor, _flags = dlpack._tensor(capsule, "b")
        for i, size in enumerate(sizes):
            tensor.shape[i] = size
        for name, value in fields.items():
            setattr(tensor, name, value)
        return capsule

    return export


def overlapping_rows() -> np.ndarray:
    return np.lib.stride_tricks.as_strided(f32(20), (4, 3), (4, 4))


def bias_overlap(_: Any) -> Any:
    memory = f32(4, 3)
    return gemm(A, B, bias=memory[3], out=memory)


BAD = [
    # shapes
    Bad("K differs", lambda o: gemm(A, f32(7, 3), out=o),
        ShapeError, ("a [4, 8]", "b [7, 3]", "K is 8 in a and 7 in b")),
    Bad("b must be transposed", lambda o: gemm(A, f32(3, 8), out=o), ShapeError, ("trans_b=True would fit",)),
    Bad("a must be transposed", lambda o: gemm(f32(8, 4), B, out=o), ShapeError, ("trans_a=True would fit",)),
    Bad("b was transposed", lambda o: gemm(A, B, trans_b=True, out=o), ShapeError, ("trans_b=False would fit",)),
    Bad("vectors differ", lambda o: gemm(f32(3), f32(4)), ShapeError, ("a [3]", "b [4]")),
    Bad("no dimensions", lambda o: gemm(np.array(1, np.float32), B), ShapeError, ("a has no dimensions", "reshape")),
    Bad("b has no dimensions", lambda o: gemm(A, np.array(1, np.float32)), ShapeError, ("b has no dimensions",)),
    Bad("batch", lambda o: gemm(f32(2, 4, 8), f32(3, 8, 3)),
        ShapeError, ("[2]", "[3]", "do not broadcast", "equal, or one of them 1")),
    Bad("weight is [K, N]", lambda o: linear(A, B, out=o), ShapeError, ("x [4, 8]", "weight [8, 3]", "weight.T")),
    Bad("weight has a batch", lambda o: linear(A, f32(2, 3, 8)), ShapeError, ("weight has shape [2, 3, 8]", "[N, K]")),
    Bad("weight is a vector", lambda o: linear(A, f32(8)), ShapeError, ("weight has shape [8]", "[N, K]")),
    Bad("dc does not fit b", lambda o: da(f32(4, 3), f32(8, 5)),
        ShapeError, ("dc [4, 3]", "b [8, 5]", "gemm_da takes")),
    Bad("dc does not fit a", lambda o: db(A, f32(5, 3)), ShapeError, ("a [4, 8]", "dc [5, 3]", "gemm_db takes")),
    Bad("dc does not fit a, transposed", lambda o: db(A, f32(5, 3), transposed=True), ShapeError, ("gemm_db takes",)),
    Bad("dc is a vector", lambda o: da(f32(3), B), ShapeError, ("dc has shape [3]", "two dimensions")),
    Bad("a of gemm_db is a vector", lambda o: db(f32(4), f32(4, 3)), ShapeError, ("a has shape [4]", "two dimensions")),
    Bad("bias too long", lambda o: gemm(A, B, bias=f32(4), out=o), ShapeError, ("bias has shape [4]", "[3]")),
    Bad("bias is a matrix", lambda o: gemm(A, B, bias=f32(4, 3), out=o), ShapeError, ("bias has shape [4, 3]", "[3]")),
    Bad("bias without columns", lambda o: gemm(A, f32(8), bias=f32(1)), ShapeError, ("bias has shape [1]", "columns")),
    Bad("out too small", lambda o: gemm(A, B, out=f32(3, 3)), ShapeError, ("out has shape [3, 3]", "[4, 3]")),
    Bad("out would broadcast", lambda o: gemm(A, B, out=f32(1, 3)),
        ShapeError, ("out has shape [1, 3]", "never broadcast")),
    Bad("out has another rank", lambda o: gemm(A, B, out=f32(1, 4, 3)), ShapeError, ("out has shape [1, 4, 3]",)),
    Bad("result beyond the address space", lambda o: gemm(np.empty((1 << 40, 0), np.float32),
        np.empty((0, 1 << 40), np.float32)),
        ShapeError, ("[1099511627776, 1099511627776]", "in pieces")),
    # element types and things that are not arrays
    Bad("a list", lambda o: gemm([[1.0]], B, out=o),
        DTypeError, ("a is not an array but list", "np.asarray(a, np.float32)")),
    Bad("a number", lambda o: gemm(A, 2.0, out=o), DTypeError, ("b is not an array but float", "np.asarray(b")),
    Bad("None", lambda o: gemm(None, B, out=o), DTypeError, ("a is not an array but NoneType",)),
    Bad("weight None", lambda o: linear(A, None, out=o), DTypeError, ("weight is not an array but NoneType",)),
    Bad("a NumPy scalar", lambda o: gemm(np.float32(1), B, out=o), DTypeError,
        ("a is not an array but numpy.float32",)),
    Bad("a type", lambda o: gemm(np.ndarray, B, out=o), DTypeError, ("a is not an array",)),
    Bad("a string bias", lambda o: gemm(A, B, bias="relu", out=o), DTypeError, ("bias is not an array but str",)),
    Bad("a list as out", lambda o: gemm(A, B, out=[0]), DTypeError, ("out is not an array but list",)),
    Bad("float64", lambda o: gemm(np.ones((4, 8)), B, out=o), DTypeError, ("a is float64", "a.astype(np.float32)")),
    Bad("int32", lambda o: gemm(A, np.ones((8, 3), np.int32), out=o),
        DTypeError, ("b is int32", "b.astype(np.float32)")),
    Bad("bool", lambda o: gemm(A, np.ones((8, 3), bool), out=o), DTypeError, ("b is bool", "b.astype")),
    Bad("complex", lambda o: gemm(A, np.ones((8, 3), complex), out=o),
        DTypeError, ("b is complex128", "real and imaginary")),
    Bad("objects", lambda o: gemm(np.ones((4, 8), object), B, out=o), DTypeError, ("a is object", "astype")),
    Bad("big-endian", lambda o: gemm(A.astype(">f4"), B, out=o),
        DTypeError, ("other byte order", "a.astype(np.float32)", "byteswap")),
    Bad("structured", lambda o: gemm(np.zeros((4, 8), "f4,f4"), B, out=o), DTypeError, ("a is void",)),
    Bad("masked", lambda o: gemm(np.ma.masked_equal(A, 1), B, out=o),
        DTypeError, ("a is a masked array", "a.filled(0)")),
    Bad("np.matrix", lambda o: gemm(matrix(), B, out=o), DTypeError, ("a is a numpy.matrix", "np.asarray(a)")),
    Bad("mixed types", lambda o: gemm(A, bf16(8, 3), out=o),
        DTypeError, ("a is float32 and b is bfloat16", "cast b to float32")),
    Bad("f16 with bf16", lambda o: linear(bf16(4, 8), np.ones((3, 8), np.float16)),
        DTypeError, ("x is bfloat16", "weight is float16")),
    Bad("fp8", lambda o: gemm(e4m3(4, 8), e4m3(8, 3), out=o), DTypeError, ("a is float8_e4m3fn", "block_scaled_gemm")),
    Bad("fp8 second", lambda o: gemm(bf16(4, 8), e4m3(8, 3)), DTypeError, ("b is float8_e4m3fn", "block_scaled_gemm")),
    Bad("fnuz", lambda o: gemm(np.ones((4, 8), ml_dtypes.float8_e4m3fnuz), B, out=o),
        DTypeError, ("a is float8_e4m3fnuz", "quantize it to float8_e4m3fn")),
    Bad("e5m2fnuz", lambda o: gemm(A, np.ones((8, 3), ml_dtypes.float8_e5m2fnuz), out=o),
        DTypeError, ("float8_e5m2fnuz", "to float8_e5m2")),
    Bad("int4", lambda o: gemm(A, np.ones((8, 3), ml_dtypes.int4), out=o), DTypeError, ("b is int4",)),
    Bad("fp8 bias", lambda o: gemm(A, B, bias=e4m3(3), out=o),
        DTypeError, ("bias is float8_e4m3fn", "float32, float16 or bfloat16")),
    Bad("float64 bias", lambda o: gemm(A, B, bias=np.ones(3), out=o), DTypeError, ("bias is float64", "bias.astype")),
    Bad("float64 out", lambda o: gemm(A, B, out=np.ones((4, 3))), DTypeError, ("out is float64",)),
    Bad("fp8 out", lambda o: gemm(A, B, out=e4m3(4, 3)),
        DTypeError, ("out is float8_e4m3fn", "float32, float16 or bfloat16")),
    Bad("out_dtype float64", lambda o: gemm(A, B, out_dtype=np.float64),
        DTypeError, ("out_dtype=float64", "float32, float16 and bfloat16")),
    Bad("out_dtype a word", lambda o: gemm(A, B, out_dtype="single"), DTypeError, ("out_dtype=single",)),
    Bad("out_dtype fp8", lambda o: gemm(A, B, out_dtype="float8_e4m3fn"), DTypeError, ("out_dtype=float8_e4m3fn",)),
    Bad("out_dtype a list", lambda o: gemm(A, B, out_dtype=["f32"]), DTypeError, ("out_dtype=",)),
    Bad("out_dtype an array", lambda o: gemm(A, B, out_dtype=f32(1)), DTypeError, ("out_dtype=array([1.]",)),
    Bad("out_dtype a module", lambda o: gemm(A, B, out_dtype=np), DTypeError, ("out_dtype=<module 'numpy'",)),
    Bad("out_dtype big-endian", lambda o: gemm(A, B, out_dtype=np.dtype(">f4")), DTypeError, ("out_dtype=>f4",)),
    Bad("out_dtype and out", lambda o: gemm(A, B, out=o, out_dtype="bf16"),
        DTypeError, ("out_dtype=bfloat16", "out is float32", "leave out_dtype away")),
    Bad("accumulate in f16", lambda o: gemm(A, B, out=np.ones((4, 3), np.float16), accumulate=True),
        DTypeError, ("accumulate", "float32 out", "float16")),
    # arguments
    Bad("accumulate without out", lambda o: gemm(A, B, accumulate=True),
        ArgumentError, ("accumulate=True", "needs out=")),
    Bad("accumulate with bias", lambda o: gemm(A, B, bias=f32(3), out=o, accumulate=True),
        ArgumentError, ("bias", "accumulate=True", "refused")),
    Bad("trans of a vector", lambda o: gemm(f32(8), B, trans_a=True),
        ArgumentError, ("trans_a=True", "two dimensions", "[8]")),
    Bad("trans of a vector b", lambda o: gemm(A, f32(8), trans_b=True), ArgumentError, ("trans_b=True", "[8]")),
    Bad("trans a word", lambda o: gemm(A, B, trans_a="T", out=o), ArgumentError, ("trans_a='T'", "True or False")),
    Bad("accumulate a number", lambda o: gemm(A, B, out=o, accumulate=1),
        ArgumentError, ("accumulate=1", "True or False")),
    Bad("transposed a word", lambda o: db(A, f32(4, 3), transposed="yes"), ArgumentError, ("transposed='yes'",)),
    Bad("read-only out", lambda o: gemm(A, B, out=readonly(f32(4, 3))), ArgumentError, ("out is read-only",)),
    Bad("broadcast out", lambda o: gemm(A, B, out=np.lib.stride_tricks.as_strided(f32(3), (4, 3), (0, 4))),
        ArgumentError, ("out [4, 3]", "strides [0, 1]", "one address")),
    Bad("self-overlapping out", lambda o: gemm(A, B, out=overlapping_rows()),
        ArgumentError, ("several elements at one address",)),
    Bad("out is a", lambda o: gemm(o, f32(3, 3), out=o), ArgumentError, ("out shares memory with a",)),
    Bad("out inside b", lambda o: gemm(f32(2, 4), o, out=o[1:3]), ArgumentError, ("out shares memory with b",)),
    Bad("out reversed is a", lambda o: gemm(o[::-1], f32(3, 3), out=o), ArgumentError, ("out shares memory with a",)),
    Bad("out is bias", bias_overlap, ArgumentError, ("out shares memory with bias",)),
    Bad("out is x", lambda o: linear(o, f32(3, 3), out=o), ArgumentError, ("out shares memory with x",)),
    Bad("out with odd strides", lambda o: gemm(A, B, out=np.zeros((4, 3), "u1,f4")["f1"]),
        ArgumentError, ("out: strides of", "contiguous")),
    Bad("no such backend", lambda o: gemm(A, B, backend="tpu", out=o),
        ArgumentError, ("backend='tpu'", "cpu", "native")),
    Bad("backend a number", lambda o: gemm(A, B, backend=1, out=o), ArgumentError, ("backend=1", "cpu")),
    # contracts, devices
    Bad("no such contract", lambda o: gemm(A, B, contract="tf32", out=o),
        ContractUnsupported, ("contract='tf32'", "fma", "mma16")),
    Bad("contract a number", lambda o: gemm(A, B, contract=16, out=o), ContractUnsupported, ("contract=16",)),
    Bad("contract a list", lambda o: gemm(A, B, contract=["fma"], out=o), ContractUnsupported, ("contract=",)),
    Bad("mma16 of f32", lambda o: gemm(A, B, contract="mma16", out=o),
        ContractUnsupported, ("contract='mma16'", "f16", "bf16", "a is float32", "fma")),
    Bad("tree of f32", lambda o: linear(A, f32(3, 8), contract="tree", out=o),
        ContractUnsupported, ("contract='tree'", "x is float32")),
    Bad("fp8 contract", lambda o: gemm(bf16(4, 8), bf16(8, 3), contract="fp8-block128"),
        ContractUnsupported, ("fp8-block128", "block_scaled_gemm")),
    Bad("native contract", lambda o: gemm(A, B, backend="native", contract="fma", out=o),
        ContractUnsupported, ("native", "no contract")),
    Bad("cuda on host arrays", lambda o: gemm(A, B, backend="cuda", out=o),
        DeviceError, ("backend='cuda'", "cuda arrays", "cpu")),
    # block-scaled
    Bad("bf16 blocks", lambda o: block_scaled_gemm(bf16(4, 128), f32(4, 1), e4m3(128, 3), f32(1, 3)),
        DTypeError, ("a is bfloat16", "float8_e4m3fn")),
    Bad("bf16 scales", lambda o: block_scaled_gemm(e4m3(4, 128), bf16(4, 1), e4m3(128, 3), f32(1, 3)),
        DTypeError, ("scale_a is bfloat16", "float32")),
    Bad("no scales", lambda o: block_scaled_gemm(e4m3(4, 128), f32(4, 1), e4m3(128, 3), None),
        DTypeError, ("scale_b is not an array",)),
    Bad("K is not a multiple", lambda o: block_scaled_gemm(e4m3(4, 100), f32(4, 1), e4m3(100, 3), f32(1, 3)),
        ShapeError, ("K = 100", "128", "pad")),
    Bad("K of blocks differs", lambda o: block_scaled_gemm(e4m3(4, 128), f32(4, 1), e4m3(256, 3), f32(2, 3)),
        ShapeError, ("K is 128 in a and 256 in b",)),
    Bad("scale_a shape", lambda o: block_scaled_gemm(e4m3(4, 256), f32(4, 1), e4m3(256, 3), f32(2, 3)),
        ShapeError, ("scale_a has shape [4, 1]", "[4, 2]")),
    Bad("scale_b shape", lambda o: block_scaled_gemm(e4m3(4, 256), f32(4, 2), e4m3(256, 3), f32(3, 2)),
        ShapeError, ("scale_b has shape [3, 2]", "[2, 3]")),
    Bad("three dimensions", lambda o: block_scaled_gemm(e4m3(1, 4, 128), f32(4, 1), e4m3(128, 3), f32(1, 3)),
        ShapeError, ("a has shape [1, 4, 128]", "two dimensions")),
    Bad("out shares scale_b", lambda o: block_scaled_gemm(e4m3(1, 128), f32(1, 1), e4m3(128, 3), o[:1], out=o[:1]),
        ArgumentError, ("out shares memory with scale_b",)),
    Bad("fp8 native", lambda o: block_scaled_gemm(e4m3(4, 128), f32(4, 1), e4m3(128, 3), f32(1, 3), backend="native"),
        ContractUnsupported, ("native", "block_scaled_gemm")),
    # bias gradient (`o` is [4, 3])
    Bad("dc has no dimensions", lambda o: bias_gradient(np.array(1, np.float32), out=o),
        ShapeError, ("dc has no dimensions", "[.., M, N]")),
    Bad("dc has another N", lambda o: bias_gradient(A, out=o[0]), ShapeError, ("out has shape [3]", "[8]")),
    Bad("dc against a matrix out", lambda o: bias_gradient(f32(5, 3), out=o), ShapeError,
        ("out has shape [4, 3]", "[3]")),
    Bad("dc a list", lambda o: bias_gradient([[1.0]]), DTypeError, ("dc is not an array but list",)),
    Bad("dc None", lambda o: bias_gradient(None), DTypeError, ("dc is not an array but NoneType",)),
    Bad("dc float64", lambda o: bias_gradient(np.ones((4, 3))), DTypeError, ("dc is float64", "dc.astype(np.float32)")),
    Bad("dc fp8", lambda o: bias_gradient(e4m3(4, 3), out=o[0]),
        DTypeError, ("dc is float8_e4m3fn", "float32, float16 and bfloat16", "cast dc")),
    Bad("bias gradient accumulates into nothing", lambda o: bias_gradient(f32(4, 3), accumulate=True),
        ArgumentError, ("accumulate=True", "needs out=")),
    Bad("bias gradient accumulates in bf16", lambda o: bias_gradient(bf16(4, 3), out=bf16(3), accumulate=True),
        DTypeError, ("accumulate=True", "float32 out", "bfloat16")),
    Bad("bias gradient out and out_dtype", lambda o: bias_gradient(bf16(4, 3), out=o[0], out_dtype="f16"),
        DTypeError, ("out_dtype=float16", "out is float32")),
    Bad("bias gradient accumulate a number", lambda o: bias_gradient(f32(4, 3), out=o[0], accumulate=1),
        ArgumentError, ("accumulate=1", "True or False")),
    Bad("bias gradient into dc", lambda o: bias_gradient(o, out=o[1]), ArgumentError, ("out shares memory with dc",)),
    Bad("bias gradient read-only out", lambda o: bias_gradient(f32(4, 3), out=readonly(f32(3))),
        ArgumentError, ("out is read-only",)),
    Bad("bias gradient broadcast out", lambda o: bias_gradient(f32(4, 3),
        out=np.lib.stride_tricks.as_strided(o, (3,), (0,))),
        ArgumentError, ("out [3]", "one address")),
    Bad("bias gradient native", lambda o: bias_gradient(f32(4, 3), out=o[0], backend="native"),
        ContractUnsupported, ("native", "bias_gradient")),
    Bad("bias gradient backend", lambda o: bias_gradient(f32(4, 3), out=o[0], backend="tpu"),
        ArgumentError, ("backend='tpu'",)),
    Bad("bias gradient requires grad", lambda o: bias_gradient(tt(4, 3, requires_grad=True)),
        ArgumentError, ("dc requires grad", "detkern.torch"), "torch"),
    Bad("bias gradient JAX out", lambda o: bias_gradient(jnp().ones((4, 3)), out=jnp().ones(3)),
        ArgumentError, ("out is a JAX array", "immutable"), "jax"),
    # PyTorch
    Bad("torch float64", lambda o: gemm(tt(4, 8, dtype=torch().float64), tt(8, 3)),
        DTypeError, ("a is float64", "a.to(torch.float32)"), "torch"),
    Bad("torch int64", lambda o: gemm(tt(4, 8), tt(8, 3, dtype=torch().int64)),
        DTypeError, ("b is int64", "b.to(torch.float32)"), "torch"),
    Bad("torch complex", lambda o: gemm(tt(4, 8, dtype=torch().complex64), tt(8, 3)),
        DTypeError, ("a is complex64",), "torch"),
    Bad("requires grad", lambda o: gemm(tt(4, 8, requires_grad=True), tt(8, 3)),
        ArgumentError, ("a requires grad", "detkern.torch", "a.detach()"), "torch"),
    Bad("weight requires grad", lambda o: linear(tt(4, 8), torch().nn.Linear(8, 3).weight),
        ArgumentError, ("weight requires grad", "detkern.torch"), "torch"),
    Bad("out requires grad", lambda o: gemm(tt(4, 8), tt(8, 3), out=tt(4, 3, requires_grad=True)),
        ArgumentError, ("out requires grad",), "torch"),
    Bad("forward-mode dual", lambda o: dual(),
        ArgumentError, ("a carries a forward-mode tangent", "detkern.torch"), "torch"),
    Bad("sparse", lambda o: gemm(tt(4, 8).to_sparse(), tt(8, 3)),
        DTypeError, ("a has layout torch.sparse_coo", "a.to_dense()"), "torch"),
    Bad("quantized", lambda o: gemm(quantized(), tt(8, 3)), DTypeError, ("a is quantized", "a.dequantize()"), "torch"),
    Bad("meta", lambda o: gemm(tt(4, 8, device="meta"), tt(8, 3)),
        DeviceError, ("a is on the meta device", "no data"), "torch"),
    Bad("fake", lambda o: gemm(fake_tensor(), tt(8, 3)), DTypeError, ("a is a", "FakeTensor", "plain"), "torch"),
    Bad("vmap", lambda o: torch().func.vmap(lambda x: gemm(x, tt(8, 3)))(tt(2, 4, 8)),
        DTypeError, ("a has no memory of its own", "outside"), "torch"),
    Bad("plain tensors within torch.func.grad", lambda o: within_functional_grad(),
        DTypeError, ("no memory of its own", "outside"), "torch"),
    Bad("under fake tensors", lambda o: under_fake_tensors(), DTypeError, ("FakeTensorMode is tracing",), "torch"),
    Bad("under make_fx", lambda o: under_make_fx(),
        DTypeError, ("cannot be traced", "ProxyTorchDispatchMode"), "torch"),
    Bad("under torch.jit.trace", lambda o: under_jit_trace(),
        DTypeError, ("cannot be traced", "torch.jit.trace"), "torch"),
    Bad("nested", lambda o: gemm(nested(), tt(8, 3)),
        DTypeError, ("a is a nested tensor", "a.to_padded_tensor(0)"), "torch"),
    Bad("torch.func.grad", lambda o: torch().func.grad(lambda x: gemm(x, tt(8, 3)).sum())(tt(4, 8)),
        (DTypeError, ArgumentError), ("a ",), "torch"),
    Bad("storage freed", lambda o: gemm(freed(), tt(8, 3)),
        ArgumentError, ("a has had its storage freed", "holds 0 bytes", "needs 128"), "torch"),
    Bad("storage freed under an offset", lambda o: gemm(freed(0, 4), tt(8, 3)),
        ArgumentError, ("a has had its storage freed", "holds 0 bytes", "needs 144"), "torch"),
    Bad("storage cut short", lambda o: gemm(freed(127), tt(8, 3)),
        ArgumentError, ("a has had its storage cut short", "holds 127 bytes", "needs 128"), "torch"),
    Bad("storage cut short under an offset", lambda o: gemm(tt(8, 4), freed(128, 4)),
        ArgumentError, ("b has had its storage cut short", "holds 128 bytes", "needs 144"), "torch"),
    Bad("storage of out cut short", lambda o: gemm(tt(4, 8), tt(8, 8), out=freed(64)),
        ArgumentError, ("out has had its storage cut short", "holds 64 bytes", "needs 128"), "torch"),
    Bad("storage of bias cut short", lambda o: detkern.linear(tt(4, 8), tt(8, 8), freed(20, 0, (8,))),
        ArgumentError, ("bias has had its storage cut short", "holds 20 bytes", "needs 32"), "torch"),
    Bad("storage of a lazy negative freed", lambda o: gemm(freed()._neg_view(), tt(8, 3)),
        ArgumentError, ("a has had its storage freed",), "torch"),
    Bad("storage of rows freed", lambda o: detkern.rows.softmax(freed()),
        ArgumentError, ("x has had its storage freed",), "torch"),
    Bad("lazy zero tensor", lambda o: gemm(torch()._efficientzerotensor((4, 8)), tt(8, 3)),
        DTypeError, ("a is a lazy zero tensor", "a.clone()"), "torch"),
    Bad("mkldnn", lambda o: gemm(tt(4, 8).to_mkldnn(), tt(8, 3)),
        DTypeError, ("a has layout torch._mkldnn", "to_dense"), "torch"),
    Bad("lazy negative out", lambda o: gemm(tt(4, 8), tt(8, 3), out=lazy_negative()),
        ArgumentError, ("out has torch's lazy negative bit",), "torch"),
    Bad("expanded out", lambda o: gemm(tt(4, 8), tt(8, 3), out=tt(1, 3).expand(4, 3)),
        ArgumentError, ("out [4, 3]", "one address"), "torch"),
    Bad("torch mixed types", lambda o: gemm(tt(4, 8), tt(8, 3, dtype=torch().bfloat16)),
        DTypeError, ("a is float32 and b is bfloat16",), "torch"),
    Bad("torch out_dtype", lambda o: gemm(tt(4, 8), tt(8, 3), out_dtype=torch().float64),
        DTypeError, ("out_dtype=float64",), "torch"),
    Bad("torch fnuz", lambda o: gemm(tt(4, 8).to(torch().float8_e4m3fnuz), tt(8, 3)),
        DTypeError, ("float8_e4m3fnuz",), "torch"),
    Bad("torch out shares memory with NumPy a", lambda o: gemm(o, f32(3, 3), out=torch().from_numpy(o)),
        ArgumentError, ("out shares memory with a",), "torch"),
    # JAX
    Bad("JAX out", lambda o: gemm(jnp().ones((4, 8)), jnp().ones((8, 3)), out=jnp().ones((4, 3))),
        ArgumentError, ("out is a JAX array", "immutable"), "jax"),
    Bad("JAX accumulate", lambda o: gemm(A, B, out=jnp().ones((4, 3)), accumulate=True),
        ArgumentError, ("out is a JAX array", "accumulate=True"), "jax"),
    Bad("JAX tracer", lambda o: jitted(), DTypeError, ("a is a JAX tracer", "outside of jax.jit"), "jax"),
    Bad("JAX int32", lambda o: gemm(jnp().ones((4, 8), int), jnp().ones((8, 3))),
        DTypeError, ("a is int32", "a.astype(jnp.float32)"), "jax"),
    Bad("JAX deleted", lambda o: gemm(deleted(), jnp().ones((8, 3))), ArgumentError, ("a has been deleted",), "jax"),
    # protocols
    Bad("no capsule", lambda o: gemm(WithCapsule(lambda **_: 3), B, out=o),
        DTypeError, ("a.__dlpack__() gave no DLPack capsule",)),
    Bad("export fails", lambda o: gemm(WithCapsule(lambda **_: 1 / 0), B, out=o),
        DTypeError, ("a will not be exported", "division by zero")),
    Bad("DLPack device fails", lambda o: gemm(A, WithCapsule(f32(8, 3).__dlpack__, ()), out=o),
        DeviceError, ("b.__dlpack_device__() names no device",)),
    Bad("DLPack device is another one", lambda o: gemm(A, WithCapsule(lying(device_type=2), (1, 0)), out=o),
        DeviceError, ("b.__dlpack_device__() names cpu", "on cuda:0")),
    Bad("DLPack null pointer", lambda o: gemm(A, WithCapsule(lying(data=None)), out=o),
        ArgumentError, ("b exports", "[8, 3]", "null pointer")),
    Bad("DLPack null pointer as out", lambda o: gemm(A, B, out=WithCapsule(lying(data=None))),
        ArgumentError, ("out exports", "null pointer")),
    Bad("DLPack negative rank", lambda o: gemm(A, WithCapsule(lying(ndim=-1)), out=o),
        ArgumentError, ("b exports", "-1 dimensions")),
    Bad("DLPack without sizes", lambda o: gemm(A, WithCapsule(lying(shape=None)), out=o),
        ArgumentError, ("b exports", "2 dimensions without their sizes")),
    Bad("DLPack negative size", lambda o: gemm(A, WithCapsule(lying(sizes=(8, -3))), out=o),
        ArgumentError, ("b exports", "negative size, [8, -3]")),
    Bad("export refused", lambda o: gemm(WithCapsule(np.ones(2, object).__dlpack__), B, out=o),
        DTypeError, ("a will not be exported",)),
    Bad("DLPack float64", lambda o: gemm(WithCapsule(np.ones((4, 8)).__dlpack__), B, out=o),
        DTypeError, ("a is float64", "cast")),
    Bad("DLPack int16", lambda o: gemm(A, WithCapsule(np.ones((8, 3), np.int16).__dlpack__), out=o),
        DTypeError, ("b is int16",)),
    Bad("DLPack on Vulkan", lambda o: gemm(A, WithCapsule(f32(8, 3).__dlpack__, (7, 0)), out=o),
        DeviceError, ("b is on a device of DLPack type 7", "CPU, CUDA")),
    Bad("DLPack read-only out", lambda o: gemm(A, B, out=WithCapsule(readonly(f32(4, 3)).__dlpack__)),
        (ArgumentError, DTypeError), ("out",)),
    Bad("CAI bfloat16", lambda o: gemm(A, CudaInterface(typestr="<V2"), out=o),
        DTypeError, ("b has the type string '<V2'", "__dlpack__")),
    Bad("CAI float64", lambda o: gemm(A, CudaInterface(typestr="<f8"), out=o), DTypeError, ("b is float64",)),
    Bad("CAI big-endian", lambda o: gemm(A, CudaInterface(typestr=">f4"), out=o), DTypeError, ("b is big-endian",)),
    Bad("CAI mask", lambda o: gemm(A, CudaInterface(mask=f32(1)), out=o), DTypeError, ("b is masked",)),
    Bad("CAI fails", lambda o: gemm(A, CudaInterface(typestr=None), out=o),
        DTypeError, ("b.__cuda_array_interface__ cannot be read",)),
    Bad("CAI without sizes", lambda o: gemm(A, CudaInterface(shape=8), out=o),
        DTypeError, ("b.__cuda_array_interface__ cannot be read",)),
    Bad("CAI stream", lambda o: gemm(A, CudaInterface(stream="0"), out=o),
        DTypeError, ("b.__cuda_array_interface__ cannot be read",)),
    Bad("CAI negative size", lambda o: gemm(A, CudaInterface(shape=(-4, 8)), out=o), ArgumentError, ("[-4, 8]",)),
    Bad("CAI strides of another rank", lambda o: gemm(A, CudaInterface(strides=(4,)), out=o),
        ArgumentError, ("[4, 8]", "(4,) bytes")),
    Bad("CAI null pointer", lambda o: gemm(A, CudaInterface(data=(0, False)), out=o),
        ArgumentError, ("b [4, 8]", "null pointer")),
    Bad("CAI odd strides", lambda o: gemm(A, CudaInterface(strides=(33, 4)), out=o),
        ArgumentError, ("b: strides of (33, 4) bytes",)),
]  # fmt: skip


def test_there_are_enough() -> None:
    assert len(BAD) >= 60
    assert len({bad.name for bad in BAD}) == len(BAD)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_wrong_call(bad: Bad) -> None:
    if bad.needs is not None and importlib.util.find_spec(bad.needs) is None:
        pytest.skip(f"{bad.needs} is not installed")
    out = np.arange(12, dtype=np.float32).reshape(4, 3)
    before = out.tobytes()
    with pytest.raises(bad.error) as raised:
        bad.call(out)
    message = str(raised.value)
    for part in bad.said:
        assert part in message, message
    assert out.tobytes() == before
    assert (gemm(A, B, out=out) == 8).all()


def test_errors_are_also_the_builtins_that_callers_catch() -> None:
    for error, builtin in (
        (ShapeError, ValueError), (DTypeError, TypeError), (ArgumentError, ValueError), (DeviceError, RuntimeError),
        (ContractUnsupported, NotImplementedError), (detkern.BackendUnavailable, RuntimeError),
        (detkern.BuildError, RuntimeError),
    ):  # fmt: skip
        assert issubclass(error, builtin)
        assert issubclass(error, detkern.DetkernError)
