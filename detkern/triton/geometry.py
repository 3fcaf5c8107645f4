"""Which tile and which load paths compute a product: pinned by shape and layout, never tried out.
No bit depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import Matrix
from ..vocabulary.contracts import FMA, MMA16, TREE, TREE_MMA16

__all__ = ["KERNELS", "Launch", "Load", "Tile", "choose", "load_paths", "tiles_for"]


class Load(IntEnum):
    """The load path of an operand, as kernels/memory.py describes them."""

    STRIDED = 0
    K_MAJOR = 1
    MN_MAJOR = 2

    @property
    def label(self) -> str:
        """For people."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class Tile:
    """BLOCK_M x BLOCK_N outputs. depth: k a step, or a turn of the unrolled loop where leaves or chains are fused
    multiply-adds. band: tile rows that are walked together."""

    m: int
    n: int
    depth: int
    warps: int
    stages: int
    band: int = 8

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.depth}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, the constants that it is compiled for, and how many programs run it.

    kernel: the name of the module under kernels/. levels: waiting left children that a tree may have.
    """

    kernel: str
    tile: Tile
    load_a: Load
    load_b: Load
    rows_out: bool
    tiles: int
    programs: int
    levels: int

    @property
    def scratch_bytes(self) -> int:
        """Scratch that the launch takes."""
        return self.programs * self.levels * self.tile.m * self.tile.n * 2

    def constants(self, problem: GemmProblem) -> dict[str, Any]:
        """The kernel's constants, but the operand type."""
        found: dict[str, Any] = {
            "A_PATH": int(self.load_a), "B_PATH": int(self.load_b), "OUT_PATH": int(self.rows_out),
            "ACCUMULATE": problem.accumulate, "BLOCK_M": self.tile.m, "BLOCK_N": self.tile.n, "BAND": self.tile.band,
        }  # fmt: skip
        found["BLOCK_K" if self.kernel == "mma" else "UNROLL"] = self.tile.depth
        if self.kernel == "tree":
            found["DOT_LEAVES"] = problem.contract == TREE_MMA16
        return found


KERNELS = {FMA: "fma", MMA16: "mma", TREE: "tree", TREE_MMA16: "tree"}

# Largest first. tl.dot on sm_90 issues wgmma from 64 rows a warp group on: the largest tile is two groups of m64n256.
_TILES = {
    FMA: (Tile(64, 64, 4, 4, 1),),
    MMA16: (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(64, 64, 64, 4, 4)),
    TREE: (Tile(64, 64, 4, 4, 1),),
    TREE_MMA16: (Tile(128, 128, 32, 8, 3), Tile(64, 64, 32, 4, 3)),
}

_LEAF = 32
_PROGRAMS_PER_MULTIPROCESSOR = 4  # of a tree's persistent programs


def tiles_for(problem: GemmProblem) -> tuple[Tile, ...]:
    """The tiles of the problem's contract, largest first."""
    return _TILES[problem.contract]


def load_paths(problem: GemmProblem) -> tuple[Load, Load]:
    """The fastest paths of a and b that strides, sizes and alignment allow. Where one of them has none but the path of
    any strides both take it: the product is as slow as that one, and there are fewer kernels to compile."""
    a, b = problem.a, problem.b
    paths = (
        _path(a, a.row_stride, a.col_stride, problem.m, problem.k),
        _path(b, b.col_stride, b.row_stride, problem.n, problem.k),
    )
    return (Load.STRIDED, Load.STRIDED) if Load.STRIDED in paths else paths


def _path(matrix: Matrix, mn_stride: int, k_stride: int, mn: int, k: int) -> Load:
    unit = 16 // matrix.dtype.itemsize
    # Kernels count in eights, which is 16 bytes or, of binary32, two times that.
    unit = max(unit, 8)
    if matrix.alignment < 16 or any(stride % unit for stride in matrix.batch_strides):
        return Load.STRIDED
    if k_stride == 1 and mn_stride % unit == 0 and k % unit == 0:
        return Load.K_MAJOR
    if mn_stride == 1 and k_stride % unit == 0 and mn % unit == 0:
        return Load.MN_MAJOR
    return Load.STRIDED


def _rows_out(problem: GemmProblem) -> bool:
    """Whether the output is rows of multiples of 8 adjacent elements at multiples of 16 bytes."""
    out = problem.out
    return (
        out.alignment == 16
        and out.col_stride == 1
        and problem.n % 8 == 0
        and not any(stride % 8 for stride in (out.row_stride, *out.batch_strides))
    )


def choose(problem: GemmProblem, multiprocessors: int, tile: Tile | None = None) -> Launch:
    """The launch of a problem that has elements: the largest tile of which there is one for each multiprocessor, else
    the smallest; where operands or output take the path of any strides, whose addresses take many registers, the
    smallest.

    tile: another one, for tests and benchmarks.
    """
    load_a, load_b = load_paths(problem)
    batch = math.prod(problem.batch)

    def count(tile: Tile) -> int:
        return batch * -(-problem.m // tile.m) * -(-problem.n // tile.n)

    rows_out = load_a != Load.STRIDED and _rows_out(problem)
    if tile is None:
        *larger, tile = tiles_for(problem)
        if rows_out:
            tile = next((wide for wide in larger if count(wide) >= multiprocessors), tile)
    kernel = KERNELS[problem.contract]
    tiles = programs = count(tile)
    levels = 0
    if kernel == "tree":
        programs = min(tiles, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
        leaves = -(-problem.k // _LEAF)
        levels = max(1, (leaves - 1).bit_length()) if leaves else 1
    return Launch(kernel, tile, load_a, load_b, rows_out, tiles, programs, levels)
