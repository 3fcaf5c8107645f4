"""Streams, graphs, threads, memory that is freed at once, and 10,000 repetitions: always the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cu_device
import numpy as np
import pytest
from cu_device import PAIR_IDS, PAIRS, Placed, differing, output, replay, run

import detkern
from detkern.cu import loader
from detkern.dispatch import plan
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import FMA, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu

CONTRACTS = (FMA, MMA16, TREE, TREE_MMA16)
# K = 3000 has more tree levels than stay in shared memory, so the trees take scratch.
M, N, K = 330, 520, 3000


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_all()


def _host(contract: Contract, dtype: DType = BF16, seed: int = 81) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a = operands.generate("normal", dtype, (M, K), seed)
    b = operands.generate("normal", dtype, (K, N), seed + 1)
    return a, b, replay(contract, a, b)


def _torch(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)


def _torch_bits(tensor: Any) -> np.ndarray:
    import torch

    return tensor.view(torch.int16).cpu().numpy().view(np.uint16)


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_ten_thousand_repetitions_give_one_result(contract: Contract, dtype: DType) -> None:
    """Outputs are poisoned, with another pattern each time, before each launch; every difference is gathered on the
    device, and the first result is compared with the replay."""
    import cupy

    a = operands.generate("normal", dtype, (200, 1100), 83)
    b = operands.generate("normal", dtype, (1100, 264), 84)
    expected = replay(contract, a, b)
    placed_a, placed_b = Placed(a, "rows"), Placed(b, "rows")
    out = output(expected.shape, dtype, "rows")
    assert out.view.strides == (264, 1)
    target = out.memory.reshape(expected.shape)
    wanted = cupy.asarray(expected)
    gathered = cupy.zeros_like(wanted)
    gather = cupy.ElementwiseKernel("T got, T wanted", "T all", "all |= got ^ wanted", "gather_differences")
    for repetition in range(10_000):
        target.fill(0x5A5A + repetition % 1000)
        run(contract, placed_a.view, placed_b.view, out.view, stream=cupy.cuda.get_current_stream().ptr)
        gather(target, wanted, gathered)
    assert int(cupy.count_nonzero(gathered)) == 0


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_torch_graph_is_captured_and_replayed(contract: Contract) -> None:
    torch = pytest.importorskip("torch")
    a, b, expected = _host(contract)
    other, _, _ = _host(contract, seed=91)
    device_a, device_b = _torch(a), _torch(b)
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        detkern.gemm(device_a, device_b, out=out, contract=contract.name)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        detkern.gemm(device_a, device_b, out=out, contract=contract.name)
        fresh = detkern.gemm(device_a, device_b, contract=contract.name)
    for source in (a, other, a):
        device_a.copy_(_torch(source))
        out.fill_(float("nan"))
        fresh.fill_(float("nan"))
        # Memory that the allocator hands out now must not be the graph's scratch.
        bystander = torch.full((1 << 22,), 7, dtype=torch.int32, device="cuda")
        graph.replay()
        torch.cuda.synchronize()
        wanted = expected if source is a else replay(contract, other, b)
        assert differing(wanted, _torch_bits(out)) == 0
        assert differing(wanted, _torch_bits(fresh)) == 0
        assert bool((bystander == 7).all())


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_cupy_graph_is_captured_and_replayed(contract: Contract) -> None:
    import cupy

    a = operands.generate("normal", F16, (M, K), 85)
    b = operands.generate("normal", F16, (K, N), 86)
    device_a, device_b = cupy.asarray(a), cupy.asarray(b)
    expected = replay(contract, a, b)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = cupy.empty((M, N), np.float16)
        detkern.gemm(device_a, device_b, out=out, contract=contract.name)  # loads the kernel
        stream.synchronize()
        stream.begin_capture()
        detkern.gemm(device_a, device_b, out=out, contract=contract.name)
        graph = stream.end_capture()
        for _ in range(3):
            out.fill(np.nan)
            bystanders = [cupy.full(1 << 20, 7, np.int32) for _ in range(4)]
            graph.launch(stream)
            stream.synchronize()
            assert differing(expected, cupy.asnumpy(out).view(np.uint16)) == 0
            assert all(bool((array == 7).all()) for array in bystanders)


def test_a_kernel_that_is_not_loaded_is_refused_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    a = cupy.ones((32, 32), np.float32)
    out = cupy.empty((32, 32), np.float32)
    detkern.gemm(a, a, out=out)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        monkeypatch.setattr(loader, "_functions", {})
        plan.forget_plans()
        try:
            with pytest.raises(detkern.DeviceError, match="once before the capture"):
                detkern.gemm(a, a, out=out)
        finally:
            monkeypatch.undo()
            detkern.gemm(a, a, out=out)  # the capture itself is unharmed
            graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert bool((out == 32).all())


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_two_torch_streams_at_once(contract: Contract) -> None:
    torch = pytest.importorskip("torch")
    a, b, expected = _host(contract)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results: list[list[Any]] = [[], []]
    for _ in range(20):
        for stream, found in zip(streams, results, strict=True):
            with torch.cuda.stream(stream):
                # Produced on this stream, so the product must wait for the copies.
                found.append(detkern.gemm(_torch(a), _torch(b), contract=contract.name))
    torch.cuda.synchronize()
    assert all(differing(expected, _torch_bits(result)) == 0 for found in results for result in found)


@pytest.mark.parametrize("contract", CONTRACTS, ids=str)
def test_operands_freed_right_after_the_call(contract: Contract) -> None:
    """A long queue holds the product back while the operands' memory is freed, allocated again and overwritten."""
    torch = pytest.importorskip("torch")
    a, b, expected = _host(contract)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy = torch.ones(4096, 4096, device="cuda")
        device_a, device_b = _torch(a), _torch(b)
        for _ in range(10):
            busy @ busy
        result = detkern.gemm(device_a, device_b, contract=contract.name)
        del device_a, device_b
        spoilers = [torch.full((K, size), float("nan"), dtype=torch.bfloat16, device="cuda") for size in (M, N, M, N)]
    torch.cuda.synchronize()
    assert len(spoilers) == 4
    assert differing(expected, _torch_bits(result)) == 0


def test_cupy_current_stream_and_raw_memory() -> None:
    import cupy

    class Raw:
        """Nothing but the interface, with the stream that its data is ready on."""

        def __init__(self, array: Any, stream: int) -> None:
            self.array = array
            self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream}

    half = operands.generate("normal", F16, (M, K), 87)
    other = operands.generate("normal", F16, (K, N), 88)
    wanted = replay(MMA16, half, other)
    producer = cupy.cuda.Stream(non_blocking=True)
    with producer:
        busy = cupy.ones((2048, 2048), np.float32)
        device_a, device_b = cupy.asarray(half), cupy.empty((K, N), np.float16)
        for _ in range(5):
            busy = busy @ busy * np.float32(1e-4)
        device_b[...] = cupy.asarray(other)
        result = detkern.gemm(device_a, device_b)
    producer.synchronize()
    assert differing(wanted, cupy.asnumpy(result).view(np.uint16)) == 0
    raw = detkern.gemm(Raw(device_a, producer.ptr), Raw(device_b, producer.ptr))
    cupy.cuda.Device().synchronize()
    assert differing(wanted, cupy.asnumpy(cupy.asarray(raw)).view(np.uint16)) == 0


def test_several_threads() -> None:
    """Each thread has a stream, a contract and operands of its own, and makes the first CUDA call of its life here."""
    import cupy

    jobs = []
    for number in range(8):
        contract, dtype = PAIRS[number % len(PAIRS)]
        a = operands.generate("normal", dtype, (100 + number, 700), 95 + number)
        b = operands.generate("normal", dtype, (700, 90 + number), 96 + number)
        jobs.append((contract, dtype, a, b, replay(contract, a, b)))

    def work(contract: Contract, dtype: DType, a: np.ndarray, b: np.ndarray, expected: np.ndarray) -> int:
        wrong = 0
        with cupy.cuda.Stream(non_blocking=True) as stream:
            placed_a, placed_b = Placed(a, "rows"), Placed(b, "columns")
            for _ in range(50):
                out = output(expected.shape, dtype, "rows")
                stream.synchronize()
                run(contract, placed_a.view, placed_b.view, out.view, stream=stream.ptr)
                stream.synchronize()
                wrong += differing(expected, out.bits())
        return wrong

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert list(pool.map(lambda job: work(*job), jobs)) == [0] * len(jobs)


@pytest.fixture
def _two_devices() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("gpu: two devices are needed")


@pytest.mark.usefixtures("_two_devices")
def test_a_second_device_and_the_current_one_afterwards() -> None:
    import cupy

    a, b, _ = _host(FMA)
    single = a.astype(np.float32), b.astype(np.float32)
    with cupy.cuda.Device(1):
        device_a, device_b = map(cupy.asarray, single)
    with cupy.cuda.Device(0):
        result = detkern.gemm(device_a, device_b)
        assert cupy.cuda.Device().id == 0
    assert result.device.id == 1
    assert differing(replay(FMA, *single), cupy.asnumpy(result).view(F32.bits)) == 0
