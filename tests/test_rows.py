"""The row operations: both CPU versions against arithmetic done elsewhere, what may not change a bit of them, PyTorch's
results on special rows, and accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from frameworks import FRAMEWORKS, bits, framework, from_torch, same, to_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import rational
from oracles.elementary import exp, log, product, quotient
from oracles.halves import halves

import detkern
from detkern import ArgumentError, ContractUnsupported, DTypeError, ShapeError, config, rows
from detkern.abi import mirror
from detkern.abi.descriptors import row_descriptors
from detkern.abi.library import Library
from detkern.cpu import backend
from detkern.operations.rows import replay as numpy_rows
from detkern.operations.rows.problem import RowKind, row_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.dtypes import BF16, F16, F32, DType
from detkern.vocabulary.operands import KINDS, generate

DTYPES = (F32, F16, BF16)
KINDS_OF_ROWS = tuple(RowKind)
PAGE = Path(__file__).parents[1] / "docs" / "contracts.md"


@pytest.fixture(params=["numpy", "c++"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The public functions on each version of the CPU backend in turn."""
    if request.param == "numpy":
        monkeypatch.setattr(backend, "library", lambda: None)
    else:
        assert backend.library() is not None
    return request.param


def operands(kind: RowKind, values: str, dtype: DType, shape: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Operands of a kind: "logits" are those of a softmax, any other name one of detkern.vocabulary.operands."""
    made = []
    for number in range(kind.operands):
        full = shape[:-1] if kind.spreads and number == 0 else shape
        if values == "logits":
            array = (6 * generate("normal", F32, full, seed + 50 * number)).astype(dtype.numpy)
        else:
            array = generate(values, dtype, full, seed + 50 * number)
        made.append(array)
    return made


def call(kind: RowKind, arrays: list[Any], width: int, **options: Any) -> Any:
    extra = [width] if kind.spreads and kind.operands == 1 else []
    return getattr(rows, kind.label)(*arrays, *extra, **options)


def replay(kind: RowKind, arrays: list[np.ndarray], width: int, out_dtype: DType | None = None) -> np.ndarray:
    """The NumPy version on arrays with any leading dimensions."""
    lead = arrays[-1].shape if kind.spreads and kind.operands == 1 else arrays[-1].shape[:-1]
    flat = [a.reshape(-1) if a.shape == lead else a.reshape(math.prod(lead), width) for a in arrays]
    result = numpy_rows.rows(kind, *flat, width=width, out_dtype=out_dtype)
    return result.reshape(lead if kind.reduces else (*lead, width))


# ---- the definition in exact rational arithmetic -------------------------------------------------------------------


def exact_row(kind: RowKind, first: list[float] | float, second: list[float], width: int) -> list[float]:
    """A row of finite numbers (softmax: and of -inf beside a finite one), before + 0 and the last rounding."""
    if kind.spreads:
        assert isinstance(first, float)
        if kind == RowKind.SUM_BACKWARD:
            return [first] * width
        each = quotient(first, width)
        if kind == RowKind.MEAN_BACKWARD:
            return [each] * width
        return [product(rational.add(each, each), x) for x in second]
    assert isinstance(first, list)
    if kind == RowKind.SUM:
        return [rational.aligned_sum(first)]
    if kind == RowKind.CUMSUM:
        return [rational.exact_sum(first[: end + 1]) for end in range(width)]
    if kind == RowKind.CUMSUM_BACKWARD:
        return [rational.exact_sum(first[start:]) for start in range(width)]
    if kind == RowKind.MEAN:
        return [quotient(rational.aligned_sum(first), width)]
    if kind == RowKind.MEAN_SQUARE:
        return [quotient(rational.aligned_sum([product(x, x) for x in first]), width)]
    if kind in (RowKind.SOFTMAX, RowKind.LOG_SOFTMAX):
        distances = [rational.add(x, -max(first)) for x in first]
        exponentials = [exp(x) for x in distances]
        s = rational.aligned_sum(exponentials)
        if kind == RowKind.SOFTMAX:
            return [quotient(e, s) for e in exponentials]
        return [rational.add(x, -log(s)) for x in distances]
    if kind == RowKind.SOFTMAX_BACKWARD:
        t = rational.aligned_sum([product(y, dy) for dy, y in zip(first, second, strict=True)])
        return [product(y, rational.add(dy, -t)) for dy, y in zip(first, second, strict=True)]
    t = rational.aligned_sum(first)
    return [rational.fma(-exp(y), t, dy) for dy, y in zip(first, second, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS_OF_ROWS, ids=lambda kind: kind.label)
def test_against_exact_rational_arithmetic(version: str, kind: RowKind, dtype: DType) -> None:
    width = 7
    for number, values in enumerate(("logits", "normal", "subnormal", "cancel", "tiny", "signed-zero")):
        arrays = operands(kind, values, dtype, (3, width), number)
        if kind in (RowKind.SOFTMAX, RowKind.LOG_SOFTMAX):
            arrays[0][0, ::2] = -np.inf
        if kind == RowKind.LOG_SOFTMAX_BACKWARD:
            arrays[1] = -abs(arrays[1])
            arrays[1][0, ::2] = -np.inf
        exact = []
        for row in range(3):
            first, *second = (rational.floats(array[row]) for array in arrays)
            exact.append(exact_row(kind, first, second[0] if second else [], width))
        for out_dtype in (F32, dtype, BF16 if dtype == F16 else F16):
            got = call(kind, arrays, width, out_dtype=out_dtype.name)
            for row in range(3):
                wanted = [rational.round_to(rational.add(value, 0.0), out_dtype) for value in exact[row]]
                found = rational.floats(np.atleast_1d(got[row]))
                for value, want in zip(found, wanted, strict=True):
                    assert (value, math.copysign(1, value)) == (want, math.copysign(1, want)), (values, row)


def test_exp_and_log_against_their_definition() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [-(rng.random(300) * 110), rng.random(60) * 95, [0, -0.0, -103.97, -103.98, -87.4, 88.73, 88.72]]
    )
    x = x.astype(np.float32)
    expected = [exp(float(value)) for value in x]
    assert rational.floats(numpy_rows.exponential(x)) == expected
    assert 0.0 in expected
    assert math.inf in expected
    assert any(0 < value < 2.0**-126 for value in expected)
    edges = np.array([-np.inf, np.inf, np.nan], np.float32)
    assert bits(numpy_rows.exponential(edges)).tolist() == [0, 0x7F800000, 0x7FFFFFFF]
    s = np.concatenate([1 + rng.random(200) * 3, np.exp(rng.random(200) * 88), [1, 2, 1 + 2**-23, 4 / 3, 151936]])
    s = s.astype(np.float32)
    assert rational.floats(numpy_rows.logarithm(s)) == [log(float(value)) for value in s]


# ---- the aligned sum ----------------------------------------------------------------------------------------------

HUGE = float(np.finfo(np.float32).max)
UNIT = 2.0**-43  # of sums whose largest term is from 1 to 2
SUMS: list[tuple[list[float], float]] = [
    # What is cut from a term, on either side of zero, and what is kept of one.
    ([1, UNIT], 1), ([1, -1, UNIT], UNIT), ([1, -1, 1.5 * UNIT], UNIT), ([1, -1, -1.5 * UNIT], -UNIT),
    ([1, -1, *[UNIT / 2] * 8], 0), ([1, -1, *[-UNIT / 2] * 8], 0), ([1.999, -1.999, UNIT], UNIT), ([2, -2, UNIT], 0),
    # All bits of a term down to 2^-20 of the largest.
    ([1, -1, 2**-20 * (1 + 2**-23)], 2**-20 * (1 + 2**-23)), ([1, -1, 2**-20 * (1 - 2**-24)], 2**-20 * (1 - 2**-23)),
    # One rounding, to nearest even, of the exact sum.
    ([2**24, 1], 2**24), ([2**24, 1, 1], 2**24 + 2), ([2**24, 1, 2**-19], 2**24 + 2), ([2**24, 3], 2**24 + 4),
    ([-(2**24), -1], -(2**24)), ([1, 2**-24], 1), ([1, 2**-24, 2**-43], 1 + 2**-23), ([1, 2**-24, 2**-44], 1),
    # Overflow is that of the sum alone.
    ([HUGE, HUGE], math.inf), ([HUGE, HUGE, -HUGE], HUGE), ([-HUGE, -HUGE], -math.inf), ([HUGE, 2.0**103], math.inf),
    ([HUGE, 2.0**102], HUGE), ([HUGE, -(2.0**104)], HUGE - 2.0**104),
    # Subnormal terms and sums, exact.
    ([2.0**-149], 2.0**-149), ([2.0**-126, -(2.0**-149)], 2.0**-126 - 2.0**-149), ([2.0**-149] * 3, 3 * 2.0**-149),
    ([1.5 * 2.0**-84, -1.5 * 2.0**-84, 2.0**-127], 2.0**-127), ([2.0**-85, -(2.0**-85), 2.0**-128], 2.0**-128),
    ([2.0**-106, -(2.0**-106), 2.0**-149], 2.0**-149), ([2.0**-105, -(2.0**-105), 2.0**-149], 0),
    # Zeros have no exponent and no sign.
    ([0.0], 0), ([-0.0, -0.0], 0), ([0.0, 2.0**-149], 2.0**-149), ([], 0), ([5, -5], 0),
    # Infinities and NaN, as any order of additions has them.
    ([math.inf, 1, HUGE, HUGE], math.inf), ([-math.inf, HUGE], -math.inf), ([math.inf, 1, -math.inf], math.nan),
    ([math.nan, 1], math.nan), ([math.nan, math.inf], math.nan), ([1, math.nan, -math.inf, math.inf], math.nan),
]  # fmt: skip


@pytest.mark.parametrize(("terms", "expected"), SUMS, ids=str)
def test_sums_by_hand(version: str, terms: list[float], expected: float) -> None:
    assert rational.aligned_sum(terms) == expected or math.isnan(expected)
    want = rational.encode([expected + 0.0], F32)
    for order in (terms, terms[::-1], [-0.0, *terms, 0.0], [*terms[1:], *[0.0] * 40, *terms[:1]]):
        assert same(rows.sum(np.array([order], np.float32)), want), order


def test_sums_that_leave_64_bits(version: str) -> None:
    """More than half a million of the largest terms of one exponent,
    alone and beside one that takes most of them away."""
    width, term = (1 << 20) + 3, 2 - 2**-23
    x = np.full((3, width), np.float32(term))
    x[1] *= -1
    x[2, 17] = -(2.0**20)
    unit = Fraction(2) ** (20 - 43)
    cut = math.trunc(Fraction(term) / unit) * unit
    expected = [
        rational.round_fraction(Fraction(term) * width, F32),
        rational.round_fraction(-Fraction(term) * width, F32),
        rational.round_fraction(cut * (width - 1) - 2**20, F32),
    ]
    assert rows.sum(x).tolist() == expected


def test_one_unit_lifts_a_sum_that_leaves_64_bits_over_the_half(version: str) -> None:
    """2^21 and half of what its last place is worth is rounded to even; one unit more, the last of 65 bits,
    to above."""
    x = np.ones((3, (1 << 21) + 2), np.float32)
    x[:, 5] = 2.0**-3
    x[:, -1] = 0, UNIT, -UNIT
    assert (rows.sum(x) - 2.0**21).tolist() == [0, 0.25, 0]
    assert (rows.sum(-x) + 2.0**21).tolist() == [0, -0.25, 0]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from([kind for kind in KINDS_OF_ROWS if not kind.scans]),
    dtype=st.sampled_from(DTYPES),
)
def test_the_order_of_columns_changes_nothing(data: st.DataObject, kind: RowKind, dtype: DType) -> None:
    count, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 300))
    arrays = operands(
        kind, data.draw(st.sampled_from(("logits", "wide", "special", "cancel"))), dtype, (count, width), 8
    )
    order = np.random.default_rng(data.draw(st.integers(0, 1000))).permutation(width)
    turned = [array if kind.spreads and not number else array[:, order] for number, array in enumerate(arrays)]
    whole = call(kind, arrays, width)
    assert same(call(kind, turned, width), whole if kind.reduces else np.ascontiguousarray(whole[:, order]))


def test_a_mean_overflows_where_its_sum_does(version: str) -> None:
    x = np.array([[HUGE, HUGE, -HUGE], [HUGE, HUGE, 0], [-HUGE, -HUGE, 0]], np.float32)
    assert rows.mean(x).tolist() == [float(np.float32(HUGE) / np.float32(3)), math.inf, -math.inf]


# ---- prefix sums ---------------------------------------------------------------------------------------------------

TINY = 2.0**-149
PREFIXES: list[tuple[list[float], list[float]]] = [
    # Nothing is cut: a sum forgets nothing of what was small beside it.
    ([2.0**127, TINY, -(2.0**127), TINY], [2.0**127, 2.0**127, TINY, 2 * TINY]),
    ([HUGE, HUGE, -HUGE, -HUGE, 3 * TINY], [HUGE, math.inf, HUGE, 0, 3 * TINY]),
    # One rounding of each exact sum, to nearest even.
    ([2.0**24, 1, 1, 1], [2.0**24, 2.0**24, 2.0**24 + 2, 2.0**24 + 4]),
    ([2.0**24, 1, TINY, -TINY, -TINY], [2.0**24, 2.0**24, 2.0**24 + 2, 2.0**24, 2.0**24]),
    ([-(2.0**24), -1, -TINY], [-(2.0**24), -(2.0**24), -(2.0**24) - 2]),
    ([HUGE, 2.0**102, 2.0**102, -TINY], [HUGE, HUGE, math.inf, HUGE]),
    # Zeros have no sign.
    ([-0.0, -0.0, 1, -1], [0, 0, 1, 0]),
    # From a NaN on, from an infinity on, from both infinities on.
    ([1, math.nan, 1, math.inf], [1, math.nan, math.nan, math.nan]),
    ([1, math.inf, -5, math.inf, -math.inf, math.inf], [1, math.inf, math.inf, math.inf, math.nan, math.nan]),
    ([HUGE, -math.inf, HUGE, HUGE], [HUGE, -math.inf, -math.inf, -math.inf]),
]  # fmt: skip


@pytest.mark.parametrize(("terms", "expected"), PREFIXES, ids=str)
def test_prefix_sums_by_hand(version: str, terms: list[float], expected: list[float]) -> None:
    want = rational.encode([value + 0.0 for value in expected], F32)
    assert same(rows.cumsum(np.array(terms, np.float32)), want)
    assert same(rows.cumsum_backward(np.array(terms[::-1], np.float32)), want[::-1].copy())


def test_one_bit_far_below_lifts_a_prefix_sum_over_the_half(version: str) -> None:
    """Wherever both lie."""
    terms = halves()
    expected = [[rational.exact_sum(row[: end + 1]) for end in range(4)] for row in rational.floats(terms)]
    assert rows.cumsum(terms).tolist() == expected
    assert all(row[1] == row[0] < row[2] for row in expected)


@pytest.mark.parametrize("values", ["wide", "cancel", "bits", "special", "subnormal", "tiny"])
def test_long_prefix_sums_are_the_exact_ones(version: str, values: str) -> None:
    """Past the columns that the NumPy version works on at a time, too."""
    width = (1 << 15) + 40 if values == "bits" else 110
    for dtype in DTYPES:
        x = generate(values, dtype, (2, width), 3)
        if values == "bits":  # few of the numbers in between, so that the oracle is quick
            x = np.where(np.isfinite(x.astype(np.float32)), x, x.dtype.type(0))
            x[:, 60 : width - 60] = 0
        got = rows.cumsum(x, out_dtype="f32")
        for row in range(2):
            found, terms = rational.floats(got[row]), rational.floats(x[row])
            kept = [*range(60), *range(width - 60, width)] if values == "bits" else range(width)
            for end in kept:
                exact = rational.exact_sum([terms[i] for i in kept if i <= end])
                assert found[end] == exact or (math.isnan(found[end]) and math.isnan(exact)), (dtype, row, end)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), values=st.sampled_from(("special", "normal", "wide")))
def test_a_prefix_sum_knows_only_what_is_before_it(data: st.DataObject, dtype: DType, values: str) -> None:
    """Nothing of what follows, nor of zeros wherever they stand."""
    width = data.draw(st.integers(1, 300))
    x = operands(RowKind.SUM, values, dtype, (4, width), 6)[0]
    whole, end = rows.cumsum(x), data.draw(st.integers(1, width))
    assert same(rows.cumsum(x[:, :end]), np.ascontiguousarray(whole[:, :end]))
    held = np.sort(np.random.default_rng(data.draw(st.integers(0, 1000))).permutation(width + 50)[:width])
    padded = np.full((4, width + 50), -0.0, dtype.numpy)
    padded[:, held] = x
    assert same(np.ascontiguousarray(rows.cumsum(padded)[:, held]), whole)


# ---- C++ = NumPy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS_OF_ROWS, ids=lambda kind: kind.label)
def test_cpp_gives_the_bits_of_numpy(kind: RowKind) -> None:
    assert backend.library() is not None
    number = 0
    for shape in ((1, 1), (3, 255), (2, 256), (35, 257), (17, 31), (1, 1500), (2, 3, 9)):
        for values in ("logits", "special", "bits"):
            dtype = DTYPES[number % 3]
            number += 1
            arrays = operands(kind, values, dtype, shape, number)
            out_dtype = DTYPES[number // 3 % 3]
            got = call(kind, arrays, shape[-1], out_dtype=out_dtype.name)
            assert same(got, replay(kind, arrays, shape[-1], out_dtype)), (shape, values, dtype)


@pytest.mark.parametrize("kind", KINDS_OF_ROWS, ids=lambda kind: kind.label)
def test_every_kind_of_operands(kind: RowKind) -> None:
    for number, values in enumerate(KINDS):
        dtype = DTYPES[number % 3]
        arrays = operands(kind, values, dtype, (21, 40), number)
        assert same(call(kind, arrays, 40), replay(kind, arrays, 40)), values


def test_the_widest_rows() -> None:
    for width in (151_936, 262_144):
        x = operands(RowKind.SOFTMAX, "logits", BF16, (2, width), 3)[0]
        for kind in (RowKind.SOFTMAX, RowKind.LOG_SOFTMAX, RowKind.SUM):
            assert same(call(kind, [x], width, out_dtype="f32"), replay(kind, [x], width, F32)), kind
        # Nothing of such numbers is cut, so that the sum is the exact one.
        assert rows.sum(x, out_dtype="f32").tolist() == [
            float(np.float32(math.fsum(row))) for row in rational.floats(x)
        ]


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (RowKind.SOFTMAX, RowKind.MEAN_SQUARE, RowKind.SOFTMAX_BACKWARD):
        arrays = operands(kind, "logits", F32, (70, 2000), 4)
        expected = replay(kind, arrays, 2000)
        for threads in (1, 2, 5):
            monkeypatch.setattr(config, "num_threads", threads)
            assert same(call(kind, arrays, 2000), expected)


# ---- layouts, types, frameworks -----------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "columns first": np.asfortranarray,
    "columns reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "first dimension reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "every third column": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "unaligned": lambda x: np.concatenate([x.reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape),
    "dimensions turned": lambda x: np.ascontiguousarray(x.T).T,
    "padded": lambda x: np.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS_OF_ROWS, ids=lambda kind: kind.label)
def test_layouts(version: str, kind: RowKind, layout: str) -> None:
    for number, shape in enumerate(((19, 45), (4, 6, 20))):
        arrays = operands(kind, "special", DTYPES[number], shape, 7)
        expected = replay(kind, arrays, shape[-1])
        placed = [LAYOUTS[layout](array) for array in arrays]
        assert same(call(kind, placed, shape[-1]), expected), shape
        out = LAYOUTS[layout](np.full(expected.shape, 7, expected.dtype))
        assert call(kind, placed, shape[-1], out=out) is out
        assert same(np.ascontiguousarray(out), expected), shape


def test_many_dimensions_and_broadcast_operands(version: str) -> None:
    """Leading dimensions of which none can be merged with its neighbour; a row and a number that are all rows'."""
    x = np.transpose(generate("normal", F32, (2,) * 9 + (5,), 9), (*reversed(range(9)), 9))
    y = rows.softmax(x)
    assert same(y, replay(RowKind.SOFTMAX, [np.ascontiguousarray(x)], 5))
    row = np.broadcast_to(generate("normal", BF16, (40,), 8), (30, 40))
    assert same(rows.mean(row), replay(RowKind.MEAN, [np.ascontiguousarray(row)], 40))
    one = np.broadcast_to(np.float32(0.1), (3, 20, 5))
    assert same(rows.sum(one), replay(RowKind.SUM, [np.ascontiguousarray(one)], 5))


def test_empty_rows_and_no_rows(version: str) -> None:
    empty = np.empty((3, 0), np.float16)
    assert bits(rows.sum(empty)).tolist() == [0, 0, 0]
    assert bits(rows.mean(empty)).tolist() == bits(rows.mean_square(empty)).tolist() == [0x7FFF] * 3
    assert (
        rows.softmax(empty).shape
        == rows.log_softmax(empty).shape
        == rows.softmax_backward(empty, empty).shape
        == (3, 0)
    )
    assert rows.sum_backward(np.ones(3, np.float32), 0).shape == (3, 0)
    none = np.empty((0, 3), ml_dtypes.bfloat16)
    assert rows.sum(none).shape == (0,)
    assert rows.softmax(none).shape == (0, 3)
    assert rows.mean_square_backward(np.empty(0, np.float32), none).dtype == ml_dtypes.bfloat16


def test_one_dimension_is_one_row(version: str) -> None:
    x = generate("normal", F32, (37,), 6)
    assert rows.sum(x).shape == ()
    assert same(rows.softmax(x), replay(RowKind.SOFTMAX, [x[None]], 37)[0])
    assert rows.sum_backward(np.array(3, np.float32), 4).tolist() == [3] * 4


def test_the_gradient_of_a_mean_square_mixes_types(version: str) -> None:
    dy, x = generate("normal", F32, (6,), 1), generate("normal", BF16, (6, 50), 2)
    got = rows.mean_square_backward(dy, x)
    assert same(got, replay(RowKind.MEAN_SQUARE_BACKWARD, [dy, x], 50, BF16))


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_every_framework(name: str, dtype: DType) -> None:
    made = framework(name)
    for kind in KINDS_OF_ROWS:
        arrays = operands(kind, "normal", dtype, (3, 4, 24), 13)
        expected = replay(kind, arrays, 24)
        placed = [made.make(array) for array in arrays]
        result = call(kind, placed, 24)
        assert same(made.read(result), expected), kind
        if name != "dlpack":
            assert type(result) is type(placed[0])
        if made.writable:
            out = made.make(np.zeros(expected.shape, np.float32))
            assert call(kind, placed, 24, out=out) is out
            assert same(made.read(out), replay(kind, arrays, 24, F32))


# ---- what may not change a bit ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS_OF_ROWS), dtype=st.sampled_from(DTYPES))
def test_a_row_knows_nothing_of_the_others(data: st.DataObject, kind: RowKind, dtype: DType) -> None:
    """However many there are, wherever it stands, and with NaN and infinities beside it."""
    count, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 300))
    arrays = operands(kind, data.draw(st.sampled_from(("logits", "special"))), dtype, (count, width), 5)
    whole = call(kind, arrays, width)
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=30))
    assert same(call(kind, [array[chosen] for array in arrays], width), whole[chosen])
    alone = call(kind, [np.asarray(array[chosen[0]]) for array in arrays], width)
    assert same(np.asarray(alone), np.asarray(whole[chosen[0]]))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), values=st.sampled_from(("logits", "normal", "wide")))
def test_masked_columns_and_zeros_change_nothing(data: st.DataObject, dtype: DType, values: str) -> None:
    """Wherever they stand: before, after or between the others."""
    count, width = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 300))
    total = width + data.draw(st.integers(0, 400))
    x = operands(RowKind.SUM, values, dtype, (count, width), 6)[0]
    dy = operands(RowKind.SUM, values, dtype, (count, width), 7)[0]
    held = np.sort(np.random.default_rng(data.draw(st.integers(0, 1000))).permutation(total)[:width])
    others = np.delete(np.arange(total), held)

    def padded(array: np.ndarray, value: float) -> np.ndarray:
        wide = np.full((count, total), value, array.dtype)
        wide[:, held] = array
        return wide

    for zero in (0.0, -0.0):
        assert same(rows.sum(padded(x, zero)), rows.sum(x))
    for operation, backward, mask in (
        (rows.softmax, rows.softmax_backward, 0.0),
        (rows.log_softmax, rows.log_softmax_backward, -math.inf),
    ):
        y, wide = operation(x), operation(padded(x, -math.inf))
        assert same(wide, padded(y, mask))
        gradient = backward(padded(dy, 0.0), wide)
        assert same(np.ascontiguousarray(gradient[:, held]), backward(dy, y))
        assert (gradient[:, others] == 0).all()


def test_the_mean_is_the_sum_divided_once(version: str) -> None:
    x = generate("cancel", F32, (9, 77), 1)
    assert same(rows.mean(x), rows.sum(x) / np.float32(77))


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_rows_are_pytorchs(version: str, dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    inf, nan = math.inf, math.nan
    table = np.array(
        [
            [-inf, -inf, -inf], [inf, 1, 2], [inf, inf, 1], [-inf, inf, 1], [nan, 1, 2], [1, 2, nan], [-inf, -inf, nan],
            [-inf, 1, -inf], [0, -0.0, -inf], [200, -200, 0], [nan, inf, -inf],
        ],
        dtype.numpy,
    )  # fmt: skip
    x = to_torch(table)
    for ours, theirs in (
        (rows.sum, lambda t: t.sum(-1)),
        (rows.mean, lambda t: t.mean(-1)),
        (rows.mean_square, lambda t: t.float().pow(2).mean(-1)),
        (rows.softmax, lambda t: torch.softmax(t, -1)),
        (rows.log_softmax, lambda t: torch.log_softmax(t, -1)),
    ):
        expected = from_torch(theirs(x).float())
        got = ours(table, out_dtype="f32")
        special = ~np.isfinite(expected)
        assert np.array_equal(got[special], expected[special], equal_nan=True), ours
        assert np.isfinite(got[~special]).all(), ours
        assert np.allclose(got[~special], expected[~special], rtol=0.01), ours


@pytest.mark.parametrize("name", ["sum", "mean", "mean_square", "softmax", "log_softmax"])
def test_gradients_are_pytorchs(version: str, name: str) -> None:
    """Up to float32's rounding, against float64."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = generate("normal", F32, (8, 60), 1)
    reduces = name in ("sum", "mean", "mean_square")
    dy = generate("normal", F32, (8,) if reduces else (8, 60), 2)
    wide = torch.from_numpy(x).double().requires_grad_()
    y = {
        "sum": lambda: wide.sum(-1), "mean": lambda: wide.mean(-1), "mean_square": lambda: wide.pow(2).mean(-1),
        "softmax": lambda: torch.softmax(wide, -1), "log_softmax": lambda: torch.log_softmax(wide, -1),
    }[name]()  # fmt: skip
    y.backward(torch.from_numpy(dy).double())
    second = {"sum": 60, "mean": 60, "mean_square": x}.get(name)
    if second is None:
        second = getattr(rows, name)(x)
    got = getattr(rows, f"{name}_backward")(dy, second)
    assert np.allclose(got, wide.grad.numpy(), rtol=2e-5, atol=2e-6)


# ---- accuracy --------------------------------------------------------------------------------------------------------


def units(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Errors in units in the last place."""
    return np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)


def test_exp_and_log_are_within_a_unit() -> None:
    x = -np.arange(0, 0x42D00000, 4099, dtype=np.uint32).view(np.float32)
    assert units(numpy_rows.exponential(x), np.exp(x.astype(np.float64))).max() < 0.85
    near = (1 + np.arange(1, 40_000, dtype=np.float64) * 2**-23).astype(np.float32)
    s = np.concatenate([near, np.geomspace(1.01, 3e38, 200_000).astype(np.float32)])
    assert units(numpy_rows.logarithm(s), np.log(s.astype(np.float64))).max() < 0.95


@pytest.mark.parametrize("values", ["normal", "wide", "cancel"])
@pytest.mark.parametrize("width", [1, 16, 300, 5000])
def test_the_error_of_a_sum_is_bounded(width: int, values: str) -> None:
    """By a unit for each term and half a unit in the last place."""
    x = generate(values, F32, (max(1, 8000 // width) if width > 1 else 20, width), 1)
    for row, got in zip(rational.floats(x), rational.floats(rows.sum(x)), strict=True):
        exact = sum(map(Fraction, row))
        largest = max(map(abs, row))
        cut = width * Fraction(2) ** (max(math.frexp(largest)[1] - 1, -126) - 43) if largest else 0
        if math.isfinite(got):
            assert abs(Fraction(got) - exact) <= cut + Fraction(float(np.spacing(np.float32(abs(got))))) / 2


OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "sum": (lambda t: t.sum(-1), lambda x: x.sum(-1)),
    "mean": (lambda t: t.mean(-1), lambda x: x.mean(-1)),
    "mean_square": (lambda t: t.pow(2).mean(-1), lambda x: (x**2).mean(-1)),
    "softmax": (lambda t: t.softmax(-1), lambda x: np.exp(_log_softmax(x))),
    "log_softmax": (lambda t: t.log_softmax(-1), lambda x: _log_softmax(x)),
}


def _log_softmax(x: np.ndarray) -> np.ndarray:
    z = x - x.max(-1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(-1, keepdims=True)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 500, 4096, 50_000])
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_as_accurate_as_pytorchs(name: str, width: int, dtype: DType) -> None:
    """In root mean square against float64, each error relative to the result, to 2 %. PyTorch squares in the operand's
    type, so its mean square is given binary32."""
    pytest.importorskip("torch", reason="torch is not installed")
    theirs, exactly = OPERATIONS[name]
    x = generate("normal", F32, (max(4, 60_000 // width), width), 1).astype(dtype.numpy)
    if name in ("sum", "mean"):
        x = abs(x)
    exact = exactly(x.astype(np.float64))
    tensor = to_torch(x)
    if name == "mean_square":
        tensor = tensor.float()
    other = from_torch(theirs(tensor)).astype(dtype.numpy)
    got = getattr(rows, name)(x)

    def error(values: np.ndarray) -> float:
        return float(np.sqrt(np.mean(((values.astype(np.float64) - exact) / exact) ** 2)))

    assert error(got) <= 1.02 * error(other)


# ---- wrong calls, and the library itself -----------------------------------------------------------------------------


def test_wrong_calls() -> None:
    x, out = np.ones((4, 3), np.float32), np.full((4, 3), 7, np.float32)
    half = x.astype(np.float16)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ShapeError, r"x has no dimensions; sum needs \[.., N\]", lambda: rows.sum(np.array(1, np.float32))),
        (ShapeError, r"out has shape \[4, 3\]; the result has \[4\]", lambda: rows.sum(x, out=out)),
        (ShapeError, r"out has shape \[4, 3\]; the result has \[2, 3\]", lambda: rows.softmax(x[:2], out=out)),
        (ShapeError, r"dy has shape \[4, 3\].*needs \[4\]", lambda: rows.mean_square_backward(x, x, out=out)),
        (ShapeError, r"dy has shape \[2, 3\] and y \[4, 3\]", lambda: rows.softmax_backward(x[:2], x, out=out)),
        (DTypeError, "x is float64", lambda: rows.softmax(np.ones((4, 3)), out=out)),
        (DTypeError, "x is float8_e4m3fn; softmax takes", lambda: rows.softmax(x.astype(ml_dtypes.float8_e4m3fn))),
        (DTypeError, "dy is float32 and y is float16.*cast y", lambda: rows.softmax_backward(x, half, out=out)),
        (DTypeError, "out_dtype=float16 but out is float32", lambda: rows.softmax(half, out=out, out_dtype="f16")),
        (DTypeError, "x is not an array", lambda: rows.mean([1.0])),
        (ArgumentError, "out shares memory with x", lambda: rows.softmax(out, out=out)),
        (ArgumentError, "width=-1", lambda: rows.sum_backward(x[0], -1)),
        (ArgumentError, "width=True", lambda: rows.sum_backward(x[0], True)),
        (ArgumentError, r"width=2\.0", lambda: rows.mean_backward(x[0], 2.0)),
        (ArgumentError, "backend='tpu'", lambda: rows.sum(x, backend="tpu")),
        (ArgumentError, "backend=3", lambda: rows.sum(x, backend=3)),  # type: ignore[arg-type]
        (ContractUnsupported, "has no rows; it has gemm", lambda: rows.softmax(x, out=out, backend="native")),
    ]
    for error, message, wrong_call in wrong:
        with pytest.raises(error, match=message):
            wrong_call()
        assert (out == 7).all(), message
    rows.softmax(x, out=out)
    assert same(out, rows.softmax(x))


def test_a_tensor_that_requires_grad_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ArgumentError, match="x requires grad"):
        rows.softmax(torch.ones(2, 2, requires_grad=True))


def _view(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorView:
    return TensorView(1024, shape, strides, F32, Device("cpu"))


def test_the_library_checks_descriptors_itself() -> None:
    library = backend.library()
    assert isinstance(library, Library)
    x, y, out = np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
    plain = _view((2, 2), (2, 1))
    problem = row_problem(RowKind.SOFTMAX_BACKWARD, plain, plain, plain, 2)
    good = mirror.RowDescriptor.from_buffer_copy(row_descriptors(problem)[0][0])
    good.a, good.b, good.out = x.ctypes.data, y.ctypes.data, out.ctypes.data
    library.run(4, good)
    assert out.tolist() == [[-1, -1], [-1, -1]]
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ArgumentError, {"size": 8}),
        (ContractUnsupported, {"kind": 0}),
        (ContractUnsupported, {"kind": 11}),
        (ContractUnsupported, {"kind": int(RowKind.SOFTMAX)}),
        (ContractUnsupported, {"a_dtype": 4}),
        (ContractUnsupported, {"b_dtype": 0}),
        (ContractUnsupported, {"out_dtype": 5}),
        (ArgumentError, {"m": -1}),
        (ArgumentError, {"n": -1}),
        (ArgumentError, {"batch_rank": mirror.MAX_SUM_RANK + 1}),
        (ArgumentError, {"a": None}),
        (ArgumentError, {"b": None}),
        (ArgumentError, {"out": None}),
    ]
    for error, fields in wrong:
        bad = mirror.RowDescriptor.from_buffer_copy(good)
        out[...] = 7
        for name, value in fields.items():
            setattr(bad, name, value)
        with pytest.raises(error, match="detkern_run of a RowDescriptor"):
            library.run(4, bad)
        assert (out == 7).all()


def test_the_problem_merges_what_it_can() -> None:
    x, y = _view((4, 6, 9), (54, 9, 1)), _view((4, 6, 9), (100, 9, 1))
    assert row_problem(RowKind.SOFTMAX, x, None, x, 9).m == 24
    apart = row_problem(RowKind.SOFTMAX, x, None, y, 9)
    assert (apart.batch, apart.m, apart.out.batch_strides) == ((4,), 6, (100,))


def test_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _view((2, 2), (2, 1))
    problem = row_problem(RowKind.SOFTMAX, plain, None, plain, 2)
    rows = backend.BACKEND.implementations[type(problem)]
    assert rows.explain(problem).name.startswith("c++ softmax (")
    assert rows.refuses(problem) is None
    monkeypatch.setattr(backend, "library", lambda: None)
    assert rows.explain(problem).name == "numpy softmax"


def test_the_replay_refuses_what_it_cannot_add() -> None:
    with pytest.raises(ContractUnsupported, match="float64"):
        numpy_rows.rows(RowKind.SUM, np.ones((2, 2)))
    one = np.ones((2, 2), np.float32)
    for kind, arrays in ((RowKind.SUM, [one, one]), (RowKind.SUM, [one[0]]), (RowKind.SUM_BACKWARD, [one[0]])):
        with pytest.raises(ShapeError):
            numpy_rows.rows(kind, *arrays)


def test_the_module_is_public() -> None:
    assert detkern.rows is rows
    assert sorted(rows.__all__) == sorted(kind.label for kind in RowKind)
