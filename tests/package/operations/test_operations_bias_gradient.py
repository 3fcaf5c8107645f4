"""The bias gradient: both CPU versions against additions done elsewhere, and what may not change a bit of it."""

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
from detkern import ArgumentError, ContractUnsupported, config
from detkern.abi import mirror
from detkern.abi.descriptors import column_sum_descriptors
from detkern.abi.library import Library
from detkern.cpu import backend
from detkern.operations.bias_gradient.checks import plan_column_sum
from detkern.operations.bias_gradient.problem import column_sum_problem
from detkern.operations.bias_gradient.replay import column_sum as replayed_column_sum
from detkern.tensors import Device, TensorView
from detkern.vocabulary.dtypes import BF16, F16, F32, DType
from detkern.vocabulary.operands import KINDS, generate

DTYPES = (F32, F16, BF16)
CPU = Device("cpu")


@pytest.fixture(params=["numpy", "c++"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The public function on each version of the CPU backend in turn."""
    if request.param == "numpy":
        monkeypatch.setattr(backend, "library", lambda: None)
    else:
        assert backend.library() is not None
    return request.param


def view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType = F32) -> TensorView:
    return TensorView(1024, shape, strides, dtype, CPU)


def sequential(dc: np.ndarray, initial: np.ndarray | None = None, out_dtype: DType | None = None) -> np.ndarray:
    """The definition, on NumPy float32: one addition a row, + 0, one rounding; every NaN made the canonical one."""
    acc = np.zeros(dc.shape[-1], np.float32) if initial is None else initial.copy()
    with np.errstate(all="ignore"):
        for row in dc.reshape(-1, dc.shape[-1]) if dc.size else ():
            acc = acc + row.astype(np.float32)
        result = (acc + np.float32(0)).astype(out_dtype.numpy if out_dtype else dc.dtype)
    result.view(f"u{result.itemsize}")[np.isnan(result)] = 0x7FFFFFFF if result.itemsize == 4 else 0x7FFF
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_exact_rational_arithmetic(version: str, dtype: DType) -> None:
    for number, kind in enumerate(KINDS):
        dc = generate(kind, dtype, (19, 6), number)
        start = generate(kind, F32, (6,), number)
        for initial, out_dtype in ((None, dtype), (None, F32), (None, BF16), (start, F32)):
            chains = [0.0] * 6 if initial is None else [float(x) for x in initial]
            with np.errstate(invalid="ignore"):  # signalling NaNs among the raw bits
                rows = dc.astype(np.float64)
            for row in rows:
                chains = [rational.add(acc, float(x)) for acc, x in zip(chains, row, strict=True)]
            expected = [rational.round_to(rational.add(acc, 0.0), out_dtype) for acc in chains]
            out = None if initial is None else initial.copy()
            got = detkern.bias_gradient(
                dc, out=out, accumulate=out is not None, out_dtype=None if out is not None else out_dtype.name
            )
            for value, wanted in zip(got.astype(np.float64), expected, strict=True):
                assert (math.isnan(value) and math.isnan(wanted)) or (
                    value == wanted and math.copysign(1, value) == math.copysign(1, wanted)
                ), kind


@pytest.mark.parametrize("kind", ["cancel", "special", "subnormal", "bits", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float32_additions_in_order(version: str, dtype: DType, kind: str) -> None:
    for shape in ((1, 1), (7, 3), (8, 64), (201, 97), (130, 1030), (3, 5, 41)):
        dc = generate(kind, dtype, shape, 3)
        initial = generate(kind, F32, shape[-1:], 4)
        assert same(detkern.bias_gradient(dc), sequential(dc)), shape
        out = initial.copy()
        assert detkern.bias_gradient(dc, out=out, accumulate=True) is out
        assert same(out, sequential(dc, initial, F32)), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_fma_product_with_a_row_of_ones(dtype: DType) -> None:
    dc = generate("wide", dtype, (90, 50), 5)
    ones = np.ones((1, 90), dtype.numpy)
    assert same(detkern.bias_gradient(dc), detkern.gemm(ones, dc, contract="fma")[0])


def test_the_order_is_part_of_it(version: str) -> None:
    dc = np.array([[2.0**24], [1], [1]], np.float32)
    assert detkern.bias_gradient(dc)[0] == 2.0**24
    assert detkern.bias_gradient(dc[::-1])[0] == 2.0**24 + 2


def test_no_rows_and_no_columns(version: str) -> None:
    for shape in ((0, 3), (4, 0, 3)):
        empty = np.empty(shape, np.float16)
        assert bits(detkern.bias_gradient(empty)).tolist() == [0, 0, 0]
        out = np.array([-0.0, 5, np.nan], np.float32)
        out.view(np.uint32)[2] = 0xFFC00001
        detkern.bias_gradient(empty, out=out, accumulate=True)
        assert out.view(np.uint32).tolist() == [0, 0x40A00000, 0x7FFFFFFF]
    for shape in ((3, 0), (0,), (0, 0), (2, 0, 0)):
        result = detkern.bias_gradient(np.empty(shape, ml_dtypes.bfloat16))
        assert result.shape == (0,)
        assert result.dtype == ml_dtypes.bfloat16


def test_zeros_and_the_last_rounding(version: str) -> None:
    assert bits(detkern.bias_gradient(np.full((3, 1), -0.0, np.float32)))[0] == 0
    tiny = np.full((1, 1), -(2.0**-100), np.float32)
    assert bits(detkern.bias_gradient(tiny, out_dtype="f16"))[0] == 0x8000
    assert bits(detkern.bias_gradient(np.full((2, 1), 2.0**-149, np.float32)))[0] == 2
    # Sums above f16's largest number stay finite until the end.
    assert detkern.bias_gradient(np.array([[60000], [60000], [-60000]], np.float16))[0] == 60000


def test_one_dimension_is_one_row(version: str) -> None:
    row = generate("bits", BF16, (37,), 6)
    assert same(detkern.bias_gradient(row), sequential(row[None]))


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "columns first": np.asfortranarray,
    "columns reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "rows reversed": lambda x: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
    "every third column": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "every second row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "unaligned": lambda x: np.concatenate([x.reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape),
    "batch inside": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -2)), -2, 0),
    "batches apart": lambda x: np.concatenate([x, x], axis=-2)[..., : x.shape[-2], :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(version: str, dtype: DType, layout: str) -> None:
    for shape in ((70, 45), (4, 6, 45), (2, 3, 20, 33), (129, 1)):
        dc = generate("special", dtype, shape, 7)
        placed = LAYOUTS[layout](dc)
        assert same(placed, dc)
        assert same(detkern.bias_gradient(placed), sequential(dc)), shape


def test_broadcast_operands(version: str) -> None:
    one = np.broadcast_to(np.float32(0.1), (3, 200, 5))
    assert same(detkern.bias_gradient(one), sequential(np.ascontiguousarray(one)))
    row = np.broadcast_to(generate("normal", BF16, (40,), 8), (300, 40))
    assert same(detkern.bias_gradient(row), sequential(np.ascontiguousarray(row)))


def test_many_dimensions(version: str) -> None:
    """More than fit a product's descriptor, none of which can be merged with its neighbour."""
    shape = (2,) * 11 + (5,)
    dc = np.transpose(generate("cancel", F32, shape, 9), (*reversed(range(11)), 11))
    assert len(column_sum_problem(view(shape, tuple(s // 4 for s in dc.strides)), view((5,), (1,)), False).batch) == 10
    assert same(detkern.bias_gradient(dc), sequential(np.ascontiguousarray(dc)))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_strided_outputs(version: str, out_dtype: DType) -> None:
    dc = generate("normal", BF16, (33, 21), 10)
    memory = np.full(63, 7, out_dtype.numpy)
    out = memory[::-3]
    assert detkern.bias_gradient(dc, out=out) is out
    assert same(np.ascontiguousarray(out), sequential(dc, out_dtype=out_dtype))
    assert (memory.reshape(21, 3)[:, :2] == 7).all()


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in ("C", "F"):
        dc = np.asarray(generate("cancel", BF16, (700, 2100), 11), order=layout)
        expected = sequential(np.ascontiguousarray(dc))
        for threads in (1, 2, 3, 7):
            monkeypatch.setattr(config, "num_threads", threads)
            assert same(detkern.bias_gradient(dc), expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), kind=st.sampled_from(("cancel", "wide", "special", "bits")))
def test_rows_may_be_cut_anywhere(data: st.DataObject, dtype: DType, kind: str) -> None:
    """Micro-batches, accumulated in order, give the bits of the whole batch."""
    rows, columns = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 40))
    dc = generate(kind, dtype, (rows, columns), data.draw(st.integers(0, 99)))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    out = np.zeros(columns, np.float32)
    for first, last in zip([0, *cuts], [*cuts, rows], strict=True):
        detkern.bias_gradient(dc[first:last], out=out, accumulate=True)
    assert same(out, detkern.bias_gradient(dc, out_dtype="f32"))


def test_a_call_without_rows_leaves_no_plan_for_those_with_rows() -> None:
    from detkern.dispatch import plan

    dc = generate("normal", F32, (5, 3), 1)
    expected = replayed_column_sum(dc)
    for function, want in ((detkern.bias_gradient, expected), (lambda x: detkern.rows.sum(x.T), None)):
        plan.forget_plans()
        function(dc[:0])
        got = function(dc)
        plan.forget_plans()
        assert same(got, function(dc) if want is None else want)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_a_column_knows_nothing_of_the_others(data: st.DataObject, dtype: DType) -> None:
    """Wherever it stands, and with NaN and infinities beside it."""
    rows, columns = data.draw(st.integers(0, 70)), data.draw(st.integers(1, 200))
    dc = generate("special", dtype, (rows, columns), data.draw(st.integers(0, 99)))
    chosen = data.draw(st.lists(st.integers(0, columns - 1), min_size=1, max_size=50))
    whole = detkern.bias_gradient(dc)
    assert same(detkern.bias_gradient(dc[:, chosen]), whole[chosen])
    assert same(detkern.bias_gradient(dc[:, chosen[0]][:, None]), whole[chosen[:1]])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_leading_dimensions_are_rows_in_order(data: st.DataObject, dtype: DType) -> None:
    lead = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dc = generate("cancel", dtype, (*lead, 19), 12)
    order = data.draw(st.permutations(range(len(lead))))
    turned = np.transpose(dc, (*order, len(lead)))
    assert same(detkern.bias_gradient(turned), sequential(np.ascontiguousarray(turned)))


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_every_framework(name: str, dtype: DType) -> None:
    made = framework(name)
    host = generate("special", dtype, (3, 40, 24), 13)
    result = detkern.bias_gradient(made.make(host))
    assert same(made.read(result), sequential(host))
    if name != "dlpack":
        assert type(result) is type(made.make(host))
    if made.writable:
        out = made.make(np.ones(24, np.float32))
        assert detkern.bias_gradient(made.make(host), out=out, accumulate=True) is out
        assert same(made.read(out), sequential(host, np.ones(24, np.float32), F32))


def test_expanded_torch_gradients() -> None:
    """What `y.sum().backward()` gives: one number, expanded."""
    torch = pytest.importorskip("torch")
    dc = torch.ones((), dtype=torch.bfloat16).expand(2, 300, 16)
    assert detkern.bias_gradient(dc).tolist() == [600.0] * 16


def test_rows_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(detkern.ShapeError, match=r"dc has shape \[4294967296, 2147483648, 3\].*2\^63"):
        plan_column_sum(view((2**32, 2**31, 3), (0, 0, 1)), None, None, False, None)


def test_native_is_refused() -> None:
    with pytest.raises(ContractUnsupported, match="has no bias_gradient; it has gemm"):
        detkern.bias_gradient(np.ones((2, 2), np.float32), backend="native")


def test_the_library_checks_descriptors_itself() -> None:
    library = backend.library()
    assert isinstance(library, Library)
    dc, out = np.ones((2, 2), np.float32), np.zeros(2, np.float32)
    problem = column_sum_problem(view((2, 2), (2, 1)), view((2,), (1,)), False)
    good = mirror.ColumnSumDescriptor.from_buffer_copy(column_sum_descriptors(problem)[0][0])
    good.dc, good.out = dc.ctypes.data, out.ctypes.data
    library.run(3, good)
    assert out.tolist() == [2, 2]
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ArgumentError, {"size": 8}),
        (ContractUnsupported, {"operand_dtype": 4}),
        (ContractUnsupported, {"operand_dtype": 0}),
        (ContractUnsupported, {"out_dtype": 5}),
        (ArgumentError, {"accumulate": 1, "out_dtype": 2}),
        (ArgumentError, {"m": -1}),
        (ArgumentError, {"n": -1}),
        (ArgumentError, {"batch_rank": mirror.MAX_SUM_RANK + 1}),
        (ArgumentError, {"dc": None}),
        (ArgumentError, {"out": None}),
    ]
    for error, fields in wrong:
        bad = mirror.ColumnSumDescriptor.from_buffer_copy(good)
        out[...] = 7
        for name, value in fields.items():
            setattr(bad, name, value)
        with pytest.raises(error, match="detkern_run of a ColumnSumDescriptor"):
            library.run(3, bad)
        assert out.tolist() == [7, 7]


def test_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = column_sum_problem(view((2, 2), (2, 1)), view((2,), (1,)), False)
    sums = backend.BACKEND.implementations[type(problem)]
    assert sums.explain(problem).name.startswith("c++ bias_gradient (")
    assert sums.refuses(problem) is None
    monkeypatch.setattr(backend, "library", lambda: None)
    assert sums.explain(problem).name == "numpy bias_gradient"


def test_the_replay_refuses_what_it_cannot_add() -> None:
    with pytest.raises(ContractUnsupported, match="float64"):
        replayed_column_sum(np.ones((2, 2)))
    with pytest.raises(detkern.ShapeError):
        replayed_column_sum(np.float32(1).reshape(()))
