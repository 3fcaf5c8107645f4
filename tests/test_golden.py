"""The CPU replay gives the bits that a GPU gave: digests recorded there (tests/golden), computed here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.record import FOLDER, Case, cases, host_operands, operation_digests, operation_samples

import detkern
from detkern.operations.operation import replayed
from detkern.operations.table import OPERATIONS
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS

RECORDS = sorted(FOLDER.glob("*.json"))


def _replayed(case: Case) -> str:
    a, b, bias, initial = host_operands(case)
    result = detkern.gemm(
        a, b, bias=bias, out=initial, accumulate=case.accumulate, contract=case.contract, backend="cpu",
        out_dtype=None if case.accumulate else case.out,
    )  # fmt: skip
    return operands.digest(result)


def test_every_operation_has_samples_and_the_replay_their_bits() -> None:
    """What a GPU's digests are compared with, where a record has them (those of the operations were recorded later)."""
    computed = operation_digests(np.array, np.asarray, "cpu")
    assert len(computed) == len({key for key, *_ in operation_samples()})
    assert {key.split()[0] for key in computed} == {v for o in OPERATIONS for v in o.variants if v not in CONTRACTS}
    for key, _, operation, sample in operation_samples():
        assert operands.digest(replayed(operation, sample)) == computed[key], key
    for record in RECORDS:
        recorded = _read(record).get("operations", {})
        assert {key: digest for key, digest in recorded.items() if computed.get(key) != digest} == {}


def _read(record: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(record.read_text())
    return content


def test_there_is_a_record_of_the_h200() -> None:
    assert FOLDER / "h200.json" in RECORDS


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_is_of_this_generator_and_of_every_case(record: Path) -> None:
    content = _read(record)
    assert content["operands"] == operands.VERSION
    recorded = [Case(**{key: value for key, value in case.items() if key != "digest"}) for case in content["cases"]]
    contracts = list(dict.fromkeys(case.contract for case in recorded))
    assert recorded == list(cases(contracts))
    assert {(case.contract, case.dtype) for case in recorded} == {
        (name, dtype.short) for name in contracts for dtype in CONTRACTS[name].operands
    }


@pytest.mark.parametrize("contract", ["fma", "mma16", "tree", "tree-mma16"])
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_the_replay_gives_the_recorded_bits(record: Path, contract: str) -> None:
    content = [case for case in _read(record)["cases"] if case["contract"] == contract]
    assert content, f"{record.name} has no case of {contract}"
    differing = []
    for recorded in content:
        digest = recorded.pop("digest")
        case = Case(**recorded)
        if _replayed(case) != digest:
            differing.append(dataclasses.asdict(case))
    assert differing == []
