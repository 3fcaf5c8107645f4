"""The table of what backends need: each requirement, on made-up devices,
in the error of a call and in `detkern info`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from detkern.cli import devices
from detkern.cli.main import main
from detkern.dispatch import registry, requirements
from detkern.dispatch.requirements import TABLE, Offer, Row
from detkern.errors import BackendUnavailable, ContractUnsupported, DeviceError
from detkern.operations.gemm.operation import GEMM
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.operations.operation import Sample
from detkern.operations.table import operation_of
from detkern.tensors import Device, TensorView
from detkern.triton import device as triton_device
from detkern.vocabulary.contracts import CONTRACTS, FMA, MMA8, MMA16, TREE, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


CUDA = Device("cuda")


def problem(contract: Contract = FMA, dtype: DType = F32, device: Device = CUDA) -> GemmProblem:
    view = TensorView(4096, (16, 16), (16, 1), dtype, device)
    return gemm_problem(contract, view, view, view, None, False)


@ROWS
def test_every_row_is_whole(row: Row) -> None:
    """What dispatch, info and verify read of a row is there, and its backend agrees with it."""
    backend = registry.load(row.name)
    assert backend.name == row.name
    assert backend.deterministic == row.dispatched
    assert row.devices
    assert backend.implementations
    for problem_class, implementation in backend.implementations.items():
        assert operation_of(problem_class.operation).problem is problem_class
        for method in ("refuses", "explain", "prepare"):
            assert callable(getattr(implementation, method)), (problem_class, method)
    assert {kind for offer in row.offers for kind in offer.devices} <= set(row.devices)
    assert bool(row.offers) == row.dispatched
    assert len({offer.contract for offer in row.offers}) == len(row.offers), "one offer a contract"
    if row.capability is not None:
        assert all(offer.first is None or offer.first >= row.capability for offer in row.offers)


def test_the_order_of_dispatch() -> None:
    def order(kind: str) -> list[str]:
        return [row.name for row in TABLE if row.chosen_on(kind)]

    assert order("cuda") == ["cuda", "triton"]
    assert order("rocm") == ["triton"]
    assert order("cpu") == ["cpu"], "on host memory the NPU backends run only when named"
    assert order("musa") == ["musa"]
    assert order("ascend") == ["ascend"]
    assert "native" not in registry.dispatched_names()


@ROWS
def test_a_package_that_is_not_installed(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence for each package of each backend, with what to do; it comes before anything is imported."""
    for package in row.packages:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package.module, None)
            _forget()
            said = f"{package.title} is not installed; {package.install}"
            assert package.install.startswith("pip install ")
            for kind in row.devices:
                assert row.not_installed() == said
                assert registry.load(row.name).unavailable(Device(kind)) == said
                with pytest.raises(BackendUnavailable) as caught:
                    registry.select(problem(device=Device(kind)), row.name)
                assert str(caught.value) == f"backend={row.name!r} cannot run here: {said}"
                assert said in _said_by_info(row.name, kind)
    _forget()


def test_what_the_npu_backends_offer() -> None:
    both = [(FMA, F16), (FMA, BF16), (TREE, F16), (TREE, BF16)]
    for kind in ("musa", "cpu"):
        assert set(requirements.row("musa").contracts(kind, None)) == {(FMA, F32), *both}
    for kind in ("ascend", "cpu"):
        assert set(requirements.row("ascend").contracts(kind, None)) == set(both)


@ROWS
def test_a_framework_whose_devices_cannot_be_listed(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels take raw pointers it is no requirement: info says it of a kind that has no device."""
    if row.framework is None:
        return
    monkeypatch.setitem(sys.modules, row.framework.module, None)
    _forget()
    said = f"{row.framework.title} is not installed; {row.framework.install}"
    assert row.framework.missing() == said
    assert row.not_installed() is None
    assert said in _said_by_info(row.name, row.name)
    assert said not in _said_by_info(row.name, "cpu")
    _forget()


@ROWS
def test_contracts_types_and_kinds(row: Row) -> None:
    """Every pair that is offered passes; every other contract, type, kind and capability has a sentence that says what
    there is."""
    for offer in row.offers:
        for kind in offer.devices:
            inside = offer.first or (9, 0)
            for dtype in offer.contract.operands:
                said = row.refusal(offer.contract, dtype, kind, "the device", inside if kind == "cuda" else None)
                if dtype in offer.operands:
                    assert said is None
                else:
                    has = requirements.named(row.contracts(kind, None))
                    assert said == f"{offer.contract} for {dtype.short} has no kernel here; the device has {has}"
            for dtype in {F32, F16, BF16} - set(offer.contract.operands):
                said = row.refusal(offer.contract, dtype, kind, "the device", inside if kind == "cuda" else None)
                takes = ", ".join(d.short for d in offer.contract.operands)
                assert said == f"{offer.contract} does not take {dtype.short}; it takes {takes}"
        outside = []
        if offer.first is not None:
            outside.append((offer.first[0] - 1, 9))
        if offer.last is not None:
            outside.append((offer.last[0], offer.last[1] + 1))
        for capability in outside:
            said = row.refusal(offer.contract, offer.contract.operands[0], "cuda", "the device", capability)
            assert said is not None
            has = "{}.{}".format(*capability)
            assert said.startswith(
                f"{offer.contract} needs compute capability {offer.capabilities()} and the device has {has}"
            )
            assert said.endswith(f"it has {requirements.named(row.contracts('cuda', capability))}")
        elsewhere = row.refusal(offer.contract, offer.contract.operands[0], "toaster", "the device", None)
        assert elsewhere == f"{offer.contract} has no kernel here; the device has nothing"
    if row.offers:
        for contract in set(CONTRACTS.values()) - {offer.contract for offer in row.offers}:
            said = row.refusal(contract, contract.operands[0], row.devices[0], "the device", (9, 0))
            assert said is not None
            assert said.startswith(f"{contract} has no kernel here; the device has ")


@ROWS
def test_a_capability_that_is_too_low(row: Row) -> None:
    if row.capability is None:
        assert row.too_old("the device", (1, 0)) is None
        return
    below = (row.capability[0] - 1, 5)
    least = "{}.{}".format(*row.capability)
    has = "{}.{}".format(*below)
    said = row.too_old("the device", below)
    assert said == f"the device has compute capability {has}; the kernels need {least} or newer"
    assert row.too_old("the device", row.capability) is None
    assert row.too_old("the device", None) is None, "other kinds of device have none"


def test_an_offer_of_both_ends() -> None:
    offer = Offer(MMA8, ("cuda",), (8, 0), (8, 9))
    assert [offer.serves("cuda", c) for c in ((7, 5), (8, 0), (8, 9), (9, 0))] == [False, True, True, False]
    assert offer.capabilities() == "8.0 to 8.9"
    assert not offer.serves("rocm", None)
    assert Offer(TREE, ("cuda",), (8, 0)).capabilities() == "8.0 or newer"


# The Triton backend on a PyTorch that is made up.


class FakeTorch(ModuleType):
    """What the backend asks PyTorch."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__version__ = "9.9"
        self.version = SimpleNamespace(cuda="13.0", hip=None)
        self.driver = 13000
        self.count = 1
        self.capability = (9, 0)
        self.cuda = SimpleNamespace(
            device_count=lambda: self.count,
            get_device_properties=lambda index: SimpleNamespace(
                name="Made-up GPU", uuid="00", major=self.capability[0], minor=self.capability[1],
                multi_processor_count=10,
            ),
        )  # fmt: skip


def _forget() -> None:
    triton_device.missing.cache_clear()
    triton_device.describe.cache_clear()
    devices._seen.cache_clear()
    devices._extension.cache_clear()
    registry.load.cache_clear()
    from detkern.cu import device

    device.missing.cache_clear()
    device.describe.cache_clear()


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    fake = FakeTorch()
    triton = ModuleType("triton")
    active = SimpleNamespace(get_current_target=lambda: None)
    triton.runtime = SimpleNamespace(driver=SimpleNamespace(active=active))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(triton_device, "_driver_version", lambda: fake.driver)
    _forget()
    yield fake
    _forget()


def _said_by_info(name: str, kind: str) -> str:
    """What `detkern info` says of why a backend is unavailable on a kind of device."""
    _forget()
    result = CliRunner().invoke(main, ["info", "--json"])
    assert result.exit_code == 0, result.output
    found = [r for r in json.loads(result.stdout)["backends"] if r["name"] == name and r["device"].startswith(kind)]
    return "; ".join(str(record["unavailable"]) for record in found)


CASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("cuda", {"driver": 0}, 0, "no NVIDIA driver is installed"),
    (
        "cuda", {"driver": 12040}, 0,
        requirements.old_driver("12.4", "PyTorch", "13.0"),
    ),
    ("cuda", {"count": 0}, 0, "there is no cuda device"),
    ("cuda", {"count": 2}, 5, "there is no cuda:5; the last one is cuda:1"),
    (
        "cuda", {"capability": (7, 5)}, 0,
        "cuda:0 (Made-up GPU) has compute capability 7.5; the kernels need 8.0 or newer",
    ),
    (
        "cuda", {"version": SimpleNamespace(cuda=None, hip="6.4")}, 0,
        "the installed PyTorch 9.9 is built for ROCm, and Triton runs through it; install one for CUDA",
    ),
    (
        "rocm", {}, 0, "the installed PyTorch 9.9 is built for CUDA, and Triton runs through it; install one for ROCm",
    ),
    (
        "rocm", {"version": SimpleNamespace(cuda=None, hip=None)}, 0,
        "the installed PyTorch 9.9 is built for the CPU alone, and Triton runs through it; install one for ROCm",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "index", "reason"), CASES)
def test_why_triton_cannot_run(kind: str, changes: dict[str, Any], index: int, reason: str, torch: FakeTorch) -> None:
    for name, value in changes.items():
        setattr(torch, name, value)
    device = Device(kind, index)
    backend = registry.load("triton")
    assert backend.unavailable(device) == reason
    assert backend.capability(device) is None
    assert registry.computed(backend, GEMM, device) == []
    with pytest.raises(BackendUnavailable) as caught:
        registry.select(problem(device=device), "triton")
    assert str(caught.value) == f"backend='triton' cannot run here: {reason}"
    with pytest.raises(BackendUnavailable, match="triton: ") as caught:
        registry.select(problem(device=device), None)
    assert f"triton: {reason}" in str(caught.value), "what was tried is named"


@pytest.mark.parametrize("changes", [{"driver": 12040}, {"capability": (7, 5)}], ids=str)
def test_info_says_it_too(changes: dict[str, Any], torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyTorch is built for CUDA and there is no CuPy to list devices, info asks the backend."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name, value in changes.items():
        setattr(torch, name, value)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9+cu130")
    reason = registry.load("triton").unavailable(Device("cuda"))
    assert reason is not None
    assert reason in _said_by_info("triton", "cuda")


def test_a_driver_that_triton_does_not_find(torch: FakeTorch) -> None:
    def no_driver() -> None:
        raise RuntimeError("0 active drivers ([])")

    sys.modules["triton"].runtime.driver.active.get_current_target = no_driver
    said = registry.load("triton").unavailable(Device("cuda"))
    assert said == "Triton finds no driver for cuda:0 (Made-up GPU): 0 active drivers ([])"


def test_rocm_has_triton_alone(torch: FakeTorch) -> None:
    torch.version = SimpleNamespace(cuda=None, hip="6.4")
    backend = registry.load("triton")
    assert backend.unavailable(Device("rocm")) is None
    assert backend.capability(Device("rocm")) is None
    assert triton_device.describe(Device("rocm")).driver == "HIP 6.4"


# The self-check decides what is offered.


def computes(made: Any, product: Callable[..., Any]) -> None:
    """Has the products of a Triton backend computed by product(contract, a, b, initial)."""

    def computed(facts: Any, sample: Sample) -> Any:
        a, b, bias = sample.operands
        assert bias is None
        return product(CONTRACTS[sample.variant], a, b, sample.initial)

    made.implementations[GEMM.problem].computed = computed


@pytest.fixture
def checked(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[[Callable[..., Any]], Any]:
    """checked(product): a new backend on the made-up device, whose products `product` computes."""
    from detkern import config
    from detkern.dispatch import selfcheck
    from detkern.operations.gemm import operation as cases
    from detkern.triton import backend

    monkeypatch.setattr(config, "cache_dir", tmp_path)
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    monkeypatch.setattr(cases, "_DEPTHS", (17,))
    monkeypatch.setattr(cases, "_M", 3)
    monkeypatch.setattr(cases, "_N", 4)

    def make(product: Callable[..., Any]) -> Any:
        made = backend.TritonBackend()
        computes(made, product)
        return made

    return make


def test_a_device_whose_dot_adds_otherwise_is_refused_mma16_and_offered_the_rest(
    checked: Callable[[Callable[..., Any]], Any],
) -> None:
    from detkern.operations.gemm import replay as numpy_replay

    def product(contract: Contract, a: Any, b: Any, initial: Any = None) -> Any:
        # Another tensor core's steps: groups of 8.
        done = {"mma16": CONTRACTS["mma8"]}.get(contract.name, contract)
        return numpy_replay.gemm(done, a, b, initial=initial)

    made = checked(product)
    cuda = Device("cuda")
    reason = made.implementations[GEMM.problem].refuses(problem(MMA16, BF16))
    assert reason is not None
    assert reason.startswith("mma16 for bf16: tl.dot on cuda:0 (Made-up GPU) differs from the CPU replay in ")
    assert "; it has fma (f32, f16, bf16), tree (bf16, f16)" in reason
    assert made.implementations[GEMM.problem].refuses(problem(FMA, BF16)) is None
    offered = {name for name, _ in registry.computed(made, GEMM, cuda)}
    assert offered == {"fma", "tree", "tree-mma16"}
    facts = made.facts(cuda)
    assert facts["self-check of mma16 bf16"].startswith("differs from the CPU replay")
    assert facts["self-check of fma f32"].startswith("agrees with the CPU replay")
    assert "PyTorch" in facts["launcher"]


def test_a_self_check_that_does_not_finish_is_no_answer(checked: Callable[[Callable[..., Any]], Any]) -> None:
    from detkern.operations.gemm import replay as numpy_replay

    made = checked(lambda *arguments: (_ for _ in ()).throw(DeviceError("out of memory")))
    said = made.implementations[GEMM.problem].refuses(problem(FMA, F16))
    assert said == "the self-check of fma for f16 on cuda:0 (Made-up GPU) did not finish: out of memory"
    computes(made, lambda contract, a, b, initial=None: numpy_replay.gemm(contract, a, b, initial=initial))
    assert made.implementations[GEMM.problem].refuses(problem(FMA, F16)) is None


def test_an_outcome_holds_for_a_version_of_triton(
    checked: Callable[[Callable[..., Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from detkern.operations.gemm import replay as numpy_replay
    from detkern.triton import backend

    calls = []

    def product(contract: Contract, a: Any, b: Any, initial: Any = None) -> Any:
        calls.append(contract)
        return numpy_replay.gemm(contract, a, b, initial=initial)

    try:
        for version, again in (("3.6.0", True), ("3.6.0", False), ("3.9.0", True)):
            monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
            backend._digest.cache_clear()
            before = len(calls)
            assert checked(product).implementations[GEMM.problem].refuses(problem(MMA16, F16)) is None
            assert (len(calls) > before) == again
    finally:
        backend._digest.cache_clear()


def test_nothing_is_substituted(checked: Callable[[Callable[..., Any]], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda away and triton refusing: the error names both, and no other contract or backend steps in."""
    made = checked(lambda contract, a, b, initial=None: a @ b)
    loaded = {"cuda": registry.load("cuda"), "triton": made}
    with monkeypatch.context() as patch:
        patch.setattr(registry, "load", loaded.__getitem__)
        patch.setattr(loaded["cuda"], "unavailable", lambda device: "CuPy is on holiday")
        with pytest.raises(ContractUnsupported) as caught:
            registry.select(problem(MMA8, BF16), None)
    said = str(caught.value)
    assert said.startswith(
        "no backend takes this gemm on cuda:0: cuda: CuPy is on holiday; triton: mma8 has no kernel here"
    )
