"""Which devices there are, and NumPy arrays put on one and brought back."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import registry
from ..dtypes import BF16, F16, F32, from_numpy
from ..errors import DeviceError
from ..requirements import row
from ..tensors import Device
from .compare import bits

__all__ = ["array_module", "devices", "fetch", "no_device", "place"]


@cache
def _seen() -> tuple[str, int, str | None]:
    """The kind of the devices that CuPy shows, their number, and why it is none."""
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
    except ImportError as error:
        missing = row("cuda").not_installed() or f"CuPy cannot be imported: {error}"
        return "cuda", 0, missing
    kind = "rocm" if runtime.is_hip else "cuda"
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        # The backend has a sentence for a driver that is missing or too old.
        reason = registry.load("cuda").unavailable(Device("cuda")) if kind == "cuda" else None
        return kind, 0, reason or f"CuPy shows no {kind} device: {error}"
    return kind, count, None if count else f"CuPy shows no {kind} device"


def devices() -> list[Device]:
    """The CPU, then the CUDA or ROCm devices that CuPy sees, of the kinds that some backend serves."""
    kinds = {kind for row in registry.TABLE for kind in row.devices}
    found = [Device("cpu")] if "cpu" in kinds else []
    kind, count, _ = _seen()
    return found + [Device(kind, index) for index in range(count if kind in kinds else 0)]


def no_device(kind: str) -> str | None:
    """Why there is no device of this kind, or None where there is one."""
    if kind == "cpu":
        return None
    seen, _, reason = _seen()
    if seen == kind or (kind == "cuda" and reason is not None):
        return reason
    if kind in ("cuda", "rocm"):
        return f"the installed CuPy is not built for {kind} devices"
    return f"nothing here lists {kind} devices"


def array_module(device: Device) -> ModuleType:
    """The framework whose arrays `place` makes."""
    return np if device.kind == "cpu" else importlib.import_module("cupy")


def place(array: npt.NDArray[Any], device: Device) -> Any:
    """A C-contiguous copy of `array` on `device`: NumPy's own on the CPU, CuPy's on a CUDA or ROCm device.

    Raises DeviceError where the framework has no such type (bfloat16 needs CuPy 14 with ml_dtypes).
    """
    if device.kind == "cpu":
        return np.array(array, order="C")
    if device.kind not in ("cuda", "rocm"):
        raise DeviceError(f"no arrays can be put on {device}")
    cupy = array_module(device)
    with cupy.cuda.Device(device.index):
        copied = cupy.asarray(bits(array))
        try:
            return copied.view(array.dtype)
        except (TypeError, ValueError) as error:
            raise DeviceError(f"CuPy {cupy.__version__} holds no {array.dtype} ({error}); CuPy 14 does") from None


def fetch(array: Any) -> npt.NDArray[Any]:
    """The elements of a NumPy or CuPy array in any layout, as a NumPy array; waits for the device."""
    if isinstance(array, np.ndarray):
        return array
    dtype = np.dtype(array.dtype)
    if from_numpy(dtype) in (F32, F16):
        return np.asarray(array.get())
    # CuPy copies bit patterns of the narrow types everywhere, their values not in every version.
    patterns = array.view(BF16.bits if dtype.itemsize == 2 else np.dtype(np.uint8))
    return np.asarray(patterns.get()).view(dtype)
