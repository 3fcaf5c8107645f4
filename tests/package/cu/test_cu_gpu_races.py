"""Races that no checker sees, since TMA and wgmma reach shared memory by the asynchronous proxy: kernels whose roles
sleep at random give the bits of those that do not, and one that gives a stage back before it has read it does not, so
the sleep does move the roles."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import cu_device
import numpy as np
import pytest
from cu_device import DEVICE, Placed, allocate, differing, output

from detkern.cu import ahead, gemm_tile, geometry
from detkern.cu.device import describe
from detkern.cu.loader import KernelBuild, supported_architectures, target
from detkern.dispatch.backend import Execution
from detkern.operations.gemm.problem import gemm_problem
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import MMA16, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, DType

pytestmark = pytest.mark.gpu

N = 1104  # rows that TMA can write; no multiple of any tile's
KEPT, RELEASED_EARLY = 1, 2  # values of JITTER


@dataclass(frozen=True)
class Case:
    """One way in which the roles work together."""

    contract: Contract
    what: str
    m: int
    k: int

    def tile(self, dtype: DType) -> gemm_tile.Tile:
        """The first of its kind."""
        tiles = [tile for tile in gemm_tile.tiles_for(self.contract, dtype) if tile.by_tma]
        return next(tile for tile in tiles if _kind(tile) == self.what)

    def modes(self, dtype: DType) -> list[tuple[str, str]]:
        """Both operands along k, and along m and n where the tile takes that."""
        modes = {gemm_tile.Load.K_MAJOR: ("rows", "columns"), gemm_tile.Load.MN_MAJOR: ("columns", "rows")}
        return [mode for load, mode in modes.items() if (load, load) in self.tile(dtype).loads]

    def __str__(self) -> str:
        return f"{self.contract}-{self.what}"


def _kind(tile: gemm_tile.Tile) -> str:
    if tile["TILE_M"] < 64:
        return "few rows"
    if tile.table == "tree_wgmma":
        return "a round" if tile["STAGES"] == 4 else "no rounds"
    shares = ("plain", "a shared", "b shared")[tile.shares]
    return f"{shares} in turn" if tile.get("IN_TURN", 0) else shares


# More blocks of k than the ring has stages, many times over.
CASES = [
    Case(MMA16, "plain", 1000, 4104),
    Case(MMA16, "plain in turn", 1000, 4104),
    Case(MMA16, "few rows", 16, 16392),
    Case(MMA16, "a shared", 1024, 4096),  # lines of whole boxes
    Case(MMA16, "b shared", 1024, 4096),
    Case(MMA16, "b shared in turn", 1000, 4104),
    # Nodes of seven and of eight leaves, from either half of a stage on, and 63 stages a tile.
    Case(TREE_MMA16, "a round", 1000, 4000),
    Case(TREE_MMA16, "no rounds", 1000, 4000),
]
PARAMETERS = [(case, dtype) for case in CASES for dtype in (BF16, F16)]


def _build(build: KernelBuild, jitter: int) -> KernelBuild:
    return replace(build, macros=(*build.macros, ("JITTER", jitter))) if jitter else build


def _launch(case: Case, a: Placed, b: Placed, out: Placed, jitter: int) -> geometry.Launch:
    problem = gemm_problem(case.contract, a.view, b.view, out.view, None, False)
    tile = case.tile(out.dtype)
    assert geometry.takes(problem, tile, geometry.load_paths(problem))
    chosen = geometry.launch_for(problem, tile, describe(DEVICE.index).multiprocessors)
    return replace(chosen, build=_build(chosen.build, jitter))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """The kernels that sleep, compiled with all cores."""
    cu_device.skip_without_wgmma()
    loads = {"rows": gemm_tile.Load.K_MAJOR, "columns": gemm_tile.Load.MN_MAJOR}
    wanted = [
        _build(gemm_tile.build_for(case.contract, dtype, case.tile(dtype), load, load), jitter)
        for case, dtype in PARAMETERS
        for load in (loads[modes[0]] for modes in case.modes(dtype))
        for jitter in (0, KEPT, RELEASED_EARLY)
    ]
    architecture = target(describe(DEVICE.index).capability, supported_architectures())
    assert len(list(ahead.compile_ahead(wanted, architecture, len(os.sched_getaffinity(0))))) == len(set(wanted))


def _product(case: Case, a: Placed, b: Placed, dtype: DType, jitter: int) -> np.ndarray:
    from detkern.cu import launch

    out = output((case.m, N), dtype, "rows")
    chosen = _launch(case, a, b, out, jitter)
    problem = gemm_problem(case.contract, a.view, b.view, out.view, None, False)
    launch.launch(problem, a.view, b.view, out.view, None, Execution(DEVICE, 0, allocate), chosen)
    return out.bits()


@pytest.mark.parametrize(("case", "dtype"), PARAMETERS, ids=[f"{case}-{dtype.short}" for case, dtype in PARAMETERS])
def test_roles_that_sleep_at_random_give_the_same_bits(case: Case, dtype: DType) -> None:
    a = operands.generate("normal", dtype, (case.m, case.k), 81)
    b = operands.generate("normal", dtype, (case.k, N), 82)
    for modes in case.modes(dtype):
        placed_a, placed_b = Placed(a, modes[0]), Placed(b, modes[1])
        plain = _product(case, placed_a, placed_b, dtype, 0)
        for _ in range(3):
            assert differing(plain, _product(case, placed_a, placed_b, dtype, KEPT)) == 0, f"{case} {modes}"
        early = _product(case, placed_a, placed_b, dtype, RELEASED_EARLY)
        assert differing(plain, early) > 0, f"{case} {modes}: stages given back early must show"
