"""Every tile of the wgmma kernels against the general kernels' bits: odd sizes, load paths, epilogues, batches,
grids."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import cu_device
import numpy as np
import pytest
from cu_device import DEVICE, Placed, batched, differing, output, replay, run, tiles_here, vector

from detkern.cu.gemm_tile import Load, Tile
from detkern.cu.geometry import load_paths
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import MMA16, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu

PAIRS = [(contract, dtype) for contract in (MMA16, TREE_MMA16) for dtype in (BF16, F16)]
PAIR_IDS = [f"{contract}-{dtype.short}" for contract, dtype in PAIRS]
# A in rows is K_MAJOR, B in rows is MN_MAJOR.
MODES = {Load.K_MAJOR: ("rows", "columns"), Load.MN_MAJOR: ("columns", "rows")}
LOADS = list(itertools.product(MODES, MODES))
# CTAs: a tile each, or fewer that walk over several (one takes all of them).
GRIDS = (None, 1, 3, None, 5)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.skip_without_wgmma()
    cu_device.compile_all()


@dataclass(frozen=True)
class Epilogue:
    """out: the output's type (None: the operands', "other": the other 16-bit type)."""

    out: DType | str | None
    bias: DType | None = None
    accumulate: bool = False
    mode: str = "rows"

    def out_dtype(self, operand: DType) -> DType:
        if self.out == "other":
            return F16 if operand == BF16 else BF16
        return self.out if isinstance(self.out, DType) else operand


EPILOGUES = (
    Epilogue(None),
    Epilogue(F32, accumulate=True),
    Epilogue("other", BF16),
    Epilogue(F32, F32),
    Epilogue(F32),
    Epilogue(None, F16),
    Epilogue("other"),
    Epilogue(None, mode="rows-odd"),
    Epilogue(F32, accumulate=True, mode="columns"),
    Epilogue(None, F32, mode="columns"),
)
# (m, n, k): few rows for the tiles that hold few, single rows and columns, ends of k in every place of a block of 64,
# 128 and 256, more blocks than the deepest ring, several tiles each way, lines of whole boxes (which one copy takes).
SIZES = (
    (1, 264, 7),
    (1, 1000, 2600),
    (7, 9, 33),
    (7, 264, 512),
    (1, 1000, 2560),
    (16, 520, 100),
    (15, 1, 3000),
    (31, 136, 520),
    (33, 264, 257),
    (64, 72, 64),
    (100, 136, 1),
    (130, 520, 1100),
    (300, 264, 1000),
    (129, 1, 130),
    (257, 8, 4100),
    (320, 384, 1088),
)


def _start(m: int, n: int) -> np.ndarray:
    """What a chain may start from, special numbers among it."""
    start = operands.generate("wide", F32, (m, n), 93)
    flat = start.reshape(-1)
    for first, step, value in ((0, 5, -0.0), (1, 7, np.nan), (2, 11, np.inf), (3, 13, -np.inf), (4, 9, 0.0)):
        flat[first::step] = value
    return start


def _general(tiles: list[Tile]) -> Tile:
    """The largest tile that is not one of wgmma."""
    return max((tile for tile in tiles if not tile.by_tma), key=lambda tile: tile["TILE_M"] * tile["TILE_N"])


class Expected:
    """The general kernel's outputs of one size, in device memory, each computed when it is first asked for."""

    def __init__(self, contract: Contract, dtype: DType, m: int, n: int, k: int) -> None:
        self.contract, self.dtype, self.shape = contract, dtype, (m, n)
        a = operands.generate("wide" if k < 300 else "normal", dtype, (m, k), 91)
        b = operands.generate("normal", dtype, (k, n), 92)
        a[m // 2] = 0  # products of nothing but zeros
        if m > 2:
            a[m // 3, k // 2] = np.inf
        self.a, self.b = a, b
        self.placed = {(side, mode): Placed((a, b)[side], mode) for side in (0, 1) for mode in ("rows", "columns")}
        self.biases = {kind: vector(operands.generate("normal", kind, (n,), 94)) for kind in (F32, F16, BF16)}
        self._found: dict[Epilogue, Any] = {}

    def operands(self, loads: tuple[Load, Load]) -> tuple[TensorView, TensorView]:
        return self.placed[0, MODES[loads[0]][0]].view, self.placed[1, MODES[loads[1]][1]].view

    def output(self, epilogue: Epilogue) -> Placed:
        start = _start(*self.shape) if epilogue.accumulate else None
        return output(self.shape, epilogue.out_dtype(self.dtype), epilogue.mode, start)

    def bias(self, epilogue: Epilogue) -> TensorView | None:
        return None if epilogue.bias is None else self.biases[epilogue.bias]

    def of(self, epilogue: Epilogue) -> Any:
        """The memory of the output, what lies around it included."""
        if epilogue not in self._found:
            a, b = self.operands((Load.K_MAJOR, Load.K_MAJOR))
            out = self.output(epilogue)
            problem = gemm_problem(self.contract, a, b, out.view, self.bias(epilogue), epilogue.accumulate)
            tile = _general(tiles_here(problem, load_paths(problem)))
            run(
                self.contract, a, b, out.view, bias=self.bias(epilogue), accumulate=epilogue.accumulate, tile=tile
            )  # fmt: skip
            poison = cu_device.poison(1, epilogue.out_dtype(self.dtype))[0]
            assert not (out.bits() == poison).any(), "every element was written"
            self._found[epilogue] = out.memory
        return self._found[epilogue]


@pytest.mark.parametrize(("m", "n", "k"), SIZES, ids=lambda size: str(size))
@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_every_tile_has_the_general_kernels_bits(contract: Contract, dtype: DType, m: int, n: int, k: int) -> None:
    """Half of the epilogues a tile and load path, in turn, so that each tile meets each over the sizes; the memory
    around the output is compared as well."""
    import cupy

    expected = Expected(contract, dtype, m, n, k)
    differences: list[tuple[str, Any]] = []
    turn = SIZES.index((m, n, k))
    for loads in LOADS:
        a, b = expected.operands(loads)
        for number in range(len(EPILOGUES)):
            epilogue = EPILOGUES[number]
            probe = expected.output(epilogue)
            problem = gemm_problem(contract, a, b, probe.view, expected.bias(epilogue), epilogue.accumulate)
            if load_paths(problem) != loads:
                continue  # a single row, column or k has no line of that kind
            wanted = expected.of(epilogue)
            fresh = probe.memory.copy()
            for place, tile in enumerate(tile for tile in tiles_here(problem, loads) if tile.by_tma):
                if (number + place + turn) % 2:
                    continue
                cupy.copyto(probe.memory, fresh)
                launched = run(
                    contract, a, b, probe.view, bias=expected.bias(epilogue), accumulate=epilogue.accumulate,
                    tile=tile, grid=GRIDS[(number + place) % len(GRIDS)],
                )  # fmt: skip
                assert (launched.tile, launched.load_a, launched.load_b) == (tile, *loads)
                differences.append((f"{tile} {loads} {epilogue}", cupy.count_nonzero(probe.memory != wanted)))
    assert differences or k == 1
    assert [what for what, count in differences if int(count)] == []


@pytest.mark.parametrize("loads", LOADS, ids=lambda loads: "-".join(load.name for load in loads))
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_trees_of_every_number_of_leaves(dtype: DType, loads: tuple[Load, Load]) -> None:
    """Nodes of all sizes in every place of the ring: what a tile leaves there is where the next one starts."""
    import cupy

    m, n = 200, 264
    differences: list[tuple[str, Any]] = []
    numbers = range(1, 141) if (dtype, loads) == (BF16, LOADS[0]) else (3, 14, 30, 62, 125)
    for leaves in numbers:
        k = 32 * leaves - leaves % 4 * 8
        a = Placed(operands.generate("normal", dtype, (m, k), 95), MODES[loads[0]][0]).view
        b = Placed(operands.generate("normal", dtype, (k, n), 96), MODES[loads[1]][1]).view
        wanted, out = output((m, n), dtype, "rows"), output((m, n), dtype, "rows")
        problem = gemm_problem(TREE_MMA16, a, b, out.view, None, False)
        tiles = tiles_here(problem, loads)
        run(TREE_MMA16, a, b, wanted.view, tile=_general(tiles))
        fresh = out.memory.copy()
        for tile, grid in itertools.product((tile for tile in tiles if tile.by_tma), (1, None)):
            cupy.copyto(out.memory, fresh)
            run(TREE_MMA16, a, b, out.view, tile=tile, grid=grid)
            differences.append(
                (f"{tile}, {leaves} leaves, grid {grid}", cupy.count_nonzero(out.memory != wanted.memory))
            )
    assert len(differences) == len(numbers) * 2 * 2
    assert [what for what, count in differences if int(count)] == []


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_the_general_kernel_has_the_replays_bits(contract: Contract, dtype: DType) -> None:
    """On these operands too, so that what the tiles are held to is the contract."""
    for m, n, k in ((33, 264, 257), (7, 9, 33), (257, 8, 4100)):
        expected = Expected(contract, dtype, m, n, k)
        for epilogue in EPILOGUES[:3]:
            out = expected.output(epilogue)
            out.memory[...] = expected.of(epilogue)
            bias = None if epilogue.bias is None else operands.generate("normal", epilogue.bias, (n,), 94)
            wanted = replay(
                contract, expected.a, expected.b, bias=bias, out_dtype=epilogue.out_dtype(dtype),
                initial=_start(m, n) if epilogue.accumulate else None,
            )  # fmt: skip
            assert differing(wanted, out.bits()) == 0


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_chains_of_negative_zeros_end_at_zero(contract: Contract, dtype: DType) -> None:
    """A chain starts from +0, so that products that are all -0 leave it there; kernels that start it with a product
    must do so as well. Outputs of either 16-bit type: of mma16 they are rounded without adding the contract's + 0."""
    import cupy

    m, n, k = 258, 136, 2048  # whole steps: what is filled up with zeros would bring +0
    other = F16 if dtype == BF16 else BF16
    a, b = np.full((m, k), -0.0, np.float32), np.ones((k, n), np.float32)
    a[:, ::3], b[::3] = -1.0, 0.0
    for loads in LOADS:
        views = [Placed(x.astype(dtype.numpy), MODES[loads[side]][side]).view for side, x in enumerate((a, b))]
        for out_dtype in (dtype, other):
            out = output((m, n), out_dtype, "rows")
            fresh = out.memory.copy()
            problem = gemm_problem(contract, *views, out.view, None, False)
            tiles = [tile for tile in tiles_here(problem, loads) if tile.by_tma]
            assert tiles
            for tile in tiles:
                cupy.copyto(out.memory, fresh)
                run(contract, *views, out.view, tile=tile)
                assert not out.bits().any(), f"{tile} {loads} {out_dtype}"


def _layouts(loads: tuple[Load, Load]) -> list[tuple[str, tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]]:
    """(what, the order in which a's, b's and the output's axes (batch, row, column) are stored); no order for a b that
    is the same for the whole batch."""
    apart = {Load.K_MAJOR: ((0, 1, 2), (0, 2, 1)), Load.MN_MAJOR: ((0, 2, 1), (0, 1, 2))}
    between = {Load.K_MAJOR: ((1, 0, 2), (2, 0, 1)), Load.MN_MAJOR: ((2, 0, 1), (1, 0, 2))}
    return [
        ("one behind another", apart[loads[0]][0], apart[loads[1]][1], (0, 1, 2)),
        ("line by line", between[loads[0]][0], between[loads[1]][1], (1, 0, 2)),
        # a so that its rows and the batch are not one dimension of rows, which they would be merged into.
        ("broadcast b", {Load.K_MAJOR: (1, 0, 2), Load.MN_MAJOR: (0, 2, 1)}[loads[0]], None, (0, 1, 2)),
    ]


@pytest.mark.parametrize("loads", LOADS, ids=lambda loads: "-".join(load.name for load in loads))
@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_batches_by_every_tile(contract: Contract, dtype: DType, loads: tuple[Load, Load]) -> None:
    import cupy

    for (batch, m, n, k), (out_dtype, with_bias) in itertools.product(
        ((5, 16, 72, 136), (3, 136, 264, 328), (3, 320, 256, 384)), ((dtype, True), (dtype, False), (F32, False))
    ):
        a = operands.generate("normal", dtype, (batch, m, k), 95)
        b = operands.generate("normal", dtype, (batch, k, n), 96)
        start = np.stack([_start(m, n) for _ in range(batch)]) if out_dtype == F32 else None
        initial = np.full((batch, m, n), 0xFFAD, np.uint16).view(dtype.numpy) if start is None else start
        bias = vector(operands.generate("normal", F32, (n,), 97)) if with_bias else None
        for what, a_axes, b_axes, out_axes in _layouts(loads):
            left = batched(a, dtype, a_axes)
            if b_axes is None:
                one = batched(b[0], dtype, (1, 0) if loads[1] == Load.K_MAJOR else (0, 1))
                right = TensorView(one.pointer, b.shape, (0, *one.strides), dtype, DEVICE, array=one.array)
            else:
                right = batched(b, dtype, b_axes)
            wanted = batched(initial, out_dtype, out_axes)
            fresh = wanted.array.copy()
            problem = gemm_problem(contract, left, right, wanted, bias, start is not None)
            assert load_paths(problem) == loads
            assert problem.batch == (batch,)
            tiles = tiles_here(problem, loads)
            run(contract, left, right, wanted, bias=bias, accumulate=start is not None, tile=_general(tiles))
            if start is None:
                assert not bool((wanted.array == 0xFFAD).any())
            got = batched(initial, out_dtype, out_axes)
            counts = []
            by_tma = [tile for tile in tiles if tile.by_tma]
            assert by_tma
            for place, tile in enumerate(by_tma):
                cupy.copyto(got.array, fresh)
                run(
                    contract, left, right, got, bias=bias, accumulate=start is not None, tile=tile,
                    grid=GRIDS[place % len(GRIDS)],
                )  # fmt: skip
                counts.append(cupy.count_nonzero(got.array != wanted.array))
            assert [str(tile) for tile, count in zip(by_tma, counts, strict=True) if int(count)] == [], what


def _grouped(view: TensorView, sharing: int) -> TensorView:
    """[B, H, ..] as [B, H / sharing, sharing, ..], or as it is where nothing is shared."""
    if sharing == 1:
        return view
    (batch, heads, *size), (outer, head, *strides) = view.shape, view.strides
    shape = batch, heads // sharing, sharing, *size
    return TensorView(
        view.pointer, shape, (outer, sharing * head, head, *strides), view.dtype, DEVICE, array=view.array
    )


def _for_all_of_a_group(view: TensorView, sharing: int) -> TensorView:
    """[B, Hkv, ..] as [B, Hkv, sharing, ..], broadcast."""
    if sharing == 1:
        return view
    (batch, heads, *size), (outer, head, *strides) = view.shape, view.strides
    shape = batch, heads, sharing, *size
    return TensorView(view.pointer, shape, (outer, head, 0, *strides), view.dtype, DEVICE, array=view.array)


def _turned(view: TensorView) -> TensorView:
    shape, strides = (*view.shape[:-2], *view.shape[:-3:-1]), (*view.strides[:-2], *view.strides[:-3:-1])
    return TensorView(view.pointer, shape, strides, view.dtype, DEVICE, array=view.array)


@pytest.mark.parametrize(
    ("length", "keys"), [(200, 136), (1, 520), (3, 264)], ids=["sequence", "one-row", "three-rows"]
)
@pytest.mark.parametrize(("heads", "sharing"), [(6, 1), (2, 3)], ids=["a-head-each", "heads-that-share"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_attention_in_the_layout_of_models(dtype: DType, heads: int, sharing: int, length: int, keys: int) -> None:
    """q, k and v as [B, L, H, D]: two batch dimensions that do not merge, or heads of which several share one of k and
    v. Scores by every tile into both layouts of the output, against the replay; weights @ v, and both added to float32,
    against the general kernel."""
    import cupy

    batches, depth = 3, 64

    def placed(kind: str, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, TensorView]:
        """[B, H, rows, D] read from [B, rows, H, D]."""
        values = operands.generate(kind, dtype, (batches, *shape), seed)
        return values, batched(values, dtype, (0, 2, 1, 3))

    q, q_view = placed("normal", (heads * sharing, length, depth), 61)
    k, k_view = placed("normal", (heads, keys, depth), 62)
    _, v_view = placed("normal", (heads, keys, depth), 63)
    weights = batched(
        operands.generate("normal", dtype, (batches, heads * sharing, length, keys), 64), dtype, (0, 1, 2, 3)
    )
    scores = replay(MMA16, q, np.ascontiguousarray(np.swapaxes(np.repeat(k, sharing, axis=1), -1, -2)))
    products = (
        (_grouped(q_view, sharing), _turned(_for_all_of_a_group(k_view, sharing)), scores),
        (_grouped(weights, sharing), _for_all_of_a_group(v_view, sharing), None),
    )
    for (a, b, expected), axes, kind in itertools.product(products, ((0, 1, 2, 3), (0, 2, 1, 3)), (dtype, F32)):
        shape = batches, heads * sharing, length, b.shape[-1]
        fresh = operands.generate("normal", F32, shape, 65) if kind == F32 else np.full(shape, 0xFFAD, np.uint16)
        out = batched(fresh.view(kind.numpy), kind, axes)
        start, view = out.array.copy(), _grouped(out, sharing)
        problem = gemm_problem(MMA16, a, b, view, None, kind == F32)
        tiles = tiles_here(problem, load_paths(problem))
        by_tma = [tile for tile in tiles if tile.by_tma]
        assert by_tma
        run(MMA16, a, b, view, accumulate=kind == F32, tile=_general(tiles))
        wanted = out.array.copy()
        if expected is not None and kind != F32:
            stored = cupy.asnumpy(wanted).reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))
            assert differing(expected, np.ascontiguousarray(stored)) == 0
        for tile in by_tma:
            cupy.copyto(out.array, start)
            run(MMA16, a, b, view, accumulate=kind == F32, tile=tile)
            assert int(cupy.count_nonzero(out.array != wanted)) == 0, f"{tile} {axes} {kind}"
