"""What the implementations of all operations on CUDA share: a device on which one has not been compared with the replay
checks it before it is offered."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..dispatch import selfcheck
from ..dispatch.backend import Implementation, Kernel, Run
from ..operations.operation import Operation, Sample
from ..operations.problem import Problem
from ..tensors.execution import Execution
from ..vocabulary.dtypes import DType
from .device import SEEN, CudaDevice, describe
from .host_arrays import placing
from .loader import KernelBuild, source_digest

__all__ = ["CudaImplementation", "computed"]

P = TypeVar("P", bound=Problem)


class CudaImplementation(ABC, Generic[P]):
    """`backend.Implementation` of an operation by kernels of this folder.

    operation: its record. sources: variant -> the kernels' files.
    """

    def __init__(self, operation: Operation[P], sources: Callable[[str], tuple[str, ...]]) -> None:
        self.operation = operation
        self.sources = sources

    def refuses(self, problem: P) -> str | None:
        """Why the device does not offer it, or None; runs the self-check where that has not run yet."""
        if reason := self.operation.misfit(problem):
            return reason
        return self.differs(describe(problem.device.index), *self.operation.variant_of(problem))

    @abstractmethod
    def explain(self, problem: P) -> Kernel:
        """What would be launched."""

    @abstractmethod
    def prepare(self, problem: P, execution: Execution) -> Run:
        """What launches it."""

    def builds(self, capability: tuple[int, int]) -> list[KernelBuild]:
        """Every build that a launch on a device of this compute capability may need, beside those of products."""
        return []

    def differs(self, device: CudaDevice, variant: str, dtype: DType) -> str | None:
        """What the self-check has found against a variant on a device."""
        if device.capability in SEEN:
            return None
        return selfcheck.refusal(variant, dtype, device, lambda: self.outcome(device, variant, dtype))

    def outcome(self, device: CudaDevice, variant: str, dtype: DType) -> selfcheck.Outcome:
        """The self-check's outcome. What a launch raises comes through."""
        run = functools.partial(computed, device, self.operation, self)
        return selfcheck.outcome(device, self.operation, variant, dtype, "cuda", self.digest(variant), run)

    def digest(self, variant: str) -> str:
        """What an outcome holds for: the kernels' sources."""
        return source_digest(self.sources(variant))


def computed(device: CudaDevice, operation: Operation[Any], implementation: Implementation[Any], sample: Sample) -> Any:
    """A sample's result on a device, as NumPy."""
    with placing(device) as there:
        return selfcheck.computed_at(there, operation, implementation, sample)
