"""What is said of a check: that a device does not offer something, that a check raised, how the checks of a device came out.
The checks themselves are tested with the backends that run them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from detkern import config, selfcheck
from detkern.contracts import FMA, MMA16
from detkern.dtypes import BF16, F16, F32
from detkern.errors import ArgumentError, DeviceError
from detkern.operations.rows.problem import RowKind
from detkern.selfcheck import Outcome


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

    said = selfcheck.refusal(selfcheck.COLUMN_SUM, BF16, "cuda:1", run)
    assert said == "the self-check of column_sum for bf16 on cuda:1 did not finish: out of memory"


def test_what_no_check_may_raise_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        selfcheck.refusal(FMA, F16, "cuda:1", lambda: Outcome(1 // 0, 0, ""))


def test_results_are_of_the_operands_type_or_with_an_accumulator_float32() -> None:
    array, initial = np.zeros((2, 2), np.float16), np.zeros((2, 2), np.float32)
    assert selfcheck.types_of(array, None, "a") == (F16, F16)
    assert selfcheck.types_of(array, initial, "a") == (F16, F32)
    with pytest.raises(ArgumentError, match="dc of int64 has no kernel"):
        selfcheck.types_of(np.zeros(3, np.int64), None, "dc")


def test_reports_of_checks_that_have_run_and_that_have_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    monkeypatch.setattr(selfcheck, "check", lambda contract, *_: DIFFERS if contract == MMA16 else AGREES)
    device = Made()
    for contract in (FMA, MMA16):
        selfcheck.outcome(device, contract, F16, "cuda", "digest", lambda *given: given[1])
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
