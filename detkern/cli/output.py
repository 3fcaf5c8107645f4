"""Where the commands print, and files that they write."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from rich.console import Console

__all__ = ["is_stdout", "terminal", "write"]


def terminal() -> Console:
    """Standard output, as wide as the terminal; where there is none, COLUMNS or 100 columns."""
    if sys.stdout is None:  # closed by whoever started this process, who wants the exit code alone
        return Console(file=io.StringIO())
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else 100, highlight=False)


def is_stdout(file: Any) -> bool:
    """Whether a `click.File` was given as "-"."""
    return file is not None and getattr(file, "name", "") in ("-", "<stdout>")


def write(file: Any, text: str) -> None:
    """All of `text` into a `click.File`, now: click closes files quietly, so a full disk would go unnoticed there."""
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None
