"""The bias gradient's CUDA side without a device: the argument block against the kernel file, the choice of a build,
the launch on a driver that only takes notes, and what is offered where."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

import cu_blocks

from detkern import config
from detkern.cu import column_sum, implementation, loader
from detkern.cu.backend import CudaBackend
from detkern.cu.device import CudaDevice
from detkern.cu.gemm_tile import Load
from detkern.dispatch import selfcheck
from detkern.errors import DeviceError
from detkern.operations.bias_gradient.operation import BIAS_GRADIENT
from detkern.operations.bias_gradient.problem import ColumnSumProblem, column_sum_problem
from detkern.operations.bias_gradient.replay import column_sum as replayed_column_sum
from detkern.operations.operation import Sample, replayed
from detkern.tensors import TensorView, contiguous_strides
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32, DType

KERNEL = loader.FOLDER / column_sum.SOURCE
DEVICE = cu_blocks.DEVICE


def _view(
    shape: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: DType = BF16, pointer: int = 4096
) -> TensorView:
    return TensorView(pointer, shape, contiguous_strides(shape) if strides is None else strides, dtype, DEVICE)


def _problem(dc: TensorView, out_dtype: DType = F32, step: int = 1, accumulate: bool = False) -> ColumnSumProblem:
    return column_sum_problem(dc, _view(dc.shape[-1:], (step,), out_dtype), accumulate)


def _fields() -> dict[str, tuple[int, str]]:
    return cu_blocks.fields(column_sum, "ColumnSumParams", "parts/column_sum_params.cuh")


def test_every_field_is_where_the_kernel_says() -> None:
    fields = _fields()
    dc = _view((3, 5, 7, 9), (1100, 200, 13, 2))
    block = struct.pack("<2Q", 1, 2) + column_sum.pack_params(_problem(dc, F32, -3, True))
    assert fields.pop("size")[0] == len(block)
    found = {name: struct.unpack_from(form, block, offset) for name, (offset, form) in fields.items()}
    rest = (0,) * (column_sum.MAX_SUM_RANK - 2)
    assert found == {
        "dc": (1,), "out": (2,), "rows": (105,), "m": (7,), "n": (9,), "row_stride": (13,), "col_stride": (2,),
        "out_stride": (-3,), "out_dtype": (1,), "accumulate": (1,), "batch_rank": (2,), "unused": (0,),
        "batch_shape": (3, 5, *rest), "batch_strides": (1100, 200, *rest),
    }  # fmt: skip


def test_the_deepest_batch_fits() -> None:
    """Rows that can be counted in 63 bits have no more dimensions than the argument block."""
    shape = (2,) * 62 + (3,)
    strides = (3, 7) * 31 + (1,)
    problem = _problem(_view(shape, strides))
    assert len(problem.batch) == 61
    assert struct.unpack_from("<q", column_sum.pack_params(problem)) == (2**62,)


@pytest.mark.parametrize(
    ("dc", "load"),
    [
        (_view((64, 40)), Load.MN_MAJOR),
        (_view((64, 40), (48, 1)), Load.MN_MAJOR),
        (_view((64, 40), (-40, 1)), Load.MN_MAJOR),
        (_view((64, 40), (0, 1)), Load.MN_MAJOR),
        (_view((4, 64, 40), (8000, 40, 1)), Load.MN_MAJOR),
        (_view((40,)), Load.MN_MAJOR),
        (_view((64, 40), (44, 1)), Load.STRIDED),
        (_view((64, 40), (44, 1), F32), Load.MN_MAJOR),
        (_view((64, 40), pointer=4104), Load.STRIDED),
        (_view((4, 64, 40), (8004, 40, 1)), Load.STRIDED),
        (_view((64, 40), (80, 2)), Load.STRIDED),
        (_view((64, 40), (40, -1)), Load.STRIDED),
        (_view((64, 40), (0, 0)), Load.STRIDED),
        (_view((64, 40), (1, 64)), Load.K_MAJOR),
        (_view((64, 1)), Load.K_MAJOR),
        (_view((64, 40), (1, 66)), Load.STRIDED),
        (_view((4, 64, 40), (5000, 1, 64)), Load.STRIDED),
    ],
)
def test_load_paths(dc: TensorView, load: Load) -> None:
    assert column_sum.load_path(_problem(dc)) == load


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_every_choice_is_compiled_ahead_and_covers_the_columns(dtype: DType) -> None:
    known = set(column_sum.builds())
    assert len(known) == len(column_sum.builds()) == 15
    for n in (1, 31, 32, 33, 4096, 8448, 16896, 16897, 128256, 2**40):
        for strides in ((n, 1), (n + 8, 1), (1, 64), (2 * n, 2)):
            problem = _problem(_view((64, n), strides, dtype))
            chosen = column_sum.choose(problem, 132)
            assert chosen.build in known
            assert chosen.grid == min(-(-n // chosen.tile.columns), 2**31 - 1)
            assert dict(chosen.build.macros)["LOAD"] == column_sum.load_path(problem)
    for rows in (0, 1, 8):
        chosen = column_sum.choose(_problem(_view((rows, 5000), None, dtype)), 132)
        assert (chosen.build.source, chosen.grid) == ("column_sum_few.cu", 5)
        assert chosen.build in known
    assert column_sum.choose(_problem(_view((3, 3, 50), None, dtype)), 132).build.source == "column_sum.cu"
    narrow, wide = (column_sum.choose(_problem(_view((64, n), None, dtype)), 132) for n in (4096, 128256))
    assert (narrow.tile.columns, narrow.grid) == (32, 128)
    assert wide.tile.columns == 64


def _launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    return cu_blocks.launches(monkeypatch, column_sum, _fields()["size"][0])


def test_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _launches(monkeypatch)
    dc, out = _view((64, 104)), _view((104,), None, F32, 512)
    problem = column_sum_problem(dc, out, False)
    run = column_sum.Sums().prepare(problem, cu_blocks.execution())
    for _ in range(2):
        run(64, (dc,), out, cu_blocks.execution())
    chosen = column_sum.choose(problem, 132)
    sizes = (4, 1, 1, 160, 1, 1, chosen.build.shared_bytes)
    block = struct.pack("<2Q", 4096, 512) + column_sum.pack_params(problem)
    assert calls == [(77, sizes, 9, block)] * 2
    assert len(run.plans) == 1


def test_no_columns_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _launches(monkeypatch)
    dc, out = _view((64, 0)), _view((0,), None, F32)
    column_sum.launch(column_sum_problem(dc, out, False), dc, out, cu_blocks.execution())
    assert calls == []


def test_a_fault_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _launches(monkeypatch)
    cu_blocks.faults(monkeypatch)
    dc, out = _view((64, 104)), _view((104,), None, F32)
    with pytest.raises(DeviceError, match=r"cuda:1 reported an illegal address at the bias gradient of m=64, n=104"):
        column_sum.launch(column_sum_problem(dc, out, False), dc, out, cu_blocks.execution())


def test_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (implementation, column_sum):
        monkeypatch.setattr(module, "describe", lambda _: CudaDevice(1, "Made-up GPU", "uuid", (9, 0), 132, "1.0"))
    problem = _problem(_view((64, 104)))
    made = CudaBackend().implementations[type(problem)]
    assert made.refuses(problem) is None
    kernel = made.explain(problem)
    assert (kernel.name, kernel.tile) == (
        "bias_gradient (column_sum.cu)",
        "32 columns x 128 rows, 8 stages, dc mn-major",
    )
    assert kernel.geometry == "grid 4, 160 threads, 67584 bytes shared"


def test_a_device_not_seen_is_checked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = CudaDevice(1, "Made-up GPU", "uuid", (8, 6), 80, "1.0")
    runs: list[tuple[int, ...]] = []
    wrong_rows = 0

    def computed(_: CudaDevice, operation: Any, implementation: Any, sample: Sample) -> Any:
        (dc,) = sample.operands
        runs.append(dc.shape)
        result = replayed_column_sum(dc, initial=sample.initial)
        if dc.shape[0] == wrong_rows:
            result.view(f"u{result.itemsize}")[3] ^= 1
        return result

    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setattr(implementation, "computed", computed)
    monkeypatch.setattr(implementation, "describe", lambda _: device)
    sums = column_sum.Sums()

    def refusal(dtype: DType) -> str | None:
        return sums.refuses(_problem(_view((4, 4), None, dtype)))

    monkeypatch.setattr(selfcheck, "_outcomes", {})
    assert refusal(BF16) is None
    assert len(runs) == 2 * len(operands.KINDS) * len({shape[0] for shape in runs})
    count = len(runs)
    selfcheck._outcomes.clear()  # as another process would begin
    assert refusal(BF16) is None
    assert len(runs) == count
    wrong_rows = 33
    reason = refusal(F16)
    assert reason is not None
    assert "bias_gradient for f16 on cuda:1 (Made-up GPU) differs from the CPU replay" in reason
    assert "normal operands, m=33, from zero, element [3]" in reason
    assert "dc may be float32, float16 or bfloat16, not float8_e4m3fn" in (refusal(E4M3) or "")

    def broken(*_: Any) -> Any:
        raise DeviceError("out of memory")

    monkeypatch.setattr(implementation, "computed", broken)
    assert "did not finish: out of memory" in (refusal(F32) or "")


def test_the_check_sees_a_sum_that_forgets_out() -> None:
    def forgetful(sample: Sample) -> Any:
        return replayed_column_sum(sample.operands[0], out_dtype=F32)

    outcome = selfcheck.check(BIAS_GRADIENT, "bias_gradient", F32, forgetful)
    assert outcome.differing
    assert "an accumulator" in outcome.example
    right = selfcheck.check(BIAS_GRADIENT, "bias_gradient", F32, functools.partial(replayed, BIAS_GRADIENT))
    assert right.example == ""
    assert np.isfinite(outcome.elements)
