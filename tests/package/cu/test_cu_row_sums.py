"""Sums of rows on CUDA without a device: the block of parameters, and which rows go where."""

from __future__ import annotations

import struct
from dataclasses import replace

import cu_blocks
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from detkern.cu import row_sums, rows
from detkern.cu.row_sums import Phase
from detkern.operations.rows.problem import RowKind, RowProblem, row_problem
from detkern.tensors import TensorView
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32, DType


def _view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType = BF16, pointer: int = 4096) -> TensorView:
    return TensorView(pointer, shape, strides, dtype, cu_blocks.DEVICE)


def _problem(
    shape: tuple[int, ...], strides: tuple[int, ...], kind: RowKind = RowKind.SUM, pointer: int = 4096
) -> RowProblem:
    out_strides = [1]
    for size in reversed(shape[1:-1]):
        out_strides.insert(0, out_strides[0] * size)
    out = _view((*shape[:-1], 1), (*out_strides, 0), F32)
    return row_problem(kind, _view(shape, strides, pointer=pointer), None, out, shape[-1])


def test_every_field_is_where_the_kernel_says() -> None:
    fields = cu_blocks.fields(row_sums, "RowSumParams")
    assert fields["size"][0] <= 4096, "kernel parameters"
    a = _view((3, 5, 7, 9), (1100, 200, 13, 2))
    problem = row_problem(RowKind.MEAN, a, None, _view((3, 5, 7, 1), (1, 4, 20, 0), F16), 9)
    chosen = row_sums.choose(problem, 132, row_sums.tiles()[-1])
    assert chosen is not None
    block = struct.pack("<3Q", 1, 0, 3) + row_sums.pack_params(problem, chosen)
    assert fields.pop("size")[0] == len(block)
    found = {name: struct.unpack_from(form, block, offset) for name, (offset, form) in fields.items()}
    rest = (0,) * (row_sums.MAX_SUM_RANK - 2)
    assert found == {
        "a": (1,), "unused": (0,), "out": (3,), "rows": (105,), "m": (7,), "n": (9,), "a_row_stride": (13,),
        "a_col_stride": (2,),
        "out_row_stride": (20,), "parts": (1,), "part_columns": (chosen.part_columns,), "out_dtype": (2,), "mean": (1,),
        "batch_rank": (2,), "padding": (0,), "batch_shape": (3, 5, *rest), "a_batch_strides": (1100, 200, *rest),
        "out_batch_strides": (1, 4, *rest), "scratch": (0,),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((32, 131_072, 4), (524_288, 1, 131_072), "128 x 1 pieces of 16 bytes across rows"),  # GQA's expand
        ((32, 131_073, 4), (524_292, 1, 131_073), "128 x 1 pieces of an element across rows"),
        ((4096, 4096), (1, 4096), "4 x 128 pieces of 16 bytes across rows"),  # sum(0)
        ((4096, 200), (1, 4096), "8 x 32 pieces of 16 bytes across rows"),
        ((131_072, 4), (4, 1), "64 x 4 pieces of an element along rows"),
        ((131_072, 128), (128, 1), "16 x 16 pieces of 16 bytes along rows"),
        ((4096, 4096), (4096, 1), None),
        ((1, 1 << 24), (1 << 24, 1), "1 x 256 pieces of 16 bytes along rows"),
        ((64, 1 << 17), (1, 64), "4 x 64 pieces of 16 bytes across rows"),
        ((4096, 0), (1, 1), None),
    ],
)
def test_which_rows_are_summed_by_which_tile(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: str | None
) -> None:
    chosen = row_sums.choose(_problem(shape, strides), 132)
    assert (None if chosen is None else str(chosen.tile)) == expected


def test_other_kinds_are_left_to_the_other_kernel() -> None:
    for kind in RowKind:
        if not kind.reduces and not kind.spreads and kind.operands == 1:
            view = _view((64, 4), (1, 64))
            assert row_sums.choose(row_problem(kind, view, None, view, 4), 132) is None


def test_parts_cover_a_row_and_stay_within_64_bits() -> None:
    for rows_, n in ((1, 16_777_216), (1, 16_777_217), (3, 40_000), (1, 3_000_000_001), (500, 300_000), (131, 16_384)):
        problem = _problem((rows_, n), (n, 1))
        chosen = row_sums.choose(problem, 132)
        assert chosen is not None
        assert chosen.parts * chosen.part_columns >= n > (chosen.parts - 1) * chosen.part_columns
        assert chosen.part_columns <= 1 << 18
        assert [dict(build.macros)["PHASE"] for build, _, _ in chosen.steps] == [
            Phase.LARGEST,
            Phase.TOTALS,
            Phase.FINISH,
        ]
        assert chosen.scratch_bytes(problem) == 16 * chosen.parts * rows_


def test_scratch_memory_comes_behind_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches of one block, whose scratch memory is the caller's; none where rows are whole."""
    size = cu_blocks.fields(row_sums, "RowSumParams")["size"][0]
    calls = cu_blocks.launches(monkeypatch, rows, size)
    asked = []

    def allocate(count: int) -> TensorView:
        asked.append(count)
        return TensorView(0xABC0, (count,), (1,), E4M3, cu_blocks.DEVICE)

    for shape, count in (((1, 1 << 20), 3), ((64, 4), 1)):
        calls.clear()
        x, out = _view(shape, (shape[1], 1)), _view((shape[0], 1), (1, 0), F32, 512)
        problem = row_problem(RowKind.SUM, x, None, out, shape[1])
        chosen = row_sums.choose(problem, 132)
        assert chosen is not None
        rows.launch(problem, x, None, out, replace(cu_blocks.execution(), allocate=allocate), chosen)
        scratch = 0xABC0 if count == 3 else 0
        tail = struct.pack("<Q", scratch) if count == 3 else b""
        block = struct.pack("<3Q", 4096, 0, 512) + row_sums.pack_params(problem, chosen) + tail
        assert len(block) == size
        assert [(grid[0], grid[3]) for _, grid, _, _ in calls] == [(grid, threads) for _, grid, threads in chosen.steps]
        assert [sent for *_, sent in calls] == [block] * count
    assert len(asked) == 1
