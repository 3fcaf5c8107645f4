"""linear_logp_wgmma.cu on a GPU: every tile forced, bit for bit against products and linear_logp.cu, and a sample of
these against the replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cu_device import DEVICE

import detkern
from detkern.cu import linear_logp, linear_logp_wgmma
from detkern.cu.device import describe
from detkern.cu.gemm import Products
from detkern.cu.linear_logp_wgmma import TILES, FusedTile
from detkern.cu.loader import KernelBuild
from detkern.operations.linear_logp.problem import (
    PARTS,
    PLAIN,
    FoldProblem,
    Scaling,
    delta_problem,
    fold_problem,
    part_edges,
)
from detkern.tensors import adapter_for
from detkern.vocabulary.contracts import MMA16

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.gpu

SCALED = Scaling(float(np.float32(1 / 0.7)), 20.0, float(np.float32(1 / 20)))
# m, vocabulary, depth, targets: few rows and many, parts that end inside of a tile and empty ones, depths of no whole
# stages.
SIZES = [
    (1, 1000, 64, 1),
    (13, 520, 136, 2),
    (33, 2504, 200, 1),
    (64, 3000, 64, 3),
    (129, 4096, 72, 1),
    (300, 5000, 264, 1),
    (150, 8, 64, 1),
]


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if describe(DEVICE.index).capability != (9, 0):
        pytest.skip("linear_logp_wgmma.cu is for compute capability 9.0")


def views(*tensors: Any) -> tuple[Any, Any]:
    adapter = adapter_for(tensors[0], "hidden")
    found: list[Any] = [None if tensor is None else adapter.view(tensor, "hidden") for tensor in tensors]
    return found, adapter.execution(found[0].device)


def prepared(problem: Any, tile: FusedTile | None, execution: Any) -> Any:
    """What runs it: the tile, or where there is none products."""
    fold = isinstance(problem, FoldProblem)
    if tile is not None:
        assert linear_logp_wgmma.takes(problem)
        return (linear_logp_wgmma.Folds if fold else linear_logp_wgmma.Deltas)(problem, tile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_logp_wgmma, "takes", lambda problem: False)
        implementation: Any = (linear_logp.Folds if fold else linear_logp.Deltas)(Products())
        return implementation.prepare(problem, execution)


def fold(
    tile: FusedTile | None,
    given: list[Any],
    scaling: Scaling,
    entropy: bool,
    first: int = 0,
    count: int = PARTS,
    vocabulary: int = 0,
) -> Any:
    hidden, weight, target, _ = given
    out = torch.full((3 + target.shape[1], hidden.shape[0]), float("nan"), device="cuda")
    (*operands, lines), execution = views(*given, out)
    vocabulary = vocabulary or weight.shape[0]
    problem = fold_problem(
        MMA16, *operands, lines, vocabulary=vocabulary, start=part_edges(vocabulary)[first], first=first, count=count,
        scaling=scaling, entropy=entropy,
    )  # fmt: skip
    prepared(problem, tile, execution)(problem.m, tuple(operands), lines, execution)
    return out


def delta(
    tile: FusedTile | None,
    given: list[Any],
    state: Any,
    grads: Any,
    scaling: Scaling,
    start: int = 0,
    vocabulary: int = 0,
) -> Any:
    hidden, weight, target, bias = given
    out = torch.full((hidden.shape[0], weight.shape[0]), 7, device="cuda", dtype=hidden.dtype)
    (*operands, block), execution = views(hidden, weight, target, state, grads, bias, out)
    problem = delta_problem(
        MMA16,
        *operands,
        block,
        vocabulary=vocabulary or weight.shape[0],
        start=start,
        ignore_index=-100,
        scaling=scaling,
    )
    prepared(problem, tile, execution)(problem.m, tuple(operands), block, execution)
    return out


def case(m: int, vocabulary: int, depth: int, targets: int, dtype: Any, bias: bool, hostile: bool) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(m)
    hidden, weight = (
        torch.randn(rows, depth, device="cuda", generator=generator).to(dtype) for rows in (m, vocabulary)
    )
    if hostile:
        hidden[m // 2, 0], hidden[m // 3, 1] = float("nan"), float("inf")
        weight[vocabulary // 2, 0], weight[vocabulary // 5, 1] = float("nan"), float("-inf")
        hidden[-1], weight[vocabulary // 3] = 0, 0
    target = torch.randint(-1, vocabulary + 1, (m, targets), device="cuda", generator=generator)
    target[::7] = -100
    target[:, -1] = target[:, 0]
    added = torch.randn(vocabulary, device="cuda", generator=generator) if bias else None
    return [hidden, weight, target, added]


def equal(left: Any, right: Any) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return bool(torch.equal(left.view(integers), right.view(integers)))


@pytest.mark.parametrize("tile", TILES.values(), ids=lambda tile: str(tile).replace(" ", "-"))
@pytest.mark.parametrize(
    ("dtype", "entropy", "full"),
    [("bfloat16", False, False), ("bfloat16", True, False), ("float16", True, False), ("bfloat16", True, True)],
    ids=["bf16", "bf16-entropy", "f16-entropy", "bf16-all"],
)
def test_every_tile_has_the_bits_of_products(tile: FusedTile, dtype: str, entropy: bool, full: bool) -> None:
    """States and gradients; NaN and infinities too."""
    if full and tile.columns > 128:
        pytest.skip("with a bias and a softcap it would spill and is not chosen")
    scaling = SCALED if full else PLAIN
    for size in SIZES:
        if tile.shares and size[0] < tile.rows:
            continue
        for hostile in (False, True):
            given = case(*size, getattr(torch, dtype), full, hostile)
            state = fold(None, given, scaling, entropy)
            assert equal(fold(tile, given, scaling, entropy), state), (size, hostile)
            grads = torch.randn(size[3] + 1 + entropy, size[0], device="cuda")
            expected = delta(None, given, state, grads, scaling)
            assert equal(delta(tile, given, state, grads, scaling), expected), (size, hostile)


def test_shards_and_blocks_of_columns() -> None:
    hidden, weight, target, _ = case(200, 5000, 128, 1, torch.bfloat16, False, False)
    edges, tile = part_edges(5000), TILES["128x192x64x5 in turn"]
    for count in (1, 2, 4):
        for first in range(0, PARTS, count):
            given = [hidden, weight[edges[first] : edges[first + count]], target, None]
            of_tile, of_products = (fold(way, given, PLAIN, True, first, count, 5000) for way in (tile, None))
            assert equal(of_tile, of_products), (first, count)
    state, grads = fold(tile, [hidden, weight, target, None], PLAIN, True), torch.randn(3, 200, device="cuda")
    for start, end in ((0, 640), (640, 1928), (4992, 5000)):
        given = [hidden, weight[start:end], target, None]
        of_tile, of_products = (delta(way, given, state, grads, PLAIN, start, 5000) for way in (tile, None))
        assert equal(of_tile, of_products), (start, end)


def test_rows_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(700, 3000, 64, 1, torch.bfloat16, False, False)
    whole = fold(None, given, PLAIN, True)
    monkeypatch.setattr(linear_logp_wgmma, "NODES_BYTES", 1)
    for tile in TILES.values():
        assert equal(fold(tile, given, PLAIN, True), whole), str(tile)


@pytest.mark.parametrize("m", [1, 16, 40, 200])
def test_the_replays_bits_as_it_is_called(m: int) -> None:
    """What is chosen by itself, of rows that are a slice of wider ones, and repeated."""
    hidden, weight, target, _ = case(m, 1500, 96, 1, torch.bfloat16, False, False)
    wide = torch.full((m, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, :96] = hidden
    asked: dict[str, Any] = {"return_lse": True, "return_entropy": True, "contract": "mma16"}
    expected = detkern.linear_logp(hidden.cpu(), weight.cpu(), target.cpu(), **asked)
    for _ in range(20):
        found = detkern.linear_logp(wide[:, :96], weight, target, **asked)
        assert all(equal(left.cpu(), right) for left, right in zip(found, expected, strict=True))
    said = detkern.explain(detkern.linear_logp, hidden, weight, target, contract="mma16")
    assert linear_logp_wgmma.SOURCE in str(said)


def test_layouts_that_tma_cannot_read_go_by_products() -> None:
    """Lines along V, rows at no multiple of 16 bytes, float32: the same bits or the same contract by another kernel."""
    hidden, weight, target, _ = case(40, 1000, 64, 1, torch.bfloat16, False, False)
    expected = detkern.linear_logp(hidden, weight, target, contract="mma16")
    turned = weight.t().contiguous().t()
    shifted = torch.empty(40 * 65 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(40, 65)[:, :64]
    shifted.copy_(hidden)
    for given in ((hidden, turned), (shifted, weight)):
        assert equal(detkern.linear_logp(*given, target, contract="mma16"), expected)


@pytest.mark.parametrize(
    "tile", ["16x128x128x6", "128x192x64x5 in turn", "128x192x64x5 b shared in turn", "128x256x64x4"]
)
def test_roles_that_sleep_at_random_give_the_same_bits(tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stages that are given back before they are read do not, so the sleep does move the roles."""
    given = case(16 if tile.startswith("16") else 600, 4000, 4104, 1, torch.bfloat16, False, False)
    grads = torch.randn(2, given[0].shape[0], device="cuda")

    def results(jitter: int) -> tuple[Any, Any]:
        def build_for(*arguments: Any, **settings: Any) -> KernelBuild:
            build = made(*arguments, **settings)
            return replace(build, macros=(*build.macros, ("JITTER", jitter))) if jitter else build

        monkeypatch.setattr(linear_logp_wgmma, "build_for", build_for)
        return fold(TILES[tile], given, PLAIN, False), delta(TILES[tile], given, state, grads, PLAIN)

    made = linear_logp_wgmma.build_for
    state = fold(None, given, PLAIN, False)
    plain = results(0)
    for _ in range(3):
        assert all(map(equal, results(1), plain))
    assert not any(map(equal, results(2), plain)), "stages given back early must show"
