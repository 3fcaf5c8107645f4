"""docs/command-line.md: its commands print what the page says."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from detkern.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def _shown() -> dict[str, list[str]]:
    """The commands that the page shows, with the lines behind each."""
    shown: dict[str, list[str]] = {}
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for block in (text for language, text in blocks if not language):
        lines: list[str] = []
        for line in block.splitlines():
            if line.startswith("$ "):
                lines = shown.setdefault(line.removeprefix("$ "), [])
            else:
                lines.append(line)
    return shown


def _printed(command: str) -> tuple[int, str]:
    program, *arguments = shlex.split(command)
    assert program == "detkern"
    outcome = CliRunner().invoke(main, arguments)
    return outcome.exit_code, outcome.output


def test_an_audit_of_a_result_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = doctest.testfile(str(PAGE), module_relative=False)
    assert (outcome.attempted, outcome.failed) == (6, 0)
    equal, different = [command for command in _shown() if command.startswith("detkern replay")]
    status, text = _printed(equal)
    assert status == 0
    assert text.splitlines() == _shown()[equal]
    # How many elements differ goes by NumPy's BLAS, and none is possible.
    status, text = _printed(different)
    assert text.splitlines()[0].partition(":")[0] == ("equal" if status == 0 else "DIFFERENT")
    if status:
        words = [line.split()[0] for line in _shown()[different]]
        assert [line.split()[0] for line in text.splitlines()] == words


def test_a_fingerprint_has_the_lines_that_the_page_shows() -> None:
    shown = [line for line in _shown()["detkern fingerprint"] if line != "…"]
    status, text = _printed("detkern fingerprint --contract fma")
    assert status == 0
    assert len(shown) == 4
    assert set(shown) <= set(text.splitlines())


def test_verify_has_the_columns_and_rows_that_the_page_shows() -> None:
    shown = [line.rstrip() for line in _shown()["detkern verify --quick"]]
    names = [line.split()[0] for line in shown[2:] if line.endswith((" ok", " -"))]
    assert len(names) > 14
    status, text = _printed("detkern verify --quick --contract fma --property repeatability")
    assert status == 0
    assert "repeat" in text
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("fma")] == [
        line.split()[:2] for line in shown if line.startswith("fma")
    ]
