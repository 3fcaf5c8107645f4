"""Launching the Triton kernels straight through their launch code, and compiling many of them at once."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
from cu_device import DEVICE, MODES, PAIRS, allocate

from detkern.cu import loader, tile_choice
from detkern.cu.device import describe
from detkern.cu.loader import KernelBuild
from detkern.dispatch.backend import Execution
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import Contract
from detkern.vocabulary.dtypes import F32, DType

# M, N and K; multiples of 8 take the vector paths, the others the path of any strides; K has ragged ends of all kinds.
SIZES = (
    (1, 1, 1), (7, 5, 0), (2, 257, 31), (17, 33, 32), (16, 8, 64), (63, 65, 100), (64, 64, 4096), (130, 72, 136),
    (257, 100, 257), (257, 264, 1000), (136, 264, 24),
)  # fmt: skip


def missing() -> str | None:
    """Why the Triton backend cannot run here."""
    from detkern.dispatch import registry

    return registry.load("triton").unavailable(DEVICE)


def skip_if_missing() -> None:
    """Skips a test of the GPU suite where PyTorch has no CUDA, or there is no Triton."""
    if reason := missing():
        pytest.skip(f"gpu: {reason}")


def cases() -> Iterator[tuple[tuple[int, int, int], str, str, str, bool]]:
    """((m, n, k), modes of a, b and out, accumulate): every size, every mode of each operand with each of the others'
    fast ones, some of them accumulating."""
    for turn, size in enumerate(SIZES):
        a_mode, b_mode = MODES[turn % len(MODES)], MODES[(turn // 2) % len(MODES)]
        yield size, a_mode, b_mode, MODES[(turn + 1) % len(MODES)], turn % 3 == 2
        yield size, "rows", "columns", "rows", False
        if turn % 2:
            yield size, "columns", "rows", "rows", turn % 4 == 1


def problem_of(contract: Contract, dtype: DType, case: tuple[tuple[int, int, int], str, str, str, bool]) -> GemmProblem:
    """The problem of a case, without memory."""
    from cu_device import _geometry

    (m, n, k), a_mode, b_mode, out_mode, accumulate = case
    out_dtype = F32 if accumulate else dtype

    def view(shape: tuple[int, int], mode: str, element: DType) -> TensorView:
        row, column, offset, _ = _geometry(mode, *shape)
        return TensorView(1 << 20 | offset * element.itemsize, shape, (row, column), element, DEVICE)

    return gemm_problem(
        contract, view((m, k), a_mode, dtype), view((k, n), b_mode, dtype), view((m, n), out_mode, out_dtype), None,
        accumulate,
    )  # fmt: skip


def run(
    contract: Contract,
    a: TensorView,
    b: TensorView,
    out: TensorView,
    *,
    bias: TensorView | None = None,
    accumulate: bool = False,
    stream: int = 0,
    device: Device = DEVICE,
) -> None:
    """Launch on views, also what the backend would refuse."""
    from detkern.triton import launch

    problem = gemm_problem(contract, a, b, out, bias, accumulate)
    if 0 not in out.shape:
        launch.Launches(problem)(problem.m, (a, b, bias), out, Execution(device, stream, allocate))


def _compile(problem: GemmProblem) -> None:
    from detkern.triton import launch

    launch.compile_ahead(problem)


def _compile_cuda(build: KernelBuild) -> None:
    loader.compiled_image(build, loader.target(describe(0).capability, loader.supported_architectures()))


def compile_ahead(problems: Iterable[GemmProblem]) -> tuple[int, int]:
    """The kernels of both backends for problems, put into their caches on all cores, each once; how many."""
    from detkern.triton.device import describe as describe_triton
    from detkern.triton.launch import plan_for

    present = [problem for problem in problems if problem.m and problem.n]
    wanted = {plan_for(problem, describe_triton(DEVICE).multiprocessors).key: problem for problem in present}
    facts = describe(0)
    builds = {tile_choice.choose(problem, facts.capability, facts.multiprocessors).build for problem in present}
    # A fresh interpreter each: a forked child of a process that uses CUDA cannot.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), 16), mp_context=context) as pool:
        running = [pool.submit(_compile, problem) for problem in wanted.values()]
        running += [pool.submit(_compile_cuda, build) for build in builds]
        for one in running:
            one.result()
    return len(wanted), len(builds)


@functools.cache
def compile_all() -> tuple[int, int]:
    """Every kernel that the cases need."""
    return compile_ahead(problem_of(contract, dtype, case) for contract, dtype in PAIRS for case in cases())
