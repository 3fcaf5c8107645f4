"""Dispatch: which backend of the table in requirements.py takes a call, and what each one answered where none does."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from .backend import Backend
from .contracts import Contract, default_contract
from .dtypes import DType
from .errors import ArgumentError, BackendUnavailable, ContractUnsupported, DeviceError
from .operations.bias_gradient.problem import ColumnSumProblem
from .operations.block_scaled.problem import BlockScaledProblem
from .operations.gemm.problem import GemmProblem, gemm_problem
from .operations.rows.problem import RowProblem
from .requirements import TABLE, Row
from .tensors import Device, TensorView

__all__ = [
    "TABLE",
    "Row",
    "backend_names",
    "contract_for",
    "dispatched_names",
    "load",
    "offered",
    "offers",
    "passed_over",
    "select",
]

Problem = GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem


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


def select(op: str, problem: Problem, name: str | None) -> Backend:
    """The first backend of the table that serves `op` on the problem's device and refuses nothing, or the one named.

    Raises BackendUnavailable or ContractUnsupported with what each backend answered; DeviceError where the table has
    no row for the device.
    """
    device = problem.device
    if name is not None:
        backend = load(name)
        row = next(row for row in TABLE if row.name == name)
        if device.kind not in row.devices:
            kinds = " and ".join(row.devices)
            raise DeviceError(f"backend={name!r} works on {kinds} arrays, these are on {device}")
        if op not in row.ops:
            raise ContractUnsupported(f"backend={name!r} has no {op}; it has {', '.join(row.ops)}")
        if reason := backend.unavailable(device):
            raise BackendUnavailable(f"backend={name!r} cannot run here: {reason}")
        if reason := backend.refuses(problem):
            raise ContractUnsupported(f"backend={name!r}: {reason}")
        return backend
    answers = []
    unsupported = False
    for row in TABLE:
        if not row.chosen_on(device.kind) or op not in row.ops:
            continue
        backend = load(row.name)
        if reason := backend.unavailable(device):
            answers.append(f"{row.name}: {reason}")
        elif reason := backend.refuses(problem):
            unsupported = True
            answers.append(f"{row.name}: {reason}")
        else:
            return backend
    if not answers:
        raise DeviceError(f"no backend has {op} on {device}; backends: {', '.join(backend_names())}")
    error: Any = ContractUnsupported if unsupported else BackendUnavailable
    raise error(f"no backend takes this {op} on {device}: " + "; ".join(answers))


def passed_over(op: str, problem: Problem, chosen: str, named: bool) -> list[tuple[str, str]]:
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
            if op not in row.ops:
                reason = f"has no {op}"
            elif not row.chosen_on(device.kind):
                reason = "runs only when named"
            elif before:
                backend = load(row.name)
                reason = backend.unavailable(device) or backend.refuses(problem)
            if reason is None:
                reason = f"{chosen} was named" if named else f"{chosen} comes first"
            reasons.append((row.name, reason))
    return reasons


def offers(device: Device) -> list[tuple[Row, Backend, str | None]]:
    """Every backend of the table for this kind of device, each with why it cannot run there, or None."""
    rows = [row for row in TABLE if device.kind in row.devices]
    return [(row, load(row.name), load(row.name).unavailable(device)) for row in rows]


def offered(contract: Contract, dtype: DType, device: Device, name: str | None) -> bool:
    """Whether a backend that dispatch may choose, or the one named, computes products by a contract on a device."""
    element = TensorView(0, (1, 1), (1, 1), dtype, device)
    problem = gemm_problem(contract, element, element, element, None, False)
    for row in TABLE:
        if device.kind in row.devices if row.name == name else name is None and row.chosen_on(device.kind):
            backend = load(row.name)
            if "gemm" in row.ops and backend.unavailable(device) is None and backend.refuses(problem) is None:
                return True
    return False
