"""The check of a device on first use: hostile operands, bit for bit against the CPU replay, kept per device, driver and
library. Operands and comparison are those of the CUDA devices' check."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import operands
from ..abi import mirror
from ..abi.build import cache_folder
from ..abi.descriptors import column_sum_descriptor, gemm_descriptors
from ..abi.library import Library
from ..contracts import Contract
from ..cu.loader import keep
from ..cu.selfcheck import Outcome, check, check_column_sum
from ..dtypes import F32, DType, from_numpy
from ..errors import DetkernError
from ..problem import column_sum_problem, gemm_problem
from ..tensors import Device, TensorView

__all__ = ["COLUMN_SUM", "known_outcome", "outcome"]

Array = npt.NDArray[Any]

# The name under which the bias gradient is kept: no product's contract.
COLUMN_SUM = "column_sum"

# A change of what is checked makes older outcomes void.
_VERSION = 1

_outcomes: dict[str, Outcome] = {}
_lock = threading.Lock()


@functools.lru_cache(maxsize=8)
def _content(path: Path) -> str:
    """The digest of a library, which stays the one that is loaded."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _key(library: Library, device: Device, name: str, operand: DType) -> str:
    about = library.device(device.index)
    content = _content(library.path)
    parts = (
        device.kind, about.name.decode(), about.driver.decode(), name, operand.name, content,
        str(operands.VERSION), str(_VERSION),
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def known_outcome(library: Library, device: Device, contract: Contract | str, operand: DType) -> Outcome | None:
    """The outcome found earlier, in this process or another, or None where the check has not run yet."""
    return _known(_key(library, device, str(contract), operand))


def _known(key: str) -> Outcome | None:
    found = _outcomes.get(key)
    if found is None:
        try:
            fields = json.loads((cache_folder() / f"selfcheck-{key}.json").read_text())
            found = Outcome(int(fields["elements"]), int(fields["differing"]), str(fields["example"]))
        except (OSError, ValueError, KeyError, TypeError, DetkernError):
            return None
        _outcomes[key] = found
    return found


def outcome(library: Library, device: Device, contract: Contract | str, operand: DType) -> Outcome:
    """The outcome on a device: found earlier, or the check run now. contract: a product's, or COLUMN_SUM.

    What the library raises comes through and is not kept.
    """
    key = _key(library, device, str(contract), operand)
    with _lock:
        found = _known(key)
        if found is None:
            if isinstance(contract, Contract):
                found = check(contract, operand, lambda *arguments: _product(library, device, *arguments))
            else:
                found = check_column_sum(operand, lambda *arguments: _column_sum(library, device, *arguments))
            about = {"device": library.device(device.index).name.decode(), "contract": str(contract)}
            record = about | {"operand": operand.name} | asdict(found)
            keep(cache_folder() / f"selfcheck-{key}.json", json.dumps(record, indent=2).encode())
            _outcomes[key] = found
    return found


def _product(library: Library, device: Device, contract: Contract, a: Array, b: Array, initial: Array | None) -> Array:
    """The product of NumPy arrays a [M, K] and b [K, N] on a device, as a NumPy array."""
    out = np.zeros((a.shape[0], b.shape[1]), a.dtype) if initial is None else np.array(initial, np.float32)
    with ExitStack() as memory:
        left, right, target = (_place(library, device, array, memory) for array in (a, b, out))
        problem = gemm_problem(contract, left, right, target, None, initial is not None)
        ((template, _),) = gemm_descriptors(problem)
        descriptor = mirror.GemmDescriptor.from_buffer_copy(template)
        descriptor.device = device.index
        descriptor.a, descriptor.b, descriptor.out = left.pointer, right.pointer, target.pointer
        size = library.gemm_scratch(descriptor)
        descriptor.scratch, descriptor.scratch_bytes = memory.enter_context(library.memory(device.index, size)), size
        library.gemm(descriptor)
        library.copy(device.index, out.ctypes.data, target.pointer, out.nbytes, mirror.TO_HOST)
    return out


def _column_sum(library: Library, device: Device, dc: Array, initial: Array | None) -> Array:
    """The bias gradient of a NumPy array dc [M, N] on a device, as a NumPy array."""
    out = np.zeros(dc.shape[1], dc.dtype) if initial is None else np.array(initial, np.float32)
    with ExitStack() as memory:
        rows, target = (_place(library, device, array, memory) for array in (dc, out))
        problem = column_sum_problem(rows, target, initial is not None)
        descriptor = mirror.ColumnSumDescriptor.from_buffer_copy(column_sum_descriptor(problem))
        descriptor.device = device.index
        descriptor.dc, descriptor.out = rows.pointer, target.pointer
        library.column_sum(descriptor)
        library.copy(device.index, out.ctypes.data, target.pointer, out.nbytes, mirror.TO_HOST)
    return out


def _place(library: Library, device: Device, array: Array, memory: ExitStack) -> TensorView:
    """A view of a copy of the array on a device, freed with `memory`."""
    array = np.ascontiguousarray(array)
    pointer = memory.enter_context(library.memory(device.index, array.nbytes))
    library.copy(device.index, pointer, array.ctypes.data, array.nbytes, mirror.TO_DEVICE)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return TensorView(pointer, array.shape, strides, from_numpy(array.dtype) or F32, device)
