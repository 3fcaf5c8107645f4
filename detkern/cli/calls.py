"""What `verify` and `fingerprint` examine of operations other than products: one variant and operand type on one
backend and device, called through its public function as its record says."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..dispatch import registry
from ..operations.operation import Operation, Sample
from ..operations.table import OPERATIONS
from ..tensors import Device
from ..vocabulary.contracts import CONTRACTS
from ..vocabulary.dtypes import F32, DType
from .devices import fetch, place
from .subject import Array, Selection

__all__ = ["CallSubject", "names", "offered"]

# Those whose variants are contracts are examined as products.
_CALLS = tuple(operation for operation in OPERATIONS if not set(operation.variants) <= set(CONTRACTS))


def names() -> tuple[str, ...]:
    """What `--operation` takes."""
    return tuple(variant for operation in _CALLS for variant in operation.variants)


@functools.lru_cache(64)  # of all kinds of operands, for each property that is looked at
def _largest(operation: Operation[Any], variant: str, dtype: DType, kind: str, seed: int) -> Sample:
    fitting = [s for s in operation.samples(variant, dtype, kind, seed) if s.initial is None and s.dtype == F32]
    return max(fitting, key=lambda sample: sum(x.size for x in sample.operands if x is not None))


@dataclass(frozen=True)
class CallSubject:
    """One row of the table that `verify` prints.

    name: the operation's variant.
    """

    backend: str
    device: Device
    operation: Operation[Any]
    name: str
    dtype: DType
    follows: bool = True

    def __str__(self) -> str:
        return f"{self.place_name}, {self.name} {self.dtype.short}"

    @property
    def place_name(self) -> str:
        """The backend, and the device where that is not the same word."""
        return self.backend if self.backend == str(self.device) else f"{self.backend} on {self.device}"

    @property
    def summary(self) -> str:
        """What it computes, in one line."""
        call = self.operation.call(self.name)
        return f"{call.module}.{call.name}({', '.join(call.operands)})"

    def samples(self, kind: str, seed: int) -> Iterator[Sample]:
        """The operation's own samples of one kind of operands."""
        return self.operation.samples(self.name, self.dtype, kind, seed)

    def main(self, kind: str, seed: int) -> Sample:
        """The largest sample, its result in float32."""
        return _largest(self.operation, self.name, self.dtype, kind, seed)

    def place(self, array: Array) -> Any:
        """`array` on the device."""
        return place(array, self.device)

    def call(self, arrays: Sequence[Any], sample: Sample, **arguments: Any) -> Any:
        """The public call on arrays that are on the device already."""
        arguments = {"backend": self.backend, **arguments}
        if "out" not in arguments:
            arguments["out_dtype"] = sample.dtype.name
        return self.operation.call(self.name)(arrays, sample.shape, **arguments)

    def result(self, sample: Sample) -> Array:
        """A sample's result, as NumPy."""
        arrays = [None if x is None else self.place(x) for x in sample.operands]
        if sample.initial is None:
            return fetch(self.call(arrays, sample))
        return fetch(self.call(arrays, sample, out=self.place(sample.initial), accumulate=True))

    def chosen(self, sample: Sample, selection: Selection) -> Sample:
        """The sample with some of what is independent of the rest: rows or columns, in any order."""
        along = self.operation.along
        operands = []
        for array, axis in zip(sample.operands, self.operation.independent(self.name), strict=True):
            index = (slice(None),) * (axis or 0) + (selection,)
            operands.append(array if array is None or axis is None else array[index])
        count = np.arange(sample.shape[along])[selection].size
        shape = (*sample.shape[:along], count, *sample.shape[along + 1 :])
        return replace(sample, operands=tuple(operands), shape=shape)

    def count(self, sample: Sample) -> int:
        """How many results are independent of each other."""
        return sample.shape[self.operation.along]

    def first(self, result: Array) -> Array:
        """A result with what is independent of the rest along its first axis."""
        return np.moveaxis(result, self.operation.along, 0)


def offered(device: Device, named: tuple[str, ...]) -> list[CallSubject]:
    """What the backends that dispatch chooses, and those named, compute on a device."""
    return [
        CallSubject(row.name, device, operation, variant, dtype)
        for row in registry.TABLE
        if device.kind in row.devices and (row.chosen_on(device.kind) or row.name in named)
        for operation in _CALLS
        for variant, dtype in registry.computed(registry.load(row.name), operation, device)
    ]
