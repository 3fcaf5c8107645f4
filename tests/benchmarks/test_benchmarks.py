"""The scripts: what each says where it cannot run, and how the GPU tests and the sanitizers are counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import gpu_tests
from detkern.measure import records

FOLDER = Path(gpu_tests.__file__).parent
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())
ON_A_CPU = {"cpu_gemm", "drawn_report", "fit", "gemm_report", "machine_code", "records", "rekey", "rows_accuracy"}
# What needs PyTorch, and with which arguments where it is not what the script does first.
WITH_TORCH = {name: [] for name in SCRIPTS if name not in (ON_A_CPU - {"rows_accuracy"}) | {"gpu_tests"}}
WITH_TORCH |= {"torch_linear": ["--cpu"]}


def run_without(name: str, arguments: list[str], package: str | None = None) -> str:
    """What a script says on a machine without a GPU and without a package, having ended with status 2."""
    code = (
        f"import runpy, sys; sys.argv = {[name, *arguments]!r}; "
        + (f"sys.modules[{package!r}] = None; " if package else "")
        + f"runpy.run_module('benchmarks.{name}', run_name='__main__')"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(FOLDER.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ON_A_CPU])
def test_without_a_gpu_a_script_says_so(name: str) -> None:
    """A new script is one of these unless ON_A_CPU names it."""
    assert run_without(name, []).startswith("cannot run here: ")


@pytest.mark.parametrize("name", WITH_TORCH)
def test_without_pytorch_a_script_says_so(name: str) -> None:
    assert run_without(name, WITH_TORCH[name], "torch").startswith(
        "cannot run here: PyTorch is not installed; pip install"
    )


def test_scripts_on_a_cpu_are_there() -> None:
    assert set(SCRIPTS) > ON_A_CPU


def test_counts_of_a_test_run(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    assert gpu_tests._counts(junit) == {"passed": 0, "failed": 1, "skipped": 0}
    junit.write_text(
        "<testsuites><testsuite><testcase/><testcase><failure/></testcase><testcase><error/></testcase>"
        "<testcase><skipped/></testcase></testsuite></testsuites>"
    )
    assert gpu_tests._counts(junit) == {"passed": 1, "failed": 2, "skipped": 1}


@pytest.mark.parametrize(
    ("output", "status", "failed", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0, 0),
        ("========= ERROR SUMMARY: 3 errors", 86, 1, 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0, 0),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", 0, 1, 2),
        ("no summary at all", 0, 1, None),
        ("========= ERROR SUMMARY: 0 errors", 1, 1, 0),
    ],
)
def test_what_a_sanitizer_says(
    output: str, status: int, failed: int, errors: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = "========= Error: Race reported between Write access at main"

    def run(command: list[str], log: Path, limit: float) -> tuple[int, float]:
        assert command[1:3] == ["--tool", "racecheck"]
        log.write_text(f"== a test's\n{report}\n{output}\n")
        (tmp_path / "racecheck.xml").write_text("<testsuites><testsuite><testcase/></testsuite></testsuites>")
        return status, 1.5

    monkeypatch.setattr(gpu_tests, "_run", run)
    row = gpu_tests.sanitizer_part("racecheck", tmp_path, 10)
    assert row == {
        "part": "racecheck", "passed": 1, "failed": failed, "skipped": 0, "errors": errors, "seconds": 1.5,
        **({"messages": [report]} if errors else {}),
    }  # fmt: skip


def test_parts_of_an_earlier_run_stay_while_the_sources_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    kernel = tmp_path / "kernel.cu"
    kernel.write_text("one")
    rows = [{"part": "tests", "failed": 0}, {"part": "memcheck", "failed": 1}]
    assert gpu_tests._kept(tmp_path / "gpu-tests.json", ["tests"]) == []
    record = records.write("gpu-tests", rows, gpu="g", driver="1", sources=[kernel], folder=tmp_path)
    assert gpu_tests._kept(record, ["memcheck"]) == [rows[0]]
    kernel.write_text("two")
    assert gpu_tests._kept(record, ["memcheck"]) == []


def test_a_part_that_runs_too_long_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    status, seconds = gpu_tests._run(command, tmp_path / "log", 1)
    assert status != 0
    assert seconds < 20
    assert (tmp_path / "log").read_text() == "begun\n"
