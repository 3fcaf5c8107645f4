"""What each backend needs, as data: one row a backend, in order of preference, and the sentences that say what is
missing.

A row is all that the rest of the package knows of a backend before it loads it: dispatch, `explain`, `detkern info`,
`detkern verify` and the backend's own refusals read it here. What only the backend's runtime can find out (a driver, a
device, the outcome of a self-check) the backend says itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from typing import NamedTuple

from ..vocabulary.contracts import CONTRACTS, FMA, MMA8, MMA16, TREE, TREE_MMA16, Contract
from ..vocabulary.dtypes import BF16, F16, DType

__all__ = ["TABLE", "Offer", "Package", "Row", "install", "named", "old_driver", "row"]

Capability = tuple[int, int]


class Package(NamedTuple):
    """A module that a backend imports, what people call it, and how to get it."""

    module: str
    title: str
    install: str

    def missing(self) -> str | None:
        """That it is not installed, or None. Imports nothing."""
        if self.module in sys.modules:
            here = sys.modules[self.module] is not None  # None is how Python marks a module that must not be imported
        else:
            here = importlib.util.find_spec(self.module) is not None
        return None if here else f"{self.title} is not installed; {self.install}"


class Offer(NamedTuple):
    """A contract that a backend computes on these kinds of device.

    types: the operand types, where they are not all of the contract's.
    first, last: the compute capabilities of CUDA devices from and up to which (both included) there is a kernel; other
    kinds of device have none.
    """

    contract: Contract
    devices: tuple[str, ...]
    first: Capability | None = None
    last: Capability | None = None
    types: tuple[DType, ...] = ()

    @property
    def operands(self) -> tuple[DType, ...]:
        """The operand types."""
        return self.types or self.contract.operands

    def serves(self, kind: str, capability: Capability | None) -> bool:
        """Whether there is a kernel for a device of this kind and compute capability."""
        if kind not in self.devices:
            return False
        if capability is None:
            return True
        above = self.first is None or self.first <= capability
        return above and (self.last is None or capability <= self.last)

    def capabilities(self) -> str:
        """ "9.0 or newer", "8.0 to 8.9" """
        if self.last is not None:
            return f"{_dotted(self.first or (0, 0))} to {_dotted(self.last)}"
        return f"{_dotted(self.first or (0, 0))} or newer"


class Row(NamedTuple):
    """A backend: the module whose `BACKEND` it is, and what it needs.

    devices:    the kinds of device that it serves.
    dispatched: whether dispatch may choose it; else only `backend=` does.
    named_on:   kinds of device on which only `backend=` chooses it.
    packages:   what must be installed.
    framework:  the package whose tensors live on its devices and that lists these, where the kernels need no package.
    capability: the least compute capability of a CUDA device.
    offers:     the contracts; the backend refuses all others by `refusal`.
    """

    name: str
    module: str
    devices: tuple[str, ...]
    dispatched: bool = True
    named_on: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()
    framework: Package | None = None
    capability: Capability | None = None
    offers: tuple[Offer, ...] = ()

    def chosen_on(self, kind: str) -> bool:
        """Whether dispatch may choose it on a kind of device."""
        return self.dispatched and kind in self.devices and kind not in self.named_on

    def not_installed(self) -> str | None:
        """Which package is missing and how to get it, or None."""
        return next((reason for package in self.packages if (reason := package.missing())), None)

    def too_old(self, device: str, capability: Capability | None) -> str | None:
        """That a device is of too low a compute capability, or None. device: as people know it."""
        if self.capability is None or capability is None or capability >= self.capability:
            return None
        least = _dotted(self.capability)
        return f"{device} has compute capability {_dotted(capability)}; the kernels need {least} or newer"

    def contracts(self, kind: str, capability: Capability | None) -> list[tuple[Contract, DType]]:
        """The pairs of contract and operand type that have a kernel for a device."""
        return [
            (offer.contract, dtype)
            for offer in self.offers
            if offer.serves(kind, capability)
            for dtype in offer.operands
        ]

    def refusal(
        self,
        contract: Contract,
        dtype: DType,
        kind: str,
        device: str,
        capability: Capability | None,
        here: Iterable[tuple[Contract, DType]] | None = None,
    ) -> str | None:
        """Why there is no kernel for a contract and an operand type on a device, with what there is; or None.

        device: as people know it. here: the pairs that are left, where a self-check took some away.
        """
        has = named(self.contracts(kind, capability) if here is None else here)
        offer = next((offer for offer in self.offers if offer.contract == contract), None)
        if offer is None or kind not in offer.devices:
            return f"{contract} has no kernel here; {device} has {has}"
        if not offer.serves(kind, capability):
            assert capability is not None
            needs = f"{contract} needs compute capability {offer.capabilities()}"
            return f"{needs} and {device} has {_dotted(capability)}; it has {has}"
        if dtype not in contract.operands:
            return f"{contract} does not take {dtype.short}; it takes {', '.join(d.short for d in contract.operands)}"
        if dtype not in offer.operands:
            return f"{contract} for {dtype.short} has no kernel here; {device} has {has}"
        return None


def _dotted(capability: Capability) -> str:
    return "{}.{}".format(*capability)


def named(pairs: Iterable[tuple[Contract | str, DType]]) -> str:
    """Pairs of contract, or another variant of an operation, and type for people: "fma (f32, f16)"."""
    types: dict[str, list[str]] = {}
    for contract, dtype in pairs:
        types.setdefault(str(contract), []).append(dtype.short)
    return ", ".join(f"{name} ({', '.join(shorts)})" for name, shorts in types.items()) or "nothing"


def old_driver(supports: str, package: str, needs: str) -> str:
    """That the driver supports a CUDA version ("12.4") older than the one that a package was built with."""
    return (
        f"the NVIDIA driver is too old: it supports CUDA {supports}, the installed {package} needs CUDA {needs}; "
        f"install a newer driver or the {package} package of an older CUDA"
    )


def install(*extras: str) -> str:
    """How to get what an extra of setup.cfg brings, one of several: from a checkout, since an index may not have
    detkern."""
    commands = " or ".join(f'".[{extra}]"' for extra in extras)
    return f"pip install {commands} in the folder of detkern's sources"


_TRITON_INSTALL = f"{install('triton')} (its launcher needs PyTorch too)"
_CUPY = Package("cupy", "CuPy", install("cuda13", "cuda12"))
_TORCH_MUSA = Package(
    "torch_musa", "torch_musa",
    "pip install the wheel for your PyTorch from https://github.com/MooreThreads/torch_musa/releases",
)  # fmt: skip
_TORCH_NPU = Package("torch_npu", "torch_npu", "pip install the torch-npu of your PyTorch's version")

# In order of preference on a device that several serve.
TABLE: tuple[Row, ...] = (
    Row(
        "cpu", "detkern.cpu.backend", ("cpu",),
        offers=tuple(Offer(contract, ("cpu",)) for contract in CONTRACTS.values()),
    ),
    Row(
        "cuda", "detkern.cu.backend", ("cuda",),
        packages=(_CUPY,),
        capability=(8, 0),  # cp.async, ldmatrix and bf16 tensor cores begin here
        offers=(
            Offer(FMA, ("cuda",), (8, 0)),
            Offer(TREE, ("cuda",), (8, 0)),
            Offer(MMA16, ("cuda",), (9, 0)),
            Offer(TREE_MMA16, ("cuda",), (9, 0)),
            Offer(MMA8, ("cuda",), (8, 0), (8, 9)),
        ),
    ),
    Row(
        "triton", "detkern.triton.backend", ("cuda", "rocm"),
        packages=(Package("torch", "PyTorch", _TRITON_INSTALL), Package("triton", "Triton", _TRITON_INSTALL)),
        capability=(8, 0),  # bf16 begins here
        # A self-check decides on each device which of these tl.dot and the compiler keep.
        offers=(
            Offer(FMA, ("cuda", "rocm")),
            Offer(TREE, ("cuda", "rocm")),
            Offer(MMA16, ("cuda", "rocm")),
            Offer(TREE_MMA16, ("cuda", "rocm")),
        ),
    ),
    # On host memory their kernels, compiled for the host against emulation headers, run. Raw pointers need no package.
    Row(
        "musa", "detkern.npu.musa", ("musa", "cpu"),
        named_on=("cpu",),
        framework=_TORCH_MUSA,
        offers=(Offer(FMA, ("musa", "cpu")), Offer(TREE, ("musa", "cpu"))),
    ),
    Row(
        "ascend", "detkern.npu.ascend", ("ascend", "cpu"),
        named_on=("cpu",),
        framework=_TORCH_NPU,
        # The vector unit multiplies, then adds: no fused multiply-add of binary32 operands can be made of that.
        offers=(Offer(FMA, ("ascend", "cpu"), types=(F16, BF16)), Offer(TREE, ("ascend", "cpu"))),
    ),
    Row("native", "detkern.dispatch.native", ("cpu", "cuda"), dispatched=False),
)  # fmt: skip


def row(name: str) -> Row:
    """The row of a backend that exists."""
    return next(row for row in TABLE if row.name == name)
