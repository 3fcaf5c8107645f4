"""linear_logp_wgmma.cu compiled for sm_90a: no spills, products in uniform registers, what stands behind them; the
choice of its tiles, and the memory between its launches."""

from __future__ import annotations

import pytest
from cu_compiled import (
    NEEDS_A_COMPILER,
    check_exponentials_and_divisions,
    compile_build,
    instructions_of,
    main_loops,
    registers_of,
)

from detkern.cu import gemm_tile, linear_logp_wgmma
from detkern.cu.device import CudaDevice
from detkern.cu.linear_logp_launch import DELTAS, FOLDS
from detkern.cu.linear_logp_wgmma import TILES, build_for, chosen, row_pieces
from detkern.cu.loader import KernelBuild
from detkern.operations.linear_logp.problem import PARTS, PLAIN, FoldProblem, Scaling, fold_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import MMA16
from detkern.vocabulary.dtypes import BF16, F16, F32, I64

pytest.importorskip("cupy", reason="CuPy is not installed")

DEVICE = Device("cuda", 0)


def problem(m: int, vocabulary: int, *, bias: bool = False, cap: bool = False, entropy: bool = False) -> FoldProblem:
    hidden, weight = (TensorView(4096, (rows, 64), (64, 1), BF16, DEVICE) for rows in (m, vocabulary))
    target, out = TensorView(4096, (m,), (1,), I64, DEVICE), TensorView(4096, (4, m), (m, 1), F32, DEVICE)
    column = TensorView(4096, (vocabulary,), (1,), F32, DEVICE) if bias else None
    scaling = Scaling(None, 20.0, 0.05) if cap else PLAIN
    return fold_problem(
        MMA16, hidden, weight, target, column, out,
        vocabulary=vocabulary, start=0, first=0, count=PARTS, scaling=scaling, entropy=entropy,
    )  # fmt: skip


def _compiled() -> list[KernelBuild]:
    """Of each tile the fold without anything or the gradient with an entropy, types in turn; of the tiles that are
    chosen with a bias and a softcap, one with all. The others differ in sizes."""
    found = []
    for number, tile in enumerate(TILES.values()):
        found.append(build_for((FOLDS, DELTAS)[number % 2], (F16, BF16)[number % 2], tile, entropy=number % 2 == 1))
    widest = TILES["128x192x64x5 in turn"]
    found += [build_for(phase, BF16, widest, entropy=phase == FOLDS) for phase in (FOLDS, DELTAS)]
    full = TILES["128x128x64x6 in turn"]
    found += [build_for(phase, F16, full, biased=True, entropy=True, capped=True) for phase in (FOLDS, DELTAS)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("build", _compiled(), ids=lambda build: build.name.replace(" ", "-"))
def test_compiles_within_bounds(build: KernelBuild) -> None:
    for mark in NEEDS_A_COMPILER:
        if mark.args[0]:
            pytest.skip(str(mark.kwargs["reason"]))
    log, code = compile_build(build, "sm_90a")
    macros = dict(build.macros)
    assert registers_of(log) * 32 * macros["WARPS_M"] <= 64 * 1024
    assert build.shared_bytes <= gemm_tile.shared_limit((9, 0))
    check_exponentials_and_divisions(instructions_of(code))
    for name in instructions_of(code):
        assert name not in ("NANOSLEEP", "BRA.U.ANY", "MEMBAR.ALL.GPU")
    ((loop, behind),) = main_loops(code)
    steps = macros["TILE_K"] // 16 * macros["GROUP_M"] // 64
    assert sum(name.startswith(f"HGMMA.64x{macros['TILE_N']}x16") for name in loop) == steps
    assert not {"R2UR", "WARPSYNC", "WARPSYNC.ALL"} & set(loop)
    assert ("UTMASTG.4D" in behind) == (macros["PHASE"] == DELTAS)
    if macros["PHASE"] == FOLDS and not macros["CAPPED"]:
        # Behind the products: no more than 1.15 times what a logit takes, twice its largest, its NaN and its absence.
        logits = macros["TILE_N"] * macros["GROUP_M"] // 128
        assert len(behind) <= 33 * logits + 500


def test_the_tile_is_chosen_by_rows_and_registers() -> None:
    for rows, tile in ((1, "16x128"), (17, "32x128"), (64, "64x128"), (65, "128x192"), (4096, "128x192")):
        assert str(chosen(problem(rows, 128_256), rows, 132)).startswith(tile)
    for settings in ({"bias": True}, {"cap": True}):
        assert str(chosen(problem(4096, 1000, **settings), 4096, 132)) == "128x128x64x6 in turn"
        assert chosen(problem(1, 151_936, **settings), 1, 132).columns == 128
    # 9 tiles of 128 columns a multiprocessor and four more, six of 192.
    assert str(chosen(problem(1, 151_936), 1, 132)) == "16x192x128x4"


def test_states_stay_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = CudaDevice(0, "Made-up GPU", "uuid", (9, 0), 132, "1.0")
    monkeypatch.setattr(linear_logp_wgmma, "describe", lambda index: made_up)
    for m, vocabulary in ((4096, 128_256), (8192, 151_936), (16_384, 262_144), (100_000, 32_000), (65, 7)):
        for entropy in (False, True):
            given = problem(m, vocabulary, entropy=entropy)
            tile = chosen(given, m, 132)
            rows, size = row_pieces(given, tile)
            assert rows * size <= linear_logp_wgmma.NODES_BYTES
            assert rows % tile.rows == 0
            assert linear_logp_wgmma.explained(given).scratch_bytes == min(rows, m) * size
    # 4096 rows of 1344 states of two numbers are one piece.
    assert row_pieces(problem(4096, 128_256), TILES["128x192x64x5 in turn"]) == (4096, 8 * 1344)
