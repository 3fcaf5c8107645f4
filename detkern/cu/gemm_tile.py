"""Tiles of the kernels of matrix products: the tables, and what is compiled for a tile.

The tables are tiles/<kernel>.json, one object a tile: its macros; `loads`, the load paths of A and B that it is built
for ("any", "vector": without gathering, or a list such as "KM": K_MAJOR and MN_MAJOR); `wave_us`, the time of 4096 k
when every multiprocessor holds CTAS_PER_SM CTAs, and `alone_us`, when it holds one, on an H200
(`python -m benchmarks.cuda_gemm --tiles`); and the operand types it is for, where not for all. Tiles of mma_wgmma.json
are chosen by time_model.py instead, whose numbers are in tiles/time_model.json; wave_us of fma_narrow.json is a model
(docs/hopper.md).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ..vocabulary.contracts import Contract
from ..vocabulary.dtypes import DType, by_name
from .gemm_kernels import KERNELS, GemmKernel, level_bytes
from .loader import KernelBuild

__all__ = [
    "SHARED_A", "SHARED_B", "Load", "Tile", "build_for", "fits", "portable_sources", "scratch_bytes", "shared_limit",
    "source_of",
    "table", "tiles_for",
]  # fmt: skip

_TABLES = Path(__file__).parent / "tiles"
# `Shared` of parts/tile_walk.cuh.
SHARED_A, SHARED_B = 1, 2

# Dynamic shared memory that one CTA may ask for, in bytes (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability": the maximum per thread block). A capability that is not listed has that of the last one before
# it.
_SHARED_LIMIT = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}


class Load(IntEnum):
    """How an operand's tile comes from global memory: `Load` of params.cuh."""

    STRIDED = 0
    K_MAJOR = 1
    MN_MAJOR = 2

    @property
    def label(self) -> str:
        """For people."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class Tile:
    """One row of a tile table.

    macros:  (name, value) pairs that the kernel is compiled with.
    operands: the types it is for; none: all that the contract takes.
    loads:   the pairs of load paths that it is built for.
    wave_us, alone_us: of 4096 k with a multiprocessor full of CTAs, and with one on it; 0 where time_model.py predicts.
    fills:   whole boxes of A are copied where there are fewer rows, too: one copy a stage, which brings zeros as well.
    """

    table: str
    macros: tuple[tuple[str, int], ...]
    operands: tuple[DType, ...]
    loads: frozenset[tuple[Load, Load]]
    wave_us: float
    alone_us: float
    fills: bool = False

    @functools.cached_property
    def values(self) -> dict[str, int]:
        """The macros by name."""
        return dict(self.macros)

    def __getitem__(self, macro: str) -> int:
        return self.values[macro]

    def get(self, macro: str, default: int) -> int:
        """A macro that not all kernels have."""
        return self.values.get(macro, default)

    @property
    def kernel(self) -> GemmKernel:
        """What computes it."""
        return KERNELS[self.table]

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.kernel.threads(self.values)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.kernel.shared_bytes(self.values)

    @property
    def shares(self) -> int:
        """The operand that the two CTAs of a cluster share: 0, SHARED_A or SHARED_B."""
        return self.values.get("SHARES", 0)

    @property
    def swapped(self) -> bool:
        """Whether its kernel computes the transpose: the rows of a tile are columns of the output."""
        return self.values.get("SWAPPED", 0) == 1

    @property
    def f32_out(self) -> bool:
        """Whether its kernel writes binary32 outputs in rows of pairs and no others."""
        return self.values.get("F32_OUT", 0) == 1

    @property
    def by_tma(self) -> bool:
        """Whether its kernel takes the operands as tensor maps."""
        return self.kernel.operand_maps

    def __str__(self) -> str:
        size = f"{self['TILE_M']}x{self['TILE_N']}x{self['TILE_K']}"
        if not self.by_tma:
            return size
        words = [f"{size}x{self['STAGES']}"]
        words += [["a shared"], ["b shared"]][self.shares - 1] if self.shares else []
        words += ["swapped"] if self.swapped else []
        words += ["rest"] if self.get("REST_N", 0) else []
        words += ["f32"] if self.f32_out else []
        words += ["in turn"] if self.get("IN_TURN", 0) else []
        words += ["filled"] if self.fills else []
        words += [f"{self['CTAS_PER_SM']} an SM"] if self["CTAS_PER_SM"] > 1 else []
        return " ".join(words)


# Not frozen, here and where plans are made: a frozen dataclass costs three times as much to make. Nobody changes one.


def _loads(text: str | list[str]) -> frozenset[tuple[Load, Load]]:
    if isinstance(text, str):
        text = [a + b for a in "SKM" for b in "SKM" if text == "any" or "S" not in a + b]
    return frozenset((_LETTERS[pair[0]], _LETTERS[pair[1]]) for pair in text)


_LETTERS = {"S": Load.STRIDED, "K": Load.K_MAJOR, "M": Load.MN_MAJOR}


@functools.cache
def table(name: str) -> tuple[Tile, ...]:
    """A kernel's tiles."""
    rows = json.loads((_TABLES / f"{name}.json").read_text())
    result = []
    for row in rows:
        operands = tuple(dtype for dtype in map(by_name, row.pop("operands", ())) if dtype)
        loads, wave = _loads(row.pop("loads")), row.pop("wave_us", 0.0)
        alone, fills = row.pop("alone_us", wave), row.pop("fills", False)
        result.append(Tile(name, tuple(row.items()), operands, loads, wave, alone, fills))
    return tuple(result)


@functools.cache
def tiles_for(contract: Contract, operand: DType) -> tuple[Tile, ...]:
    """Every tile that computes `contract` on operands of that type, in the tables' order."""
    rows = [tile for kernel in _kernels_of(contract) for tile in table(kernel.name)]
    return tuple(tile for tile in rows if not tile.operands or operand in tile.operands)


def _kernels_of(contract: Contract) -> list[GemmKernel]:
    return [kernel for kernel in KERNELS.values() if contract in kernel.contracts]


def source_of(contract: Contract) -> str:
    """The kernel file that computes `contract` on every device, whatever the load paths;
    there may be others besides."""
    return next(kernel.source for kernel in _kernels_of(contract) if kernel.any_layout)


def portable_sources(contract: Contract) -> tuple[str, ...]:
    """The kernel files that compute `contract` on every device: that of `source_of`, and those besides."""
    besides = (kernel.source for kernel in _kernels_of(contract) if kernel.capability is None and not kernel.any_layout)
    return source_of(contract), *besides


def scratch_bytes(tile: Tile, k: int, grid: int) -> int:
    """GemmParams::scratch: a slot a CTA with the levels of a tree that do not fit its shared memory."""
    kept = tile.kernel.levels_in_registers
    if kept is None:
        return 0
    leaves = -(-k // 32)
    levels = (max(leaves, 1) - 1).bit_length()  # the ceiling of log2
    return grid * max(0, levels - kept - tile["SHARED_LEVELS"]) * level_bytes(tile.values)


@functools.cache
def build_for(contract: Contract, operand: DType, tile: Tile, load_a: Load, load_b: Load) -> KernelBuild:
    """What is compiled for a tile, an operand type and the load paths of a and b."""
    kernel, shared = tile.kernel, tile.shared_bytes
    name = f"gemm {contract} {operand.short} {tile} {load_a.name[0]}{load_b.name[0]} {tile.table}"
    if tile.swapped:
        load_a, load_b = load_b, load_a
    macros = [("OPERAND", operand.code), ("LOAD_A", int(load_a)), ("LOAD_B", int(load_b)), *tile.macros]
    macros += [*kernel.macros(contract, tile.values), ("SMEM_BYTES", shared)]
    return KernelBuild(kernel.source, tuple(macros), shared, name)


def shared_limit(capability: tuple[int, int]) -> int:
    """The dynamic shared memory that one CTA may have, in bytes."""
    return _SHARED_LIMIT[max(key for key in _SHARED_LIMIT if key <= capability)]


@functools.cache
def fits(tile: Tile, capability: tuple[int, int]) -> bool:
    """Whether a device of that capability has the instructions and the shared memory that the tile needs."""
    return tile.kernel.capability in (None, capability) and tile.shared_bytes <= shared_limit(capability)
