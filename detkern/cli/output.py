"""Where the commands print, and files that they write."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console

__all__ = ["is_stdout", "terminal"]


def terminal() -> Console:
    """Standard output, as wide as the terminal; where there is none, COLUMNS or 100 columns."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else 100, highlight=False)


def is_stdout(file: Any) -> bool:
    """Whether a `click.File` was given as "-"."""
    return file is not None and getattr(file, "name", "") in ("-", "<stdout>")
