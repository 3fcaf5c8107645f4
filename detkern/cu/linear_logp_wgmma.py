"""linear_logp on Hopper: linear_logp_wgmma.cu, whose tiles of logits never leave the multiprocessor, for 16-bit
operands whose lines run along D and begin at multiples of 16 bytes. None of the choices here can change a bit."""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, replace

from ..dispatch.backend import Kernel
from ..operations.gemm.problem import GemmProblem, gemm_problem
from ..operations.linear_logp.problem import PARTS, UNIT, DeltaProblem, FoldProblem, part_edges
from ..operations.problem import Operands
from ..tensors import TensorView
from ..tensors.execution import Execution
from ..vocabulary.contracts import MMA16
from ..vocabulary.dtypes import BF16, F16, F32, DType
from .device import describe
from .extended_launch import ExtendedLaunch
from .gemm_tile import SHARED_B, Load, shared_limit
from .geometry import Maps, load_paths, operand_map
from .linear_logp_launch import (
    DELTAS,
    FOLDS,
    MERGE_ROWS,
    launch_merge,
    merge_build,
    moved,
    on_its_device,
    packed,
)
from .loader import KernelBuild, load_function
from .tensor_map import available, map_shapes, output_map_shape

__all__ = [
    "NODES_BYTES", "SOURCE", "TILES", "Deltas", "Folds", "FusedTile", "build_for", "builds", "chosen", "explained",
    "row_pieces", "takes",
]  # fmt: skip

SOURCE = "linear_logp_wgmma.cu"
NODES_BYTES = 60 << 20  # of states between the launches, where one tile of rows needs no more
VOCABULARY = 1 << 22  # columns, at most: linear_logp.cu's LEVELS
_POINTERS = struct.Struct("<5Q")
_SIZES = struct.Struct("<5i4x")  # PartSizes of parts/part_walk.cuh, and what is left to a whole 8 bytes


@dataclass(frozen=True, slots=True)
class FusedTile:
    """The macros of linear_logp_wgmma.cu that fix a tile."""

    rows: int
    columns: int
    depth: int  # TILE_K
    stages: int
    group: int  # GROUP_M
    in_turn: bool = False
    shares: int = 0
    band: int = 16

    @property
    def consumers(self) -> int:
        """Warp groups that consume."""
        return -(-self.rows // self.group) * (2 if self.in_turn else 1)

    @property
    def threads(self) -> int:
        """Of a CTA: the consumers' and the producer's warp, or a group of it, where consumers need its registers."""
        return 128 * self.consumers + (128 if self.consumers > 1 and self.columns * self.group > 64 * 128 else 32)

    @property
    def boxes(self) -> int:
        """SLAB_BOXES."""
        return 1 if self.columns % 128 else 2

    def shared_memory(self, phase: int) -> tuple[int, int]:
        """STAGES, fewer where the outputs need their room, and SMEM_BYTES."""
        slabs = 4 * self.consumers * max(2048 * self.boxes, 3072) if phase == DELTAS else 0
        stage = 2 * self.depth * (self.rows + self.columns) + 16
        stages = min(self.stages, (shared_limit((9, 0)) - slabs - 1024) // stage)
        return stages, stages * stage + slabs + 1024

    @property
    def units(self) -> int:
        """Of 64 columns."""
        return self.columns // UNIT

    @property
    def nodes(self) -> int:
        """States of a row that it leaves: of three units two, else one."""
        return 2 if self.units == 3 else 1

    def __str__(self) -> str:
        words = [f"{self.rows}x{self.columns}x{self.depth}x{self.stages}"]
        words += ["b shared"] if self.shares else []
        words += ["in turn"] if self.in_turn else []
        return " ".join(words)


TILES = {
    str(tile): tile
    for tile in (
        FusedTile(16, 128, 128, 6, 64),
        FusedTile(16, 192, 128, 4, 64),
        FusedTile(32, 128, 128, 5, 64),
        FusedTile(32, 192, 64, 8, 64),
        FusedTile(64, 128, 128, 4, 64),
        FusedTile(64, 192, 64, 7, 64),
        FusedTile(128, 128, 64, 6, 128, in_turn=True),
        FusedTile(128, 192, 64, 5, 128, in_turn=True),
        FusedTile(128, 192, 64, 5, 128, in_turn=True, shares=SHARED_B),
        FusedTile(128, 256, 64, 4, 64),
    )
}
"""By name, those of few rows first."""


# Of an H200 (docs/hopper.md): bytes a microsecond that all multiprocessors read of memory, and that one of them takes.
_ALL_READ, _ONE_READS = 4.5e6, 0.1e6


def chosen(problem: FoldProblem | DeltaProblem, rows: int, multiprocessors: int) -> FusedTile:
    """The tile of so many rows. Up to 64 memory decides, and so how the last tiles are shared out. A bias or a softcap
    leaves no registers for the widest tiles."""
    plain = problem.bias is None and problem.scaling.cap is None
    if rows > 64:
        return TILES["128x192x64x5 in turn" if plain else "128x128x64x6 in turn"]
    few = next(count for count in (16, 32, 64) if rows <= count)
    tiles = [tile for tile in TILES.values() if tile.rows == few and (plain or tile.columns == 128)]

    def microseconds(tile: FusedTile) -> float:
        rounds, last = divmod(_part_tiles(problem, tile)[2], multiprocessors)
        size = 2 * problem.k * tile.columns
        ends = max(last * size / _ALL_READ, size / _ONE_READS) if last else 0
        return rounds * multiprocessors * size / _ALL_READ + ends

    return min(tiles, key=microseconds)


def build_for(
    phase: int, operand: DType, tile: FusedTile, *, biased: bool = False, entropy: bool = False, capped: bool = False
) -> KernelBuild:
    """What is compiled for a tile and what a problem has."""
    stages, shared = tile.shared_memory(phase)
    macros = {
        "PHASE": phase, "OPERAND": operand.code, "BIASED": int(biased), "ENTROPY": int(entropy), "CAPPED": int(capped),
        "SHARES": tile.shares, "TILE_M": tile.rows, "GROUP_M": tile.group, "IN_TURN": int(tile.in_turn),
        "TILE_N": tile.columns, "TILE_K": tile.depth, "STAGES": stages, "SLAB_BOXES": tile.boxes, "BAND": tile.band,
        "WARPS_M": tile.threads // 32, "SMEM_BYTES": shared,
    }  # fmt: skip
    words = ["fold" if phase == FOLDS else "delta", operand.short, str(tile)]
    words += [word for word, there in (("bias", biased), ("entropy", entropy), ("softcap", capped)) if there]
    return KernelBuild(SOURCE, tuple(macros.items()), shared, f"linear_logp {' '.join(words)} wgmma")


def builds() -> list[KernelBuild]:
    """What is compiled ahead: of both types what is chosen without a bias and a softcap, and the merges behind it."""
    tiles = [tile for name, tile in TILES.items() if tile.rows <= 64 or name == "128x192x64x5 in turn"]
    found = [
        build_for(phase, operand, tile, entropy=entropy)
        for phase in (FOLDS, DELTAS)
        for operand in (F16, BF16)
        for tile in tiles
        for entropy in (False, True)
    ]
    return found + [merge_build(units, rows) for units in (2, 3) for rows in (1, MERGE_ROWS)]


def _product(problem: FoldProblem | DeltaProblem, rows: int, pointers: tuple[int, int, int, int]) -> GemmProblem:
    """The product of the logits of so many rows. pointers: of hidden, weight, bias and the output."""
    hidden, weight, bias, device = problem.hidden, problem.weight, problem.bias, problem.device
    a = TensorView(pointers[0], (rows, problem.k), (hidden.row_stride, hidden.col_stride), hidden.dtype, device)
    b = TensorView(pointers[1], (problem.k, problem.n), (weight.col_stride, weight.row_stride), weight.dtype, device)
    column = None if bias is None else TensorView(pointers[2], (problem.n,), (bias.stride,), bias.dtype, device)
    if isinstance(problem, DeltaProblem):
        strides, dtype = (problem.out.row_stride, problem.out.col_stride), problem.out.dtype
    else:  # none
        strides, dtype = (problem.n, 1), F32
    out = TensorView(pointers[3], (rows, problem.n), strides, dtype, device)
    return gemm_problem(problem.contract, a, b, out, column, False)


def takes(problem: FoldProblem | DeltaProblem) -> bool:
    """Whether the kernel computes it: on this device, by this contract, of these layouts."""
    if problem.contract != MMA16 or 0 in (problem.m, problem.n, problem.k) or problem.vocabulary > VOCABULARY:
        return False
    if describe(problem.device.index).capability != (9, 0) or not available():
        return False
    place = problem.out.alignment if isinstance(problem, DeltaProblem) else 4096
    product = _product(problem, problem.m, (problem.hidden.alignment, problem.weight.alignment, 4096, place))
    if load_paths(product) != (Load.K_MAJOR, Load.K_MAJOR) or map_shapes(product, (True, True)) is None:
        return False
    if isinstance(problem, FoldProblem):
        return True
    return problem.out.dtype == problem.hidden.dtype and output_map_shape(product) is not None


@dataclass(frozen=True, slots=True)
class _Launch:
    """`extended_launch.Launched`."""

    build: KernelBuild
    grid: int
    threads: int
    cluster: int
    maps: Maps | None


def _part_tiles(problem: FoldProblem | DeltaProblem, tile: FusedTile) -> tuple[int, int, int]:
    """Columns of a part, its tiles, and the tiles of all parts."""
    if isinstance(problem, DeltaProblem):
        count = -(-problem.n // tile.columns)
        return problem.n, count, count
    length = PARTS * -(-problem.vocabulary // UNIT)
    edges = part_edges(problem.vocabulary)[problem.first : problem.first + problem.count + 1]
    count = sum(-(-(high - low) // tile.columns) for low, high in itertools.pairwise(edges))
    return length, -(-length // tile.columns), count


def row_pieces(problem: FoldProblem, tile: FusedTile) -> tuple[int, int]:
    """Rows at a time whose states fit in NODES_BYTES, and the bytes of a row's."""
    size = 4 * (3 if problem.entropy else 2) * problem.count * _part_tiles(problem, tile)[1] * tile.nodes
    unit = tile.rows * (2 if tile.shares else 1)
    most = max(NODES_BYTES // size // unit * unit, unit)
    pieces = -(-problem.m // most)
    return min(-(-problem.m // pieces // unit) * unit, most), size


class _Fused:
    """What launches the kernel for one layout: a plan for each number of rows, which a call gives its pointers."""

    def __init__(self, problem: FoldProblem | DeltaProblem, phase: int, tile: FusedTile | None) -> None:
        self.problem, self.phase, self.tile = problem, phase, tile
        self._plans: dict[tuple[int, FusedTile], tuple[ExtendedLaunch, bytes, bytes]] = {}

    def tile_for(self, rows: int) -> FusedTile:
        """The tile of so many rows."""
        return self.tile or chosen(self.problem, rows, describe(self.problem.device.index).multiprocessors)

    def plan(
        self, rows: int, pointers: tuple[int, int, int, int], tile: FusedTile, stream: int
    ) -> tuple[ExtendedLaunch, bytes, bytes]:
        """What launches, and the parameters of the product and of the walk."""
        found = self._plans.get((rows, tile))
        if found is None:
            if len(self._plans) >= 64:
                self._plans.clear()
            found = self._plans[rows, tile] = self._made(rows, pointers, tile, stream)
        return found

    def _made(
        self, rows: int, pointers: tuple[int, int, int, int], tile: FusedTile, stream: int
    ) -> tuple[ExtendedLaunch, bytes, bytes]:
        from .launch import pack_params  # which needs CuPy

        problem, facts = self.problem, describe(self.problem.device.index)
        product = _product(problem, rows, pointers)
        shapes = map_shapes(product, (True, True))
        assert shapes is not None
        out = output_map_shape(product) if self.phase == DELTAS else None
        maps = Maps(
            operand_map(shapes[0], tile.depth, tile.rows, Load.K_MAJOR, rows, False, False),
            operand_map(shapes[1], tile.depth, tile.columns, Load.K_MAJOR, None, tile.shares == SHARED_B, False),
            None if out is None else replace(out, rows=16),
        )
        build = build_for(
            self.phase, problem.hidden.dtype, tile,
            biased=problem.bias is not None, entropy=problem.entropy, capped=problem.scaling.cap is not None,
        )  # fmt: skip
        columns, part_tiles, count = _part_tiles(problem, tile)
        cluster = 2 if tile.shares else 1
        tiles = -(-rows // (cluster * tile.rows)) * count
        grid = cluster * min(tiles, facts.multiprocessors // cluster)
        kernel = load_function(facts.index, facts.capability, build, stream)
        launch = ExtendedLaunch(kernel.ptr, _Launch(build, grid, tile.threads, cluster, maps))
        return launch, pack_params(product, maps), _SIZES.pack(rows, problem.n, columns, part_tiles, count)

    def launch(
        self, rows: int, pointers: tuple[int, int, int, int], tile: FusedTile, params: bytes, stream: int
    ) -> None:
        """Enqueue it. params: LogpParams."""
        launch, product, sizes = self.plan(rows, pointers, tile, stream)
        hidden, weight, bias, out = pointers
        block = _POINTERS.pack(hidden, weight, out, bias, 0) + product + params + sizes
        launch(block, hidden, weight, out, stream)


class Folds:
    """`backend.Run` of a fold. tile: instead of the chosen one, for tests."""

    def __init__(self, problem: FoldProblem, tile: FusedTile | None = None) -> None:
        self._fused = _Fused(problem, FOLDS, tile)
        self._run = on_its_device(problem, self._enqueue)

    def __call__(self, m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        """Enqueue all launches."""
        self._run(m, operands, out, execution)

    def _enqueue(self, given: FoldProblem, operands: Operands, out: TensorView, execution: Execution) -> None:
        from .current import scratch_memory

        hidden, weight, target, bias = operands
        assert hidden is not None
        assert weight is not None
        assert target is not None
        stream, tile = execution.stream, self._fused.tile_for(given.m)
        step, size = row_pieces(given, tile)
        held = scratch_memory(execution, size * min(step, given.m))
        part_nodes = _part_tiles(given, tile)[1] * tile.nodes
        for row in range(0, given.m, step):
            count = min(step, given.m - row)
            left = moved(hidden, given.hidden, row, (count, given.k))
            params = packed(
                given, target, (row, count), nodes=held.pointer, state=(out.pointer, given.out), column=given.start,
                columns=given.n, part_nodes=part_nodes, parts=(given.first, given.count),
            )  # fmt: skip
            pointers = left.pointer, weight.pointer, 0 if bias is None else bias.pointer, 0
            self._fused.launch(count, pointers, tile, params, stream)
            launch_merge(given.device, count, params, stream, tile.units)


class Deltas:
    """`backend.Run` of the gradient of logits. tile: instead of the chosen one, for tests."""

    def __init__(self, problem: DeltaProblem, tile: FusedTile | None = None) -> None:
        self._fused = _Fused(problem, DELTAS, tile)
        self._run = on_its_device(problem, self._enqueue)

    def __call__(self, m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        """Enqueue the launch."""
        self._run(m, operands, out, execution)

    def _enqueue(self, given: DeltaProblem, operands: Operands, out: TensorView, execution: Execution) -> None:
        hidden, weight, target, state, grads, bias = operands
        assert hidden is not None
        assert weight is not None
        assert target is not None
        assert state is not None
        assert grads is not None
        params = packed(
            given, target, (0, given.m), state=(state.pointer, given.state), grads=(grads.pointer, given.grads),
            column=given.start, columns=given.n,
        )  # fmt: skip
        pointers = hidden.pointer, weight.pointer, 0 if bias is None else bias.pointer, out.pointer
        self._fused.launch(given.m, pointers, self._fused.tile_for(given.m), params, execution.stream)


def explained(problem: FoldProblem | DeltaProblem) -> Kernel:
    """What would be launched."""
    tile = chosen(problem, problem.m, describe(problem.device.index).multiprocessors)
    fold = isinstance(problem, FoldProblem)
    rows, size = row_pieces(problem, tile) if isinstance(problem, FoldProblem) else (problem.m, 0)
    return Kernel(
        name=f"linear_logp{'' if fold else '_delta'}-{problem.contract} ({SOURCE})",
        tile=str(tile),
        geometry=f"{-(-problem.m // rows)} launches of {tile.threads} threads a CTA"
        + (", each behind it a merge" if fold else ""),
        scratch_bytes=size * min(rows, problem.m),
    )
