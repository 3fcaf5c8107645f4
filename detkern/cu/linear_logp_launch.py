"""Launches of linear_logp.cu: its builds, its block of parameters, and the memory between launches."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from ..dispatch.backend import Run
from ..operations.linear_logp.problem import PARTS, UNIT, DeltaProblem, FoldProblem, MergeProblem
from ..operations.matrix import Matrix
from ..operations.problem import Operands
from ..tensors import Device, TensorView
from ..tensors.execution import Execution
from ..vocabulary.dtypes import I64
from .device import describe
from .extended_launch import launch_dependent
from .loader import KernelBuild, load_function

__all__ = [
    "DELTAS", "FOLDS", "MERGES", "MERGE_ROWS", "RESULTS", "SOURCE", "THREADS", "build_for", "builds", "launch_merge",
    "launch_phase", "merge_build", "moved", "on_its_device", "packed",
]  # fmt: skip

SOURCE = "linear_logp.cu"
# Constants of the kernel file: its phases, threads of a CTA, rows of one of MERGE.
FOLDS, MERGES, RESULTS, DELTAS = range(4)
THREADS, MERGE_ROWS = 256, 8
_FEW_ROWS = 256

# LogpParams of parts/logp_params.cuh.
_PARAMS = struct.Struct("<6Q18q7i3f2i")


def build_for(phase: int) -> KernelBuild:
    """What is compiled for a phase."""
    return KernelBuild(SOURCE, (("PHASE", phase),), 0, f"linear_logp {('fold', 'merge', 'results', 'delta')[phase]}")


def merge_build(units: int, rows: int) -> KernelBuild:
    """What is compiled to merge the states of Hopper's tiles of so many units; rows: of a CTA."""
    macros = (("PHASE", MERGES), ("TILE_UNITS", units), ("MERGE_ROWS", rows), ("DEPENDENT", 1))
    return KernelBuild(SOURCE, macros, 0, f"linear_logp merge {units} {rows}")


def builds() -> list[KernelBuild]:
    """Every build that a launch may need, on any device, beside those of products."""
    return [build_for(phase) for phase in (FOLDS, MERGES, RESULTS, DELTAS)]


def launch_merge(device: Device, rows: int, params: bytes, stream: int, units: int) -> None:
    """Enqueue `merge_build`'s kernel on the device, which is current, behind the tiles. Few rows get a CTA each."""
    facts, of_cta = describe(device.index), 1 if rows <= _FEW_ROWS else MERGE_ROWS
    function = load_function(device.index, facts.capability, merge_build(units, of_cta), stream)
    launch_dependent(function.ptr, -(-rows // of_cta), THREADS, params, stream)


def launch_phase(phase: int, device: Device, grid: tuple[int, int], params: bytes, stream: int) -> None:
    """Enqueue a phase on the device, which is current."""
    from cupy.cuda import driver

    facts = describe(device.index)
    function = load_function(device.index, facts.capability, build_for(phase), stream)
    # A char* to the block: the address of that pointer is the array of one parameter that the driver wants, and the
    # driver copies the block before it returns.
    held = ctypes.c_char_p(params)
    driver.launchKernel(function.ptr, *grid, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(held), 0)


def packed(
    problem: FoldProblem | MergeProblem | DeltaProblem,
    target: TensorView,
    rows: tuple[int, int],
    *,
    logits: tuple[int, int] = (0, 0),
    nodes: int = 0,
    state: tuple[int, Matrix],
    grads: tuple[int, Matrix] | None = None,
    out: tuple[int, int, int, int] = (0, 0, 0, 0),
    column: int = 0,
    columns: int = 0,
    node: int = 0,
    part_nodes: int = 1,
    parts: tuple[int, int] = (0, PARTS),
    shards: int = 1,
) -> bytes:
    """LogpParams. rows: the first one and how many. logits, nodes: pointers, and the logits' row stride. state, grads:
    pointers to row 0 and layouts. out: pointer, strides of rows (of RESULTS: lines) and columns (rows), type."""
    row, count = rows
    lines = problem.target
    lined, lines_of_grads = state[1], None if grads is None else grads[1]
    scaling = None if isinstance(problem, MergeProblem) else problem.scaling
    tau, cap, inverse = (None, None, None) if scaling is None else (scaling.tau, scaling.cap, scaling.inverse)
    return _PARAMS.pack(
        logits[0], nodes, target.pointer + row * lines.row_stride * lines.dtype.itemsize,
        state[0] + 4 * row * lined.col_stride,
        0 if grads is None or lines_of_grads is None else grads[0] + 4 * row * lines_of_grads.col_stride,
        out[0],
        count, logits[1],
        lines.row_stride, lines.col_stride,
        lined.batch_strides[0] if lined.batch_strides else 0, lined.row_stride, lined.col_stride,
        0 if lines_of_grads is None else lines_of_grads.row_stride,
        0 if lines_of_grads is None else lines_of_grads.col_stride,
        out[1], out[2],
        problem.vocabulary, PARTS * -(-problem.vocabulary // UNIT), column, columns, node, part_nodes,
        0 if isinstance(problem, FoldProblem) else problem.ignore_index,
        *parts, shards, problem.targets, int(problem.entropy), int(lines.dtype == I64), out[3],
        tau or 0.0, cap or 0.0, inverse or 0.0, int(tau is not None), int(cap is not None),
    )  # fmt: skip


def moved(view: TensorView, matrix: Matrix, row: int, shape: tuple[int, ...]) -> TensorView:
    """The rows of an operand from `row` on."""
    pointer = view.pointer + row * matrix.row_stride * matrix.dtype.itemsize
    return TensorView(pointer, shape, (matrix.row_stride, matrix.col_stride), matrix.dtype, view.device)


def on_its_device(problem: Any, enqueue: Any) -> Run:
    """`backend.Run` that enqueues a problem on its device."""

    def run(m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        from .current import on_device

        given = problem.with_rows(m)
        on_device(given, enqueue, given, operands, out, execution)

    return run
