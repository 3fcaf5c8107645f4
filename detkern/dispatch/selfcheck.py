"""The check of a device on which something has not been seen: hostile operands, bit for bit against the CPU replay.

The arithmetic of a tensor core may differ (the generations do, the makers do), and so may what a compiler makes of a
kernel; so a variant of an operation (a contract, a kind of rows) is offered on a device only after this check, which
runs once per device, driver and kernel source; its outcome is kept on disk. One differing bit refuses it there. A
backend may leave the check out on devices where its kernels and the replay were compared at length before release. What
backends say of a check is worded here too.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import DetkernError
from ..files import cache
from ..operations.memory import host_view
from ..operations.operation import Operation, Sample, replayed
from ..tensors.execution import Execution
from ..tensors.view import TensorView
from ..vocabulary import operands
from ..vocabulary.contracts import Contract
from ..vocabulary.dtypes import DType
from .backend import Implementation

__all__ = [
    "CheckedDevice",
    "Compute",
    "Outcome",
    "Place",
    "check",
    "computed_at",
    "known_outcome",
    "known_to_differ",
    "outcome",
    "refusal",
    "reports",
    "unfinished",
]

# A sample's result on the device, as NumPy.
Compute = Callable[[Sample], npt.NDArray[Any]]

# A change of what is checked makes older outcomes void.
_VERSION = 1


class Place(Protocol):
    """Memory on a device for NumPy arrays, and a stream. put copies, fetch waits."""

    execution: Execution

    def new(self, shape: tuple[int, ...], dtype: DType) -> TensorView: ...
    def put(self, array: npt.NDArray[Any], dtype: DType) -> TensorView: ...
    def fetch(self, view: TensorView) -> npt.NDArray[Any]: ...


def computed_at(
    place: Place, operation: Operation[Any], implementation: Implementation[Any], sample: Sample
) -> npt.NDArray[Any]:
    """A sample's result by an implementation, computed where `place` is.

    Raises ArgumentError where an array has no element type of detkern's.
    """
    operands = tuple(None if array is None else place.put(array, host_view(array).dtype) for array in sample.operands)
    start = sample.initial
    out = place.new(sample.shape, sample.dtype) if start is None else place.put(start, sample.dtype)
    problem = operation.problem_of(sample, operands, out)
    if 0 not in sample.shape:
        implementation.prepare(problem, place.execution)(problem.m, operands, out, place.execution)
    return place.fetch(out)


class CheckedDevice(Protocol):
    """What tells devices apart: another name, serial number or driver is checked anew. Hashable."""

    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def driver(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How often kernel and replay differ. example: the first difference, for people; empty where there is none."""

    elements: int
    differing: int
    example: str

    def __str__(self) -> str:
        if not self.differing:
            return f"agrees with the CPU replay on {self.elements} elements"
        return f"differs from the CPU replay in {self.differing} of {self.elements} elements ({self.example})"

    def refusal(self, name: Contract | str, operand: DType, device: object) -> str | None:
        """Why what was checked is not offered, or None. device: as people know it."""
        return f"{name} for {operand.short} on {device} {self}" if self.differing else None


def check(operation: Operation[Any], variant: str, operand: DType, compute: Compute) -> Outcome:
    """Compare `compute` with the replay on the operation's own cases, which reach every kind of operands."""
    elements = differing = 0
    example = ""
    for sample in operation.cases(variant, operand):
        expected, got = replayed(operation, sample), compute(sample)
        bits = np.dtype(f"u{expected.dtype.itemsize}")
        wanted, found = expected.view(bits), got.view(bits)
        wrong = np.argwhere(wanted != found)
        elements += expected.size
        differing += len(wrong)
        if len(wrong) and not example:
            first = tuple(map(int, wrong[0]))
            example = f"{sample.about}, element {list(first)}: {found[first]:#x}, not {wanted[first]:#x}"
    return Outcome(elements, differing, example)


_outcomes: dict[tuple[CheckedDevice, str, DType, str], Outcome] = {}
_lock = threading.RLock()


def _path(device: CheckedDevice, name: str, operand: DType, backend: str, digest: str) -> Path:
    parts = (
        device.name, device.uuid, device.driver, name, operand.name, digest, str(operands.VERSION), str(_VERSION),
    )  # fmt: skip
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return cache.folder(backend) / f"selfcheck-{key}.json"


def known_outcome(
    device: CheckedDevice, contract: Contract | str, operand: DType, backend: str, digest: str
) -> Outcome | None:
    """The outcome found earlier, in this process or another, or None where the check has not run yet.

    backend: the folder of the cache. digest: of everything that the kernel's bits may depend on, such as its source.
    """
    name = str(contract)
    found = _outcomes.get((device, name, operand, digest))
    if found is None:
        try:
            fields = json.loads(_path(device, name, operand, backend, digest).read_text())
            found = Outcome(int(fields["elements"]), int(fields["differing"]), str(fields["example"]))
        except (OSError, ValueError, KeyError, TypeError, DetkernError):
            return None
        _outcomes[device, name, operand, digest] = found
    return found


def outcome(
    device: CheckedDevice,
    operation: Operation[Any],
    variant: str,
    operand: DType,
    backend: str,
    digest: str,
    compute: Compute,
) -> Outcome:
    """The outcome on a device: found earlier, or the check run now. What `compute` raises comes through and is not
    kept."""
    with _lock:
        found = known_outcome(device, variant, operand, backend, digest)
        if found is None:
            found = check(operation, variant, operand, compute)
            about = {"device": device.name, "driver": device.driver, "contract": variant, "operand": operand.name}
            path = _path(device, variant, operand, backend, digest)
            cache.keep(path, json.dumps(about | asdict(found), indent=2).encode())
            _outcomes[device, variant, operand, digest] = found
    return found


def known_to_differ(device: CheckedDevice, contract: Contract | str, operand: DType, backend: str, digest: str) -> bool:
    """Whether an outcome was found earlier and refuses the contract."""
    found = known_outcome(device, contract, operand, backend, digest)
    return found is not None and found.differing > 0


def refusal(name: Contract | str, operand: DType, device: object, run: Callable[[], Outcome]) -> str | None:
    """Why a device does not offer what `run` checks, or None. device: as people know it."""
    try:
        return run().refusal(name, operand, device)
    except DetkernError as error:
        return unfinished(name, operand, device, error)


def unfinished(name: Contract | str, operand: DType, device: object, error: DetkernError) -> str:
    """Why nothing is offered for now where a check has raised `error`. That is not an answer yet: the next call tries
    again."""
    return f"the self-check of {name} for {operand.short} on {device} did not finish: {error}"


def reports(device: CheckedDevice, checks: Iterable[tuple[Contract | str, DType, str]], backend: str) -> dict[str, str]:
    """What `detkern info` shows of checks on a device, each given as (contract, operand, digest)."""
    result = {}
    for contract, operand, digest in checks:
        found = known_outcome(device, contract, operand, backend, digest)
        result[f"self-check of {contract} {operand.short}"] = "not run yet" if found is None else str(found)
    return result
