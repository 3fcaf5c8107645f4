"""The kernels of matrix products, a row each: what a launch, a choice or a build must know of a kernel file.

Each file says in its head what its macros mean and how much shared memory and scratch they need; those formulas are
repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..vocabulary.contracts import FMA, MMA8, MMA16, TREE, TREE_MMA16, Contract
from ..vocabulary.dtypes import BF16, F16, F32, DType

__all__ = ["KERNELS", "GemmKernel", "Macros", "level_bytes"]

Macros = Mapping[str, int]  # of a tile


@dataclass(frozen=True, slots=True, eq=False)
class GemmKernel:
    """A kernel file of matrix products.

    name:         of the file, and of its table of tiles.
    contracts:    that it computes.
    operands:     the types of a and b that it takes, in pairs; their sizes are those of its elements in shared memory.
    capability:   the only one that it runs on; None: every device.
    any_layout:   whether one of its tiles takes any strides and alignment: what a contract falls back on.
    threads:      of a CTA.
    shared_bytes: dynamic shared memory: SMEM_BYTES.
    levels_in_registers: of a tree, that it keeps there; None: it computes no tree. The levels that fit neither there
                  nor in shared memory are its scratch memory.
    macros:       what it is compiled with besides the tile's, by contract and tile.
    operand_maps: whether TMA brings the operands, by tensor maps, and the CTAs walk over the tiles.
    output_map:   whether it takes a tensor map of a 16-bit output whose rows are contiguous, and writes it well.
    pairs_ctas:   whether CTAs whose tiles lie below one another are launched in clusters of two.
    prefetches:   whether its CTAs ask the L2 cache for weights ahead: `prefetch_bytes`.
    narrows:      whether boxes of fewer than 64 k, m or n have only what there is, of tiles that no cluster shares.
    modelled:     whether time_model.py chooses its tiles.
    """

    name: str
    contracts: tuple[Contract, ...]
    operands: tuple[tuple[DType, DType], ...]
    threads: Callable[[Macros], int]
    shared_bytes: Callable[[Macros], int]
    capability: tuple[int, int] | None = None
    any_layout: bool = False
    levels_in_registers: int | None = None
    macros: Callable[[Contract, Macros], tuple[tuple[str, int], ...]] = lambda contract, tile: ()
    operand_maps: bool = False
    output_map: bool = False
    pairs_ctas: bool = False
    prefetches: bool = False
    narrows: bool = False
    modelled: bool = False

    @property
    def source(self) -> str:
        """The kernel file."""
        return f"{self.name}.cu"


def level_bytes(tile: Macros) -> int:
    """A level of a tree that waits: one 16-bit value an output of the tile."""
    return 2 * tile["TILE_M"] * tile["TILE_N"]


def _warps(tile: Macros) -> int:
    return 32 * (tile["WARPS_M"] * tile["WARPS_N"] + tile.get("COPYING_WARPS", 0))


def _stages(tile: Macros) -> int:
    """Bytes of the stages, of two an element."""
    return 2 * tile["STAGES"] * tile["TILE_K"] * (tile["TILE_M"] + tile["TILE_N"])


def _barriers(tile: Macros) -> int:
    """What the stages of Hopper's kernels need besides: their mbarriers, and 1024 bytes to align them."""
    return 16 * tile["STAGES"] + 1024


def _padded_rows(tile: Macros) -> int:
    return tile["STAGES"] * (tile["TILE_M"] + tile["TILE_N"]) * (4 * tile["TILE_K"] + 16)


def _with_slabs(tile: Macros) -> int:
    """Stages, whose memory is the slabs' of outputs afterwards."""
    return max(_stages(tile), tile["WARPS_M"] * tile["WARPS_N"] * 64 * (tile["TILE_N"] // tile["WARPS_N"] + 8))


def _levels(tile: Macros) -> int:
    return tile["SHARED_LEVELS"] * level_bytes(tile)


def _tree_wgmma(tile: Macros) -> int:
    levels = max(level_bytes(tile) // 4 + _levels(tile), 160 * tile["TILE_M"] * tile["GROUPS_N"])
    return _stages(tile) + levels + _barriers(tile)


def _mma_wgmma(tile: Macros) -> int:
    n = tile["TILE_N"]
    slab = 64 * (_slab_columns(n, 32) + 8)  # of binary32 outputs
    if tile.get("SWAPPED", 0):
        slab = 32 * n
    elif n % 64 == 0:
        slab = -(-max(slab, 2048 * tile["SLAB_BOXES"]) // 1024) * 1024
    else:
        slab = max(slab, 16 * (2 * min(n, 32) + 16))
    consuming_warps = 4 * -(-tile["TILE_M"] // tile["GROUP_M"]) * (2 if tile["IN_TURN"] else 1)
    rest = tile.get("REST_N", 0)  # of whole 64 columns a stage has room
    room = 2 * tile["STAGES"] * tile["TILE_K"] * (64 - rest) if rest else 0
    return _stages(tile) + room + consuming_warps * slab + _barriers(tile)


def _slab_columns(columns: int, limit: int) -> int:
    """The largest multiple of 8, at most `limit`, that divides `columns`; at least 8."""
    return next((width for width in range(limit, 8, -8) if columns % width == 0), 8)


def _threads_macro(contract: Contract, tile: Macros) -> tuple[tuple[str, int], ...]:
    return (("THREADS", _warps(tile)),)


def _step_macro(contract: Contract, tile: Macros) -> tuple[tuple[str, int], ...]:
    return (("MMA_K", 8 if contract == MMA8 else 16),)


_SIXTEEN = ((F16, F16), (BF16, BF16))
_ANY = ((F32, F32), *_SIXTEEN)
_HOPPER = (9, 0)

KERNELS: Mapping[str, GemmKernel] = {
    kernel.name: kernel
    for kernel in (
        GemmKernel(
            "fma_narrow", (FMA,), _ANY, threads=_warps, shared_bytes=_padded_rows, macros=_threads_macro,
        ),
        GemmKernel(
            "fma", (FMA,), _ANY, threads=_warps, shared_bytes=lambda tile: 2 * _stages(tile), macros=_threads_macro,
            any_layout=True,
        ),
        GemmKernel(
            "mma_wgmma", (MMA16,), _SIXTEEN, threads=_warps, shared_bytes=_mma_wgmma, macros=_step_macro,
            capability=_HOPPER, operand_maps=True, output_map=True, pairs_ctas=True, prefetches=True, narrows=True,
            modelled=True,
        ),
        GemmKernel(
            "mma", (MMA16, MMA8), _SIXTEEN, threads=_warps, shared_bytes=_with_slabs, macros=_step_macro,
            any_layout=True,
        ),
        GemmKernel(
            "tree", (TREE,), _SIXTEEN, threads=_warps, macros=_threads_macro, any_layout=True, levels_in_registers=0,
            shared_bytes=lambda tile: 2 * _stages(tile) + _levels(tile),
        ),
        GemmKernel(
            "tree_wgmma", (TREE_MMA16,), _SIXTEEN, shared_bytes=_tree_wgmma, capability=_HOPPER, operand_maps=True,
            threads=lambda tile: 128 * (tile["GROUPS_M"] * tile["GROUPS_N"] + 1),
            levels_in_registers=4,  # of nodes of eight leaves, and one that waits for its sibling
        ),
        GemmKernel(
            "tree_mma", (TREE_MMA16,), _SIXTEEN, threads=_warps, any_layout=True,
            shared_bytes=lambda tile: _with_slabs(tile) + _levels(tile),
            levels_in_registers=2,  # of nodes of four leaves
        ),
    )
}  # fmt: skip
"""By name, in the order in which the tiles of a contract are listed."""
