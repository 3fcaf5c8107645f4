"""Both CPU implementations against arithmetic that others wrote, or that is exact, and the contracts' own promises."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from oracles import rational
from oracles.bits import assert_same_bits
from oracles.cases import CASES, Case, cases
from oracles.tensor_core import step_chain
from oracles.tree import tree

from detkern.vocabulary.arithmetic.tensor_core import tensor_core_step
from detkern.vocabulary.contracts import CONTRACTS, FMA, FP8_BLOCK128, MMA8, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, E4M3, E5M2, F16, F32, DType
from detkern.vocabulary.operands import KINDS, generate

CHAINS = [(MMA16, F16), (MMA16, BF16), (MMA8, F16), (MMA8, BF16)]
FP8_PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]
TREES = [(TREE, BF16), (TREE, F16), (TREE_MMA16, BF16), (TREE_MMA16, F16)]
CHAIN_SIDE = 112  # 30 cases, two K and two types of side^2 outputs: 1.5 million for each contract
FP8_SIDE = 100  # 30 cases and four pairs of types: 1.2 million
BLOCK_SIDE = 48


def ids(values: list[tuple[Contract | DType, DType]]) -> list[str]:
    return [f"{first.name if isinstance(first, Contract) else first.short}-{second.short}" for first, second in values]


def name_of(contract: Contract, dtype: DType, case: str, k: int) -> str:
    return f"{contract} {dtype.short} K={k}, {case}"


@cache
def chain_cases(contract: Contract, dtype: DType) -> list[tuple[Case, np.ndarray]]:
    """One group, and one and a half of them, each with what mmasim makes of it."""
    group = contract.step.group
    return [
        (case, step_chain(contract, case.a, case.b, case.initial))
        for k in (group, group + group // 2)
        for case in cases(dtype, dtype, CHAIN_SIDE, CHAIN_SIDE, k, seed=k)
    ]


@pytest.mark.parametrize(("contract", "dtype"), CHAINS, ids=ids(CHAINS))
def test_chain_is_mmasims(implementation, contract, dtype):
    outputs = 0
    for case, expected in chain_cases(contract, dtype):
        actual = implementation.gemm(contract, case.a, case.b, initial=case.initial, out_dtype=F32)
        assert_same_bits(actual, expected, name_of(contract, dtype, case.name, case.a.shape[1]))
        outputs += actual.size
    assert outputs >= 500_000  # 10^6 for the contract's two types


@pytest.mark.parametrize(("contract", "dtype"), CHAINS, ids=ids(CHAINS))
def test_cases_reach_the_corners(contract, dtype):
    """The operands that decide above really are what their names say."""
    results = {}
    for case, expected in chain_cases(contract, dtype):
        results.setdefault(case.name, []).append(expected.ravel())
    assert len(results) == 2 * CASES
    values = np.concatenate([value for part in results.values() for value in part])
    smallest = np.finfo(np.float32).tiny
    assert np.count_nonzero((np.abs(values) < smallest) & (values != 0)) > 1000
    for corner in (np.isnan(values), np.isposinf(values), np.isneginf(values), values == 0):
        assert np.count_nonzero(corner) > 1000
    # One group of products just below 4 whose exponent, as that of the accumulator, is 0: F + 2 + log2(group) bits.
    assert results["sums of 33 bits, accumulator"][0].max() >= 4 * contract.step.group


@pytest.mark.parametrize(("a", "b"), FP8_PAIRS, ids=ids(FP8_PAIRS))
def test_fp8_step_is_mmasims(a, b):
    """One step from any accumulator. Only NumPy has the step apart: the contract starts each block from +0."""
    outputs = 0
    for case in cases(a, b, FP8_SIDE, FP8_SIDE, 32):
        expected = step_chain(FP8_BLOCK128, case.a, case.b, case.initial)
        initial = np.zeros_like(expected) if case.initial is None else case.initial
        with np.errstate(all="ignore"):
            actual = tensor_core_step(FP8_BLOCK128.step, initial, case.a, case.b)
        assert_same_bits(actual, expected, f"{a.short} {b.short}, {case.name}")
        outputs += actual.size
    assert outputs >= 250_000  # 10^6 for the four pairs


@cache
def block_cases(a: DType, b: DType) -> list[tuple[Case, np.ndarray]]:
    blocks = [case for case in cases(a, b, BLOCK_SIDE, BLOCK_SIDE, 128) if case.initial is None]
    return [(case, step_chain(FP8_BLOCK128, case.a, case.b)) for case in blocks]


@pytest.mark.parametrize(("a", "b"), FP8_PAIRS, ids=ids(FP8_PAIRS))
def test_fp8_block_is_mmasims(implementation, a, b):
    """A block of four steps; scales of one leave its value as it is."""
    one = np.ones((BLOCK_SIDE, 1), np.float32)
    for case, expected in block_cases(a, b):
        actual = implementation.block_scaled_gemm(case.a, one, case.b, one.T)
        assert_same_bits(actual, expected, f"{a.short} {b.short}, {case.name}")


@pytest.mark.parametrize("kind", ["normal", "wide", "large", "special", "subnormal", "bits"])
@pytest.mark.parametrize("start", [False, True], ids=["from zero", "accumulate"])
def test_fp8_scales_are_exact(implementation, kind, start):
    """The scales' product, and the chain over blocks, in rational arithmetic."""
    m, n, blocks = 5, 7, 3
    a, b = generate("normal", E4M3, (m, 128 * blocks), 1), generate("normal", E5M2, (128 * blocks, n), 2)
    scale_a, scale_b = generate(kind, F32, (m, blocks), 3), generate(kind, F32, (blocks, n), 4)
    initial = generate(kind, F32, (m, n), 5) if start else None
    actual = implementation.block_scaled_gemm(a, scale_a, b, scale_b, initial=initial)
    parts = [
        rational.floats(step_chain(FP8_BLOCK128, a[:, 128 * i : 128 * i + 128], b[128 * i : 128 * i + 128]))
        for i in range(blocks)
    ]
    left, right = rational.floats(scale_a), rational.floats(scale_b)
    expected = rational.floats(initial if start else np.zeros((m, n), np.float32))
    for i in range(m):
        for j in range(n):
            for block in range(blocks):
                scale = rational.fma(left[i][block], right[block][j], 0.0)
                expected[i][j] = rational.fma(scale, parts[block][i][j], expected[i][j])
            expected[i][j] = rational.add(expected[i][j], 0.0)
    assert_same_bits(actual, rational.encode(expected, F32), kind)


@cache
def rational_chain(
    dtype: DType, kind: str, start: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    m, n, k = 6, 7, 20
    a, b = generate(kind, dtype, (m, k), 1), generate(kind, dtype, (k, n), 2)
    initial = generate(kind, F32, (m, n), 3) if start else None
    rows, cols = rational.floats(a), rational.floats(b.T)
    begin = rational.floats(initial if start else np.zeros((m, n), np.float32))
    values = [
        [rational.add(rational.fma_chain(rows[i], cols[j], begin[i][j]), 0.0) for j in range(n)] for i in range(m)
    ]
    return a, b, initial, rational.encode(values, F32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FMA.operands, ids=str)
@pytest.mark.parametrize("start", [False, True], ids=["from zero", "accumulate"])
def test_fma_is_exact(implementation, dtype, kind, start):
    a, b, initial, expected = rational_chain(dtype, kind, start)
    assert_same_bits(implementation.gemm(FMA, a, b, initial=initial, out_dtype=F32), expected, f"{dtype} {kind}")


def test_fma_beside_midpoints(implementation):
    """Sums within 2^-47 of a midpoint of two binary32 numbers, which binary64 rounds onto the midpoint."""
    near = np.arange(-8, 8, dtype=np.float32) * np.float32(2.0**-23)
    for scale in (1.0, 2.0**-70, 2.0**40):
        a, b = (1 + near)[:, None], (1 - near)[None] * np.float32(2.0**-24 * scale)
        for addend in (1.0, 1 + 2.0**-23, -1.0, -1 - 2.0**-23, 1 + 5 * 2.0**-23):
            initial = np.full((16, 16), addend * scale, np.float32)
            actual = implementation.gemm(FMA, a, b, initial=initial)
            left, right = rational.floats(a[:, 0]), rational.floats(b[0])
            expected = [[rational.fma(x, y, addend * scale) for y in right] for x in left]
            assert_same_bits(actual, rational.encode(expected, F32), f"{addend} times {scale}")


def test_fma_beside_subnormal_midpoints(implementation):
    """Products about half the smallest subnormal and results about the smallest normal number."""
    near = np.arange(-8, 8, dtype=np.float32) * np.float32(2.0**-23)
    a, b = (1 + near)[:, None] * np.float32(2.0**-75), (1 - near)[None] * np.float32(2.0**-75)
    for addend in (0.0, -0.0, 2.0**-149, 3 * 2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-126), 2.0**-126 - 2.0**-149):
        initial = np.full((16, 16), addend, np.float32)
        actual = implementation.gemm(FMA, a, b, initial=initial)
        left, right = rational.floats(a[:, 0]), rational.floats(b[0])
        expected = [[rational.add(rational.fma(x, y, addend), 0.0) for y in right] for x in left]
        assert_same_bits(actual, rational.encode(expected, F32), str(addend))


@cache
def recursive_tree(contract: Contract, dtype: DType, kind: str, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m, n = 3, 4
    a, b = generate(kind, dtype, (m, k), k), generate(kind, dtype, (k, n), k + 1)
    rows, cols = rational.floats(a), rational.floats(b.T)

    steps = {}
    if contract == TREE_MMA16:
        steps = {low: step_chain(contract, a[:, low : low + 32], b[low : low + 32]) for low in range(0, k, 32)}

    def leaf(i: int, j: int, low: int, high: int) -> float:
        if contract == TREE:
            return rational.fma_chain(rows[i][low:high], cols[j][low:high])
        return float(steps[low][i, j])

    values = [
        [rational.add(tree(lambda low, high, i=i, j=j: leaf(i, j, low, high), k, dtype), 0.0) for j in range(n)]
        for i in range(m)
    ]
    return a, b, rational.encode(values, dtype)


@pytest.mark.parametrize("kind", ["normal", "cancel", "subnormal", "large", "special"])
@pytest.mark.parametrize(("contract", "dtype"), TREES, ids=ids(TREES))
def test_tree_is_the_recursive_one(implementation, contract, dtype, kind):
    for k in (1, 31, 32, 33, 64, 95, 97, 161, 232):
        a, b, expected = recursive_tree(contract, dtype, kind, k)
        assert_same_bits(implementation.gemm(contract, a, b), expected, name_of(contract, dtype, kind, k))


@pytest.mark.parametrize(("contract", "dtype"), TREES, ids=ids(TREES))
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_tensor_parallel_shards_of_a_tree_give_the_whole(implementation, contract, dtype, shards):
    for leaves in (1, 2, 3, 5):
        k = 32 * shards * leaves
        for kind in ("normal", "cancel", "wide"):
            a, b = generate(kind, dtype, (9, k), 1), generate(kind, dtype, (k, 8), 2)
            part = k // shards
            values = [
                implementation.gemm(contract, a[:, i : i + part], b[i : i + part], out_dtype=F32)
                for i in range(0, k, part)
            ]
            while len(values) > 1:
                with np.errstate(all="ignore"):
                    sums = [x + y for x, y in zip(values[::2], values[1::2], strict=True)]
                    values = [value.astype(dtype.numpy).astype(np.float32) for value in sums]
            values[0][np.isnan(values[0])] = rational.encode([np.nan], F32)
            whole = implementation.gemm(contract, a, b, out_dtype=F32)
            assert_same_bits(values[0], whole, name_of(contract, dtype, kind, k))


def accumulating() -> list[tuple[Contract, DType]]:
    return [(c, d) for c in CONTRACTS.values() if c.accumulates for d in c.operands]


@pytest.mark.parametrize(("contract", "dtype"), accumulating(), ids=ids(accumulating()))
def test_micro_batches_give_the_whole(implementation, contract, dtype):
    unit = contract.accumulates
    k = 6 * unit if unit == 128 else 200
    cuts = [0, unit, 3 * unit, k]
    for kind in KINDS:
        a, b = generate(kind, dtype, (6, k), 1), generate(kind, dtype, (k, 5), 2)
        total = np.zeros((6, 5), np.float32)
        if contract == FP8_BLOCK128:
            scale_a, scale_b = generate(kind, F32, (6, k // 128), 3), generate(kind, F32, (k // 128, 5), 4)
            whole = implementation.block_scaled_gemm(a, scale_a, b, scale_b)
            for low, high in itertools.pairwise(cuts):
                blocks = slice(low // 128, high // 128)
                pieces = a[:, low:high], scale_a[:, blocks], b[low:high], scale_b[blocks]
                total = implementation.block_scaled_gemm(*pieces, initial=total)
        else:
            whole = implementation.gemm(contract, a, b, out_dtype=F32)
            for low, high in itertools.pairwise(cuts):
                total = implementation.gemm(contract, a[:, low:high], b[low:high], initial=total)
        assert_same_bits(total, whole, name_of(contract, dtype, kind, k))


@pytest.mark.parametrize(("contract", "dtype"), [(MMA16, BF16), (MMA8, F16)], ids=["mma16", "mma8"])
def test_micro_batches_elsewhere_give_other_bits(implementation, contract, dtype):
    """The promise stops where contracts.py says; were it wider, the field would be wrong."""
    a, b = generate("normal", dtype, (16, 64), 1), generate("normal", dtype, (64, 16), 2)
    cut = contract.accumulates // 2
    first = implementation.gemm(contract, a[:, :cut], b[:cut], out_dtype=F32)
    total = implementation.gemm(contract, a[:, cut:], b[cut:], initial=first)
    assert not np.array_equal(total, implementation.gemm(contract, a, b, out_dtype=F32))


def padded(values: np.ndarray, axis: int, front: int, back: int, negative: bool) -> np.ndarray:
    """`values` with zeros of one sign put before and after along `axis`."""
    sizes = [list(values.shape), list(values.shape)]
    sizes[0][axis], sizes[1][axis] = front, back
    zeros = [np.full(size, -0.0 if negative else 0.0, np.float32).astype(values.dtype) for size in sizes]
    return np.concatenate([zeros[0], values, zeros[1]], axis=axis)


def padding() -> list[tuple[Contract, DType]]:
    return [(c, d) for c in CONTRACTS.values() if c.padding and c != FP8_BLOCK128 for d in c.operands]


@pytest.mark.parametrize(("contract", "dtype"), padding(), ids=ids(padding()))
@pytest.mark.parametrize("start", [False, True], ids=["from zero", "accumulate"])
def test_zeros_around_k_change_no_bit(implementation, contract, dtype, start):
    """Neither padding the back nor, in multiples of `front`, the front; zeros of either sign on either side."""
    for kind in KINDS:
        a, b = generate(kind, dtype, (7, 21), 1), generate(kind, dtype, (21, 6), 2)
        initial = generate("signed-zero", F32, (7, 6), 3) if start else None
        plain = implementation.gemm(contract, a, b, initial=initial, out_dtype=F32)
        for front, back in ((0, 1), (0, 40), (contract.front, 0), (3 * contract.front, 5)):
            for signs in ((False, False), (True, False), (True, True)):
                x, y = padded(a, 1, front, back, signs[0]), padded(b, 0, front, back, signs[1])
                actual = implementation.gemm(contract, x, y, initial=initial, out_dtype=F32)
                assert_same_bits(actual, plain, f"{contract} {dtype.short} {kind} {front}+{back} {signs}")


def test_zero_blocks_change_no_bit(implementation):
    assert FP8_BLOCK128.padding
    assert FP8_BLOCK128.front == 128
    a, b = generate("special", E4M3, (7, 256), 1), generate("normal", E5M2, (256, 6), 2)
    scale_a, scale_b = generate("normal", F32, (7, 2), 3), generate("normal", F32, (2, 6), 4)
    initial = generate("signed-zero", F32, (7, 6), 5)
    plain = implementation.block_scaled_gemm(a, scale_a, b, scale_b, initial=initial)
    for front, back in ((1, 0), (0, 2), (2, 1)):
        for negative in (False, True):
            x, y = padded(a, 1, 128 * front, 128 * back, negative), padded(b, 0, 128 * front, 128 * back, False)
            left, right = padded(scale_a, 1, front, back, negative), padded(scale_b, 0, front, back, True)
            assert_same_bits(implementation.block_scaled_gemm(x, left, y, right, initial=initial), plain)


@pytest.mark.parametrize(("contract", "dtype"), TREES, ids=ids(TREES))
def test_zeros_move_the_split_points_of_a_tree(implementation, contract, dtype):
    assert not contract.padding
    assert contract.front is None
    assert contract.accumulates is None
    a, b = generate("normal", dtype, (16, 128), 1), generate("normal", dtype, (128, 16), 2)
    plain = implementation.gemm(contract, a, b)
    moved = implementation.gemm(contract, padded(a, 1, 32, 0, False), padded(b, 0, 32, 0, False))
    assert not np.array_equal(plain.view(np.uint16), moved.view(np.uint16))


def plain_gemms() -> list[tuple[Contract, DType]]:
    return [(c, d) for c in CONTRACTS.values() if c != FP8_BLOCK128 for d in c.operands]


@pytest.mark.parametrize(("contract", "dtype"), plain_gemms(), ids=ids(plain_gemms()))
def test_the_ending(implementation, contract, dtype):
    """+0, then bias in binary32, then one rounding to the output type."""
    for kind in ("normal", "large", "subnormal", "special", "signed-zero"):
        a, b = generate(kind, dtype, (6, 40), 1), generate(kind, dtype, (40, 5), 2)
        acc = rational.floats(implementation.gemm(contract, a, b, out_dtype=F32))
        for out_dtype in (F32, F16, BF16):
            for bias_dtype in (None, F32, F16, BF16):
                bias = None if bias_dtype is None else generate(kind, bias_dtype, (5,), 3)
                actual = implementation.gemm(contract, a, b, bias=bias, out_dtype=out_dtype)
                added = [0.0] * 5 if bias is None else rational.floats(bias)
                values = [
                    [
                        rational.round_to(rational.add(rational.add(value, 0.0), added[j]), out_dtype)
                        for j, value in enumerate(row)
                    ]
                    for row in acc
                ]
                what = f"{contract} {dtype.short} {kind} bias {bias_dtype} to {out_dtype}"
                assert_same_bits(actual, rational.encode(values, out_dtype), what)


@pytest.mark.parametrize(("contract", "dtype"), plain_gemms(), ids=ids(plain_gemms()))
def test_no_k_gives_positive_zero_plus_bias(implementation, contract, dtype):
    a, b = np.empty((2, 0), dtype.numpy), np.empty((0, 3), dtype.numpy)
    assert_same_bits(implementation.gemm(contract, a, b), np.zeros((2, 3), dtype.numpy))
    bias = np.array([-0.0, 1.5, np.nan], np.float32)
    expected = rational.encode([[0.0, 1.5, float("nan")]] * 2, dtype)
    assert_same_bits(implementation.gemm(contract, a, b, bias=bias), expected)
    initial = np.array([[-0.0, 1e-45, 3.0]] * 2, np.float32)
    assert_same_bits(implementation.gemm(contract, a, b, initial=initial), np.abs(initial))


def test_no_k_in_blocks(implementation):
    a, b = np.empty((2, 0), E4M3.numpy), np.empty((0, 3), E4M3.numpy)
    scales = np.empty((2, 0), np.float32), np.empty((0, 3), np.float32)
    assert_same_bits(implementation.block_scaled_gemm(a, scales[0], b, scales[1]), np.zeros((2, 3), np.float32))


@pytest.mark.parametrize(("contract", "dtype"), TREES, ids=ids(TREES))
def test_a_tree_adds_its_root_to_out(implementation, contract, dtype):
    a, b = generate("normal", dtype, (6, 100), 1), generate("normal", dtype, (100, 5), 2)
    initial = generate("normal", F32, (6, 5), 3)
    root = implementation.gemm(contract, a, b).astype(np.float32)
    assert_same_bits(implementation.gemm(contract, a, b, initial=initial), initial + root)


def test_f16_leaves_of_a_tree_overflow(implementation):
    """65,504 is the largest f16; from 65,520 on a leaf is infinite, where `mma16` still has the sum."""
    b = np.ones((32, 1), np.float16)
    for total, expected in ((65519.0, 65504.0), (65520.0, np.inf)):
        a = np.zeros((1, 32), np.float16)
        a[0, :2] = 65504.0, total - 65504.0
        assert a.astype(np.float64).sum() == total
        assert_same_bits(implementation.gemm(TREE, a, b, out_dtype=F32), np.full((1, 1), expected, np.float32))
        assert_same_bits(implementation.gemm(MMA16, a, b, out_dtype=F32), np.full((1, 1), total, np.float32))
