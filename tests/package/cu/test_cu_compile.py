"""Every CUDA source compiles for every architecture that it claims, with no GPU: registers, spills, stack frame and
shared memory from the compiler's log are held to bounds, and the machine code to the instructions that a contract
needs."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace

import pytest
from cu_compiled import (
    NEEDS_A_COMPILER,
    check_exponentials_and_divisions,
    check_instruction,
    compile_build,
    instructions_of,
    main_loops,
    registers_of,
)
from cu_device import one_of_each_organisation

from detkern.cu import column_sum, gemm_tile, linear_logp_launch, loader, rows, scatter_sum
from detkern.cu.gemm_tile import Load, Tile, build_for, fits, tiles_for
from detkern.operations.rows.problem import RowKind
from detkern.vocabulary.contracts import FMA, MMA8, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytest.importorskip("cupy", reason="CuPy is not installed")


pytestmark = NEEDS_A_COMPILER

# The architectures that are claimed, with a compute capability that stands for each.
ARCHITECTURES = {
    "sm_80": (8, 0),
    "sm_86": (8, 6),
    "sm_89": (8, 9),
    "sm_90a": (9, 0),
    "sm_100a": (10, 0),
    "sm_120": (12, 0),
}
# The most registers a thread may have, by tile, of the kernels for every device. The wgmma kernels have many tiles, and
# one bound: the register file, which is shared out among the CTAs that the table promises an SM (on average, where warp
# groups change their shares when they start).
REGISTERS = {
    ("fma", "128x128x8"): 255,
    ("fma", "64x64x16"): 128,
    ("fma", "32x128x16"): 128,
    ("fma_narrow", "8x16x128"): 128,
    ("fma_narrow", "16x32x64"): 168,
    ("fma_narrow", "32x32x64"): 168,
    ("tree", "128x128x8"): 255,
    ("tree", "64x64x16"): 128,
    ("mma", "128x256x64"): 255,
    ("mma", "128x256x32"): 255,
    ("mma", "128x128x64"): 200,
    ("mma", "64x128x64"): 128,
    ("mma", "64x64x64"): 168,
    ("mma", "32x64x128"): 128,
    ("mma", "16x32x128"): 128,
    ("tree_mma", "128x128x64"): 200,
    ("tree_mma", "64x64x64"): 168,
    ("tree_mma", "16x64x128"): 168,
}
# Where newer architectures need more than sm_90a does.
REGISTERS_ELSEWHERE = {("tree_mma", "128x128x64"): 224, ("tree_mma", "64x64x64"): 200}
# Of which contract the largest tile is compiled.
LARGEST_ON = {"sm_80": MMA8, "sm_89": MMA8, "sm_100a": TREE_MMA16, "sm_120": MMA16}
# What the inner loop must be made of, and what it must not.
NEEDED = {FMA: "FFMA", TREE: "FFMA", MMA16: "HMMA.16816", TREE_MMA16: "HMMA.16816", MMA8: "HMMA.1688"}
FORBIDDEN = {
    FMA: ("FMUL", "HMMA"),
    TREE: ("FMUL", "HMMA"),
    MMA16: ("FFMA",),
    TREE_MMA16: ("FFMA",),
    MMA8: ("FFMA", "HMMA.16816"),
}
REGISTER_FILE = 64 * 1024


def gathering(tiles: list[Tile]) -> Tile:
    """The tile that takes any strides: what every device can run."""
    return next(tile for tile in tiles if (Load.STRIDED, Load.STRIDED) in tile.loads)


def on_every_path(tiles: tuple[Tile, ...]) -> Iterator[Tile]:
    """The largest tile of the wgmma kernel, and the smallest for any strides of the other."""

    def area(tile: Tile) -> int:
        return tile["TILE_M"] * tile["TILE_N"]

    yield max((tile for tile in tiles if tile.by_tma), key=area)
    yield min((tile for tile in tiles if (Load.STRIDED, Load.STRIDED) in tile.loads), key=area)


# The contracts of wgmma kernels.
OF_WGMMA = (MMA16, TREE_MMA16)
# Of the wgmma kernels' many tiles, one of each organisation and the largest: the others' machine code differs from it
# in sizes. test_cu_gpu_geometry.py asks the driver about the registers and the local memory of all.
COMPILED = frozenset(
    tile for contract in (FMA, TREE, MMA16, TREE_MMA16)
    for tiles in (tiles_for(contract, BF16),)
    for tile in (*one_of_each_organisation(list(tiles)), *(on_every_path(tiles) if contract in OF_WGMMA else ()))
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    architecture: str
    contract: Contract
    operand: DType
    tile: Tile
    loads: tuple[Load, Load]

    def __str__(self) -> str:
        loads = "-".join(load.label for load in self.loads)
        return f"{self.architecture}-{self.tile.table}-{self.contract}-{self.operand.short}-{self.tile}-{loads}"


def _cases() -> Iterator[Case]:
    """On sm_90a the tiles of COMPILED, with the load paths and the 16-bit types (whose code differs in the conversions
    alone) going round, the gathering path of each kernel, and every load path of one tile of each tensor-core kernel.
    On the others each contract's tile for any strides, or the largest that fits of the tensor-core ones in turn."""
    number = 0
    gathered: set[tuple[Contract, str]] = set()

    def turn(tile: Tile) -> tuple[Load, Load]:
        vector = sorted(loads for loads in tile.loads if Load.STRIDED not in loads)
        return vector[number % len(vector)]

    for contract in (FMA, TREE, MMA16, TREE_MMA16):
        for tile in filter(COMPILED.__contains__, tiles_for(contract, BF16)):
            for operand in (F32, (F16, BF16)[number % 2]) if contract == FMA else ((F16, BF16)[number % 2],):
                number += 1
                yield Case("sm_90a", contract, operand, tile, turn(tile))
            if (Load.STRIDED, Load.STRIDED) in tile.loads and (contract, tile.table) not in gathered:
                gathered.add((contract, tile.table))
                yield Case("sm_90a", contract, operand, tile, (Load.STRIDED, Load.STRIDED))
    for contract in OF_WGMMA:
        for tile in on_every_path(tiles_for(contract, BF16)):
            for loads in sorted(tile.loads):
                number += 1
                yield Case("sm_90a", contract, (F16, BF16)[number % 2], tile, loads)
    number = 0  # so that a tile more or less on sm_90a changes nothing elsewhere
    for architecture, capability in ARCHITECTURES.items():
        if architecture == "sm_90a":
            continue
        for contract in (FMA, TREE, *((MMA16, TREE_MMA16) if capability >= (9, 0) else (MMA8,))):
            operand = F32 if contract == FMA else (BF16, F16)[number % 2]
            fitting = [tile for tile in tiles_for(contract, operand) if fits(tile, capability)]
            assert fitting, f"{contract} has no tile for {architecture}"
            number += 1
            tile = fitting[0] if contract == LARGEST_ON.get(architecture) else gathering(fitting)
            yield Case(architecture, contract, operand, tile, turn(tile))
            if contract == FMA:
                narrow = [tile for tile in fitting if tile.table == "fma_narrow"]
                tile = narrow[number % len(narrow)]
                yield Case(architecture, contract, (F32, BF16)[number // 3 % 2], tile, turn(tile))


CASES = list(dict.fromkeys(_cases()))


def _compile(case: Case) -> tuple[str, str]:
    """(log, machine code) of a case; no code where it is not disassembled."""
    build = build_for(case.contract, case.operand, case.tile, *case.loads)
    return compile_build(build, case.architecture)


Builds = dict[tuple[str, loader.KernelBuild], Future[tuple[str, str]]]


def _compiling(builds: list[tuple[str, loader.KernelBuild]]) -> Iterator[Builds]:
    """The futures of builds, each for an architecture,
    worked on by two processes while the tests take them in order."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {(architecture, build): pool.submit(compile_build, build, architecture) for architecture, build in builds}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[Case, Future[tuple[str, str]]]]:
    """The futures of all cases, worked on by two processes while the tests take them in order."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {case: pool.submit(_compile, case) for case in CASES}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_within_bounds(case: Case, compiled: dict[Case, Future[tuple[str, str]]]) -> None:
    log, code = compiled[case].result()
    registers = registers_of(log)
    build = build_for(case.contract, case.operand, case.tile, *case.loads)
    if not case.tile.by_tma:
        name = case.tile.table, str(case.tile)
        elsewhere = {} if case.architecture == "sm_90a" else REGISTERS_ELSEWHERE
        assert registers <= elsewhere.get(name, REGISTERS[name])
    assert registers * case.tile.threads * case.tile["CTAS_PER_SM"] <= REGISTER_FILE
    assert build.shared_bytes <= gemm_tile.shared_limit(ARCHITECTURES[case.architecture])
    instructions = instructions_of(code)
    assert len(instructions) > 200
    for needed in _needed(case):
        assert any(name.startswith(needed) for name in instructions), needed
    for name in instructions:
        assert not name.startswith(FORBIDDEN[case.contract]), name
        assert not name.startswith("HMMA") or not case.tile.by_tma, name
        assert name != "NANOSLEEP", "only the builds for tests sleep"
        assert name != "BRA.U.ANY", "a loop over the threads around a copy that one thread makes"
        assert name != "MEMBAR.ALL.GPU" or not case.tile.by_tma, "an arrival at a cluster's barrier with a fence"
        check_instruction(name)
    if case.tile.table == "mma_wgmma":
        _check_loops(case.tile, code)
    if case.tile.table == "fma_narrow":
        _check_narrow_loop(case, code)


def _check_narrow_loop(case: Case, code: str) -> None:
    """fma_narrow.cu's loop over stages: one fused multiply-add an output and k, the fragments in whole vectors, one
    barrier waited for and one arrived at, hardly anything else but the conversions of 16-bit operands; no copy."""
    tile, size = case.tile, case.operand.itemsize
    places = {match[1]: match.start() for match in re.finditer(r"^(\.L_x_\d+):", code, re.MULTILINE)}
    backward = (
        code[places[match[1]] : match.end()]
        for match in re.finditer(r"BRA `\((\.L_x_\d+)\)", code)
        if places[match[1]] < match.start()
    )
    loop = instructions_of(next(body for body in backward if "FFMA" in body))
    rows = {0: tile["TILE_M"] // (4 * tile["WARPS_M"]), 1: tile["TILE_N"] // (8 * tile["WARPS_N"])}
    multiplies = tile["TILE_K"] * rows[0] * rows[1]
    reads = sum(
        count * tile["TILE_K"] * size // 16 if load == Load.K_MAJOR else tile["TILE_K"]
        for count, load in zip(rows.values(), case.loads, strict=True)
    )
    conversions = 0 if size == 4 else tile["TILE_K"] * sum(rows.values())
    assert sum(name.startswith("FFMA") for name in loop) == multiplies
    assert sum(name.startswith("LDS") for name in loop) == reads
    assert sorted(name for name in loop if name.startswith("BAR")) == ["BAR.ARV", "BAR.SYNC.DEFER_BLOCKING"]
    assert not any(name.startswith("LDGSTS") for name in loop)
    assert len(loop) <= multiplies + reads + 1.05 * conversions + 24


def _check_loops(tile: Tile, code: str) -> None:
    """mma_wgmma.cu's loops over stages, one for each kind of outputs: what products read is in uniform registers, but
    for strided outputs (no STSM behind the products) of the largest tiles, which take longer than what they wait for;
    and behind the products of the usual ones, only rounded, the kernel ends soon: lines of instructions that come next
    come from memory."""
    loops = list(main_loops(code))
    assert len(loops) == (1 if tile.f32_out else 2 + tile["STRIDED_OUT"])
    large = tile["TILE_M"] * tile["TILE_N"] >= 128 * 160
    unrounded = [large and not any(name.startswith("STSM") for name in behind) for _, behind in loops]
    assert sum(unrounded) <= 1
    for (loop, _), may_wait in zip(loops, unrounded, strict=True):
        assert any(name.startswith("HGMMA") for name in loop)
        slow = {"R2UR", "WARPSYNC", "WARPSYNC.ALL"} & set(loop)
        assert may_wait or not slow, "what products read is not in uniform registers"
    if tile.f32_out:
        return
    columns = tile["TILE_N"] * (tile["GROUP_M"] // 64)
    # Where the next tile lies is worked out there, too, while the last products are on their way: PLACED_AHEAD.
    ahead = tile["TILE_M"] > 64 and not tile["IN_TURN"]
    ahead = ahead and (tile["TILE_N"] % 64 > 0 or tile["TILE_N"] <= 128 * tile["SLAB_BOXES"])
    placing = 100 if ahead else 0
    ends = [behind.index("EXIT") + 1 for _, behind in loops]
    assert min(ends) <= 100 + placing + columns, "the outputs' instructions lie elsewhere"


def _needed(case: Case) -> list[str]:
    tile = case.tile
    if not tile.by_tma:
        return [NEEDED[case.contract]]
    width = 64 if tile.table == "tree_wgmma" else tile["TILE_N"]
    # The products, the copies, and the waiting for an earlier grid and letting the next one start.
    needed = [
        f"HGMMA.64x{width}x16",
        "UTMALDG.4D.MULTICAST" if tile.shares else "UTMALDG.4D",
        "ACQBULK",
        "PREEXIT",
    ]
    needed += (
        ["UTMASTG.4D"] if tile.kernel.output_map and (tile.swapped or (width % 64 == 0 and not tile.f32_out)) else []
    )
    return needed


def test_builds_that_sleep_compile() -> None:
    """For the tests of races on a GPU."""
    for jitter, contract in enumerate(OF_WGMMA, 1):
        by_tma = [tile for tile in tiles_for(contract, BF16) if tile.by_tma]
        tile = min(by_tma, key=lambda tile: tile["TILE_M"] * tile["TILE_N"])  # the soonest compiled
        build = build_for(contract, BF16, tile, Load.K_MAJOR, Load.K_MAJOR)
        log, code = compile_build(replace(build, macros=(*build.macros, ("JITTER", jitter))), "sm_90a")
        assert registers_of(log) * tile.threads * tile["CTAS_PER_SM"] <= REGISTER_FILE
        assert "NANOSLEEP" in instructions_of(code)


# All builds on sm_90a; elsewhere gathering and a vector load, types and loads going round.
SUMS = [("sm_90a", build) for build in column_sum.builds()] + [
    (architecture, build)
    for turn, architecture in enumerate(name for name in ARCHITECTURES if name != "sm_90a")
    for build in (column_sum.builds()[turn % 3 * 4], column_sum.builds()[(turn + 1) % 3 * 4 + 1 + turn % 3])
]


@pytest.fixture(scope="module")
def compiled_sums() -> Iterator[Builds]:
    yield from _compiling(SUMS)


@pytest.mark.parametrize(("architecture", "build"), SUMS, ids=str)
def test_the_bias_gradient_compiles_within_bounds(
    architecture: str,
    build: loader.KernelBuild,
    compiled_sums: Builds,
) -> None:
    log, code = compiled_sums[architecture, build].result()
    macros = dict(build.macros)
    # Vector loads: three CTAs an SM, as their shared memory has room for. Gathering: one, all of its loads in flight.
    few = build.source == column_sum.FEW_SOURCE
    assert registers_of(log) <= (200 if macros.get("LOAD") == Load.STRIDED else 64)
    assert build.shared_bytes <= gemm_tile.shared_limit(ARCHITECTURES[architecture])
    instructions = instructions_of(code)
    # A whole stage is unrolled: one addition a row and no loop between them.
    assert sum(name == "FADD" for name in instructions) > macros.get("ROWS", 4)
    for name in instructions:
        assert not name.startswith(("FFMA", "FMUL")), name
        check_instruction(name)
    if not few and macros["LOAD"] != Load.STRIDED:
        assert any(name.startswith("LDGSTS") for name in instructions)


# On sm_90a the sort and three of the sums, elsewhere one of the sums and the largest of the sort in turn.
SCATTERED = [("sm_90a", build) for build in scatter_sum.builds()[:7]] + [
    (architecture, build)
    for turn, architecture in enumerate(name for name in ARCHITECTURES if name != "sm_90a")
    for build in (scatter_sum.builds()[0], scatter_sum.builds()[4 + turn % 6])[turn % 2 :]
]


@pytest.fixture(scope="module")
def compiled_scattered() -> Iterator[Builds]:
    yield from _compiling(SCATTERED)


@pytest.mark.parametrize(("architecture", "build"), SCATTERED, ids=str)
def test_the_scattered_sum_compiles_within_bounds(
    architecture: str,
    build: loader.KernelBuild,
    compiled_scattered: Builds,
) -> None:
    log, code = compiled_scattered[architecture, build].result()
    macros = dict(build.macros)
    # Pieces: four CTAs an SM on Hopper, three elsewhere, so that enough of out is on its way to memory.
    pieces = 64 if architecture == "sm_90a" else 80
    assert registers_of(log) <= (pieces if macros.get("VECTOR") else 64 if macros.get("PHASE") == 0 else 128)
    assert build.shared_bytes <= gemm_tile.shared_limit(ARCHITECTURES[architecture])
    instructions = instructions_of(code)
    counts = build.source == scatter_sum.SORT_SOURCE
    assert counts or any(name == "FADD" for name in instructions)
    for name in instructions:
        # Digits are counted by atomic additions of whole numbers in shared memory, whose order cannot show.
        if not (counts and name.startswith("ATOMS.POPC")) and name != "ATOMS.ADD":
            check_instruction(name)
        assert not name.startswith(("FFMA", "FMUL")), name
    assert counts or ("ATOMS.ADD" not in instructions)
    if macros.get("VECTOR"):
        assert any(name.startswith("LDGSTS") for name in instructions)


# All on sm_90a, elsewhere one in turn.
LOGITS = [("sm_90a", build) for build in linear_logp_launch.builds()] + [
    (architecture, linear_logp_launch.builds()[turn % 4])
    for turn, architecture in enumerate(name for name in ARCHITECTURES if name != "sm_90a")
]


@pytest.fixture(scope="module")
def compiled_logits() -> Iterator[Builds]:
    yield from _compiling(LOGITS)


@pytest.mark.parametrize(("architecture", "build"), LOGITS, ids=str)
def test_what_is_made_of_logits_compiles_within_bounds(
    architecture: str,
    build: loader.KernelBuild,
    compiled_logits: Builds,
) -> None:
    log, code = compiled_logits[architecture, build].result()
    # Two CTAs of 256 an SM; one where a binary counter lies in registers.
    assert registers_of(log) <= (168 if dict(build.macros)["PHASE"] == 1 else 128)
    instructions = instructions_of(code)
    assert {"FFMA", "FMUL", "FADD"} <= {name.split(".")[0] for name in instructions}
    check_exponentials_and_divisions(instructions)


def _rows_built(
    kind: RowKind, operand: DType, load: rows.RowLoad, columns: int, capability: tuple[int, int]
) -> loader.KernelBuild:
    """The build whose tile has that many columns at a time."""
    (tile,) = [tile for tile in rows.tiles_for(kind, load, capability) if tile.columns == columns and tile.held]
    return rows.build_for(kind, operand, tile)


def _rows_to_compile() -> Iterator[tuple[str, loader.KernelBuild]]:
    """On sm_90a each kind, the types and the tiles going round, and those that need most registers; elsewhere the two
    kinds that need most of them."""
    for number, kind in enumerate(rows.KINDS):
        tiles = [tile for load in rows.RowLoad for tile in rows.tiles_for(kind, load, (9, 0))]
        operand = F32 if kind.spreads and kind.operands == 1 else (F32, F16, BF16)[number % 3]
        yield "sm_90a", rows.build_for(kind, operand, tiles[5 * number % len(tiles)])
    vector = rows.RowLoad.VECTOR
    for kind, operand in ((RowKind.SOFTMAX, F32), (RowKind.SOFTMAX, BF16), (RowKind.SOFTMAX_BACKWARD, F16)):
        yield "sm_90a", _rows_built(kind, operand, vector, 163_840, (9, 0))
    (across,) = rows.tiles_for(RowKind.LOG_SOFTMAX_BACKWARD, rows.RowLoad.ACROSS, (9, 0))
    yield "sm_90a", rows.build_for(RowKind.LOG_SOFTMAX_BACKWARD, BF16, across)
    yield "sm_80", _rows_built(RowKind.SOFTMAX_BACKWARD, F32, vector, 4096, (8, 0))
    for turn, (architecture, capability) in enumerate(ARCHITECTURES.items()):
        if architecture != "sm_90a":
            widest = 163_840 if capability >= (9, 0) else 32_768 if turn % 2 else 16_384
            kind = RowKind.SOFTMAX if turn % 2 or capability == (10, 0) else RowKind.SOFTMAX_BACKWARD
            yield architecture, _rows_built(kind, (F16, F32)[turn // 2 % 2], vector, widest, capability)


ROWS = list(dict.fromkeys(_rows_to_compile()))


@pytest.fixture(scope="module")
def compiled_rows() -> Iterator[Builds]:
    yield from _compiling(ROWS)


@pytest.mark.parametrize(("architecture", "build"), ROWS, ids=str)
def test_the_row_operations_compile_within_bounds(
    architecture: str,
    build: loader.KernelBuild,
    compiled_rows: Builds,
) -> None:
    log, code = compiled_rows[architecture, build].result()
    macros = dict(build.macros)
    assert registers_of(log) * macros["THREADS"] <= REGISTER_FILE
    assert sum(map(int, re.findall(r"(\d+) bytes smem", log))) <= 25 * 1024
    instructions = instructions_of(code)
    kind = RowKind(macros["KIND"])
    if not kind.spreads:
        assert "F2I.S64.TRUNC" in instructions
    assert any(name.startswith("UCGABAR") for name in instructions) == (macros["CLUSTER"] > 1)
    check_exponentials_and_divisions(instructions)
    if macros["LOAD"] == rows.RowLoad.VECTOR and not (kind.spreads and kind.operands == 1):
        assert any(name.startswith("LDG") and ".128" in name for name in instructions)


def test_bounds_and_tables_name_the_same_tiles() -> None:
    tiles = {
        (tile.table, str(tile))
        for contract in (FMA, TREE, MMA16, MMA8, TREE_MMA16)
        for operand in contract.operands
        for tile in tiles_for(contract, operand)
        if not tile.by_tma
    }
    assert tiles == set(REGISTERS)
