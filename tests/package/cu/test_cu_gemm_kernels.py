"""The rows of detkern.cu.gemm_kernels against the kernel files and the tables. That SMEM_BYTES is what a file computes
is asserted where it is compiled (test_cu_compile.py)."""

from __future__ import annotations

import re

import pytest

from detkern.cu import loader
from detkern.cu.gemm_kernels import KERNELS, GemmKernel
from detkern.cu.gemm_tile import Load, table
from detkern.vocabulary.contracts import CONTRACTS

ROWS = pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))


@ROWS
def test_a_row_says_what_its_file_does(kernel: GemmKernel) -> None:
    sources = dict(loader.read_sources(kernel.source))
    headers, code = set(sources), re.sub(r"//.*", "", sources[kernel.source])
    assert kernel.capability == ((9, 0) if "ptx/wgmma.cuh" in headers else None)
    assert kernel.operand_maps == ("map_a" in code)
    assert kernel.output_map == ("parts/tile_outputs.cuh" in headers)
    assert kernel.prefetches == ("p.prefetch_bytes" in code)
    assert (kernel.levels_in_registers is not None) == ("parts/merge.cuh" in headers)


@ROWS
def test_a_row_says_what_its_tiles_take(kernel: GemmKernel) -> None:
    tiles = table(kernel.name)
    assert kernel.any_layout == any((Load.STRIDED, Load.STRIDED) in tile.loads for tile in tiles)
    for tile in tiles:
        assert {(operand, operand) for operand in tile.operands} <= set(kernel.operands)
        assert tile.threads % 32 == 0
        assert tile.threads <= 1024
        assert kernel.modelled == (tile.wave_us == 0)


@ROWS
def test_a_row_takes_the_operands_of_its_contracts(kernel: GemmKernel) -> None:
    for contract in kernel.contracts:
        assert {(operand, operand) for operand in contract.operands} == set(kernel.operands)


def test_each_contract_has_one_kernel_for_any_layout() -> None:
    for contract in CONTRACTS.values():
        own = [kernel for kernel in KERNELS.values() if contract in kernel.contracts]
        assert sum(kernel.any_layout for kernel in own) == (contract.name != "fp8-block128")
        assert all(kernel.capability is None for kernel in own if kernel.any_layout)
