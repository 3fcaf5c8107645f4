"""Problems of products for tests of what the CUDA backend would launch; nothing is at their addresses."""

from __future__ import annotations

from detkern.cu.gemm_tile import Load, Tile, tiles_for
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import FMA, MMA8, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, DType

DEVICE = Device("cuda", 0)
HOPPER = (9, 0)
KERNELS = (FMA, MMA16, MMA8, TREE, TREE_MMA16)


def view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, pointer: int = 4096) -> TensorView:
    return TensorView(pointer, shape, strides, dtype, DEVICE)


def problem_of(
    contract: Contract, m: int, n: int, k: int, dtype: DType = BF16, batch: tuple[int, ...] = ()
) -> GemmProblem:
    """Row-major a, b and out, rows at multiples of 16 bytes."""
    return laid_out(contract, m, n, k, (Load.K_MAJOR, Load.MN_MAJOR), dtype, dtype, batch)


def laid_out(
    contract: Contract,
    m: int,
    n: int,
    k: int,
    loads: tuple[Load, Load],
    dtype: DType = BF16,
    out_dtype: DType = BF16,
    batch: tuple[int, ...] = (),
) -> GemmProblem:
    """a and b for these load paths, lines at multiples of 16 bytes (STRIDED: rows that are not),
    and a row-major out."""

    def operand(rows: int, columns: int, by_columns: bool, dtype: DType, padding: int = 0) -> TensorView:
        lines, length = (columns, rows) if by_columns else (rows, columns)
        unit = 16 // dtype.itemsize
        line = -(-length // unit) * unit + padding
        strides = [1, line] if by_columns else [line, 1]
        step = line * lines
        for size in reversed(batch):
            strides.insert(0, step)
            step *= size
        return view((*batch, rows, columns), tuple(strides), dtype)

    return gemm_problem(
        contract,
        operand(m, k, loads[0] == Load.MN_MAJOR, dtype, loads[0] == Load.STRIDED),
        operand(k, n, loads[1] == Load.K_MAJOR, dtype, loads[1] == Load.STRIDED),
        operand(m, n, False, out_dtype),
        None,
        False,
    )


def tma_tiles(contract: Contract = MMA16) -> list[Tile]:
    return [tile for tile in tiles_for(contract, BF16) if tile.by_tma]
