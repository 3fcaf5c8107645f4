"""What is said of a check: that a device does not offer something, that a check raised, how the checks of a device came
out. The checks themselves are tested with the backends that run them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detkern import config
from detkern.dispatch import selfcheck
from detkern.dispatch.selfcheck import Outcome
from detkern.errors import ArgumentError, DeviceError
from detkern.operations.bias_gradient.operation import BIAS_GRADIENT
from detkern.operations.gemm.operation import GEMM
from detkern.operations.operation import Operation, Sample, replayed
from detkern.operations.rows.problem import RowKind
from detkern.operations.table import OPERATIONS
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import FMA, MMA16
from detkern.vocabulary.dtypes import BF16, F16, F32, from_numpy


@dataclass(frozen=True)
class Made:
    name: str = "Made-up GPU"
    uuid: str = "0"
    driver: str = "1.0"


AGREES = Outcome(40, 0, "")
DIFFERS = Outcome(40, 2, "normal operands, m=8, from zero, column 3: 0x1, not 0x0")


def test_a_refusal_names_the_device_and_the_first_difference() -> None:
    assert selfcheck.refusal(FMA, F16, "cuda:1", lambda: AGREES) is None
    assert selfcheck.refusal(FMA, F16, "cuda:1", lambda: DIFFERS) == (
        "fma for f16 on cuda:1 differs from the CPU replay in 2 of 40 elements "
        "(normal operands, m=8, from zero, column 3: 0x1, not 0x0)"
    )
    assert str(AGREES) == "agrees with the CPU replay on 40 elements"


def test_a_check_that_raises_says_what() -> None:
    def run() -> Outcome:
        raise DeviceError("out of memory")

    said = selfcheck.refusal("bias_gradient", BF16, "cuda:1", run)
    assert said == "the self-check of bias_gradient for bf16 on cuda:1 did not finish: out of memory"


def test_what_no_check_may_raise_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        selfcheck.refusal(FMA, F16, "cuda:1", lambda: Outcome(1 // 0, 0, ""))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_cases_of_every_operation_are_of_its_types_and_of_every_kind(operation: Operation[Any]) -> None:
    """The replay agrees with itself, and a result with one bit flipped is seen, whatever the operation."""
    for variant, dtypes in operation.variants.items():
        cases = list(itertools.islice(operation.cases(variant, dtypes[0]), 400))
        for kind in operands.KINDS:
            assert any(case.about.startswith(f"{kind} operands") for case in cases), (variant, kind)
        for case in cases:
            assert from_numpy(case.operands[0].dtype) == dtypes[0]
            assert case.dtype == (F32 if case.initial is not None else case.dtype)
    variant, dtypes = next(iter(operation.variants.items()))
    short = replace(operation, cases=lambda variant, dtype: itertools.islice(operation.cases(variant, dtype), 2))
    assert not selfcheck.check(short, variant, dtypes[-1], lambda sample: replayed(operation, sample)).differing

    def wrong(sample: Sample) -> Any:
        result = replayed(operation, sample)
        result.view(f"u{result.itemsize}").flat[-1] ^= 1
        return result

    assert selfcheck.check(short, variant, dtypes[-1], wrong).differing == 2


def test_types_without_a_kernel_are_named() -> None:
    class Place:
        execution = None

        def put(self, array: Any, dtype: Any) -> Any:
            raise AssertionError("nothing is copied")

    sample = Sample("bias_gradient", (np.zeros((4, 4), np.int16),), (4,), F32)
    with pytest.raises(ArgumentError, match="operand of int16 has no kernel"):
        selfcheck.computed_at(Place(), BIAS_GRADIENT, None, sample)  # type: ignore[arg-type]


def test_reports_of_checks_that_have_run_and_that_have_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    monkeypatch.setattr(selfcheck, "check", lambda _, variant, *rest: DIFFERS if variant == "mma16" else AGREES)
    device = Made()
    for contract in (FMA, MMA16):
        selfcheck.outcome(device, GEMM, contract.name, F16, "cuda", "digest", lambda sample: sample.result())
    assert selfcheck.known_to_differ(device, MMA16, F16, "cuda", "digest")
    assert not selfcheck.known_to_differ(device, FMA, F16, "cuda", "digest")
    assert not selfcheck.known_to_differ(device, MMA16, F16, "cuda", "another"), "no outcome, so nothing is known"
    checks = [(FMA, F16, "digest"), (MMA16, F16, "digest"), (FMA, F32, "digest"), (RowKind.SUM.label, F32, "digest")]
    assert selfcheck.reports(device, checks, "cuda") == {
        "self-check of fma f16": str(AGREES),
        "self-check of mma16 f16": str(DIFFERS),
        "self-check of fma f32": "not run yet",
        "self-check of sum f32": "not run yet",
    }
