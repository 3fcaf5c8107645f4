"""The adapters: what they read of an array, when they copy, whose memory a result has, and the order of streams."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from frameworks import FRAMEWORKS, OnlyDLPack, framework, same
from hypothesis import given, settings
from hypothesis import strategies as st

import detkern
from detkern.cpu.backend import BACKEND as CPU_BACKEND
from detkern.dispatch import plan, registry
from detkern.dispatch.backend import Execution
from detkern.errors import ArgumentError
from detkern.operations.gemm.problem import GemmProblem
from detkern.tensors import (
    Device,
    TensorView,
    adapter_for,
    contiguous_strides,
    dlpack,
    dtype_argument,
    overlap,
    streams,
)
from detkern.tensors.numpy import CPU, NUMPY, host_memory, ndarray_of
from detkern.tensors.view import element_strides
from detkern.vocabulary.dtypes import BF16, DTYPES, F32, DType


def view_of(array: Any) -> TensorView:
    return adapter_for(array, "a").view(array, "a")


@pytest.mark.parametrize("name", list(FRAMEWORKS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_has_the_memory_shape_and_type(name: str, dtype: DType) -> None:
    f = framework(name)
    values = np.arange(12).reshape(3, 4).astype(dtype.numpy)
    view = view_of(f.make(values))
    assert (view.shape, view.strides, view.dtype, view.device) == ((3, 4), (4, 1), dtype, CPU)
    assert same(ndarray_of(view), values)
    if name in ("numpy", "torch", "dlpack"):
        assert view.pointer == values.ctypes.data


@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_results_are_of_the_framework_without_a_copy(name: str) -> None:
    f = framework(name)
    like = f.make(np.zeros((2, 2), np.float32))
    adapter = adapter_for(like, "a")
    execution = adapter.execution(CPU)
    for dtype, shape in itertools.product((F32, BF16, DTYPES[1]), ((), (3,), (2, 3), (0, 3), (2, 0, 3))):
        view = adapter.empty(like, shape, contiguous_strides(shape), dtype, execution)
        assert view.pointer % 16 == 0
        assert view.dtype == dtype
        result = adapter.result(like, view, execution)
        if 0 not in shape:
            ndarray_of(view)[...] = 3
            assert view_of(result).pointer == view.pointer
        read = f.read(result)
        assert read.shape == shape
        assert read.dtype == dtype.numpy
        assert (read == 3).all()


def test_numpy_views_that_need_a_copy_and_those_that_do_not() -> None:
    field = np.zeros((3, 4), [("flag", "u1"), ("value", "f4")])["value"]
    field[...] = np.arange(12).reshape(3, 4)
    view = view_of(field)
    assert view.strides == (4, 1)
    assert (ndarray_of(view) == field).all()
    said: list[str] = []
    planned = NUMPY.view(field, "a", None, said)
    assert (planned.pointer, planned.shape, planned.strides) == (0, (3, 4), (4, 1))
    assert said == ["a: strides of (20, 5) bytes are not multiples of its 4-byte elements"]
    # A stride that is never used may be anything.
    one = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (1, 3), (7, 4))
    assert view_of(one).pointer == one.ctypes.data
    assert view_of(one).strides == (0, 1)
    negative = np.zeros((3, 4), np.float32)[::-1, ::-2]
    assert view_of(negative).strides == (-4, -2)
    assert view_of(negative).pointer == negative.ctypes.data
    assert view_of(np.broadcast_to(np.float32(1), (3, 4))).strides == (0, 0)
    assert view_of(np.broadcast_to(np.float32(1), (3, 4))).readonly
    assert view_of(np.zeros((3, 0, 2), np.float16)).shape == (3, 0, 2)
    mapped = np.memmap.__new__(np.memmap, "/dev/zero", np.float32, "c", shape=(2, 2))
    assert view_of(mapped).shape == (2, 2)


def test_out_of_numpy_is_never_a_copy() -> None:
    out = np.zeros((4, 6), np.float32)[::2, ::-3]
    view = NUMPY.out_view(out, "out")
    ndarray_of(view)[...] = 5
    assert (out == 5).all()
    assert not view.readonly


@pytest.mark.parametrize("versioned", [False, True])
def test_torch_versioned_and_plain_capsules(versioned: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)[:, ::2]

    class Wrapper:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, max_version: Any = None) -> Any:
            return tensor.__dlpack__(max_version=max_version if versioned else None)

    view = view_of(Wrapper())
    assert (view.shape, view.strides, view.dtype) == ((3, 2), (4, 2), BF16)
    assert view.pointer == tensor.data_ptr()
    assert (ndarray_of(view).astype(float) == [[0, 2], [4, 6], [8, 10]]).all()


class Versioned:
    """Exports an ndarray with NumPy's own capsule of DLPack 1."""

    def __init__(self, array: np.ndarray, **options: Any) -> None:
        if np.lib.NumpyVersion(np.__version__) < "2.1.0":
            pytest.skip("NumPy before 2.1 makes no versioned capsules")
        self.array = array
        self.options = options
        self.keywords: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **keywords: Any) -> Any:
        self.keywords = keywords
        return self.array.__dlpack__(**keywords, **self.options)


def test_an_exported_copy_is_no_out() -> None:
    array = Versioned(np.zeros((2, 3), np.float32), copy=True)
    assert view_of(array).shape == (2, 3)
    with pytest.raises(detkern.ArgumentError, match="exports a copy"):
        adapter_for(array, "out").out_view(array, "out")


def test_read_only_exports_say_so() -> None:
    memory = np.zeros((2, 3), np.float32)
    array = Versioned(memory)
    assert not view_of(array).readonly
    memory.flags.writeable = False
    assert view_of(array).readonly
    assert array.keywords == {"max_version": (1, 1)}


def test_dlpack_of_a_later_major_version_is_refused() -> None:
    class Later(Versioned):
        def __dlpack__(self, **keywords: Any) -> Any:
            capsule = super().__dlpack__(**keywords)
            dlpack._Versioned.from_address(dlpack._get_pointer(capsule, b"dltensor_versioned")).major = 2
            return capsule

    with pytest.raises(detkern.DTypeError, match=r"DLPack 2\.0"):
        view_of(Later(np.zeros(3, np.float32)))


def test_a_capsule_frees_its_array_when_the_view_dies() -> None:
    import gc
    import weakref

    class Tracked(OnlyDLPack):
        pass

    array = Tracked(np.zeros((2, 3), np.float32))
    alive = weakref.ref(array)
    view = view_of(array)
    del array
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_dlpack_shapes_without_strides_and_with_an_offset() -> None:
    memory = np.arange(6, dtype=np.float32)
    capsule = memory.__dlpack__()
    tensor, _ = dlpack._tensor(capsule, "a")
    tensor.strides = None
    tensor.byte_offset = 8
    tensor.shape[0] = 4

    class Wrapper:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self) -> Any:
            return capsule

    view = view_of(Wrapper())
    assert (view.pointer, view.shape, view.strides) == (memory.ctypes.data + 8, (4,), (1,))


def test_a_stride_that_is_never_used_may_be_anything() -> None:
    assert element_strides((2, 3), (12, 4), 4) == (3, 1)
    assert element_strides((1, 3), (7, 4), 4) == (0, 1)
    assert element_strides((0, 3), (6, 3), 2) == (3, 0)
    assert element_strides((2, 3), (-7, -3), 1) == (-7, -3)
    assert element_strides((2, 3), (-6, 3), 2) is None


def test_jax_layouts_and_devices() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = jax.numpy.asarray(values)
    view = view_of(array)
    assert view.readonly
    assert view.pointer == array.unsafe_buffer_pointer()
    assert same(ndarray_of(view_of(array.T @ jax.numpy.eye(3))), values.T.copy())  # still being computed, perhaps


def test_a_jax_result_is_on_the_device_of_its_operand() -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    code = """
import jax, detkern
third = jax.devices("cpu")[2]
a = jax.device_put(jax.numpy.ones((2, 3)), third)
for rows in (2, 0):
    result = detkern.gemm(a[:rows], a.T)
    print(result.devices() == {third}, float(result.sum()))
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    ran = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "12.0", "True", "0.0"]


def test_out_types_and_their_refusal() -> None:
    assert dtype_argument("bf16") is BF16
    assert dtype_argument(ml_dtypes.bfloat16) is BF16
    assert dtype_argument(np.dtype("=f4")) is F32
    for wrong in ("float8_e5m2", np.float64, "f64", 4, object()):
        with pytest.raises(detkern.DTypeError, match="float32, float16 and bfloat16 can"):
            dtype_argument(wrong)


def test_host_memory_is_aligned() -> None:
    for size in (0, 1, 7, 1000):
        memory = host_memory(size, 64)
        assert memory.ctypes.data % 64 == 0 or size == 0
        assert memory.size == size


def strided(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int, dtype: DType = F32) -> TensorView:
    return TensorView(pointer, shape, strides, dtype, CPU)


@st.composite
def windows(draw: st.DrawFn) -> TensorView:
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(0 if rank < 3 else 1, 5)) for _ in range(rank))
    strides = tuple(draw(st.integers(-12, 12)) for _ in range(rank))
    return strided(shape, strides, 100_000 + draw(st.integers(-80, 80)), draw(st.sampled_from(DTYPES)))


def touched(view: TensorView) -> set[int]:
    item = view.dtype.itemsize
    addresses = set()
    for index in np.ndindex(*view.shape):
        start = view.pointer + item * sum(i * s for i, s in zip(index, view.strides, strict=True))
        addresses.update(range(start, start + item))
    return addresses


@settings(max_examples=300, deadline=None, derandomize=True)
@given(windows(), windows())
def test_overlap_is_exact(first: TensorView, second: TensorView) -> None:
    assert overlap.overlapping(first, second) == bool(touched(first) & touched(second))
    item = first.dtype.itemsize
    count = int(np.prod(first.shape, dtype=np.int64))
    assert overlap.self_overlapping(first.shape, first.strides) == (len(touched(first)) < count * item)


def test_overlap_sees_residues_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    # Elements 0, 7, 14, … beside 3, 17, 31, …: thousands of addresses in one range, apart by their remainder of 7.
    monkeypatch.setattr(overlap, "WORK", 20)
    first, second = strided((1000, 100), (700, 7), 4096), strided((1000, 100), (1400, 14), 4096 + 4 * 3)
    assert not overlap.overlapping(first, second)
    assert not overlap.overlapping(second, first)


def test_overlap_gives_up_on_the_safe_side(monkeypatch: pytest.MonkeyPatch) -> None:
    # Interleaved columns: address ranges overlap, elements do not.
    first, second = strided((1000, 3), (9, 2), 0), strided((1000, 3), (9, 2), 4)
    assert not overlap.overlapping(first, second)
    monkeypatch.setattr(overlap, "WORK", 1)
    assert overlap.overlapping(first, second)
    assert overlap.self_overlapping((50, 50, 50), (7, 11, 13))
    assert not overlap.self_overlapping((5, 7), (7, 1))  # strides that nest need no search


class FakeCuda:
    """CuPy's interface over host memory, with a log of what is done to streams. Its current stream is 5."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.current = 5
        self.finished: set[int] = set()
        self.capturing = False
        self.alive: set[int] = set()  # events whose object still exists: CuPy destroys one with its object
        fake = self
        numbers = itertools.count(1)

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                self.ptr = next(numbers)
                fake.alive.add(self.ptr)

            def __del__(self) -> None:
                fake.alive.discard(self.ptr)

            @property
            def done(self) -> bool:
                return self.ptr in fake.finished

        class Stream:
            def __init__(self, handle: int) -> None:
                self.ptr = handle

            @classmethod
            def from_external(cls, handle: Any) -> Stream:
                return cls(handle.__cuda_stream__()[1])

            def __enter__(self) -> None:
                self.before, fake.current = fake.current, self.ptr

            def __exit__(self, *_: object) -> None:
                fake.current = self.before

        class Device:
            def __init__(self, index: int) -> None:
                assert index == 0

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

        class Array(OnlyDLPack):
            @property
            def data(self) -> Any:
                return types.SimpleNamespace(ptr=self.array.ctypes.data)

            def view(self, dtype: Any) -> np.ndarray:
                return self.array.view(dtype)

        self.Array = Array
        self.ndarray = Array
        self.empty = lambda shape, dtype: Array(np.empty(shape, dtype))
        self.cuda = types.SimpleNamespace(
            Device=Device,
            Event=Event,
            Stream=Stream,
            get_current_stream=lambda index: Stream(self.current),
            runtime=types.SimpleNamespace(
                eventRecord=lambda event, stream: self.log.append(("record", stream, event)),
                streamWaitEvent=self.wait,
                streamIsCapturing=lambda stream: self.capturing,
                streamSynchronize=lambda stream: self.log.append(("synchronize", stream)),
                pointerGetAttributes=lambda pointer: types.SimpleNamespace(device=0),
                getDevice=lambda: 0,
            ),
        )

    def wait(self, stream: int, event: int) -> None:
        assert event in self.alive, "the event was destroyed before the wait for it was enqueued"
        self.log.append(("wait", stream, event))


class OnCuda:
    """Host memory that says through DLPack that it is on CUDA device 0, and keeps the stream that it was asked for."""

    def __init__(self, array: np.ndarray, log: list[Any]) -> None:
        self.array = array
        self.log = log

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> Any:
        self.log.append(("dlpack", stream))
        capsule = self.array.__dlpack__()
        tensor, _ = dlpack._tensor(capsule, "a")
        tensor.device_type = 2
        return capsule


class WithInterface:
    def __init__(self, array: np.ndarray, stream: int | None) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": array.dtype.str, "data": (array.ctypes.data, not array.flags.writeable),
            "strides": array.strides, "version": 3, "stream": stream,
        }  # fmt: skip


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A CUDA device in host memory, with one backend that runs the CPU's kernels and logs the launch."""
    fake = FakeCuda()
    monkeypatch.setitem(__import__("sys").modules, "cupy", fake)
    monkeypatch.setattr(streams, "_kept", type(streams._kept)())

    class Backend:
        name = "fake"
        deterministic = True

        def unavailable(self, device: Device) -> None:
            return None

        def refuses(self, problem: Any) -> None:
            return None

        def capability(self, device: Device) -> tuple[int, int]:
            return 9, 0

        def prepare(self, problem: Any, execution: Any) -> Any:
            computed = CPU_BACKEND.implementations[GemmProblem].prepare(problem, execution)

            def run(m: int, *arguments: Any) -> None:
                fake.log.append(("launch", arguments[-1].stream))
                computed(m, *arguments)

            return run

    row = registry.Row("fake", "", ("cuda",))
    monkeypatch.setattr(registry, "TABLE", (row,))
    backend = Backend()
    backend.implementations = {GemmProblem: backend}
    monkeypatch.setattr(registry, "load", lambda name: backend)
    plan.forget_plans()
    yield fake
    plan.forget_plans()


A, B = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((4, 3), np.float32)


def test_cuda_array_interface_orders_both_ways(cuda: FakeCuda) -> None:
    a, b = WithInterface(A, 7), WithInterface(B, None)
    result = detkern.gemm(a, b)
    assert (result == A @ B).all()
    # Stream 5 waits for 7 before the launch, 7 for 5 after it, and b is held until the launch has finished.
    assert cuda.log == [
        ("record", 7, 1),
        ("wait", 5, 1),
        ("launch", 5),
        ("record", 5, 2),
        ("wait", 7, 2),
        ("record", 5, 3),
    ]
    assert [owner for _, owner in streams._kept] == [b]
    cuda.finished.add(3)
    detkern.gemm(WithInterface(A, 5), WithInterface(B, 5))
    assert [owner for _, owner in streams._kept] == [b]
    streams.keep(Device("cuda"), 5, "next")
    assert [owner for _, owner in streams._kept] == ["next"]


def test_dlpack_is_asked_for_the_stream_of_the_work(cuda: FakeCuda) -> None:
    a, b, out = OnCuda(A, cuda.log), OnCuda(B, cuda.log), OnCuda(np.zeros((2, 3), np.float32), cuda.log)
    assert detkern.gemm(a, b, out=out) is out
    assert (out.array == A @ B).all()
    assert cuda.log[:4] == [("dlpack", 5), ("dlpack", 5), ("dlpack", 5), ("launch", 5)]
    # A written array's next reader cannot be told which stream to wait for.
    assert cuda.log[-1] == ("synchronize", 5)
    assert len(streams._kept) == 2
    cuda.log.clear()
    cuda.current = 0
    detkern.gemm(a, b)
    assert cuda.log[:3] == [("dlpack", 1), ("dlpack", 1), ("launch", 0)]  # 0 is ambiguous in DLPack


def test_a_written_interface_orders_its_own_stream(cuda: FakeCuda) -> None:
    out = WithInterface(np.zeros((2, 3), np.float32), 9)
    assert detkern.gemm(OnCuda(A, cuda.log), OnCuda(B, cuda.log), out=out) is out
    assert (out.array == A @ B).all()
    kinds = [entry[:2] for entry in cuda.log]
    assert kinds[2:5] == [("record", 9), ("wait", 5), ("launch", 5)]
    assert kinds[-2:] == [("record", 5), ("wait", 9)]
    cuda.log.clear()
    detkern.gemm(OnCuda(A, cuda.log), OnCuda(B, cuda.log), out=WithInterface(np.zeros((2, 3), np.float32), None))
    assert cuda.log[-1] == ("synchronize", 5)


def test_a_capture_holds_nothing_and_synchronises_nothing(cuda: FakeCuda) -> None:
    cuda.capturing = True
    detkern.gemm(OnCuda(A, cuda.log), OnCuda(B, cuda.log), out=OnCuda(np.zeros((2, 3), np.float32), cuda.log))
    assert not streams._kept
    assert ("synchronize", 5) not in cuda.log


def test_empty_results_touch_no_stream(cuda: FakeCuda) -> None:
    assert detkern.gemm(WithInterface(A[:0], 7), WithInterface(B, 7)).shape == (0, 3)
    assert cuda.log == []


def test_operands_on_two_devices(cuda: FakeCuda) -> None:
    with pytest.raises(detkern.DeviceError, match=r"b is float32 \[4, 3\] on cpu, a is on cuda:0"):
        detkern.gemm(OnCuda(A, cuda.log), B)
    with pytest.raises(detkern.DeviceError, match=r"bias is float32 .* on cuda:0, a is on cpu"):
        detkern.gemm(A, B, bias=WithInterface(np.ones(3, np.float32), 7))
    with pytest.raises(detkern.DeviceError, match=r"out is float32 .* on cpu"):
        detkern.gemm(OnCuda(A, cuda.log), OnCuda(B, cuda.log), out=np.zeros((2, 3), np.float32))


class Pooled:
    """cupy.cuda.memory.PooledMemory; its pointer is 0 once it is freed."""

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr, self.size = ptr, size


def test_a_cupy_array_beyond_its_memory_is_refused() -> None:
    """By CuPy's own bookkeeping; memory whose size CuPy made up is believed."""
    from detkern.tensors.cupy import _CuPy

    memory_types = types.SimpleNamespace(PooledMemory=Pooled)
    runtime = types.SimpleNamespace(is_hip=False)
    adapter = _CuPy(types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime, memory=memory_types)))

    def array(memory: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        data = types.SimpleNamespace(mem=memory, ptr=4096 + offset)
        device = types.SimpleNamespace(id=0)
        return types.SimpleNamespace(
            data=data,
            shape=shape,
            strides=strides,
            dtype=np.dtype("f4"),
            itemsize=4,
            size=int(np.prod(shape)),
            device=device,
        )

    whole = Pooled(4096, 512)
    for offset, shape, strides in (
        (0, (16, 8), (32, 4)),
        (480, (8,), (4,)),
        (508, (128,), (-4,)),
        (512, (0, 8), (32, 4)),
    ):
        assert adapter.view(array(whole, offset, shape, strides), "a").pointer == 4096 + offset
    for offset, shape, strides, needed in (
        (0, (17, 8), (32, 4), "bytes 0 to 544"), (484, (8,), (4,), "bytes 484 to 516"),
        (8, (8,), (-4,), "bytes -20 to 12"),
    ):  # fmt: skip
        for read in (adapter.view, adapter.out_view):
            with pytest.raises(ArgumentError, match=f"a .* holds 512 bytes and the array needs {needed} of it"):
                read(array(whole, offset, shape, strides), "a")
    with pytest.raises(
        ArgumentError, match="a has had its memory freed: the memory holds 0 bytes and the array needs 512"
    ):
        adapter.view(array(Pooled(0, 512), 0, (16, 8), (32, 4)), "a")
    made_up = types.SimpleNamespace(ptr=4096, size=24)
    assert adapter.view(array(made_up, 0, (16, 8), (32, 4)), "a").pointer == 4096


def test_without_cupy_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(detkern.DeviceError, match="need CuPy"):
        detkern.gemm(OnCuda(A, []), OnCuda(B, []))


def test_jax_work_on_cuda_keeps_one_stream_and_the_import_of_the_result_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    module = importlib.import_module("detkern.tensors.jax")
    device = Device("cuda", 0)
    named = itertools.count(100)  # JAX names another stream of its pool at every call
    waits: list[tuple[str, int, int]] = []

    class Holder:
        platform = "gpu"

        def get_stream_for_external_ready_events(self) -> int:
            return next(named)

    holder = Holder()

    class Array:
        dtype = np.dtype(np.float32)

        def is_deleted(self) -> bool:
            return False

        def devices(self) -> set[Holder]:
            return {holder}

        def __dlpack__(self, *, stream: int) -> int:
            return stream

    def read(array: Array, argument: str, hint: str, *, stream: int) -> tuple[Any, ...]:
        waits.append((argument, 0, stream))
        return 4096, (2, 3), (3, 1), F32, device, None, None, None

    monkeypatch.setattr(module, "read", read)
    monkeypatch.setattr(module, "device_of", lambda array, argument: device)
    monkeypatch.setattr(module, "external_execution", lambda device, stream: Execution(device, stream, None))
    monkeypatch.setattr(module, "keep", lambda device, stream, owner: None)
    monkeypatch.setattr(module, "order", lambda device, first, then: waits.append(("import", first, then)))
    adapter = module._Jax(jax)
    monkeypatch.setattr(adapter, "_from_dlpack", lambda array: array.__dlpack__(stream=777))

    first = adapter.view(Array(), "a")
    execution = adapter.execution(first.device)
    adapter.view(Array(), "b", execution.stream)
    assert adapter.execution(device).stream == execution.stream
    assert waits == [("a", 0, execution.stream), ("b", 0, execution.stream)]

    result = TensorView(4096, (2, 3), (3, 1), F32, device, False, (Array(), None))
    assert adapter.result(Array(), result, execution) == 777
    assert waits[2:] == [("import", execution.stream, 777)]
