"""Dispatch: which backend of the table in requirements.py takes a call, and what each one answered where none does."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, BackendUnavailable, ContractUnsupported, DeviceError
from ..operations.problem import Problem
from ..tensors import Device
from ..vocabulary.contracts import Contract, default_contract
from ..vocabulary.dtypes import DType
from .backend import Backend, Implementation
from .requirements import TABLE, Row

if TYPE_CHECKING:
    from ..operations.operation import Operation

__all__ = [
    "TABLE",
    "Row",
    "backend_names",
    "computed",
    "contract_for",
    "dispatched_names",
    "kinds_of",
    "load",
    "offered",
    "offers",
    "operations",
    "passed_over",
    "select",
]


def backend_names() -> tuple[str, ...]:
    """The names that `backend=` takes."""
    return tuple(row.name for row in TABLE)


def dispatched_names() -> tuple[str, ...]:
    """The names of the backends that dispatch may choose: those that follow contracts."""
    return tuple(row.name for row in TABLE if row.dispatched)


@cache
def load(name: str) -> Backend:
    """The backend called `name`, its module imported now."""
    for row in TABLE:
        if row.name == name:
            backend: Backend = importlib.import_module(row.module).BACKEND
            return backend
    raise ArgumentError(f"backend={name!r} does not exist; the backends are {', '.join(backend_names())}")


def contract_for(dtype: DType, device: Device, asked: Contract | None, configured: Contract | None) -> Contract:
    """The contract of a call: the one asked for, else the process default, else the default of type and device."""
    if asked is not None:
        return asked
    if configured is not None:
        return configured
    capabilities = (load(row.name).capability(device) for row in TABLE if row.chosen_on(device.kind))
    capability = next((known for known in capabilities if known is not None), None)
    return default_contract(dtype, device.kind, capability)


def operations(backend: Backend) -> list[str]:
    """The names of the operations that a backend implements."""
    from ..operations.table import OPERATIONS  # where it is asked: no call needs it

    return [operation.name for operation in OPERATIONS if operation.problem in backend.implementations]


@cache
def kinds_of(operation: Operation[Any]) -> frozenset[str]:
    """The kinds of device on which a backend implements an operation."""
    rows = [row for row in TABLE if operation.problem in load(row.name).implementations]
    return frozenset(kind for row in rows for kind in row.devices)


def select(problem: Problem, name: str | None) -> tuple[Backend, Implementation[Any]]:
    """The first backend of the table that implements the problem's operation on its device and refuses nothing, or the
    one named, with its implementation.

    Raises BackendUnavailable or ContractUnsupported with what each backend answered; DeviceError where the table has
    no row for the device.
    """
    device, kind, op = problem.device, type(problem), problem.operation
    if name is not None:
        backend = load(name)
        row = next(row for row in TABLE if row.name == name)
        if device.kind not in row.devices:
            kinds = " and ".join(row.devices)
            raise DeviceError(f"backend={name!r} works on {kinds} arrays, these are on {device}")
        implementation = backend.implementations.get(kind)
        if implementation is None:
            raise ContractUnsupported(f"backend={name!r} has no {op}; it has {', '.join(operations(backend))}")
        if reason := backend.unavailable(device):
            raise BackendUnavailable(f"backend={name!r} cannot run here: {reason}")
        if reason := implementation.refuses(problem):
            raise ContractUnsupported(f"backend={name!r}: {reason}")
        return backend, implementation
    answers = []
    unsupported = False
    for row in TABLE:
        if not row.chosen_on(device.kind):
            continue
        backend = load(row.name)
        implementation = backend.implementations.get(kind)
        if implementation is None:
            continue
        if reason := backend.unavailable(device):
            answers.append(f"{row.name}: {reason}")
        elif reason := implementation.refuses(problem):
            unsupported = True
            answers.append(f"{row.name}: {reason}")
        else:
            return backend, implementation
    if not answers:
        raise DeviceError(f"no backend has {op} on {device}; backends: {', '.join(backend_names())}")
    error: Any = ContractUnsupported if unsupported else BackendUnavailable
    raise error(f"no backend takes this {op} on {device}: " + "; ".join(answers))


def passed_over(problem: Problem, chosen: str, named: bool) -> list[tuple[str, str]]:
    """Every backend for the problem's kind of device but the chosen one, with why it is not the one. `named`: the
    caller named the chosen one."""
    device = problem.device
    reasons = []
    before = True  # those behind the chosen one are not asked: they need not be loaded for it
    for row in TABLE:
        if row.name == chosen:
            before = False
        elif device.kind in row.devices:
            reason: str | None = None
            if not row.chosen_on(device.kind):
                reason = "runs only when named"
            elif before:
                backend = load(row.name)
                implementation = backend.implementations.get(type(problem))
                if implementation is None:
                    reason = f"has no {problem.operation}"
                else:
                    reason = backend.unavailable(device) or implementation.refuses(problem)
            if reason is None:
                reason = f"{chosen} was named" if named else f"{chosen} comes first"
            reasons.append((row.name, reason))
    return reasons


def offers(device: Device) -> list[tuple[Row, Backend, str | None]]:
    """Every backend of the table for this kind of device, each with why it cannot run there, or None."""
    rows = [row for row in TABLE if device.kind in row.devices]
    return [(row, load(row.name), load(row.name).unavailable(device)) for row in rows]


def computed(backend: Backend, operation: Operation[Any], device: Device) -> list[tuple[str, DType]]:
    """The variants and operand types of an operation that a backend computes on a device; runs the self-checks that
    have not run yet. Nothing where it cannot run, or follows no contract."""
    implementation = backend.implementations.get(operation.problem)
    if implementation is None or not backend.deterministic or backend.unavailable(device) is not None:
        return []
    return [
        (variant, dtype)
        for variant, dtypes in operation.variants.items()
        for dtype in dtypes
        if implementation.refuses(operation.example(variant, dtype, device)) is None
    ]


def offered(contract: Contract, dtype: DType, device: Device, name: str | None) -> bool:
    """Whether a backend that dispatch may choose, or the one named, computes products by a contract on a device."""
    from ..operations.gemm.operation import GEMM

    problem = GEMM.example(contract.name, dtype, device)
    for row in TABLE:
        if device.kind in row.devices if row.name == name else name is None and row.chosen_on(device.kind):
            backend = load(row.name)
            implementation = backend.implementations.get(GEMM.problem)
            if implementation is None or backend.unavailable(device) is not None:
                continue
            if implementation.refuses(problem) is None:
                return True
    return False
