"""The device around a launch, on a runtime that only takes notes: which is current when, and what becomes of its
faults."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from detkern.cu import current
from detkern.cu.current import on_device
from detkern.cu.extended_launch import LaunchFailure
from detkern.errors import BuildError, DeviceError
from detkern.operations.bias_gradient.problem import ColumnSumProblem, column_sum_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.dtypes import F32


class Fault(Exception):
    pass


class OtherFault(Exception):
    pass


class Runtime:
    """CUDA's driver and runtime for one thread. refused: a device that cannot be made current."""

    CUDADriverError = Fault
    CUDARuntimeError = OtherFault

    def __init__(self) -> None:
        self.device, self.context, self.refused = 0, True, -1
        self.switches: list[int] = []

    def getDevice(self) -> int:
        return self.device

    def setDevice(self, index: int) -> None:
        if index == self.refused:
            raise OtherFault("cudaErrorInvalidDevice")
        self.switches.append(index)
        self.device, self.context = index, True

    def ctxGetCurrent(self) -> int:
        return int(self.context)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(current, "driver", made)
    monkeypatch.setattr(current, "runtime", made)
    return made


def _problem(index: int) -> ColumnSumProblem:
    device = Device("cuda", index)
    dc, out = (TensorView(4096, shape, (4, 1)[-len(shape) :], F32, device) for shape in ((3, 4), (4,)))
    return column_sum_problem(dc, out, False)


def test_a_call_runs_on_the_problems_device_and_the_earlier_one_comes_back(runtime: Runtime) -> None:
    assert on_device(_problem(2), lambda *given: (runtime.device, given), "a", 1) == (2, ("a", 1))
    assert runtime.switches == [2, 0]


def test_the_device_that_is_current_is_left_alone(runtime: Runtime) -> None:
    assert on_device(_problem(0), runtime.getDevice) == 0
    assert runtime.switches == []


def test_a_thread_without_a_context_gets_one_on_the_right_device_too(runtime: Runtime) -> None:
    runtime.context = False
    assert on_device(_problem(0), runtime.ctxGetCurrent) == 1
    assert runtime.switches == [0]


@pytest.mark.parametrize("fault", [Fault, OtherFault, LaunchFailure])
def test_faults_are_device_errors_that_name_the_call(runtime: Runtime, fault: type[Exception]) -> None:
    def fails() -> None:
        raise fault("an illegal address")

    with pytest.raises(
        DeviceError, match="cuda:2 reported an illegal address at the bias gradient of m=3, n=4"
    ) as raised:
        on_device(_problem(2), fails)
    assert isinstance(raised.value.__cause__, fault)
    assert runtime.device == 0


def test_a_device_that_cannot_be_made_current_is_a_device_error(runtime: Runtime) -> None:
    runtime.refused = 2
    called: list[Any] = []
    with pytest.raises(DeviceError, match="cuda:2 reported cudaErrorInvalidDevice"):
        on_device(_problem(2), called.append, 1)
    assert called == []


def test_other_errors_come_through(runtime: Runtime) -> None:
    error = BuildError("NVRTC refused it")

    def fails() -> None:
        raise error

    with pytest.raises(BuildError) as raised:
        on_device(_problem(2), fails)
    assert raised.value is error
    assert runtime.device == 0
