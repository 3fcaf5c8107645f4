"""The NumPy replay: every rule of the contracts, broken on purpose, is noticed; and what the replay refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from oracles import rational
from oracles.cases import Case, cases
from oracles.tensor_core import step_chain
from oracles.tree import tree

from detkern.errors import ArgumentError, ContractUnsupported, ShapeError
from detkern.operations.block_scaled.replay import block_scaled_gemm as replayed_block_scaled
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary.arithmetic import binary32 as numpy_arithmetic
from detkern.vocabulary.arithmetic import tensor_core as numpy_step
from detkern.vocabulary.contracts import CONTRACTS, FMA, FP8_BLOCK128, MMA8, MMA16, TREE, Contract
from detkern.vocabulary.dtypes import BF16, E4M3, E5M2, F16, F32, DType
from detkern.vocabulary.operands import KINDS, generate

SIDE = 40


@cache
def step_cases(contract: Contract, a: DType, b: DType) -> list[tuple[Case, np.ndarray]]:
    k = contract.step.group
    return [(case, step_chain(contract, case.a, case.b, case.initial)) for case in cases(a, b, SIDE, SIDE, k)]


def differing(contract: Contract, a: DType, b: DType, changed: Contract | None = None) -> dict[str, int]:
    """How many results of the replay's steps differ from mmasim's, by case; cases without any are left out."""
    step = (changed or contract).step
    counts = {}
    for case, expected in step_cases(contract, a, b):
        acc = np.zeros_like(expected) if case.initial is None else case.initial
        with np.errstate(all="ignore"):
            for k in range(0, case.a.shape[1], step.group):
                ks = slice(k, k + step.group)
                acc = numpy_step.tensor_core_step(step, acc, case.a[:, ks], case.b[ks])
        if count := np.count_nonzero(acc.view(np.uint32) != expected.view(np.uint32)):
            counts[case.name] = count
    return counts


STEPS = [(MMA16, BF16, BF16), (MMA16, F16, F16), (MMA8, BF16, BF16), (MMA8, F16, F16), (FP8_BLOCK128, E4M3, E5M2)]
STEP_IDS = [f"{contract.name}-{a.short}-{b.short}" for contract, a, b in STEPS]


@pytest.mark.parametrize(("contract", "a", "b"), STEPS, ids=STEP_IDS)
def test_nothing_broken_is_nothing_noticed(contract, a, b):
    assert differing(contract, a, b) == {}


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("number", ["fraction_bits", "significant_bits", "floor", "group"])
@pytest.mark.parametrize(("contract", "a", "b"), STEPS, ids=STEP_IDS)
def test_each_number_of_a_step_matters(contract, a, b, number, change):
    step = contract.step
    value = getattr(step, number)
    changed = value + change if number != "group" or change < 0 else value // 2
    noticed = differing(contract, a, b, replace(contract, step=replace(step, **{number: changed})))
    if number == "floor" and a != BF16:
        # Products of narrow exponents, and accumulators, lie above the floor: it decides for bf16 alone.
        assert not noticed
    else:
        assert noticed


def nearest(significand: np.ndarray, distance: Any) -> np.ndarray:
    distance = np.minimum(distance, 62)
    half = np.where(distance > 0, np.int64(1) << np.maximum(distance - 1, 0), 0)
    magnitude = (np.abs(significand) + half) >> distance
    return np.where(significand < 0, -magnitude, magnitude)


def downward(significand: np.ndarray, distance: Any) -> np.ndarray:
    return significand >> np.minimum(distance, 63)


def with_exponents_of_zeros(significand: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    return exponent + 0 * significand


def with_exponents_of_zero_accumulators(significand: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    return exponent if significand.ndim == 2 else np.where(significand == 0, numpy_step.NO_EXPONENT, exponent)


def with_renormalised_products(stored: int) -> Callable[..., np.ndarray]:
    def term_exponent(significand: np.ndarray, exponent: np.ndarray) -> np.ndarray:
        carry = (significand.ndim == 3) & (np.abs(significand) >= 2 << stored)
        return np.where(significand == 0, numpy_step.NO_EXPONENT, exponent + carry)

    return term_exponent


def with_normalised_subnormals(unpack: Callable[..., Any]) -> Callable[..., Any]:
    def changed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        significand, exponent = unpack(values)
        length = np.frexp(np.abs(significand).astype(np.float64))[1]
        short = np.where(significand == 0, 0, numpy_step.stored_bits(values) + 1 - length)
        return significand << short, exponent - short

    return changed


def with_subnormals_flushed(unpack: Callable[..., Any]) -> Callable[..., Any]:
    def changed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        significand, exponent = unpack(values)
        return np.where(np.abs(significand) < 1 << numpy_step.stored_bits(values), 0, significand), exponent

    return changed


def rounding_the_sum(total: np.ndarray, unit: np.ndarray, significant_bits: int) -> np.ndarray:
    length = np.frexp(np.abs(total).astype(np.float64))[1]
    drop = np.maximum(np.maximum(length - significant_bits, -149 - unit), 0)
    return nearest(total, drop) << drop


def rounding_subnormal_sums(total: np.ndarray, unit: np.ndarray, significant_bits: int) -> np.ndarray:
    """Left to the cast to binary32, which rounds to nearest."""
    length = np.frexp(np.abs(total).astype(np.float64))[1]
    drop = np.maximum(length - significant_bits, 0)
    return numpy_step.truncate(total, drop) << drop


def saturating(to_binary32: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    largest = np.finfo(np.float32).max
    return lambda total, unit: np.clip(to_binary32(total, unit), -largest, largest)


def with_negative_zeros(to_binary32: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda total, unit: np.where(total == 0, np.float32(-0.0), to_binary32(total, unit))


def flushing_results(to_binary32: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def changed(total: np.ndarray, unit: np.ndarray) -> np.ndarray:
        value = to_binary32(total, unit)
        return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.float32(0), value)

    return changed


def infinity_times_zero_ignored(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = a.T.astype(np.float64)[:, :, None], b.astype(np.float64)[:, None, :]
    products = np.where((x == 0) | (y == 0), x * 0 + y * 0, x * y)
    products[(np.isinf(x) & (y == 0)) | (np.isinf(y) & (x == 0))] = 0
    special = np.where(np.isfinite(products), 0.0, products).sum(axis=0)
    return numpy_step.canonical((special + np.where(np.isfinite(acc), np.float32(0), acc)).astype(np.float32))


def opposite_infinities_decided(acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    products = a.T.astype(np.float64)[:, :, None] * b.astype(np.float64)[:, None, :]
    terms = np.concatenate([products, acc.astype(np.float64)[None]])
    positive = np.where(np.isposinf(terms).any(axis=0), np.inf, 0.0)
    negative = np.where(np.isneginf(terms).any(axis=0), -np.inf, 0.0)
    decided = np.where(positive > 0, positive, negative)
    decided[np.isnan(terms).any(axis=0)] = np.nan
    return numpy_step.canonical(decided.astype(np.float32))


def nan_of_the_accumulator_dropped(nonfinite_sum: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda acc, a, b: nonfinite_sum(np.where(np.isnan(acc), np.float32(0), acc), a, b)


def nan_of_an_operand_dropped(nonfinite_sum: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda acc, a, b: nonfinite_sum(acc, np.where(np.isnan(a), np.zeros_like(a), a), b)


def infinite_accumulator_dropped(nonfinite_sum: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda acc, a, b: nonfinite_sum(np.where(np.isinf(acc), np.float32(0), acc), a, b)


# A function of numpy_step, what is put in its place, whether that is made from the function itself, and whether only
# bf16 shows it: narrower exponents give no sum of several terms below 2^-126 and none that reaches 2^128.
BROKEN: dict[str, tuple[str, Callable[..., Any], bool, bool]] = {
    "terms rounded to nearest": ("truncate", nearest, False, False),
    "terms rounded downward": ("truncate", downward, False, False),
    "the sum rounded to nearest": ("keep_bits", rounding_the_sum, False, False),
    "subnormal sums rounded to nearest": ("keep_bits", rounding_subnormal_sums, False, True),
    "zero terms with exponents": ("term_exponent", with_exponents_of_zeros, False, False),
    "zero accumulators with an exponent": ("term_exponent", with_exponents_of_zero_accumulators, False, True),
    "subnormal operands normalised": ("unpack", with_normalised_subnormals, True, False),
    "subnormal operands as zeros": ("unpack", with_subnormals_flushed, True, False),
    "the largest finite number for infinity": ("to_binary32", saturating, True, True),
    "a zero result of -0": ("to_binary32", with_negative_zeros, True, False),
    "subnormal results as zeros": ("to_binary32", flushing_results, True, False),
    "infinity times zero as zero": ("nonfinite_sum", infinity_times_zero_ignored, False, False),
    "infinities of both signs as one": ("nonfinite_sum", opposite_infinities_decided, False, False),
    "NaN of the accumulator as zero": ("nonfinite_sum", nan_of_the_accumulator_dropped, True, False),
    "NaN of an operand as zero": ("nonfinite_sum", nan_of_an_operand_dropped, True, False),
    "an infinite accumulator as zero": ("nonfinite_sum", infinite_accumulator_dropped, True, False),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(("contract", "a", "b"), STEPS, ids=STEP_IDS)
def test_each_rule_of_a_step_matters(monkeypatch, contract, a, b, broken):
    name, function, make, only_bf16 = BROKEN[broken]
    monkeypatch.setattr(numpy_step, name, function(getattr(numpy_step, name)) if make else function)
    noticed = differing(contract, a, b)
    assert bool(noticed) == (a == BF16 or not only_bf16)


@pytest.mark.parametrize(("contract", "a", "b"), STEPS, ids=STEP_IDS)
def test_product_exponents_are_plain_sums(monkeypatch, contract, a, b):
    stored = sum(numpy_step.stored_bits(np.zeros(1, dtype.numpy)) for dtype in (a, b))
    monkeypatch.setattr(numpy_step, "term_exponent", with_renormalised_products(stored))
    assert differing(contract, a, b)


def test_nan_is_canonical(monkeypatch):
    monkeypatch.setattr(numpy_step, "canonical", lambda values: values)
    assert differing(MMA16, BF16, BF16)


def fma_differences() -> int:
    """How many results of `fma` on f32 differ from the exact ones, beside midpoints and on operands of every kind."""
    near = np.arange(-8, 8, dtype=np.float32) * np.float32(2.0**-23)
    sets = [((1 + near)[:, None], (1 - near)[None] * np.float32(2.0**-24), np.full((16, 16), 1 + 2.0**-23, np.float32))]
    sets.append((np.full((1, 1), np.inf, np.float32), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)))
    for kind in KINDS:
        sets.append((generate(kind, F32, (6, 12), 1), generate(kind, F32, (12, 6), 2), generate(kind, F32, (6, 6), 3)))
    count = 0
    for a, b, initial in sets:
        rows, cols, start = rational.floats(a), rational.floats(b.T), rational.floats(initial)
        expected = [
            [rational.add(rational.fma_chain(row, col, start[i][j]), 0.0) for j, col in enumerate(cols)]
            for i, row in enumerate(rows)
        ]
        actual = numpy_replay.gemm(FMA, a, b, initial=initial)
        count += np.count_nonzero(actual.view(np.uint32) != rational.encode(expected, F32).view(np.uint32))
    return count


def test_fma_breaks(monkeypatch):
    assert fma_differences() == 0
    with monkeypatch.context() as patch:
        patch.setattr(numpy_arithmetic, "_round_to_odd", lambda product, addend, total: total)
        assert fma_differences() > 0
    with monkeypatch.context() as patch:
        patch.setattr(numpy_replay, "fma", lambda a, b, c: numpy_arithmetic.canonical(a * b + c))
        assert fma_differences() > 0
    with monkeypatch.context() as patch:
        patch.setattr(numpy_arithmetic, "canonical", lambda values, dtype=F32: values)
        assert fma_differences() > 0


@cache
def recursive_trees() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    result = []
    for dtype, k in ((BF16, 161), (F16, 97)):
        a, b = generate("normal", dtype, (8, k), 1), generate("normal", dtype, (k, 6), 2)
        rows, cols = rational.floats(a), rational.floats(b.T)
        expected = [
            [tree(lambda lo, hi, r=r, c=c: rational.fma_chain(r[lo:hi], c[lo:hi]), k, dtype) for c in cols]
            for r in rows
        ]
        result.append((a, b, rational.encode(expected, dtype).view(np.uint16)))
    return result


def tree_differences() -> int:
    return sum(
        np.count_nonzero(numpy_replay.gemm(TREE, a, b).view(np.uint16) != expected)
        for a, b, expected in recursive_trees()
    )


def test_tree_breaks(monkeypatch):
    assert tree_differences() == 0
    with monkeypatch.context() as patch:  # nodes and leaves kept in binary32
        patch.setattr(numpy_replay, "round_to", lambda values, dtype: values)
        patch.setattr(numpy_replay, "finish", lambda acc, bias, dtype: numpy_arithmetic.round_to(acc, dtype))
        assert tree_differences() > 0
    with monkeypatch.context() as patch:  # the odd leaf on the left
        node = numpy_replay._node

        def changed(leaf: int, dtype: DType, value: Any, a: Any, b: Any, low: int, high: int) -> Any:
            if high - low != 3:
                return node(leaf, dtype, value, a, b, low, high)
            left, right = changed(leaf, dtype, value, a, b, low, low + 2), node(leaf, dtype, value, a, b, low + 2, high)
            return numpy_replay.round_to(numpy_replay.add(left, right), dtype).astype(np.float32)

        patch.setattr(numpy_replay, "_node", changed)
        assert tree_differences() > 0
    with monkeypatch.context() as patch:  # leaves of another length
        accumulate = numpy_replay._accumulate
        patch.setattr(numpy_replay, "_accumulate", lambda c, *rest: accumulate(replace(c, leaf=16), *rest))
        assert tree_differences() > 0


def test_the_way_outputs_are_cut_into_tiles_changes_nothing(monkeypatch):
    for contract in CONTRACTS.values():
        if contract == FP8_BLOCK128:
            continue
        dtype = contract.operands[-1]
        a, b = generate("special", dtype, (13, 37), 1), generate("normal", dtype, (37, 11), 2)
        whole = numpy_replay.gemm(contract, a, b)
        for tile in (1, 7, 11, 50, 1 << 20):
            monkeypatch.setattr(numpy_replay, "_TILE", tile)
            assert np.array_equal(numpy_replay.gemm(contract, a, b).view(dtype.bits), whole.view(dtype.bits))


def test_strides_and_no_warnings():
    a, b = generate("bits", BF16, (9, 40), 1), generate("bits", BF16, (40, 6), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = numpy_replay.gemm(MMA16, a, b)
        assert np.array_equal(
            numpy_replay.gemm(MMA16, np.asfortranarray(a)[::-1], b[:, ::-1]).view(np.uint16),
            plain[::-1, ::-1].view(np.uint16),
        )
        row = np.broadcast_to(a[:1], (5, 40))
        assert np.array_equal(
            numpy_replay.gemm(MMA16, row, b).view(np.uint16),
            np.broadcast_to(plain[:1], (5, 6)).view(np.uint16),
        )


def test_what_it_refuses():
    a, b = generate("normal", F32, (3, 4), 1), generate("normal", F32, (4, 2), 2)
    with pytest.raises(ContractUnsupported, match="mma16 does not take a of float32"):
        numpy_replay.gemm(MMA16, a, b)
    with pytest.raises(ContractUnsupported, match="b of float16"):
        numpy_replay.gemm(FMA, a, b.astype(np.float16))
    with pytest.raises(ContractUnsupported, match="fp8-block128"):
        numpy_replay.gemm(FP8_BLOCK128, generate("normal", E4M3, (3, 128), 1), generate("normal", E4M3, (128, 2), 1))
    with pytest.raises(ShapeError, match=r"\(4, 3\)"):
        numpy_replay.gemm(FMA, a.T, b)
    with pytest.raises(ArgumentError, match="bias"):
        numpy_replay.gemm(FMA, a, b, initial=np.zeros((3, 2), np.float32), bias=np.zeros(2, np.float32))
    one = np.ones((1, 1), np.float32)
    with pytest.raises(ShapeError, match="multiple of 128"):
        replayed_block_scaled(a[:1].astype(E4M3.numpy), one, b[:, :1].astype(E4M3.numpy), one)
    with pytest.raises(ContractUnsupported, match="float32"):
        replayed_block_scaled(a, one, b, one)
    x, y = generate("normal", E4M3, (3, 128), 1), generate("normal", E5M2, (128, 2), 1)
    with pytest.raises(ShapeError, match="scale_a"):
        replayed_block_scaled(x, one, y, np.ones((1, 2), np.float32))
