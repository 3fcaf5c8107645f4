"""fma_narrow.cu compiled for the host: its indices, its ring of stages and its barriers, bit for bit against the
replay."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from detkern.cu import gemm_tile, loader
from detkern.cu.gemm_tile import Load, Tile
from detkern.cu.geometry import launch_for, load_paths
from detkern.operations.gemm import replay as numpy_replay
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import FMA
from detkern.vocabulary.dtypes import BF16, F16, F32, DType, from_numpy

pytest.importorskip("cupy", reason="CuPy is not installed")
if shutil.which("g++") is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

from detkern.cu.launch import pack_params

EMULATION = Path(__file__).parents[2] / "emulation"
DEVICE = Device("cuda", 0)
TILES = [tile for tile in gemm_tile.tiles_for(FMA, F32) if tile.table == "fma_narrow"]
# Every tile and pair of load paths; the operand types, of which the 16-bit ones have another element, go round.
CASES = [
    (tile, loads, (F32, (BF16, F16)[turn % 2], F32, (F16, BF16)[turn % 2])[(turn + number) % 4])
    for number, tile in enumerate(TILES)
    for turn, loads in enumerate(sorted(tile.loads))
]


def _compiled(folder: Path, tile: Tile, loads: tuple[Load, Load], dtype: DType) -> ctypes.CDLL:
    """The kernel's own files, with the host's PTX for that of ptx/."""
    shutil.copytree(loader.FOLDER, folder, dirs_exist_ok=True)
    for source in (EMULATION / "cuda" / "ptx.cuh", EMULATION / "cuda" / "kernel.cpp", EMULATION / "fibers.h"):
        shutil.copy(source, folder)
    for header in (folder / "ptx").glob("*.cuh"):
        lines = header.read_text().splitlines(True) if header.name == "types.cuh" else []
        # The host has its own names of the integer types.
        kept = [line for line in lines if not line.startswith(("typedef", "#define DETKERN_INLINE"))]
        header.write_text("".join(["#include <cstdint>\n", *kept, '#include "ptx.cuh"\n']))
    build = gemm_tile.build_for(FMA, dtype, tile, *loads)
    library = folder / "kernel.so"
    command = [
        "g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fpermissive", "-w", "-U_FORTIFY_SOURCE",
        f'-DKERNEL="{build.source}"', *(f"-D{name}={value}" for name, value in build.macros),
        f"-I{folder}", str(folder / "kernel.cpp"), "-o", str(library),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def _placed(host: np.ndarray, by_columns: bool) -> tuple[np.ndarray, TensorView]:
    """Lines at multiples of 16 bytes with NaNs behind each: the memory, and the matrices [batch, rows,
    columns] in it."""
    dtype = from_numpy(host.dtype)
    assert dtype is not None
    stored = host.view(dtype.bits).transpose(0, 2, 1) if by_columns else host.view(dtype.bits)
    batch, lines, length = stored.shape
    unit = 16 // dtype.itemsize
    line = -(-length // unit) * unit + unit
    room = np.full(batch * lines * line + unit, {4: 0xFFC0DEAD, 2: 0xFFAD}[dtype.itemsize], dtype.bits)
    memory = room[-room.ctypes.data % 16 // dtype.itemsize :][: batch * lines * line]
    memory.reshape(batch, lines, line)[:, :, :length] = stored
    strides = (lines * line, 1, line) if by_columns else (lines * line, line, 1)
    return memory, TensorView(memory.ctypes.data, host.shape, strides, dtype, DEVICE, array=memory)


@pytest.mark.parametrize(("tile", "loads", "dtype"), CASES, ids=str)
def test_the_kernel_on_the_host_gives_the_replays_bits(
    tile: Tile, loads: tuple[Load, Load], dtype: DType, tmp_path: Path
) -> None:
    """K shorter than a stage, of one, and with a tail behind more stages than the ring has; with copies that come at
    once and as late as they may; one tile a CTA, and one CTA for all. Half of the chains start at -0, and some
    underflow to it."""
    library = _compiled(tmp_path, tile, loads, dtype)
    ring = tile["TILE_K"] * tile["STAGES"]
    m, n = tile["TILE_M"] + 3, 2 * tile["TILE_N"] - 5
    for k in (0, 1, tile["TILE_K"], ring + 2 * tile["TILE_K"] + 3):
        a = operands.generate("wide", dtype, (2, m, k), 41)
        b = operands.generate("wide", dtype, (2, k, n), 42)
        initial = operands.generate("wide", F32, (2, m, n), 43)
        initial[:, ::2] = -0.0
        if k > 1:
            a[:, 0], b[:, :, 0] = 0.0, 0.0
            a[:, 0, k - 1], b[:, k - 1, 0] = -(2.0**-20), 2.0**-20  # of f32 2^-140 below: -0 is what is left
            if dtype == F32:
                a[:, 0, k - 1], b[:, k - 1, 0] = -(2.0**-80), 2.0**-80
        bias = operands.generate("normal", F32, (n,), 44)
        memory_a, view_a = _placed(a, loads[0] == Load.MN_MAJOR)
        memory_b, view_b = _placed(b, loads[1] == Load.K_MAJOR)
        bias_view = TensorView(bias.ctypes.data, bias.shape, (1,), F32, DEVICE, array=bias)
        for accumulate in (False, True):
            expected = np.stack([
                numpy_replay.gemm(FMA, *pair, initial=start if accumulate else None, bias=None if accumulate else bias,
                    out_dtype=F32)
                for *pair, start in zip(a, b, initial, strict=True)
            ])  # fmt: skip
            for late, one_cta in ((False, True), (True, False), (True, True)):
                out = initial.copy()
                out_view = TensorView(out.ctypes.data, out.shape, (m * n, n, 1), F32, DEVICE, array=out)
                problem = gemm_problem(FMA, view_a, view_b, out_view, None if accumulate else bias_view, accumulate)
                assert k < 2 or load_paths(problem) == loads
                pointers = (view_a.pointer, view_b.pointer, out_view.pointer, bias_view.pointer, 0)
                block = b"".join(pointer.to_bytes(8, "little") for pointer in pointers) + pack_params(problem)
                grid = 1 if one_cta else launch_for(problem, tile, 132, loads).grid
                library.emulation_launch(
                    block, grid, int(late),
                    (ctypes.c_void_p * 2)(view_a.pointer, view_b.pointer),
                    (ctypes.c_int64 * 2)(memory_a.nbytes, memory_b.nbytes),
                )  # fmt: skip
                wrong = (out.view(np.uint32) != expected.view(np.uint32)).sum()
                assert wrong == 0, f"{wrong} of {out.size}: k {k}, accumulate {accumulate}, late {late}, grid {grid}"
