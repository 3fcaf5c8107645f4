"""`detkern verify`: every property of every available backend, contract and type, checked on this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..dispatch.registry import backend_names
from ..errors import DetkernError
from ..tensors import Device
from ..vocabulary.operands import VERSION
from .call_properties import CALL_CHECKS
from .calls import CallSubject
from .calls import names as names_of_calls
from .options import contracts_option, device, json_option
from .output import print_json, terminal, write
from .page import page
from .properties import FULL, QUICK, Effort, Property
from .references import PROPERTIES
from .results import Result, Tally
from .subject import Subject
from .subjects import OPERATION, find_all

__all__ = ["check", "verify"]

_MARKS = {"passed": ("ok", "green"), "FAILED": ("FAIL", "bold red"), "not offered": ("-", "dim")}


@click.command()
@click.option("--quick", is_flag=True, help="Smaller sizes and fewer kinds of operands: under 30 s on two cores.")
@click.option(
    "--backend", "backends", multiple=True, metavar="NAME", help=f"Only this one: {', '.join(backend_names())}."
)
@contracts_option()
@click.option("--device", "wanted", multiple=True, type=device, metavar="DEVICE", help="Only this one: cpu, cuda:0 …")
@click.option(
    "--operation",
    "operations",
    multiple=True,
    type=OPERATION,
    metavar="NAME",
    help=f"Only this one: {', '.join(names_of_calls())}.",
)
@click.option(
    "--property",
    "names",
    multiple=True,
    type=click.Choice([p.name for p in PROPERTIES]),
    metavar="NAME",
    help=f"Only this one: {', '.join(p.name for p in PROPERTIES)}.",
)
@json_option
@click.option(
    "--json-file",
    type=click.File("w", lazy=False),
    metavar="FILE",
    help="Write what --json prints there, beside the table.",
)
@click.option(
    "--html", "html_file", type=click.File("w", lazy=False), metavar="FILE", help="Write a page with pictures there."
)
def verify(
    quick: bool,
    backends: tuple[str, ...],
    contracts: tuple[str, ...],
    operations: tuple[str, ...],
    wanted: tuple[Device, ...],
    names: tuple[str, ...],
    as_json: bool,
    json_file: Any,
    html_file: Any,
) -> None:
    """Check that what detkern promises holds on this machine.

    Each backend, contract, other operation and type that is available here must give the same bits whatever the batch,
    the row's place, its neighbours, chunking, padding and layout, on every run, and the bits of the CPU replay. Filters
    may be repeated. `--backend native` examines the framework's own matmul, which promises none of this.

    \b
    Examples:
      detkern verify --quick
      detkern verify --contract mma16 --device cuda:0 --html report.html
      detkern verify --backend native --property "batch size"

    \b
    Exit codes: 0 every check passed, 1 at least one failed, 2 nothing could be checked.
    """
    effort = QUICK if quick else FULL
    subjects = find_all(backends, wanted, contracts, operations)
    properties = [p for p in PROPERTIES if not names or p.name in names]
    started = time.perf_counter()
    results = _run(subjects, properties, effort)
    seconds = time.perf_counter() - started
    failed = [result for result in results if result.status == "FAILED"]
    record = _record(results, effort, seconds)
    if json_file is not None:
        write(json_file, json.dumps(record, indent=2) + "\n")
    if html_file is not None:
        write(html_file, page(results, properties, effort, seconds))
    if as_json:
        print_json(record)
    else:
        _print(terminal(), results, properties, seconds, effort)
    sys.exit(1 if failed else 0)


def check(subject: Subject | CallSubject, item: Property, effort: Effort) -> Result:
    """One property of one subject. An error that the library raises meanwhile is a failure, with its message."""
    effort = effort.on(subject.device)
    tally = Tally(subject, item.name, item.across, effort.m)
    started = time.perf_counter()
    try:
        with np.errstate(all="ignore"):  # specials are meant
            if isinstance(subject, Subject):
                item.check(subject, effort, tally)
            elif item.name in CALL_CHECKS:
                CALL_CHECKS[item.name](subject, effort, tally)
            else:
                tally.result.offered = False
                tally.note(f"{item.name} is looked at in products alone")
    except DetkernError as error:
        tally.result.error = f"{type(error).__name__}: {error}"
    tally.result.seconds = time.perf_counter() - started
    return tally.result


def _run(subjects: Sequence[Subject | CallSubject], properties: list[Property], effort: Effort) -> list[Result]:
    """All checks, with a progress bar on standard error where that is a terminal."""
    results = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(subjects) * len(properties))
        for subject in subjects:
            for item in properties:
                progress.update(task, description=f"{subject}: {item.name}")
                results.append(check(subject, item, effort))
                progress.advance(task)
    return results


def _mark(result: Result) -> Text:
    return Text("NaN", "bold red") if result.only_nan_patterns else Text(*_MARKS[result.status])


def _fitting(properties: list[Property], widths: dict[str, int], width: int) -> Iterator[list[Property]]:
    """The properties in parts whose columns fit into `width`,
    so that a narrow terminal cuts no contract or type short."""
    part: list[Property] = []
    left = width
    for item in properties:
        if part and widths[item.name] > left:
            yield part
            part, left = [], width
        part.append(item)
        left -= widths[item.name]
    yield part


def _print(console: Console, results: list[Result], properties: list[Property], seconds: float, effort: Effort) -> None:
    by_place: dict[str, dict[Subject | CallSubject, dict[str, Result]]] = {}
    for result in results:
        place = result.subject.place_name
        if not result.subject.follows:
            place += " (follows no contract; held against the default of each type)"
        by_place.setdefault(place, {}).setdefault(result.subject, {})[result.name] = result
    for place, rows in by_place.items():
        console.print(Text(place, "bold"))
        names = {subject: f"{subject.name} {subject.dtype.short}" for subject in rows}
        longest = max(map(len, names.values()))
        marks = {
            item.name: {subject: _mark(found[item.name]) for subject, found in rows.items()} for item in properties
        }
        widths = {p.name: max(len(p.heading), *(len(mark) for mark in marks[p.name].values())) + 1 for p in properties}
        for part in _fitting(properties, widths, console.width - longest - 1):
            table = Table(box=None, padding=(0, 1, 0, 0))
            table.add_column("", no_wrap=True, min_width=longest)
            for item in part:
                table.add_column(item.heading, justify="center", no_wrap=True)
            for subject, name in names.items():
                table.add_row(name, *(marks[item.name][subject] for item in part))
            console.print(table)
            console.print()
    failures = [result for result in results if result.status == "FAILED"]
    for result in failures:
        console.print(Text(f"FAILED {result.subject}: {result.name}", "bold red"))
        for line in result.reasons():
            console.print(Text(f"  {line}"), soft_wrap=True)
    compared = sum(result.compared for result in results)
    outcome = f"{len(failures)} of {len(results)} checks FAILED" if failures else f"all {len(results)} checks passed"
    console.print(f"{outcome}: {compared:,} elements compared in {seconds:.1f} s ({effort.name})")


def _record(results: list[Result], effort: Effort, seconds: float) -> dict[str, Any]:
    return {
        "what": "detkern verify",
        "detkern": __version__,
        "operands": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "effort": effort.name,
        "seconds": round(seconds, 3),
        "passed": all(result.status != "FAILED" for result in results),
        "results": [
            {
                "backend": result.subject.backend,
                "device": str(result.subject.device),
                "contract": result.subject.name,
                "dtype": result.subject.dtype.name,
                "property": result.name,
                "status": result.status,
                "compared": result.compared,
                "mismatches": result.mismatches,
                "nan_patterns": result.nan_patterns,
                "first": None if result.first is None else {"trial": result.first_trial, **asdict(result.first)},
                "error": result.error,
                "notes": result.notes,
                "seconds": round(result.seconds, 4),
                "trials": [asdict(trial) for trial in result.trials],
            }
            for result in results
        ],
    }
