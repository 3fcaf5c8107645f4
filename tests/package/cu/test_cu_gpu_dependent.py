"""Programmatic dependent launch: kernels that start while the one before them still runs see all that it writes, and
write nothing that it still reads. Eager and in captured graphs, with the switch on and off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cu_device
import numpy as np
import pytest
from cu_device import DEVICE, bfloat16_view

from detkern import config
from detkern.dispatch.backend import Execution
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import TensorView
from detkern.vocabulary.contracts import MMA16, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import E4M3, F32

pytestmark = pytest.mark.gpu

D = 2048  # of the square weights, so that every product can be an operand of the next
ROUNDS = 3
# Blocks whose writes come one after another: the last ones are still to be written when a kernel behind could start.
_LATE = r"""
extern "C" __global__ void copy_late(const unsigned short* source, unsigned short* target, long long count,
                                     long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles + blockIdx.x % 7 * 3000) {
  }
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) target[i] = source[i];
}
"""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.skip_without_wgmma()
    cu_device.compile_all()


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = config.dependent_launch
    yield
    config.dependent_launch = before


class Chain:
    """Products that hand operands and results to one another in every way, with kernels and copies between them."""

    def __init__(self, contract: Contract, m: int) -> None:
        import cupy

        self.contract, self.m = contract, m
        # Weights of variance 1 / D keep all products near one.
        rng = np.random.default_rng(7)

        def made(rows: int, scale: float) -> Any:
            host = rng.normal(0, scale, (rows, D)).astype(np.float32)
            return cupy.asarray((host.view(np.uint32) >> 16).astype(np.uint16))

        self.sources = [made(m, 1.0) for _ in range(ROUNDS)]
        self.weights = [made(D, D**-0.5) for _ in range(ROUNDS)]
        self.biases = [made(1, 1.0).reshape(-1) for _ in range(ROUNDS)]
        self.other = made(D, D**-0.5)
        self.late = cupy.RawKernel(_LATE, "copy_late")
        self.x, self.t, self.u = (cupy.empty((m, D), np.uint16) for _ in range(3))
        self.w, self.v = (cupy.empty((D, D), np.uint16) for _ in range(2))
        self.bias = cupy.empty(D, np.uint16)
        self.sum = cupy.empty((m, D), np.float32)
        self.results = [[cupy.empty_like(array) for array in (self.t, self.u, self.x, self.sum)] for _ in range(ROUNDS)]
        self._scratch: dict[int, TensorView] = {}
        self._launches: dict[Any, Any] = {}

    def _allocate(self, size: int) -> TensorView:
        """One memory for all products, so that they meet in it; made before a graph is captured."""
        import cupy

        if size not in self._scratch:
            memory = cupy.empty(size, np.uint8)
            self._scratch[size] = TensorView(memory.data.ptr, (size,), (1,), E4M3, DEVICE, array=memory)
        return self._scratch[size]

    def product(self, a: Any, weight: Any, out: Any, stream: int, bias: Any = None, accumulate: bool = False) -> str:
        """out = a @ weight.T; returns the kernel's file."""
        from detkern.cu import launch

        views = bfloat16_view(a), bfloat16_view(weight.T)
        if out.dtype == np.float32:
            target = TensorView(out.data.ptr, out.shape, (D, 1), F32, DEVICE, array=out)
        else:
            target = bfloat16_view(out)
        added = None if bias is None else bfloat16_view(bias)
        problem = gemm_problem(self.contract, *views, target, added, accumulate)
        launches = self._launches.setdefault(problem, launch.Launches(problem))
        launches(problem.m, (*views, added), target, Execution(DEVICE, stream, self._allocate))
        plan = launches.plans.get(problem.m)
        assert plan is not None
        return plan.launch.build.source

    def fill(self, source: Any, target: Any, cycles: int = 20_000) -> None:
        self.late((264,), (256,), (source, target, np.int64(target.size), np.int64(cycles)))

    def run(self, stream: Any, between: Callable[[], Any] = lambda: None) -> set[str]:
        """Enqueue it all on `stream`, which is current. between: called after each step."""
        import cupy

        kernels = set()

        def product(*arguments: Any, **options: Any) -> None:
            kernels.add(self.product(*arguments, stream.ptr, **options))
            between()

        def copied(source: Any, target: Any, by_kernel: bool) -> None:
            if by_kernel:
                self.fill(source, target)
            else:
                cupy.copyto(target, source)
            between()

        # Holds the device back while the rest is enqueued, so that each step waits behind the one before it.
        self.fill(self.biases[0], self.bias, 3_000_000)
        between()
        for turn in range(ROUNDS):
            # A kernel writes one operand and a copy the other, and the other way round.
            copied(self.weights[turn], self.w, by_kernel=turn % 2 == 1)
            copied(self.sources[turn], self.x, by_kernel=turn % 2 == 0)
            product(self.x, self.w, self.t)
            product(self.t, self.other, self.u)  # what has just been written
            product(self.u, self.w, self.x)  # to where the last but one still read
            product(self.x, self.other, self.t)
            product(self.u, self.other, self.x)  # to where the last one still reads
            product(self.other, self.w, self.v)  # a weight, which the next grid asks for ahead
            product(self.x, self.v, self.t)
            product(self.w, self.other, self.v)  # another in its place
            product(self.u, self.v, self.x)
            copied(self.biases[turn], self.bias, by_kernel=True)
            product(self.t, self.w, self.u, bias=self.bias)
            product(self.x, self.w, self.u, bias=self.bias)  # over what is still being written
            product(self.u, self.other, self.sum)
            product(self.t, self.w, self.sum, accumulate=True)
            for array, result in zip((self.t, self.u, self.x, self.sum), self.results[turn], strict=True):
                copied(array, result, by_kernel=False)
        return kernels

    def bits(self) -> list[np.ndarray]:
        import cupy

        return [cupy.asnumpy(result).view(np.uint32 if result.dtype == np.float32 else np.uint16)
                for results in self.results for result in results]  # fmt: skip

    def spoil(self) -> None:
        for array in (
            self.x,
            self.t,
            self.u,
            self.w,
            self.v,
            self.bias,
            self.sum,
            *(r for rs in self.results for r in rs),
        ):
            array.fill(0x7F)

    def turn(self) -> None:
        """Other inputs, in the same memory."""
        import cupy

        for arrays in (self.sources, self.weights, self.biases):
            first = arrays[0].copy()
            for target, source in zip(arrays, [*arrays[1:], first], strict=True):
                cupy.copyto(target, source)


@pytest.mark.parametrize("m", [16, 200, 2000])
@pytest.mark.parametrize("contract", [MMA16, TREE_MMA16], ids=str)
def test_products_that_depend_on_one_another(contract: Contract, m: int) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        chain = Chain(contract, m)
        wanted = []
        for _ in range(ROUNDS):
            # What it must be: one step after another, each begun when the last is complete.
            config.dependent_launch = False
            chain.spoil()
            kernels = chain.run(stream, stream.synchronize)
            wanted.append(chain.bits())
            chain.turn()
        assert len({array.tobytes() for array in wanted[0]}) == len(wanted[0]), "each step and input shows"
        assert all((left == right).all() for left, right in zip(wanted[0][4:], wanted[1], strict=False))
        if contract == MMA16:
            assert kernels == {"mma_wgmma.cu"}
        for dependent in (True, False):
            config.dependent_launch = dependent
            for repetition in range(2 * ROUNDS):
                chain.spoil()
                chain.run(stream)
                _same(wanted[repetition % ROUNDS], chain.bits(), f"eager, {dependent=}")
                chain.turn()
            stream.synchronize()
            stream.begin_capture()
            chain.run(stream)
            graph = stream.end_capture()
            for repetition in range(2 * ROUNDS):
                chain.spoil()
                graph.launch(stream)
                _same(wanted[repetition % ROUNDS], chain.bits(), f"graph, {dependent=}")
                chain.turn()
            # Replays right behind one another, the second on what the first leaves.
            graph.launch(stream)
            graph.launch(stream)
            _same(wanted[0], chain.bits(), f"two graphs, {dependent=}")


def _same(wanted: list[np.ndarray], found: list[np.ndarray], how: str) -> None:
    names = [f"{name} of round {turn}" for turn in range(ROUNDS) for name in ("t", "u", "x", "sum")]
    different = {name: int((left != right).sum()) for name, left, right in zip(names, wanted, found, strict=True)}
    assert not any(different.values()), f"{how}: {different}"
