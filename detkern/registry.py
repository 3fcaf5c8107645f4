"""Which backends serve which op on which kind of device, in order: one table, and the dispatch that reads it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

from .backend import Backend
from .contracts import Contract, default_contract
from .dtypes import DType
from .errors import ArgumentError, BackendUnavailable, ContractUnsupported, DeviceError
from .problem import BlockScaledProblem, ColumnSumProblem, GemmProblem
from .tensors import Device

__all__ = ["TABLE", "Row", "backend_names", "contract_for", "load", "offers", "passed_over", "select"]

Problem = GemmProblem | BlockScaledProblem | ColumnSumProblem


@dataclass(frozen=True)
class Row:
    """A backend: the module whose `BACKEND` it is, the kinds of device and the ops that it serves, and whether dispatch
    may choose it (else only `backend=` does). named_on: kinds of device on which only `backend=` chooses it."""

    name: str
    module: str
    devices: tuple[str, ...]
    ops: tuple[str, ...]
    dispatched: bool = True
    named_on: tuple[str, ...] = ()

    def chosen_on(self, kind: str) -> bool:
        """Whether dispatch may choose it on a kind of device that it serves."""
        return self.dispatched and kind not in self.named_on


# In order of preference on a device that several serve.
TABLE: tuple[Row, ...] = (
    Row("cpu", "detkern.cpu.backend", ("cpu",), ("gemm", "block_scaled_gemm", "column_sum")),
    Row("cuda", "detkern.cu.backend", ("cuda",), ("gemm", "column_sum")),
    # On host memory their kernels, compiled for the host against emulation headers, run.
    Row("musa", "detkern.npu.musa", ("musa", "cpu"), ("gemm", "column_sum"), named_on=("cpu",)),
    Row("ascend", "detkern.npu.ascend", ("ascend", "cpu"), ("gemm", "column_sum"), named_on=("cpu",)),
    Row("native", "detkern.native", ("cpu", "cuda"), ("gemm",), dispatched=False),
)


def backend_names() -> tuple[str, ...]:
    """The names that `backend=` takes."""
    return tuple(row.name for row in TABLE)


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
    capability = None
    for row in TABLE:
        if device.kind in row.devices and row.chosen_on(device.kind):
            capability = load(row.name).capability(device)
            break
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
        if device.kind not in row.devices or not row.chosen_on(device.kind) or op not in row.ops:
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
    for row in TABLE:
        if row.name != chosen and device.kind in row.devices:
            if op not in row.ops:
                reason: str | None = f"has no {op}"
            elif not row.chosen_on(device.kind):
                reason = "runs only when named"
            else:
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
