"""Records and how they are read back: what a run writes, and when its sources have changed since."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from detkern.measure import records

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import benchmarks.records


def test_a_gpu_is_a_folder() -> None:
    assert records.slug("NVIDIA H200") == "h200"
    assert records.slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


def test_a_record_knows_when_its_sources_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    kernel, table = tmp_path / "kernel.cu", tmp_path / "table.json"
    kernel.write_text("one")
    table.write_text("[]")
    rows = [{"m": 1, "detkern_us": 2.5}]
    path = records.write("speed", rows, gpu="NVIDIA H200", driver="580.1", sources=[kernel, table], more={"cuda": "13"})
    assert path == tmp_path / "results" / "h200" / "speed.json"
    made = json.loads(path.read_text())
    assert made["rows"] == rows
    assert set(made) == {"what", "date", "gpu", "driver", "versions", "command", "sources", "rows"}
    assert set(made["sources"]) == {"kernel.cu", "table.json"}
    assert made["versions"]["cuda"] == "13"
    assert records.changed_sources(path) == []
    monkeypatch.setattr(sys, "argv", ["records", "--check"])
    assert benchmarks.records.main() == 0
    assert "up to date" in capsys.readouterr().out
    kernel.write_text("two")
    table.unlink()
    assert records.changed_sources(path) == ["kernel.cu", "table.json"]
    assert benchmarks.records.main() == 1
    assert "h200/speed.json" in capsys.readouterr().out


def test_cuda_sources_are_kernels_headers_and_tables() -> None:
    names = {path.name for path in records.cuda_sources()}
    assert {"fma.cu", "mma.cu", "tree.cu", "tree_mma.cu", "params.cuh", "fma.json"} <= names
    assert not any(name.endswith(".py") for name in names)
    products = {path.name for path in records.product_sources()}
    assert products < names
    assert {"mma_wgmma.cu", "main_loop.cuh", "wgmma.cuh", "types.cuh", "mma_wgmma.json", "time_model.json"} <= products
    others = {
        "column_sum.cu",
        "rows.cu",
        "row_sums.cu",
        "scatter_sort.cu",
        "scatter_sum.cu",
        "team.cuh",
        "exponential.cuh",
    }
    assert not products & (others | {"wgmma_8bit.cuh"})


def test_rows_of_other_packages_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROOT", tmp_path)
    path = records.write("gemm", [{"m": 1}], gpu="g", driver="1", sources=[], folder=tmp_path, more={"cuda": "13.0"})
    same = {"gpu": "g", "driver": "1", "sources": list[Path]()}
    assert records.kept(path, **same, more={"cuda": "13.0"}) == [{"m": 1}]
    assert records.kept(path, **same) == [{"m": 1}]  # a package that one of them does not name
    assert records.kept(path, **same, more={"cuda": "13.1"}) == []
    assert records.kept(path, **{**same, "gpu": "another"}) == []


def test_the_recorded_command_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(records.ROOT / "benchmarks" / "gemm.py")
    for output in (["--output", "/somewhere"], ["--output=/somewhere"]):
        monkeypatch.setattr(sys, "argv", [script, "--m", "1", *output, "--missing"])
        path = records.write("gemm", [], gpu="g", driver="1", sources=[], folder=tmp_path)
        assert json.loads(path.read_text())["command"] == "python -m benchmarks.gemm --m 1 --missing"
