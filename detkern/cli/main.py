"""The command `detkern` and its subcommands."""

from __future__ import annotations

import importlib
from typing import Any

import click

from .. import __version__, config
from ..errors import DetkernError
from .output import reader_may_leave

__all__ = ["main"]

# Subcommand: the module that holds it, imported when it is asked for, and the line that `detkern --help` shows.
_COMMANDS = {
    "info": ("info", "Backends, devices, versions and the defaults in force."),
    "verify": ("verify", "Check that what detkern promises holds on this machine."),
    "replay": ("replay", "Recompute a product from files and compare it bit for bit."),
    "fingerprint": ("fingerprint", "Digests of results, to compare two machines with diff."),
    "build": ("build", "Compile kernels ahead of their first use."),
}


class _Group(click.Group):
    """Imports a subcommand when it runs, and reports detkern's own errors and those of files without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f".{_COMMANDS[cmd_name][0]}", __package__), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def main(self, *arguments: Any, **options: Any) -> Any:
        with reader_may_leave():  # click prints its errors here
            return super().main(*arguments, **options)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with reader_may_leave():  # --help and --version print here
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with reader_may_leave():
                config.check_environment()
                return super().invoke(ctx)
        except DetkernError as error:
            raise _Refusal(str(error)) from None
        except OSError as error:
            raise _Refusal(f"{error.filename or 'file'}: {error.strerror or error}") from None


class _Refusal(click.ClickException):
    """An expected error: one line on standard error, exit code 2."""

    exit_code = 2


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="detkern")
def main() -> None:
    """Deterministic, batch-invariant matrix products with a written contract for every bit.

    Exit codes of every command: 0 all is well, 1 something differs or failed, 2 the command could not do what was asked
    (wrong usage, an unreadable file, a backend or contract that is not there), 141 the reader of a pipe left early.

    `--json` prints one JSON value on standard output and nothing else there, in every command that has it.
    """
