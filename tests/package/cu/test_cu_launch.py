"""The argument block against params.cuh, plans, and launches on a driver that only takes notes."""

from __future__ import annotations

import ctypes
import re
import struct
import weakref
from dataclasses import replace
from typing import Any

import cu_driver
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from detkern.cu import current, launch, loader, tile_choice
from detkern.cu.device import CudaDevice
from detkern.cu.geometry import Maps
from detkern.cu.tensor_map import MapShape
from detkern.dispatch.backend import Execution
from detkern.errors import DeviceError
from detkern.operations.gemm.problem import gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import FMA, MMA16, TREE, TREE_MMA16
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32, DType

HEADER = loader.FOLDER / "parts" / "params.cuh"
DEVICE = Device("cuda", 1)
_TYPES = {"void*": ("Q", 8), "int64_t": ("q", 8), "int32_t": ("i", 4)}


def _fields() -> dict[str, tuple[int, str]]:
    """name -> (offset, struct format) of GemmParams, from the header, laid out as C does."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    body = re.search(r"struct GemmParams \{(.*?)\};", text, re.DOTALL)[1]
    fields, offset = {}, 0
    for kind, names in re.findall(r"(?:const\s+)?(void\*|int64_t|int32_t)\s+([^;]+);", body):
        code, size = _TYPES[kind]
        for name in names.split(","):
            stem, count = re.fullmatch(r"\s*(\w+)(?:\[MAX_BATCH_RANK\])?\s*", name)[1], 8 if "[" in name else 1
            assert offset % size == 0, "the header must need no padding"
            fields[stem] = (offset, f"<{count}{code}")
            offset += count * size
    fields["size"] = (offset, "")
    return fields


def _view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, pointer: int) -> TensorView:
    return TensorView(pointer, shape, strides, dtype, DEVICE)


def test_every_field_is_where_the_header_says() -> None:
    fields = _fields()
    assert fields.pop("size")[0] == launch.PARAMS_BYTES
    batch = (3, 5)
    a = _view((*batch, 7, 11), (1000, 200, 13, 1), BF16, 0)
    b = _view((*batch, 11, 9), (0, 300, 17, 2), BF16, 0)
    out = _view((*batch, 7, 9), (-900, 150, 1, 19), F16, 0)
    bias = _view((9,), (-3,), F32, 0)
    problem = gemm_problem(FMA, a, b, out, bias, False)
    block = struct.pack("<5Q", 1, 2, 3, 4, 5) + launch.pack_params(problem, prefetch_bytes=65536)
    found = {name: struct.unpack_from(form, block, offset) for name, (offset, form) in fields.items()}
    rest = (0,) * 6
    assert found == {
        "a": (1,), "b": (2,), "out": (3,), "bias": (4,), "scratch": (5,),
        "m": (7,), "n": (9,), "k": (11,),
        "a_row": (13,), "a_col": (1,), "b_row": (17,), "b_col": (2,), "out_row": (1,), "out_col": (19,),
        "bias_stride": (-3,), "out_dtype": (2,), "bias_dtype": (1,), "accumulate": (0,), "batch_rank": (2,),
        "out_path": (0,), "whole_boxes": (0,), "a_shared": (1,), "b_shared": (1,),
        "prefetch_bytes": (65536,),
        "batch_shape": (*batch, *(1 for _ in rest)), "a_batch": (1000, 200, *rest), "b_batch": (0, 300, *rest),
        "out_batch": (-900, 150, *rest),
    }  # fmt: skip


def test_no_bias_is_type_zero() -> None:
    offset, form = _fields()["bias_dtype"]
    plain = _view((8, 8), (8, 1), F32, 256)
    block = bytes(40) + launch.pack_params(gemm_problem(FMA, plain, plain, plain, None, True))
    assert struct.unpack_from(form, block, offset) == (0,)
    offset, form = _fields()["accumulate"]
    assert struct.unpack_from(form, block, offset) == (1,)


def test_a_kernel_is_told_what_its_maps_give() -> None:
    """Whether there is one of the output, and of which operands all of a tile's boxes come at once."""
    fields = _fields()
    plain = _view((64, 64), (64, 1), BF16, 256)
    problem = gemm_problem(MMA16, plain, plain, plain, None, False)
    one_by_one = MapShape(BF16, (64, 64, 1), (128, 128), 64)
    at_once = replace(one_by_one, boxes=1)
    for maps, expected in (
        (None, (0, 0)),
        (Maps(one_by_one, one_by_one, None), (0, 0)),
        (Maps(one_by_one, one_by_one, one_by_one), (1, 0)),
        (Maps(at_once, one_by_one, None), (0, 1)),
        (Maps(one_by_one, at_once, None), (0, 2)),
        (Maps(at_once, at_once, one_by_one), (1, 3)),
    ):
        block = bytes(40) + launch.pack_params(problem, maps)
        found = [struct.unpack_from(fields[name][1], block, fields[name][0]) for name in ("out_path", "whole_boxes")]
        assert found == [(value,) for value in expected]


class Driver:
    """What launch.py asks of CuPy's driver and runtime modules, written down."""

    def __init__(self) -> None:
        self.device = 0
        self.context = 1
        self.launches: list[dict[str, Any]] = []
        self.capturing = False
        self.failure: Exception | None = None
        self.held: list[weakref.ref[Any]] = []

    def getDevice(self) -> int:
        return self.device

    def setDevice(self, index: int) -> None:
        self.device = index
        self.context = 1

    def ctxGetCurrent(self) -> int:
        return self.context

    def streamIsCapturing(self, stream: int) -> bool:
        return self.capturing

    def launchKernel(self, function: int, *arguments: int) -> None:
        assert self.context
        assert not self.held or self.held[-1]() is not None, "scratch memory was given back"
        if self.failure is not None:
            raise self.failure
        grid, block, shared, stream, parameters, extra = (
            arguments[:3], arguments[3:6], arguments[6], arguments[7], arguments[8], arguments[9],
        )  # fmt: skip
        address = ctypes.c_void_p.from_address(parameters).value
        assert address is not None
        self.launches.append(
            {
                "function": function,
                "grid": grid,
                "block": block,
                "shared": shared,
                "stream": stream,
                "extra": extra,
                "device": self.device,
                "params": ctypes.string_at(address, launch.PARAMS_BYTES),
            }
        )


class _Fault(Exception):
    pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    fake.CUDADriverError = fake.CUDARuntimeError = _Fault  # type: ignore[attr-defined]
    for module in (current, launch):
        monkeypatch.setattr(module, "driver", fake)
        monkeypatch.setattr(module, "runtime", fake, raising=False)
    monkeypatch.setattr(current, "_captured", [])
    monkeypatch.setattr(launch, "describe", lambda index: CudaDevice(index, "fake", "", (9, 0), 132, "1"))

    class Function:
        ptr = 77

    monkeypatch.setattr(launch, "load_function", lambda *arguments: Function)
    return fake


def _allocate(size: int) -> TensorView:
    return TensorView(0xABC00, (size,), (1,), E4M3, DEVICE)


EXECUTION = Execution(DEVICE, 0x1234, _allocate)


def test_a_launch_has_its_pointers_its_stream_and_its_device(driver: Driver) -> None:
    a, b = _view((200, 64), (64, 1), F32, 0x1000), _view((64, 300), (300, 1), F32, 0x2000)
    out, bias = _view((200, 300), (300, 1), F32, 0x3000), _view((300,), (1,), F32, 0x4000)
    problem = gemm_problem(FMA, a, b, out, bias, False)
    launch.launch(problem, a, b, out, bias, EXECUTION)
    (one,) = driver.launches
    assert struct.unpack_from("<5Q", one["params"]) == (0x1000, 0x2000, 0x3000, 0x4000, 0)
    assert one["params"][40:] == launch.pack_params(problem)
    chosen = tile_choice.choose(problem, (9, 0), 132)
    assert (one["grid"], one["block"], one["shared"]) == (
        (chosen.grid, 1, 1), (chosen.threads, 1, 1), chosen.build.shared_bytes,
    )  # fmt: skip
    assert (one["function"], one["stream"], one["extra"], one["device"]) == (77, 0x1234, 0, 1)
    assert driver.device == 0, "the earlier device is current again"


def test_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    driver.device, driver.context = 1, 0
    plain = _view((8, 8), (8, 1), F32, 0x1000)
    launch.launch(gemm_problem(FMA, plain, plain, plain, None, False), plain, plain, plain, None, EXECUTION)
    assert len(driver.launches) == 1


def test_a_plan_is_made_once_for_a_number_of_rows(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = launch.plan_for
    monkeypatch.setattr(launch, "plan_for", lambda *arguments: made.append(arguments) or real(*arguments))
    plain = _view((8, 8), (8, 1), F32, 0x1000)
    launches = launch.Launches(gemm_problem(FMA, plain, plain, plain, None, False))
    for m in (8, 8, 5, 8, 5):
        launches(m, (plain, plain, None), plain, EXECUTION)
    assert [problem.m for problem, *_ in made] == [8, 5]
    assert len(driver.launches) == 5
    for m, one in zip((8, 8, 5, 8, 5), driver.launches, strict=True):
        wanted = gemm_problem(
            FMA, _view((m, 8), (8, 1), F32, 0x1000), plain, _view((m, 8), (8, 1), F32, 0x1000), None, False
        )
        assert one["params"][40:] == launch.pack_params(wanted), "as if that problem had come alone"


def test_empty_problems_launch_nothing(driver: Driver) -> None:
    for m, n, batch in ((0, 3, ()), (3, 0, ()), (3, 3, (2, 0))):
        a, b = (
            _view((*batch, m, 4), (0,) * len(batch) + (4, 1), F32, 16),
            _view((*batch, 4, n), (0,) * len(batch) + (3, 1), F32, 16),
        )
        out = _view((*batch, m, n), (0,) * len(batch) + (3, 1), F32, 16)
        launch.launch(gemm_problem(FMA, a, b, out, None, False), a, b, out, None, EXECUTION)
    assert driver.launches == []


def test_more_batch_dimensions_than_a_launch_takes_become_launches(driver: Driver) -> None:
    batch = (2, 3, 2, 2, 2, 2, 2, 2, 2, 2)
    order = range(10)  # the first axis runs fastest, so that no two of them merge
    strides = [0] * 10
    step = 16
    for axis in order:
        strides[axis] = step
        step *= batch[axis]
    a = _view((*batch, 4, 4), (*strides, 4, 1), F16, 0x10000)
    b = _view((*batch, 4, 4), (*(3 * s for s in strides), 4, 1), F16, 0x20000)
    out = _view((*batch, 4, 4), (*strides, 4, 1), F32, 0x30000)
    launch.launch(gemm_problem(FMA, a, b, out, None, False), a, b, out, None, EXECUTION)
    pointers = [struct.unpack_from("<3Q", one["params"]) for one in driver.launches]
    assert pointers == [
        (
            0x10000 + 2 * (i * strides[0] + j * strides[1]),
            0x20000 + 6 * (i * strides[0] + j * strides[1]),
            0x30000 + 4 * (i * strides[0] + j * strides[1]),
        )
        for i in range(2)
        for j in range(3)
    ]


@pytest.mark.parametrize("contract", [TREE, TREE_MMA16], ids=str)
def test_scratch_is_the_callers_and_outlives_a_capture_of_cupys(
    contract: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = cu_driver.install(monkeypatch, launch.PARAMS_BYTES)  # a kernel that takes tensor maps is launched there
    sizes = []

    class Memory(cupy.ndarray):
        pass

    def allocate(size: int) -> TensorView:
        sizes.append(size)
        memory = Memory.__new__(Memory, (0,), memptr=_NULL)
        driver.held.append(weakref.ref(memory))
        return TensorView(0xABC00, (size,), (1,), E4M3, DEVICE, array=memory)

    a, b = _view((64, 65536), (65536, 1), BF16, 0x1000), _view((65536, 64), (64, 1), BF16, 0x2000)
    out = _view((64, 64), (64, 1), BF16, 0x3000)
    problem = gemm_problem(contract, a, b, out, None, False)
    for driver.capturing in (False, True):
        launch.launch(problem, a, b, out, None, Execution(DEVICE, 0, allocate))
    wanted = tile_choice.choose(problem, (9, 0), 132).scratch_bytes
    assert wanted > 0
    assert sizes == [wanted, wanted]
    blocks = [one["params"] for one in driver.launches] + [one.params for one in bindings.launches]
    assert [struct.unpack_from("<5Q", block)[4] for block in blocks] == [0xABC00] * 2
    assert len(current._captured) == 1


_NULL = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, device_id=0), 0)


def test_a_fault_is_a_device_error_and_the_device_comes_back(driver: Driver) -> None:
    driver.failure = _Fault("CUDA_ERROR_ILLEGAL_ADDRESS")
    plain = _view((8, 8), (8, 1), F32, 0x1000)
    with pytest.raises(DeviceError, match=r"cuda:1 reported CUDA_ERROR_ILLEGAL_ADDRESS at fma gemm of m=8, n=8, k=8"):
        launch.launch(gemm_problem(FMA, plain, plain, plain, None, False), plain, plain, plain, None, EXECUTION)
    assert driver.device == 0
