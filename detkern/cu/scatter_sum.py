"""Scattered sums on CUDA: the sources put in order of their rows (scatter_sort.cu), then one chain for each element
(scatter_sum.cu): builds, argument blocks, scratch memory and launches. None of the choices here can change a bit.

The sort is our own because no library's can be used here: Thrust's, which CuPy calls, waits for the device, which a
graph capture refuses, and PyTorch's takes its own tensors alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..dispatch.backend import Execution, Kernel, Run
from ..dispatch.plan_cache import PlanCache
from ..operations.matrix import Matrix
from ..operations.problem import Operands
from ..operations.scatter_sum.operation import SCATTER_SUM
from ..operations.scatter_sum.problem import ScatterSumProblem
from ..tensors import TensorView
from ..vocabulary.dtypes import BF16, F16, F32, I64, DType
from .block_launch import launch_block
from .device import describe
from .implementation import CudaImplementation
from .loader import KernelBuild, load_function

__all__ = [
    "OPERANDS", "SORT_SOURCE", "SOURCE", "Phase", "ScatterSums", "Work", "builds", "sort_build", "sort_phases",
    "sum_build", "takes_pieces", "work_for",
]  # fmt: skip

SOURCE, SORT_SOURCE = "scatter_sum.cu", "scatter_sort.cu"
OPERANDS = (F32, F16, BF16)
LIMIT = 2**31 - 1  # of sources and of rows: their numbers are 32 bits wide on the device
_GRID_LIMIT = 2**31 - 1  # blocks along x
_PLANS = 256

# Constants of the kernel files.
WIDTH, STAGE_BYTES, STAGES, THREADS, DIGITS = 128, 8192, 4, 256, 256
_ALL, _COUNT, _SCAN, _MOVE = range(4)
# Threads, and pairs of each, by phase.
_SHAPES = {_ALL: (1024, 4), _COUNT: (256, 16), _SCAN: (256, 16), _MOVE: (256, 16)}
_ONE_TILE, _TILE = 1024 * 4, 256 * 16
# A row with more sources is summed by CTAs of its own. One thread sums 16 pieces one after the other, so what its
# chains take must be little beside the whole; the CTAs that look for such rows must be few beside it, of many sources.
_FEW, _FEW_OF_MANY, _MANY = 16, 64, 1 << 16
# Pieces of 16 bytes, or elements, of a task: 16 for each thread.
_TASK = 16 * THREADS

# SortParams of scatter_sort.cu and ScatterParams of scatter_sum.cu: pointers, then sizes, strides, codes.
_SORT = struct.Struct("<7Q4q4i")
_SUM = struct.Struct("<4Q13q4i")


def sort_build(phase: int) -> KernelBuild:
    """What is compiled for a phase of the sort."""
    threads, items = _SHAPES[phase]
    shared = (threads // 32 * DIGITS * 4 if phase in (_ALL, _MOVE) else 0) + (
        8 * threads * items if phase == _ALL else 0
    )
    macros = (("PHASE", phase), ("THREADS", threads), ("ITEMS", items), ("SMEM_BYTES", shared))
    return KernelBuild(SORT_SOURCE, macros, shared, f"scatter_sort {('all', 'count', 'scan', 'move')[phase]}")


def sum_build(operand: DType, pieces: bool) -> KernelBuild:
    """What is compiled for sources of a type, read in pieces of 16 bytes or element by element."""
    shared = STAGES * STAGE_BYTES
    macros = (
        ("OPERAND", operand.code), ("VECTOR", int(pieces)), ("THREADS", THREADS), ("STAGES", STAGES),
        ("SMEM_BYTES", shared),
    )  # fmt: skip
    return KernelBuild(SOURCE, macros, shared, f"scatter_sum {operand.short} {'pieces' if pieces else 'elements'}")


def builds() -> list[KernelBuild]:
    """Every build that a launch may need, on any device."""
    return [
        *map(sort_build, _SHAPES),
        *(sum_build(operand, pieces) for operand in OPERANDS for pieces in (True, False)),
    ]


def takes_pieces(problem: ScatterSumProblem) -> bool:
    """Whether every source begins at a multiple of 16 bytes and its columns are adjacent."""
    return _in_pieces(problem.source)


def _in_pieces(matrix: Matrix) -> bool:
    return matrix.col_stride == 1 and matrix.aligned(matrix.row_stride)


@dataclass(frozen=True, slots=True)
class Phase:
    """A launch of the sort. swapped: whether it reads what the last pass wrote into the second pair of arrays."""

    phase: int
    grid: int
    first: bool
    shift: int
    passes: int
    swapped: bool


def sort_phases(m: int, rows: int) -> tuple[Phase, ...]:
    """The launches that sort m pairs by keys up to `rows`."""
    passes = -(-rows.bit_length() // 8)
    if m <= _ONE_TILE:
        return (Phase(_ALL, 1, True, 0, passes, False),)
    tiles = -(-m // _TILE)
    return tuple(
        Phase(phase, DIGITS if phase == _SCAN else tiles, number == 0, 8 * number, 1, number % 2 == 1)
        for number in range(passes)
        for phase in (_COUNT, _SCAN, _MOVE)
    )


@dataclass(frozen=True, slots=True)
class Work:
    """How the sums are divided: the fields of ScatterParams of these names, and the scratch bytes of the sort."""

    width: int
    few: int
    long_tasks: int
    tasks: int
    units: int
    pieces: int
    column_tasks: int
    scratch_bytes: int

    @property
    def grid(self) -> int:
        return min(self.tasks, _GRID_LIMIT)


def work_for(problem: ScatterSumProblem) -> Work:
    """The division of a problem that has sources."""
    m, n = problem.m, problem.n
    piece = 16 // problem.source.dtype.itemsize if takes_pieces(problem) else 1
    width = min(WIDTH, max(piece, 1 << (n - 1).bit_length()))
    few = _FEW if m <= _MANY else _FEW_OF_MANY
    long_tasks = -(-m // few) * -(-n // width)
    across = -(-n // piece)
    pieces = min(across, _TASK)
    column_tasks = -(-across // pieces)
    total = m if problem.accumulate else problem.rows
    units = max(1, min(_TASK // pieces, total))
    tasks = long_tasks + -(-total // units) * column_tasks
    return Work(width, few, long_tasks, tasks, units, pieces, column_tasks, _places(m)[-1])


def _places(m: int) -> tuple[int, ...]:
    """Where keys, sources, again keys and sources, counters and totals begin in scratch memory, and where it ends."""
    array = -(-4 * m // 16) * 16
    counters = 4 * DIGITS * -(-m // _TILE)
    return 0, array, 2 * array, 3 * array, 4 * array, 4 * array + counters, 4 * array + counters + 4 * DIGITS


@dataclass(frozen=True, slots=True)
class _Launch:
    """(CUfunction, CTAs, threads, shared bytes): a launch but for its argument block and stream."""

    function: int
    grid: int
    threads: int
    shared_bytes: int

    def __call__(self, block: bytes, stream: int) -> None:
        launch_block(self.function, self.grid, self.threads, self.shared_bytes, block, stream)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The launches of a problem. work: None where there is no source."""

    problem: ScatterSumProblem
    phases: tuple[tuple[Phase, _Launch], ...]
    work: Work
    last: _Launch


def _plan_for(problem: ScatterSumProblem, stream: int) -> _Plan:
    device = describe(problem.device.index)

    def launch(build: KernelBuild, grid: int, threads: int) -> _Launch:
        function = load_function(device.index, device.capability, build, stream)
        return _Launch(function.ptr, grid, threads, build.shared_bytes)

    phases = tuple(
        (phase, launch(sort_build(phase.phase), phase.grid, _SHAPES[phase.phase][0]))
        for phase in (sort_phases(problem.m, problem.rows) if problem.m else ())
    )
    work = work_for(problem)
    build = sum_build(problem.source.dtype, takes_pieces(problem))
    return _Plan(problem, phases, work, launch(build, work.grid, THREADS))


def _enqueue(plan: _Plan, source: TensorView, index: TensorView, out: TensorView, execution: Execution) -> None:
    """Launch a plan on the execution's stream, on the device that is current. What one launch writes the next one
    reads."""
    from .current import scratch_memory

    problem, work, stream = plan.problem, plan.work, execution.stream
    keys = sources = 0
    if plan.phases:
        scratch = scratch_memory(execution, work.scratch_bytes)  # held until all is enqueued
        *arrays, counts, totals, _ = (scratch.pointer + place for place in _places(problem.m))
        for phase, launch in plan.phases:
            given, made = (arrays[2:], arrays[:2]) if phase.swapped else (arrays[:2], arrays[2:])
            keys, sources = made
            launch(
                _SORT.pack(
                    index.pointer, *given, *made, counts, totals,
                    problem.index.stride, problem.m, problem.rows, -(-problem.m // _TILE),
                    int(problem.index.dtype == I64), int(phase.first), phase.shift, phase.passes,
                ),
                stream,
            )  # fmt: skip
    plan.last(
        _SUM.pack(
            source.pointer, out.pointer, keys, sources,
            problem.m, problem.n, problem.rows,
            problem.source.row_stride, problem.source.col_stride, problem.out.row_stride, problem.out.col_stride,
            work.few, work.long_tasks, work.tasks, work.units, work.pieces, work.column_tasks,
            problem.out.dtype.code, int(problem.accumulate), int(_in_pieces(problem.out)), work.width,
        ),
        stream,
    )  # fmt: skip


class _Sums:
    """`backend.Run` of scattered sums of one layout, by a plan that is made once for a number of sources."""

    __slots__ = ("_problem", "plans")

    def __init__(self, problem: ScatterSumProblem) -> None:
        self._problem = problem
        self.plans: PlanCache[int, _Plan] = PlanCache(_PLANS)

    def __call__(self, m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        """Enqueue the sums. Raises DeviceError where the device or its driver reports a fault, BuildError where a
        kernel does not compile, before `out` is touched."""
        from .current import on_device

        source, index = operands
        assert source is not None
        assert index is not None
        problem = self._problem.with_rows(m)
        if problem.accumulate and not m:
            return
        plan = self.plans.get(m) or self.plans.recall(m)
        if plan is None:
            plan = self.plans.keep(m, on_device(problem, _plan_for, problem, execution.stream))
        on_device(problem, _enqueue, plan, source, index, out, execution)


class ScatterSums(CudaImplementation[ScatterSumProblem]):
    """The scattered sum. Binary32 addition is the same on all devices, but one on which it has not been compared with
    the replay is checked all the same, once."""

    def __init__(self) -> None:
        super().__init__(SCATTER_SUM, lambda variant: (SORT_SOURCE, SOURCE))

    def builds(self, capability: tuple[int, int]) -> list[KernelBuild]:
        return builds()

    def refuses(self, problem: ScatterSumProblem) -> str | None:
        if max(problem.m, problem.rows) > LIMIT:
            return f"it takes at most {LIMIT} sources and rows, not {problem.about}"
        return super().refuses(problem)

    def explain(self, problem: ScatterSumProblem) -> Kernel:
        work = work_for(problem)
        pieces = "pieces of 16 bytes" if takes_pieces(problem) else "any strides"
        sort = len(sort_phases(problem.m, problem.rows)) if problem.m else 0
        return Kernel(
            name=f"scatter_sum ({SOURCE})",
            tile=f"{work.units} {'sources' if problem.accumulate else 'rows'} x {work.pieces} columns, {pieces}",
            geometry=f"{sort} launches of the sort, then grid {work.grid}, {THREADS} threads, {STAGES * STAGE_BYTES} "
            f"bytes shared",
            scratch_bytes=work.scratch_bytes if problem.m else 0,
        )

    def prepare(self, problem: ScatterSumProblem, execution: Execution) -> Run:
        """What enqueues the sums. Nothing waits for the device and nothing is read back: once the kernels have been
        loaded, the call can be captured into a graph."""
        return _Sums(problem)
