"""Which library serves, what is said where none can, and a platform's own devices: torch_musa's and torch_npu's tensors
by pointer on their current stream (stand-ins here), scratch from their allocator, the self-check on first use."""

from __future__ import annotations

import ctypes
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from c_library import compile_library
from emulated import library_path
from frameworks import from_torch, same, to_torch

import detkern
from detkern import config
from detkern.abi import mirror
from detkern.abi.library import Library
from detkern.cpu import backend as cpu
from detkern.dispatch import plan, registry, selfcheck
from detkern.files import sealed
from detkern.npu import ascend, host_arrays, musa
from detkern.npu.libraries import built_library, find_library
from detkern.operations.gemm import operation as cases
from detkern.operations.gemm import replay as numpy_replay
from detkern.operations.gemm.operation import GEMM
from detkern.operations.operation import Sample
from detkern.tensors import Device, lookup
from detkern.tensors import torch as torch_module
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32

CPU = Device("cpu")
PLATFORMS = pytest.mark.parametrize("backend", [musa.BACKEND, ascend.BACKEND], ids=lambda backend: backend.name)
A, B = operands.generate("normal", F16, (5, 70), 1), operands.generate("normal", F16, (70, 6), 2)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """All libraries, in the usual cache folder, before a test names another one."""
    assert cpu.library() is not None
    for platform in (musa.PLATFORM, ascend.PLATFORM):
        library_path(platform.name)


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No library is named or built, and no self-check has been run."""
    for platform in (musa.PLATFORM, ascend.PLATFORM):
        monkeypatch.delenv(platform.variable, raising=False)
    monkeypatch.setattr(config, "cache_dir", tmp_path / "cache")
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    plan.forget_plans()
    yield
    plan.forget_plans()


# A library whose `gemm` returns what `contract` says at compile time; FAULT: the status; HOST: the memory it takes.
STUB = """
#include <cstdlib>
#include <cstring>
int32_t detkern_abi_version() { return ABI; }
const char* detkern_last_error() { return "the device fell off the bus"; }
int32_t detkern_get_capabilities(detkern_capabilities* c) {
  c->host_memory = HOST;
  strcpy(c->name, "stub\\xff");  // not UTF-8
  return 0;
}
int32_t detkern_offers(detkern_offer* offers, uint64_t capacity, uint64_t* n) {
  const detkern_offer all[] = {{DETKERN_OPERATION_GEMM, DETKERN_FMA, 1u << DETKERN_F16},
                               {DETKERN_OPERATION_BIAS_GRADIENT, 0, 1u << DETKERN_F16}};
  memcpy(offers, all, capacity * sizeof *all);
  *n = 2;
  return 0;
}
int32_t detkern_run(uint32_t, const void*) { return FAULT; }
int32_t detkern_scratch(uint32_t, const void*, uint64_t* n) { *n = 0; return 0; }
int32_t detkern_device_count(int32_t* n) { *n = 2; return 0; }
int32_t detkern_get_device(detkern_device* d) { strcpy(d->name, "stub card"); d->driver[0] = 0; return 0; }
int32_t detkern_allocate(int32_t, uint64_t n, void** p) { *p = calloc(n + 1, 1); return 0; }
int32_t detkern_free(int32_t, void* p) { free(p); return 0; }
int32_t detkern_copy(int32_t, void* to, const void* from, uint64_t n, int32_t) { memcpy(to, from, n); return 0; }
"""


def stub(folder: Path, host: int = 1, fault: int = 0, abi: str = "DETKERN_ABI_VERSION", without: str = "") -> Path:
    defines = f"#define HOST {host}\n#define FAULT {fault}\n#define ABI {abi}\n"
    lines = [line for line in STUB.splitlines() if not without or without not in line]
    return compile_library(folder, defines + "\n".join(lines), f"stub{host}{fault}{len(lines)}{len(abi)}")


@PLATFORMS
def test_on_host_memory_a_library_has_to_be_named(backend: Any) -> None:
    assert registry.load(backend.name) is backend
    variable = backend.platform.variable
    reason = f"backend='{backend.name}' cannot run here: it works on host memory only .* {variable} names"
    with pytest.raises(detkern.BackendUnavailable, match=reason):
        detkern.gemm(A, B, contract="fma", backend=backend.name)
    assert registry.computed(backend, GEMM, CPU) == []
    # Dispatch does not even load it.
    assert ("runs only when named") in dict(detkern.explain(A, B, contract="fma").passed_over)[backend.name]


@PLATFORMS
def test_what_cannot_be_loaded_is_said(backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variable = backend.platform.variable
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"no library")
    old = str(mirror.ABI_VERSION + 1)
    for path, expected in (
        (tmp_path / "nowhere.so", r"nowhere\.so cannot be loaded: No such file"),
        (tmp_path, "cannot be loaded"),
        (garbage, r"garbage\.so cannot be loaded"),
        (stub(tmp_path, without="detkern_scratch"), "has no function detkern_scratch; it is not a detkern library"),
        (stub(tmp_path, abi=old), f"ABI version {old}, this detkern needs {mirror.ABI_VERSION} or 2; rebuild"),
        (stub(tmp_path, host=0), f"takes memory of {backend.name} devices, not host memory"),
    ):
        monkeypatch.setenv(variable, str(path))
        with pytest.raises(detkern.BackendUnavailable, match=expected) as raised:
            detkern.gemm(A, B, contract="fma", backend=backend.name)
        assert str(path) in str(raised.value)


@PLATFORMS
def test_a_named_library_that_was_cut_short_is_refused(
    backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a seal, of which a part is gone, and without one."""
    whole = library_path(backend.name).read_bytes()
    content = sealed.opened(whole)
    assert content is not None
    for number, data in enumerate((whole[:-100], b"?" + whole[1:], content[:-1], content[:5000])):
        path = tmp_path / f"cut{number}.so"
        path.write_bytes(data)
        monkeypatch.setenv(backend.platform.variable, str(path))
        with pytest.raises(
            detkern.BackendUnavailable, match=rf"{backend.platform.variable}={path}: .*(damaged|cut short)"
        ):
            detkern.gemm(A, B, contract="fma", backend=backend.name)
    path = tmp_path / "foreign.so"
    path.write_bytes(content)
    monkeypatch.setenv(backend.platform.variable, str(path))
    assert same(detkern.gemm(A, B, contract="tree", backend=backend.name), detkern.gemm(A, B, contract="tree"))


@PLATFORMS
def test_the_library_of_another_backend_is_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"musa": "ascend", "ascend": "musa"}[backend.name]
    library = cpu.library()
    assert library is not None
    for path, maker in ((library_path(other), other), (library.path, "cpu")):
        monkeypatch.setenv(backend.platform.variable, str(path))
        with pytest.raises(
            detkern.BackendUnavailable, match=f"is the library of the {maker} backend, not of {backend.name}"
        ):
            detkern.gemm(A, B, contract="fma", backend=backend.name)


@PLATFORMS
def test_an_error_of_the_library_comes_with_its_words(
    backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for fault, error in ((mirror.DEVICE_FAULT, detkern.DeviceError), (mirror.INVALID, detkern.ArgumentError)):
        monkeypatch.setenv(backend.platform.variable, str(stub(tmp_path, fault=fault)))
        out = np.full((5, 6), 7, np.float32)
        with pytest.raises(
            error, match=rf"detkern_run of a GemmDescriptor: .*\({fault}\): the device fell off the bus"
        ):
            detkern.gemm(A, B, contract="fma", backend=backend.name, out=out)
        assert (out == 7).all()
        with pytest.raises(error, match=r"detkern_run of a ColumnSumDescriptor: .*the device fell off the bus"):
            detkern.bias_gradient(A, backend=backend.name)


@PLATFORMS
def test_another_library_serves_once_it_is_named(backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(backend.platform.variable, str(stub(tmp_path)))
    assert registry.computed(backend, GEMM, CPU) == [("fma", F16)]
    monkeypatch.setenv(backend.platform.variable, str(library_path(backend.name)))
    assert ("tree", BF16) in registry.computed(backend, GEMM, CPU)
    want = detkern.gemm(A, B, contract="fma", backend="cpu")
    assert same(detkern.gemm(A, B, contract="fma", backend=backend.name), want)


def test_the_libraries_check_descriptors_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (musa.BACKEND, ascend.BACKEND):
        monkeypatch.setenv(backend.platform.variable, str(library_path(backend.name)))
        library = find_library(backend.platform, on_host=True)
        for code, absent in ((2, mirror.BlockScaledDescriptor), (4, mirror.RowDescriptor), (99, mirror.RowDescriptor)):
            with pytest.raises(detkern.ContractUnsupported, match=f"no kernel for operation {code}"):
                library.run(code, mirror.described(absent))
        good = mirror.described(mirror.GemmDescriptor)
        good.contract, good.operand_dtype, good.out_dtype = 1, F16.code, F16.code
        good.m = good.n = good.k = 1
        data = np.ones(1, np.float16)
        good.a = good.b = good.out = data.ctypes.data
        library.run(1, good)
        for error, fields in (
            (detkern.ArgumentError, {"size": 8}),
            (detkern.ContractUnsupported, {"contract": 2}),
            (detkern.ContractUnsupported, {"contract": 99}),
            (detkern.ContractUnsupported, {"operand_dtype": 5}),
            (detkern.ArgumentError, {"m": -1}),
            (detkern.ArgumentError, {"accumulate": 1}),
            (detkern.ArgumentError, {"a": None}),
            (detkern.DeviceError, {"device": 5}),
            (detkern.DeviceError, {"device": -1}),
        ):
            bad = mirror.GemmDescriptor.from_buffer_copy(good)
            for name, value in fields.items():
                setattr(bad, name, value)
            with pytest.raises(error):
                library.run(1, bad)
        with pytest.raises(detkern.DeviceError):
            library.device(7)
    tree = mirror.GemmDescriptor.from_buffer_copy(good)
    tree.contract, tree.k = 4, 64
    monkeypatch.setenv("DETKERN_MUSA_LIBRARY", str(library_path("musa")))
    with pytest.raises(detkern.ArgumentError, match=r"\d+ bytes of scratch are needed, 0 were given"):
        find_library(musa.PLATFORM, on_host=True).run(1, tree)


def test_a_device_that_saturates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETKERN_ASCEND_LIBRARY", str(library_path("ascend")))
    monkeypatch.setenv("DETKERN_EMULATE_SATURATION", "1")
    with pytest.raises(detkern.ContractUnsupported, match="saturates on overflow"):
        detkern.gemm(A, B, contract="fma", backend="ascend")


class FakeDevice(NamedTuple):
    type: str
    index: int


def fake_torch(kind: str, attribute: str) -> Any:
    """A module like PyTorch with a vendor's extension: tensors of its device whose memory is the host's, and its
    stream."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    device = FakeDevice(kind, 1)

    class Tensor:
        def __init__(self, host: Any) -> None:
            self.host, self.device = host, device

        def __getattr__(self, name: str) -> Any:
            return getattr(self.host, name)

    def empty(shape: Any, dtype: Any = None, device: Any = None) -> Tensor:
        assert device == FakeDevice(kind, 1)
        fake.allocated.append(int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size())
        return Tensor(torch.empty(shape, dtype=dtype))

    class Fake(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    fake = Fake("torch")
    fake.Tensor, fake.empty, fake.allocated = Tensor, empty, []
    fake.nn = types.SimpleNamespace(Parameter=Tensor)
    fake.autograd = types.SimpleNamespace(
        forward_ad=torch.autograd.forward_ad, graph=types.SimpleNamespace(increment_version=lambda tensor: None)
    )
    stream = types.SimpleNamespace(**{f"{kind}_stream": 0x5EED})
    setattr(fake, attribute, types.SimpleNamespace(current_stream=lambda index: stream if index == 1 else None))
    return fake


@pytest.fixture(params=[("musa", "musa", musa.BACKEND), ("npu", "npu", ascend.BACKEND)], ids=["musa", "ascend"])
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The stand-in for PyTorch, and the backend whose library claims to be a real device's."""
    kind, attribute, backend = request.param
    fake = fake_torch(kind, attribute)
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(lookup, "_BY_TYPE", {})
    monkeypatch.setenv("DETKERN_EMULATE_DEVICE", "1")
    torch_module.torch_adapter.cache_clear()
    yield fake, backend
    torch_module.torch_adapter.cache_clear()


def test_tensors_of_a_device_by_pointer_on_their_stream(
    on_device: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, backend = on_device
    path = library_path(backend.name)
    built = built_library(backend.platform)
    a, b = fake.Tensor(to_torch(A)), fake.Tensor(to_torch(B))
    with pytest.raises(
        detkern.BackendUnavailable, match=rf"its library is not built: run `detkern build {backend.name}`"
    ):
        detkern.gemm(a, b, contract="fma")
    built.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes()
    for damaged in (whole[:5000], b"", whole + b"!"):
        built.write_bytes(damaged)
        with pytest.raises(
            detkern.BackendUnavailable, match=rf"{built} is damaged: .* `detkern build {backend.name}` does"
        ):
            detkern.gemm(a, b, contract="fma")
    built.unlink()
    built.write_bytes(whole)  # what `detkern build` would have left
    # No backend named: dispatch chooses it; the default contract is the platform's.
    contract = {"musa": "fma", "ascend": "tree"}[backend.name]
    result = detkern.gemm(a, b)
    assert isinstance(result, fake.Tensor)
    assert same(from_torch(result.host), detkern.gemm(A, B, contract=contract, backend="cpu"))
    last_stream = ctypes.CDLL(str(built)).emulation_last_stream
    last_stream.restype = ctypes.c_void_p
    assert last_stream() == 0x5EED
    fake.allocated.clear()
    tree = detkern.gemm(a, b, contract="tree", out_dtype="float32")
    assert same(from_torch(tree.host), detkern.gemm(A, B, contract="tree", out_dtype="float32", backend="cpu"))
    # The result, and where the kernel asks for scratch memory that too, come from the framework's allocator.
    assert fake.allocated[0] == 5 * 6 * 4
    assert (len(fake.allocated) == 2) == (backend.name == "musa")
    assert detkern.explain(a, b, contract="tree").scratch_bytes == sum(fake.allocated[1:])
    outcomes = [json.loads(path.read_text()) for path in config.cache_dir.glob(f"{backend.name}/selfcheck-*.json")]
    assert {(entry["contract"], entry["operand"], entry["differing"]) for entry in outcomes} == {
        (contract, "float16", 0), ("tree", "float16", 0)
    }  # fmt: skip
    facts = backend.facts(Device(backend.name, 1))
    assert "emulated" in facts["device"]
    assert facts["self-check of tree f16"].startswith("agrees with the CPU replay on")
    assert facts["self-check of bias_gradient f32"] == "not run yet"
    # Host memory is refused by the same library.
    monkeypatch.setenv(backend.platform.variable, str(built))
    with pytest.raises(detkern.BackendUnavailable, match="not host memory"):
        detkern.gemm(A, B, contract="fma", backend=backend.name)
    # And an emulated one is no device's.
    monkeypatch.delenv("DETKERN_EMULATE_DEVICE")
    monkeypatch.setenv(backend.platform.variable, str(path))
    plan.forget_plans()
    with pytest.raises(detkern.BackendUnavailable, match="is emulated and takes host memory"):
        detkern.gemm(a, b, contract="fma")


def test_the_engine_on_a_devices_pointers(
    on_device: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No framework is asked for anything: addresses, a stream's handle and the library are enough."""
    fake, backend = on_device
    copy = tmp_path / "copy.so"
    copy.write_bytes(library_path(backend.name).read_bytes())
    monkeypatch.setenv(backend.platform.variable, str(copy))
    out = np.zeros((5, 6), np.float16)
    engine = detkern.Engine(f"{backend.name}:1")
    engine.forward((out.ctypes.data, A.ctypes.data, B.ctypes.data, None), (5, 70, 6), "float16", 0xFEED)
    assert same(out, detkern.gemm(A, B, contract="fma", backend="cpu"))
    last_stream = ctypes.CDLL(str(copy)).emulation_last_stream
    last_stream.restype = ctypes.c_void_p
    assert last_stream() == 0xFEED
    assert not fake.allocated
    with pytest.raises(detkern.ContractUnsupported, match="has no tensor-core contract for float16"):
        engine.forward(
            (out.ctypes.data, A.ctypes.data, B.ctypes.data, None), (5, 70, 6), "float16", 0, tensor_cores=True
        )


def test_a_device_that_is_not_there(
    on_device: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, backend = on_device
    monkeypatch.setenv(backend.platform.variable, str(stub(tmp_path, host=0)))
    reason = backend.unavailable(Device(backend.name, 2))
    assert reason is not None
    assert f"sees 2 {backend.name} devices, none is {backend.name}:2" in reason
    assert "not on cuda:0" in (backend.unavailable(Device("cuda", 0)) or "")


def test_one_differing_bit_refuses_the_contract(
    on_device: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stub computes nothing, and its device is found out on first use."""
    fake, backend = on_device
    monkeypatch.setenv(backend.platform.variable, str(stub(tmp_path, host=0)))
    a, b = fake.Tensor(to_torch(A)), fake.Tensor(to_torch(B))
    for _ in range(2):
        with pytest.raises(
            detkern.ContractUnsupported, match=r"fma for f16 on \w+:1 differs from the CPU replay in \d+ of"
        ):
            detkern.gemm(a, b, contract="fma")
    device = Device(backend.name, 1)
    assert backend.unavailable(device) is None
    assert registry.computed(backend, GEMM, device) == []
    assert "differs from the CPU replay in" in backend.facts(device)["self-check of fma f16"]
    # What the table offers and this library lacks, and what the table does not offer.
    with pytest.raises(detkern.ContractUnsupported, match=r"\.so has no tree for f16; it has bias_gradient \(f16\)"):
        detkern.gemm(a, b, contract="tree")
    with pytest.raises(detkern.ContractUnsupported, match=r"mma16 has no kernel here; \w+:1 has nothing"):
        detkern.gemm(a, b, contract="mma16")


def test_an_outcome_holds_for_a_device_and_a_library(
    on_device: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, backend = on_device
    calls: list[Contract] = []

    def computed(library: Library, device: Device, operation: Any, implementation: Any, sample: Sample) -> Any:
        calls.append(CONTRACTS[sample.variant])
        return numpy_replay.gemm(calls[-1], *sample.operands[:2], initial=sample.initial)

    monkeypatch.setattr(host_arrays, "computed", computed)
    monkeypatch.setattr(cases, "_DEPTHS", (17,))
    first, second = stub(tmp_path, host=0), stub(tmp_path, host=0, fault=1)
    for library, index, again in ((first, 1, True), (first, 1, False), (second, 1, True), (first, 0, True)):
        monkeypatch.setenv(backend.platform.variable, str(library))
        monkeypatch.setattr(selfcheck, "_outcomes", {})  # as in a new process
        before = len(calls)
        assert registry.computed(backend, GEMM, Device(backend.name, index)) == [("fma", F16)]
        assert (len(calls) > before) == again, (library, index)


def test_the_columns_of_a_bias_gradient_are_checked_too(
    on_device: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake, backend = on_device
    copy = tmp_path / "copy.so"
    copy.write_bytes(library_path(backend.name).read_bytes())
    monkeypatch.setenv(backend.platform.variable, str(copy))
    dc = operands.generate("normal", F32, (33, 7), 5)
    result = detkern.bias_gradient(fake.Tensor(to_torch(dc)))
    assert same(from_torch(result.host), detkern.bias_gradient(dc))
    assert "agrees" in backend.facts(Device(backend.name, 1))["self-check of bias_gradient f32"]
