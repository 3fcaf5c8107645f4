"""benchmarks.machine_code: what a cubin is, which builds are compared, what counts as changed; benchmarks.rekey on its
answer."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import machine_code, rekey
from detkern.cu import loader
from detkern.cu.loader import KernelBuild
from detkern.errors import BuildError
from detkern.measure import records

TINY = 'extern "C" __global__ void detkern_kernel(int* out) {{ *out = {value}; }}\n'


def _needs_nvrtc() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        loader.supported_architectures()
    except BuildError as error:
        pytest.skip(f"NVRTC is not installed: {error}")


def test_machine_code_is_what_a_device_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_nvrtc()

    def compiled(folder: str, text: str) -> bytes:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tiny.cu").write_text(text)
        monkeypatch.setattr(loader, "FOLDER", tmp_path / folder)
        loader.read_sources.cache_clear()
        return loader.compile_kernel(KernelBuild("tiny.cu", (), 0), "sm_90a")[0]

    try:
        one = compiled("one", TINY.format(value=1))
        same = compiled("same", "// moved\nconstexpr int ONE = 1;\n" + TINY.format(value="ONE"))
        other = compiled("other", TINY.format(value=2))
    finally:
        loader.read_sources.cache_clear()
    names = [name for name, *_ in machine_code.sections(one)]
    assert ".text.detkern_kernel" in names
    assert machine_code.machine_code(one).startswith(b".nv.constant0.detkern_kernel \0")
    assert machine_code.machine_code(one) == machine_code.machine_code(same) != machine_code.machine_code(other)


def test_constants_that_nothing_reads_are_not_in_the_way() -> None:
    unread = b".global .align 4 .u32 WIDTH = 64;\n.global .align 1 .u8 _ZN4TileILi2EE3ANYE;\n"
    read = b".global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8};\n"
    kernel = b".visible .entry one()\n{\nmov.u64 %rd1, table;\nret;\n}"
    assert machine_code.instructions(unread + read + kernel) == read + kernel
    assert machine_code.instructions(read + kernel.replace(b"table", b"other")) == kernel.replace(b"table", b"other")


def test_the_sample_has_the_ends_of_each_kernel_and_load_path() -> None:
    tiles = ((16, 32), (64, 64), (128, 256), (32, 64))
    names = [
        f"{kernel}.cu -DLOAD_A={load} -DTILE_M={m} -DTILE_N={n}"
        for kernel in ("fma", "mma") for load in (1, 2) for m, n in tiles
    ]  # fmt: skip
    ends = [name for name in names if "M=16 " in name or "M=128 " in name]
    assert machine_code.sampled(names, 0) == sorted(ends)
    more = machine_code.sampled(names, 3)
    assert len(set(more)) == len(ends) + 3
    assert machine_code.sampled(reversed(names), 3) == more
    assert set(machine_code.sampled(names, 99)) == set(names)


def test_what_differs_is_compared_as_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = {"old": {"a": "1", "b": "1", "c": "1", "gone": "1"}, "new": {"a": "1", "b": "2", "c": "2", "made": "1"}}
    code = {"old": {"a": "1", "b": "1", "c": "1"}, "new": {"a": "1", "b": "1", "c": "2"}}
    asked = []

    def digests(tree: Path, architecture: str, wanted: list[str], processes: int) -> dict[str, str]:
        asked.append((tree.name, architecture, wanted))
        return (ptx if architecture == "compute_90a" else code)[tree.name]

    monkeypatch.setattr(machine_code, "digests", digests)
    monkeypatch.setattr(machine_code, "names", lambda tree: list(ptx[tree.name]))
    monkeypatch.setattr(machine_code, "sampled", lambda names, count: names[:count])
    sides = {"builds": 3, "only_old": ["gone"], "only_new": ["made"]}
    assert machine_code.compare(Path("old"), Path("new"), None, 1) == {**sides, "compared": 3, "changed": ["c"]}
    assert asked[2:] == [("old", "sm_90a", ["b", "c"]), ("new", "sm_90a", ["b", "c"])]
    del asked[:]
    assert machine_code.compare(Path("old"), Path("new"), 2, 1) == {**sides, "compared": 2, "changed": []}
    assert asked == [("old", "sm_90a", ["a", "b"]), ("new", "sm_90a", ["a", "b"])]
    one = machine_code.compare(Path("old"), Path("new"), 9, 1, "c")
    assert (one["builds"], one["only_old"], one["changed"]) == (1, [], ["c"])


def test_every_build_is_named_once() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    builds = machine_code.every_build()
    assert {build.source for build in builds.values()} == {path.name for path in loader.FOLDER.glob("*.cu")}


def test_records_of_unchanged_kernels_get_the_new_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {f"detkern/cu/{name}": f"old {name}" for name in ("rows.cu", "fma.cu", "ptx.cuh")}
    monkeypatch.setattr(rekey, "_at", lambda commit: old)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    (tmp_path / "gpu").mkdir()
    kept = {"detkern/cu/rows.py": "1", "detkern/cu/tiles/fma.json": "2"}
    current = {"detkern/cu/rows.cu": "old rows.cu", "detkern/cu/ptx.cuh": "old ptx.cuh", **kept}
    for name, sources in (
        ("current", current),
        ("stale", {**current, "detkern/cu/ptx.cuh": "older"}),
        ("host", {"detkern/cu/rows.py": "1"}),
    ):
        (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps({"sources": sources, "rows": [1]}))
    proof = tmp_path / "proof.json"
    monkeypatch.setattr(sys, "argv", ["rekey", str(proof)])

    proof.write_text(json.dumps({"commit": "c", "changed": ["one"], "only_old": [], "only_new": []}))
    assert rekey.main() == 1
    assert json.loads((tmp_path / "gpu" / "current.json").read_text())["sources"] == current
    proof.write_text(json.dumps({"commit": "c", "changed": [], "only_old": [], "only_new": []}))
    assert rekey.main() == 0
    made = json.loads((tmp_path / "gpu" / "current.json").read_text())
    kernel = loader.FOLDER / "rows.cu"
    assert made["rows"] == [1]
    assert kept.items() <= made["sources"].items()
    assert made["sources"]["detkern/cu/kernels/rows.cu"] == hashlib.sha256(kernel.read_bytes()).hexdigest()
    assert {Path(path).name for path in made["sources"]} >= {"team.cuh", "barrier.cuh", "types.cuh"}
    assert not {"fma.cu", "ptx.cuh", "tma.cuh"} & {Path(path).name for path in made["sources"]}
    for name in ("stale", "host"):
        assert (
            "detkern/cu/kernels/rows.cu" not in json.loads((tmp_path / "gpu" / f"{name}.json").read_text())["sources"]
        )
    assert capsys.readouterr().out.count("left as it is") == 2
