"""What the self-check hands to the kernels and what it gets back, in memory of the host under CuPy's names, with the
replay in the kernels' place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from detkern.cu.device import CudaDevice
from detkern.cu.host_arrays import placing
from detkern.cu.implementation import computed
from detkern.errors import ArgumentError
from detkern.operations.bias_gradient.operation import BIAS_GRADIENT
from detkern.operations.gemm.operation import GEMM
from detkern.operations.operation import Operation, Sample, replayed
from detkern.operations.rows.operation import ROWS
from detkern.tensors import Device, TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

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


@pytest.mark.parametrize("operation", [GEMM, BIAS_GRADIENT, ROWS], ids=lambda operation: operation.name)
@pytest.mark.parametrize("operand", [F32, F16, BF16], ids=str)
def test_samples_of_every_operation(operation: Operation[Any], operand: DType) -> None:
    """What is laid on the device, launched there and fetched, with the replay in the kernel's place."""

    class Kernel:
        def prepare(self, problem: Any, execution: Any) -> Any:
            assert execution.stream == 0x57

            def run(m: int, given: Any, out: TensorView, execution: Any) -> None:
                assert m == problem.m
                for view in (*given, out):
                    if view is not None:
                        host(view)
                operation.replay(problem, given, out)

            return run

    variants = [variant for variant, dtypes in operation.variants.items() if operand in dtypes]
    for variant in variants:
        for sample in operation.samples(variant, operand, "normal", 1):
            if 0 in (*sample.shape, sample.operands[0].size) or sample.operands[0].size > 1000:
                continue
            result = computed(DEVICE, operation, Kernel(), sample)
            assert (result.shape, result.dtype) == (sample.shape, sample.dtype.numpy)
            assert bits(result) == bits(replayed(operation, sample)), sample.about


def test_types_without_a_kernel_are_named() -> None:
    wrong = Sample("bias_gradient", (np.zeros((4, 4), np.int16),), (4,), F32)
    with pytest.raises(ArgumentError, match="operand of int16 has no kernel"):
        computed(DEVICE, BIAS_GRADIENT, None, wrong)  # type: ignore[arg-type]
