"""The scattered sum: the replay against additions done elsewhere, and what may not change a bit of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from frameworks import FRAMEWORKS, bits, framework, same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import rational

import detkern
from detkern import ArgumentError, ContractUnsupported, DTypeError, ShapeError
from detkern.operations.operation import replayed
from detkern.operations.scatter_sum.operation import SCATTER_SUM
from detkern.operations.scatter_sum.replay import scatter_sum as replayed_sum
from detkern.vocabulary.dtypes import BF16, F16, F32, INDICES, DType
from detkern.vocabulary.operands import KINDS, generate

DTYPES = (F32, F16, BF16)


def drawn(m: int, rows: int, seed: int) -> np.ndarray:
    """An index some of which names no row."""
    return np.random.default_rng(seed).integers(-2, rows + 2, m)


def sequential(
    source: np.ndarray, index: np.ndarray, rows: int, initial: np.ndarray | None = None, out_dtype: DType | None = None
) -> np.ndarray:
    """The definition, source by source on NumPy float32."""
    dtype = out_dtype.numpy if out_dtype else source.dtype if initial is None else initial.dtype
    result = np.zeros((rows, source.shape[1]), dtype) if initial is None else initial.copy()
    named = [r for r in range(rows) if (index == r).any()]
    with np.errstate(all="ignore"):
        acc = result.astype(np.float32)
        for i, row in enumerate(index):
            if 0 <= row < rows:
                acc[row] = acc[row] + source[i].astype(np.float32)
        finished = (acc[named] + np.float32(0)).astype(dtype)
    finished.view(f"u{dtype.itemsize}")[np.isnan(finished)] = 0x7FFFFFFF if dtype.itemsize == 4 else 0x7FFF
    result[named] = finished
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_exact_rational_arithmetic(dtype: DType) -> None:
    for number, kind in enumerate(KINDS):
        source, index = generate(kind, dtype, (23, 3), number), drawn(23, 4, number)
        start = generate(kind, F32, (4, 3), number)
        for initial, out_dtype in ((None, dtype), (None, F32), (None, BF16), (start, F32)):
            out = None if initial is None else initial.copy()
            got = detkern.scatter_sum(
                source,
                index,
                4,
                out=out,
                accumulate=out is not None,
                out_dtype=None if out is not None else out_dtype.name,
            )
            for row in range(4):
                for column in range(3):
                    if initial is not None and not (index == row).any():
                        assert bits(got)[row, column] == bits(initial)[row, column]
                        continue
                    acc = 0.0 if initial is None else float(initial[row, column])
                    with np.errstate(invalid="ignore"):  # signalling NaNs among the raw bits
                        for term in source[index == row, column].astype(np.float64):
                            acc = rational.add(acc, float(term))
                    wanted = rational.round_to(rational.add(acc, 0.0), out_dtype)
                    value = float(got[row, column].astype(np.float64))
                    assert (math.isnan(value) and math.isnan(wanted)) or (
                        value == wanted and math.copysign(1, value) == math.copysign(1, wanted)
                    ), (kind, row, column)


@pytest.mark.parametrize("kind", ["cancel", "special", "subnormal", "bits", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float32_additions_in_order(dtype: DType, kind: str) -> None:
    for number, (m, n, rows) in enumerate(
        ((0, 3, 2), (1, 1, 1), (40, 64, 3), (201, 7, 90), (333, 5, 1), (90, 4, 1000))
    ):
        source, index = generate(kind, dtype, (m, n), 3), drawn(m, rows, number)
        assert same(detkern.scatter_sum(source, index, rows), sequential(source, index, rows)), (m, n, rows)
        for out_dtype in (F32, dtype):
            out = generate(kind, out_dtype, (rows, n), 4)
            expected = sequential(source, index, rows, out)
            assert detkern.scatter_sum(source, index, out=out, accumulate=True) is out
            assert same(out, expected), (m, n, rows, out_dtype)


def test_long_chains_are_chains() -> None:
    """A row that many sources name, of more elements than the replay takes at once, against NumPy's unbuffered
    additions."""
    for m, n in ((300_000, 1), (3000, 100), (40, 8000)):
        source, index = generate("cancel", F32, (m, n), 1), drawn(m, 2, 5)
        expected = np.zeros((2, n), np.float32)
        named = (index >= 0) & (index < 2)
        np.add.at(expected, index[named], source[named])
        assert same(detkern.scatter_sum(source, index, 2), expected + np.float32(0))


def test_the_order_is_part_of_it() -> None:
    source = np.array([[2.0**24], [1], [1]], np.float32)
    index = np.array([4, 4, 4])
    assert detkern.scatter_sum(source, index, 5)[4, 0] == 2.0**24
    assert detkern.scatter_sum(source[::-1], index, 5)[4, 0] == 2.0**24 + 2


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), kind=st.sampled_from(("cancel", "wide", "special", "bits")))
def test_sources_may_be_cut_anywhere(data: st.DataObject, dtype: DType, kind: str) -> None:
    """Micro-batches, accumulated in order, give the bits of the whole batch."""
    m, n, rows = data.draw(st.integers(0, 90)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    seed = data.draw(st.integers(0, 99))
    source, index = generate(kind, dtype, (m, n), seed), drawn(m, rows, seed)
    start = generate(kind, F32, (rows, n), seed + 1)
    whole, pieces = start.copy(), start.copy()
    detkern.scatter_sum(source, index, out=whole, accumulate=True)
    cuts = sorted(data.draw(st.lists(st.integers(0, m), max_size=4)))
    for low, high in zip([0, *cuts], [*cuts, m], strict=True):
        detkern.scatter_sum(source[low:high], index[low:high], out=pieces, accumulate=True)
    assert same(pieces, whole)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), others=st.integers(0, 50))
def test_sources_of_other_rows_change_nothing(seed: int, others: int) -> None:
    rng = np.random.default_rng(seed)
    source, index = generate("cancel", BF16, (60, 5), seed), rng.integers(0, 3, 60)
    expected = detkern.scatter_sum(source, index, 3, out_dtype="f32")
    places = np.sort(rng.integers(0, 61, others))
    mixed = np.insert(source, places, np.full((others, 5), np.nan, ml_dtypes.bfloat16), axis=0)
    named = np.insert(index, places, rng.choice([-1, 3, 7, 2**40], others))
    got = detkern.scatter_sum(mixed, named, 9, out_dtype="f32")
    assert same(got[:3], expected)


def test_a_16_bit_out_is_rounded_once_a_call() -> None:
    ones, named = np.ones((2, 1), ml_dtypes.bfloat16), np.array([0, 0])
    together, apart = np.full((1, 1), 256, ml_dtypes.bfloat16), np.full((1, 1), 256, ml_dtypes.bfloat16)
    detkern.scatter_sum(ones, named, out=together, accumulate=True)
    for i in (0, 1):
        detkern.scatter_sum(ones[i:][:1], named[:1], out=apart, accumulate=True)
    assert (float(together[0, 0]), float(apart[0, 0])) == (258, 256)


def test_a_row_that_nothing_names_is_left_as_it_is() -> None:
    out = np.array([[-0.0], [0], [1]], np.float32)
    out.view(np.uint32)[1] = 0xFFC00001
    detkern.scatter_sum(np.ones((2, 1), np.float32), np.array([2, 7]), out=out, accumulate=True)
    assert out.view(np.uint32)[:, 0].tolist() == [0x80000000, 0xFFC00001, 0x40000000]
    detkern.scatter_sum(np.full((1, 1), -0.0, np.float32), np.array([0]), out=out)
    assert out.view(np.uint32)[:, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("wanted", INDICES, ids=str)
def test_types_of_index(wanted: DType) -> None:
    source, index = generate("cancel", F16, (50, 3), 2), drawn(50, 6, 1)
    assert same(detkern.scatter_sum(source, index.astype(wanted.numpy), 6), sequential(source, index, 6))
    with pytest.raises(DTypeError, match="index is float32; scatter_sum takes int32 and int64"):
        detkern.scatter_sum(source, index.astype(np.float32), 6)
    with pytest.raises(DTypeError, match=r"index is uint8; .* int32 or int64: cast it, as in index.astype\(np.int64\)"):
        detkern.scatter_sum(source, index.astype(np.uint8), 6)
    with pytest.raises(DTypeError, match=r"index is not an array but list; .* np.asarray\(index, np.int64\)"):
        detkern.scatter_sum(source, index.tolist(), 6)


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "columns first": np.asfortranarray,
    "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "every third column": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "every second row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "unaligned": lambda x: np.concatenate([x.reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype: DType, layout: str) -> None:
    for m, n, rows in ((70, 45, 9), (129, 1, 4), (1, 7, 2)):
        source, index = generate("special", dtype, (m, n), 7), drawn(m, rows, 2)
        expected = sequential(source, index, rows)
        strided = np.repeat(index, 2)[::-2][::-1] if m > 1 else index
        assert (strided == index).all()
        assert same(detkern.scatter_sum(LAYOUTS[layout](source), strided, rows), expected), (m, n)
        out = LAYOUTS[layout](np.full((rows, n), 7, dtype.numpy))
        detkern.scatter_sum(source, index, out=out)
        assert same(np.ascontiguousarray(out), expected), (m, n)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_arrays_of_every_framework(name: str) -> None:
    tools = framework(name)
    source, index = generate("cancel", F32, (40, 6), 3), drawn(40, 5, 3).astype(np.int32)
    result = detkern.scatter_sum(tools.make(source), tools.make(index), 5)
    assert same(tools.read(result), sequential(source, index, 5))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, ArgumentError, "needs rows="),
    ({"rows": -1}, ArgumentError, "must not be negative"),
    ({"rows": 2.5}, ArgumentError, "must be a whole number"),
    ({"rows": 3, "accumulate": True}, ArgumentError, "needs out="),
    ({"rows": 3, "accumulate": 1}, ArgumentError, "must be True or False"),
    ({"rows": 3, "out": np.zeros((4, 2), np.float32)}, ShapeError, "the result has"),
    ({"out": np.zeros((3, 2), np.float64)}, DTypeError, "out is float64"),
    ({"out": np.zeros((3, 2), np.int64)}, DTypeError, "out is int64"),
    ({"rows": 3, "source": np.zeros((4, 2), np.int32)}, DTypeError, "source is int32"),
    ({"rows": 3, "source": np.zeros(4, np.float32)}, ShapeError, r"needs \[M, N\] and \[M\]"),
    ({"rows": 3, "index": np.zeros((4, 1), np.int64)}, ShapeError, r"needs \[M, N\] and \[M\]"),
    ({"rows": 3, "index": np.zeros(3, np.int64)}, ShapeError, r"needs \[M, N\] and \[M\]"),
    ({"rows": 3, "backend": "native"}, ContractUnsupported, "has no scatter_sum"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), WRONG, ids=[said for _, _, said in WRONG])
def test_wrong_calls(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    given = {"source": np.ones((4, 2), np.float32), "index": np.zeros(4, np.int64)} | arguments
    with pytest.raises(error, match=said):
        detkern.scatter_sum(**given)


def test_an_out_that_is_read_is_refused_and_nothing_is_written() -> None:
    memory = np.ones((6, 2), np.float32)
    with pytest.raises(ArgumentError, match="out shares memory with source"):
        detkern.scatter_sum(memory[2:], np.zeros(4, np.int64), out=memory[:3])
    assert (memory == 1).all()


def test_whole_numbers_are_operands_of_nothing_else() -> None:
    whole = np.ones((2, 2), np.int32)
    for call in (
        lambda: detkern.gemm(whole, whole),
        lambda: detkern.bias_gradient(whole),
        lambda: detkern.rows.sum(whole),
    ):
        with pytest.raises(DTypeError, match=r"is int32; detkern takes .*astype\(np.float32\)"):
            call()
    with pytest.raises(DTypeError, match="out is int64"):
        detkern.gemm(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), out=np.zeros((2, 2), np.int64))


def test_no_columns_no_rows_no_sources() -> None:
    assert detkern.scatter_sum(np.ones((3, 0), np.float32), np.zeros(3, np.int64), 4).shape == (4, 0)
    assert detkern.scatter_sum(np.ones((3, 2), np.float32), np.zeros(3, np.int64), 0).shape == (0, 2)
    assert bits(detkern.scatter_sum(np.ones((0, 2), np.float16), np.zeros(0, np.int64), 2)).tolist() == [[0, 0], [0, 0]]


def test_the_replay_refuses_what_it_cannot_add() -> None:
    with pytest.raises(ContractUnsupported, match="float64"):
        replayed_sum(np.ones((2, 2)), np.zeros(2, np.int64), np.ones((2, 2), np.float32))
    with pytest.raises(ShapeError, match="must be"):
        replayed_sum(np.ones((2, 2), np.float32), np.zeros(3, np.int64), np.ones((2, 2), np.float32))


def test_samples_reach_every_kind_of_index() -> None:
    """Rows that many sources name, one, none; sources that name no row; both types."""
    seen: set[str] = set()
    for sample in SCATTER_SUM.samples("scatter_sum", F32, "normal", 0):
        source, index = sample.operands
        assert source is not None
        assert index is not None
        assert same(
            replayed(SCATTER_SUM, sample), sequential(source, index, sample.shape[0], sample.initial, sample.dtype)
        )
        counts = np.bincount(index[(index >= 0) & (index < sample.shape[0])], minlength=sample.shape[0])
        seen |= {str(index.dtype)} | ({"none"} if 0 in counts else set()) | ({"many"} if counts.max() > 64 else set())
        seen |= {"outside"} if ((index < 0) | (index >= sample.shape[0])).any() else set()
    assert seen == {"int32", "int64", "none", "many", "outside"}
