"""The check of a device on which a contract has not been seen: hostile operands, bit for bit against the CPU replay.

The arithmetic of a tensor core may differ (the generations do, the makers do), and so may what a compiler makes of a kernel;
so a contract is offered on a device only after this check, which runs once per device, driver and kernel source; its
outcome is kept on disk. One differing bit refuses the contract there. A backend may leave it out on devices where its
kernels and the replay were compared at length before release. What backends say of a check is worded here too.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from . import cache, operands
from .arithmetic.float_environment import default_float_environment
from .contracts import Contract
from .dtypes import F32, DType, from_numpy
from .errors import ArgumentError, DetkernError
from .operations.bias_gradient.replay import column_sum as replayed_column_sum
from .operations.gemm import replay as numpy_replay
from .operations.rows import replay as numpy_rows
from .operations.rows.problem import RowKind

__all__ = [
    "COLUMN_SUM",
    "CheckedDevice",
    "Outcome",
    "check",
    "check_column_sum",
    "check_rows",
    "column_sum_outcome",
    "known_outcome",
    "known_to_differ",
    "outcome",
    "refusal",
    "reports",
    "rows_outcome",
    "types_of",
    "unfinished",
]

Array = npt.NDArray[Any]
# (contract, a [M, K], b [K, N], float32 initial [M, N] or None) -> out [M, N], float32 with an initial, else as a.
Product = Callable[[Contract, Array, Array, Array | None], Array]
# (dc [M, N], float32 initial [N] or None) -> out [N], float32 with an initial, else as dc.
ColumnSum = Callable[[Array, Array | None], Array]

# (kind, a, b or None, width) -> the result in float32, [M] or [M, N].
Rows = Callable[[RowKind, Array, Array | None, int], Array]

# The name under which the bias gradient is kept: no product's contract.
COLUMN_SUM = "column_sum"

# A change of what is checked makes older outcomes void.
_VERSION = 1
_M, _N = 48, 40
_DEPTHS = (8, 33, 128, 515)
# Rows and columns: rows that begin at multiples of 16 bytes and that do not, of a warp; some also of a CTA and a cluster.
_ROWS = ((16, 1), (16, 67), (16, 128), (16, 600))
_WIDE_ROWS = ((5, 4096), (3, 9001), (2, 20_011))


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


def check(contract: Contract, operand: DType, product: Product) -> Outcome:
    """Compare `product` with the replay on every kind of operands, from +0 and from a starting accumulator."""

    def cases() -> Iterator[tuple[str, Array, Array]]:
        for number, kind in enumerate(operands.KINDS):
            for k in _DEPTHS:
                a = operands.generate(kind, operand, (_M, k), 2 * number)
                b = operands.generate(kind, operand, (k, _N), 2 * number + 1)
                for initial in (None, operands.generate(kind, F32, (_M, _N), number)):
                    with default_float_environment():
                        expected = numpy_replay.gemm(contract, a, b, initial=initial)
                    yield f"{kind} operands, k={k}, from {_start(initial)}", expected, product(contract, a, b, initial)

    return _compared(cases(), "element [{}, {}]")


def check_column_sum(operand: DType, column_sum: ColumnSum) -> Outcome:
    """Compare `column_sum` with the replay on every kind of operands, from +0 and from a starting accumulator."""

    def cases() -> Iterator[tuple[str, Array, Array]]:
        for number, kind in enumerate(operands.KINDS):
            for m in _DEPTHS:
                dc = operands.generate(kind, operand, (m, _N), number)
                for initial in (None, operands.generate(kind, F32, (_N,), number)):
                    with default_float_environment():
                        expected = replayed_column_sum(dc, initial=initial)
                    yield f"{kind} operands, m={m}, from {_start(initial)}", expected, column_sum(dc, initial)

    return _compared(cases(), "column {}")


def types_of(array: Array, initial: Array | None, argument: str) -> tuple[DType, DType]:
    """The types of an operand that a check hands over, and of the result that it wants."""
    operand = from_numpy(array.dtype)
    if operand is None:
        raise ArgumentError(f"{argument} of {array.dtype} has no kernel")
    return operand, operand if initial is None else F32


def _start(initial: Array | None) -> str:
    return "zero" if initial is None else "an accumulator"


def _compared(cases: Iterable[tuple[str, Array, Array]], place: str) -> Outcome:
    """The outcome over (what was computed, the replay's result, the kernel's). place: names an element by its indices."""
    elements = differing = 0
    example = ""
    for about, expected, got in cases:
        bits = np.dtype(f"u{expected.dtype.itemsize}")
        wanted, found = expected.view(bits), got.view(bits)
        wrong = np.argwhere(wanted != found)
        elements += expected.size
        differing += len(wrong)
        if len(wrong) and not example:
            first = tuple(map(int, wrong[0]))
            example = f"{about}, {place.format(*first)}: {found[first]:#x}, not {wanted[first]:#x}"
    return Outcome(elements, differing, example)


def check_rows(kind: RowKind, operand: DType, rows: Rows) -> Outcome:
    """Compare `rows` with the replay on every kind of operands and on rows of softmax's own range."""

    def cases() -> Iterator[tuple[str, Array, Array]]:
        for number, name in enumerate(("logits", *operands.KINDS)):
            for shape in _ROWS + _WIDE_ROWS * (name in ("logits", "bits")):
                if name == "logits":
                    a = (8 * operands.generate("normal", F32, shape, number)).astype(operand.numpy)
                else:
                    a = operands.generate(name, operand, shape, number)
                if kind.spreads:
                    a = np.ascontiguousarray(a[:, 0])
                b = None
                if kind.operands == 2:
                    b = operands.generate("normal" if name == "logits" else name, operand, shape, number + 100)
                with default_float_environment():
                    expected = numpy_rows.rows(kind, a, b, width=shape[1], out_dtype=F32)
                yield f"{name} operands, n={shape[1]}", expected, rows(kind, a, b, shape[1])

    return _compared(cases(), "row {}" if kind.reduces else "element [{}, {}]")


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
    device: CheckedDevice, contract: Contract, operand: DType, backend: str, digest: str, product: Product
) -> Outcome:
    """The outcome on a device: found earlier, or the check run now. What `product` raises comes through and is not kept."""
    return _outcome(device, contract.name, operand, backend, digest, lambda: check(contract, operand, product))


def column_sum_outcome(
    device: CheckedDevice, operand: DType, backend: str, digest: str, column_sum: ColumnSum
) -> Outcome:
    """The bias gradient's outcome on a device, likewise."""
    return _outcome(device, COLUMN_SUM, operand, backend, digest, lambda: check_column_sum(operand, column_sum))


def rows_outcome(
    device: CheckedDevice, kind: RowKind, operand: DType, backend: str, digest: str, rows: Rows
) -> Outcome:
    """A row operation's outcome on a device, likewise."""
    return _outcome(device, kind.label, operand, backend, digest, lambda: check_rows(kind, operand, rows))


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
    """Why nothing is offered for now where a check has raised `error`. That is not an answer yet: the next call tries again."""
    return f"the self-check of {name} for {operand.short} on {device} did not finish: {error}"


def reports(device: CheckedDevice, checks: Iterable[tuple[Contract | str, DType, str]], backend: str) -> dict[str, str]:
    """What `detkern info` shows of checks on a device, each given as (contract, operand, digest)."""
    result = {}
    for contract, operand, digest in checks:
        found = known_outcome(device, contract, operand, backend, digest)
        result[f"self-check of {contract} {operand.short}"] = "not run yet" if found is None else str(found)
    return result


def _outcome(
    device: CheckedDevice, name: str, operand: DType, backend: str, digest: str, run: Callable[[], Outcome]
) -> Outcome:
    with _lock:
        found = known_outcome(device, name, operand, backend, digest)
        if found is None:
            found = run()
            about = {"device": device.name, "driver": device.driver, "contract": name, "operand": operand.name}
            path = _path(device, name, operand, backend, digest)
            cache.keep(path, json.dumps(about | asdict(found), indent=2).encode())
            _outcomes[device, name, operand, digest] = found
    return found
