"""The backend of both platforms: from a problem to a call of the platform's shared library."""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from .. import config, requirements, selfcheck
from ..abi import mirror
from ..abi.descriptors import column_sum_descriptor, gemm_descriptors
from ..abi.library import Library
from ..backend import Execution, Kernel
from ..contracts import Contract
from ..dtypes import BF16, F16, F32, DType
from ..errors import BackendUnavailable, ContractUnsupported, DetkernError
from ..operations.bias_gradient.problem import ColumnSumProblem
from ..operations.block_scaled.problem import BlockScaledProblem
from ..operations.gemm.problem import GemmProblem
from ..operations.rows.problem import RowProblem
from ..tensors import Device, TensorView
from . import host_arrays
from .libraries import find_library
from .platform import Platform

__all__ = ["NpuBackend"]

_OUTPUTS = (F32, F16, BF16)


@dataclass(frozen=True)
class _CheckedDevice:
    """What the self-check's outcome is kept for. The libraries know no serial numbers: uuid is the device's own ordinal."""

    name: str
    uuid: str
    driver: str


@functools.lru_cache(maxsize=8)
def _digest(library: Library) -> str:
    """SHA-256 of a library's file."""
    return hashlib.sha256(library.path.read_bytes()).hexdigest()


class NpuBackend:
    """`backend.Backend` on the devices of one platform, and on host memory through its emulated library.

    On a real device a contract is offered after a self-check that has found no differing bit.
    """

    deterministic = True

    def __init__(self, platform: Platform) -> None:
        self.name = platform.name
        self.platform = platform
        self._found: dict[tuple[str | None, Path | None, bool], Library] = {}

    def _library(self, device: Device) -> Library:
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
            library = self._library(device)
            if device.kind != "cpu" and device.index >= (count := library.device_count()):
                return f"{library.path} sees {count} {self.name} devices, none is {device}"
        except DetkernError as error:
            return str(error)
        return None

    def capability(self, device: Device) -> tuple[int, int] | None:
        return None

    def refuses(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem) -> str | None:
        device = problem.device
        library = self._library(device)
        if isinstance(problem, RowProblem):
            return f"{problem.kind.label} has no kernel here"
        if isinstance(problem, ColumnSumProblem):
            for name, dtype in (("dc", problem.dc.dtype), ("out", problem.out.dtype)):
                if dtype not in _OUTPUTS:
                    return f"{name} may be float32, float16 or bfloat16, not {dtype}"
            return self._differs(device, library, selfcheck.COLUMN_SUM, problem.dc.dtype)
        contract, types = problem.contract, (problem.a.dtype, problem.b.dtype)
        if types[0] != types[1]:
            return f"operands of one type are needed, not {types[0]} and {types[1]}"
        where = str(device) if device.kind == self.name else f"{self.name} on {device}"
        pairs = self._pairs(device, library)
        here = [pair for pair in pairs if not self._known_to_differ(device, library, *pair)]
        if reason := requirements.row(self.name).refusal(contract, types[0], device.kind, where, None, here):
            return reason
        if (contract, types[0]) not in pairs:
            return f"{library.path} has no {contract} for {types[0].short}; it has {requirements.named(here)}"
        if problem.out.dtype not in _OUTPUTS:
            return f"out may be float32, float16 or bfloat16, not {problem.out.dtype}"
        if reason := self._differs(device, library, contract, types[0]):
            return f"{reason}; it has {requirements.named(pair for pair in here if pair != (contract, types[0]))}"
        return None

    def _differs(self, device: Device, library: Library, contract: Contract | str, dtype: DType) -> str | None:
        """What the self-check found against a contract on a real device, run now if need be."""
        if device.kind == "cpu":
            return None
        run = functools.partial(self._outcome, device, library, contract, dtype)
        return selfcheck.refusal(contract, dtype, device, run)

    def _outcome(self, device: Device, library: Library, contract: Contract | str, dtype: DType) -> selfcheck.Outcome:
        checked, digest = self._checked(device, library), _digest(library)
        if isinstance(contract, Contract):
            product = functools.partial(host_arrays.product, library, device)
            return selfcheck.outcome(checked, contract, dtype, self.name, digest, product)
        column_sum = functools.partial(host_arrays.column_sum, library, device)
        return selfcheck.column_sum_outcome(checked, dtype, self.name, digest, column_sum)

    def _known_to_differ(self, device: Device, library: Library, contract: Contract, dtype: DType) -> bool:
        return device.kind != "cpu" and selfcheck.known_to_differ(
            self._checked(device, library), contract, dtype, self.name, _digest(library)
        )

    @staticmethod
    def _checked(device: Device, library: Library) -> _CheckedDevice:
        about = library.device(device.index)
        return _CheckedDevice(about.name.decode(errors="replace"), str(device), about.driver.decode(errors="replace"))

    def _pairs(self, device: Device, library: Library) -> list[tuple[Contract, DType]]:
        """The pairs that the library has a kernel for."""
        return [
            (contract, dtype)
            for contract, dtype in requirements.row(self.name).contracts(device.kind, None)
            if (contract.code, dtype.code) in library.gemm_offers
        ]

    def contracts(self, device: Device) -> list[tuple[Contract, DType]]:
        """The pairs that `refuses` lets pass; runs the self-checks that have not run yet."""
        try:
            library = self._library(device)
        except BackendUnavailable:
            return []
        return [pair for pair in self._pairs(device, library) if self._differs(device, library, *pair) is None]

    def facts(self, device: Device) -> dict[str, str]:
        """What `detkern info` shows: the library, the device, and how each self-check came out."""
        library = self._library(device)
        result = {"library": f"{library.path} ({library.name})"}
        if device.kind == "cpu":
            return result | {"self-check": "not run: the library is emulated, and the tests compare it"}
        about = self._checked(device, library)
        result |= {"device": about.name, "driver": about.driver}
        digest = _digest(library)
        checks: list[tuple[Contract | str, DType, str]] = [
            (contract, dtype, digest) for contract, dtype in self._pairs(device, library)
        ]
        checks += [(selfcheck.COLUMN_SUM, dtype, digest) for dtype in _OUTPUTS]
        return result | selfcheck.reports(about, checks, self.name)

    def kernel(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem) -> Kernel:
        if isinstance(problem, BlockScaledProblem | RowProblem):
            raise ContractUnsupported(f"{self.name} has neither block-scaled products nor row operations")
        library = self._library(problem.device)
        source = self.platform.source.name
        if isinstance(problem, ColumnSumProblem):
            return Kernel(f"column_sum ({source}, {library.name})", "all rows of some columns", "")
        ((template, _), *_) = gemm_descriptors(problem)
        descriptor = self._descriptor(template, problem)
        return Kernel(
            name=f"{problem.contract} ({source}, {library.name})",
            tile=self.platform.tile,
            geometry=f"{self.platform.name} blocks that walk the tiles",
            scratch_bytes=library.gemm_scratch(descriptor),
        )

    @staticmethod
    def _descriptor(template: bytes, problem: GemmProblem) -> mirror.GemmDescriptor:
        descriptor = mirror.GemmDescriptor.from_buffer_copy(template)
        descriptor.device = problem.device.index
        return descriptor

    def gemm(
        self, problem: GemmProblem, a: TensorView, b: TensorView, out: TensorView, bias: TensorView | None,
        execution: Execution,
    ) -> None:  # fmt: skip
        """Enqueue the product; see `Backend.gemm`. Raises DeviceError where the library reports one."""
        library = self._library(problem.device)
        for template, (a_offset, b_offset, out_offset) in gemm_descriptors(problem):
            descriptor = self._descriptor(template, problem)
            descriptor.a = a.pointer + a_offset
            descriptor.b = b.pointer + b_offset
            descriptor.out = out.pointer + out_offset
            descriptor.bias = None if bias is None else bias.pointer
            descriptor.stream = execution.stream
            size = library.gemm_scratch(descriptor)
            scratch = execution.allocate(size) if size else None
            if scratch is not None:
                descriptor.scratch, descriptor.scratch_bytes = scratch.pointer, size
            library.gemm(descriptor)

    def block_scaled_gemm(
        self, problem: BlockScaledProblem, a: TensorView, scale_a: TensorView, b: TensorView, scale_b: TensorView,
        out: TensorView, execution: Execution,
    ) -> None:  # fmt: skip
        """Not served: the registry sends no block-scaled problem here."""
        raise ContractUnsupported(f"{problem.contract} has no kernel on {problem.device}")

    def column_sum(self, problem: ColumnSumProblem, dc: TensorView, out: TensorView, execution: Execution) -> None:
        """Enqueue the bias gradient; see `Backend.column_sum`. Raises as `gemm`."""
        descriptor = mirror.ColumnSumDescriptor.from_buffer_copy(column_sum_descriptor(problem))
        descriptor.device = problem.device.index
        descriptor.dc = dc.pointer
        descriptor.out = out.pointer
        descriptor.stream = execution.stream
        self._library(problem.device).column_sum(descriptor)
