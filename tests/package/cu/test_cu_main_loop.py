"""Hopper's main loop, ring, producer and roles in a kernel that is not detkern's, with a walk and an epilogue of its own:
tests/kernels/grouped_row_max.cu, which includes them as they are."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cu_compiled import NEEDS_A_COMPILER, check_instruction, compile_build, instructions_of, main_loops, registers_of

from detkern.cu import loader
from detkern.cu.gemm_tile import tiles_for
from detkern.cu.loader import KernelBuild
from detkern.vocabulary.contracts import MMA16, TREE_MMA16
from detkern.vocabulary.dtypes import BF16

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
    for name in ("main_loop", "operand_tile", "producer", "ring", "roles", "tile_walk"):
        text = re.sub(r"//.*|\"[^\"\n]*\"", "", (loader.FOLDER / "parts" / f"{name}.cuh").read_text())
        found[name] = sorted(macros & set(re.findall(r"\w+", text)))
    assert found == {name: [] for name in found}
