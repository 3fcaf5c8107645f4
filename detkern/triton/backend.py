"""The Triton backend: what it offers on which device, and why not the rest."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import requirements, selfcheck
from ..backend import Execution, Kernel
from ..contracts import Contract
from ..dtypes import BF16, F16, F32, DType
from ..errors import ContractUnsupported, DetkernError
from ..operations.bias_gradient.problem import ColumnSumProblem
from ..operations.block_scaled.problem import BlockScaledProblem
from ..operations.gemm.problem import GemmProblem
from ..tensors import Device, TensorView
from .device import TritonDevice, describe, missing
from .geometry import KERNELS, choose

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["BACKEND", "TritonBackend"]

_ROW = requirements.row("triton")
_SUMS = (F32, F16, BF16)
_FOLDER = Path(__file__).parent


@functools.cache
def _digest(kernel: str) -> str:
    """SHA-256 of what a kernel's bits may depend on: its source, what it includes, the launch code and Triton's version."""
    digest = hashlib.sha256(importlib.metadata.version("triton").encode())
    for name in (f"kernels/{kernel}.py", "kernels/fma.py", "kernels/memory.py", "launch.py", "geometry.py"):
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()


class TritonBackend:
    """`backend.Backend` on CUDA and ROCm devices, through Triton and, for its launcher, PyTorch.

    What tl.dot adds in which order is the device's and the compiler's business, so nothing is offered here before the
    self-check of that contract on that device has found every bit of the CPU replay. It runs at the first call that needs
    it, in some seconds, and its outcome is kept for the device, its driver, the kernel source and the version of Triton.
    """

    name = "triton"
    deterministic = True

    def __init__(self) -> None:
        self._answers: dict[tuple[Device, Contract | str, DType], str | None] = {}

    def unavailable(self, device: Device) -> str | None:
        """Why device cannot run the kernels, or None where it can."""
        return missing(device)

    def capability(self, device: Device) -> tuple[int, int] | None:
        """The compute capability of a CUDA device; None elsewhere, and where the kernels cannot run at all."""
        return None if missing(device) else describe(device).capability

    def refuses(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem) -> str | None:
        """Why the problem's contract is not offered on its device, naming those that are; or None."""
        if isinstance(problem, ColumnSumProblem):
            return self._answer(problem.device, selfcheck.COLUMN_SUM, problem.dc.dtype)
        return self._answer(problem.device, problem.contract, problem.a.dtype)

    def contracts(self, device: Device) -> list[tuple[Contract, DType]]:
        """The pairs that `refuses` lets pass; runs the self-checks that have not run yet."""
        if missing(device):
            return []
        pairs = _ROW.contracts(device.kind, describe(device).capability)
        return [pair for pair in pairs if self._answer(device, *pair) is None]

    def _answer(self, device: Device, contract: Contract | str, dtype: DType) -> str | None:
        key = (device, contract, dtype)
        if key not in self._answers:
            facts = describe(device)
            try:
                self._answers[key] = self._refusal(facts, contract, dtype)
            except DetkernError as error:
                return selfcheck.unfinished(contract, dtype, facts, error)
        return self._answers[key]

    def _refusal(self, facts: TritonDevice, contract: Contract | str, dtype: DType) -> str | None:
        if isinstance(contract, str):
            if dtype not in _SUMS:
                return f"column_sum takes {', '.join(d.short for d in _SUMS)}, not {dtype.short}"
            sums = functools.partial(self._launch.column_sum_on, facts)
            outcome = selfcheck.column_sum_outcome(facts, dtype, "triton", _digest("column_sum"), sums)
            return outcome.refusal(selfcheck.COLUMN_SUM, dtype, facts)
        kind, capability = facts.device.kind, facts.capability
        here = [
            (one, operand)
            for one, operand in _ROW.contracts(kind, capability)
            if not selfcheck.known_to_differ(facts, one, operand, "triton", _digest(KERNELS[one]))
        ]
        if reason := _ROW.refusal(contract, dtype, kind, str(facts), capability, here):
            return reason
        run = functools.partial(self._launch.product, facts)
        outcome = selfcheck.outcome(facts, contract, dtype, "triton", _digest(KERNELS[contract]), run)
        if not outcome.differing:
            return None
        left = requirements.named(pair for pair in here if pair != (contract, dtype))
        through = "tl.dot" if contract.step is not None else "the kernel"
        return f"{contract} for {dtype.short}: {through} on {facts} {outcome}; it has {left}"

    def facts(self, device: Device) -> dict[str, str]:
        """What `detkern info` shows: the device, its driver, and how each self-check came out."""
        if missing(device):
            return {}
        facts = describe(device)
        result = {"device": facts.name, "driver": facts.driver, "launcher": "Triton's own, which needs PyTorch"}
        if facts.capability is not None:
            result["compute capability"] = "{}.{}".format(*facts.capability)
        checks: list[tuple[Contract | str, DType, str]] = [
            (contract, dtype, _digest(KERNELS[contract]))
            for contract, dtype in _ROW.contracts(device.kind, facts.capability)
        ]
        checks += [(selfcheck.COLUMN_SUM, dtype, _digest("column_sum")) for dtype in _SUMS]
        return result | selfcheck.reports(facts, checks, "triton")

    def kernel(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem) -> Kernel:
        """The kernel, tile and launch geometry that the problem's method would use."""
        if isinstance(problem, BlockScaledProblem):
            raise ContractUnsupported(f"{problem.contract} has no kernel in Triton")
        if isinstance(problem, ColumnSumProblem):
            columns, _, warps = self._launch.COLUMN_TILE
            geometry = f"grid {-(-problem.n // columns)}, {warps} warps"
            return Kernel("column_sum (triton)", f"{columns} columns", geometry)
        launch = choose(problem, describe(problem.device).multiprocessors)
        return Kernel(
            name=f"{problem.contract} (triton {launch.kernel})",
            tile=f"{launch.tile}, {launch.tile.stages} stages, a {launch.load_a.label}, b {launch.load_b.label}",
            geometry=f"grid {launch.programs}, {launch.tile.warps} warps",
            scratch_bytes=launch.scratch_bytes,
        )

    @functools.cached_property
    def _launch(self) -> ModuleType:
        # Triton and PyTorch come in behind it, once a device is used.
        from . import launch

        return launch

    def gemm(
        self,
        problem: GemmProblem,
        a: TensorView,
        b: TensorView,
        out: TensorView,
        bias: TensorView | None,
        execution: Execution,
    ) -> None:
        """Enqueue the product; see `Backend.gemm`. Raises DeviceError or BuildError."""
        self._launch.launch(problem, a, b, out, bias, execution)

    def block_scaled_gemm(
        self,
        problem: BlockScaledProblem,
        a: TensorView,
        scale_a: TensorView,
        b: TensorView,
        scale_b: TensorView,
        out: TensorView,
        execution: Execution,
    ) -> None:
        """Not served: the registry sends no block-scaled problem here."""
        raise ContractUnsupported(f"{problem.contract} has no kernel in Triton")

    def column_sum(self, problem: ColumnSumProblem, dc: TensorView, out: TensorView, execution: Execution) -> None:
        """Enqueue the bias gradient; see `Backend.column_sum`. Raises as `gemm`."""
        self._launch.column_sum(problem, dc, out, execution)


BACKEND: Any = TritonBackend()
