"""The contracts as data: their codes, defaults and what the process configures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import resources

import pytest

from detkern import config
from detkern.errors import ArgumentError, ContractUnsupported
from detkern.vocabulary.contracts import (
    CONTRACTS,
    FMA,
    FP8_BLOCK128,
    MMA8,
    MMA16,
    TREE,
    TREE_MMA16,
    TensorCoreStep,
    default_contract,
    get_contract,
)
from detkern.vocabulary.dtypes import BF16, DTYPES, E4M3, E5M2, F16, F32


def header_enum(name: str) -> dict[str, int]:
    """The members of an enum of abi.h, without their prefix."""
    header = resources.files("detkern.abi").joinpath("abi.h").read_text()
    body = re.search(rf"enum {name} {{(.*?)}}", header, re.DOTALL).group(1)
    return {member: int(value) for member, value in re.findall(r"DETKERN_(\w+) = (\d+)", body)}


def test_codes_are_the_headers():
    contracts = {name.upper().replace("-", "_"): contract.code for name, contract in CONTRACTS.items()}
    assert contracts == header_enum("detkern_contract")
    assert {dtype.short.upper(): dtype.code for dtype in DTYPES} == header_enum("detkern_dtype")


def test_the_table():
    """What the contracts promise by name: written out a second time, so that no edit of the table goes unseen."""
    rows = {
        "fma": ((F32, F16, BF16), None, None, 1, 1, True, 1),
        "mma16": ((F16, BF16), TensorCoreStep(16, 25, -133, 24), None, 1, 16, True, 16),
        "mma8": ((F16, BF16), TensorCoreStep(8, 24, -132, 24), None, 1, 8, True, 8),
        "tree": ((BF16, F16), None, 32, 1, None, False, None),
        "tree-mma16": ((BF16, F16), TensorCoreStep(16, 25, -133, 24), 32, 1, None, False, None),
        "fp8-block128": ((E4M3, E5M2), TensorCoreStep(32, 13, -133, 14), None, 128, 128, True, 128),
    }
    assert rows == {
        name: (c.operands, c.step, c.leaf, c.k_multiple, c.accumulates, c.padding, c.front)
        for name, c in CONTRACTS.items()
    }


def test_names():
    for name, contract in CONTRACTS.items():
        assert contract.name == name == str(contract)
        assert get_contract(name) is contract
    for wrong in ("mma", "FMA", "", None, 1):
        with pytest.raises(ContractUnsupported, match=r"does not exist; .*fma, mma16, mma8, tree, tree-mma16"):
            get_contract(wrong)


@pytest.mark.parametrize(
    ("device", "capability", "half"),
    [
        ("cpu", None, MMA16),
        ("cuda", (9, 0), MMA16),
        ("cuda", (10, 0), MMA16),
        ("cuda", (12, 0), MMA16),
        ("cuda", (8, 0), MMA8),
        ("cuda", (8, 6), MMA8),
        ("cuda", (8, 9), MMA8),
        ("musa", None, FMA),
        ("rocm", None, FMA),
        ("ascend", None, TREE),
    ],
)
def test_defaults_by_type_and_device(device, capability, half):
    assert default_contract(F32, device, capability) == FMA
    assert default_contract(F16, device, capability) == half
    assert default_contract(BF16, device, capability) == half
    assert default_contract(E4M3, device, capability) == FP8_BLOCK128
    assert default_contract(E5M2, device, capability) == FP8_BLOCK128


@pytest.fixture
def restored():
    before = config.contract
    yield
    config.contract = before


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("value", "bound"),
    [
        (None, {}),
        ("mma16", {F16: MMA16, BF16: MMA16}),
        ("fma", {F32: FMA, F16: FMA, BF16: FMA}),
        ("fp8-block128", {E4M3: FP8_BLOCK128, E5M2: FP8_BLOCK128}),
        ("f16=mma8", {F16: MMA8}),
        ("f32=fma, bfloat16 = tree-mma16", {F32: FMA, BF16: TREE_MMA16}),
        ({"float16": "tree", "bf16": "mma8"}, {F16: TREE, BF16: MMA8}),
        ({}, {}),
    ],
)
def test_a_configured_default_binds_the_types_it_lists(value, bound):
    config.contract = value
    assert config.contract == value
    assert {dtype: config.configured_contract(dtype) for dtype in DTYPES} == {**dict.fromkeys(DTYPES), **bound}


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("mma32", ContractUnsupported, "mma32"),
        ("f32=mma16", ArgumentError, r"mma16 does not take f32; it takes f16, bf16"),
        ("f64=fma", ArgumentError, r"'f64' is not an operand type; .*f32, f16, bf16, e4m3, e5m2"),
        ({"f32": "mm"}, ContractUnsupported, "mm"),
        ({"f32": None}, ContractUnsupported, "None"),
        (16, ArgumentError, "contract must be"),
    ],
)
def test_a_wrong_default_is_refused_at_once(value, error, message):
    config.contract = "fma"
    with pytest.raises(error, match=message):
        config.contract = value
    assert config.contract == "fma"
    assert config.configured_contract(F16) == FMA


def in_a_process(contract: str | None, code: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "DETKERN_CONTRACT"}
    if contract is not None:
        environment["DETKERN_CONTRACT"] = contract
    return subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_environment_sets_the_default():
    code = """
import numpy, detkern
a, b = numpy.ones((2, 4), numpy.float16), numpy.ones((4, 3), numpy.float16)
print(detkern.explain(a, b).contract, detkern.explain(a, b, contract="mma16").contract)
print(detkern.explain(a.astype("f4"), b.astype("f4")).contract)
detkern.config.contract = None
print(detkern.explain(a, b).contract)
"""
    for value, expected in (
        (None, "mma16 mma16\nfma\nmma16\n"),
        ("", "mma16 mma16\nfma\nmma16\n"),
        ("tree", "tree mma16\nfma\nmma16\n"),
        ("f16=mma8,f32=fma", "mma8 mma16\nfma\nmma16\n"),
    ):
        done = in_a_process(value, code)
        assert done.stdout == expected, done.stderr


def test_a_wrong_environment_is_named():
    product = "import numpy, detkern; detkern.gemm(numpy.ones((1, 1), 'f4'), numpy.ones((1, 1), 'f4'))"
    done = in_a_process("mma17", product)
    assert done.returncode != 0
    assert "ContractUnsupported: DETKERN_CONTRACT: contract='mma17' does not exist" in done.stderr
