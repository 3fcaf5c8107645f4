"""Races that no checker sees, since wgmma reads shared memory by the asynchronous proxy: kernels whose roles sleep at random
give the bits of those that do not, and one that signals its copies too early does not, so the sleep does move the roles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cu_device import DEVICE, Placed, allocate, differing, output

from detkern import operands
from detkern.backend import Execution
from detkern.contracts import TREE_MMA16
from detkern.cu import geometry
from detkern.cu.device import describe
from detkern.dtypes import BF16, F16, DType
from detkern.problem import gemm_problem

pytestmark = pytest.mark.gpu

M, N, K = 1000, 1100, 4104


def _wgmma_tiles(dtype: DType) -> list[geometry.Tile]:
    return [tile for tile in geometry.tiles_for(TREE_MMA16, dtype) if tile.table == "tree_wgmma"]


def _product(a: Placed, b: Placed, dtype: DType, tile: geometry.Tile, jitter: int) -> np.ndarray:
    from detkern.cu import launch

    out = output((M, N), dtype, "rows")
    problem = gemm_problem(TREE_MMA16, a.view, b.view, out.view, None, False)
    chosen = geometry.launch_for(problem, tile, describe(DEVICE.index).multiprocessors)
    if jitter:
        chosen = replace(chosen, build=replace(chosen.build, macros=(*chosen.build.macros, ("JITTER", jitter))))
    launch.launch(problem, a.view, b.view, out.view, None, Execution(DEVICE, 0, allocate), chosen)
    return out.bits()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda dtype: dtype.short)
def test_roles_that_sleep_at_random_give_the_same_bits(dtype: DType) -> None:
    if describe(DEVICE.index).capability != (9, 0):
        pytest.skip("gpu: wgmma needs a device of compute capability 9.0")
    a = operands.generate("normal", dtype, (M, K), 81)
    b = operands.generate("normal", dtype, (K, N), 82)
    for modes in (("rows", "columns"), ("columns", "rows")):
        placed_a, placed_b = Placed(a, modes[0]), Placed(b, modes[1])
        for tile in _wgmma_tiles(dtype):
            plain = _product(placed_a, placed_b, dtype, tile, 0)
            for _ in range(3):
                assert differing(plain, _product(placed_a, placed_b, dtype, tile, 1)) == 0, f"{tile} {modes}"
            assert differing(plain, _product(placed_a, placed_b, dtype, tile, 2)) > 0, (
                f"{tile} {modes}: signalled early"
            )
