"""Problems as the C ABI's descriptors, without pointers, threads and streams: what can be kept from one call to the
next."""

from __future__ import annotations

from ..operations.bias_gradient.problem import ColumnSumProblem
from ..operations.block_scaled.problem import BlockScaledProblem
from ..operations.gemm.problem import GemmProblem
from ..operations.linear_logp.problem import DeltaProblem, FoldProblem
from ..operations.matrix import Matrix, batch_offsets
from ..operations.rows.problem import RowProblem
from . import mirror

__all__ = [
    "block_scaled_descriptors",
    "column_sum_descriptors",
    "gemm_descriptors",
    "logp_descriptors",
    "row_descriptors",
]

# Structures without threads and pointers, each with the bytes that are added to its addresses of operands and out, in
# the structure's order.
Templates = list[tuple[bytes, tuple[int, ...]]]


def gemm_descriptors(problem: GemmProblem) -> Templates:
    """One for each index of the batch dimensions that exceed the ABI's."""
    outer = problem.batch[: -mirror.MAX_BATCH_RANK]
    d = mirror.described(mirror.GemmDescriptor)
    d.contract = problem.contract.code
    d.operand_dtype = problem.a.dtype.code
    d.out_dtype = problem.out.dtype.code
    d.accumulate = int(problem.accumulate)
    d.batch_rank = len(problem.batch) - len(outer)
    d.m, d.n, d.k = problem.m, problem.n, problem.k
    for index, size in enumerate(problem.batch[len(outer) :]):
        d.batch_shape[index] = size
        d.a_batch_strides[index] = problem.a.batch_strides[len(outer) + index]
        d.b_batch_strides[index] = problem.b.batch_strides[len(outer) + index]
        d.out_batch_strides[index] = problem.out.batch_strides[len(outer) + index]
    d.a_row_stride, d.a_col_stride = problem.a.row_stride, problem.a.col_stride
    d.b_row_stride, d.b_col_stride = problem.b.row_stride, problem.b.col_stride
    d.out_row_stride, d.out_col_stride = problem.out.row_stride, problem.out.col_stride
    if problem.bias is not None:
        d.bias_dtype = problem.bias.dtype.code
        d.bias_stride = problem.bias.stride
    template = bytes(d)
    return [(template, (a, b, out, 0)) for a, b, out in batch_offsets(outer, problem.a, problem.b, problem.out)]


def block_scaled_descriptors(problem: BlockScaledProblem) -> Templates:
    """The one descriptor."""
    d = mirror.described(mirror.BlockScaledDescriptor)
    d.a_dtype, d.b_dtype, d.out_dtype = problem.a.dtype.code, problem.b.dtype.code, problem.out.dtype.code
    d.accumulate = int(problem.accumulate)
    d.m, d.n, d.k = problem.m, problem.n, problem.k
    for name in ("a", "scale_a", "b", "scale_b", "out"):
        matrix: Matrix = getattr(problem, name)
        setattr(d, f"{name}_row_stride", matrix.row_stride)
        setattr(d, f"{name}_col_stride", matrix.col_stride)
    return [(bytes(d), (0,) * 5)]


def column_sum_descriptors(problem: ColumnSumProblem) -> Templates:
    """The one descriptor."""
    d = mirror.described(mirror.ColumnSumDescriptor)
    d.operand_dtype, d.out_dtype = problem.dc.dtype.code, problem.out.dtype.code
    d.accumulate = int(problem.accumulate)
    d.m, d.n = problem.m, problem.n
    d.batch_rank = len(problem.batch)
    for index, size in enumerate(problem.batch):
        d.batch_shape[index] = size
        d.batch_strides[index] = problem.dc.batch_strides[index]
    d.row_stride, d.col_stride = problem.dc.row_stride, problem.dc.col_stride
    d.out_stride = problem.out.stride
    return [(bytes(d), (0,) * 2)]


def row_descriptors(problem: RowProblem) -> Templates:
    """The one descriptor."""
    d = mirror.described(mirror.RowDescriptor)
    d.kind = int(problem.kind)
    d.batch_rank = len(problem.batch)
    d.m, d.n = problem.m, problem.n
    for index, size in enumerate(problem.batch):
        d.batch_shape[index] = size
    for name, matrix in (("a", problem.a), ("b", problem.b), ("out", problem.out)):
        if matrix is not None:
            setattr(d, f"{name}_dtype", matrix.dtype.code)
            strides = getattr(d, f"{name}_batch_strides")
            for index, stride in enumerate(matrix.batch_strides):
                strides[index] = stride
            setattr(d, f"{name}_row_stride", matrix.row_stride)
            setattr(d, f"{name}_col_stride", matrix.col_stride)
    return [(bytes(d), (0,) * 3)]


def _dense(lines: Matrix, m: int) -> bool:
    return lines.row_stride == m and lines.col_stride == 1


def logp_descriptors(problem: FoldProblem | DeltaProblem) -> Templates:
    """The one descriptor. A line of M numbers after the other stays so for other M."""
    d = mirror.described(mirror.LogpDescriptor)
    d.contract = problem.contract.code
    d.operand_dtype = problem.hidden.dtype.code
    d.m, d.n, d.k = problem.m, problem.n, problem.k
    d.vocabulary, d.start = problem.vocabulary, problem.start
    d.target_size, d.targets, d.entropy = problem.target.dtype.itemsize, problem.targets, int(problem.entropy)
    scaling = problem.scaling
    d.tau, d.cap, d.inverse = scaling.tau or 0.0, scaling.cap or 0.0, scaling.inverse or 0.0
    for name in ("hidden", "weight", "target"):
        matrix: Matrix = getattr(problem, name)
        setattr(d, f"{name}_row_stride", matrix.row_stride)
        setattr(d, f"{name}_col_stride", matrix.col_stride)
    if problem.bias is not None:
        d.bias_dtype, d.bias_stride = problem.bias.dtype.code, problem.bias.stride
    if isinstance(problem, DeltaProblem):
        state = problem.state
        d.ignore_index = problem.ignore_index
        d.out_dtype = problem.out.dtype.code
        d.out_row_stride, d.out_col_stride = problem.out.row_stride, problem.out.col_stride
        d.grads_line_stride, d.grads_row_stride = problem.grads.row_stride, problem.grads.col_stride
        d.dense = 2 * int(_dense(problem.grads, problem.m))
    else:
        state = problem.out
    d.state_line_stride, d.state_row_stride = state.row_stride, state.col_stride
    d.dense |= int(_dense(state, problem.m))
    return [(bytes(d), (0,) * 7)]
