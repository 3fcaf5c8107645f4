"""The examples of docs/pytorch.md run."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"


def test_the_examples_run() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted > 6
    assert outcome.failed == 0
