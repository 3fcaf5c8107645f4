"""The CUDA backend: which operations it implements, and what it says of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..dispatch import requirements, selfcheck
from ..operations.gemm.problem import GemmProblem
from ..tensors.view import Device
from ..vocabulary.contracts import Contract
from ..vocabulary.dtypes import DType
from .column_sum import Sums
from .device import SEEN, describe, missing
from .gemm import Products
from .implementation import CudaImplementation
from .linear_logp import Deltas, Folds, Merges
from .loader import KernelBuild
from .rows import Rows
from .scatter_sum import ScatterSums

__all__ = ["BACKEND", "CudaBackend", "offered"]

_ROW = requirements.row("cuda")


def offered(capability: tuple[int, int]) -> list[Contract]:
    """The contracts that have a kernel for a compute capability, whatever a self-check says."""
    return list(dict.fromkeys(contract for contract, _ in _ROW.contracts("cuda", capability)))


class CudaBackend:
    """`backend.Backend` on CUDA devices of compute capability 8.0 and newer, through CuPy."""

    name = "cuda"
    deterministic = True

    def __init__(self) -> None:
        products = Products()
        every: tuple[CudaImplementation[Any], ...] = (
            products,
            Sums(),
            Rows(),
            ScatterSums(),
            Folds(products),
            Merges(),
            Deltas(products),
        )
        self.implementations: Mapping[type[Any], CudaImplementation[Any]] = {
            implementation.operation.problem: implementation for implementation in every
        }

    def other_builds(self, capability: tuple[int, int]) -> list[KernelBuild]:
        """Every kernel that a device of this compute capability may need beside those of products, which are told
        apart by contract (ahead.py)."""
        return [build for one in self.implementations.values() for build in one.builds(capability)]

    def unavailable(self, device: Device) -> str | None:
        """Why device cannot run the kernels, or None where it can."""
        return missing(device.index)

    def capability(self, device: Device) -> tuple[int, int] | None:
        """The compute capability, or None where the device cannot run the kernels at all."""
        return None if missing(device.index) else describe(device.index).capability

    def preload(
        self, device: Device, pairs: Iterable[tuple[Contract, DType]], along_k: Iterable[tuple[bool, bool]]
    ) -> int:
        """Compile and load every kernel that products of these contracts and operand types may need, whose lines of a
        and b run along k or not. Returns how many there are."""
        from .ahead import of_layouts
        from .preload import load_all

        facts = describe(device.index)
        return load_all(facts, of_layouts(pairs, along_k, facts.capability))

    def facts(self, device: Device) -> dict[str, str]:
        """What `detkern info` shows: the device, its driver, and how the self-checks came out: that of each contract,
        and of other operations those that have run."""
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
        checks: list[tuple[Contract | str, DType, str]] = []
        for problem, implementation in self.implementations.items():
            if problem is GemmProblem:
                pairs = [(contract.name, dtype) for contract, dtype in _ROW.contracts("cuda", facts.capability)]
                checks += [(name, dtype, implementation.digest(name)) for name, dtype in pairs]
                continue
            checks += [
                (variant, dtype, digest)
                for variant, dtypes in implementation.operation.variants.items()
                for dtype in dtypes
                if selfcheck.known_outcome(facts, variant, dtype, "cuda", digest := implementation.digest(variant))
            ]
        return result | selfcheck.reports(facts, checks, "cuda")


BACKEND: Any = CudaBackend()
