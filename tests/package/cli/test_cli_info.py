"""`detkern info`: what it says about backends, settings and where they come from, and that it imports no framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import detkern
from detkern import config
from detkern.cli.main import main
from detkern.cpu.backend import CpuBackend
from detkern.dispatch import registry
from detkern.tensors import Device
from detkern.vocabulary.contracts import CONTRACTS


def gathered() -> dict[str, Any]:
    result = CliRunner().invoke(main, ["info", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_this_machine_has() -> None:
    facts = gathered()
    assert facts["detkern"] == detkern.__version__
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["devices"][0] == "cpu"
    (cpu,) = [backend for backend in facts["backends"] if backend["name"] == "cpu"]
    assert cpu["unavailable"] is None
    assert cpu["contracts"] == {name: [d.short for d in c.operands] for name, c in CONTRACTS.items()}
    assert cpu["facts"]["kernels"].startswith("c++ ")
    for backend in facts["backends"]:
        assert backend["unavailable"] is None or len(backend["unavailable"]) > 10, "a reason, not a word"
    here = {row["dtype"]: (row["contract"], row["source"]) for row in facts["defaults"] if row["device"] == "cpu"}
    assert here == {
        "f32": ("fma", "default"),
        "f16": ("mma16", "default"),
        "bf16": ("mma16", "default"),
        "e4m3": ("fp8-block128", "default"),
        "e5m2": ("fp8-block128", "default"),
    }


def test_settings_and_where_they_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "contract", {"bf16": "tree"})
    monkeypatch.setattr(config, "num_threads", 3)
    monkeypatch.setenv("DETKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "cache_dir", str(tmp_path))
    facts = gathered()
    here = {row["dtype"]: (row["contract"], row["source"]) for row in facts["defaults"] if row["device"] == "cpu"}
    assert here["bf16"] == ("tree", "set")
    assert here["f16"] == ("mma16", "default")
    assert (facts["threads"]["count"], facts["threads"]["source"]) == (3, "set")
    assert (facts["cache"]["folder"], facts["cache"]["source"]) == (str(tmp_path), "environment DETKERN_CACHE_DIR")


def test_the_dependent_launch_and_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DETKERN_DEPENDENT_LAUNCH", raising=False)
    monkeypatch.setattr(config, "dependent_launch", True)
    assert gathered()["dependent_launch"] == {"allowed": True, "source": "default"}
    assert "dependent launch  on (default)" in CliRunner(env={"COLUMNS": "120"}).invoke(main, ["info"]).stdout
    config.dependent_launch = False
    assert gathered()["dependent_launch"] == {"allowed": False, "source": "set"}
    assert "dependent launch  off (set)" in CliRunner(env={"COLUMNS": "120"}).invoke(main, ["info"]).stdout
    for value in ("0", "1"):
        monkeypatch.setenv("DETKERN_DEPENDENT_LAUNCH", value)
        config.dependent_launch = value
        wanted = {"allowed": value == "1", "source": "environment DETKERN_DEPENDENT_LAUNCH"}
        assert gathered()["dependent_launch"] == wanted


def test_a_missing_compiler_and_cache_are_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(config, "cache_dir", tmp_path / "file")
    facts = gathered()
    assert facts["compiler"]["command"] is None
    assert "no-such-compiler" in facts["compiler"]["missing"]
    assert "cannot be written" in facts["cache"]["unusable"]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["info"]).stdout
    assert "no-such-compiler: not found" in shown
    assert "cannot be written" in shown


def test_what_a_backend_says_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Talking(CpuBackend):
        def facts(self, device: Device) -> dict[str, str]:
            return {"self-check": f"passed on {device}"}

    class Absent(CpuBackend):
        def unavailable(self, device: Device) -> str | None:
            return "its driver is on holiday"

    for name, backend in (("talking", Talking()), ("absent", Absent())):
        module = types.ModuleType(f"{name}_backend")
        module.BACKEND = backend  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{name}_backend", module)
        row = registry.Row(name, f"{name}_backend", ("cpu",), dispatched=False)
        monkeypatch.setattr(registry, "TABLE", (*registry.TABLE, row))
    unwritten = registry.Row("unwritten", "detkern.no_such_module", ("cpu",), dispatched=False)
    monkeypatch.setattr(registry, "TABLE", (*registry.TABLE, unwritten))
    registry.load.cache_clear()
    try:
        shown = CliRunner(env={"COLUMNS": "120"}).invoke(main, ["info"]).stdout
    finally:
        registry.load.cache_clear()
    assert "self-check: passed on cpu" in shown
    assert "unavailable: its driver is on holiday" in shown
    assert "unavailable: ModuleNotFoundError" in shown


def test_no_framework_is_imported_and_the_module_runs() -> None:
    """A fresh process: settings of the environment, and neither PyTorch nor JAX imported for their versions."""
    code = (
        "import sys; from detkern.cli.main import main\n"
        "try: main(['info', '--json'])\n"
        "finally: print(sorted({'torch', 'jax'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = {**os.environ, "DETKERN_CONTRACT": "bf16=tree", "DETKERN_NUM_THREADS": "1", "DETKERN_CPU": "numpy"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stderr.strip().endswith("[]"), ran.stderr
    facts = json.loads(ran.stdout)
    assert facts["threads"]["source"] == "environment DETKERN_NUM_THREADS"
    assert {"device": "cpu", "dtype": "bf16", "contract": "tree", "source": "environment DETKERN_CONTRACT"} in facts[
        "defaults"
    ]
    (cpu,) = [backend for backend in facts["backends"] if backend["name"] == "cpu"]
    assert cpu["facts"]["kernels"] == "numpy"
    ran = subprocess.run([sys.executable, "-m", "detkern", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"detkern, version {detkern.__version__}"


def test_a_wrong_environment_variable_is_one_line_and_exit_code_2() -> None:
    for variable, value in (("DETKERN_CONTRACT", "mma17"), ("DETKERN_NUM_THREADS", "0")):
        environment = {**os.environ, variable: value}
        command = [sys.executable, "-m", "detkern", "info"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"Error: {variable}: ")
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "info", "info --json", "--help", "--version", "info --help", "fingerprint --contract fma",
        "verify --quick --contract fma --property padding",
    ],
)  # fmt: skip
def test_a_pipe_that_closes_ends_quietly(arguments: str) -> None:
    """The reader has left before the first byte. 141 is what a shell says of a program that SIGPIPE ended."""
    done = _into_a_closed_pipe(arguments, "stdout")
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_into_a_pipe_that_closes() -> None:
    done = _into_a_closed_pipe("verify --backend nothing", "stderr")
    assert (done.returncode, done.stdout) == (141, "")


def _into_a_closed_pipe(arguments: str, stream: str) -> subprocess.CompletedProcess[str]:
    reading, writing = os.pipe()
    os.close(reading)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writing}
    try:
        return subprocess.run([sys.executable, "-m", "detkern", *arguments.split()], **streams, text=True, check=False)
    finally:
        os.close(writing)


def test_head_gets_its_line() -> None:
    ran = subprocess.Popen([sys.executable, "-m", "detkern", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ran.stdout is not None
    assert ran.stderr is not None
    assert ran.stdout.readline() == b"versions\n"
    ran.stdout.close()
    assert ran.wait() in (0, 141)
    assert ran.stderr.read() == b""
    ran.stderr.close()


def test_narrow_tables_keep_devices_and_types() -> None:
    shown = CliRunner(env={"COLUMNS": "40"}).invoke(main, ["info"]).stdout
    assert max(map(len, shown.splitlines())) <= 40
    for dtype in ("f32", "f16", "bf16", "e4m3", "e5m2"):
        assert f"\n  cpu {dtype} " in shown


def test_closed_standard_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process started with `>&-` has no sys.stdout."""
    from detkern.cli.output import terminal

    monkeypatch.setattr(sys, "stdout", None)
    terminal().print("to nobody")
