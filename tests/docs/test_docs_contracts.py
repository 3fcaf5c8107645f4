"""The worked examples of docs/contracts.md run, and their steps are the ones written there."""

from __future__ import annotations

import doctest
import re
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from detkern.vocabulary.contracts import CONTRACTS, MMA8, MMA16, default_contract
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32

PAGE = Path(__file__).parents[2] / "docs" / "contracts.md"


def test_the_examples_run():
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted > 30
    assert outcome.failed == 0


def units(term: Fraction, exponent: int, fraction_bits: int) -> int:
    """A term in units of 2^(exponent - fraction_bits), truncated toward zero."""
    return int(term / Fraction(2) ** (exponent - fraction_bits))


@pytest.mark.parametrize(
    ("heading", "bits", "steps"),
    [
        # Each step: E, the terms, and what the text says of their units, of the sum, and of the sum truncated.
        (
            "### `mma16`",
            MMA16.step,
            [
                (0, ["1", "3/134217728", "-3/67108864"], [33554432, 0, -1], 33554431, 33554430),
                (-1, ["16777215/16777216", "1/8388608"], [67108860, 8], 67108868, 2**26),
            ],
        ),
        (
            "### `mma8`",
            MMA8.step,
            [
                (0, ["1", "3/134217728", "-3/67108864"], [16777216, 0, 0], 2**24, 2**24),
                (0, ["1", "1/8388608"], [16777216, 2], 16777218, 16777218),
            ],
        ),
        (
            "## `tree` and `tree-mma16`",
            MMA16.step,
            [(8, ["256", "1", "3/131072"], [2**25, 2**17, 3], 33685507, 33685504)],
        ),
        (
            "## `fp8-block128`",
            CONTRACTS["fp8-block128"].step,
            [
                (0, ["81/64", "3/32768", "1/8192"], [10368, 0, 1], 10369, 10369),
                (1, ["10369/8192", "7/2"], [5184, 14336], 19520, 19520),
                (2, ["305/64"], [9760], 9760, 9760),
            ],
        ),
    ],
    ids=["mma16", "mma8", "tree-mma16", "fp8-block128"],
)
def test_the_steps_by_hand_add_up(heading, bits, steps):
    text = PAGE.read_text().split(f"\n{heading}\n")[1].split("\n#")[0].replace("\n", " ")
    for exponent, terms, in_units, total, kept in steps:
        assert [units(Fraction(term), exponent, bits.fraction_bits) for term in terms] == in_units
        assert sum(in_units) == total
        drop = max(total.bit_length() - bits.significant_bits, 0)
        assert total >> drop << drop == kept
        assert f"E = {exponent}".replace("-", "−") in text
        assert f"2^{exponent - bits.fraction_bits}".replace("-", "−") in text
        for number in (*in_units, total, kept):
            power = f"2^{abs(number).bit_length() - 1}"
            written = abs(number) < 10 or str(number) in text or (number & (number - 1) == 0 and power in text)
            assert written or f"{power} + {number - 2 ** (number.bit_length() - 1)}" in text, number


def test_the_table_of_defaults():
    devices = [("cpu", None), ("cuda", (9, 0)), ("cuda", (8, 0)), ("musa", None), ("ascend", None)]
    for label, dtypes in (("float32", (F32,)), ("float16, bfloat16", (F16, BF16)), ("float8", (E4M3,))):
        row = re.search(rf"^\| {label} \|(.*)\|$", PAGE.read_text(), re.MULTILINE).group(1)
        names = [cell.strip().strip("`") for cell in row.split("|")]
        for dtype in dtypes:
            assert names == [default_contract(dtype, kind, capability).name for kind, capability in devices]


def test_the_table_of_contracts():
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    described = {name: (operands, arithmetic) for name, operands, arithmetic in rows if "float" in operands}
    assert list(described) == list(CONTRACTS)
    for name, contract in CONTRACTS.items():
        operands, arithmetic = described[name]
        assert set(re.findall(r"\b(?:float|bfloat)\d+(?:_\w+)?", operands.split(", with")[0])) == {
            dtype.name for dtype in contract.operands
        }
        if contract.step is not None and contract.leaf is None:
            for number in (contract.step.group, contract.step.fraction_bits, contract.step.significant_bits):
                assert str(number) in arithmetic


def test_the_tables_of_pieces():
    rows = dict(
        re.findall(
            r"^\| (`.*`) \| (.*) \|$",
            PAGE.read_text().split("where the pieces start")[1].split("\n## ")[0],
            re.MULTILINE,
        )
    )
    for names, where in rows.items():
        for name in re.findall(r"`([\w-]+)`", names):
            expected = {None: "no promise", 1: "any k"}.get(CONTRACTS[name].accumulates)
            assert where == (expected or f"multiples of {CONTRACTS[name].accumulates}")


def test_numbers_of_the_formats():
    """What rule 1 says of subnormal operands."""
    assert "bf16 −126, f16 −14, e4m3 −6, e5m2 −14" in PAGE.read_text()
    for dtype, smallest in (("bfloat16", -126), ("float16", -14), ("float8_e4m3fn", -6), ("float8_e5m2", -14)):
        assert ml_dtypes.finfo(getattr(ml_dtypes, dtype, np.float16)).minexp == smallest
