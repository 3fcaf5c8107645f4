"""The engine on a GPU: the triad has the public functions' bits, and threads with streams of their own share one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import detkern
from detkern.errors import DeviceError, ShapeError

pytestmark = pytest.mark.gpu


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def _triad(dtype: str, m: int, k: int, n: int) -> list[Any]:
    import torch

    generator = torch.Generator("cuda").manual_seed(m + k + n)
    kind = getattr(torch, dtype)
    return [torch.randn(*shape, generator=generator, device="cuda").to(kind) for shape in ((m, k), (k, n), (m, n))]


def _handle() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize(("dtype", "tensor_cores"), [
    ("float32", False), ("bfloat16", False), ("float16", False), ("bfloat16", True), ("float16", True),
])  # fmt: skip
def test_the_training_triad_has_the_bits_of_the_public_functions(
    dtype: str, tensor_cores: bool, backend: str | None
) -> None:
    import torch

    if backend == "triton":
        import triton_device

        triton_device.skip_if_missing()
    contract = "mma16" if tensor_cores else "fma"
    engine = detkern.Engine(0, backend=backend)
    for m, k, n in ((1, 1, 1), (33, 40, 24), (257, 136, 264), (64, 100, 77)):
        x, w, dy = _triad(dtype, m, k, n)
        bias = torch.randn(n, device="cuda")
        for vector in (None, bias):
            out = torch.full_like(dy, float("nan"))
            pointers = (out.data_ptr(), x.data_ptr(), w.data_ptr(), None if vector is None else vector.data_ptr())
            engine.forward(pointers, (m, k, n), dtype, _handle(), tensor_cores)
            assert torch.equal(_bits(out), _bits(detkern.gemm(x, w, bias=vector, contract=contract)))
        dx = torch.full_like(x, float("nan"))
        engine.backward_dx((dx.data_ptr(), dy.data_ptr(), w.data_ptr()), (m, k, n), dtype, _handle(), tensor_cores)
        assert torch.equal(_bits(dx), _bits(detkern.gemm_da(dy, w, contract=contract)))
        dw = torch.randn(k, n, device="cuda")
        want = dw.clone()
        engine.backward_dw((dw.data_ptr(), dy.data_ptr(), x.data_ptr()), (m, k, n), dtype, _handle(), tensor_cores)
        detkern.gemm_db(x, dy, out=want, accumulate=True, contract=contract)
        assert torch.equal(_bits(dw), _bits(want))
    engine.synchronize()


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_arrays_stand_for_pointers(framework: str) -> None:
    import cupy
    import torch

    m, k, n = 33, 40, 24
    engine = detkern.Engine(0)
    x, w, _ = _triad("float32", m, k, n)
    out = torch.full((m, n), 7.0, device="cuda")
    given = [out, x, w] if framework == "torch" else [cupy.from_dlpack(tensor) for tensor in (out, x, w)]
    with pytest.raises(ShapeError, match=r"out is float32 \[33, 24\], and sizes \(M, K, N\) ask for \[33, 40\]"):
        engine.forward((*given, None), (m, n, k), "float32", _handle())
    with pytest.raises(DeviceError, match="a is on cpu, the engine on cuda:0"):
        engine.forward((given[0], x.cpu(), given[2], None), (m, k, n), "float32", _handle())
    assert bool((out == 7).all())
    engine.forward((*given, None), (m, k, n), "float32", _handle())
    assert torch.equal(_bits(out), _bits(detkern.gemm(x, w, contract="fma")))


def test_four_threads_and_four_streams_ten_thousand_calls() -> None:
    """Each thread's calls go round four streams that it shares with the others, each stream with memory of its own in
    each thread, and every result is compared."""
    import torch

    m, k, n = 40, 136, 72
    engine = detkern.Engine("cuda:0")
    streams = [torch.cuda.Stream() for _ in range(4)]
    x, w, dy = _triad("bfloat16", m, k, n)
    wanted = {
        "forward": detkern.gemm(x, w, contract="mma16"),
        "dx": detkern.gemm_da(dy, w, contract="mma16"),
        "dw": detkern.gemm_db(x, dy, out_dtype="float32", contract="mma16"),
        "fma": detkern.gemm(x, w, contract="fma"),
    }
    torch.cuda.synchronize()
    wrong: list[str] = []
    calls = [0] * 4

    def work(thread: int) -> None:
        try:
            out = {name: [torch.empty_like(value) for _ in streams] for name, value in wanted.items()}
            bad = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
            torch.cuda.synchronize()
            for turn in range(2500 // 4):
                place = (turn + thread) % 4
                stream = streams[place]
                handle = stream.cuda_stream
                here = {name: values[place] for name, values in out.items()}
                with torch.cuda.stream(stream):
                    for value in here.values():
                        value.zero_()
                    sizes, kind = (m, k, n), "bfloat16"
                    px, pw, pdy = x.data_ptr(), w.data_ptr(), dy.data_ptr()
                    engine.forward((here["forward"].data_ptr(), px, pw, None), sizes, kind, handle, True)
                    engine.backward_dx((here["dx"].data_ptr(), pdy, pw), sizes, kind, handle, True)
                    engine.backward_dw((here["dw"].data_ptr(), pdy, px), sizes, kind, handle, True)
                    engine.forward((here["fma"].data_ptr(), px, pw, None), sizes, kind, handle)
                    calls[thread] += 4
                    for name, value in here.items():
                        bad[place] += (_bits(value) != _bits(wanted[name])).sum()
            torch.cuda.synchronize()
            if any(int(count) for count in bad):
                wrong.append(f"thread {thread}: {[int(count) for count in bad]} elements differ")
        except BaseException as error:
            wrong.append(f"thread {thread}: {error!r}")
            raise

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert sum(calls) == 10_000


def test_a_graph_of_the_triad() -> None:
    import torch

    m, k, n = 64, 128, 64
    engine = detkern.Engine(0)
    x, w, dy = _triad("float16", m, k, n)
    out, dw = torch.empty_like(dy), torch.zeros(k, n, device="cuda")

    def step() -> None:
        sizes = (m, k, n)
        engine.forward((out.data_ptr(), x.data_ptr(), w.data_ptr(), None), sizes, "float16", _handle(), True)
        engine.backward_dw((dw.data_ptr(), dy.data_ptr(), x.data_ptr()), sizes, "float16", _handle(), True)

    step()
    dw.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    want = torch.zeros_like(dw)
    for _ in range(3):
        detkern.gemm_db(x, dy, out=want, accumulate=True, contract="mma16")
    assert torch.equal(_bits(dw), _bits(want))
    assert torch.equal(_bits(out), _bits(detkern.gemm(x, w, contract="mma16")))
