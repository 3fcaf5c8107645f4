"""linear_logp on CUDA by products: a product leaves a block of finished logits in scratch memory, and linear_logp.cu
folds it, or makes the gradient of its logits of it. So every contract and device that has products has linear_logp,
whatever their tiles are.

Blocks are divided so that scratch memory stays within SCRATCH_BYTES (where 64 rows of 256 columns are no more); none of
the choices here can change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..dispatch.backend import Kernel, Run
from ..operations.gemm.problem import GemmProblem, gemm_problem
from ..operations.linear_logp.operation import DELTA, FOLD, MERGE
from ..operations.linear_logp.problem import PARTS, UNIT, DeltaProblem, FoldProblem, MergeProblem, part_edges
from ..operations.problem import Operands
from ..tensors import TensorView
from ..tensors.execution import Execution
from ..vocabulary.contracts import CONTRACTS
from ..vocabulary.dtypes import F32
from . import linear_logp_launch
from . import linear_logp_wgmma as wgmma
from .gemm import Products
from .gemm_tile import portable_sources
from .implementation import CudaImplementation
from .linear_logp_launch import (
    DELTAS,
    FOLDS,
    MERGE_ROWS,
    MERGES,
    RESULTS,
    SOURCE,
    THREADS,
    launch_phase,
    moved,
    on_its_device,
    packed,
)  # fmt: skip
from .loader import KernelBuild

__all__ = [
    "SCRATCH_BYTES",
    "Block",
    "Deltas",
    "Folds",
    "Merges",
    "blocks",
    "row_pieces",
]

SCRATCH_BYTES = 56 << 20
_LOGITS_BYTES = 32 << 20  # of a block
_NODES_BYTES = SCRATCH_BYTES - _LOGITS_BYTES

# Constants of the kernel file.
GROUP, _DELTA_COLUMNS = 4 * UNIT, 2048
_MOST_GROUPS = 65535  # of a launch of FOLD: blocks along y


@dataclass(frozen=True, slots=True)
class Block:
    """Columns whose logits are in scratch memory at one time: from `column` on, and the groups of four units that they
    are.

    node: the number of the first group among those of the shard, of which every part has as many as a whole part.
    """

    column: int
    columns: int
    node: int
    groups: int


def _part_groups(problem: FoldProblem) -> int:
    return -(-(PARTS * -(-problem.vocabulary // UNIT)) // GROUP)


def row_pieces(m: int, groups: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each piece whose groups' states fit."""
    step = max(_NODES_BYTES // (12 * max(groups, 1)) // 128 * 128, 64)
    for row in range(0, m, step):
        yield row, min(step, m - row)


def blocks(problem: FoldProblem, rows: int) -> Iterator[Block]:
    """The blocks of a fold of so many rows: all columns at once where they fit, else pieces of a part of whole
    groups."""
    groups = _part_groups(problem)
    if 4 * rows * problem.n <= _LOGITS_BYTES and problem.count * groups <= _MOST_GROUPS:
        if problem.n:
            yield Block(problem.start, problem.n, 0, problem.count * groups)
        return
    edges = part_edges(problem.vocabulary)
    step = min(max(_LOGITS_BYTES // (4 * rows) // GROUP, 1), _MOST_GROUPS)
    for part in range(problem.count):
        low, high = edges[problem.first + part], edges[problem.first + part + 1]
        for first in range(low, high, step * GROUP):
            columns = min(step * GROUP, high - first)
            yield Block(first, columns, part * groups + (first - low) // GROUP, -(-columns // GROUP))


class _Logits:
    """What launches the products of one problem, by their layouts."""

    def __init__(self, problem: FoldProblem | DeltaProblem, products: Products) -> None:
        self._problem, self._products = problem, products
        self._runs: dict[GemmProblem, Run] = {}

    def __call__(
        self, hidden: TensorView, weight: TensorView, bias: TensorView | None, first: int, columns: int,
        out: TensorView,
        execution: Execution,
    ) -> None:  # fmt: skip
        """out = the logits of hidden's rows over `columns` rows of weight from `first` on."""
        problem = self._problem
        down, along = problem.weight.row_stride, problem.weight.col_stride
        size = problem.weight.dtype.itemsize
        right = TensorView(
            weight.pointer + first * down * size,
            (problem.k, columns),
            (along, down),
            problem.weight.dtype,
            weight.device,
        )
        column = None
        if bias is not None and problem.bias is not None:
            pointer = bias.pointer + first * problem.bias.stride * problem.bias.dtype.itemsize
            column = TensorView(pointer, (columns,), (problem.bias.stride,), problem.bias.dtype, bias.device)
        product = gemm_problem(problem.contract, hidden, right, out, column, False)
        # A plan serves any number of rows, but for a single one.
        key = product if product.m == 1 else product.with_rows(2)
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._products.prepare(product, execution)
        run(product.m, (hidden, right, column), out, execution)


class Folds(CudaImplementation[FoldProblem]):
    """States of rows: products, the fold of their blocks, and the merge of what that gives."""

    def __init__(self, products: Products) -> None:
        super().__init__(FOLD, _sources)
        self._products = products

    def builds(self, capability: tuple[int, int]) -> list[KernelBuild]:
        return linear_logp_launch.builds() + (wgmma.builds() if capability == (9, 0) else [])

    def refuses(self, problem: FoldProblem) -> str | None:
        return _no_product(self._products, problem, self.operation) or super().refuses(problem)

    def explain(self, problem: FoldProblem) -> Kernel:
        if wgmma.takes(problem):
            return wgmma.explained(problem)
        groups = problem.count * _part_groups(problem)
        rows = next(row_pieces(problem.m, groups))[1] if problem.m else 0
        every = list(blocks(problem, rows)) if rows else []
        widest = max((block.columns for block in every), default=0)
        return Kernel(
            name=f"linear_logp-{problem.contract} ({SOURCE}, and products)",
            tile=f"blocks of {rows} x {widest} logits, a warp for 256 of a row",
            geometry=f"{len(every)} products and folds for each {rows} rows, {THREADS} threads, then a merge",
            scratch_bytes=4 * rows * widest + 12 * rows * groups,
        )

    def prepare(self, problem: FoldProblem, execution: Execution) -> Run:
        """What enqueues all launches. Nothing waits for the device and nothing is read back: once the kernels have been
        loaded, the call can be captured into a graph."""
        if wgmma.takes(problem):
            return wgmma.Folds(problem)
        logits_of = _Logits(problem, self._products)

        def enqueue(given: FoldProblem, operands: Operands, out: TensorView, execution: Execution) -> None:
            from .current import scratch_memory

            hidden, weight, target, bias = operands
            assert hidden is not None
            assert weight is not None
            assert target is not None
            stream, groups = execution.stream, _part_groups(given)
            pieces = list(row_pieces(given.m, given.count * groups))
            most = pieces[0][1]
            width = max((block.columns for block in blocks(given, most)), default=0)
            pitch = -(-width // UNIT) * UNIT
            held = scratch_memory(execution, 4 * most * pitch + 12 * most * given.count * groups + 16)
            nodes = held.pointer + 4 * most * pitch
            common: dict[str, Any] = {
                "nodes": nodes, "state": (out.pointer, given.out), "part_nodes": groups, "parts": (given.first,
                given.count),
            }  # fmt: skip
            for rows in pieces:
                row, count = rows
                left = moved(hidden, given.hidden, row, (count, given.k))
                for block in blocks(given, most):
                    place = TensorView(held.pointer, (count, block.columns), (pitch, 1), F32, held.device)
                    logits_of(left, weight, bias, block.column - given.start, block.columns, place, execution)
                    params = packed(
                        given, target, rows, logits=(held.pointer, pitch), column=block.column, columns=block.columns,
                        node=block.node, **common,
                    )  # fmt: skip
                    launch_phase(FOLDS, given.device, (-(-count // 8), block.groups), params, stream)
                params = packed(given, target, rows, column=given.start, columns=given.n, **common)
                launch_phase(MERGES, given.device, (-(-count // MERGE_ROWS), 1), params, stream)

        return on_its_device(problem, enqueue)


class Merges(CudaImplementation[MergeProblem]):
    """Results of states."""

    def __init__(self) -> None:
        super().__init__(MERGE, lambda variant: (SOURCE,))

    def explain(self, problem: MergeProblem) -> Kernel:
        grid = -(-problem.m // THREADS)
        return Kernel(f"linear_logp_merge ({SOURCE})", "a row a thread", f"grid {grid}, {THREADS} threads")

    def prepare(self, problem: MergeProblem, execution: Execution) -> Run:
        """What enqueues the launch."""

        def enqueue(given: MergeProblem, operands: Operands, out: TensorView, execution: Execution) -> None:
            states, target = operands
            assert states is not None
            assert target is not None
            params = packed(
                given, target, (0, given.m), state=(states.pointer, given.states), shards=given.shards,
                out=(out.pointer, given.out.row_stride, given.out.col_stride, F32.code),
            )  # fmt: skip
            launch_phase(RESULTS, given.device, (-(-given.m // THREADS), 1), params, execution.stream)

        return on_its_device(problem, enqueue)


class Deltas(CudaImplementation[DeltaProblem]):
    """Gradients of logits: products, and what is made of their blocks."""

    def __init__(self, products: Products) -> None:
        super().__init__(DELTA, _sources)
        self._products = products

    def refuses(self, problem: DeltaProblem) -> str | None:
        return _no_product(self._products, problem, self.operation) or super().refuses(problem)

    def explain(self, problem: DeltaProblem) -> Kernel:
        if wgmma.takes(problem):
            return wgmma.explained(problem)
        rows, columns = _delta_block(problem)
        return Kernel(
            name=f"linear_logp_delta-{problem.contract} ({SOURCE}, and products)",
            tile=f"blocks of {rows} x {columns} logits, {_DELTA_COLUMNS} of a row a CTA",
            geometry=f"a product and a launch for each block, {THREADS} threads",
            scratch_bytes=4 * rows * columns,
        )

    def prepare(self, problem: DeltaProblem, execution: Execution) -> Run:
        """What enqueues all launches, as `Folds.prepare`."""
        if wgmma.takes(problem):
            return wgmma.Deltas(problem)
        logits_of = _Logits(problem, self._products)

        def enqueue(given: DeltaProblem, operands: Operands, out: TensorView, execution: Execution) -> None:
            from .current import scratch_memory

            hidden, weight, target, state, grads, bias = operands
            assert hidden is not None
            assert weight is not None
            assert target is not None
            assert state is not None
            assert grads is not None
            most, width = _delta_block(given)
            pitch = -(-width // UNIT) * UNIT
            held = scratch_memory(execution, 4 * most * pitch)
            for row in range(0, given.m, most):
                count = min(most, given.m - row)
                left = moved(hidden, given.hidden, row, (count, given.k))
                for first in range(0, given.n, width):
                    columns = min(width, given.n - first)
                    place = TensorView(held.pointer, (count, columns), (pitch, 1), F32, held.device)
                    logits_of(left, weight, bias, first, columns, place, execution)
                    to = out.pointer + given.out.dtype.itemsize * (
                        row * given.out.row_stride + first * given.out.col_stride
                    )
                    params = packed(
                        given, target, (row, count), logits=(held.pointer, pitch), state=(state.pointer, given.state),
                        grads=(grads.pointer, given.grads), column=given.start + first, columns=columns,
                        out=(to, given.out.row_stride, given.out.col_stride, given.out.dtype.code),
                    )  # fmt: skip
                    grid = count, -(-columns // _DELTA_COLUMNS)
                    launch_phase(DELTAS, given.device, grid, params, execution.stream)

        return on_its_device(problem, enqueue)


def _delta_block(problem: DeltaProblem) -> tuple[int, int]:
    """Rows and columns whose logits are in scratch memory at one time: as many rows as there are, up to 8192."""
    rows = max(min(problem.m, 8192), 1)
    columns = max(_LOGITS_BYTES // (4 * rows) // GROUP * GROUP, GROUP)
    return rows, min(columns, max(problem.n, 1))


def _sources(variant: str) -> tuple[str, ...]:
    return (SOURCE, wgmma.SOURCE, *portable_sources(CONTRACTS[variant.rpartition("-")[2]]))


def _no_product(products: Products, problem: FoldProblem | DeltaProblem, operation: Any) -> str | None:
    """Why the device has no product by the problem's contract."""
    if reason := operation.misfit(problem):
        return str(reason)
    dtype, device = problem.hidden.dtype, problem.device
    hidden = TensorView(4096, (16, 16), (16, 1), dtype, device)
    weight = TensorView(4096, (16, 16), (1, 16), dtype, device)
    product = gemm_problem(
        problem.contract, hidden, weight, TensorView(4096, (16, 16), (16, 1), F32, device), None, False
    )
    return products.refuses(product)
