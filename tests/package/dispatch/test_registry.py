"""Dispatch: the order of the table, and what each backend answered when none is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import detkern
from detkern.dispatch import plan, registry
from detkern.dispatch.backend import Run
from detkern.dispatch.registry import Row
from detkern.operations.bias_gradient.problem import ColumnSumProblem
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import CONTRACTS, default_contract
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32, DType

CPU, CUDA = Device("cpu"), Device("cuda", 1)


class Fake:
    """A backend, and its implementation of products; `lacks` them, it has another operation."""

    def __init__(
        self, name: str, unavailable: str | None = None, refuses: str | None = None, lacks: bool = False
    ) -> None:
        self.name = name
        self.deterministic = True
        self.reasons = (unavailable, refuses)
        self.implementations: dict[type, Any] = {ColumnSumProblem if lacks else GemmProblem: self}
        self.calls: list[tuple[GemmProblem, int]] = []

    def unavailable(self, device: Device) -> str | None:
        return self.reasons[0]

    def refuses(self, problem: GemmProblem) -> str | None:
        assert self.reasons[0] is None, "asked although it cannot run"
        return self.reasons[1]

    def capability(self, device: Device) -> tuple[int, int]:
        return 8, 6

    def prepare(self, problem: GemmProblem, execution: object) -> Run:
        return lambda m, *_: self.calls.append((problem, m))


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a table of (row, backend) in place of the real one."""

    def install(*entries: tuple[Row, Fake]) -> None:
        backends = {row.name: backend for row, backend in entries}
        monkeypatch.setattr(registry, "TABLE", tuple(row for row, _ in entries))
        monkeypatch.setattr(registry, "load", backends.__getitem__)
        plan.forget_plans()

    yield install
    plan.forget_plans()


def row(
    name: str,
    devices: tuple[str, ...] = ("cpu",),
    dispatched: bool = True,
    named_on: tuple[str, ...] = (),
) -> Row:
    return Row(name, "", devices, dispatched, named_on=named_on)


def problem(device: Device = CPU) -> GemmProblem:
    view = TensorView(64, (2, 2), (2, 1), F32, device)
    return gemm_problem(CONTRACTS["fma"], view, view, view, None, False)


def test_the_first_that_can_and_does_not_refuse(install: Install) -> None:
    absent, unwilling, first, second = Fake("a", "no driver"), Fake("b", None, "odd sizes"), Fake("c"), Fake("d")
    install((row("a"), absent), (row("b"), unwilling), (row("c"), first), (row("d"), second))
    assert registry.select(problem(), None)[0] is first
    assert registry.select(problem(), "d")[0] is second
    assert registry.passed_over(problem(), "c", False) == [
        ("a", "no driver"), ("b", "odd sizes"), ("d", "c comes first")
    ]  # fmt: skip
    assert registry.passed_over(problem(), "d", True)[-1] == ("c", "d was named")


def test_a_row_that_is_not_dispatched_runs_only_when_named(install: Install) -> None:
    named, other = Fake("named"), Fake("other")
    install((row("named", dispatched=False), named), (row("other"), other))
    assert registry.select(problem(), None)[0] is other
    assert registry.select(problem(), "named")[0] is named
    assert registry.passed_over(problem(), "other", False) == [("named", "runs only when named")]
    install((row("named", dispatched=False), named))
    with pytest.raises(detkern.DeviceError, match="no backend has gemm on cpu"):
        registry.select(problem(), None)


def test_a_row_may_be_dispatched_on_one_kind_of_device_and_only_named_on_another(install: Install) -> None:
    emulated, other = Fake("emulated"), Fake("other")
    install((row("emulated", ("cuda", "cpu"), named_on=("cpu",)), emulated), (row("other"), other))
    assert registry.select(problem(CUDA), None)[0] is emulated
    assert registry.select(problem(), None)[0] is other
    assert registry.select(problem(), "emulated")[0] is emulated
    assert registry.passed_over(problem(), "other", False) == [("emulated", "runs only when named")]
    assert registry.contract_for(BF16, CPU, None, None).name == "mma16"


def test_no_backend_is_left(install: Install) -> None:
    install((row("a"), Fake("a", "no driver")), (row("b"), Fake("b", None, "it computes fma")))
    with pytest.raises(detkern.ContractUnsupported, match="a: no driver; b: it computes fma"):
        registry.select(problem(), None)
    install((row("a"), Fake("a", "no driver")), (row("b"), Fake("b", "no library")))
    with pytest.raises(detkern.BackendUnavailable, match="a: no driver; b: no library"):
        registry.select(problem(), None)
    with pytest.raises(detkern.DeviceError, match="no backend has gemm on cuda:1; backends: a, b"):
        registry.select(problem(CUDA), None)
    with pytest.raises(detkern.BackendUnavailable, match="backend='a' cannot run here: no driver"):
        registry.select(problem(), "a")
    with pytest.raises(detkern.DeviceError, match="backend='a' works on cpu arrays, these are on cuda:1"):
        registry.select(problem(CUDA), "a")
    install((row("a"), Fake("a", lacks=True)))
    with pytest.raises(detkern.ContractUnsupported, match="backend='a' has no gemm; it has bias_gradient"):
        registry.select(problem(), "a")
    with pytest.raises(detkern.DeviceError, match="no backend has gemm on cpu; backends: a"):
        registry.select(problem(), None)
    install((row("b"), Fake("b", None, "it computes fma")))
    with pytest.raises(detkern.ContractUnsupported, match="backend='b': it computes fma"):
        registry.select(problem(), "b")


def test_dispatch_never_takes_a_backend_without_the_op(install: Install) -> None:
    install((row("a"), Fake("a", lacks=True)), (row("b"), backend := Fake("b")))
    assert registry.select(problem(), None)[0] is backend
    assert registry.passed_over(problem(), "b", False) == [("a", "has no gemm")]


def test_a_call_reaches_the_backend_that_dispatch_chose(install: Install) -> None:
    install((row("a"), Fake("a", "no driver")), (row("b"), backend := Fake("b")))
    detkern.gemm(np.ones((2, 3), np.float32), np.ones((3, 4), np.float32))
    ((seen, m),) = backend.calls
    assert (m, seen.m, seen.k, seen.n) == (2, 2, 3, 4)
    detkern.gemm(np.ones((5, 3), np.float32), np.ones((3, 4), np.float32))
    assert [(problem is seen, m) for problem, m in backend.calls] == [(True, 2), (True, 5)], "rows are an argument"


def test_an_unavailable_backend_leaves_out_alone(install: Install) -> None:
    install((row("a"), Fake("a", "no driver")))
    out = np.full((2, 4), 7, np.float32)
    with pytest.raises(detkern.BackendUnavailable, match="no driver"):
        detkern.gemm(np.ones((2, 3), np.float32), np.ones((3, 4), np.float32), out=out)
    assert (out == 7).all()


def test_contract_for(install: Install) -> None:
    install((row("a", ("cuda",)), Fake("a")))
    fma, tree = CONTRACTS["fma"], CONTRACTS["tree"]
    assert registry.contract_for(BF16, CUDA, fma, tree) is fma
    assert registry.contract_for(BF16, CUDA, None, tree) is tree
    assert registry.contract_for(BF16, CUDA, None, None).name == "mma8"  # the fake device is of compute capability 8.6
    assert registry.contract_for(F32, CUDA, None, None) is fma
    assert registry.contract_for(F16, CPU, None, None).name == "mma16"


@pytest.mark.parametrize(
    ("dtype", "kind", "capability", "expected"),
    [(F32, "cuda", (9, 0), "fma"), (BF16, "cpu", None, "mma16"), (F16, "cuda", (9, 0), "mma16"),
     (F16, "cuda", (12, 0), "mma16"), (BF16, "cuda", (8, 0), "mma8"), (BF16, "cuda", (8, 9), "mma8"),
     (BF16, "musa", None, "fma"), (F16, "rocm", None, "fma"), (BF16, "ascend", None, "tree"),
     (F32, "ascend", None, "fma"), (E4M3, "cuda", (9, 0), "fp8-block128")],
)  # fmt: skip
def test_defaults(dtype: DType, kind: str, capability: tuple[int, int] | None, expected: str) -> None:
    assert default_contract(dtype, kind, capability).name == expected


def test_the_real_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DETKERN_MUSA_LIBRARY", "DETKERN_ASCEND_LIBRARY"):
        monkeypatch.delenv(variable, raising=False)
    assert registry.backend_names()[0] == "cpu"
    assert not next(row for row in registry.TABLE if row.name == "native").dispatched
    assert all(row.dispatched for row in registry.TABLE if row.name != "native")
    for name in ("cpu", "native"):
        backend = registry.load(name)
        assert backend.name == name
        assert backend is registry.load(name)
        assert backend.unavailable(CPU) is None
    assert [(row.name, reason is None) for row, _, reason in registry.offers(CPU)] == [
        ("cpu", True), ("musa", False), ("ascend", False), ("native", True)
    ]  # fmt: skip
    with pytest.raises(detkern.ArgumentError, match="backend='tpu' does not exist; the backends are cpu, "):
        registry.load("tpu")
