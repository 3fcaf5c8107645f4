"""The framework's own matmul behind `backend="native"`, for comparison only: it follows no contract and is never
chosen.

numpy.matmul, torch.matmul, jax.numpy.matmul or cupy.matmul runs on the caller's own memory, in the operands' type and
with the framework's own accumulation; NumPy has no bfloat16 arithmetic, so there bfloat16 operands are cast to float32
first and the result is rounded once. `bias` and `accumulate` are further operations of the framework, each rounded to
the type that the framework gives it. Operands of one call must be of one framework.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import DeviceError
from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import Matrix
from ..operations.problem import Operands
from ..tensors import Device, TensorView
from ..tensors.numpy import ndarray_of
from ..tensors.streams import cupy_runtime, cupy_stream
from ..vocabulary.dtypes import BF16
from .backend import Execution, Implementation, Kernel, Run

__all__ = ["BACKEND"]


class _Product:
    """detkern.dispatch.backend.Implementation of products."""

    def refuses(self, problem: GemmProblem) -> str | None:
        return None

    def explain(self, problem: GemmProblem) -> Kernel:
        return Kernel("the framework's matmul", "the framework's choice", "the framework's choice")

    def prepare(self, problem: GemmProblem, execution: Execution) -> Run:
        def run(m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
            a, b, bias = operands
            assert a is not None
            assert b is not None
            _multiply(problem.with_rows(m), a, b, out, bias, execution)

        return run


class _Native:
    """detkern.dispatch.backend.Backend over whatever framework the operands belong to."""

    name = "native"
    deterministic = False
    implementations: Mapping[type[Any], Implementation[Any]] = MappingProxyType({GemmProblem: _Product()})

    def unavailable(self, device: Device) -> str | None:
        return None if device.kind in ("cpu", "cuda") else f"it has no arrays on {device}"

    def capability(self, device: Device) -> tuple[int, int] | None:
        return None


BACKEND = _Native()


def _multiply(
    problem: GemmProblem, a: TensorView, b: TensorView, out: TensorView, bias: TensorView | None, execution: Execution
) -> None:
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
    left = _window(a, problem.a, (*batch, m, k))
    right = _window(b, problem.b, (*batch, k, n))
    result = _window(out, problem.out, (*batch, m, n))
    column = None
    if bias is not None and problem.bias is not None:
        column = TensorView(
            bias.pointer, (n,), (problem.bias.stride,), bias.dtype, bias.device, bias.readonly, bias.array
        )
    operands = [view for view in (left, right, column) if view is not None]
    frameworks = {_framework(view.array) for view in operands}
    if len(frameworks) > 1:
        raise DeviceError(
            f"backend='native' needs operands of one framework, these are of {' and '.join(sorted(frameworks))}"
        )
    (framework,) = frameworks
    if framework == "torch" and _framework(out.array) == "torch":
        _torch_matmul(operands, result, problem.accumulate)
    elif framework == "jax":
        _jax_matmul(operands, result, problem.accumulate, execution)
    elif execution.device.kind == "cpu":
        _numpy_matmul(operands, result, problem.accumulate)
    else:
        cupy = cupy_runtime(execution.device)
        with cupy.cuda.Device(execution.device.index), cupy_stream(cupy, execution.device, execution.stream):
            _finish(
                cupy.matmul, [_cupy_array(cupy, v) for v in operands], _cupy_array(cupy, result), problem.accumulate
            )


def _window(view: TensorView, matrix: Matrix, shape: tuple[int, ...]) -> TensorView:
    """A view with the shape and strides that the problem gives it."""
    strides = (*matrix.batch_strides, matrix.row_stride, matrix.col_stride)
    return TensorView(view.pointer, shape, strides, view.dtype, view.device, view.readonly, view.array)


def _framework(array: Any) -> str:
    """Whose memory a view is over: "torch", "jax" or "memory", which NumPy or CuPy can wrap."""
    owner = array[0] if isinstance(array, tuple) else array
    for name, kind in (("torch", "Tensor"), ("jax", "Array")):
        known = getattr(sys.modules.get(name), kind, None)
        if known is not None and isinstance(owner, known):
            return name
    return "memory"


def _finish(matmul: Any, operands: list[Any], out: Any, accumulate: bool) -> None:
    """out[...] = matmul (+ bias) (+ out), by the operators of the arrays' own framework."""
    left, right, *bias = operands
    product = matmul(left, right)
    for vector in bias:
        product = product + vector
    out[...] = (out + product if accumulate else product).astype(out.dtype)


def _numpy_matmul(operands: list[TensorView], out: TensorView, accumulate: bool) -> None:
    arrays = [ndarray_of(view) for view in operands]
    if operands[0].dtype == BF16:
        arrays = [array.astype(np.float32) for array in arrays]
    _finish(np.matmul, arrays, ndarray_of(out), accumulate)


def _torch_matmul(operands: list[TensorView], out: TensorView, accumulate: bool) -> None:
    torch = sys.modules["torch"]
    with torch.no_grad():
        left, right, *bias = (_torch_tensor(view) for view in operands)
        product = torch.matmul(left, right)
        for vector in bias:
            product = product + vector
        target = _torch_tensor(out)
        target.copy_(target + product if accumulate else product)


def _torch_tensor(view: TensorView) -> Any:
    """A tensor over the view's memory, which lies in the storage of the caller's tensor."""
    tensor = view.array
    offset = (view.pointer - tensor.data_ptr()) // view.dtype.itemsize + tensor.storage_offset()
    return tensor.detach().as_strided(view.shape, view.strides, offset)


def _jax_matmul(operands: list[TensorView], out: TensorView, accumulate: bool, execution: Execution) -> None:
    """On copies of the operands, because JAX has no strided views."""
    numpy = sys.modules["jax"].numpy
    if execution.device.kind == "cpu":
        left, right, *bias = (numpy.asarray(ndarray_of(view)) for view in operands)
        product = numpy.matmul(left, right)
        for vector in bias:
            product = product + vector
        target = ndarray_of(out)
        target[...] = (target + np.asarray(product) if accumulate else np.asarray(product)).astype(target.dtype)
        return
    jax = sys.modules["jax"]
    cupy = cupy_runtime(execution.device)
    with cupy.cuda.Device(execution.device.index), cupy_stream(cupy, execution.device, execution.stream):
        arrays = [jax.dlpack.from_dlpack(cupy.ascontiguousarray(_cupy_array(cupy, view))) for view in operands]
        product = numpy.matmul(arrays[0], arrays[1])
        for vector in arrays[2:]:
            product = product + vector
        target = _cupy_array(cupy, out)
        computed = cupy.from_dlpack(product)
        target[...] = (target + computed if accumulate else computed).astype(target.dtype)


def _cupy_array(cupy: Any, view: TensorView) -> Any:
    """A CuPy array over the memory of a view on a CUDA device."""
    item = view.dtype.itemsize
    reach = [(size - 1) * step * item for size, step in zip(view.shape, view.strides, strict=True) if size > 0]
    below, above = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    memory = cupy.cuda.UnownedMemory(view.pointer + below, above - below + item, view.array, view.device.index)
    start = cupy.cuda.MemoryPointer(memory, -below)
    return cupy.ndarray(view.shape, view.dtype.numpy, start, strides=tuple(step * item for step in view.strides))
