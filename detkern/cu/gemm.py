"""Products on CUDA: which contracts a device is offered, what would be launched, and what launches it."""

from __future__ import annotations

from ..dispatch import requirements, selfcheck
from ..dispatch.backend import Kernel, Run
from ..errors import DetkernError
from ..operations.gemm.operation import GEMM
from ..operations.gemm.problem import GemmProblem
from ..tensors.execution import Execution
from ..vocabulary.contracts import CONTRACTS, Contract
from ..vocabulary.dtypes import DType
from .device import SEEN, CudaDevice, describe
from .gemm_tile import portable_sources
from .implementation import CudaImplementation
from .tile_choice import choose

__all__ = ["Products"]

_ROW = requirements.row("cuda")


class Products(CudaImplementation[GemmProblem]):
    """Products by the contracts that have a kernel for a device."""

    def __init__(self) -> None:
        super().__init__(GEMM, lambda variant: portable_sources(CONTRACTS[variant]))
        self._answers: dict[tuple[int, Contract, DType], str | None] = {}

    def refuses(self, problem: GemmProblem) -> str | None:
        """Why the problem's contract is not offered on its device, naming those that are; or None."""
        key = (problem.device.index, problem.contract, problem.a.dtype)
        if key not in self._answers:
            device = describe(problem.device.index)
            try:
                self._answers[key] = self._refusal(device, problem.contract, problem.a.dtype)
            except DetkernError as error:
                return selfcheck.unfinished(problem.contract, problem.a.dtype, device, error)
        return self._answers[key]

    def _refusal(self, device: CudaDevice, contract: Contract, dtype: DType) -> str | None:
        built_for = _ROW.contracts("cuda", device.capability)
        here = [pair for pair in built_for if not self._known_to_differ(device, *pair)]
        if reason := _ROW.refusal(contract, dtype, "cuda", str(device), device.capability, here):
            return reason
        if device.capability in SEEN:
            return None
        if reason := self.outcome(device, contract.name, dtype).refusal(contract, dtype, device):
            return f"{reason}; it has {requirements.named(pair for pair in here if pair != (contract, dtype))}"
        return None

    def _known_to_differ(self, device: CudaDevice, contract: Contract, dtype: DType) -> bool:
        return device.capability not in SEEN and selfcheck.known_to_differ(
            device, contract, dtype, "cuda", self.digest(contract.name)
        )

    def explain(self, problem: GemmProblem) -> Kernel:
        facts = describe(problem.device.index)
        launch = choose(problem, facts.capability, facts.multiprocessors)
        loads = f"a {launch.load_a.label}, b {launch.load_b.label}"
        grid = f"grid {launch.grid}" + (f" in clusters of {launch.cluster}" if launch.cluster > 1 else "")
        return Kernel(
            name=f"{problem.contract} ({launch.build.source})",
            tile=f"{launch.tile}, {launch.tile['STAGES']} stages, {loads}",
            geometry=f"{grid}, {launch.threads} threads, {launch.build.shared_bytes} bytes shared",
            scratch_bytes=launch.scratch_bytes,
        )

    def prepare(self, problem: GemmProblem, execution: Execution) -> Run:
        # CuPy comes in here, once a device is used.
        from .launch import Launches

        return Launches(problem)
