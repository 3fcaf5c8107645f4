"""The backend of both platforms: from a problem to a call of the platform's shared library."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .. import config
from ..abi.library import Library
from ..dispatch import requirements, selfcheck
from ..dispatch.backend import Kernel, Run
from ..errors import DetkernError
from ..operations.bias_gradient.operation import BIAS_GRADIENT
from ..operations.gemm.operation import GEMM
from ..operations.gemm.problem import GemmProblem
from ..operations.operation import Operation
from ..operations.problem import Operands, Problem
from ..tensors.execution import Execution
from ..tensors.view import Device, TensorView
from ..vocabulary.contracts import Contract
from ..vocabulary.dtypes import DType
from . import host_arrays
from .libraries import find_library
from .platform import Platform

__all__ = ["NpuBackend"]

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class _CheckedDevice:
    """What the self-check's outcome is kept for. The libraries know no serial numbers: uuid is the device's own
    ordinal."""

    name: str
    uuid: str
    driver: str


@functools.lru_cache(maxsize=8)
def _digest(library: Library) -> str:
    """SHA-256 of a library's file."""
    return hashlib.sha256(library.path.read_bytes()).hexdigest()


class NpuImplementation(Generic[P]):
    """`backend.Implementation` of an operation by a function of the platform's library."""

    def __init__(self, backend: NpuBackend, operation: Operation[P]) -> None:
        self.backend, self.operation = backend, operation

    def refuses(self, problem: P) -> str | None:
        """Why the library will not take it; runs the self-check on a real device where that has not run yet."""
        backend = self.backend
        if reason := self.operation.misfit(problem):
            return reason
        variant, dtype = self.operation.variant_of(problem)
        if reason := backend.lacks(self.operation, problem.device, variant, dtype):
            return reason
        return backend.differs(self.operation, problem.device, variant, dtype)

    def explain(self, problem: P) -> Kernel:
        platform, library, descriptor = (
            self.backend.platform,
            self.backend.library(problem.device),
            self.operation.descriptor,
        )
        assert descriptor is not None
        variant, _ = self.operation.variant_of(problem)
        launch = descriptor.structure.from_buffer_copy(descriptor.templates(problem)[0][0])
        launch.device = problem.device.index
        return Kernel(
            name=f"{variant} ({platform.source.name}, {library.name})",
            tile=platform.tile,
            geometry=f"{platform.name} blocks that walk the tiles",
            scratch_bytes=self.scratch(library, launch),
        )

    def prepare(self, problem: P, execution: Execution) -> Run:
        """What enqueues it. Raises DeviceError where the library reports one."""
        descriptor = self.operation.descriptor
        assert descriptor is not None
        launches, code = descriptor.launches(problem), descriptor.code

        def run(m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
            library = self.backend.library(problem.device)
            for launch in launches(m, operands, out):
                launch.device = problem.device.index
                launch.stream = execution.stream
                size = self.scratch(library, launch)
                scratch = execution.allocate(size) if size else None  # held until the work is enqueued
                if scratch is not None:
                    launch.scratch, launch.scratch_bytes = scratch.pointer, size
                library.run(code, launch)

        return run

    def scratch(self, library: Library, launch: Any) -> int:
        """The bytes of scratch memory that a launch needs."""
        descriptor = self.operation.descriptor
        assert descriptor is not None
        return library.scratch(descriptor.code, launch) if hasattr(launch, "scratch") else 0


class Products(NpuImplementation[GemmProblem]):
    """Products by the contracts that the table and the library have."""

    def refuses(self, problem: GemmProblem) -> str | None:
        """Why the problem's contract is not offered on its device, naming those that are; or None."""
        device, backend = problem.device, self.backend
        contract, dtype = problem.contract, problem.a.dtype
        if dtype != problem.b.dtype:
            return f"operands of one type are needed, not {dtype} and {problem.b.dtype}"
        where = str(device) if device.kind == backend.name else f"{backend.name} on {device}"
        here = [pair for pair in backend.pairs(device) if not backend.known_to_differ(device, *pair)]
        if reason := requirements.row(backend.name).refusal(contract, dtype, device.kind, where, None, here):
            return reason
        if reason := backend.lacks(self.operation, device, contract.name, dtype):
            return reason
        if reason := self.operation.misfit(problem):
            return reason
        if reason := backend.differs(self.operation, device, contract.name, dtype):
            return f"{reason}; it has {requirements.named(pair for pair in here if pair != (contract, dtype))}"
        return None


class NpuBackend:
    """`backend.Backend` on the devices of one platform, and on host memory through its emulated library.

    On a real device a contract is offered after a self-check that has found no differing bit.
    """

    deterministic = True

    def __init__(self, platform: Platform) -> None:
        self.name = platform.name
        self.platform = platform
        self._found: dict[tuple[str | None, Path | None, bool], Library] = {}
        every: tuple[NpuImplementation[Any], ...] = (Products(self, GEMM), NpuImplementation(self, BIAS_GRADIENT))
        self.implementations: Mapping[type[Any], NpuImplementation[Any]] = {
            implementation.operation.problem: implementation for implementation in every
        }

    def library(self, device: Device) -> Library:
        on_host = device.kind == "cpu"
        key = (os.environ.get(self.platform.variable), config.cache_dir, on_host)
        library = self._found.get(key)
        if library is None:
            library = self._found[key] = find_library(self.platform, on_host)
        return library

    def unavailable(self, device: Device) -> str | None:
        row = requirements.row(self.name)
        if device.kind not in row.devices:
            return f"it works on {self.name} devices, not on {device}"
        if missing := row.not_installed():
            return missing
        try:
            library = self.library(device)
            if device.kind != "cpu" and device.index >= (count := library.device_count()):
                return f"{library.path} sees {count} {self.name} devices, none is {device}"
        except DetkernError as error:
            return str(error)
        return None

    def capability(self, device: Device) -> tuple[int, int] | None:
        return None

    def differs(self, operation: Operation[Any], device: Device, variant: str, dtype: DType) -> str | None:
        """What the self-check found against a variant on a real device, run now if need be."""
        if device.kind == "cpu":
            return None

        def run() -> selfcheck.Outcome:
            library = self.library(device)
            implementation = self.implementations[operation.problem]
            compute = functools.partial(host_arrays.computed, library, device, operation, implementation)
            checked, digest = self._checked(device, library), _digest(library)
            return selfcheck.outcome(checked, operation, variant, dtype, self.name, digest, compute)

        return selfcheck.refusal(variant, dtype, device, run)

    def known_to_differ(self, device: Device, variant: Contract | str, dtype: DType) -> bool:
        """Whether a self-check has refused a variant of an operation on a device."""
        library = self.library(device)
        return device.kind != "cpu" and selfcheck.known_to_differ(
            self._checked(device, library), variant, dtype, self.name, _digest(library)
        )

    @staticmethod
    def _checked(device: Device, library: Library) -> _CheckedDevice:
        about = library.device(device.index)
        return _CheckedDevice(about.name.decode(errors="replace"), str(device), about.driver.decode(errors="replace"))

    def pairs(self, device: Device) -> list[tuple[Contract, DType]]:
        """The pairs that the device's library has a kernel for."""
        library = self.library(device)
        return [
            (contract, dtype)
            for contract, dtype in requirements.row(self.name).contracts(device.kind, None)
            if (contract.name, dtype) in self.kernels(library, GEMM)
        ]

    def kernels(self, library: Library, *operations: Operation[Any]) -> list[tuple[str, DType]]:
        """The variants of these operations, or of all that the backend implements, and their types for which a library
        has a kernel. It may be older than this detkern."""
        return [
            (variant, dtype)
            for operation in operations or [made.operation for made in self.implementations.values()]
            for variant, dtypes in operation.variants.items()
            for dtype in dtypes
            if operation.descriptor is not None and operation.descriptor.offer(variant, dtype) in library.offers
        ]

    def lacks(self, operation: Operation[Any], device: Device, variant: str, dtype: DType) -> str | None:
        """That the device's library has no kernel for a variant of an operation, with what it has; or None."""
        library = self.library(device)
        if (variant, dtype) in self.kernels(library, operation):
            return None
        has = requirements.named(
            kernel for kernel in self.kernels(library) if not self.known_to_differ(device, *kernel)
        )
        return f"{library.path} has no {variant} for {dtype.short}; it has {has}"

    def facts(self, device: Device) -> dict[str, str]:
        """What `detkern info` shows: the library, the device, and how each self-check came out."""
        library = self.library(device)
        result = {"library": f"{library.path} ({library.name})"}
        if device.kind == "cpu":
            return result | {"self-check": "not run: the library is emulated, and the tests compare it"}
        about = self._checked(device, library)
        result |= {"device": about.name, "driver": about.driver}
        digest = _digest(library)
        checks: list[tuple[Contract | str, DType, str]] = [
            (contract, dtype, digest) for contract, dtype in self.pairs(device)
        ]
        checks += [
            (variant, dtype, digest)
            for problem, implementation in self.implementations.items()
            if problem is not GemmProblem
            for variant, dtype in self.kernels(library, implementation.operation)
        ]
        return result | selfcheck.reports(about, checks, self.name)
