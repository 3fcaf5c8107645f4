"""The CPU backend: the C++ library where it builds, else the NumPy version with the same bits, which it says once.

DETKERN_CPU chooses: "auto" (the default), "numpy" (never the library), "native" (the library or an error).
"""

from __future__ import annotations

import functools
import os
import warnings
from ctypes import c_char
from typing import Any

import numpy as np

from .. import config
from ..abi import mirror
from ..abi.descriptors import block_scaled_descriptor, column_sum_descriptor, gemm_descriptors, row_descriptor
from ..abi.library import Library
from ..arithmetic.float_environment import default_float_environment
from ..backend import Execution, Kernel
from ..contracts import CONTRACTS, FP8_BLOCK128, Contract
from ..dtypes import BF16, F16, F32, DType
from ..errors import ArgumentError, BackendUnavailable, BuildError
from ..operations.bias_gradient.problem import ColumnSumProblem
from ..operations.bias_gradient.replay import column_sum as replayed_column_sum
from ..operations.block_scaled.problem import BlockScaledProblem
from ..operations.block_scaled.replay import block_scaled_gemm as replayed_block_scaled
from ..operations.gemm import replay as numpy_replay
from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import Matrix
from ..operations.rows import replay as numpy_rows
from ..operations.rows.problem import RowProblem
from ..tensors import Device, TensorView
from . import compiled, threads

__all__ = ["BACKEND", "CpuBackend", "library"]

_OUTPUTS = (F32, F16, BF16)


@functools.cache
def library() -> Library | None:
    """The C++ library, or None where the NumPy version serves. Decided once per process."""
    choice = os.environ.get("DETKERN_CPU") or "auto"
    if choice not in ("auto", "numpy", "native"):
        raise ArgumentError(f"DETKERN_CPU={choice!r} must be auto, numpy or native")
    if choice == "numpy":
        return None
    try:
        return compiled.load()
    except (BuildError, BackendUnavailable) as error:
        if choice == "native":
            raise
        warnings.warn(
            f"detkern's C++ kernels are not available, its NumPy version serves: slower, the same bits. {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


class CpuBackend:
    """detkern.backend.Backend on host memory."""

    name = "cpu"
    deterministic = True

    def unavailable(self, device: Device) -> str | None:
        return None if device.kind == "cpu" else f"it works on host memory, not on {device}"

    def refuses(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem) -> str | None:
        if isinstance(problem, ColumnSumProblem):
            for name, dtype in (("dc", problem.dc.dtype), ("out", problem.out.dtype)):
                if dtype not in _OUTPUTS:
                    return f"{name} may be float32, float16 or bfloat16, not {dtype}"
            return None
        if isinstance(problem, RowProblem):
            return None  # the plan refuses what no backend takes
        contract = problem.contract
        types = (problem.a.dtype, problem.b.dtype)
        if isinstance(problem, BlockScaledProblem):
            if contract != FP8_BLOCK128:
                return f"block_scaled_gemm computes {FP8_BLOCK128}, not {contract}"
        elif contract == FP8_BLOCK128:
            return f"{contract} needs scales; it is block_scaled_gemm's"
        elif types[0] != types[1]:
            return f"operands of one type are needed, not {types[0]} and {types[1]}"
        for dtype in types:
            if dtype not in contract.operands:
                takes = ", ".join(d.name for d in contract.operands)
                gives = ", ".join(c.name for c in CONTRACTS.values() if dtype in c.operands)
                return f"{contract} takes {takes}, not {dtype}; {dtype} operands have {gives}"
        if problem.k % contract.k_multiple:
            return f"{contract} needs K to be a multiple of {contract.k_multiple}, not {problem.k}"
        if problem.out.dtype not in _OUTPUTS:
            return f"out may be float32, float16 or bfloat16, not {problem.out.dtype}"
        return None

    def contracts(self, device: Device) -> list[tuple[Contract, DType]]:
        return [(contract, dtype) for contract in CONTRACTS.values() for dtype in contract.operands]

    def capability(self, device: Device) -> tuple[int, int] | None:
        return None

    def kernel(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem) -> Kernel:
        native = library()
        if isinstance(problem, ColumnSumProblem):
            if native is None:
                return Kernel("numpy column_sum", "all columns", "1 thread")
            return Kernel(f"c++ column_sum ({native.name.split()[1]})", "at most 1024 columns", _at_most_threads())
        if isinstance(problem, RowProblem):
            if native is None:
                return Kernel(f"numpy {problem.kind.label}", "262144 elements at a time", "1 thread")
            instructions = native.name.split()[1]
            return Kernel(f"c++ {problem.kind.label} ({instructions})", "rows in vector lanes", _at_most_threads())
        if native is None:
            return Kernel(f"numpy {problem.contract}", "8192 outputs at a time", "1 thread")
        _, instructions, *tiles = native.name.split()
        unit = "fma" if problem.contract.step is None else "mma"
        tile = next(tile.partition("=")[2] for tile in tiles if tile.startswith(unit))
        return Kernel(f"c++ {problem.contract} ({instructions})", tile, _at_most_threads())

    def gemm(
        self, problem: GemmProblem, a: TensorView, b: TensorView, out: TensorView, bias: TensorView | None,
        execution: Execution,
    ) -> None:  # fmt: skip
        native = library()
        if native is None:
            _numpy_gemm(problem, a, b, out, bias)
            return
        descriptors = gemm_descriptors(problem)
        count = _threads()
        for template, (a_offset, b_offset, out_offset) in descriptors:
            descriptor = mirror.GemmDescriptor.from_buffer_copy(template)
            descriptor.threads = count
            descriptor.a = a.pointer + a_offset
            descriptor.b = b.pointer + b_offset
            descriptor.out = out.pointer + out_offset
            if bias is not None:
                descriptor.bias = bias.pointer
            native.gemm(descriptor)

    def block_scaled_gemm(
        self, problem: BlockScaledProblem, a: TensorView, scale_a: TensorView, b: TensorView, scale_b: TensorView,
        out: TensorView, execution: Execution,
    ) -> None:  # fmt: skip
        native = library()
        if native is None:
            _numpy_block_scaled_gemm(problem, a, scale_a, b, scale_b, out)
            return
        descriptor = mirror.BlockScaledDescriptor.from_buffer_copy(block_scaled_descriptor(problem))
        descriptor.threads = _threads()
        descriptor.a = a.pointer
        descriptor.scale_a = scale_a.pointer
        descriptor.b = b.pointer
        descriptor.scale_b = scale_b.pointer
        descriptor.out = out.pointer
        native.block_scaled_gemm(descriptor)

    def column_sum(self, problem: ColumnSumProblem, dc: TensorView, out: TensorView, execution: Execution) -> None:
        native = library()
        if native is None:
            _numpy_column_sum(problem, dc, out)
            return
        descriptor = mirror.ColumnSumDescriptor.from_buffer_copy(column_sum_descriptor(problem))
        descriptor.threads = _threads()
        descriptor.dc = dc.pointer
        descriptor.out = out.pointer
        native.column_sum(descriptor)

    def rows(
        self, problem: RowProblem, a: TensorView, b: TensorView | None, out: TensorView, execution: Execution
    ) -> None:
        native = library()
        if native is None:
            _numpy_rows(problem, a, b, out)
            return
        descriptor = mirror.RowDescriptor.from_buffer_copy(row_descriptor(problem))
        descriptor.threads = _threads()
        descriptor.a = a.pointer
        if b is not None:
            descriptor.b = b.pointer
        descriptor.out = out.pointer
        native.rows(descriptor)


BACKEND = CpuBackend()


def _threads() -> int:
    return config.num_threads or threads.available()


def _at_most_threads() -> str:
    count = _threads()
    return f"at most {count} thread{'s' if count > 1 else ''}"


def _numpy_gemm(problem: GemmProblem, a: TensorView, b: TensorView, out: TensorView, bias: TensorView | None) -> None:
    batch, m, n, k = problem.batch, problem.m, problem.n, problem.k
    if 0 in (*batch, m, n):
        return
    a_array = _ndarray(a.pointer, (*batch, m, k), problem.a)
    b_array = _ndarray(b.pointer, (*batch, k, n), problem.b)
    out_array = _ndarray(out.pointer, (*batch, m, n), problem.out)
    bias_array = None
    if problem.bias is not None and bias is not None:
        vector = Matrix(problem.bias.dtype, (), 0, problem.bias.stride, problem.bias.alignment)
        bias_array = _ndarray(bias.pointer, (1, n), vector)[0]
    with default_float_environment():
        for index in np.ndindex(*batch):
            target = out_array[index]
            target[...] = numpy_replay.gemm(
                problem.contract,
                a_array[index],
                b_array[index],
                initial=target if problem.accumulate else None,
                bias=bias_array,
                out_dtype=problem.out.dtype,
            )


def _numpy_block_scaled_gemm(
    problem: BlockScaledProblem, a: TensorView, scale_a: TensorView, b: TensorView, scale_b: TensorView, out: TensorView
) -> None:
    m, n, k = problem.m, problem.n, problem.k
    if 0 in (m, n):
        return
    blocks = k // problem.contract.k_multiple
    target = _ndarray(out.pointer, (m, n), problem.out)
    with default_float_environment():
        target[...] = replayed_block_scaled(
            _ndarray(a.pointer, (m, k), problem.a),
            _ndarray(scale_a.pointer, (m, blocks), problem.scale_a),
            _ndarray(b.pointer, (k, n), problem.b),
            _ndarray(scale_b.pointer, (blocks, n), problem.scale_b),
            initial=target if problem.accumulate else None,
            out_dtype=problem.out.dtype,
        )


def _numpy_column_sum(problem: ColumnSumProblem, dc: TensorView, out: TensorView) -> None:
    if problem.n == 0:
        return
    vector = Matrix(problem.out.dtype, (), 0, problem.out.stride, problem.out.alignment)
    target = _ndarray(out.pointer, (1, problem.n), vector)[0]
    with default_float_environment():
        target[...] = replayed_column_sum(
            _ndarray(dc.pointer, (*problem.batch, problem.m, problem.n), problem.dc),
            initial=target if problem.accumulate else None,
            out_dtype=problem.out.dtype,
        )


def _numpy_rows(problem: RowProblem, a: TensorView, b: TensorView | None, out: TensorView) -> None:
    batch, m, n, kind = problem.batch, problem.m, problem.n, problem.kind
    first = _ndarray(a.pointer, (*batch, m, 1 if kind.spreads else n), problem.a)
    second = None if b is None or problem.b is None else _ndarray(b.pointer, (*batch, m, n), problem.b)
    target = _ndarray(out.pointer, (*batch, m, 1 if kind.reduces else n), problem.out)
    with default_float_environment():
        for index in np.ndindex(*batch):
            result = numpy_rows.rows(
                kind,
                first[index][:, 0] if kind.spreads else first[index],
                None if second is None else second[index],
                width=n,
                out_dtype=problem.out.dtype,
            )
            target[index] = result[:, None] if kind.reduces else result


def _ndarray(pointer: int, shape: tuple[int, ...], matrix: Matrix) -> np.ndarray[Any, np.dtype[Any]]:
    """The memory of a matrix as a NumPy array, without a copy; strides of any sign."""
    dtype = matrix.dtype.numpy
    if 0 in shape:
        return np.empty(shape, dtype)
    strides = [s * dtype.itemsize for s in (*matrix.batch_strides, matrix.row_stride, matrix.col_stride)]
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    below, above = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    memory: Any = (c_char * (above - below + dtype.itemsize)).from_address(pointer + below)
    return np.ndarray(shape, dtype, memory, offset=-below, strides=strides)
