"""What the CUDA backend offers on which device, why it is unavailable, and the self-check,
on devices that are made up."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detkern import config
from detkern.cu import backend as cuda
from detkern.cu import device as cuda_device
from detkern.cu import gemm as cuda_gemm
from detkern.cu import implementation, loader
from detkern.cu.device import CudaDevice
from detkern.dispatch import registry, selfcheck
from detkern.errors import DeviceError
from detkern.operations.gemm import operation as cases
from detkern.operations.gemm import replay as numpy_replay
from detkern.operations.gemm.operation import GEMM
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.operations.operation import Sample
from detkern.tensors import Device, TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS, FMA, FP8_BLOCK128, MMA8, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32, DType

DEVICE = Device("cuda", 0)


def _problem(contract: Contract, dtype: DType) -> GemmProblem:
    view = TensorView(4096, (256, 256), (256, 1), dtype, DEVICE)
    return gemm_problem(contract, view, view, view, None, False)


def _replayed(contract: Contract, a: Any, b: Any, initial: Any = None) -> Any:
    return numpy_replay.gemm(contract, a, b, initial=initial)


def _computes(monkeypatch: pytest.MonkeyPatch, product: Any) -> None:
    """Has samples of products computed by product(contract, a, b, initial)."""

    def computed(device: CudaDevice, operation: Any, implementation: Any, sample: Sample) -> Any:
        assert product is not None, "no self-check is due"
        assert (operation, implementation.operation) == (GEMM, GEMM)
        a, b, bias = sample.operands
        assert bias is None
        return product(CONTRACTS[sample.variant], a, b, sample.initial)

    monkeypatch.setattr(implementation, "computed", computed)


def _refuses(made: cuda.CudaBackend, problem: GemmProblem) -> str | None:
    return made.implementations[GemmProblem].refuses(problem)


class Wrong:
    """A product whose last element has its lowest bit flipped where K is `k`."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, contract: Contract, a: Any, b: Any, initial: Any = None) -> Any:
        out = _replayed(contract, a, b, initial)
        if a.shape[1] == self.k:
            out.view(f"u{out.dtype.itemsize}")[-1, -1] ^= 1
        return out


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., cuda.CudaBackend]:
    """on(capability, product) -> a new backend on a made-up device whose products `product` computes."""
    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    # Every kind once, in a few elements, keeps the many checks of this file quick.
    monkeypatch.setattr(cases, "_DEPTHS", (8, 33))
    monkeypatch.setattr(cases, "_M", 5)
    monkeypatch.setattr(cases, "_N", 7)

    def make(capability: tuple[int, int], product: Any = None, driver: str = "1.0") -> cuda.CudaBackend:
        facts = CudaDevice(0, "Made-up GPU", "00", capability, 108, driver)
        for module in (cuda, cuda_gemm):
            monkeypatch.setattr(module, "describe", lambda index: facts)
        monkeypatch.setattr(cuda, "missing", lambda index: None)
        _computes(monkeypatch, product)
        return cuda.CudaBackend()

    return make


SHARED = [(FMA, F32), (FMA, F16), (FMA, BF16), (TREE, BF16), (TREE, F16)]
HOPPER = [(MMA16, F16), (MMA16, BF16), (TREE_MMA16, BF16), (TREE_MMA16, F16)]
AMPERE = [(MMA8, F16), (MMA8, BF16)]


@pytest.mark.parametrize(
    ("capability", "offered"),
    [
        ((8, 0), SHARED + AMPERE), ((8, 6), SHARED + AMPERE), ((8, 9), SHARED + AMPERE), ((9, 0), SHARED + HOPPER),
        ((10, 0), SHARED + HOPPER), ((12, 0), SHARED + HOPPER),
    ],
)  # fmt: skip
def test_what_is_offered_on_which_capability(
    capability: tuple[int, int], offered: list[Any], on: Callable[..., cuda.CudaBackend]
) -> None:
    made = on(capability, _replayed)
    assert made.capability(DEVICE) == capability
    assert set(registry.computed(made, GEMM, DEVICE)) == {(contract.name, dtype) for contract, dtype in offered}
    for contract in CONTRACTS.values():
        for dtype in contract.operands:
            reason = _refuses(made, _problem(contract, dtype))
            assert (reason is None) == ((contract, dtype) in offered)
            if reason is not None:
                assert "fma (f32, f16, bf16)" in reason


def test_a_refusal_says_what_is_needed_and_what_there_is(on: Callable[..., cuda.CudaBackend]) -> None:
    made = on((9, 0))
    assert _refuses(made, _problem(MMA8, F16)) == (
        "mma8 needs compute capability 8.0 to 8.9 and cuda:0 (Made-up GPU) has 9.0; it has fma (f32, f16, bf16), "
        "tree (bf16, f16), mma16 (f16, bf16), tree-mma16 (bf16, f16)"
    )
    assert "has no kernel here" in (_refuses(made, _problem(FP8_BLOCK128, E4M3)) or "")
    assert "mma16 does not take f32; it takes f16, bf16" in (_refuses(made, _problem(MMA16, F32)) or "")


def test_hopper_needs_no_self_check_and_info_says_so(on: Callable[..., cuda.CudaBackend]) -> None:
    made = on((9, 0))
    assert _refuses(made, _problem(MMA16, BF16)) is None
    assert made.facts(DEVICE)["self-check"].startswith("not needed")


def test_one_differing_bit_refuses_the_contract_and_info_shows_it(on: Callable[..., cuda.CudaBackend]) -> None:
    made = on((8, 0), Wrong(33))
    assert made.facts(DEVICE)["self-check of mma8 f16"] == "not run yet"
    reason = _refuses(made, _problem(MMA8, F16))
    kinds = 2 * len(operands.KINDS)
    assert reason is not None
    assert (
        f"differs from the CPU replay in {kinds} of {2 * kinds * 35} elements (normal operands, k=33, from zero"
        in reason
    )
    assert "mma8 (bf16)" in reason
    assert "differs" in made.facts(DEVICE)["self-check of mma8 f16"]


def test_an_outcome_is_kept_for_the_device_and_driver(on: Callable[..., cuda.CudaBackend]) -> None:
    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return _replayed(*arguments)

    calls: list[Any] = []
    assert _refuses(on((8, 0), count), _problem(TREE, F16)) is None
    first = len(calls)
    assert first == 4 * len(operands.KINDS)
    selfcheck._outcomes.clear()  # as another process would begin
    again = on((8, 0), count)
    assert _refuses(again, _problem(TREE, F16)) is None
    assert len(calls) == first
    assert "agrees with the CPU replay on" in again.facts(DEVICE)["self-check of tree f16"]
    assert _refuses(on((8, 0), count, driver="2.0"), _problem(TREE, F16)) is None
    assert len(calls) == 2 * first


def test_a_refusal_is_kept_too(on: Callable[..., cuda.CudaBackend]) -> None:
    assert _refuses(on((8, 0), Wrong(8)), _problem(FMA, F32)) is not None
    selfcheck._outcomes.clear()
    assert "differs" in (_refuses(on((8, 0)), _problem(FMA, F32)) or "")


def test_a_damaged_outcome_is_found_again(on: Callable[..., cuda.CudaBackend], tmp_path: Path) -> None:
    assert _refuses(on((8, 0), _replayed), _problem(FMA, F16)) is None
    (kept,) = (tmp_path / "cuda").glob("selfcheck-*.json")
    assert json.loads(kept.read_text())["differing"] == 0
    kept.write_text("{")
    selfcheck._outcomes.clear()
    assert _refuses(on((8, 0), Wrong(8)), _problem(FMA, F16)) is not None


def test_a_check_that_fails_to_run_is_no_answer(
    on: Callable[..., cuda.CudaBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise DeviceError("out of memory")

    made = on((8, 0), broken)
    assert _refuses(made, _problem(FMA, F32)) == (
        "the self-check of fma for f32 on cuda:0 (Made-up GPU) did not finish: out of memory"
    )
    _computes(monkeypatch, _replayed)
    assert _refuses(made, _problem(FMA, F32)) is None


def test_the_check_reaches_starting_accumulators_and_every_kind() -> None:
    seen = []

    def product(contract: Contract, a: Any, b: Any, initial: Any = None) -> Any:
        seen.append((a.shape, b.shape, initial is not None))
        return np.zeros((a.shape[0], b.shape[1]), F32.numpy if initial is not None else a.dtype)

    outcome = selfcheck.check(GEMM, "fma", F16, lambda sample: product(FMA, *sample.operands[:2], sample.initial))
    assert outcome.differing > outcome.elements // 2
    assert len(seen) == 2 * len(operands.KINDS) * len({a[1] for a, _, _ in seen})
    assert sum(started for _, _, started in seen) == len(seen) // 2


def test_explain_names_kernel_tile_and_geometry(on: Callable[..., cuda.CudaBackend]) -> None:
    for capability, source in (((9, 0), "mma_wgmma.cu"), ((10, 0), "mma.cu")):
        kernel = on(capability).implementations[GemmProblem].explain(_problem(MMA16, BF16))
        assert kernel.name == f"mma16 ({source})"
        assert "a k-major, b mn-major" in kernel.tile
        assert "threads" in kernel.geometry
        assert kernel.scratch_bytes == 0


class _Runtime:
    """cupy.cuda.runtime of a machine that is made up."""

    class CUDARuntimeError(Exception):
        pass

    is_hip = False
    version = 13000
    count: int | Exception = 1
    major, minor = 9, 0

    def driverGetVersion(self) -> int:
        return self.version

    def runtimeGetVersion(self) -> int:
        return 13000

    def getDeviceCount(self) -> int:
        if isinstance(self.count, Exception):
            raise self.count
        return self.count

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {
            "name": b"Made-up GPU", "uuid": b"\x01\x02", "major": self.major, "minor": self.minor,
            "multiProcessorCount": 10,
        }  # fmt: skip


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Runtime]:
    fake = _Runtime()
    module = types.ModuleType("cupy.cuda")
    module.runtime = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", module)
    monkeypatch.setattr(loader, "supported_architectures", lambda: (80, 86, 89, 90, 100, 120))
    cuda_device.missing.cache_clear()
    cuda_device.describe.cache_clear()
    yield fake
    cuda_device.missing.cache_clear()
    cuda_device.describe.cache_clear()


@pytest.mark.parametrize(
    ("changes", "index", "reason"),
    [
        ({}, 0, None),
        ({"is_hip": True}, 0, "the installed CuPy is built for ROCm, not for CUDA"),
        ({"version": 0}, 0, "no NVIDIA driver is installed"),
        (
            {"version": 12040, "count": _Runtime.CUDARuntimeError("cudaErrorInsufficientDriver: too old")},
            0,
            (
                "the NVIDIA driver is too old: it supports CUDA 12.4, the installed CuPy needs CUDA 13; "
                "install a newer driver or the CuPy package of an older CUDA"
            ),
        ),
        (
            {"count": _Runtime.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")},
            0,
            "the NVIDIA driver offers no device (cudaErrorNoDevice: no CUDA-capable device is detected)",
        ),
        ({"count": 0}, 0, "there is no CUDA device"),
        ({"count": 2}, 3, "there is no cuda:3; the last one is cuda:1"),
        (
            {"major": 7, "minor": 5},
            0,
            "cuda:0 (Made-up GPU) has compute capability 7.5; the kernels need 8.0 or newer",
        ),
    ],
)
def test_why_a_device_is_missing(changes: dict[str, Any], index: int, reason: str | None, runtime: _Runtime) -> None:
    for name, value in changes.items():
        setattr(runtime, name, value)
    made = cuda.CudaBackend()
    assert made.unavailable(Device("cuda", index)) == reason
    assert made.capability(Device("cuda", index)) == ((9, 0) if reason is None else None)
    if reason is not None:
        assert registry.computed(made, GEMM, Device("cuda", index)) == []
        assert made.facts(Device("cuda", index)) == {}


def test_cupy_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # how Python marks a module that must not be imported
    cuda_device.missing.cache_clear()
    try:
        assert (cuda.CudaBackend().unavailable(DEVICE) or "").startswith("CuPy is not installed; pip install")
    finally:
        cuda_device.missing.cache_clear()
