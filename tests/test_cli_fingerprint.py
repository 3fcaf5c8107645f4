"""`detkern fingerprint`: the recorded digests, from C++ and from NumPy, and text that two machines can compare."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from detkern.cli import references
from detkern.cli.fingerprint import fingerprint_of
from detkern.cli.main import main
from detkern.cli.subject import Subject, find
from detkern.contracts import CONTRACTS
from detkern.dtypes import by_name
from detkern.tensors import Device

# A line changes only together with the version of the fingerprint or of the operands: a contract's bits never do.
RECORDED = """\
# detkern fingerprint 1, operands 1: contract, type, SHA-256 of the results
fma          f32  c25f361b3e752404c94488aae8226379678b2708b586f8b5570f211c5406a28c
fma          f16  de94020b4dec4250fa405758722477b29ec7322c9bab2630f38dc6216d182976
fma          bf16 85b432be88eb3ea5641eb206ef2edcc322cc005491895be219de94a6007ba20f
mma16        f16  6e6bda6a1bfbecdd7433bb284e43d747d161fb9a312fa70d402a5647b3097689
mma16        bf16 012537e3774f23aaabb6fb2c42b7e629ca3e92426a9503df66aaf71193993d33
mma8         f16  20f17a75606fd5f2dfabc9b3d488a53272f97696a9850d565c29e9d255c5db6c
mma8         bf16 c5608037f7000bef5a45db2438e84f6016bd9f8eff06ef1ef8c3160dfa1a9baf
tree         bf16 e1db590774284029f886956190ab516cfa1852de430dd94e29b4567df58b6439
tree         f16  f62d93c507abaecbaec1d8c9a8ff3a7570db9d6f3be179b46861960959f33556
tree-mma16   bf16 c3ee6047bfd518d1c1c2cdb8ba03cc3d5ca376f42661815d4090a37e80cf56be
tree-mma16   f16  68baceaeb53d5bc080688917ef5448048405183afa1ecda05d453e2a3bd0ab5f
fp8-block128 e4m3 34dbd85f4faaecdf762a9415073872888e25ac15acae13c340587037b6c0b55f
fp8-block128 e5m2 694d4d4297be2ebd95ee586d13db683e2cdb7f4108773d675a2ec08383d39cec
"""


def _digest(contract: str, dtype: str) -> str:
    (line,) = [line for line in RECORDED.splitlines() if line.split()[:2] == [contract, dtype]]
    return line.split()[2]


def test_the_recorded_digests() -> None:
    result = CliRunner().invoke(main, ["fingerprint"])
    assert result.exit_code == 0, result.output
    assert result.stdout == RECORDED


@pytest.mark.parametrize(("contract", "dtype"), [("mma16", "bf16"), ("tree", "f16")])
def test_the_numpy_replay_gives_the_recorded_digests(
    contract: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(subject: Subject, operands: Any, **arguments: Any) -> np.ndarray:
        with np.errstate(all="ignore"):
            return references.replay(subject, operands, **arguments)

    monkeypatch.setattr(Subject, "product", product)
    wanted = by_name(dtype)
    assert wanted is not None
    subject = Subject("cpu", Device("cpu"), CONTRACTS[contract], wanted)
    assert fingerprint_of(subject) == _digest(contract, dtype)


def test_one_bit_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    (subject,) = find(("cpu",), (), ("fma",))[-1:]
    product, spoiled = Subject.product, []

    def once(self: Subject, *arguments: Any, **options: Any) -> np.ndarray:
        result = product(self, *arguments, **options)
        if result.size and not spoiled:
            spoiled.append(True)
            result.view(f"u{result.itemsize}")[-1, -1] ^= 1
        return result

    monkeypatch.setattr(Subject, "product", once)
    assert fingerprint_of(subject) != _digest("fma", "bf16")


def test_json() -> None:
    result = CliRunner().invoke(main, ["fingerprint", "--contract", "mma16", "--json"])
    assert json.loads(result.stdout) == {
        "fingerprint": 1,
        "operands": 1,
        "results": [
            {"contract": "mma16", "dtype": "float16", "sha256": _digest("mma16", "f16")},
            {"contract": "mma16", "dtype": "bfloat16", "sha256": _digest("mma16", "bf16")},
        ],
    }


def test_filters() -> None:
    result = CliRunner().invoke(main, ["fingerprint", "--contract", "tree", "--device", "cpu", "--backend", "cpu"])
    lines = RECORDED.splitlines()
    assert CliRunner().invoke(main, ["fingerprint", "--contract", "tree", "--backend", "cpu"]).stdout == result.stdout
    assert result.stdout.splitlines() == [lines[0], *(line for line in lines if line.startswith("tree "))]
    result = CliRunner().invoke(main, ["fingerprint", "--device", "cuda:63"])
    assert result.exit_code == 2
    assert "--device cuda:63: not here" in result.stderr
    result = CliRunner().invoke(main, ["fingerprint", "--backend", "native", "--contract", "fma"])
    assert result.exit_code == 2
    assert "follows no contract" in result.stderr
