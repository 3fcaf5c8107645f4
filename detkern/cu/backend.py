"""The CUDA backend: what it offers on which device, and the way from a problem to a launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .. import requirements, selfcheck
from ..backend import Execution, Kernel
from ..contracts import Contract
from ..dtypes import DType
from ..errors import ContractUnsupported, DetkernError
from ..problem import BlockScaledProblem, ColumnSumProblem, GemmProblem, RowKind, RowProblem
from ..tensors import Device, TensorView
from . import column_sum, rows
from .device import SEEN, CudaDevice, describe, missing
from .geometry import choose, portable_sources
from .loader import source_digest

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["BACKEND", "CudaBackend", "offered"]


_ROW = requirements.row("cuda")


def offered(capability: tuple[int, int]) -> list[Contract]:
    """The contracts that have a kernel for a compute capability, whatever a self-check says."""
    return list(dict.fromkeys(contract for contract, _ in _ROW.contracts("cuda", capability)))


def _digest(contract: Contract) -> str:
    return source_digest(portable_sources(contract))


def _known_to_differ(device: CudaDevice, contract: Contract, dtype: DType) -> bool:
    return device.capability not in SEEN and selfcheck.known_to_differ(
        device, contract, dtype, "cuda", _digest(contract)
    )


class CudaBackend:
    """`backend.Backend` on CUDA devices of compute capability 8.0 and newer, through CuPy."""

    name = "cuda"
    deterministic = True

    def __init__(self) -> None:
        self._answers: dict[tuple[int, Contract, DType], str | None] = {}

    def unavailable(self, device: Device) -> str | None:
        """Why device cannot run the kernels, or None where it can."""
        return missing(device.index)

    def capability(self, device: Device) -> tuple[int, int] | None:
        """The compute capability, or None where the device cannot run the kernels at all."""
        return None if missing(device.index) else describe(device.index).capability

    def refuses(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem) -> str | None:
        """Why the problem's contract is not offered on its device, naming those that are; or None."""
        if isinstance(problem, ColumnSumProblem):
            return column_sum.refusal(describe(problem.device.index), problem.dc.dtype)
        if isinstance(problem, RowProblem):
            return rows.refusal(describe(problem.device.index), problem)
        key = (problem.device.index, problem.contract, problem.a.dtype)
        try:
            return self._answers[key]
        except KeyError:
            return self._answer(describe(key[0]), *key[1:])

    def _answer(self, device: CudaDevice, contract: Contract, dtype: DType) -> str | None:
        key = (device.index, contract, dtype)
        if key not in self._answers:
            try:
                self._answers[key] = self._refusal(device, contract, dtype)
            except DetkernError as error:
                return selfcheck.unfinished(contract, dtype, device, error)
        return self._answers[key]

    def _refusal(self, device: CudaDevice, contract: Contract, dtype: DType) -> str | None:
        here = [pair for pair in self._built_for(device) if not _known_to_differ(device, *pair)]
        if reason := _ROW.refusal(contract, dtype, "cuda", str(device), device.capability, here):
            return reason
        if device.capability in SEEN:
            return None
        product = functools.partial(self._launch.product, device)
        outcome = selfcheck.outcome(device, contract, dtype, "cuda", _digest(contract), product)
        if reason := outcome.refusal(contract, dtype, device):
            return f"{reason}; it has {requirements.named(pair for pair in here if pair != (contract, dtype))}"
        return None

    def contracts(self, device: Device) -> list[tuple[Contract, DType]]:
        """The pairs that `refuses` lets pass; runs the self-checks that have not run yet."""
        if missing(device.index):
            return []
        facts = describe(device.index)
        return [pair for pair in self._built_for(facts) if self._answer(facts, *pair) is None]

    @staticmethod
    def _built_for(device: CudaDevice) -> list[tuple[Contract, DType]]:
        """The pairs that have a kernel for the device."""
        return _ROW.contracts("cuda", device.capability)

    def facts(self, device: Device) -> dict[str, str]:
        """What `detkern info` shows: the device, its driver, and how each contract's self-check came out."""
        if missing(device.index):
            return {}
        facts = describe(device.index)
        result = {
            "device": facts.name,
            "compute capability": "{}.{}".format(*facts.capability),
            "driver": facts.driver,
        }
        if facts.capability in SEEN:
            return result | {"self-check": "not needed: every contract was compared on this compute capability"}
        checks: list[tuple[Contract | str, DType, str]] = [
            (contract, dtype, _digest(contract)) for contract, dtype in self._built_for(facts)
        ]
        digest = source_digest((column_sum.SOURCE,))
        checks += [(selfcheck.COLUMN_SUM, dtype, digest) for dtype in column_sum.OPERANDS]
        return result | selfcheck.reports(facts, checks, "cuda") | self._row_facts(facts)

    @staticmethod
    def _row_facts(device: CudaDevice) -> dict[str, str]:
        """The self-checks of row operations that have run."""
        digest = source_digest((rows.SOURCE,))
        run = [
            (kind.label, dtype, digest)
            for kind in RowKind
            for dtype in rows.OPERANDS
            if selfcheck.known_outcome(device, kind.label, dtype, "cuda", digest) is not None
        ]
        return selfcheck.reports(device, run, "cuda")

    def kernel(self, problem: GemmProblem | BlockScaledProblem | ColumnSumProblem | RowProblem) -> Kernel:
        """The kernel, tile and launch geometry that the problem's method would use."""
        if isinstance(problem, ColumnSumProblem):
            return column_sum.kernel(problem, describe(problem.device.index))
        if isinstance(problem, RowProblem):
            return rows.kernel(problem, describe(problem.device.index))
        if isinstance(problem, BlockScaledProblem):
            raise ContractUnsupported(f"{problem.contract} has no kernel on {problem.device}")
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

    @functools.cached_property
    def _launch(self) -> ModuleType:
        # CuPy comes in here, once a device is used.
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
        """Enqueue the product; see `Backend.gemm`. Raises DeviceError or BuildError, before `out` is touched."""
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
        raise ContractUnsupported(f"{problem.contract} has no kernel on {problem.device}")

    def column_sum(self, problem: ColumnSumProblem, dc: TensorView, out: TensorView, execution: Execution) -> None:
        """Enqueue the bias gradient; see `Backend.column_sum`. Raises as `gemm`."""
        column_sum.launch(problem, dc, out, execution)

    def rows(
        self, problem: RowProblem, a: TensorView, b: TensorView | None, out: TensorView, execution: Execution
    ) -> None:
        """Enqueue a row operation; see `Backend.rows`. Raises as `gemm`."""
        rows.launch(problem, a, b, out, execution)


BACKEND: Any = CudaBackend()
