"""What test_triton_kernels.py runs with TRITON_INTERPRET=1: `python triton_interpreted.py PART`, PART a function's
name."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import numpy as np

from detkern.dispatch import selfcheck
from detkern.dispatch.backend import Execution
from detkern.operations.bias_gradient.problem import column_sum_problem
from detkern.operations.bias_gradient.replay import column_sum as replayed_column_sum
from detkern.operations.gemm import operation as cases
from detkern.operations.gemm import replay as numpy_replay
from detkern.operations.gemm.operation import GEMM
from detkern.operations.gemm.problem import gemm_problem
from detkern.operations.operation import Sample
from detkern.tensors import TensorView
from detkern.tensors.numpy import CPU, scratch
from detkern.triton import geometry, launch
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType, from_numpy

EXECUTION = Execution(CPU, 0, scratch)
SMALL = geometry.Tile(32, 32, 4, 4, 1, band=2)
SPREAD = 3  # elements between neighbours of a spread-out array
compared = 0


def view(array: np.ndarray) -> TensorView:
    dtype = from_numpy(array.dtype)
    assert dtype is not None
    strides = tuple(step // array.itemsize for step in array.strides)
    return TensorView(array.ctypes.data, array.shape, strides, dtype, CPU, array=array)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """New memory at a multiple of 16 bytes, every byte 0xFF (NaN): what is read or left unwritten shows."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = scratch(size + 16).array
    memory[...] = 0xFF
    return memory[:size].view(dtype).reshape(shape)


def laid(array: np.ndarray, mode: str) -> np.ndarray:
    """The array with another layout: rows or columns (at 16 bytes), reversed, or spread out at odd addresses."""
    rows, columns = array.shape
    if mode == "columns":
        return laid(array.T, "rows").T
    if mode == "reversed":
        return laid(array[::-1, ::-1], "rows")[::-1, ::-1]
    step = SPREAD if mode == "spread" else 1
    line = step * -(-columns // 8) * 8 + (mode == "spread")
    memory = aligned((rows * line + 1,), array.dtype)
    start = memory[(mode == "spread") :]
    result = np.lib.stride_tricks.as_strided(start, array.shape, (line * array.itemsize, step * array.itemsize))
    result[...] = array
    return result


def product(
    contract: Contract,
    a: np.ndarray,
    b: np.ndarray,
    initial: np.ndarray | None = None,
    *,
    bias: np.ndarray | None = None,
    out_dtype: DType | None = None,
    mode: str = "rows",
    tile: geometry.Tile | None = None,
) -> np.ndarray:
    """The product by the kernels, straight through the launch code."""
    dtype = from_numpy(a.dtype)
    assert dtype is not None
    shape = (a.shape[0], b.shape[1])
    out_dtype = out_dtype or (F32 if initial is not None else dtype)
    out = laid(np.zeros(shape, out_dtype.numpy) if initial is None else initial, mode)
    if initial is None:
        out.view(out_dtype.bits)[...] = -1 & (1 << 8 * out_dtype.itemsize) - 1
    views = view(a), view(b), view(out), None if bias is None else view(bias)
    problem = gemm_problem(contract, *views, initial is not None)
    # The interpreter takes its time for each element of a tile; the tile changes no bit.
    chosen = None if 0 in shape else geometry.choose(problem, 1, tile or SMALL)
    if chosen is not None:
        launch.Launches(problem, chosen)(problem.m, (views[0], views[1], views[3]), views[2], EXECUTION)
    return np.ascontiguousarray(out)


def check(got: np.ndarray, want: np.ndarray, *about: Any) -> None:
    global compared
    bits = f"u{want.dtype.itemsize}"
    assert got.dtype == want.dtype, about
    wrong = np.argwhere(got.view(bits) != want.view(bits))
    assert not len(wrong), f"{len(wrong)} of {want.size} differ: {about}, first at {wrong[0]}"
    compared += want.size


def _against_the_replay(contracts: tuple[str, ...], sizes: tuple[tuple[int, int, int], ...]) -> None:
    """Every kind of operands; layouts, sizes, epilogues and starting values come round."""
    modes = ("rows", "columns", "reversed", "spread")
    turns = itertools.count()
    for name in contracts:
        contract = CONTRACTS[name]
        for dtype in contract.operands if fused() else (F16,):
            for kind in operands.KINDS:
                turn = next(turns)
                m, n, k = sizes[turn % len(sizes)]
                a = operands.generate(kind, dtype, (m, k), 2 * turn)
                b = operands.generate(kind, dtype, (k, n), 2 * turn + 1)
                start = operands.generate(kind, F32, (m, n), 3) if turn % 3 == 1 else None
                bias = operands.generate(kind, (F32, F16, BF16)[turn % 3], (n,), 4) if turn % 3 == 2 else None
                out_dtype = None if start is not None else (None, F32, F16, BF16)[turn // 3 % 4]
                laid_a, laid_b = laid(a, modes[turn % 4]), laid(b, modes[turn // 4 % 4])
                got = product(
                    contract, laid_a, laid_b, start, bias=bias, out_dtype=out_dtype, mode=modes[turn // 2 % 4],
                )  # fmt: skip
                want = numpy_replay.gemm(contract, a, b, initial=start, bias=bias, out_dtype=out_dtype)
                check(got, want, name, dtype, kind, m, n, k, turn)


@functools.cache
def fused() -> bool:
    """Whether the interpreter's fused multiply-add rounds once (Triton 3.9): else it is one for f16 alone, whose
    products are exact."""
    x = np.float32(1 + 2.0**-12).reshape(1, 1)
    got = product(CONTRACTS["fma"], x, x, np.float32(-1 - 2.0**-11).reshape(1, 1))
    return bool(got[0, 0] == np.float32(2.0**-24))


def chains() -> None:
    """`fma`, every kind of operands, layout, epilogue and load path, across the edges of a tile."""
    # Every float32 half way between two neighbours of a 16-bit type, rounded to it: to the even one.
    one = np.ones((1, 1), np.float32)
    for dtype, halves in ((BF16, 0x3F808000 + 0x10000 * np.arange(32)), (F16, 0x3F801000 + 0x2000 * np.arange(32))):
        a = halves.astype(np.uint32).view(np.float32)[:, None]
        check(product(CONTRACTS["fma"], a, one, out_dtype=dtype), numpy_replay.round_to(a, dtype), "ties", dtype)
    _against_the_replay(("fma",), ((5, 7, 33), (33, 8, 16), (8, 40, 9), (3, 34, 0), (16, 24, 40), (1, 1, 1)))


def trees() -> None:
    """`tree` for numbers of leaves of every shape of tree, then as above."""
    contract = CONTRACTS["tree"]
    for k in (32, 96 - 31, 160, 224 - 5, 352 - 31):
        a, b = operands.generate("normal", BF16, (2, k), k), operands.generate("normal", BF16, (k, 3), k + 1)
        check(product(contract, a, b), numpy_replay.gemm(contract, a, b), k)
    _against_the_replay(("tree",), ((5, 7, 33), (9, 8, 8), (8, 34, 9), (3, 4, 0), (2, 8, 40)))


def dots() -> None:
    """`mma16` and `tree-mma16` on small whole numbers in f16 (the interpreter multiplies bf16 patterns as integers),
    for every pair of load paths, and the larger tiles."""
    modes = ("rows", "columns", "reversed", "spread")
    sizes = ((5, 7, 33), (66, 8, 64), (8, 70, 100), (3, 4, 0), (64, 64, 72), (16, 24, 136))
    for turn, (a_mode, b_mode, name) in enumerate(itertools.product(modes, modes, ("mma16", "tree-mma16"))):
        m, n, k = sizes[turn % len(sizes)]
        rng = np.random.default_rng(turn)
        a, b = (rng.integers(-3, 4, shape).astype(np.float16) for shape in ((m, k), (k, n)))
        start = rng.integers(-9, 10, (m, n)).astype(np.float32) if turn % 3 == 0 else None
        exact = a.astype(np.int64) @ b.astype(np.int64) + (0 if start is None else start.astype(np.int64))
        tiles = geometry._TILES[CONTRACTS[name]]
        got = product(
            CONTRACTS[name], laid(a, a_mode), laid(b, b_mode), start, out_dtype=F32, mode=modes[turn % 4],
            tile=tiles[turn % len(tiles)],
        )  # fmt: skip
        check(got, exact.astype(np.float32), name, m, n, k, a_mode, b_mode)


def batches() -> None:
    """Batch dimensions beyond those of one launch, broadcast and permuted ones."""
    contract = CONTRACTS["fma"]
    a = operands.generate("normal", BF16, (24 * 3, 5), 1).reshape(2, 3, 1, 2, 2, 3, 5)
    b = operands.generate("normal", BF16, (24 * 5, 4), 2).reshape(2, 3, 1, 2, 2, 5, 4)
    for left, right in (
        (a, b),
        (a.transpose(4, 0, 2, 1, 3, 5, 6), b.transpose(4, 0, 2, 1, 3, 5, 6)),
        (a, np.broadcast_to(b[:, :1], b.shape)),
    ):
        out = aligned((*left.shape[:-1], 4), BF16.numpy)
        views = view(left), view(right), view(out)
        problem = gemm_problem(contract, *views, None, False)
        launch.Launches(problem)(problem.m, (views[0], views[1], None), views[2], EXECUTION)
        want = np.empty_like(out)
        for index in np.ndindex(left.shape[:-2]):
            want[index] = numpy_replay.gemm(contract, left[index], right[index])
        check(out, want, left.strides, right.strides)


def sums() -> None:
    """The bias gradient, also over more batch dimensions than one launch counts, where the chains are carried on."""
    for turn, shape in enumerate(((1, 1), (0, 5), (19, 130), (2, 3, 4, 5), (2, 2, 1, 2, 2, 3, 7))):
        for kind, dtype in zip(("wide", "special", "signed-zero"), (F32, F16, BF16), strict=True):
            dc = operands.generate(kind, dtype, (int(np.prod(shape[:-1])), shape[-1]), turn).reshape(shape)
            order = (*reversed(range(len(shape) - 1)), len(shape) - 1)
            start = operands.generate(kind, F32, shape[-1:], 3)
            for array, initial in ((dc.transpose(order), None), (np.asfortranarray(dc), start)):
                out = np.empty(shape[-1:], dtype.numpy) if initial is None else initial.copy()
                problem = column_sum_problem(view(array), view(out), initial is not None)
                launch.Sums(problem)(problem.m, (view(array),), view(out), EXECUTION)
                check(out, replayed_column_sum(array, initial=initial), kind, dtype, array.strides)


def check_of(contract: str, dtype: DType) -> selfcheck.Outcome:
    """The self-check as a device gets it, on fewer operands."""
    tile = geometry.Tile(16, 16, 16, 4, 1)

    def computed(sample: Sample) -> np.ndarray:
        return product(CONTRACTS[sample.variant], *sample.operands[:2], sample.initial, tile=tile)

    return selfcheck.check(GEMM, contract, dtype, computed)


def selfcheck_() -> None:
    """The self-check lets through what has the bits and refuses NumPy's product, which does not add as a tensor core
    does."""
    cases._M, cases._N, cases._DEPTHS = 4, 8, (9,)
    good, bad = check_of("fma", F16), check_of("mma16", F16)
    assert not good.differing, good
    assert bad.differing, bad
    assert "differs from the CPU replay in" in str(bad)
    global compared
    compared += good.elements


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        {"chains": chains, "trees": trees, "dots": dots, "batches": batches, "sums": sums, "selfcheck": selfcheck_}[
            sys.argv[1]
        ]()
    print(f"compared {compared} elements")
