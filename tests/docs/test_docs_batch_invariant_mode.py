"""The example of docs/batch-invariant-mode.md runs, and the names in it are what the mode covers."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from detkern.errors import ArgumentError
from detkern.torch.mode import coverage, listing

PAGE = Path(__file__).parents[2] / "docs" / "batch-invariant-mode.md"


def test_the_example_runs() -> None:
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert outcome.attempted > 4
    assert outcome.failed == 0


def test_the_lists_are_what_the_code_covers_and_refuses() -> None:
    page = PAGE.read_text()
    assert listing.inserted(page) == page, (
        f"python -m detkern.torch.mode.listing --write {PAGE.relative_to(PAGE.parents[1])}"
    )
    covered, refused = listing.page_parts().values()
    for name in ("mm", "scaled_dot_product_attention", "index_add"):
        assert f"`{name}`" in covered
    for name in coverage.UNCOVERED:
        assert f"`{name}`" in refused


def test_a_handler_that_is_not_listed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coverage.HANDLERS, torch.cumprod, print)
    with pytest.raises(ArgumentError, match="'cumprod'"):
        listing.page_parts()
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="each once"):
        listing.inserted("a page without its comments")
