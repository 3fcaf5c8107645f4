"""The example of docs/examples.md runs."""

from __future__ import annotations

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "examples.md"


def test_the_example_runs() -> None:
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted == 5
    assert outcome.failed == 0
