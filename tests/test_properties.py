"""What batch invariance means, as properties of random products: of rows, chunks, padding, layout and micro-batches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from frameworks import bits, same
from hypothesis import given, settings
from hypothesis import strategies as st

import detkern
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS, Contract
from detkern.vocabulary.dtypes import F32, DType

COMMON = settings(max_examples=40, deadline=None, derandomize=True, print_blob=True)
PAIRS = [(c, d) for c in CONTRACTS.values() if c.name != "fp8-block128" for d in c.operands]
KINDS = [kind for kind in operands.KINDS if kind != "integers"]
sizes = st.integers(1, 20)
# Across the groups of 8 and 16, the leaves of 32, and several of them.
depths = st.one_of(st.integers(0, 70), st.integers(71, 300))


class Case(NamedTuple):
    contract: Contract
    dtype: DType
    a: np.ndarray
    b: np.ndarray

    def product(self, a: np.ndarray | None = None, b: np.ndarray | None = None, **options: object) -> np.ndarray:
        a = self.a if a is None else a
        b = self.b if b is None else b
        return detkern.gemm(a, b, contract=self.contract.name, **options)


@st.composite
def cases(draw: st.DrawFn, pairs: list[tuple[Contract, DType]] = PAIRS, k: st.SearchStrategy[int] = depths) -> Case:
    contract, dtype = draw(st.sampled_from(pairs))
    m, n, depth, seed = draw(sizes), draw(sizes), draw(k), draw(st.integers(0, 1000))
    kind = draw(st.sampled_from(KINDS))
    a = operands.generate(kind, dtype, (m, depth), seed)
    b = operands.generate(kind, dtype, (depth, n), seed + 1)
    return Case(contract, dtype, a, b)


@COMMON
@given(cases(), st.randoms(use_true_random=False))
def test_permuting_rows_and_columns_permutes_the_result(case: Case, random: object) -> None:
    rows, columns = np.arange(case.a.shape[0]), np.arange(case.b.shape[1])
    random.shuffle(rows)
    random.shuffle(columns)
    assert same(case.product(case.a[rows], case.b[:, columns]), np.ascontiguousarray(case.product()[rows][:, columns]))


@COMMON
@given(cases(), st.data())
def test_a_row_alone_equals_the_row_in_any_batch(case: Case, data: st.DataObject) -> None:
    whole = case.product()
    row = data.draw(st.integers(0, len(whole) - 1))
    other = operands.generate("bits", case.dtype, (data.draw(sizes), case.a.shape[1]), 5)
    position = data.draw(st.integers(0, len(other)))
    batch = np.concatenate([other[:position], case.a[row : row + 1], other[position:]])
    alone = case.product(case.a[row : row + 1])
    assert same(alone, whole[row : row + 1])
    assert same(case.product(batch)[position : position + 1], alone)
    assert same(case.product(case.a[row]), whole[row])


@COMMON
@given(cases(), st.data())
def test_concatenated_chunks_equal_the_whole(case: Case, data: st.DataObject) -> None:
    m, n = case.a.shape[0], case.b.shape[1]
    row_cuts = sorted(data.draw(st.lists(st.integers(0, m), max_size=3)))
    column_cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    chunks = [[case.product(x, y) for y in np.split(case.b, column_cuts, axis=1)] for x in np.split(case.a, row_cuts)]
    assert same(np.block(chunks), case.product())


@COMMON
@given(cases([(c, d) for c, d in PAIRS if c.padding]), st.integers(0, 40), st.integers(0, 3), st.booleans())
def test_zeros_around_k_change_no_bit(case: Case, behind: int, groups: int, negative: bool) -> None:
    zero = np.array(-0.0 if negative else 0.0).astype(case.dtype.numpy)
    front = groups * (case.contract.front or 0)
    finite_a = np.where(np.isfinite(case.a.astype(np.float32)), case.a, zero)
    finite_b = np.where(np.isfinite(case.b.astype(np.float32)), case.b, zero)
    a = np.pad(finite_a, ((0, 0), (front, behind)), constant_values=zero)
    b = np.pad(finite_b, ((front, behind), (0, 0)), constant_values=zero)
    assert same(case.product(a, b), case.product(finite_a, finite_b))
    # The other side of the padding may be anything finite.
    anything = operands.generate("large", case.dtype, b.shape, 3)
    anything[front : front + len(finite_b)] = finite_b
    assert same(case.product(a, anything), case.product(finite_a, finite_b))


@COMMON
@given(cases(k=st.integers(1, 100)), st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
def test_nan_and_infinities_stay_in_their_row_and_column(case: Case, poison: float, data: st.DataObject) -> None:
    whole = case.product()
    i = data.draw(st.integers(0, case.a.shape[0] - 1))
    j = data.draw(st.integers(0, case.b.shape[1] - 1))
    k = data.draw(st.integers(0, case.a.shape[1] - 1))
    a, b = case.a.copy(), case.b.copy()
    a[i, k] = poison
    b[k, j] = poison
    rows, columns = np.arange(len(whole)) != i, np.arange(whole.shape[1]) != j
    assert (bits(case.product(a, b))[np.ix_(rows, columns)] == bits(whole)[np.ix_(rows, columns)]).all()
    if np.isnan(poison):
        assert np.isnan(case.product(a, case.b)[i].astype(np.float32)).all()


@COMMON
@given(cases(), st.integers(1, 4), st.booleans(), st.booleans())
def test_batched_equals_looped(case: Case, count: int, share_a: bool, share_b: bool) -> None:
    a = np.stack([np.roll(case.a, i, axis=1) for i in range(count)])
    b = np.stack([np.roll(case.b, i, axis=0) for i in range(count)])
    left = a[0] if share_a else a
    right = b[0] if share_b else b
    batched = case.product(left, right)
    for i in range(count if batched.ndim == 3 else 0):
        assert same(batched[i], case.product(left if share_a else left[i], right if share_b else right[i]))
    strided = case.product(np.broadcast_to(left, a.shape)[:, ::-1], np.broadcast_to(right, b.shape))
    for i in range(count):
        one = case.product(left if share_a else left[i], right if share_b else right[i])
        assert same(strided[i][::-1].copy(), one)


@COMMON
@given(cases([(c, d) for c, d in PAIRS if c.accumulates]), st.data())
def test_micro_batches_accumulate_to_the_whole(case: Case, data: st.DataObject) -> None:
    k, step = case.a.shape[1], case.contract.accumulates
    start = operands.generate("normal", F32, (case.a.shape[0], case.b.shape[1]), 9)
    whole, parts = start.copy(), start.copy()
    case.product(out=whole, accumulate=True)
    cuts = sorted(cut * step for cut in data.draw(st.lists(st.integers(0, k // step), max_size=3)))
    for x, y in zip(np.split(case.a, cuts, axis=1), np.split(case.b, cuts), strict=True):
        case.product(x, y, out=parts, accumulate=True)
    assert same(parts, whole)
    # From an out of zeros, the bits are those of one product.
    gathered = np.zeros_like(start)
    for x, y in zip(np.split(case.a, cuts, axis=1), np.split(case.b, cuts), strict=True):
        case.product(x, y, out=gathered, accumulate=True)
    assert same(gathered, case.product(out_dtype="f32"))


@COMMON
@given(cases(), st.sampled_from(["transposed", "strided", "reversed", "unaligned"]), st.booleans())
def test_layout_and_alignment_change_no_bit(case: Case, layout: str, left: bool) -> None:
    array = case.a if left else case.b
    rows, columns = array.shape
    if layout == "transposed":
        view = np.asfortranarray(array)
    elif layout == "strided":
        memory = np.zeros((2 * rows, 3 * columns), array.dtype)
        memory[::2, 1::3] = array
        view = memory[::2, 1::3]
    elif layout == "reversed":
        view = array[::-1, ::-1].copy()[::-1, ::-1]
    else:
        memory = np.zeros(array.nbytes + 1, np.uint8)
        memory[1:] = np.frombuffer(array.tobytes(), np.uint8)
        view = memory[1:].view(array.dtype).reshape(array.shape)
    assert same(case.product(view, None) if left else case.product(None, view), case.product())


@COMMON
@given(cases(), st.booleans())
def test_bias_and_out_type_are_one_rounding_of_the_accumulator(case: Case, with_bias: bool) -> None:
    bias = operands.generate("normal", F32, (case.b.shape[1],), 4) if with_bias else None
    accumulator = case.product(out_dtype="f32")
    with np.errstate(all="ignore"):
        expected = accumulator + bias if with_bias else accumulator
        rounded = expected.astype(case.dtype.numpy)
    result = case.product(bias=bias)
    nan = np.isnan(expected)
    assert (np.isnan(result.astype(np.float32)) == nan).all()
    assert (bits(result)[~nan] == bits(rounded)[~nan]).all()
    canonical = {4: 0x7FFFFFFF, 2: 0x7FFF}[case.dtype.itemsize]
    assert (bits(result)[nan] == canonical).all()


@COMMON
@given(cases())
def test_the_gradients_are_the_products_that_they_stand_for(case: Case) -> None:
    dc = operands.generate("wide", case.dtype, (case.a.shape[0], case.b.shape[1]), 8)
    name = case.contract.name
    assert same(detkern.gemm_da(dc, case.b, contract=name), case.product(dc, case.b.T.copy()))
    db = case.product(case.a.T.copy(), dc)
    assert same(detkern.gemm_db(case.a, dc, contract=name), db)
    assert same(detkern.gemm_db(case.a, dc, transposed=True, contract=name), db.T.copy())
    assert same(detkern.linear(case.a, case.b.T.copy(), contract=name), case.product())


@pytest.mark.parametrize("kind", ["normal", "special"])
def test_repetition_gives_the_same_bits(kind: str) -> None:
    for contract, dtype in PAIRS:
        a, b = operands.generate(kind, dtype, (17, 130), 1), operands.generate(kind, dtype, (130, 19), 2)
        results = {detkern.gemm(a, b, contract=contract.name).tobytes() for _ in range(10)}
        assert len(results) == 1
