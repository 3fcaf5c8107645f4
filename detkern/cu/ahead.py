"""Compiling kernels before they are needed, with or without a device."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from ..vocabulary.contracts import Contract
from ..vocabulary.dtypes import DType
from .gemm_tile import Load, build_for, fits, tiles_for
from .loader import KernelBuild, compiled_image

__all__ = ["builds", "compile_ahead", "of_layouts"]


def builds(contracts: Iterable[Contract], capability: tuple[int, int]) -> list[KernelBuild]:
    """Every kernel that a launch of these contracts on a device of that capability may need."""
    pairs = ((contract, operand) for contract in contracts for operand in contract.operands)
    return _builds(pairs, capability, frozenset(itertools.product(Load, Load)))


def of_layouts(
    pairs: Iterable[tuple[Contract, DType]], along_k: Iterable[tuple[bool, bool]], capability: tuple[int, int]
) -> list[KernelBuild]:
    """Every kernel that products of these contracts and operand types may need whose lines of a and b start at
    multiples of 16 bytes. along_k: whether these lines run along k."""
    path = {True: Load.K_MAJOR, False: Load.MN_MAJOR}
    return _builds(pairs, capability, frozenset((path[a], path[b]) for a, b in along_k))


def _builds(
    pairs: Iterable[tuple[Contract, DType]], capability: tuple[int, int], loads: frozenset[tuple[Load, Load]]
) -> list[KernelBuild]:
    """Of every tile that fits the device, on those of its load paths that are asked for; each once."""
    result: dict[KernelBuild, None] = {}
    for contract, operand in pairs:
        for tile in tiles_for(contract, operand):
            if fits(tile, capability):
                for load_a, load_b in sorted(tile.loads & loads):
                    result[build_for(contract, operand, tile, load_a, load_b)] = None
    return list(result)


def _compile(build: KernelBuild, architecture: str) -> float:
    start = time.perf_counter()
    compiled_image(build, architecture)
    return time.perf_counter() - start


def compile_ahead(
    wanted: Iterable[KernelBuild], architecture: str, processes: int
) -> Iterator[tuple[KernelBuild, float]]:
    """Put kernels into the cache on disk, several at a time; yields each with its seconds as it is done.

    Raises BuildError, with the compiler's log, at the first that is refused.
    """
    # A fresh interpreter each: a forked child of a process that uses CUDA cannot.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        running = {pool.submit(_compile, build, architecture): build for build in wanted}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
