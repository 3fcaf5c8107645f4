"""The process defaults, their checks and their environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import detkern
from detkern import config
from detkern.config import configured_contract
from detkern.vocabulary.dtypes import BF16, F16, F32


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = config.contract, config.num_threads, config.cache_dir, config.dependent_launch
    yield
    config.contract, config.num_threads, config.cache_dir, config.dependent_launch = before


def test_a_bare_name_binds_the_types_that_it_lists() -> None:
    config.contract = "mma8"
    assert config.contract == "mma8"
    assert configured_contract(BF16).name == configured_contract(F16).name == "mma8"
    assert configured_contract(F32) is None
    config.contract = None
    assert configured_contract(BF16) is None


def test_a_mapping_or_its_text_binds_each_type() -> None:
    for value in ({"f32": "fma", "bfloat16": "tree"}, "f32=fma, bf16=tree"):
        config.contract = value
        assert configured_contract(F32).name == "fma"
        assert configured_contract(BF16).name == "tree"
        assert configured_contract(F16) is None


def test_a_mapping_is_copied() -> None:
    mine = {"f32": "fma"}
    config.contract = mine
    mine["bf16"] = "tree"
    assert config.contract == {"f32": "fma"}
    assert configured_contract(BF16) is None
    with pytest.raises(TypeError):
        config.contract["bf16"] = "tree"


def test_settings_are_not_deleted() -> None:
    with pytest.raises(detkern.ArgumentError, match="set it to None"):
        del config.contract
    assert config.contract is None


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [("contract", "tf32", detkern.ContractUnsupported, "'tf32'"),
     ("contract", {"f64": "fma"}, detkern.ArgumentError, "'f64' is not an operand type; the types are f32"),
     ("contract", {"f32": "mma16"}, detkern.ArgumentError, "mma16 does not take f32; it takes f16, bf16"),
     ("contract", 16, detkern.ArgumentError, "a contract's name, a mapping"),
     ("contract", "f32=", detkern.ContractUnsupported, "contract=''"),
     ("num_threads", 0, detkern.ArgumentError, "from 1 to"),
     ("num_threads", True, detkern.ArgumentError, "from 1 to"),
     ("num_threads", float("inf"), detkern.ArgumentError, "not inf"),
     ("num_threads", 1 << 32, detkern.ArgumentError, "not 4294967296"),
     ("num_threads", "many", detkern.ArgumentError, "'many'"),
     ("num_threads", 2.5, detkern.ArgumentError, "2.5"),
     ("cache_dir", 7, detkern.ArgumentError, "cache_dir must be a path"),
     ("cache_dir", "~nobody-of-this-name/x", detkern.ArgumentError, "home directory"),
     ("precision", "high", detkern.ArgumentError, "it has contract, num_threads, cache_dir and dependent"),
     ("dependent_launch", "yes", detkern.ArgumentError, "dependent_launch must be True or False (1 or 0 in the"),
     ("dependent_launch", 0.5, detkern.ArgumentError, "not 0.5"),
     ("dependent_launch", 2, detkern.ArgumentError, "not 2")],
)  # fmt: skip
def test_a_wrong_value_is_refused_and_changes_nothing(name: str, value: object, error: type, said: str) -> None:
    config.contract, config.num_threads, config.dependent_launch = "fma", 3, False
    with pytest.raises(error) as raised:
        setattr(config, name, value)
    assert said in str(raised.value)
    assert (config.contract, config.num_threads, config.dependent_launch) == ("fma", 3, False)
    assert configured_contract(BF16).name == "fma"


def test_paths_and_numbers_are_converted() -> None:
    config.cache_dir = "~/somewhere"
    assert config.cache_dir == Path.home() / "somewhere"
    config.num_threads = "4"
    assert config.num_threads == 4


def test_the_dependent_launch_is_on_until_it_is_switched_off() -> None:
    config.dependent_launch = None
    assert config.dependent_launch is True
    for off, on in ((False, True), ("0", "1")):
        config.dependent_launch = off
        assert config.dependent_launch is False
        config.dependent_launch = on
        assert config.dependent_launch is True


def with_environment(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True)


def test_environment_variables() -> None:
    code = "from detkern import config; print(config.contract, config.num_threads, config.cache_dir)"
    ran = with_environment(code, DETKERN_CONTRACT="bf16=tree", DETKERN_NUM_THREADS="2", DETKERN_CACHE_DIR="/tmp/x")
    assert ran.stdout.split() == ["bf16=tree", "2", "/tmp/x"]
    switch = "from detkern import config; print(config.dependent_launch)"
    for value, wanted in (("0", "False"), ("1", "True"), ("", "True")):
        assert with_environment(switch, DETKERN_DEPENDENT_LAUNCH=value).stdout.split() == [wanted]
    assert (
        "DETKERN_DEPENDENT_LAUNCH: dependent_launch must be"
        in with_environment(switch, DETKERN_DEPENDENT_LAUNCH="off").stderr
    )
    read = "import detkern; print('imported'); detkern.config.num_threads"
    ran = with_environment(read, DETKERN_NUM_THREADS="none")
    assert ran.returncode != 0
    assert ran.stdout == "imported\n"  # the error comes where the setting is read, until another value is set
    ran = with_environment("import detkern; detkern.config.num_threads = 3", DETKERN_NUM_THREADS="none")
    assert ran.returncode == 0
    ran = with_environment(read, DETKERN_NUM_THREADS="none")
    assert "DETKERN_NUM_THREADS: num_threads must be a whole number" in ran.stderr
    ran = with_environment("import detkern", DETKERN_CONTRACT="")
    assert ran.returncode == 0
