"""Operands and outputs in device memory for the CUDA tests: every way of lying there, with poison around them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import detkern
from detkern.cu import ahead, gemm_tile, geometry, row_scans, row_sums, rows, tile_choice
from detkern.cu.backend import BACKEND
from detkern.cu.device import describe
from detkern.cu.loader import KernelBuild, supported_architectures, target
from detkern.dispatch.backend import Execution
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import CONTRACTS, MMA8, Contract
from detkern.vocabulary.dtypes import BF16, E4M3, DType, from_numpy

DEVICE = Device("cuda", 0)

# What every contract of the CUDA backend is tested with; mma8 is no contract of the H200 and tested apart.
PAIRS = [
    (contract, dtype)
    for contract in CONTRACTS.values()
    if contract.name in ("fma", "mma16", "tree", "tree-mma16")
    for dtype in contract.operands
]
PAIR_IDS = [f"{contract}-{dtype.short}" for contract, dtype in PAIRS]

# How a matrix lies in memory: (row stride, column stride, offset of element [0, 0], elements in all) for its shape.
# "rows" and "columns" keep lines at multiples of 16 bytes; the others need the path for any strides. There is also
# "packed", rows without room between them.
MODES = ("rows", "columns", "rows-odd", "columns-odd", "reversed", "spread")
# Modes that the kernels copy in vectors, and the load path of the element-by-element copy.
FAST = ("rows", "columns")


def _lines(length: int) -> int:
    return max(8, -(-length // 8) * 8)


def _geometry(mode: str, rows: int, columns: int) -> tuple[int, int, int, int]:
    rows, columns = max(rows, 1), max(columns, 1)
    if mode == "rows":
        line = _lines(columns)
        return line, 1, 0, rows * line
    if mode == "columns":
        line = _lines(rows)
        return 1, line, 0, columns * line
    if mode == "packed":
        return columns, 1, 0, rows * columns
    if mode == "rows-odd":
        line = columns + 1 + columns % 2
        return line, 1, 1, rows * line + 1
    if mode == "columns-odd":
        line = rows + 1 + rows % 2
        return 1, line, 3, columns * line + 3
    if mode == "reversed":
        return -columns, -1, rows * columns - 1, rows * columns
    line = 2 * columns + 3
    return line, 2, 0, rows * line


def poison(count: int, dtype: DType) -> np.ndarray:
    """NaN patterns that no kernel writes: reading one spoils a result, and one that is left in an output shows."""
    pattern = {4: 0xFFC0DEAD, 2: 0xFFAD}[dtype.itemsize]
    return np.full(count, pattern, dtype.bits)


class Placed:
    """A host matrix [rows, columns] put into device memory in one of MODES."""

    def __init__(self, host: np.ndarray, mode: str) -> None:
        import cupy

        dtype = from_numpy(host.dtype)
        assert dtype is not None
        self.dtype, self.shape, self.mode = dtype, host.shape, mode
        row, column, offset, size = _geometry(mode, *host.shape)
        self.strides, self._offset = (row, column), offset
        buffer = poison(size, dtype)
        self._window(buffer)[...] = host.view(dtype.bits)
        self.memory = cupy.asarray(buffer)
        self.view = TensorView(
            self.memory.data.ptr + offset * dtype.itemsize, host.shape, (row, column), dtype, DEVICE, array=self.memory
        )

    def _window(self, buffer: np.ndarray) -> np.ndarray:
        size = self.dtype.itemsize
        return np.lib.stride_tricks.as_strided(
            buffer[self._offset :], self.shape, tuple(stride * size for stride in self.strides)
        )

    def bits(self) -> np.ndarray:
        """The matrix's bits, read back; fails where anything around the matrix was written."""
        import cupy

        buffer = cupy.asnumpy(self.memory)
        window = self._window(buffer)
        result = window.copy()
        window[...] = poison(1, self.dtype)[0]
        assert (buffer == poison(1, self.dtype)[0]).all(), "memory around the output was written"
        return result


def output(shape: tuple[int, int], dtype: DType, mode: str, start: np.ndarray | None = None) -> Placed:
    """An output full of poison, or of `start`."""
    host = poison(shape[0] * shape[1], dtype).reshape(shape).view(dtype.numpy) if start is None else start
    return Placed(host, mode)


def vector(host: np.ndarray) -> TensorView:
    """A bias in device memory."""
    import cupy

    dtype = from_numpy(host.dtype)
    assert dtype is not None
    memory = cupy.asarray(host.view(dtype.bits))
    return TensorView(memory.data.ptr, host.shape, (1,), dtype, DEVICE, array=memory)


def batched(host: np.ndarray, dtype: DType, axes: tuple[int, ...]) -> TensorView:
    """The host array in device memory with its axes stored in the order `axes`, seen in its own order."""
    import cupy

    stored = np.ascontiguousarray(host.view(dtype.bits).transpose(axes))
    memory = cupy.asarray(stored)
    strides = [0] * host.ndim
    for place, axis in enumerate(axes):
        strides[axis] = math.prod(stored.shape[place + 1 :])
    return TensorView(memory.data.ptr, host.shape, tuple(strides), dtype, DEVICE, array=memory)


def random_bfloat16(memory: Any, seed: int = 0) -> None:
    """Fill a CuPy array of uint16 with bf16 numbers from 1/2 to 2 of either sign, by a hash of the index: for what is
    too large to be made on the host."""
    import cupy

    # Signs and significands from a hash of the index, exponents of numbers near one.
    fill = cupy.ElementwiseKernel(
        "int64 start",
        "uint16 bits",
        """
        unsigned long long x = (unsigned long long)(start + i) * 0x9E3779B97F4A7C15ULL;
        x ^= x >> 29;
        x *= 0xBF58476D1CE4E5B9ULL;
        x ^= x >> 32;
        bits = (unsigned short)((x & 0x100) << 7 | 0x3F00 | (x & 0xFF));
        """,
        "fill_with_bfloat16",
    )
    flat, part = memory.reshape(-1), 2**28
    for start in range(0, flat.size, part):
        fill((seed << 40) + start, flat[start : start + part])


def bfloat16_view(memory: Any) -> TensorView:
    """A CuPy array of uint16 as bf16."""
    strides = tuple(stride // 2 for stride in memory.strides)
    return TensorView(memory.data.ptr, memory.shape, strides, BF16, DEVICE, array=memory)


def allocate(size: int) -> TensorView:
    import cupy

    memory = cupy.full(size, 0xFF, np.uint8)  # NaNs: a tree that read before it wrote would show
    return TensorView(memory.data.ptr, (size,), (1,), E4M3, DEVICE, array=memory)


def run(
    contract: Contract,
    a: TensorView,
    b: TensorView,
    out: TensorView,
    *,
    bias: TensorView | None = None,
    accumulate: bool = False,
    tile: gemm_tile.Tile | None = None,
    loads: tuple[gemm_tile.Load, gemm_tile.Load] | None = None,
    grid: int | None = None,
    stream: int = 0,
    memory: Callable[[int], TensorView] = allocate,
) -> geometry.Launch:
    """Launch on views, straight through the launch code: also what the backend would refuse. Returns what was launched.

    tile, loads, grid: instead of what the tables give (of clusters, as many); memory: where scratch comes from.
    """
    from detkern.cu import launch

    problem = gemm_problem(contract, a, b, out, bias, accumulate)
    execution = Execution(DEVICE, stream, memory)
    facts = describe(DEVICE.index)
    if tile is None and loads is None and grid is None:
        if 0 not in out.shape:
            launches = launch.Launches(problem)
            launches(problem.m, (a, b, bias), out, execution)
            plan = launches.plans.get(problem.m)
            assert plan is not None
            return plan.launch
        return tile_choice.choose(problem, facts.capability, facts.multiprocessors)
    tile = tile or tile_choice.choose(problem, facts.capability, facts.multiprocessors).tile
    chosen = geometry.launch_for(problem, tile, facts.multiprocessors, loads)
    if grid is not None:
        chosen = replace(chosen, grid=min(grid * chosen.cluster, chosen.grid))
    launch.launch(problem, a, b, out, bias, execution, chosen)
    return chosen


def tiles_here(problem: GemmProblem, loads: tuple[gemm_tile.Load, gemm_tile.Load]) -> list[gemm_tile.Tile]:
    """The tiles by which this device can compute the problem on these load paths."""
    capability = describe(DEVICE.index).capability
    return [
        tile
        for tile in gemm_tile.tiles_for(problem.contract, problem.a.dtype)
        if gemm_tile.fits(tile, capability) and geometry.takes(problem, tile, loads)
    ]


def one_of_each_organisation(tiles: list[gemm_tile.Tile]) -> list[gemm_tile.Tile]:
    """All tiles of the kernels for every device; of the wgmma kernels' many, the first of each way in which their warps
    work together, hold rows, share them and write."""
    seen = set()
    result = []
    for tile in tiles:
        macros = dict(tile.macros)
        sizes = ("GROUP_M", "IN_TURN", "SHARES", "STRIDED_OUT", "F32_OUT", "SWAPPED", "WARPS_M", "GROUPS_M", "GROUPS_N")
        kind = (tile.table, *map(macros.get, sizes), min(tile["TILE_M"], 64), tile["TILE_N"] % 64 == 0, tile.fills)
        if not tile.by_tma or kind not in seen:
            result.append(tile)
        seen.add(kind)
    return result


def skip_without_wgmma() -> None:
    """Skips a test where the device has no wgmma."""
    if describe(DEVICE.index).capability != (9, 0):
        pytest.skip("gpu: wgmma needs a device of compute capability 9.0")


def replay(
    contract: Contract,
    a: np.ndarray,
    b: np.ndarray,
    *,
    out_dtype: DType | None = None,
    bias: np.ndarray | None = None,
    initial: np.ndarray | None = None,
) -> np.ndarray:
    """The CPU's result, as bits."""
    out = None if initial is None else initial.copy()
    result = detkern.gemm(
        a, b, bias=bias, out=out, accumulate=initial is not None, contract=contract.name, backend="cpu",
        out_dtype=out_dtype.name if out_dtype is not None and out is None else None,
    )  # fmt: skip
    dtype = from_numpy(result.dtype)
    assert dtype is not None
    return result.view(dtype.bits)


def differing(expected: np.ndarray, got: np.ndarray) -> int:
    """How many elements differ, as integers."""
    assert expected.shape == got.shape
    assert expected.dtype == got.dtype
    return int((expected != got).sum())


@functools.cache
def compile_rows() -> int:
    """Every build of the row operations put into the cache with all cores; the number of kernels."""
    return _compiled(rows.builds(describe(0).capability))


@functools.cache
def compile_row_sums() -> int:
    """Every build of row_sums.cu put into the cache with all cores; the number of kernels."""
    return _compiled(row_sums.builds())


@functools.cache
def compile_row_scans() -> int:
    """Every build of row_scans.cu put into the cache with all cores; the number of kernels."""
    return _compiled(row_scans.builds())


def _compiled(builds: list[KernelBuild]) -> int:
    architecture = target(describe(0).capability, supported_architectures())
    return len(list(ahead.compile_ahead(builds, architecture, len(os.sched_getaffinity(0)))))


@functools.cache
def compile_all() -> int:
    """Every kernel of the backend, and mma8's, put into the cache with all cores; the number of kernels."""
    capability = describe(0).capability
    wanted = ahead.builds([*(contract for contract, _ in PAIRS), MMA8], capability) + BACKEND.other_builds(capability)
    return _compiled(wanted)
