"""The contracts in NumPy: the definition one can run, and what the CPU backend falls back to without a C++ compiler.

Written to be read beside docs/contracts.md, not for speed: NumPy works on many outputs at once, each output's
arithmetic goes in the contract's order. Memory beyond operands and result stays at a few MiB.

NumPy cannot set the rounding or flush-to-zero mode of the thread it runs in, and a thread in another mode gets other
bits. A caller that does not know the modes of its thread (some libraries change them) sets the default ones around the
call, as detkern/cpu/backend.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ...errors import ArgumentError, ContractUnsupported, ShapeError
from ...vocabulary.arithmetic.binary32 import Array, Binary32, add, fma, round_to
from ...vocabulary.arithmetic.tensor_core import tensor_core_step
from ...vocabulary.contracts import FP8_BLOCK128, Contract
from ...vocabulary.dtypes import F32, DType, from_numpy

__all__ = ["chain_of", "finish", "gemm", "tiles"]

_TILE = 1 << 13  # outputs worked on at a time: the integers of one tensor-core step on them fit a second-level cache

# Carries an accumulator [rows, cols] over the products of a [rows, k] and b [k, cols], k ascending.
Chain = Callable[[Binary32, Array, Array], Binary32]


def gemm(
    contract: Contract,
    a: Array,
    b: Array,
    *,
    initial: Array | None = None,
    bias: Array | None = None,
    out_dtype: DType | None = None,
) -> Array:
    """The product of a [M, K] and b [K, N] under `contract`, as a new [M, N] array of `out_dtype`.

    a, b:      of one type that the contract takes, any strides.
    initial:   float32 [M, N]; where the accumulation starts (a tree's root is added to it). Not together with bias.
    bias:      [N] of float32, float16 or bfloat16.
    out_dtype: float32, float16 or bfloat16; None: float32 with `initial`, else the operand type.

    Raises ContractUnsupported, ShapeError or ArgumentError.
    """
    dtype = from_numpy(a.dtype)
    if dtype is None or dtype not in contract.operands or contract == FP8_BLOCK128 or b.dtype != a.dtype:
        raise ContractUnsupported(f"{contract} does not take a of {a.dtype} with b of {b.dtype}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ShapeError(f"a {a.shape} and b {b.shape} must be [M, K] and [K, N]")
    if initial is not None and bias is not None:
        raise ArgumentError("bias together with initial is refused")
    if out_dtype is None:
        out_dtype = dtype if initial is None else F32
    out = np.empty((a.shape[0], b.shape[1]), out_dtype.numpy)
    with np.errstate(all="ignore"):
        for rows, cols in tiles(*out.shape):
            start = None if initial is None else initial[rows, cols].astype(np.float32)
            acc = _accumulate(contract, dtype, a[rows], b[:, cols], start)
            out[rows, cols] = finish(acc, None if bias is None else bias[cols], out_dtype)
    return out


def tiles(m: int, n: int) -> Iterator[tuple[slice, slice]]:
    """Row and column ranges that cover [m, n]."""
    width = min(n, _TILE)
    height = _TILE // max(width, 1)
    for row in range(0, m, height):
        for col in range(0, n, max(width, 1)):
            yield slice(row, row + height), slice(col, col + width)


def _accumulate(contract: Contract, dtype: DType, a: Array, b: Array, start: Binary32 | None) -> Binary32:
    """The finished accumulator, in binary32."""
    zeros = np.zeros((a.shape[0], b.shape[1]), np.float32)
    chain = chain_of(contract)
    if contract.leaf is None:
        return chain(zeros if start is None else start, a, b)
    root = zeros
    if a.shape[1] > 0:
        leaves = -(-a.shape[1] // contract.leaf)
        root = _node(contract.leaf, dtype, lambda a, b: chain(zeros, a, b), a, b, 0, leaves)
    return root if start is None else add(start, root)


def _node(
    leaf: int, dtype: DType, leaf_value: Callable[[Array, Array], Binary32], a: Array, b: Array, low: int, high: int
) -> Binary32:
    """The value of the tree's node over the leaves [low, high), as binary32 numbers that `dtype` can hold."""
    if high - low == 1:
        ks = slice(low * leaf, high * leaf)
        value = leaf_value(a[:, ks], b[ks])
    else:
        middle = low + (high - low) // 2
        left = _node(leaf, dtype, leaf_value, a, b, low, middle)
        right = _node(leaf, dtype, leaf_value, a, b, middle, high)
        value = add(left, right)
    return round_to(value, dtype).astype(np.float32)


def chain_of(contract: Contract) -> Chain:
    """The chain of `contract` over consecutive k: of fused multiply-adds, or of tensor-core steps."""
    step = contract.step
    if step is None:
        return _fma_chain

    def step_chain(acc: Binary32, a: Array, b: Array) -> Binary32:
        for k in range(0, a.shape[1], step.group):
            acc = tensor_core_step(step, acc, a[:, k : k + step.group], b[k : k + step.group])
        return acc

    return step_chain


def _fma_chain(acc: Binary32, a: Array, b: Array) -> Binary32:
    for k in range(a.shape[1]):
        acc = fma(a[:, k, None], b[None, k], acc)
    return acc


def finish(acc: Binary32, bias: Array | None, out_dtype: DType) -> Array:
    """What happens to every finished accumulator: + 0, + bias, one rounding to the output type."""
    acc = add(acc, np.zeros_like(acc))
    if bias is not None:
        acc = add(acc, bias.astype(np.float32))
    return round_to(acc, out_dtype)
