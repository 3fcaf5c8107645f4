"""Chains of tensor-core steps by mmasim (https://pypi.org/project/mmasim), which models NVIDIA's instructions.

`mma16` is Hopper's mma.sync.m16n8k16, `mma8` Ampere's mma.sync.m16n8k8, the fp8 step Hopper's wgmma.m64n8k32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from mmasim.nv_ptx import MMA, WGMMA

from detkern.vocabulary.contracts import FP8_BLOCK128, MMA8, MMA16, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import DType, from_numpy

_ROWS_TIMES_COLS = 1 << 15  # outputs at a time, so that the model's temporaries stay in the cache


@cache
def _model(contract: Contract, a: DType, b: DType) -> Any:
    if contract in (MMA16, TREE_MMA16):
        return MMA("Hopper", f"m16n8k16.f32.{a.short}.{b.short}.f32")
    if contract == MMA8:
        return MMA("Ampere", f"m16n8k8.f32.{a.short}.{b.short}.f32")
    assert contract == FP8_BLOCK128
    return WGMMA("Hopper", f"m64n8k32.f32.{a.short}.{b.short}")


def _tensor(values: np.ndarray) -> torch.Tensor:
    dtype = from_numpy(values.dtype)
    signed = np.dtype(f"i{dtype.itemsize}")
    return torch.from_numpy(np.ascontiguousarray(values).view(signed)).view(getattr(torch, dtype.name))


def step_chain(contract: Contract, a: np.ndarray, b: np.ndarray, initial: np.ndarray | None = None) -> np.ndarray:
    """The accumulator after all steps over a [M, K] and b [K, N] from `initial` or +0: binary32, NaN canonical."""
    model = _model(contract, from_numpy(a.dtype), from_numpy(b.dtype))
    m, n = a.shape[0], b.shape[1]
    acc = np.zeros((m, n), np.float32) if initial is None else initial
    rows, cols, start = _tensor(a), _tensor(b.T), _tensor(acc)
    result = np.empty((m, n), np.float32)
    height = max(_ROWS_TIMES_COLS // n, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # many small operations: waiting for other threads costs more than they save
    for low in range(0, m, height):
        part = slice(low, low + height)
        vectors = rows[part, None, :].expand(-1, n, -1), cols[None].expand(len(rows[part]), -1, -1)
        result[part] = model.dpa(*vectors, start[part]).numpy()
    torch.set_num_threads(threads)
    result.view(np.uint32)[np.isnan(result)] = 0x7FFFFFFF
    return result
