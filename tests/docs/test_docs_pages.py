"""README and the pages of docs/: their sizes, and that each link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
COMPILED = {".cu", ".cuh", ".cpp", ".h"}  # of Python's lines ruff says it


def _prose(text: str) -> str:
    """Without blocks of code and code spans, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def _anchors(page: Path) -> set[str]:
    """The fragments that lead into a page: those of its headings, as GitHub makes them, and those that it names."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def test_readme_is_one_page() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert [(number, len(line)) for number, line in enumerate(lines, 1) if len(line) > 110] == []


def test_readme_says_on_its_first_screen_when_not_to_use_it() -> None:
    assert "When not to use it" in "\n".join(README.read_text().splitlines()[:20])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_at_most_120_columns(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [(number, len(line)) for number, line in enumerate(lines, 1) if len(line) > 120] == []


def test_lines_of_kernels_are_at_most_120_columns() -> None:
    sources = [
        path for folder in ("detkern", "tests") for path in (ROOT / folder).rglob("*") if path.suffix in COMPILED
    ]
    assert len(sources) > 50
    long = [
        (path.relative_to(ROOT).as_posix(), number)
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", _prose(page.read_text()))
    broken = []
    for target in targets:
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (fragment and fragment not in _anchors(found)):
            broken.append(target)
    assert broken == []


def test_every_page_and_every_plot_is_linked() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page.read_text()))
        if "://" not in target
    }
    wanted = {*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks" / "results").glob("*/*.png")}
    assert len(wanted) > 12
    assert sorted(path.name for path in wanted - linked) == []


def test_every_table_has_rows_of_one_length() -> None:
    """A cell too many is not shown."""
    wrong = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for table in re.findall(r"(?:^ *\|.*\n)+", text, re.MULTILINE):
            cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
            if len(set(cells)) > 1:
                wrong.append((page.name, table.splitlines()[0]))
    assert wrong == []
