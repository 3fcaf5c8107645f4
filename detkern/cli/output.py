"""Where the commands print, files that they write, and pipes whose reader leaves."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console

__all__ = ["print_json", "reader_may_leave", "terminal", "write"]

_SIGPIPE = 128 + 13  # what a shell says of a program that SIGPIPE ended


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave the error to `reader_may_leave`; rich would end with status 1,
        which here says that something differs."""
        raise  # noqa: PLE0704  rich calls this while it handles the BrokenPipeError


def terminal() -> Console:
    """Standard output, as wide as the terminal; where there is none, COLUMNS or 100 columns."""
    if sys.stdout is None:  # closed by whoever started this process, who wants the exit code alone
        return Console(file=io.StringIO())
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return _Console(width=None if known else 100, highlight=False)


def print_json(record: Any) -> None:
    """What `--json` of every command prints: one JSON value on standard output."""
    click.echo(json.dumps(record, indent=2))


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End quietly with status 141 where the reader of a pipe leaves (`detkern info | head -1`)."""
    try:
        yield
    except BrokenPipeError:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except BrokenPipeError:  # what is left in it would fail once more when Python ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(_SIGPIPE) from None


def write(file: Any, text: str) -> None:
    """All of `text` into a `click.File`, now: click closes files quietly, so a full disk would go unnoticed there."""
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from None
