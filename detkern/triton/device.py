"""GPUs as Triton sees them, which is through PyTorch: whether one can be used, its facts, and running on a caller's
stream.

Triton's own launcher and driver import PyTorch (on NVIDIA and AMD alike), so this backend needs it even where the
caller's arrays are of another framework.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..dispatch import requirements
from ..dispatch.requirements import old_driver
from ..tensors import Device

__all__ = ["TritonDevice", "current", "describe", "missing"]

_ROW = requirements.row("triton")


@dataclass(frozen=True, slots=True)
class TritonDevice:
    """A device's facts. capability: of a CUDA device, else None. driver: the newest CUDA that the driver supports, or
    the version of HIP."""

    device: Device
    name: str
    uuid: str
    capability: tuple[int, int] | None
    multiprocessors: int
    driver: str

    def __str__(self) -> str:
        return f"{self.device} ({self.name})"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver_version() -> int:
    """The newest CUDA that the driver supports, as 13000; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    # cuDriverGetVersion needs no cuInit; PyTorch has no public name for it.
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


@functools.cache
def describe(device: Device) -> TritonDevice:
    """The facts of a device that exists (`missing` says whether it does)."""
    torch = importlib.import_module("torch")
    properties = torch.cuda.get_device_properties(device.index)
    cuda = device.kind == "cuda"
    return TritonDevice(
        device=device,
        name=str(properties.name),
        uuid=str(getattr(properties, "uuid", "")),
        capability=(int(properties.major), int(properties.minor)) if cuda else None,
        multiprocessors=int(properties.multi_processor_count),
        driver=f"CUDA {_version(_driver_version())}" if cuda else f"HIP {torch.version.hip}",
    )


@functools.cache
def missing(device: Device) -> str | None:
    """Why a device cannot run the kernels of this package, or None where it can."""
    if reason := _ROW.not_installed():
        return reason
    loaded = {}
    for name, title in (("torch", "PyTorch"), ("triton", "Triton")):
        try:
            loaded[name] = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  a broken build raises anything, OSError among it
            return f"{title} cannot be imported: {error}"
    torch = loaded["torch"]
    if reason := _wrong_build(device, torch) or _no_driver(device, torch):
        return reason
    count = torch.cuda.device_count()
    if count == 0:
        return f"there is no {device.kind} device"
    if device.index >= count:
        return f"there is no {device}; the last one is {device.kind}:{count - 1}"
    facts = describe(device)
    if reason := _ROW.too_old(str(facts), facts.capability):
        return reason
    try:
        # Triton finds its driver when it is first asked for one.
        loaded["triton"].runtime.driver.active.get_current_target()
    except Exception as error:  # noqa: BLE001  drivers of other makers raise what they like
        return f"Triton finds no driver for {facts}: {error}"
    return None


def _wrong_build(device: Device, torch: Any) -> str | None:
    """That the installed PyTorch is made for other devices."""
    made_for = "CUDA" if torch.version.cuda else "ROCm" if torch.version.hip else "the CPU alone"
    needed = "CUDA" if device.kind == "cuda" else "ROCm"
    if made_for == needed:
        return None
    return (
        f"the installed PyTorch {torch.__version__} is built for {made_for}, and Triton runs through it; "
        f"install one for {needed}"
    )


def _no_driver(device: Device, torch: Any) -> str | None:
    if device.kind != "cuda":
        return None
    supports = _driver_version()
    if supports == 0:
        return "no NVIDIA driver is installed"
    needs = str(torch.version.cuda)
    # Minor versions of one CUDA are compatible with each other's drivers.
    if supports // 1000 < int(needs.partition(".")[0]):
        return old_driver(_version(supports), "PyTorch", needs)
    return None


@contextmanager
def current(device: Device, stream: int) -> Iterator[None]:
    """Make a device and one of its streams, given as a raw handle, the ones that Triton launches on."""
    torch = importlib.import_module("torch")
    if torch.cuda.current_device() == device.index and _current_stream(torch, device.index) == stream:
        yield
        return
    with torch.cuda.device(device.index):
        if _current_stream(torch, device.index) == stream:
            yield
            return
        place = torch.device("cuda", device.index)
        chosen = torch.cuda.ExternalStream(stream, device=place) if stream else torch.cuda.default_stream(place)
        with torch.cuda.stream(chosen):
            yield


def _current_stream(torch: Any, index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)
