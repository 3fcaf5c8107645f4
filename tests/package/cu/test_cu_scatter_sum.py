"""The scattered sum's CUDA side without a device: argument blocks against the kernel files, the division of the work,
the launches on a driver that only takes notes."""

from __future__ import annotations

import ctypes
import re
import weakref
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

import itertools

import cu_blocks

from detkern.cu import loader, scatter_sum
from detkern.cu.device import CudaDevice
from detkern.dispatch.backend import Execution
from detkern.errors import DeviceError
from detkern.operations.scatter_sum.problem import ScatterSumProblem, scatter_sum_problem
from detkern.tensors import TensorView, contiguous_strides
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32, I32, I64, DType

DEVICE = cu_blocks.DEVICE
FOLDER = loader.FOLDER


def _view(
    shape: tuple[int, ...], dtype: DType, pointer: int = 4096, strides: tuple[int, ...] | None = None
) -> TensorView:
    return TensorView(pointer, shape, contiguous_strides(shape) if strides is None else strides, dtype, DEVICE)


def _problem(
    m: int, n: int, rows: int, dtype: DType = BF16, *, accumulate: bool = False, index: DType = I64, pointer: int = 4096
) -> ScatterSumProblem:
    source, out = _view((m, n), dtype, pointer), _view((rows, n), F32)
    return scatter_sum_problem(source, _view((m,), index), out, accumulate)


def test_constants_are_those_of_the_kernel_files() -> None:
    text = (FOLDER / scatter_sum.SOURCE).read_text()
    assert int(re.search(r"constexpr int WIDTH = (\d+);", text)[1]) == scatter_sum.WIDTH
    assert f"constexpr int STAGE = {scatter_sum.STAGE_BYTES} / SIZE;" in text
    phases = re.search(
        r"ALL = (\d), COUNT = (\d), SCAN = (\d), MOVE = (\d)", (FOLDER / scatter_sum.SORT_SOURCE).read_text()
    )
    assert [int(digit) for digit in phases.groups()] == [0, 1, 2, 3]


class _Driver:
    """Notes of what is launched: the kernel's name, its grid, and the fields of its argument block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupy.cuda import driver, runtime

        sort = cu_blocks.fields(scatter_sum, "SortParams", scatter_sum.SORT_SOURCE)
        sums = cu_blocks.fields(scatter_sum, "ScatterParams")
        self.launches: list[tuple[str, int, dict[str, int]]] = []
        self.scratch: list[int] = []
        self.memory: list[weakref.ref[Any]] = []
        names: list[str] = []

        def load(device: int, capability: Any, build: Any, stream: int) -> Any:
            names.append(build.name)

            class Function:
                ptr = len(names)

            return Function

        def launch(function: int, *geometry: Any) -> None:
            assert all(memory() is not None for memory in self.memory), "scratch memory was given back"
            grid, _, _, threads, _, _, shared, stream, parameters, _ = geometry
            name = names[function - 1]
            fields = sort if name.startswith("scatter_sort") else sums
            pointer = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
            block = ctypes.string_at(pointer, fields["size"][0])
            assert stream == 9
            assert threads <= 1024
            assert shared <= 101376
            values = {
                field: int(np.frombuffer(block, form[0] + {"Q": "u8", "q": "i8", "i": "i4"}[form[-1]], 1, offset)[0])
                for field, (offset, form) in fields.items()
                if field != "size"
            }
            self.launches.append((name, grid, values))

        device = CudaDevice(1, "Made-up GPU", "uuid", (9, 0), 132, "1.0")
        monkeypatch.setattr(driver, "launchKernel", launch)
        monkeypatch.setattr(driver, "ctxGetCurrent", lambda: 1)
        monkeypatch.setattr(runtime, "getDevice", lambda: 1)
        monkeypatch.setattr(scatter_sum, "describe", lambda index: device)
        monkeypatch.setattr(scatter_sum, "load_function", load)

    def run(self, problem: ScatterSumProblem) -> list[tuple[str, int, dict[str, int]]]:
        def allocate(size: int) -> TensorView:
            memory = type("Memory", (), {})()
            self.scratch.append(size)
            self.memory.append(weakref.ref(memory))
            return TensorView(1 << 20, (size,), (1,), E4M3, DEVICE, array=memory)

        execution = Execution(DEVICE, 9, allocate)
        operands = _view((problem.m, problem.n), BF16, 1 << 40), _view((problem.m,), I64, 2 << 40)
        run = scatter_sum.ScatterSums().prepare(problem, execution)
        run(problem.m, operands, _view((problem.rows, problem.n), F32, 3 << 40), execution)
        return self.launches


def test_few_sources_are_sorted_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(monkeypatch)
    (sort, grid, block), (total, tasks, sums) = driver.run(_problem(4096, 40, 128256))
    assert (sort, grid, total) == ("scatter_sort all", 1, "scatter_sum bf16 pieces")
    assert (block["index"], block["m"], block["rows"], block["passes"]) == (2 << 40, 4096, 128256, 3)
    assert (block["wide"], block["first"], block["index_stride"]) == (1, 1, 1)
    assert (sums["source"], sums["out"]) == (1 << 40, 3 << 40)
    assert (sums["keys"], sums["sources"]) == (block["keys_out"], block["sources_out"])
    assert (sums["m"], sums["n"], sums["rows"], sums["out_dtype"], sums["accumulate"]) == (4096, 40, 128256, 1, 0)
    assert sums["tasks"] == tasks


@pytest.mark.parametrize(("rows", "passes"), [(1, 1), (255, 1), (256, 2), (65535, 2), (65536, 3), (2**31 - 1, 4)])
def test_every_pass_reads_what_the_last_one_wrote(rows: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest key is the number of rows, of what names none."""
    driver = _Driver(monkeypatch)
    *sort, (_, _, sums) = driver.run(_problem(8193, 1, rows))
    assert [name.split()[1] for name, _, _ in sort] == ["count", "scan", "move"] * passes
    assert [grid for _, grid, _ in sort] == [3, 256, 3] * passes
    written = None
    for number, (name, _, block) in enumerate(sort):
        assert block["shift"] == 8 * (number // 3)
        assert block["first"] == (number < 3)
        assert block["tiles"] == 3
        if number >= 3:
            assert (block["keys_in"], block["sources_in"]) == written
        if name.endswith("move"):
            written = block["keys_out"], block["sources_out"]
            assert not set(written) & {block["keys_in"], block["sources_in"]}
    assert (sums["keys"], sums["sources"]) == written


def test_scratch_memory_holds_what_is_kept_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for m in (1, 4096, 4097, 100_001):
        driver = _Driver(monkeypatch)
        launches = driver.run(_problem(m, 3, 70_000))
        (size,) = driver.scratch
        tiles = -(-m // 4096)
        blocks = [block for name, _, block in launches if name.startswith("scatter_sort")]
        needs = dict.fromkeys(("keys_in", "sources_in", "keys_out", "sources_out"), 4 * m)
        needs |= {"counts": 4 * 256 * tiles, "totals": 4 * 256}
        spans = sorted((blocks[0][name], blocks[0][name] + need) for name, need in needs.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[0][0] >= 1 << 20
        assert spans[-1][1] <= (1 << 20) + size
        assert all(start % 4 == 0 for start, _ in spans)


@pytest.mark.parametrize("accumulate", [False, True])
def test_tasks_cover_every_element_once(accumulate: bool) -> None:
    for m, n, rows in ((1, 1, 1), (4096, 4096, 128256), (7, 100_000, 3), (5000, 1, 9), (300, 129, 1000), (3, 2**20, 2)):
        for dtype, pointer in ((BF16, 4096), (F32, 4096), (F32, 4100)):
            problem = _problem(m, n, rows, dtype, accumulate=accumulate, pointer=pointer)
            work = scatter_sum.work_for(problem)
            piece = 16 // dtype.itemsize if scatter_sum.takes_pieces(problem) else 1
            total = m if accumulate else rows
            tasks = work.tasks - work.long_tasks
            assert tasks == -(-total // work.units) * work.column_tasks
            assert (work.column_tasks - 1) * work.pieces * piece < n <= work.column_tasks * work.pieces * piece
            assert work.width & (work.width - 1) == 0
            assert piece <= work.width <= scatter_sum.WIDTH
            assert work.width >= min(n, scatter_sum.WIDTH)
            assert work.long_tasks == -(-m // work.few) * -(-n // work.width)
            assert 1 <= work.grid <= 2**31 - 1


def test_pieces_of_16_bytes_need_their_alignment() -> None:
    def takes(strides: tuple[int, int], dtype: DType = BF16, pointer: int = 4096) -> bool:
        source = _view((4, 40), dtype, pointer, strides)
        return scatter_sum.takes_pieces(scatter_sum_problem(source, _view((4,), I32), _view((2, 40), F32), False))

    assert takes((40, 1))
    assert takes((0, 1))
    assert takes((-48, 1))
    assert takes((44, 1), F32)
    assert not takes((44, 1))
    assert not takes((40, 1), pointer=4104)
    assert not takes((80, 2))
    assert not takes((1, 4))


def test_every_choice_is_compiled_ahead() -> None:
    builds = set(scatter_sum.builds())
    assert len(builds) == len(scatter_sum.builds()) == 10
    for dtype in (F32, F16, BF16):
        assert {scatter_sum.sum_build(dtype, pieces) for pieces in (True, False)} <= builds
    for m in (1, 4096, 4097):
        assert {scatter_sum.sort_build(phase.phase) for phase in scatter_sum.sort_phases(m, 1000)} <= builds


def test_nothing_is_launched_onto_out_without_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _Driver(monkeypatch).run(_problem(0, 3, 4, accumulate=True)) == []
    ((name, _, block),) = _Driver(monkeypatch).run(_problem(0, 3, 4))
    assert name == "scatter_sum bf16 elements"
    assert (block["m"], block["long_tasks"]) == (0, 0)


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(1, "Made-up GPU", "uuid", (9, 0), 132, "1.0")
    monkeypatch.setattr("detkern.cu.implementation.describe", lambda index: device)
    assert scatter_sum.ScatterSums().refuses(_problem(9, 1, 2**31 - 1)) is None
    reason = scatter_sum.ScatterSums().refuses(_problem(9, 1, 2**31))
    assert reason is not None
    assert reason.startswith("it takes at most 2147483647 sources and rows")


def test_a_fault_of_the_driver_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(monkeypatch)
    cu_blocks.faults(monkeypatch)
    with pytest.raises(
        DeviceError, match=r"cuda:1 reported an illegal address at the scattered sum of m=5, n=3 to 4 rows"
    ):
        driver.run(_problem(5, 3, 4))


def test_explain_says_what_would_be_launched() -> None:
    kernel = scatter_sum.ScatterSums().explain(_problem(9000, 64, 300))
    assert kernel.name == "scatter_sum (scatter_sum.cu)"
    assert kernel.geometry.startswith("6 launches of the sort, then grid ")
    assert kernel.scratch_bytes == scatter_sum.work_for(_problem(9000, 64, 300)).scratch_bytes
