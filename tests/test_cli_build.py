"""`detkern build cuda`: the kernels of a compute capability, compiled with no GPU and only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from detkern import config
from detkern.cli.main import main
from detkern.contracts import MMA8, MMA16
from detkern.cu import ahead, column_sum, device, loader, rows
from detkern.cu.backend import offered

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
    assert wanted == ahead.builds(offered((9, 0)), (9, 0)) + column_sum.builds() + rows.builds((9, 0))
    assert MMA16 in offered((9, 0))
    assert MMA8 not in offered((9, 0))
    assert f"{len(wanted)} kernels for sm_90a" in result.output


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
    assert "no compute capability" in result.output
