"""Prefix sums on CUDA without a device: the block of parameters, the launches, and that every build compiles."""

from __future__ import annotations

import struct
from dataclasses import replace

import cu_blocks
import pytest
from cu_compiled import NEEDS_A_COMPILER, check_instruction, compile_build, instructions_of, registers_of

pytest.importorskip("cupy", reason="CuPy is not installed")

from detkern.cu import loader, row_scans, rows
from detkern.operations.rows.problem import RowKind, RowProblem, row_problem
from detkern.tensors import TensorView
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32, DType


def _view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType = BF16, pointer: int = 4096) -> TensorView:
    return TensorView(pointer, shape, strides, dtype, cu_blocks.DEVICE)


def _problem(shape: tuple[int, int], dtype: DType = BF16, kind: RowKind = RowKind.CUMSUM) -> RowProblem:
    strides = (shape[1], 1)
    return row_problem(kind, _view(shape, strides, dtype), None, _view(shape, strides, F32, 512), shape[1])


@pytest.mark.parametrize("kind", [RowKind.CUMSUM, RowKind.CUMSUM_BACKWARD], ids=lambda kind: kind.label)
def test_every_field_is_where_the_kernel_says(kind: RowKind) -> None:
    fields = cu_blocks.fields(row_scans, "RowScanParams")
    assert fields["size"][0] <= 4096, "kernel parameters"
    a, out = _view((3, 5, 7, 9), (1100, 200, 13, 2)), _view((3, 5, 7, 9), (1, 4, 20, -30), F16)
    problem = row_problem(kind, a, None, out, 9)
    chosen = row_scans.choose(problem, 132)
    block = struct.pack("<3Q", 1, 0, 3) + row_scans.pack_params(problem, chosen)
    assert fields.pop("size")[0] == len(block)
    found = {name: struct.unpack_from(form, block, offset) for name, (offset, form) in fields.items()}
    rest = (0,) * (row_scans.MAX_SUM_RANK - 2)
    back = kind == RowKind.CUMSUM_BACKWARD  # from column 8 on
    assert found == {
        "a": (1,), "unused": (0,), "out": (3,), "rows": (105,), "m": (7,), "n": (9,),
        "a_first": (16 if back else 0,), "a_row_stride": (13,), "a_col_stride": (-2 if back else 2,),
        "out_first": (-240 if back else 0,), "out_row_stride": (20,), "out_col_stride": (30 if back else -30,),
        "parts": (1,), "part_columns": (chosen.part_columns,), "out_dtype": (2,), "batch_rank": (2,),
        "batch_shape": (3, 5, *rest), "a_batch_strides": (1100, 200, *rest), "out_batch_strides": (1, 4, *rest),
        "scratch": (0,),
    }  # fmt: skip


def test_parts_cover_a_row_once() -> None:
    known = set(row_scans.builds())
    for shape in ((1, 1), (4096, 1024), (4096, 1025), (1, 16_777_217), (3, 40_000), (1, 3_000_000_001), (500, 300_000)):
        for dtype, kind in ((F32, RowKind.CUMSUM), (F16, RowKind.CUMSUM_BACKWARD)):
            problem = _problem(shape, dtype, kind)
            chosen = row_scans.choose(problem, 132)
            assert chosen.parts * chosen.part_columns >= shape[1] > (chosen.parts - 1) * chosen.part_columns
            assert {build for build, _ in chosen.steps} <= known
            assert len(chosen.steps) == (2 if chosen.parts > 1 else 1)
            assert all(0 < grid < 2**31 for _, grid in chosen.steps)
            words = {F32: 11, F16: 4}[dtype]
            assert chosen.scratch_bytes(problem) == (4 * words * chosen.parts * shape[0] if chosen.parts > 1 else 0)
    assert row_scans.choose(_problem((1, 16_777_216)), 132).parts > 132
    assert row_scans.choose(_problem((4096, 65_536)), 132).parts == 1


def test_scratch_memory_comes_behind_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    size = cu_blocks.fields(row_scans, "RowScanParams")["size"][0]
    calls = cu_blocks.launches(monkeypatch, rows, size)
    asked = []

    def allocate(count: int) -> TensorView:
        asked.append(count)
        return TensorView(0xABC0, (count,), (1,), E4M3, cu_blocks.DEVICE)

    for shape, count in (((1, 1 << 20), 2), ((64, 4), 1)):
        calls.clear()
        problem = _problem(shape)
        chosen = row_scans.choose(problem, 132)
        x, out = _view(shape, (shape[1], 1)), _view(shape, (shape[1], 1), F32, 512)
        run = rows.Rows().prepare(problem, cu_blocks.execution())
        run(shape[0], (x,), out, replace(cu_blocks.execution(), allocate=allocate))
        tail = struct.pack("<Q", 0xABC0) if count == 2 else b""
        block = struct.pack("<3Q", 4096, 0, 512) + row_scans.pack_params(problem, chosen) + tail
        assert len(block) == size
        assert [(grid[0], grid[3]) for _, grid, _, _ in calls] == [(grid, 256) for _, grid in chosen.steps]
        assert [sent for *_, sent in calls] == [block] * count
    assert len(asked) == 1


def test_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cu_blocks.launches(monkeypatch, rows, 8)
    said = [rows.Rows().explain(_problem(shape)) for shape in ((64, 100), (2, 1 << 20))]
    assert [kernel.name for kernel in said] == ["cumsum (row_scans.cu)"] * 2
    assert said[0].tile == "8 x 128 columns"
    assert said[1].tile == "1 x 2048 columns, 128 parts a row"


@pytest.mark.parametrize(
    ("architecture", "number"),
    [
        pytest.param(*case, marks=NEEDS_A_COMPILER)
        for case in (
            ("sm_90a", 0), ("sm_90a", 4), ("sm_90a", 8), ("sm_80", 1), ("sm_89", 2), ("sm_100a", 3), ("sm_120", 7)
        )
    ],
)  # fmt: skip
def test_builds_compile_within_bounds(architecture: str, number: int) -> None:
    build = row_scans.builds()[number]
    log, code = compile_build(build, architecture)
    assert registers_of(log) <= 128, "two CTAs of 256 threads"
    for name in instructions_of(code):
        check_instruction(name)


def test_words_hold_any_row() -> None:
    """The kernel's integers: all bits of the type's numbers, a sign, and as many rows' columns as 2^31 and more."""
    text = (loader.FOLDER / row_scans.SOURCE).read_text()
    assert "WORDS = OPERAND == F16 ? 3 : 10;" in text
    for words, bits in ((3, 16 + 24 + 1), (10, 128 + 149)):
        assert 32 * words - 1 - bits >= 42
