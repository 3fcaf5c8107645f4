"""Which devices there are, and NumPy arrays put on one and brought back: CuPy's arrays on CUDA devices, PyTorch's
tensors on those of torch_musa and torch_npu."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dispatch import registry
from ..dispatch.requirements import row
from ..errors import DeviceError
from ..tensors import Device
from ..vocabulary.dtypes import BF16, F16, F32, by_name, from_numpy
from .compare import bits

__all__ = ["array_module", "bit_patterns", "devices", "fetch", "negative_strides", "no_device", "place"]


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


# Kinds of device that a PyTorch extension brings, and PyTorch's names for them.
_EXTENSIONS = {"musa": "musa", "ascend": "npu"}


@cache
def _extension(kind: str) -> tuple[int, str | None]:
    """The number of devices that a PyTorch extension sees, and why it is none."""
    package = row(kind).framework
    assert package is not None
    if missing := package.missing():
        return 0, f"{missing}; {kind} devices are reached through its tensors"
    try:
        torch = importlib.import_module("torch")
        importlib.import_module(package.module)
        count = int(getattr(torch, _EXTENSIONS[kind]).device_count())
    except Exception as error:  # noqa: BLE001  whatever a vendor's driver says
        return 0, f"{package.title} shows no device: {type(error).__name__}: {error}"
    return count, None if count else f"{package.title} shows no device"


def devices() -> list[Device]:
    """The CPU, then the devices that CuPy, torch_musa and torch_npu see, of the kinds that some backend serves."""
    kinds = {kind for row in registry.TABLE for kind in row.devices}
    seen, count, _ = _seen()
    counts = {"cpu": 1, seen: count} | {kind: _extension(kind)[0] for kind in _EXTENSIONS}
    return [Device(kind, index) for kind, count in counts.items() if kind in kinds for index in range(count)]


def no_device(kind: str) -> str | None:
    """Why there is no device of this kind, or None where there is one."""
    if kind == "cpu":
        return None
    if kind in _EXTENSIONS:
        return _extension(kind)[1]
    seen, _, reason = _seen()
    if seen == kind or (kind == "cuda" and reason is not None):
        return reason
    if kind in ("cuda", "rocm"):
        return f"the installed CuPy is not built for {kind} devices"
    return f"nothing here lists {kind} devices"


def array_module(device: Device) -> ModuleType:
    """The framework whose arrays `place` makes."""
    if device.kind == "cpu":
        return np
    return importlib.import_module("torch" if device.kind in _EXTENSIONS else "cupy")


def negative_strides(device: Device) -> bool:
    """Whether the arrays that `place` makes may be reversed without a copy."""
    return device.kind not in _EXTENSIONS


def bit_patterns(array: Any) -> Any:
    """The array as integers of the same size, without a copy."""
    if hasattr(array, "data_ptr"):
        torch = importlib.import_module("torch")
        return array.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[array.element_size()])
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def place(array: npt.NDArray[Any], device: Device) -> Any:
    """A C-contiguous copy of `array` on `device`: NumPy's own on the CPU, CuPy's on a CUDA or ROCm device, else
    PyTorch's.

    Raises DeviceError where the framework has no such type (bfloat16 needs CuPy 14 with ml_dtypes).
    """
    if device.kind == "cpu":
        return np.array(array, order="C")
    if device.kind in _EXTENSIONS:
        torch = array_module(device)
        signed = bits(array).view(f"i{array.dtype.itemsize}")
        host = torch.from_numpy(signed.copy()).view(getattr(torch, array.dtype.name))
        return host.to(f"{_EXTENSIONS[device.kind]}:{device.index}")
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
    """The elements of an array of `place`'s in any layout, as a NumPy array; waits for the device."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "data_ptr"):
        dtype = by_name(str(array.dtype).removeprefix("torch."))
        if dtype is None:
            raise DeviceError(f"a tensor of {array.dtype} is not a result")
        return np.asarray(bit_patterns(array.cpu().contiguous()).numpy()).view(dtype.numpy)
    dtype = np.dtype(array.dtype)
    if from_numpy(dtype) in (F32, F16):
        return np.asarray(array.get())
    # CuPy copies bit patterns of the narrow types everywhere, their values not in every version.
    patterns = array.view(BF16.bits if dtype.itemsize == 2 else np.dtype(np.uint8))
    return np.asarray(patterns.get()).view(dtype)
