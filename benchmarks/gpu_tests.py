"""The GPU tests and the sanitizers on this GPU, recorded: `python -m benchmarks.gpu_tests [--output DIR] [--parts …]`.

Parts: `compile` puts every kernel into the cache with all cores; `tests` runs `pytest -m gpu`; `memcheck`, `racecheck`,
`initcheck` and `synccheck` run compute-sanitizer over the tests marked `sanitizer`; `golden` records tests/golden's
digests (into DIR, if given). Writes <DIR or benchmarks/results/<gpu>>/gpu-tests.json, one row a part, and with --output
all parts' output beside it; rows of parts that are not run stay from the recorded run while the sources are the same.
Ends with status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as tree
from pathlib import Path
from typing import Any

from detkern.measure import records, timing

SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
PARTS = ("compile", "tests", *SANITIZERS, "golden")
# JAX otherwise takes most of the device's memory at its first use.
_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(records.ROOT), os.environ.get("PYTHONPATH")])),
    "PYTHONUNBUFFERED": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
_MESSAGES = 60  # lines of a sanitizer, at most, in the record
_ERROR = 86  # what compute-sanitizer is told to end with where it found an error


def _run(command: list[str], log: Path, limit: float) -> tuple[int, float]:
    """(status, seconds) of a command whose output goes to `log` and to this one's."""
    print("+", " ".join(command), flush=True)
    start = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=records.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=os.environ | _ENVIRONMENT,
        )  # fmt: skip
        assert process.stdout is not None
        watch = _Limit(process, limit)
        for line in process.stdout:
            file.write(line)
            print(line, end="", flush=True)
        status = process.wait()
        watch.stop()
    return status, time.perf_counter() - start


class _Limit:
    """Ends a process that runs too long."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        self._timer = threading.Timer(seconds, process.kill)
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()


def _counts(junit: Path) -> dict[str, int]:
    """passed, failed and skipped of a JUnit file; a test session that broke off counts as one failure."""
    if not junit.exists():
        return {"passed": 0, "failed": 1, "skipped": 0}
    cases = list(tree.parse(junit).iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - failed - skipped, "failed": failed, "skipped": skipped}


def _pytest(marker: str, junit: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marker,
        f"--junitxml={junit}",
        *arguments,
    ]


def compile_part(logs: Path, limit: float) -> dict[str, Any]:
    """Every kernel of the backend for this device, and mma8's."""
    code = "import sys; sys.path.insert(0, 'tests'); import cu_device; print(cu_device.compile_all())"
    status, seconds = _run([sys.executable, "-c", code], logs / "compile.log", limit)
    kernels = re.findall(r"^(\d+)$", (logs / "compile.log").read_text(), re.MULTILINE)
    return {
        "part": "compile",
        "kernels": int(kernels[-1]) if kernels else 0,
        "failed": int(status != 0),
        "seconds": round(seconds, 1),
    }


def tests_part(logs: Path, limit: float, select: str | None, processes: int) -> dict[str, Any]:
    """`pytest -m gpu`, the whole suite or what `select` (pytest's -k) leaves of it; in several processes by
    pytest-xdist."""
    junit = logs / "tests.xml"
    # By name, so that tests of other things need not be importable here.
    files = [
        str(path)
        for path in sorted((records.ROOT / "tests").rglob("test_*.py"))
        if re.search(r"\bgpu\b|\bframeworks\b", path.read_text())
    ]
    extra = ["--durations=15", *files, *(["-k", select] if select else [])]
    if processes > 1:
        extra += ["-n", str(processes), "--dist", "loadfile"]  # modules have fixtures that compile
    status, seconds = _run(_pytest("gpu", junit, *extra), logs / "tests.log", limit)
    counts = _counts(junit)
    counts["failed"] += int(status != 0 and not counts["failed"])
    return {"part": "tests", **counts, "processes": processes, "seconds": round(seconds, 1)}


def sanitizer_part(tool: str, logs: Path, limit: float) -> dict[str, Any]:
    """One tool of compute-sanitizer over the tests marked for it."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    junit = logs / f"{tool}.xml"
    command = [program, "--tool", tool, "--error-exitcode", str(_ERROR), "--print-limit", "50"]
    if tool == "memcheck":
        # cuda-bindings asks the driver for all functions it knows of, and an older driver refuses the newest. What
        # detkern itself calls raises where it fails.
        command += ["--report-api-errors", "no"]
    command += _pytest("sanitizer", junit, "tests/package/cu/test_cu_gpu_sanitizer.py")
    try:
        status, seconds = _run(command, logs / f"{tool}.log", limit)
    except OSError as error:
        print(f"{tool}: {error}")
        return {"part": tool, "passed": 0, "failed": 1, "skipped": 0, "errors": None, "seconds": 0.0}
    text = (logs / f"{tool}.log").read_text()
    # "ERROR SUMMARY: 0 errors", and racecheck's "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)".
    summary = re.findall(r"SUMMARY: (\d+) (?:errors?|hazards?)", text)
    errors = int(summary[-1]) if summary else None
    counts = _counts(junit)
    counts["failed"] += int((status != 0 or errors != 0) and not counts["failed"])
    row = {"part": tool, **counts, "errors": errors, "seconds": round(seconds, 1)}
    # What may not come again is kept.
    said = [line for line in text.splitlines() if line.startswith("=========") and "SUMMARY" not in line]
    return {**row, "messages": said[:_MESSAGES]} if errors else row


def golden_part(logs: Path, limit: float, folder: Path | None) -> dict[str, Any]:
    """Record the digests that the CPU replay is held to."""
    command = [sys.executable, "-m", "tests.golden.record"]
    if folder is not None:
        command += ["--output", str(folder)]
    status, seconds = _run(command, logs / "golden.log", limit)
    return {"part": "golden", "failed": int(status != 0), "seconds": round(seconds, 1)}


def main() -> int:
    """Run the parts, record them. Status 1 where something failed."""
    parser = argparse.ArgumentParser(description="Run the GPU tests and the sanitizers, and record how they came out.")
    parser.add_argument("--output", type=Path, help="folder for the record and the logs, instead of the results folder")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--select", help="pytest's -k for the part `tests`")
    parser.add_argument("--processes", type=int, default=1, help="of the part `tests` (more than one: by pytest-xdist)")
    parser.add_argument("--limit", type=float, default=500, help="seconds after which a part is ended (default 500)")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}")

    from detkern.cu.device import describe, missing

    timing.leave_if(missing(0))
    facts = describe(0)
    folder = arguments.output.resolve() if arguments.output else None
    rows = _kept(records.RESULTS / records.slug(facts.name) / "gpu-tests.json", parts)
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch)
        for part in parts:
            if part == "compile":
                row = compile_part(logs, arguments.limit)
            elif part == "tests":
                row = tests_part(logs, arguments.limit, arguments.select, arguments.processes)
            elif part == "golden":
                row = golden_part(logs, arguments.limit, folder)
            else:
                row = sanitizer_part(part, logs, arguments.limit)
            rows.append(row)
            _show(row)
            path = records.write(
                "gpu-tests", rows, gpu=facts.name, driver=facts.driver, sources=records.cuda_sources(), folder=folder
            )
            if folder is not None:
                with (folder / "gpu-tests.log").open("a") as all_logs:
                    all_logs.write(f"== {part}\n{(logs / f'{part}.log').read_text()}")
    print(path)
    for row in rows:
        _show(row)
    return int(any(row["failed"] for row in rows))


def _kept(record: Path, parts: list[str]) -> list[dict[str, Any]]:
    """The rows of an earlier run on the same sources, of other parts than those to run now."""
    if not record.exists() or records.changed_sources(record):
        return []
    return [row for row in json.loads(record.read_text())["rows"] if row["part"] not in parts]


def _show(row: dict[str, Any]) -> None:
    print("==", records.shown(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
