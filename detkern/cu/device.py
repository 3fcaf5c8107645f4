"""CUDA devices as the kernels see them: whether one can be used, and its facts."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from ..dispatch import requirements
from ..dispatch.requirements import old_driver
from ..errors import BuildError
from .loader import loaded_architecture

__all__ = ["SEEN", "CudaDevice", "describe", "missing"]

_ROW = requirements.row("cuda")

# Compute capabilities on which every contract offered there was compared with the replay before release.
SEEN = ((9, 0),)


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device's facts. driver: the driver's build ("580.159.04"),
    or the CUDA version it supports where it hides that."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    multiprocessors: int
    driver: str

    def __str__(self) -> str:
        return f"cuda:{self.index} ({self.name})"


def _driver_build(cuda_version: int) -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else f"CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"


@functools.cache
def describe(index: int) -> CudaDevice:
    """The facts of a device that exists (`missing` says whether it does)."""
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(index)
    uuid = properties.get("uuid", b"")
    return CudaDevice(
        index=index,
        name=properties["name"].decode(errors="replace"),
        uuid=uuid.hex() if isinstance(uuid, bytes) else str(uuid),
        capability=(properties["major"], properties["minor"]),
        multiprocessors=properties["multiProcessorCount"],
        driver=_driver_build(runtime.driverGetVersion()),
    )


@functools.cache
def missing(index: int) -> str | None:
    """Why device `index` cannot run the kernels of this package, or None where it can."""
    if reason := _ROW.not_installed():
        return reason
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    if runtime.is_hip:
        return "the installed CuPy is built for ROCm, not for CUDA"
    version = runtime.driverGetVersion()
    if version == 0:
        return "no NVIDIA driver is installed"
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if "InsufficientDriver" in str(error):
            supports = f"{version // 1000}.{version % 1000 // 10}"
            return old_driver(supports, "CuPy", str(runtime.runtimeGetVersion() // 1000))
        return f"the NVIDIA driver offers no device ({error})"
    if count == 0:
        return "there is no CUDA device"
    if index >= count:
        return f"there is no cuda:{index}; the last one is cuda:{count - 1}"
    device = describe(index)
    if reason := _ROW.too_old(str(device), device.capability):
        return reason
    try:
        loaded_architecture(device.capability)
    except BuildError as error:
        return str(error)
    return None
