"""The backend of both platforms: from a problem to a call of the platform's shared library."""

from __future__ import annotations

import os
from pathlib import Path

from .. import config
from ..abi import mirror
from ..abi.descriptors import column_sum_descriptor, gemm_descriptors
from ..abi.library import Library
from ..backend import Execution, Kernel
from ..contracts import CONTRACTS, Contract
from ..dtypes import BF16, DTYPES, F16, F32, DType
from ..errors import BackendUnavailable, ContractUnsupported, DetkernError
from ..problem import BlockScaledProblem, ColumnSumProblem, GemmProblem
from ..tensors import Device, TensorView
from . import selfcheck
from .libraries import find_library
from .platform import Platform

__all__ = ["NpuBackend"]

_OUTPUTS = (F32, F16, BF16)


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
        if device.kind not in ("cpu", self.name):
            return f"it works on {self.name} devices, not on {device}"
        try:
            library = self._library(device)
            if device.kind != "cpu" and device.index >= (count := library.device_count()):
                return f"{library.path} sees {count} {self.name} devices, none is {device}"
        except DetkernError as error:
            return str(error)
        return None

    def capability(self, device: Device) -> tuple[int, int] | None:
        return None

    def refuses(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem) -> str | None:
        device = problem.device
        library = self._library(device)
        if isinstance(problem, BlockScaledProblem):
            return f"{problem.contract} has no kernel here; there is {self._named(device, library)}"
        if isinstance(problem, ColumnSumProblem):
            for name, dtype in (("dc", problem.dc.dtype), ("out", problem.out.dtype)):
                if dtype not in _OUTPUTS:
                    return f"{name} may be float32, float16 or bfloat16, not {dtype}"
            return self._differs(device, library, selfcheck.COLUMN_SUM, problem.dc.dtype)
        contract, types = problem.contract, (problem.a.dtype, problem.b.dtype)
        if types[0] != types[1]:
            return f"operands of one type are needed, not {types[0]} and {types[1]}"
        if (contract.code, types[0].code) not in library.gemm_offers:
            return f"{contract} for {types[0].short} has no kernel here; there is {self._named(device, library)}"
        if problem.out.dtype not in _OUTPUTS:
            return f"out may be float32, float16 or bfloat16, not {problem.out.dtype}"
        return self._differs(device, library, contract, types[0])

    def _differs(self, device: Device, library: Library, contract: Contract | str, dtype: DType) -> str | None:
        """What the self-check found against a contract on a real device, run now if need be."""
        if device.kind == "cpu":
            return None
        try:
            found = selfcheck.outcome(library, device, contract, dtype)
        except DetkernError as error:  # not an answer yet: the next call tries again
            return f"the self-check of {contract} for {dtype.short} on {device} did not finish: {error}"
        return f"{contract} for {dtype.short} on {device} {found}" if found.differing else None

    @staticmethod
    def _pairs(library: Library) -> list[tuple[Contract, DType]]:
        return [
            (contract, dtype)
            for contract in CONTRACTS.values()
            for dtype in DTYPES
            if (contract.code, dtype.code) in library.gemm_offers
        ]

    def _named(self, device: Device, library: Library) -> str:
        types: dict[str, list[str]] = {}
        for contract, dtype in self._pairs(library):
            types.setdefault(contract.name, []).append(dtype.short)
        return ", ".join(f"{name} ({', '.join(shorts)})" for name, shorts in types.items()) or "nothing"

    def contracts(self, device: Device) -> list[tuple[Contract, DType]]:
        """The pairs that `refuses` lets pass; runs the self-checks that have not run yet."""
        try:
            library = self._library(device)
        except BackendUnavailable:
            return []
        return [pair for pair in self._pairs(library) if self._differs(device, library, *pair) is None]

    def facts(self, device: Device) -> dict[str, str]:
        """What `detkern info` shows: the library, the device, and how each self-check came out."""
        library = self._library(device)
        result = {"library": f"{library.path} ({library.name})"}
        if device.kind == "cpu":
            return result | {"self-check": "not run: the library is emulated, and the tests compare it"}
        about = library.device(device.index)
        result |= {"device": about.name.decode(), "driver": about.driver.decode()}
        checked: list[tuple[Contract | str, DType]] = [*self._pairs(library)]
        checked += [(selfcheck.COLUMN_SUM, dtype) for dtype in _OUTPUTS]
        for contract, dtype in checked:
            found = selfcheck.known_outcome(library, device, contract, dtype)
            result[f"self-check of {contract} {dtype.short}"] = "not run yet" if found is None else str(found)
        return result

    def kernel(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem) -> Kernel:
        if isinstance(problem, BlockScaledProblem):
            raise ContractUnsupported(f"{problem.contract} has no kernel on {problem.device}")
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
