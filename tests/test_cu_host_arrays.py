"""What the self-check hands to the kernels and what it gets back, in memory of the host under CuPy's names, with the replay in
the kernels' place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from detkern import operands
from detkern.contracts import FMA
from detkern.cu import column_sum, launch, rows
from detkern.cu.device import CudaDevice
from detkern.cu.host_arrays import placing
from detkern.dtypes import BF16, F16, F32, DType
from detkern.errors import ArgumentError
from detkern.operations.bias_gradient.replay import column_sum as replayed_column_sum
from detkern.operations.gemm import replay as numpy_replay
from detkern.operations.rows import replay as numpy_rows
from detkern.operations.rows.problem import RowKind
from detkern.tensors import Device, TensorView

DEVICE = CudaDevice(1, "Made-up GPU", "uuid", (9, 0), 132, "1.0")


class Memory(np.ndarray):
    """A NumPy array that has its address where CuPy's have it."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class Entered:
    """A device or a stream. left: whether the with statement is over."""

    ptr = 0x57
    left = False

    def __init__(self, *index: int, non_blocking: bool = False) -> None:
        self.index, self.non_blocking = index, non_blocking
        entered.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.left = True


entered: list[Entered] = []


@pytest.fixture(autouse=True)
def _host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    entered.clear()
    monkeypatch.setattr(cupy, "empty", lambda shape, dtype: np.full(shape, 0xAD, dtype).view(Memory))
    monkeypatch.setattr(cupy, "asarray", lambda array: np.array(array).view(Memory))
    monkeypatch.setattr(cupy, "asnumpy", lambda array, stream: np.array(array, subok=False))
    monkeypatch.setattr(cupy.cuda, "Device", Entered)
    monkeypatch.setattr(cupy.cuda, "Stream", Entered)


def host(view: TensorView) -> np.ndarray:
    """What a kernel sees through a view."""
    assert view.pointer == view.array.ctypes.data
    assert view.shape == view.array.shape
    assert tuple(stride * view.dtype.itemsize for stride in view.strides) == view.array.strides
    return view.array.view(np.ndarray).view(view.dtype.numpy)


def bits(array: np.ndarray) -> list[int]:
    return array.view(f"u{array.itemsize}").ravel().tolist()


def test_a_place_is_a_device_a_stream_and_memory_there() -> None:
    array = operands.generate("bits", BF16, (5, 3), 1)
    with placing(DEVICE) as there:
        device, stream = entered
        assert (device.index, stream.non_blocking) == ((1,), True)
        view = there.put(array.T, BF16)
        assert (view.shape, view.strides, view.dtype, view.device) == ((3, 5), (5, 1), BF16, Device("cuda", 1))
        assert bits(there.fetch(view)) == bits(np.ascontiguousarray(array.T))
        assert (there.execution.device, there.execution.stream) == (Device("cuda", 1), 0x57)
        scratch = there.execution.allocate(40)
        assert (scratch.shape, scratch.dtype.itemsize) == ((40,), 1)
        assert not stream.left
    assert device.left
    assert stream.left


@pytest.mark.parametrize("operand", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_and_sums(operand: DType, accumulate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def gemm(problem: Any, a: TensorView, b: TensorView, out: TensorView, bias: None, execution: Any) -> None:
        assert (problem.accumulate, execution.stream) == (accumulate, 0x57)
        start = host(out).copy() if accumulate else None
        host(out)[...] = numpy_replay.gemm(problem.contract, host(a), host(b), initial=start)

    def total(problem: Any, dc: TensorView, out: TensorView, execution: Any) -> None:
        assert (problem.accumulate, execution.stream) == (accumulate, 0x57)
        host(out)[...] = replayed_column_sum(host(dc), initial=host(out).copy() if accumulate else None)

    monkeypatch.setattr(launch, "launch", gemm)
    monkeypatch.setattr(column_sum, "launch", total)
    a, b = (operands.generate("normal", operand, shape, 1) for shape in ((5, 9), (9, 4)))
    initial = operands.generate("normal", F32, (5, 4), 2) if accumulate else None
    result = launch.product(DEVICE, FMA, a, b, initial)
    assert result.dtype == (np.float32 if accumulate else operand.numpy)
    assert bits(result) == bits(numpy_replay.gemm(FMA, a, b, initial=initial))
    initial = None if initial is None else initial[0]
    assert bits(column_sum.sum_on(DEVICE, b, initial)) == bits(replayed_column_sum(b, initial=initial))


@pytest.mark.parametrize("kind", RowKind, ids=lambda kind: kind.label)
def test_row_operations(kind: RowKind, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(problem: Any, a: TensorView, b: TensorView | None, out: TensorView, execution: Any) -> None:
        first = host(a)[:, 0] if kind.spreads else host(a)
        second = None if b is None else host(b)
        result = numpy_rows.rows(kind, first, second, width=problem.n, out_dtype=F32)
        host(out)[...] = result[:, None] if kind.reduces else result

    monkeypatch.setattr(rows, "launch", launched)
    a, b = (operands.generate("normal", F16, (5, 9), seed) for seed in (1, 2))
    first = np.ascontiguousarray(a[:, 0]) if kind.spreads else a
    second = b if kind.operands == 2 else None
    result = rows.rows_on(DEVICE, kind, first, second, 9)
    assert result.shape == ((5,) if kind.reduces else (5, 9))
    assert bits(result) == bits(numpy_rows.rows(kind, first, second, width=9, out_dtype=F32))


def test_types_without_a_kernel_are_named() -> None:
    wrong = np.zeros((4, 4), np.int64)
    with pytest.raises(ArgumentError, match="a of int64 has no kernel"):
        launch.product(DEVICE, FMA, wrong, wrong)
    with pytest.raises(ArgumentError, match="dc of int64 has no kernel"):
        column_sum.sum_on(DEVICE, wrong)
    with pytest.raises(ArgumentError, match="b of int64 has no kernel"):
        rows.rows_on(DEVICE, RowKind.SOFTMAX_BACKWARD, np.zeros((4, 4), np.float32), wrong, 4)
