"""`detkern verify`: what holds passes, and a backend broken in one way fails exactly the property that it breaks."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

from detkern.cli import references, results
from detkern.cli.main import main
from detkern.cli.properties import QUICK
from detkern.cli.references import PROPERTIES, error_bound, finish
from detkern.cpu.backend import CpuBackend
from detkern.dispatch import registry, requirements
from detkern.dispatch.backend import Run
from detkern.dispatch.plan import forget_plans
from detkern.operations.bias_gradient.problem import ColumnSumProblem
from detkern.operations.gemm.problem import GemmProblem
from detkern.operations.table import OPERATIONS
from detkern.tensors import Device
from detkern.vocabulary.contracts import CONTRACTS, FMA, FP8_BLOCK128, MMA8, MMA16, TREE
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32, DType

M, N, K = QUICK.m, QUICK.n, QUICK.k


def run(*arguments: str, columns: int = 80) -> Result:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["verify", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


class Broken(CpuBackend):
    """The CPU backend, spoiled after each call by `spoil(problem, a, b, out, bias)`, all NumPy arrays."""

    name = "broken"

    def __init__(self, spoil: Callable[..., None]) -> None:
        super().__init__()
        self.implementations = {
            problem: _Spoiled(self.implementations[problem], spoil) for problem in (GemmProblem, ColumnSumProblem)
        }


class _Spoiled:
    """An implementation of the CPU backend that computes bfloat16 alone, of products `fma`, and is spoiled."""

    def __init__(self, implementation: Any, spoil: Callable[..., None]) -> None:
        self.implementation, self.spoil = implementation, spoil
        self.explain = implementation.explain

    def refuses(self, problem: Any) -> str | None:
        computed = self.implementation.operation.variant_of(problem) in (("fma", BF16), ("bias_gradient", BF16))
        return None if computed else "not this one"

    def prepare(self, problem: Any, execution: Any) -> Run:
        right = self.implementation.prepare(problem, execution)
        sums = getattr(self.spoil, "sums", False)

        def run(m: int, operands: Any, out: Any, execution: Any) -> None:
            right(m, operands, out, execution)
            if sums and isinstance(problem, ColumnSumProblem) and m > 1:
                _flip(out.array, (0,))
            if not sums and isinstance(problem, GemmProblem) and problem.k:
                arrays = [None if view is None else view.array for view in operands]
                self.spoil(problem.with_rows(m), *arrays[:2], out.array, arrays[2])

        return run


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a backend called "broken" into the table."""

    def register(spoil: Callable[..., None]) -> None:
        module = types.ModuleType("broken_backend")
        module.BACKEND = Broken(spoil)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "broken_backend", module)
        row = registry.Row("broken", "broken_backend", ("cpu",), dispatched=False)
        monkeypatch.setattr(registry, "TABLE", (*registry.TABLE, row))
        registry.load.cache_clear()
        forget_plans()

    yield register
    registry.load.cache_clear()
    forget_plans()


def _flip(out: np.ndarray, index: tuple[int, ...] = (0, 0)) -> None:
    """Change the last bit of one element."""
    out.view(f"u{out.itemsize}")[index] ^= 1


class _EveryThird:
    """Wrong on each third of equal calls in a row, as an unordered sum may be."""

    def __init__(self) -> None:
        self.last: tuple[Any, ...] = ()
        self.times = 0

    def __call__(self, problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
        # The arrays themselves are kept and compared, since addresses are used again.
        same = len(self.last) == 3 and self.last[0] == problem and self.last[1] is a and self.last[2] is b
        self.times = self.times + 1 if same else 1
        self.last = (problem, a, b)
        if self.times % 3 == 0:
            _flip(out)


def _small_batch(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """Another order of summation in a batch of two rows."""
    if problem.m == 2:
        _flip(out)


def _equal_rows(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """The second row of the batch wrong where the row above holds the same numbers."""
    if problem.m == M and problem.a.row_stride and a.ndim == 2 and np.array_equal(a[0].view("u2"), a[1].view("u2")):
        _flip(out, (1, 0))


def _leak(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """NaN in one row reaches its neighbour, as through a shared zero product."""
    rows = np.isnan(a).all(-1)
    if problem.k > 1 and rows.any() and not rows.all():
        out[~rows] = np.nan


def _chunk_of_five(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    if problem.m == 5 and problem.k == K:
        _flip(out)


def _padded_depth(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """Another split of K when a tail of seven is appended."""
    if problem.k == K + 7:
        _flip(out)


def _column_major(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    if problem.m == M and problem.k == K and problem.a.row_stride == 1:
        _flip(out)


def _beside_the_output(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """A store past the end of a row whose pitch is longer."""
    if problem.out.row_stride == N + 3 and out.base is not None:
        out.base[0, N] = 1


def _half_bias(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    if bias is not None and bias.dtype == np.float16:
        _flip(out)


def _accumulated(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """What was in out, lost for one element."""
    if problem.accumulate and problem.k == K // 2:
        out[0, 0] = (a[:1].astype(np.float64) @ b[:, :1].astype(np.float64))[0, 0]


def _flushed(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """Subnormal results flushed to zero, everywhere alike."""
    tiny = np.abs(out.astype(np.float64)) < float(np.finfo(np.float32).tiny)
    if not (problem.accumulate or bias is not None):
        out[tiny & ~np.isnan(out.astype(np.float32))] = 0


def _bias_gradient(*_: Any) -> None:
    """The products are right, the bias gradient is not."""


_bias_gradient.sums = True  # type: ignore[attr-defined]


def _inaccurate(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """Three significant digits, in the shape whose error alone is looked at."""
    if (problem.m, problem.n) == QUICK.accuracy[0][:2]:
        out *= np.float32(1.001)


BREAKS: list[tuple[str, Callable[[], Callable[..., None]]]] = [
    ("repeatability", _EveryThird),
    ("batch size", lambda: _small_batch),
    ("row position", lambda: _equal_rows),
    ("neighbours", lambda: _leak),
    ("chunking", lambda: _chunk_of_five),
    ("padding", lambda: _padded_depth),
    ("layouts", lambda: _column_major),
    ("layouts", lambda: _beside_the_output),
    ("bias", lambda: _half_bias),
    ("accumulate", lambda: _accumulated),
    ("replay", lambda: _flushed),
    ("replay", lambda: _bias_gradient),
    ("accuracy", lambda: _inaccurate),
]


def test_every_property_is_broken_below() -> None:
    assert {name for name, _ in BREAKS} == {item.name for item in PROPERTIES}


@pytest.mark.parametrize(("name", "spoil"), BREAKS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BREAKS)])
def test_a_broken_backend_fails_exactly_its_property(
    name: str, spoil: Callable[[], Callable[..., None]], broken: Callable[..., None], tmp_path: Path
) -> None:
    broken(spoil())
    result = run(
        "--quick",
        "--backend",
        "broken",
        "--contract",
        "fma",
        "--json-file",
        str(tmp_path / "r.json"),
        "--html",
        str(tmp_path / "r.html"),
    )
    record = json.loads((tmp_path / "r.json").read_text())
    assert {r["property"]: r["error"] or r["first"] for r in record["results"] if r["status"] == "FAILED"}.keys() == {
        name
    }
    assert {r["status"] for r in record["results"]} == {"passed", "FAILED"}
    assert not record["passed"]
    assert result.exit_code == 1
    assert f"FAILED broken on cpu, fma bf16: {name}" in result.stdout
    assert result.stdout.count("FAIL ") == 1, "one cell of the table"
    page = (tmp_path / "r.html").read_text()
    assert "1 of 11 checks failed" in page
    assert page.count('class="card bad"') == 1


def test_a_sound_backend_passes_beside_them(broken: Callable[..., None]) -> None:
    broken(lambda *_: None)
    result = run("--quick", "--backend", "broken", "--contract", "fma")
    assert result.exit_code == 0, result.output


def test_an_error_of_the_library_fails_the_property(broken: Callable[..., None]) -> None:
    from detkern.errors import DeviceError

    def raises(problem: Any, *_: Any) -> None:
        if problem.bias is not None:
            raise DeviceError("the device fell off")

    broken(raises)
    result = run(
        "--quick", "--backend", "broken", "--contract", "fma", "--property", "bias", "--property", "batch size"
    )
    assert result.exit_code == 1
    assert "DeviceError: the device fell off" in result.stdout
    assert "1 of 2 checks FAILED" in result.stdout


def test_a_property_that_compares_nothing_fails(broken: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "KINDS", ())
    result = run("--quick", "--backend", "cpu", "--contract", "mma16", "--property", "replay")
    assert result.exit_code == 1
    assert "nothing was compared" in result.stdout


def _nan_sign(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
    """NaN with its sign set."""
    out.view(f"u{out.itemsize}")[np.isnan(out)] |= 1 << (8 * out.itemsize - 1)


def test_nans_of_another_sign_are_reported_apart(broken: Callable[..., None], tmp_path: Path) -> None:
    broken(_nan_sign)
    result = run(
        "--quick",
        "--backend",
        "broken",
        "--contract",
        "fma",
        "--property",
        "replay",
        "--json-file",
        str(tmp_path / "r.json"),
    )
    assert result.exit_code == 1
    assert re.search(r"^fma bf16\s+NaN\s*$", result.stdout, re.MULTILINE), result.stdout
    assert "elements differ, all of them NaN on both sides with another sign or payload; the first" in result.stdout
    (entry,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert entry["nan_patterns"] == entry["mismatches"] == sum(trial["nan_patterns"] for trial in entry["trials"]) > 0
    assert (entry["first"]["got"], entry["first"]["want"]) == ("nan", "nan")


def test_a_number_that_differs_is_shown_before_nans(broken: Callable[..., None], tmp_path: Path) -> None:
    """NaNs differ from the first operands on that have any; a number differs in the last call but a few."""

    def both(problem: Any, a: Any, b: Any, out: Any, bias: Any) -> None:
        _nan_sign(problem, a, b, out, bias)
        if bias is not None and not np.isnan(out.astype(np.float32)).any():
            _flip(out)

    broken(both)
    result = run(
        "--quick",
        "--backend",
        "broken",
        "--contract",
        "fma",
        "--property",
        "replay",
        "--json-file",
        str(tmp_path / "r.json"),
    )
    (entry,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert 0 < entry["nan_patterns"] < entry["mismatches"]
    assert f"elements differ, {entry['nan_patterns']:,} of them NaN on both sides" in result.stdout
    assert "nan" not in (entry["first"]["got"], entry["first"]["want"])
    assert re.search(r"^fma bf16\s+FAIL\s*$", result.stdout, re.MULTILINE), result.stdout


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_no_width_cuts_a_type_short(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def passed(subject: Any, item: Any, effort: Any) -> results.Result:
        return results.Result(subject, item.name, [results.Trial("one", 1, 0)], results.Grid(""))

    monkeypatch.setattr(importlib.import_module("detkern.cli.verify"), "check", passed)
    result = run("--quick", "--contract", "fp8-block128", "--contract", "fma", columns=columns)
    table = result.stdout[: result.stdout.index("all 55 checks")]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= columns
    headings = [word for line in table.splitlines() if line.startswith("  ") for word in line.split()]
    assert headings == [item.heading for item in PROPERTIES]
    parts = table.count("repeat") + sum(line.startswith("  ") for line in table.splitlines()) - 1
    for name in ("fma f32", "fma f16", "fma bf16", "fp8-block128 e4m3", "fp8-block128 e5m2"):
        assert len(re.findall(rf"^{name} ", table, re.MULTILINE)) == parts, table
    assert (parts == 1) == (columns >= 80)


def test_json_is_on_standard_output_and_alone(tmp_path: Path) -> None:
    result = run(
        "--quick", "--contract", "fma", "--property", "padding", "--json", "--json-file", str(tmp_path / "r.json")
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((tmp_path / "r.json").read_text())


@pytest.mark.parametrize("contract", ["mma8", "tree-mma16", "fp8-block128"])
def test_the_cpu_backend_keeps_its_contracts(contract: str, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    result = run("--quick", "--contract", contract, "--html", str(page), "--json-file", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    for line in result.stdout.splitlines():
        assert len(line.rstrip()) <= 80
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["passed"]
    offered = {True: "not offered", False: "passed"}
    for entry in record["results"]:
        no_bias = contract == FP8_BLOCK128.name and entry["property"] == "bias"
        assert entry["status"] == offered[no_bias]
        assert no_bias or (entry["compared"] > 1000 and entry["mismatches"] == 0 and len(entry["trials"]) > 1)
    _check_page(page.read_text(), record)


def _check_page(text: str, record: dict[str, Any]) -> None:
    """One file with a picture for each property that compared something; nothing is fetched from anywhere."""
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)|url\(|@import|<script""", text)
    assert not outside
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == sum(entry["status"] == "passed" for entry in record["results"])
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        shapes = [e for e in root.iter() if e.tag.endswith(("path", "rect"))]
        assert shapes
        for path in root.iter("{http://www.w3.org/2000/svg}path"):
            for x, y in re.findall(r"M(\d+) (\d+)", path.attrib["d"]):
                assert float(x) < width
                assert float(y) < height


def test_the_same_bits_have_the_same_colour_and_others_do_not(tmp_path: Path) -> None:
    """The picture of repeated runs: equal rows of cells; the one of the kinds of operands: not."""
    run("--quick", "--contract", "mma16", "--property", "repeatability", "--html", str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    picture = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", page, re.DOTALL)[0])
    cells: dict[int, dict[int, str]] = {}
    for path in picture.iter("{http://www.w3.org/2000/svg}path"):
        for x, y in re.findall(r"M(\d+) (\d+)h", path.attrib["d"]):
            cells.setdefault(int(y), {})[int(x)] = path.attrib["fill"]
    rows = [cells[y] for y in sorted(cells)]
    assert len(rows) == 8
    assert all(len(row) == M for row in rows)
    assert rows[0] == rows[1] == rows[2] == rows[3] != rows[4]
    assert rows[4] == rows[5] == rows[6] == rows[7]
    assert len(set(rows[0].values())) > 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "nothing"], "the backends are cpu, cuda, triton, musa, ascend, native"),
        (["--device", "cuda:63"], "--device cuda:63: not here"),
        (["--device", "abacus"], "there is cpu"),
        (["--device", "c p u"], "is not a device"),
        (["--backend", "native", "--contract", "mma8"], "native on cpu mma16"),
        (["--contract", "mma9"], "is not one of"),
        (["--property", "speed"], "is not one of"),
        (["--json-file", "/nowhere/at/all.json"], "No such file"),
    ],
)
def test_filters_that_match_nothing(arguments: list[str], said: str) -> None:
    result = run("--quick", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_a_named_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` and `fingerprint` alike, also where another backend that is named can run."""

    class Absent(CpuBackend):
        def unavailable(self, device: Device) -> str | None:
            return "its driver is on holiday"

    module = types.ModuleType("absent_backend")
    module.BACKEND = Absent()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "absent_backend", module)
    rows = [registry.Row("absent", "absent_backend", ("cpu",), dispatched=False)]
    rows.append(registry.Row("elsewhere", "absent_backend", ("abacus",)))
    monkeypatch.setattr(registry, "TABLE", (*registry.TABLE, *rows))
    monkeypatch.setattr(requirements, "TABLE", registry.TABLE)
    registry.load.cache_clear()
    nowhere = "--backend elsewhere cannot run on abacus: nothing here lists abacus devices"
    cases = [
        (["--backend", "absent"], "--backend absent cannot run on cpu: its driver is on holiday"),
        (["--backend", "absent", "--contract", "fma"], "its driver is on holiday"),
        (["--backend", "absent", "--device", "cpu"], "its driver is on holiday"),
        (["--backend", "elsewhere"], nowhere),
        (["--backend", "elsewhere", "--device", "cpu"], "cannot run on cpu: it works on abacus devices"),
    ]
    try:
        for arguments, said in cases:
            for command in ("verify", "fingerprint"):
                result = CliRunner().invoke(main, [command, *arguments])
                assert (result.exit_code, result.stdout) == (2, "")
                assert said in result.stderr
        result = run("--quick", "--backend", "cpu", "--backend", "absent", "--property", "padding")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "its driver is on holiday" in result.stderr
    finally:
        registry.load.cache_clear()


def test_the_frameworks_own_matmul_is_examined_only_when_named() -> None:
    result = run("--quick", "--backend", "native", "--contract", "fma", "--property", "replay")
    assert result.exit_code == 1
    assert "follows no contract" in result.stdout
    assert "native" not in run("--quick", "--contract", "fma", "--property", "batch size").stdout


@pytest.mark.parametrize(
    ("value", "dtype", "pattern"),
    [
        (np.float32(np.nan), F32, 0x7FFFFFFF),
        (-np.float32(np.nan), F16, 0x7FFF),
        (np.float32(np.nan), BF16, 0x7FFF),
        (np.float32(65520), F16, 0x7C00),
        (np.float32(1 + 2**-9), BF16, 0x3F80),  # half way, to even
        (np.float32(-1e-30), F16, 0x8000),
    ],
)
def test_finish(value: np.float32, dtype: DType, pattern: int) -> None:
    finished = finish(np.array([value], np.float32), dtype)
    assert int(finished.view(dtype.bits)[0]) == pattern


def test_error_bounds_by_hand() -> None:
    """To first order: one rounding a term; 17 terms cut at 2^-25 and one rounding down to 24 bits a group."""
    assert error_bound(FMA, F32, 100) == pytest.approx(100 * 2.0**-24, rel=1e-4)
    assert error_bound(MMA16, BF16, 160) == pytest.approx(10 * (17 * 2.0**-25 + 2.0**-23), rel=1e-4)
    assert error_bound(MMA8, BF16, 9) == pytest.approx(2 * (9 * 2.0**-24 + 2.0**-23), rel=1e-4)
    assert error_bound(TREE, F16, 64) == pytest.approx(33 * 2.0**-24 + 2 * 2.0**-11, rel=1e-2)
    assert error_bound(FP8_BLOCK128, E4M3, 128) == pytest.approx(4 * 34 * 2.0**-13, rel=2e-2)
    assert all(error_bound(c, d, 2048) > error_bound(c, d, 128) > 0 for c in CONTRACTS.values() for d in c.operands)


@pytest.mark.parametrize("name", ["softmax", "bias_gradient"])
def test_an_operation_that_is_wrong_in_one_place_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it depends on how many others there are, which one it is, who they are, the layout, or is just wrong."""
    cpu = registry.load("cpu")
    operation = next(o for o in OPERATIONS if name in o.variants)
    real = cpu.implementations[operation.problem].prepare

    def verified(spoil: Callable[..., bool]) -> dict[str, str]:
        def prepare(problem: Any, execution: Any) -> Run:
            right = real(problem, execution)

            def run(m: int, given: Any, out: Any, execution: Any) -> None:
                right(m, given, out, execution)
                if spoil(m, given, out):
                    _flip(out.array, (min(1, len(out.array) - 1), *(0,) * (out.array.ndim - 1)))

            return run

        monkeypatch.setattr(cpu.implementations[operation.problem], "prepare", prepare)
        forget_plans()
        try:
            result = CliRunner().invoke(main, ["verify", "--quick", "--operation", name, "--json"])
        finally:
            monkeypatch.undo()
            forget_plans()
        return {r["property"]: r["status"] for r in json.loads(result.stdout)["results"] if r["dtype"] == "float32"}

    count = [0]

    def every_third(*_: Any) -> bool:
        count[0] += 1
        return count[0] % 3 == 0

    assert set(verified(lambda *_: False).values()) == {"passed", "not offered"}
    assert verified(every_third)["repeatability"] == "FAILED"
    assert verified(lambda m, given, out: out.shape[0] == 3)["batch size"] == "FAILED"
    # The second of a result: one by one, and in another order, it is another element that is off.
    large = verified(lambda m, given, out: given[0].array.size > 9)
    assert {large[p] for p in ("row position", "chunking", "replay")} == {"FAILED"}
    nan = verified(lambda m, given, out: np.isnan(given[0].array.astype(np.float32)).any() and out.array.shape[0] > 1)
    assert nan["neighbours"] == "FAILED"
    assert (
        verified(lambda m, given, out: abs(out.strides[-1]) != 1 or any(abs(v.strides[-1]) != 1 for v in given))[
            "layouts"
        ]
        == "FAILED"
    )
