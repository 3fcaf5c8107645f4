"""The tables of tiles, and what is compiled for a tile."""

from __future__ import annotations

import itertools
import pickle

import pytest
from cu_problems import HOPPER, KERNELS, problem_of

from detkern.cu import gemm_tile
from detkern.cu.gemm_tile import Load, fits, tiles_for
from detkern.cu.tile_choice import choose
from detkern.vocabulary.contracts import CONTRACTS, FMA, FP8_BLOCK128, MMA8, MMA16, TREE, TREE_MMA16, Contract


def test_every_contract_but_fp8_has_tiles_for_all_its_operands() -> None:
    for contract in CONTRACTS.values():
        if contract != FP8_BLOCK128:
            for operand in contract.operands:
                tiles = tiles_for(contract, operand)
                for loads in itertools.product(Load, Load):
                    assert any(loads in tile.loads for tile in tiles), "some tile must take any strides"
                for tile in tiles:
                    assert 32 <= tile.threads <= 1024
                    if tile.table == "mma_wgmma":
                        assert tile.alone_us == tile.wave_us == 0, "time_model.py predicts instead"
                        assert tile["CTAS_PER_SM"] == 1, "which it takes for granted"
                        continue
                    assert 0 < tile.alone_us <= tile.wave_us
                    assert (tile.alone_us == tile.wave_us) == (tile["CTAS_PER_SM"] == 1)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
@pytest.mark.parametrize("contract", KERNELS, ids=str)
def test_every_capability_has_a_tile_for_all_load_paths(contract: Contract, capability: tuple[int, int]) -> None:
    for operand in contract.operands:
        for loads in itertools.product(Load, Load):
            assert any(loads in tile.loads and fits(tile, capability) for tile in tiles_for(contract, operand))


def test_labels_tell_the_tiles_of_a_contract_apart() -> None:
    """tuned.json names tiles by them."""
    for contract in KERNELS:
        for operand in contract.operands:
            labels = [str(tile) for tile in tiles_for(contract, operand)]
            assert len(set(labels)) == len(labels)


def test_what_a_self_check_vouches_for_are_all_kernels_of_every_device() -> None:
    assert gemm_tile.portable_sources(FMA) == ("fma.cu", "fma_narrow.cu")
    for contract in (MMA16, MMA8, TREE, TREE_MMA16):
        assert gemm_tile.portable_sources(contract) == (gemm_tile.source_of(contract),)


def test_plain_chains_need_no_scratch() -> None:
    for contract in (FMA, MMA16, MMA8):
        assert choose(problem_of(contract, 100, 100, 10**6), HOPPER, 132).scratch_bytes == 0


def test_a_tile_goes_to_another_process() -> None:
    """What compiles kernels side by side sends tiles, after their kernels were asked for."""
    for contract in KERNELS:
        for tile in tiles_for(contract, contract.operands[0]):
            assert tile.shared_bytes > 0
            assert pickle.loads(pickle.dumps(tile)) == tile
