"""How views become a problem: merged batches, strides that are never used, alignment."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from detkern.operations.bias_gradient.problem import ColumnSumProblem, column_sum_problem
from detkern.operations.block_scaled.problem import block_scaled_problem
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.operations.matrix import Matrix, batch_offsets
from detkern.tensors import Device, TensorView, contiguous_strides
from detkern.vocabulary.contracts import CONTRACTS
from detkern.vocabulary.dtypes import E4M3, F16, F32

FMA = CONTRACTS["fma"]


def view(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, pointer: int = 1024) -> TensorView:
    return TensorView(pointer, shape, contiguous_strides(shape) if strides is None else strides, F32, Device("cpu"))


def make(a: TensorView, b: TensorView, out: TensorView) -> GemmProblem:
    return gemm_problem(FMA, a, b, out, None, False)


def test_a_plain_product() -> None:
    problem = make(view((4, 8)), view((8, 3)), view((4, 3)))
    assert (problem.batch, problem.m, problem.n, problem.k) == ((), 4, 3, 8)
    assert (problem.a.row_stride, problem.a.col_stride) == (8, 1)
    assert (problem.b.row_stride, problem.b.col_stride) == (3, 1)
    assert (problem.out.row_stride, problem.out.col_stride) == (3, 1)
    assert problem.a.alignment == 16


def test_contiguous_batches_become_one_dimension() -> None:
    problem = make(view((2, 3, 4, 8)), view((2, 3, 8, 5)), view((2, 3, 4, 5)))
    assert problem.batch == (6,)
    assert (problem.a.batch_strides, problem.b.batch_strides, problem.out.batch_strides) == ((32,), (40,), (20,))


def test_a_batch_that_b_does_not_have_becomes_rows() -> None:
    problem = make(view((2, 3, 4, 8)), view((2, 3, 8, 5), (0, 0, 5, 1)), view((2, 3, 4, 5)))
    assert (problem.batch, problem.m) == ((), 24)
    assert problem.a.row_stride == 8
    # Of single rows too, whose distance is the batch's.
    problem = make(view((6, 1, 8), (100, 8, 1)), view((6, 8, 5), (0, 5, 1)), view((6, 1, 5), (50, 5, 1)))
    assert (problem.batch, problem.m, problem.a.row_stride, problem.out.row_stride) == ((), 6, 100, 50)
    # Not where the rows of the result do not line up.
    problem = make(view((2, 4, 8)), view((2, 8, 5), (0, 5, 1)), view((2, 4, 5), (40, 5, 1)))
    assert (problem.batch, problem.m) == ((2,), 4)


def test_a_batch_of_a_alone_stays_a_batch() -> None:
    problem = make(view((3, 4, 8), (0, 8, 1)), view((3, 8, 5)), view((3, 4, 5)))
    assert (problem.batch, problem.m) == ((3,), 4)
    assert problem.a.batch_strides == (0,)


def test_strides_of_dimensions_of_size_one_are_zero() -> None:
    problem = make(view((1, 8), (7, 1)), view((8, 1), (1, 9)), view((1, 1), (5, 6)))
    assert (problem.a.row_stride, problem.a.col_stride) == (0, 1)
    assert (problem.b.row_stride, problem.b.col_stride) == (1, 0)
    assert (problem.out.row_stride, problem.out.col_stride) == (0, 0)
    assert problem == make(view((1, 8), (3, 1)), view((8, 1)), view((1, 1)))
    problem = make(view((2, 1), (1, 77)), view((1, 3), (55, 1)), view((2, 3)))
    assert (problem.a.col_stride, problem.b.row_stride) == (0, 0)
    problem = make(
        view((2, 1, 4, 8), (32, 99, 8, 1)), view((2, 1, 8, 3), (24, 98, 3, 1)), view((2, 1, 4, 3), (12, 97, 3, 1))
    )
    assert problem.batch == (2,)


@pytest.mark.parametrize(
    ("pointer", "alignment"), [(0, 16), (1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (24, 8), (4096, 16)]
)
def test_alignment(pointer: int, alignment: int) -> None:
    assert make(view((4, 8), pointer=pointer), view((8, 3)), view((4, 3))).a.alignment == alignment


def test_a_problem_is_a_key() -> None:
    first = make(view((4, 8)), view((8, 3)), view((4, 3)))
    again = make(view((4, 8), pointer=2048), view((8, 3)), view((4, 3)))
    assert first == again
    assert hash(first) == hash(again)
    other = make(view((4, 8), (9, 1)), view((8, 3)), view((4, 3)))
    assert first != other
    assert {first: 1, other: 2}[again] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.m = 5


def test_merging_keeps_every_address() -> None:
    rng = np.random.default_rng(0)  # any shapes do: the test is of addresses, not of bits
    for _ in range(200):
        batch = tuple(rng.integers(1, 4, rng.integers(0, 4)).tolist())
        m, n, k = rng.integers(1, 4, 3).tolist()
        order = rng.permutation(len(batch))
        arrays = {}
        for name, (rows, columns) in {"a": (m, k), "b": (k, n), "out": (m, n)}.items():
            shape = (*batch, rows, columns)
            base = np.arange(np.prod(shape)).reshape(*(batch[i] for i in order), rows, columns)
            array = base.transpose(*np.argsort(order), len(batch), len(batch) + 1)
            if name != "out" and rng.random() < 0.4:
                array = np.broadcast_to(array[(0,) * len(batch)], shape)
            arrays[name] = array
        views = {name: view(array.shape, tuple(step // 8 for step in array.strides)) for name, array in arrays.items()}
        problem = make(views["a"], views["b"], views["out"])
        seen = set()
        for index in np.ndindex(*problem.batch):
            for i, j in np.ndindex(problem.m, problem.n):
                row = [
                    sum(x * s for x, s in zip(index, problem.a.batch_strides, strict=True)) + i * problem.a.row_stride,
                    sum(x * s for x, s in zip(index, problem.b.batch_strides, strict=True)) + j * problem.b.col_stride,
                    sum(x * s for x, s in zip(index, problem.out.batch_strides, strict=True))
                    + i * problem.out.row_stride + j * problem.out.col_stride,
                ]  # fmt: skip
                seen.add(tuple(row))
        expected = set()
        for index in np.ndindex(*batch):
            for i, j in np.ndindex(m, n):
                expected.add(
                    (int(arrays["a"][index][i, 0]), int(arrays["b"][index][0, j]), int(arrays["out"][index][i, j]))
                )
        assert seen == expected


def test_block_scaled() -> None:
    problem = block_scaled_problem(
        CONTRACTS["fp8-block128"],
        view((4, 256)),
        view((4, 2), (0, 1)),
        view((256, 1)),
        view((2, 1)),
        view((4, 1)),
        True,
    )
    assert (problem.m, problem.n, problem.k, problem.accumulate) == (4, 1, 256, True)
    assert (problem.scale_a.row_stride, problem.scale_a.col_stride) == (0, 1)
    assert (problem.b.row_stride, problem.b.col_stride) == (1, 0)


def sums(dc: TensorView, columns: int = 5) -> ColumnSumProblem:
    return column_sum_problem(dc, view((columns,)), False)


def test_rows_of_a_sum_are_merged_as_far_as_strides_allow() -> None:
    problem = sums(view((2, 3, 4, 5)))
    assert (problem.batch, problem.m, problem.n) == ((), 24, 5)
    assert (problem.dc.row_stride, problem.dc.col_stride, problem.dc.alignment) == (5, 1, 16)
    # Rows cut off every sequence: one batch dimension is left.
    problem = sums(view((2, 3, 3, 5), (60, 20, 5, 1)))
    assert (problem.batch, problem.m, problem.dc.batch_strides, problem.dc.row_stride) == ((6,), 3, (20,), 5)
    # Expanded: all rows are one.
    problem = sums(view((2, 3, 5), (0, 0, 1)))
    assert (problem.batch, problem.m, problem.dc.row_stride) == ((), 6, 0)


def test_rows_in_another_order_stay_apart() -> None:
    problem = sums(view((3, 2, 5), (5, 15, 1)))
    assert (problem.batch, problem.m, problem.dc.batch_strides, problem.dc.row_stride) == ((3,), 2, (5,), 15)


def test_dimensions_of_size_one_and_none_at_all_in_a_sum() -> None:
    problem = sums(view((1, 4, 1, 5), (99, 5, 77, 1)))
    assert (problem.batch, problem.m, problem.dc.row_stride) == ((), 4, 5)
    for dc in (view((5,)), view((1, 1, 5), (9, 9, 1))):
        problem = sums(dc)
        assert (problem.batch, problem.m, problem.dc.row_stride) == ((), 1, 0)
    problem = column_sum_problem(view((4, 1), (1, 7)), view((1,), (3,)), True)
    assert (problem.dc.col_stride, problem.out.stride, problem.accumulate) == (0, 0, True)
    problem = sums(view((3, 0, 4, 5)))
    assert (problem.batch, problem.m) == ((), 0)


def test_the_offsets_of_outer_batch_dimensions_are_bytes_in_row_major_order() -> None:
    a = Matrix(F16, (1000, -100, 7, 1), 4, 1, 16)
    b = Matrix(E4M3, (0, 10, 7, 1), 4, 1, 16)
    assert batch_offsets((2, 3), a, b) == (
        (0, 0), (-200, 10), (-400, 20), (2000, 0), (1800, 10), (1600, 20),
    )  # fmt: skip
    assert batch_offsets((), a, b) == ((0, 0),)
    assert batch_offsets((2, 0), a, b) == ()
