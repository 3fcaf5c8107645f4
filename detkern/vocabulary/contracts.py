"""The contracts: what arithmetic makes one output element. docs/contracts.md is the same in prose, with examples.

A contract's bits never change under its name. Another arithmetic is another row of `CONTRACTS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ContractUnsupported
from .dtypes import BF16, E4M3, E5M2, F16, F32, DType

__all__ = ["CONTRACTS", "Contract", "TensorCoreStep", "default_contract", "get_contract"]


@dataclass(frozen=True)
class TensorCoreStep:
    """acc = step(acc, `group` products): terms truncated to multiples of 2^(E - fraction_bits), summed, truncated.

    E is the largest exponent among the non-zero terms, at least `floor`; the sum keeps `significant_bits`.
    """

    group: int
    fraction_bits: int
    floor: int
    significant_bits: int


@dataclass(frozen=True)
class Contract:
    """One arithmetic.

    name:         what the user says.
    code:         the value of `detkern_contract` in abi/abi.h.
    operands:     the operand types that it takes.
    step:         the tensor-core step, or None where the chain is of fused multiply-adds.
    leaf:         the k of one tree leaf, or None for a plain chain over the whole of K.
    k_multiple:   K must be a multiple of this.
    accumulates:  `accumulate` over pieces of K gives the bits of the whole when the pieces start at multiples of this
                  k; None where no cut does (trees).
    padding:      zeros appended to K change no bit.
    front:        zeros put in front of K in multiples of this change no bit; None where that is not promised.
    summary:      one line for people.
    """

    name: str
    code: int
    operands: tuple[DType, ...]
    step: TensorCoreStep | None
    leaf: int | None
    k_multiple: int
    accumulates: int | None
    padding: bool
    front: int | None
    summary: str

    def __hash__(self) -> int:
        return self.code

    def __str__(self) -> str:
        return self.name


_HOPPER = TensorCoreStep(group=16, fraction_bits=25, floor=-133, significant_bits=24)
_AMPERE = TensorCoreStep(group=8, fraction_bits=24, floor=-132, significant_bits=24)
_HOPPER_FP8 = TensorCoreStep(group=32, fraction_bits=13, floor=-133, significant_bits=14)

FMA = Contract(
    "fma", 1, (F32, F16, BF16), None, None, 1, 1, True, 1,
    "one ascending chain of binary32 fused multiply-adds",
)  # fmt: skip
MMA16 = Contract(
    "mma16", 2, (F16, BF16), _HOPPER, None, 1, 16, True, 16,
    "the Hopper tensor core: one ascending chain of groups of 16",
)  # fmt: skip
MMA8 = Contract(
    "mma8", 3, (F16, BF16), _AMPERE, None, 1, 8, True, 8,
    "the Ampere and Ada tensor core: one ascending chain of groups of 8",
)  # fmt: skip
TREE = Contract(
    "tree", 4, (BF16, F16), None, 32, 1, None, False, None,
    "a mid-split tree over leaves of 32 fused multiply-adds, rounded to the operand type at each node",
)  # fmt: skip
TREE_MMA16 = Contract(
    "tree-mma16", 5, (BF16, F16), _HOPPER, 32, 1, None, False, None,
    "a mid-split tree over leaves of two groups of 16, rounded to the operand type at each node",
)  # fmt: skip
FP8_BLOCK128 = Contract(
    "fp8-block128", 6, (E4M3, E5M2), _HOPPER_FP8, None, 128, 128, True, 128,
    "Hopper's fp8 tensor core over blocks of 128 k, scaled and added by fused multiply-adds",
)  # fmt: skip

CONTRACTS: dict[str, Contract] = {c.name: c for c in (FMA, MMA16, MMA8, TREE, TREE_MMA16, FP8_BLOCK128)}


def get_contract(name: str) -> Contract:
    """The contract called `name`; ContractUnsupported names those that exist."""
    contract = CONTRACTS.get(name) if isinstance(name, str) else None
    if contract is None:
        raise ContractUnsupported(f"contract={name!r} does not exist; the contracts are {', '.join(CONTRACTS)}")
    return contract


def default_contract(dtype: DType, device_kind: str, capability: tuple[int, int] | None = None) -> Contract:
    """The default by operand type and device, never by shape or data.

    `capability` is the CUDA compute capability of a "cuda" device; other kinds ignore it.
    """
    if dtype == F32:
        return FMA
    if dtype in (E4M3, E5M2):
        return FP8_BLOCK128
    if device_kind in ("musa", "rocm"):
        return FMA
    if device_kind == "ascend":
        return TREE
    if device_kind == "cuda" and capability is not None and capability < (9, 0):
        return MMA8
    return MMA16
