"""The raw-pointer engine on host memory: its triad has the public functions' bits, and what it refuses."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import detkern
from detkern.dispatch import plan, registry
from detkern.errors import ArgumentError, BackendUnavailable, ContractUnsupported, DeviceError, DTypeError, ShapeError
from detkern.tensors import Device
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

M, K, N = 19, 33, 10


def at(array: np.ndarray) -> int:
    return array.ctypes.data


def triad(dtype: DType) -> dict[str, np.ndarray]:
    shapes = {"x": (M, K), "w": (K, N), "dy": (M, N)}
    made = {name: operands.generate("wide", dtype, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    made["bias"] = operands.generate("normal", F32, (N,), 7)
    made["dw"] = operands.generate("normal", F32, (K, N), 8)
    return made


def same(got: np.ndarray, want: np.ndarray) -> bool:
    bits = f"u{got.dtype.itemsize}"
    return got.dtype == want.dtype and np.array_equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_the_triad_has_the_bits_of_the_public_functions(dtype: DType, tensor_cores: bool) -> None:
    if dtype == F32 and tensor_cores:
        return  # refused: below
    contract = "mma16" if tensor_cores else "fma"
    engine = detkern.Engine("cpu")
    here = triad(dtype)
    x, w, dy = here["x"], here["w"], here["dy"]
    sizes = (M, K, N)
    for bias in (None, here["bias"]):
        out = np.empty((M, N), dtype.numpy)
        engine.forward((at(out), at(x), at(w), None if bias is None else at(bias)), sizes, dtype.name, 0, tensor_cores)
        assert same(out, detkern.gemm(x, w, bias=bias, contract=contract))
    dx = np.empty((M, K), dtype.numpy)
    engine.backward_dx((at(dx), at(dy), at(w)), sizes, dtype.name, 0, tensor_cores=tensor_cores)
    assert same(dx, detkern.gemm_da(dy, w, contract=contract))
    dw, want = here["dw"].copy(), here["dw"].copy()
    engine.backward_dw((at(dw), at(dy), at(x)), sizes, dtype.name, 0, tensor_cores)
    detkern.gemm_db(x, dy, out=want, accumulate=True, contract=contract)
    assert same(dw, want)


def test_micro_batches_give_the_bits_of_the_whole() -> None:
    engine = detkern.Engine("cpu")
    here = triad(BF16)
    x, dy = here["x"], here["dy"]
    whole, pieces = np.zeros((K, N), np.float32), np.zeros((K, N), np.float32)
    engine.backward_dw((at(whole), at(dy), at(x)), (M, K, N), "bfloat16", 0)
    for begin, end in ((0, 5), (5, 6), (6, M)):
        engine.backward_dw((at(pieces), at(dy[begin:]), at(x[begin:])), (end - begin, K, N), "bfloat16", 0)
    assert same(pieces, whole)
    tensor_core = np.zeros((K, N), np.float32)
    for begin, end in ((0, 16), (16, M)):
        sizes = (end - begin, K, N)
        engine.backward_dw((at(tensor_core), at(dy[begin:]), at(x[begin:])), sizes, "bfloat16", 0, True)
    assert same(tensor_core, detkern.gemm_db(x, dy, out_dtype="float32", contract="mma16"))


def test_empty_sizes() -> None:
    engine = detkern.Engine("cpu")
    out = np.full((M, N), 7, np.float32)
    engine.forward((at(out), 0, 0, None), (M, 0, N), "float32", 0)
    assert (out.view(np.uint32) == 0).all()
    engine.forward((0, 0, 0, None), (0, K, N), "float32", 0)
    dw = np.full((K, N), 7, np.float32)
    engine.backward_dw((at(dw), 0, 0), (0, K, N), "bfloat16", 0, True)
    assert (dw == 7).all()


def test_what_it_refuses_leaves_the_output_alone() -> None:
    engine = detkern.Engine("cpu")
    here = triad(F32)
    out = np.full((M, N), 7, np.float32)
    good: dict[str, Any] = {
        "pointers": (at(out), at(here["x"]), at(here["w"]), None), "sizes": (M, K, N), "dtype": "float32", "stream": 0,
    }  # fmt: skip
    pointers = good["pointers"]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"pointers": (0, *pointers[1:])}, ArgumentError, r"out is a null pointer; it has shape \[19, 10\]"),
        ({"pointers": (*pointers[:2], 0, None)}, ArgumentError, "b is a null pointer"),
        ({"pointers": pointers[:3]}, ArgumentError, r"must be the addresses \(out, a, b, bias\)"),
        ({"pointers": (pointers[0], pointers[1] + 2, *pointers[2:])}, ArgumentError,
            "a=0x.* is not an address of float32"),
        ({"pointers": (pointers[1], *pointers[1:])}, ArgumentError, "out shares memory with a"),
        ({"pointers": (-8, *pointers[1:])}, ArgumentError, "out=-8 must be a whole number"),
        ({"pointers": ((1 << 64) + pointers[0], *pointers[1:])}, ArgumentError, "out=.* and below 2\\^64"),
        ({"pointers": ((1 << 64) - 4, *pointers[1:])}, ArgumentError,
            r"out=0xf{15}c: \[19, 10\] .* beyond the address space"),
        ({"pointers": None}, ArgumentError, "must be the addresses"),
        ({"sizes": (M, K)}, ShapeError, r"three whole numbers \(M, K, N\)"),
        ({"sizes": (M, -1, N)}, ShapeError, "may be negative"),
        ({"sizes": (M, 1 << 59, N)}, ShapeError, "address space"),
        ({"dtype": "float64"}, DTypeError, "none of float32, float16, bfloat16"),
        ({"dtype": None}, DTypeError, "none of float32"),
        ({"stream": 3}, ArgumentError, "the CPU has no streams"),
        ({"stream": None}, ArgumentError, "stream=None must be a whole number"),
        ({"tensor_cores": 1}, ArgumentError, "tensor_cores=1 must be True or False"),
        ({"tensor_cores": True}, ContractUnsupported,
            "no tensor-core contract takes float32; tensor_cores=False computes fma"),
    ]  # fmt: skip
    for change, error, message in cases:
        with pytest.raises(error, match=message):
            engine.forward(**(good | change))
        assert (out == 7).all()
    engine.forward(**good)
    assert same(out, detkern.gemm(here["x"], here["w"], contract="fma"))


def as_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


@pytest.mark.parametrize("made", [lambda array: array, as_torch, None], ids=["numpy", "torch", "flat"])
@pytest.mark.parametrize("sizes", [(M, K, N), (M, 1, N), (1, K, 1), (M, K, 1), (1, 1, 1), (M, 0, N), (0, K, N)])
def test_arrays_stand_for_pointers(sizes: tuple[int, int, int], made: Any) -> None:
    """Beside addresses, as matrices or as flat memory; the bits are those of addresses."""
    engine = detkern.Engine("cpu")
    m, k, n = sizes
    here = {
        name: operands.generate("wide", BF16, shape, 1)
        for name, shape in (("x", (m, k)), ("w", (k, n)), ("dy", (m, n)))
    }
    bias = operands.generate("normal", F32, (n,), 7)

    def given(array: np.ndarray) -> Any:
        return array.reshape(-1) if made is None else made(array)

    def both(call: Any, out: np.ndarray, *arrays: np.ndarray | None) -> None:
        other = out.copy()
        call((at(out), *(a if a is None else at(a) for a in arrays)), sizes, "bfloat16", 0)
        call((given(other), *(a if a is None else given(a) for a in arrays)), sizes, "bfloat16", 0)
        assert same(other, out)
        call((at(other), *(a if a is None else given(a) for a in arrays)), sizes, "bfloat16", 0)

    both(engine.forward, np.zeros((m, n), BF16.numpy), here["x"], here["w"], bias)
    both(engine.forward, np.zeros((m, n), BF16.numpy), here["x"], here["w"], None)
    both(engine.backward_dw, np.ones((k, n), np.float32), here["dy"], here["x"])
    both(engine.backward_dx, np.zeros((m, k), BF16.numpy), here["dy"], here["w"])


def test_a_longer_buffer_may_be_given() -> None:
    engine = detkern.Engine("cpu")
    here = triad(F32)
    out, flat = np.full((M + 4, N), 7, np.float32), np.zeros(M * K + 5, np.float32)
    flat[: M * K] = here["x"].reshape(-1)
    engine.forward((out, flat, here["w"], None), (M, K, N), "float32", 0)
    assert same(out[:M], detkern.gemm(here["x"], here["w"]))
    assert (out[M:] == 7).all()


def test_arrays_are_checked_against_the_sizes() -> None:
    """A wrong order of sizes, a short buffer, another type, layout or device: nothing is read or written."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    engine = detkern.Engine("cpu")
    here = triad(F32)
    x, w, dy = here["x"], here["w"], here["dy"]
    out, dw, dx = np.full((M, N), 7, np.float32), np.full((K, N), 7, np.float32), np.full((M, K), 7, np.float32)
    readonly = out.copy()
    readonly.flags.writeable = False
    sizes = (M, K, N)
    cases: list[tuple[Any, tuple[Any, ...], tuple[int, int, int], type[Exception], str]] = [
        (engine.forward, (out, x, w, None), (M, N, K), ShapeError,
            r"out is float32 \[19, 10\], and sizes \(M, K, N\) ask for \[19, 33\]"),
        (engine.forward, (at(out), x, at(w), None), (M, N, K), ShapeError,
            r"a is float32 \[19, 33\], and sizes .* \[19, 10\]"),
        (engine.forward, (out, x, w, None), (M + 1, K, N), ShapeError,
            r"out is float32 \[19, 10\].* ask for \[20, 10\]"),
        (engine.forward, (out, x, w.reshape(-1)[1:], None), sizes, ShapeError,
            r"b is float32 \[329\], fewer elements .*: \[33, 10\]"),
        (engine.forward, (out, x, w, here["bias"][:-1]), sizes, ShapeError, r"bias is float32 \[9\], fewer elements"),
        (engine.forward, (out, x, w, here["bias"].astype(np.float16)), sizes, DTypeError,
            "bias is float16 .*, and must be float32"),
        (engine.forward, (out, np.ones((M, K), np.float16), w, None), sizes, DTypeError,
            "a is float16 .*, and must be float32"),
        (engine.forward, (out, np.asfortranarray(x), w, None), sizes, ArgumentError, "a is not row-major and dense"),
        (engine.forward, (out[:, ::-1], x, w, None), sizes, ArgumentError, "out is not row-major and dense"),
        (engine.forward, (out, np.broadcast_to(x[:1], x.shape), w, None), sizes, ArgumentError, "a is not row-major"),
        (engine.forward, (readonly, x, w, None), sizes, ArgumentError, "out is read-only"),
        (engine.forward, (out, out.reshape(-1), w, None), (1, K, N), ArgumentError, "out shares memory with a"),
        (engine.forward, (out, torch.ones(M, K, requires_grad=True), w, None), sizes, ArgumentError, "requires grad"),
        (engine.forward, (out, torch.ones(M, K, device="meta"), w, None), sizes, Exception, "meta"),
        (engine.forward, (out, x.tolist(), w, None), sizes, ArgumentError, "a=.* must be a whole number"),
        (engine.forward, (out, np.float32(3), w, None), sizes, ArgumentError, "a=.* must be a whole number"),
        (engine.backward_dw, (dw, dy, x), (K, M, N), ShapeError,
            r"dy is float32 \[19, 10\], and sizes .* ask for \[33, 10\]"),
        (engine.backward_dw, (at(dw), at(dy), x), (K, M, N), ShapeError,
            r"x is float32 \[19, 33\], .* ask for \[33, 19\]"),
        (engine.backward_dw, (dw.astype(BF16.numpy), dy, x), sizes, DTypeError,
            "dw is bfloat16 .*, and must be float32"),
        (engine.backward_dx, (dx, dy, w), (M, N, K), ShapeError,
            r"dx is float32 \[19, 33\], and sizes .* ask for \[19, 10\]"),
        (engine.backward_dx, (at(dx), at(dy), w), (M, N, K), ShapeError,
            r"w is float32 \[33, 10\], .* ask for \[10, 33\]"),
    ]  # fmt: skip
    for call, pointers, asked, error, message in cases:
        with pytest.raises(error, match=message):
            call(pointers, asked, "float32", 0)
        assert (out == 7).all()
        assert (dw == 7).all()
        assert (dx == 7).all()


def test_a_tensor_that_is_written_gets_a_new_version() -> None:
    """So that autograd sees that a tensor which it saved has changed."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    out, x, w = torch.zeros(M, N), torch.ones(M, K), torch.ones(K, N)
    before = out._version
    detkern.Engine("cpu").forward((out, x, w, None), (M, K, N), "float32", 0)
    assert out._version == before + 1
    assert x._version == w._version == 0
    assert bool((out == K).all())


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:1", -1, True, None, "cuda:-1"])
def test_a_device_that_is_none(device: Any) -> None:
    with pytest.raises(ArgumentError, match="is not a device; give the ordinal of a CUDA device"):
        detkern.Engine(device)


def test_a_device_that_no_backend_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TABLE", [row for row in registry.TABLE if "musa" not in row.devices])
    with pytest.raises(DeviceError, match="no backend works on musa:0"):
        detkern.Engine("musa:0")
    monkeypatch.undo()
    for name in ("cuda", "triton"):
        monkeypatch.setattr(registry.load(name), "unavailable", lambda device, name=name: f"{name} is on holiday")
    with pytest.raises(BackendUnavailable, match="cuda:3: cuda: cuda is on holiday; triton: triton is on holiday"):
        detkern.Engine(3)
    for backend in ("native", "nonsense"):
        with pytest.raises(ArgumentError, match="is not a backend that follows contracts"):
            detkern.Engine("cpu", backend=backend)


def test_it_takes_a_device_of_the_package_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.load("cuda"), "unavailable", lambda device: None)
    assert repr(detkern.Engine(np.int64(1), backend="cuda")) == "Engine('cuda:1')"
    assert repr(detkern.Engine(Device("cpu"))) == "Engine('cpu')"
    engine = detkern.Engine("cpu")
    engine.presize_upcast_scratch(1, 2, 3)
    engine.synchronize()


@pytest.mark.parametrize(
    ("kind", "package", "runtime"), [("musa", "torch_musa", "musa"), ("ascend", "torch_npu", "npu")]
)
def test_synchronize_loads_the_extension_of_the_device(
    kind: str, package: str, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else in a program on raw pointers may have imported it."""
    monkeypatch.setattr(registry.load(kind), "unavailable", lambda device: None)
    engine = detkern.Engine(f"{kind}:2")
    with pytest.raises(BackendUnavailable, match=f"nothing here can wait for {kind}:2: {package} is not installed"):
        engine.synchronize()
    waited: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setattr(sys.modules["torch"], "waited", waited, raising=False)
    (tmp_path / f"{package}.py").write_text(
        f"import torch, types\ntorch.{runtime} = types.SimpleNamespace(synchronize=torch.waited.append)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, package, raising=False)
    try:
        engine.synchronize()
    finally:
        sys.modules.pop(package, None)
    assert waited == [2]


def test_threads_share_an_engine() -> None:
    engine = detkern.Engine("cpu")
    here = triad(BF16)
    want = detkern.gemm(here["x"], here["w"], contract="mma16")
    wrong: list[Any] = []

    def work(rows: int) -> None:
        out = np.empty((rows, N), BF16.numpy)
        for _ in range(50):
            out.view(np.uint16)[...] = 0x7FAD
            engine.forward((at(out), at(here["x"]), at(here["w"]), None), (rows, K, N), "bfloat16", 0, True)
            if not same(out, want[:rows]):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 5, 7, M)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_engine_holds_the_plans_of_all_callers_and_is_not_kept_alive() -> None:
    engine = detkern.Engine("cpu")
    here = triad(F32)
    out = np.empty((M, N), np.float32)
    engine.forward((at(out), at(here["x"]), at(here["w"]), None), (M, K, N), "float32", 0)
    kept = len(plan.plans)
    assert same(out, detkern.gemm(here["x"], here["w"], contract="fma"))
    engine.forward((at(out), at(here["x"]), at(here["w"]), None), (M - 1, K, N), "float32", 0)
    assert len(plan.plans) <= kept + 1, "one plan for any number of rows, and one for another alignment of the result"
    seen = weakref.ref(engine)
    del engine
    gc.collect()
    assert seen() is None
