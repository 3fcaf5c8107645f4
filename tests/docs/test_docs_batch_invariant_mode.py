"""The example of docs/batch-invariant-mode.md runs, and the names in it are what the mode covers."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from detkern.torch.mode import coverage

PAGE = Path(__file__).parents[2] / "docs" / "batch-invariant-mode.md"


def test_the_example_runs() -> None:
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted > 4
    assert outcome.failed == 0


def test_every_name_in_the_table_has_a_handler() -> None:
    table = PAGE.read_text().split("## What is covered")[1].split("The backward of")[0]
    first = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| "))
    handled = {coverage.name_of(func).removeprefix("linalg_") for func in (*coverage.HANDLERS, *coverage.ELEMENTWISE)}
    names = {name.removeprefix("linalg.") for name in re.findall(r"`([a-z_.]+)`", first)}
    assert len(names) > 20
    assert names - handled == {"out_dtype", "dtype"}
