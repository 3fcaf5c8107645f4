"""`detkern info` and `verify` with the NPU backends: emulated libraries on the CPU, and devices that PyTorch extensions
bring."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from emulated import library_path
from frameworks import same

from detkern.cli import devices
from detkern.cli.main import main
from detkern.npu import ascend, musa
from detkern.tensors import Device
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32

BACKENDS = (musa.BACKEND, ascend.BACKEND)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        monkeypatch.setenv(backend.platform.variable, str(library_path(backend.name)))


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        monkeypatch.delenv(backend.platform.variable, raising=False)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, list(arguments))
    return result.exit_code, result.output


def shown_backends() -> dict[tuple[str, str], dict[str, Any]]:
    status, output = run("info", "--json")
    assert status == 0, output
    return {(entry["name"], entry["device"]): entry for entry in json.loads(output)["backends"]}


@pytest.mark.usefixtures("named")
def test_info_shows_emulated_libraries_as_such() -> None:
    shown = shown_backends()
    for backend in BACKENDS:
        entry = shown[backend.name, "cpu"]
        assert entry["unavailable"] is None
        assert entry["dispatched"] is False
        assert f"({backend.name}, emulated)" in entry["facts"]["library"]
        assert set(entry["contracts"]) == {"fma", "tree"}
        assert "is not installed" in shown[backend.name, backend.name]["unavailable"]
    assert "f32" in shown["musa", "cpu"]["contracts"]["fma"]
    assert "f32" not in shown["ascend", "cpu"]["contracts"]["fma"]
    assert "musa on cpu     only when named with backend=; fma (f32 f16 bf16)" in run("info")[1]


@pytest.mark.usefixtures("unnamed")
def test_info_says_what_is_missing() -> None:
    shown = shown_backends()
    for backend in BACKENDS:
        assert f"{backend.platform.variable} names" in shown[backend.name, "cpu"]["unavailable"]
        status, output = run("verify", "--backend", backend.name)
        assert status == 2
        assert backend.platform.variable in output


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_verify_examines_them_when_they_are_named(backend: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    properties = [f"--property={name}" for name in ("chunking", "layouts", "bias")]
    status, output = run(
        "verify", "--quick", "--backend", backend, "--contract", "tree", *properties, "--json-file", str(report)
    )
    assert status == 0, output
    results = json.loads(report.read_text())["results"]
    assert {(entry["backend"], entry["dtype"], entry["status"]) for entry in results} == {
        (backend, "float16", "passed"), (backend, "bfloat16", "passed")
    }  # fmt: skip


@pytest.mark.usefixtures("named")
def test_verify_leaves_them_alone_when_they_are_not_named() -> None:
    status, output = run("verify", "--quick", "--contract", "fma", "--property", "repeatability", "--device", "cpu")
    assert status == 0
    assert not any(backend.name in output for backend in BACKENDS)


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch_musa, as far as the commands see it: two devices, on which tensors are the host's."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setitem(sys.modules, "torch_musa", types.ModuleType("torch_musa"))
    monkeypatch.setattr(torch, "musa", types.SimpleNamespace(device_count=lambda: 2), raising=False)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, place: tensor if place == "musa:1" else None)
    devices._extension.cache_clear()
    yield torch
    devices._extension.cache_clear()


def test_devices_of_an_extension(extension: Any) -> None:
    assert [Device("musa", 0), Device("musa", 1)] == [d for d in devices.devices() if d.kind == "musa"]
    assert devices.no_device("musa") is None
    assert "torch_npu is not installed" in (devices.no_device("ascend") or "")
    assert devices.array_module(Device("musa", 1)) is extension
    assert not devices.negative_strides(Device("musa", 1))
    for dtype in (F32, F16, BF16):
        array = operands.generate("bits", dtype, (5, 7), 1)
        placed = devices.place(array.T, Device("musa", 1))
        assert placed.is_contiguous()
        assert same(devices.fetch(placed), np.ascontiguousarray(array.T))
        assert same(devices.fetch(placed[1:, ::2]), np.ascontiguousarray(array.T[1:, ::2]))
        zeros = devices.place(np.zeros(array.T.shape, array.dtype), Device("musa", 1))
        devices.bit_patterns(placed)[...] = devices.bit_patterns(zeros)
        assert not devices.fetch(placed).any()


def test_a_driver_that_fails_is_a_reason(extension: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("the driver is of another version")

    monkeypatch.setattr(extension, "musa", types.SimpleNamespace(device_count=fail))
    assert "RuntimeError: the driver is of another version" in (devices.no_device("musa") or "")
    assert all(device.kind != "musa" for device in devices.devices())
