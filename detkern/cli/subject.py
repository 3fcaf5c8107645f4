"""What `verify` and `fingerprint` examine: one backend, device, contract and operand type,
and products made with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import detkern

from ..api import block_scaled_gemm
from ..dispatch import registry, requirements
from ..errors import ArgumentError, BackendUnavailable
from ..operations.table import OPERATIONS
from ..tensors import Device
from ..vocabulary.contracts import CONTRACTS, FP8_BLOCK128, Contract, default_contract
from ..vocabulary.dtypes import BF16, E4M3, E5M2, F16, F32, DType
from ..vocabulary.operands import generate
from .devices import devices, fetch, no_device, place

__all__ = ["Array", "Operands", "Subject", "find", "sample"]

Array = npt.NDArray[Any]
Selection = slice | npt.NDArray[np.intp]

BLOCK = 128  # the k under one scale of fp8-block128


@dataclass(frozen=True)
class Operands:
    """a [M, K] and b [K, N], with scale_a [M, K/128] and scale_b [K/128, N] where the contract has scales."""

    a: Array
    b: Array
    scale_a: Array | None = None
    scale_b: Array | None = None

    @property
    def m(self) -> int:
        return int(self.a.shape[0])

    @property
    def n(self) -> int:
        return int(self.b.shape[1])

    @property
    def k(self) -> int:
        return int(self.a.shape[1])

    def rows(self, chosen: Selection) -> Operands:
        """The same with some rows of a."""
        return replace(self, a=self.a[chosen], scale_a=None if self.scale_a is None else self.scale_a[chosen])

    def columns(self, chosen: Selection) -> Operands:
        """The same with some columns of b."""
        return replace(self, b=self.b[:, chosen], scale_b=None if self.scale_b is None else self.scale_b[:, chosen])

    def depth(self, start: int, stop: int) -> Operands:
        """The same over k in [start, stop), multiples of 128 where there are scales."""
        piece = Operands(self.a[:, start:stop], self.b[start:stop])
        if self.scale_a is None or self.scale_b is None:
            return piece
        blocks = slice(start // BLOCK, stop // BLOCK)
        return replace(piece, scale_a=self.scale_a[:, blocks], scale_b=self.scale_b[blocks])

    def padded(self, before: int, after: int, zero: float = 0.0) -> Operands:
        """The same with zeros in front of and behind K (and scales of 1)."""

        def pad(array: Array, axis: int, unit: int, value: float) -> Array:
            widths = [(0, 0), (0, 0)]
            widths[axis] = (before // unit, after // unit)
            return np.pad(array, widths, constant_values=np.asarray(value, array.dtype))

        return Operands(
            pad(self.a, 1, 1, zero),
            pad(self.b, 0, 1, 0.0),
            None if self.scale_a is None else pad(self.scale_a, 1, BLOCK, 1.0),
            None if self.scale_b is None else pad(self.scale_b, 0, BLOCK, 1.0),
        )

    def exact(self) -> tuple[Array, Array]:
        """a and b in float64, the scales multiplied in."""
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        if self.scale_a is None or self.scale_b is None:
            return a, b
        return (
            a * np.repeat(self.scale_a.astype(np.float64), BLOCK, axis=1),
            b * np.repeat(self.scale_b.astype(np.float64), BLOCK, axis=0),
        )


@dataclass(frozen=True)
class Subject:
    """One row of the table that `verify` prints.

    backend:  the name that `backend=` takes.
    contract: what it computes; for a backend that follows none (native), what its bits are held against.
    """

    backend: str
    device: Device
    contract: Contract
    dtype: DType
    follows: bool = True

    @property
    def name(self) -> str:
        """What it is called beside its type."""
        return self.contract.name

    @property
    def summary(self) -> str:
        """What it computes, in one line."""
        return self.contract.summary

    @property
    def scaled(self) -> bool:
        """Whether the operands carry scales (fp8)."""
        return self.contract == FP8_BLOCK128

    @property
    def out_dtype(self) -> DType:
        """What a result is when nothing is said."""
        return F32 if self.scaled else self.dtype

    @property
    def b_dtypes(self) -> tuple[DType, ...]:
        """The types of b that go with an a of `dtype`."""
        return (self.dtype, E5M2 if self.dtype == E4M3 else E4M3) if self.scaled else (self.dtype,)

    def __str__(self) -> str:
        return f"{self.place_name}, {self.contract} {self.dtype.short}"

    @property
    def place_name(self) -> str:
        """The backend, and the device where that is not the same word."""
        return self.backend if self.backend == str(self.device) else f"{self.backend} on {self.device}"

    def depth(self, k: int) -> int:
        """The smallest K that the contract takes, at least `k`."""
        unit = self.contract.k_multiple
        return -(-k // unit) * unit

    def place(self, array: Array) -> Any:
        """`array` on the device."""
        return place(array, self.device)

    def call(self, a: Any, b: Any, scale_a: Any = None, scale_b: Any = None, **arguments: Any) -> Any:
        """The public call on arrays that are on the device already."""
        if self.scaled:
            return block_scaled_gemm(a, scale_a, b, scale_b, backend=self.backend, **arguments)
        contract = self.contract.name if self.follows else None
        return detkern.gemm(a, b, contract=contract, backend=self.backend, **arguments)

    def product(
        self,
        operands: Operands,
        *,
        bias: Array | None = None,
        initial: Array | None = None,
        out_dtype: DType | None = None,
    ) -> Array:
        """The product of NumPy operands, as NumPy. `initial` is a float32 [M, N] to accumulate into; it is copied."""
        arguments: dict[str, Any] = {}
        if bias is not None:
            arguments["bias"] = self.place(bias)
        if initial is not None:
            arguments |= {"out": self.place(initial), "accumulate": True}
        elif out_dtype is not None:
            arguments["out_dtype"] = out_dtype.name
        scales = [None if s is None else self.place(s) for s in (operands.scale_a, operands.scale_b)]
        return fetch(self.call(self.place(operands.a), self.place(operands.b), *scales, **arguments))


def sample(
    subject: Subject, kind: str, m: int, n: int, k: int, seed: int = 0, b_dtype: DType | None = None
) -> Operands:
    """Operands of one kind of the versioned generator; K is rounded up to what the contract takes.

    Every (subject's types, kind, sizes, seed) gives the same bits on every machine. Scales are of the kind "normal",
    except that "special" and "bits" operands have scales of their kind.
    """
    k = subject.depth(k)
    a = generate(kind, subject.dtype, (m, k), 4 * seed)
    b = generate(kind, b_dtype or subject.dtype, (k, n), 4 * seed + 1)
    if not subject.scaled:
        return Operands(a, b)
    scales = kind if kind in ("special", "bits") else "normal"
    blocks = k // BLOCK
    return Operands(
        a, b, generate(scales, F32, (m, blocks), 4 * seed + 2), generate(scales, F32, (blocks, n), 4 * seed + 3)
    )


def find(backends: tuple[str, ...], wanted: tuple[Device, ...], contracts: tuple[str, ...]) -> list[Subject]:
    """Every backend x device x contract x type that is available and that the filters let pass, in the order of the
    tables. Empty filters let everything pass, except backends that dispatch never chooses: those must be named.

    Raises ArgumentError, saying what there is, where nothing is left; BackendUnavailable where a named backend runs on
    none of the devices, saying why.
    """
    for name in backends:
        if name not in registry.backend_names():
            known = ", ".join(registry.backend_names())
            raise ArgumentError(f"--backend {name}: there is no such backend; the backends are {known}")
    present = devices()
    for device in wanted:
        if device not in present:
            reason = no_device(device.kind)
            because = f" ({reason})" if reason else ""
            raise ArgumentError(f"--device {device}: not here{because}; there is {', '.join(map(str, present))}")
    reasons: list[str] = []
    everything = [subject for device in present for subject in _offered(device, backends, reasons)]
    here = [device for device in present if not wanted or device in wanted]
    for name in backends:
        if not any(subject.backend == name and subject.device in here for subject in everything):
            raise BackendUnavailable(f"--backend {name} cannot run {_why_not(name, here, bool(wanted))}")
    found = [
        subject
        for subject in everything
        if (not backends or subject.backend in backends)
        and subject.device in here
        and (not contracts or subject.contract.name in contracts)
    ]
    if not found:
        names = dict.fromkeys(f"{s.place_name} {s.contract}" for s in everything)
        said = f" ({'; '.join(reasons)})" if reasons else ""
        raise ArgumentError(f"nothing here matches; there is {', '.join(names) or 'no available backend'}{said}")
    return found


def _why_not(name: str, here: list[Device], named: bool) -> str:
    """Where and why a backend cannot run: on each of these devices that it serves; on its kinds of device where it
    serves none of them. named: the caller named the devices."""
    row = requirements.row(name)
    backend = registry.load(name)
    served = [device for device in here if device.kind in row.devices]
    answers = [f"on {device}: {backend.unavailable(device) or 'it computes no contract there'}" for device in served]
    if named and not served:
        return f"on {' or '.join(map(str, here))}: it works on {' and '.join(row.devices)} devices"
    kinds = [] if named else [kind for kind in row.devices if kind not in {device.kind for device in served}]
    answers += [f"on {kind}: {row.not_installed() or no_device(kind)}" for kind in kinds]
    return "; ".join(answers)


def _offered(device: Device, named: tuple[str, ...], reasons: list[str]) -> list[Subject]:
    """What the backends that dispatch chooses, and those named, compute on a device;
    `reasons` gets why others do not."""
    subjects = []
    for row in registry.TABLE:
        if device.kind not in row.devices or not (row.chosen_on(device.kind) or row.name in named):
            continue
        backend = registry.load(row.name)
        if reason := backend.unavailable(device):
            reasons.append(f"{row.name} on {device} is unavailable: {reason}")
            continue
        products = [operation for operation in OPERATIONS if set(operation.variants) <= set(CONTRACTS)]
        pairs = [
            (CONTRACTS[name], dtype)
            for operation in products
            for name, dtype in registry.computed(backend, operation, device)
        ]
        if not backend.deterministic:
            pairs = [(default_contract(d, device.kind, backend.capability(device)), d) for d in (F32, F16, BF16)]
        for contract, dtype in pairs:
            subjects.append(Subject(row.name, device, contract, dtype, backend.deterministic))
    return subjects
