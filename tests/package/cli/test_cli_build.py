"""`detkern build cuda` and `cpu`: compiled with no GPU, only once, and said in one line on standard error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from c_library import HEADER, STUB
from click.testing import CliRunner

from detkern import config
from detkern.abi.build import Recipe, find_compiler
from detkern.cli.main import main
from detkern.cpu import compiled as cpu_compiled
from detkern.cu import ahead, column_sum, device, linear_logp_launch, linear_logp_wgmma, loader, rows, scatter_sum
from detkern.cu.backend import offered
from detkern.vocabulary.contracts import MMA8, MMA16

pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[loader.KernelBuild], str]]:
    """What would be compiled, for which architecture."""
    calls: list[tuple[list[loader.KernelBuild], str]] = []

    def compile_ahead(wanted: list[loader.KernelBuild], architecture: str, processes: int) -> Any:
        calls.append((list(wanted), architecture))
        return iter([(build, 0.1) for build in wanted])

    monkeypatch.setattr(ahead, "compile_ahead", compile_ahead)
    monkeypatch.setattr(config, "cache_dir", tmp_path)
    return calls


def test_all_that_a_capability_offers(compiled: list[tuple[list[loader.KernelBuild], str]]) -> None:
    result = CliRunner().invoke(main, ["build", "cuda", "--capability", "9.0"])
    assert result.exit_code == 0, result.output
    ((wanted, architecture),) = compiled
    assert architecture == "sm_90a"
    assert (
        wanted
        == ahead.builds(offered((9, 0)), (9, 0))
        + column_sum.builds()
        + rows.builds((9, 0))
        + scatter_sum.builds()
        + linear_logp_launch.builds()
        + linear_logp_wgmma.builds()
    )
    assert MMA16 in offered((9, 0))
    assert MMA8 not in offered((9, 0))
    assert result.stdout.startswith(f"{len(wanted)} kernels for sm_90a in ")
    assert result.stdout.count("\n") == 1
    assert result.stderr.startswith(f"compiling {len(wanted)} kernels for sm_90a, ")
    assert result.stderr.count("\n") == 1


def test_one_contract_of_an_older_capability(compiled: list[tuple[list[loader.KernelBuild], str]]) -> None:
    result = CliRunner().invoke(main, ["build", "cuda", "--capability", "8.6", "--contract", "mma8"])
    assert result.exit_code == 0, result.output
    ((wanted, architecture),) = compiled
    assert architecture == "sm_86"
    assert wanted == ahead.builds([MMA8], (8, 6))
    assert wanted


def test_a_contract_that_the_capability_lacks(compiled: list[tuple[list[loader.KernelBuild], str]]) -> None:
    result = CliRunner().invoke(main, ["build", "cuda", "--capability", "8.6", "--contract", "mma16"])
    assert result.exit_code == 2
    assert "8.6 has fma, tree, mma8, not mma16" in result.output
    assert not compiled


def test_without_a_device_it_asks_for_a_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "missing", lambda index: "there is no CUDA device")
    result = CliRunner().invoke(main, ["build", "cuda"])
    assert result.exit_code == 2
    assert "there is no CUDA device" in result.output
    assert "--capability" in result.output
    result = CliRunner().invoke(main, ["build", "cuda", "--capability", "nine"])
    assert result.exit_code == 2
    assert "is not a compute capability" in result.output


@pytest.mark.parametrize(
    ("capability", "said"),
    [("7.5", "--capability 7.5: the device has compute capability 7.5; the kernels need 8.0 or newer"),
     ("0.0", "the kernels need 8.0 or newer"),
     ("9.5", "--capability 9.5: the installed NVRTC knows no such device; it compiles for 8.0, 8.6"),
     ("99.9", "--capability 99.9: the installed NVRTC knows no such device")],
)  # fmt: skip
def test_a_capability_that_no_device_has_is_one_sentence(
    capability: str, said: str, compiled: list[tuple[list[loader.KernelBuild], str]]
) -> None:
    for contract in ((), ("--contract", "fma")):
        result = CliRunner().invoke(main, ["build", "cuda", "--capability", capability, *contract])
        assert result.exit_code == 2
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""
    assert not compiled


def test_the_cpu_library_is_built_once_and_again_when_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a small library in place of the kernels."""
    source = tmp_path / "stub.cpp"
    source.write_text(f'#include "{HEADER}"\n{STUB}')
    small = Recipe("detkern-cpu", (source,), (), ("-O0", "-fPIC"), ("-shared",))
    monkeypatch.setattr(cpu_compiled, "recipe", lambda: small)
    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setenv("CXX", find_compiler().command[0])
    changed = []
    for arguments, lines in (((), 1), ((), 0), (("--again",), 1)):
        caplog.clear()
        result = CliRunner().invoke(main, ["build", "cpu", *arguments])
        assert result.exit_code == 0, result.output
        (library,) = tmp_path.glob("*.so")
        assert result.stdout == f"{library} in 0 s\n"
        assert len(caplog.messages) == lines
        assert all(m.startswith("detkern compiles its library detkern-cpu with CXX=") for m in caplog.messages)
        changed.append(library.stat().st_mtime_ns)
    assert changed[0] == changed[1] != changed[2]
    monkeypatch.setenv("CXX", "no-such-c++")
    assert CliRunner().invoke(main, ["build", "cpu"]).exit_code == 0
    result = CliRunner().invoke(main, ["build", "cpu", "--again"])
    assert result.exit_code == 2
    assert "CXX=no-such-c++: not found" in result.stderr
