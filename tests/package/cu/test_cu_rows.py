"""The CUDA side of the row operations without a device: the argument block against the kernel file, the constants
against the CPU's, the choice of a build, the launch on a driver that only takes notes, and what is offered where."""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

import cu_blocks

import detkern.cpu
from detkern import config
from detkern.cu import implementation, loader, rows
from detkern.cu.backend import CudaBackend
from detkern.cu.device import CudaDevice
from detkern.cu.rows import RowLoad, RowTile
from detkern.dispatch import selfcheck
from detkern.errors import DeviceError
from detkern.operations.operation import Sample, replayed
from detkern.operations.rows import replay as numpy_rows
from detkern.operations.rows.operation import ROWS
from detkern.operations.rows.problem import RowKind, RowProblem, row_problem
from detkern.tensors import TensorView, contiguous_strides
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

KERNEL = loader.FOLDER / rows.SOURCE
DEVICE = cu_blocks.DEVICE


def _view(
    shape: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: DType = BF16, pointer: int = 4096
) -> TensorView:
    return TensorView(pointer, shape, contiguous_strides(shape) if strides is None else strides, dtype, DEVICE)


def _softmax(x: TensorView, out: TensorView | None = None) -> RowProblem:
    return row_problem(RowKind.SOFTMAX, x, None, out or _view(x.shape, None, F32), x.shape[-1])


def _fields() -> dict[str, tuple[int, str]]:
    return cu_blocks.fields(rows, "RowParams")


def test_every_field_is_where_the_kernel_says() -> None:
    fields = _fields()
    assert fields["size"][0] <= 4096, "kernel parameters"
    a, b = _view((3, 5, 7, 9), (1100, 200, 13, 2)), _view((3, 5, 7, 9), (900, 150, 10, 1))
    problem = row_problem(RowKind.SOFTMAX_BACKWARD, a, b, _view((3, 5, 7, 9), (1, 4, 20, -30), F16), 9)
    block = struct.pack("<3Q", 1, 2, 3) + rows.pack_params(problem)
    assert fields.pop("size")[0] == len(block)
    found = {name: struct.unpack_from(form, block, offset) for name, (offset, form) in fields.items()}
    rest = (0,) * (rows.MAX_SUM_RANK - 2)
    assert found == {
        "a": (1,), "b": (2,), "out": (3,), "rows": (105,), "m": (7,), "n": (9,), "a_row_stride": (13,),
        "a_col_stride": (2,),
        "b_row_stride": (10,), "b_col_stride": (1,), "out_row_stride": (20,), "out_col_stride": (-30,), "a_dtype": (3,),
        "out_dtype": (2,), "batch_rank": (2,), "unused": (0,),
        "batch_shape": (3, 5, *rest), "a_batch_strides": (1100, 200, *rest), "b_batch_strides": (900, 150, *rest),
        "out_batch_strides": (1, 4, *rest),
    }  # fmt: skip


def test_kinds_and_loads_are_the_kernels() -> None:
    text = KERNEL.read_text()
    names = re.search(r"enum Kind \{(.*?)\}", text, re.DOTALL)[1]
    assert [name.split("=")[0].strip() for name in names.split(",") if name.strip()] == [
        kind.name for kind in rows.KINDS
    ]
    assert f"VECTOR = {RowLoad.VECTOR:d}, ACROSS = {RowLoad.ACROSS:d};" in text
    shared = (loader.FOLDER / "parts" / "aligned_sum.cuh").read_text()
    assert f"FRACTION_BITS = {numpy_rows.FRACTION_BITS};" in shared
    macros = re.search(r"// Macros (.*?)//  *Tile|// Macros (.*?)\n// Tile", text, re.DOTALL)[0]
    for name, _ in rows.build_for(RowKind.SUM, F32, RowTile(RowLoad.VECTOR, 256, 1, 16)).macros:
        assert name in macros
    # 64-bit sums hold 2^18 terms below 2^44.
    assert all(tile.columns <= 1 << 18 for tile in rows._TILES if tile.held)


def test_the_constants_are_the_cpus() -> None:
    """exp and log hold the same numbers, in the same order, in all three versions."""

    def numbers(text: str, name: str) -> list[float]:
        body = text.split(f"float {name}(")[1].split("\n}")[0]
        return [
            float.fromhex(number) for number in re.findall(r"value[^;]*?(-?0x1[\w.]*p[-+]?\d+|1\.0(?=f))f\)?;", body)
        ]

    cuda = (loader.FOLDER / "parts" / "exponential.cuh").read_text()
    cpp = (Path(detkern.cpu.__file__).parent / "exponential.h").read_text()
    assert numbers(cuda, "exponential_parts") == [float(c) for c in numpy_rows.EXP_COEFFICIENTS]
    scaled = cuda.split("float scaled_exponential(")[1].split("\n}")[0]
    found = re.findall(r"value[^;]*?EXP_SCALE(?: \* (0x1[\w.]*p[-+]?\d+)f)?\)?;", scaled)
    assert [float.fromhex(number or "1") for number in found] == [float(c) for c in numpy_rows.EXP_COEFFICIENTS]
    assert numbers(cuda, "logarithm") == [float(c) for c in numpy_rows.LOG_COEFFICIENTS]
    for name, held in (("EXP", numpy_rows.EXP_COEFFICIENTS), ("LOG", numpy_rows.LOG_COEFFICIENTS)):
        listed = re.search(rf"{name}_COEFFICIENTS\[\] =\s+\{{(.*?)\}}", cpp, re.DOTALL)[1]
        assert [float.fromhex(number.strip().removesuffix("f")) for number in listed.split(",")] == [
            float(c) for c in held
        ]
    for text in (cuda, cpp):
        for name in ("LOG2_E", "LN2_HIGH", "LN2_LOW", "ROUNDER"):
            value = re.search(rf"{name} = (0x[\w.]+p[-+]?\d+)f", text)[1]
            assert float.fromhex(value) == float(getattr(numpy_rows, name))
        assert "EXP_LOWEST = -104.0f, EXP_HIGHEST = 89.0f" in text
        assert f"{int(numpy_rows.LOG_FIRST):#x}" in text


@pytest.mark.parametrize(
    ("x", "load"),
    [
        (_view((64, 40)), RowLoad.VECTOR),
        (_view((64, 40), (48, 1)), RowLoad.VECTOR),
        (_view((64, 40), (-40, 1)), RowLoad.VECTOR),
        (_view((64, 40), (0, 1)), RowLoad.VECTOR),
        (_view((4, 64, 40), (8004, 41, 1)), RowLoad.VECTOR),
        (_view((64, 40), (44, 1), pointer=4098), RowLoad.VECTOR),
        (_view((40,)), RowLoad.VECTOR),
        (_view((64, 40), (80, 2)), RowLoad.STRIDED),
        (_view((64, 40), (40, -1)), RowLoad.STRIDED),
        (_view((64, 40), (0, 0)), RowLoad.STRIDED),
        (_view((64, 40), (1, 64)), RowLoad.ACROSS),
        (_view((64, 40), (-2, 200)), RowLoad.ACROSS),
        (_view((1, 40), (1, 64)), RowLoad.STRIDED),
    ],
)
def test_load_paths(x: TensorView, load: RowLoad) -> None:
    assert rows.load_path(_softmax(x)) == load


def test_two_operands_must_begin_at_equal_places() -> None:
    good, odd, far = _view((64, 40)), _view((64, 40), (44, 1)), _view((64, 40), (52, 1))
    moved = _view((64, 40), pointer=4098)
    for a, b, load in (
        (good, good, RowLoad.VECTOR),
        (odd, odd, RowLoad.VECTOR),
        (odd, far, RowLoad.VECTOR),
        (good, odd, RowLoad.STRIDED),
        (odd, good, RowLoad.STRIDED),
        (good, moved, RowLoad.STRIDED),
        (moved, moved, RowLoad.STRIDED),  # not known how far past a multiple of 16 bytes
        (_view((64, 40), (1, 64)), good, RowLoad.STRIDED),
        (good, _view((64, 40), (1, 64)), RowLoad.ACROSS),
    ):
        assert rows.load_path(row_problem(RowKind.SOFTMAX_BACKWARD, a, b, good, 40)) == load
    # One number a row may lie anywhere; where that is all there is, out decides.
    one = _view((64, 1), (3, 0), F16)
    assert rows.load_path(row_problem(RowKind.MEAN_SQUARE_BACKWARD, one, good, odd, 40)) == RowLoad.VECTOR
    assert rows.load_path(row_problem(RowKind.SUM_BACKWARD, one, None, _view((64, 40), (80, 2)), 40)) == RowLoad.STRIDED


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_every_choice_is_compiled_ahead_and_covers_the_rows(capability: tuple[int, int]) -> None:
    known = set(rows.builds(capability))
    assert len(known) == len(rows.builds(capability)) == (413 if capability == (9, 0) else 371)
    for kind in rows.KINDS:
        for count in (1, 31, 132 * 4, 132 * 16, 2**36):
            for width in (40, 256, 257, 1024, 4096, 4097, 16_384, 32_768, 151_936, 163_840, 163_841, 1 << 22):
                for strides in ((width, 1), (width + 1, 1), (1, count), (2 * width, 2)):
                    x = _view((count, width), strides)
                    one = _view((count, 1), (1, 0), F32)
                    b = x if kind.operands == 2 else None
                    out = one if kind.reduces else x
                    problem = row_problem(kind, one if kind.spreads else x, b, out, width)
                    chosen = rows.choose(problem, capability, 132)
                    tile = chosen.tile
                    assert chosen.build in known
                    assert chosen.grid % tile.cluster == 0
                    assert 0 < chosen.grid < 2**31
                    tiles = -(-count // tile.rows)
                    if kind.spreads:
                        assert chosen.grid == 2**31 - 1 or chosen.grid * tile.columns >= tiles * width
                    else:
                        assert chosen.grid == min(tiles * tile.cluster, (2**31 - 1) // tile.cluster * tile.cluster)
                        assert rows.holds(problem, tile) or not tile.held
                        # Rows are read once wherever there is a tile that holds them.
                        most = 163_840 if capability >= (9, 0) else 16_384 if kind.operands == 2 else 32_768
                        needed = width if strides != (width + 1, 1) or count == 1 else width + 7
                        assert tile.held == (needed <= most) or tile.load != RowLoad.VECTOR


def test_the_tile_follows_the_width_and_the_rows() -> None:
    def tile(count: int, width: int, dtype: DType = F32, capability: tuple[int, int] = (9, 0)) -> str:
        return str(rows.choose(_softmax(_view((count, width), None, dtype)), capability, 132).tile)

    assert tile(4096, 4096) == "1 row x 4096 columns, held"
    assert tile(100_000, 200) == "4 rows x 256 columns, held"
    assert tile(4096, 4097, BF16) == "1 row x 16384 columns, held"
    assert tile(32, 151_936) == "1 row x 163840 columns by a cluster of 8, held"
    assert tile(32, 16_384) == "1 row x 163840 columns by a cluster of 8, held"  # CTAs for all multiprocessors
    assert tile(4096, 16_384) == "1 row x 16384 columns, held"
    assert tile(32, 262_144) == "1 row x 65536 columns by a cluster of 8, read for each pass"
    assert tile(32, 151_936, F32, (8, 0)) == "1 row x 8192 columns, read for each pass"


def _launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return cu_blocks.launches(monkeypatch, rows, _fields()["size"][0])


def test_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _launches(monkeypatch)
    x, out = _view((64, 104)), _view((64, 104), None, F32, 512)
    problem = _softmax(x, out)
    run = rows.Rows().prepare(problem, cu_blocks.execution())
    for _ in range(2):
        run(64, (x,), out, cu_blocks.execution())
    block = struct.pack("<3Q", 4096, 0, 512) + rows.pack_params(problem)
    assert calls == [(77, (16, 1, 1, 128, 1, 1, 0), 9, block)] * 2
    assert len(run.plans) == 1


def test_a_fault_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _launches(monkeypatch)
    cu_blocks.faults(monkeypatch)
    x = _view((64, 104))
    with pytest.raises(DeviceError, match=r"cuda:1 reported an illegal address at softmax of 64 rows, n=104"):
        rows.launch(_softmax(x), x, None, _view((64, 104), None, F32), cu_blocks.execution())


def _replayed(_: CudaDevice, operation: Any, implementation: Any, sample: Sample) -> Any:
    assert operation is ROWS
    return replayed(ROWS, sample)


def test_what_would_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from detkern.cu import backend

    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    monkeypatch.setattr(implementation, "computed", _replayed)
    monkeypatch.setattr(backend, "missing", lambda _: None)
    for module in (backend, implementation, rows):
        monkeypatch.setattr(module, "describe", lambda _: CudaDevice(1, "Made-up GPU", "uuid", (8, 0), 132, "1.0"))
    made = CudaBackend()
    problem = _softmax(_view((64, 104)))
    assert "self-check of softmax bf16" not in made.facts(DEVICE)
    assert made.implementations[RowProblem].refuses(problem) is None
    assert made.facts(DEVICE)["self-check of softmax bf16"].startswith("agrees")
    kernel = made.implementations[RowProblem].explain(problem)
    assert (kernel.name, kernel.tile) == ("softmax (rows.cu)", "4 rows x 256 columns, held, pieces of 16 bytes")
    assert kernel.geometry == "grid 16, 128 threads"


def test_every_device_is_checked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = CudaDevice(1, "Made-up GPU", "uuid", (8, 0), 132, "1.0")
    runs: list[tuple[str, int]] = []
    wrong_width = 0

    def computed(*given: Any) -> Any:
        sample = given[-1]
        width = sample.operands[0].shape[-1]
        runs.append((sample.variant, width))
        result = _replayed(*given)
        if width == wrong_width:
            result.view(np.uint32)[3] ^= 1
        return result

    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setattr(implementation, "computed", computed)
    monkeypatch.setattr(implementation, "describe", lambda _: device)
    offered = rows.Rows()
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    x = _view((64, 40))
    assert offered.refuses(_softmax(x)) is None
    count = len(runs)
    assert count
    selfcheck._outcomes.clear()  # as another process would begin
    assert offered.refuses(_softmax(x)) is None
    assert len(runs) == count
    wrong_width = 67
    total = row_problem(RowKind.SUM, x, None, _view((64, 1), (1, 0)), 40)
    reason = offered.refuses(total)
    assert reason is not None
    assert "sum for bf16 on cuda:1 (Made-up GPU) differs from the CPU replay" in reason
    assert "logits operands, n=67, element [3]" in reason

    def broken(*_: Any) -> Any:
        raise DeviceError("out of memory")

    monkeypatch.setattr(implementation, "computed", broken)
    mean = row_problem(RowKind.MEAN, x, None, _view((64, 1), (1, 0)), 40)
    assert "did not finish: out of memory" in (offered.refuses(mean) or "")


@pytest.mark.parametrize("kind", [RowKind.MEAN_SQUARE_BACKWARD, RowKind.SUM_BACKWARD], ids=lambda kind: kind.label)
def test_the_check_runs_every_shape_of_operands(kind: RowKind) -> None:
    def wrong(sample: Sample) -> Any:
        result = replayed(ROWS, sample)
        assert result.shape == (sample.operands[0].shape[0], sample.shape[1])
        result.view(np.uint32)[:, -1] ^= 1
        return result

    assert selfcheck.check(ROWS, kind.label, F16, wrong).differing
    right = selfcheck.check(ROWS, kind.label, F16, functools.partial(replayed, ROWS))
    assert (right.differing, right.example) == (0, "")
