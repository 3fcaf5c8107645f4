"""The Triton backend: what it offers on which device, and why not the rest."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ..dispatch import requirements, selfcheck
from ..dispatch.backend import Kernel, Run
from ..errors import DetkernError
from ..operations.bias_gradient.operation import BIAS_GRADIENT
from ..operations.bias_gradient.problem import ColumnSumProblem
from ..operations.gemm.operation import GEMM
from ..operations.gemm.problem import GemmProblem
from ..operations.operation import Operation, Sample
from ..operations.problem import Problem
from ..tensors.execution import Execution
from ..tensors.view import Device
from ..vocabulary.contracts import CONTRACTS, Contract
from ..vocabulary.dtypes import DType
from .device import TritonDevice, describe, missing
from .geometry import KERNELS, choose

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["BACKEND", "TritonBackend"]

_ROW = requirements.row("triton")
_FOLDER = Path(__file__).parent

P = TypeVar("P", bound=Problem)


def _launch() -> ModuleType:
    # Triton and PyTorch come in behind it, once a device is used.
    from . import launch

    return launch


@functools.cache
def _digest(kernel: str) -> str:
    """SHA-256 of what a kernel's bits may depend on: its source, what it includes, the launch code and Triton's
    version."""
    digest = hashlib.sha256(importlib.metadata.version("triton").encode())
    for name in (f"kernels/{kernel}.py", "kernels/fma.py", "kernels/memory.py", "launch.py", "geometry.py"):
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()


class TritonImplementation(ABC, Generic[P]):
    """`backend.Implementation` of an operation. Nothing is offered before its self-check on that device has found every
    bit of the replay; an answer is kept for the process.

    operation: its record. kernel: variant -> the module of the kernel.
    """

    def __init__(self, operation: Operation[P], kernel: Callable[[str], str]) -> None:
        self.operation = operation
        self.kernel = kernel
        self._answers: dict[tuple[Device, str, DType], str | None] = {}

    def refuses(self, problem: P) -> str | None:
        """Why it is not offered on the problem's device, naming what is; or None."""
        variant, dtype = self.operation.variant_of(problem)
        key = (problem.device, variant, dtype)
        if key not in self._answers:
            facts = describe(problem.device)
            try:
                self._answers[key] = self.refusal(facts, problem, variant, dtype)
            except DetkernError as error:
                return selfcheck.unfinished(variant, dtype, facts, error)
        return self._answers[key]

    def refusal(self, facts: TritonDevice, problem: P, variant: str, dtype: DType) -> str | None:
        """The answer, by the self-check."""
        if reason := self.operation.misfit(problem):
            return reason
        return self.outcome(facts, variant, dtype).refusal(variant, dtype, facts)

    def outcome(self, facts: TritonDevice, variant: str, dtype: DType) -> selfcheck.Outcome:
        """The self-check's outcome. What a launch raises comes through."""
        compute = functools.partial(self.computed, facts)
        return selfcheck.outcome(facts, self.operation, variant, dtype, "triton", self.digest(variant), compute)

    def computed(self, facts: TritonDevice, sample: Sample) -> Any:
        """A sample's result on a device, as NumPy."""
        with _launch().Placing(facts) as there:
            return selfcheck.computed_at(there, self.operation, self, sample)

    def digest(self, variant: str) -> str:
        """What an outcome holds for."""
        return _digest(self.kernel(variant))

    @abstractmethod
    def explain(self, problem: P) -> Kernel:
        """What would be launched."""

    @abstractmethod
    def prepare(self, problem: P, execution: Execution) -> Run:
        """What launches it."""


class _Products(TritonImplementation[GemmProblem]):
    def __init__(self) -> None:
        super().__init__(GEMM, lambda variant: KERNELS[CONTRACTS[variant]])

    def refusal(self, facts: TritonDevice, problem: GemmProblem, variant: str, dtype: DType) -> str | None:
        contract, kind, capability = problem.contract, facts.device.kind, facts.capability
        here = [
            (one, operand)
            for one, operand in _ROW.contracts(kind, capability)
            if not selfcheck.known_to_differ(facts, one, operand, "triton", self.digest(one.name))
        ]
        if reason := _ROW.refusal(contract, dtype, kind, str(facts), capability, here):
            return reason
        outcome = self.outcome(facts, variant, dtype)
        if not outcome.differing:
            return None
        left = requirements.named(pair for pair in here if pair != (contract, dtype))
        through = "tl.dot" if contract.step is not None else "the kernel"
        return f"{contract} for {dtype.short}: {through} on {facts} {outcome}; it has {left}"

    def computed(self, facts: TritonDevice, sample: Sample) -> Any:
        # Columns of a and rows of b: one load path, and so one kernel, for every k.
        a, *rest = sample.operands
        assert a is not None
        return super().computed(facts, replace(sample, operands=(np.asfortranarray(a), *rest)))

    def explain(self, problem: GemmProblem) -> Kernel:
        launch = choose(problem, describe(problem.device).multiprocessors)
        return Kernel(
            name=f"{problem.contract} (triton {launch.kernel})",
            tile=f"{launch.tile}, {launch.tile.stages} stages, a {launch.load_a.label}, b {launch.load_b.label}",
            geometry=f"grid {launch.programs}, {launch.tile.warps} warps",
            scratch_bytes=launch.scratch_bytes,
        )

    def prepare(self, problem: GemmProblem, execution: Execution) -> Run:
        run: Run = _launch().Launches(problem)
        return run


class _Sums(TritonImplementation[ColumnSumProblem]):
    def __init__(self) -> None:
        super().__init__(BIAS_GRADIENT, lambda variant: "column_sum")

    def explain(self, problem: ColumnSumProblem) -> Kernel:
        columns, _, warps = _launch().COLUMN_TILE
        geometry = f"grid {-(-problem.n // columns)}, {warps} warps"
        return Kernel("bias_gradient (triton)", f"{columns} columns", geometry)

    def prepare(self, problem: ColumnSumProblem, execution: Execution) -> Run:
        run: Run = _launch().Sums(problem)
        return run


class TritonBackend:
    """`backend.Backend` on CUDA and ROCm devices, through Triton and, for its launcher, PyTorch.

    What tl.dot adds in which order is the device's and the compiler's business, so nothing is offered here before the
    self-check of that contract on that device has found every bit of the CPU replay. It runs at the first call that
    needs it, in some seconds, and its outcome is kept for the device, its driver, the kernel source and the version of
    Triton.
    """

    name = "triton"
    deterministic = True

    def __init__(self) -> None:
        every: tuple[TritonImplementation[Any], ...] = (
            _Products(),
            _Sums(),
        )
        self.implementations: Mapping[type[Any], TritonImplementation[Any]] = {
            implementation.operation.problem: implementation for implementation in every
        }

    def unavailable(self, device: Device) -> str | None:
        """Why device cannot run the kernels, or None where it can."""
        return missing(device)

    def capability(self, device: Device) -> tuple[int, int] | None:
        """The compute capability of a CUDA device; None elsewhere, and where the kernels cannot run at all."""
        return None if missing(device) else describe(device).capability

    def facts(self, device: Device) -> dict[str, str]:
        """What `detkern info` shows: the device, its driver, and how each self-check came out."""
        if missing(device):
            return {}
        facts = describe(device)
        result = {"device": facts.name, "driver": facts.driver, "launcher": "Triton's own, which needs PyTorch"}
        if facts.capability is not None:
            result["compute capability"] = "{}.{}".format(*facts.capability)
        checks: list[tuple[Contract | str, DType, str]] = []
        for problem, implementation in self.implementations.items():
            pairs = [
                (variant, dtype) for variant, types in implementation.operation.variants.items() for dtype in types
            ]
            if problem is GemmProblem:
                pairs = [(contract.name, dtype) for contract, dtype in _ROW.contracts(device.kind, facts.capability)]
            checks += [(variant, dtype, implementation.digest(variant)) for variant, dtype in pairs]
        return result | selfcheck.reports(facts, checks, "triton")


BACKEND: Any = TritonBackend()
