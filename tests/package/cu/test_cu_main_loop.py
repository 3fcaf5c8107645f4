"""Hopper's main loop, ring, producer and roles in a kernel that is not detkern's, with a walk and an epilogue of its
own: tests/kernels/grouped_row_max.cu, which includes them as they are."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cu_compiled import NEEDS_A_COMPILER, check_instruction, compile_build, instructions_of, main_loops, registers_of

from detkern.cu import loader
from detkern.cu.gemm_tile import Load, tiles_for
from detkern.cu.loader import KernelBuild
from detkern.vocabulary.contracts import MMA16, TREE_MMA16
from detkern.vocabulary.dtypes import BF16, F32, DType

pytest.importorskip("cupy", reason="CuPy is not installed")

pytestmark = NEEDS_A_COMPILER

KERNEL = Path(__file__).parents[2] / "kernels" / "grouped_row_max.cu"
STAGES, STAGE_BYTES = 5, (128 + 192) * 128


def grouped_row_max(element_bytes: int) -> KernelBuild:
    """128 x 192 tiles of K-major operands."""
    shared = STAGES * (STAGE_BYTES + 16) + 1024
    return KernelBuild(
        KERNEL.name, (("OPERAND_BYTES", element_bytes), ("SMEM_BYTES", shared)), shared, "grouped row max"
    )


@pytest.fixture
def beside_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels' folder with this one in it."""
    shutil.copytree(loader.FOLDER, tmp_path / "kernels")
    shutil.copy(KERNEL, tmp_path / "kernels")
    monkeypatch.setattr(loader, "FOLDER", tmp_path / "kernels")
    yield
    loader.read_sources.cache_clear()


@pytest.mark.parametrize(("element_bytes", "product"), [(2, "HGMMA.64x192x16"), (1, "QGMMA.64x192x32")])
def test_another_kernel_uses_the_main_loop(element_bytes: int, product: str, beside_the_kernels: None) -> None:
    build = grouped_row_max(element_bytes)
    includes = {name for name, _ in loader.read_sources(build.source)}
    assert includes >= {f"parts/{part}.cuh" for part in ("main_loop", "ring", "producer", "roles", "operand_tile")}
    log, code = compile_build(build, "sm_90a")
    assert registers_of(log) <= 168
    for name in instructions_of(code):
        check_instruction(name)
    ((loop, behind),) = main_loops(code)
    # Four steps of 32 bytes along k a stage; what they read is in uniform registers, as in detkern's own kernels.
    assert [name for name in loop if "GMMA" in name] == [next(name for name in loop if name.startswith(product))] * 4
    assert not {"R2UR", "WARPSYNC", "WARPSYNC.ALL"} & set(loop)
    assert "SHFL.BFLY" in behind


def test_parts_read_no_macro_of_a_kernel() -> None:
    """What a tile is compiled with reaches the parts of Hopper's kernels as template parameters alone."""
    macros = {name for contract in (MMA16, TREE_MMA16) for tile in tiles_for(contract, BF16) for name, _ in tile.macros}
    macros |= {"OPERAND", "LOAD_A", "LOAD_B", "SMEM_BYTES", "MMA_K", "JITTER", "THREADS"}
    found = {}
    for name in ("main_loop", "operand_tile", "producer", "ring", "roles", "tile_outputs", "tile_walk"):
        text = re.sub(r"//.*|\"[^\"\n]*\"", "", (loader.FOLDER / "parts" / f"{name}.cuh").read_text())
        found[name] = sorted(macros & set(re.findall(r"\w+", text)))
    assert found == {name: [] for name in found}


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(256, 0, 1, 300, 128, 127), (0, 700), (640,)], ids=str)
def test_the_other_kernel_has_the_products_bits(counts: tuple[int, ...], beside_the_kernels: None) -> None:
    """Rows of groups of any size, against mma16's products of each group; rows behind the last group and what the
    output held before stay."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import detkern
    from detkern.cu import geometry, launch
    from detkern.cu.device import describe
    from detkern.cu.extended_launch import ExtendedLaunch
    from detkern.cu.tensor_map import map_shapes
    from detkern.operations.gemm.problem import gemm_problem
    from detkern.tensors import Device, TensorView

    n, k, behind = 1000, 328, 40
    rows, groups, wide = sum(counts) + behind, len(counts), -(-n // 192)
    generator = torch.Generator("cuda").manual_seed(1)
    a = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16, generator=generator)
    b = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16, generator=generator)
    a[sum(counts) :] = float("nan")
    found = torch.full((wide, rows), -7.0, device="cuda")
    ends = torch.tensor([sum(counts[:group]) for group in range(groups + 1)], dtype=torch.int32, device="cuda")

    here = Device("cuda", 0)

    def view(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType) -> TensorView:
        return TensorView(pointer, shape, strides, dtype, here)

    problem = gemm_problem(
        MMA16,
        view(a.data_ptr(), (groups, rows, k), (0, k, 1), BF16),
        view(b.data_ptr(), (groups, k, n), (n * k, 1, k), BF16),
        view(found.data_ptr(), (groups, rows, n), (0, n, 1), F32),
        None,
        False,
    )
    shapes = map_shapes(problem, (True, True))
    assert shapes is not None
    maps = geometry.Maps(*(replace(shape, rows=lines) for shape, lines in zip(shapes, (128, 192), strict=True)), None)
    facts, build, stream = describe(0), grouped_row_max(2), torch.cuda.current_stream().cuda_stream
    kernel = loader.load_function(0, facts.capability, build, stream)
    chosen = geometry.Launch(
        tiles_for(MMA16, BF16)[0], build, Load.K_MAJOR, Load.K_MAJOR, facts.multiprocessors, 384, 0, 1, maps
    )
    params = launch.pack_params(problem, maps)
    block = struct.pack("<5Q", a.data_ptr(), b.data_ptr(), found.data_ptr(), 0, ends.data_ptr()) + params
    ExtendedLaunch(kernel.ptr, chosen)(block, a.data_ptr(), b.data_ptr(), found.data_ptr(), stream)
    torch.cuda.synchronize()

    expected = torch.full_like(found, -7.0)
    for group, count in enumerate(counts):
        own = slice(int(ends[group]), int(ends[group]) + count)
        if count:
            products = detkern.linear(a[own], b[group], out_dtype="f32")
            for place in range(wide):
                expected[place, own] = products[:, 192 * place : 192 * (place + 1)].amax(1)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
