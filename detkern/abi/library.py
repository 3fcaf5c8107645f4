"""The loader of shared libraries that speak abi.h. ctypes releases the GIL around every call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..errors import ArgumentError, BackendUnavailable, ContractUnsupported, DetkernError, DeviceError
from . import mirror, version2

__all__ = ["Library"]

_ERRORS: dict[int, type[DetkernError]] = {
    mirror.INVALID: ArgumentError,
    mirror.UNSUPPORTED: ContractUnsupported,
    mirror.OUT_OF_MEMORY: DeviceError,
    mirror.DEVICE_FAULT: DeviceError,
}


def _is_cut(path: Path) -> bool:
    """Whether an ELF file ends before its section headers, which linkers write last. Mapping one that does kills the
    process."""
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False  # the loader says what is wrong
    if len(head) < 64 or head[:6] not in (b"\x7fELF\x02\x01", b"\x7fELF\x02\x02"):
        return False
    order: Literal["little", "big"] = "little" if head[5] == 1 else "big"
    start, (entry, count) = (
        int.from_bytes(head[40:48], order),
        (int.from_bytes(head[i : i + 2], order) for i in (58, 60)),
    )
    return start + entry * count > size


class Library:
    """A loaded library, its version checked. It may be older or newer than this detkern.

    path:        the file.
    name:        what it calls itself.
    host_memory: whether the pointers that it takes are host pointers.
    offers:      what `run` computes, as (operation code, variant code, type code); a newer library has codes unknown
    here.

    Raises BackendUnavailable where the file cannot be loaded, lacks a function, or has an ABI version that is neither
    this detkern's nor the one before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if _is_cut(path):
            raise BackendUnavailable(f"{path} cannot be loaded: it has been cut short")
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendUnavailable(f"{path} cannot be loaded: {error}") from error
        version = self._function("detkern_abi_version", [])()
        if version not in (mirror.ABI_VERSION, version2.VERSION):
            raise BackendUnavailable(
                f"{path} has ABI version {version}, this detkern needs {mirror.ABI_VERSION} or {version2.VERSION}; "
                "rebuild the library"
            )
        old = version == version2.VERSION
        self._last_error = self._function("detkern_last_error", [], ctypes.c_char_p)
        pointer, size, address = ctypes.POINTER, ctypes.c_uint64, ctypes.c_void_p
        self._device_count = self._function("detkern_device_count", [pointer(ctypes.c_int32)])
        self._get_device = self._function("detkern_get_device", [pointer(mirror.Device)])
        self._allocate = self._function("detkern_allocate", [ctypes.c_int32, size, pointer(address)])
        self._free = self._function("detkern_free", [ctypes.c_int32, address])
        self._copy = self._function("detkern_copy", [ctypes.c_int32, address, address, size, ctypes.c_int32])
        capabilities: Any = mirror.described(version2.Capabilities if old else mirror.Capabilities)
        get_capabilities = self._function("detkern_get_capabilities", [pointer(type(capabilities))])
        if status := get_capabilities(capabilities):
            self._fail("detkern_get_capabilities", status)
        self.name = capabilities.name.decode(errors="replace")
        self.host_memory = bool(capabilities.host_memory)
        self.offers: frozenset[tuple[int, int, int]]
        if old:
            functions = version2.Functions(self._function)
            self._run, self._scratch = functions.run, functions.scratch
            self.offers = functions.offers(capabilities.gemm_offers)
        else:
            # Without argument types: an int and references need none, and each costs time at every call.
            self._run = self._function("detkern_run", None)
            self._scratch = self._function("detkern_scratch", None)
            self.offers = self._offered()

    def run(self, operation: int, descriptor: ctypes.Structure) -> None:
        """Compute `descriptor`; a status other than 0 raises with the library's own words."""
        if status := self._run(operation, byref(descriptor)):
            self._fail(f"detkern_run of a {type(descriptor).__name__}", status)

    def scratch(self, operation: int, descriptor: ctypes.Structure) -> int:
        """Bytes of scratch memory that `run` needs for `descriptor`, whose pointers are not read."""
        count = ctypes.c_uint64()
        if status := self._scratch(operation, byref(descriptor), byref(count)):
            self._fail(f"detkern_scratch of a {type(descriptor).__name__}", status)
        return count.value

    def device_count(self) -> int:
        """How many devices the library sees."""
        count = ctypes.c_int32()
        if status := self._device_count(count):
            self._fail("detkern_device_count", status)
        return count.value

    def device(self, index: int) -> mirror.Device:
        """What the library knows of a device."""
        device = mirror.described(mirror.Device)
        device.index = index
        if status := self._get_device(device):
            self._fail("detkern_get_device", status)
        return device

    @contextmanager
    def memory(self, device: int, size: int) -> Iterator[int]:
        """The address of `size` bytes of a device's memory, freed at the end."""
        address = ctypes.c_void_p()
        if status := self._allocate(device, size, address):
            self._fail("detkern_allocate", status)
        try:
            yield address.value or 0
        finally:
            self._free(device, address)

    def copy(self, device: int, to: int, source: int, size: int, direction: int) -> None:
        """Copy `size` bytes between host and device (mirror.TO_DEVICE, TO_HOST), after all work on the device."""
        if status := self._copy(device, to, source, size, direction):
            self._fail("detkern_copy", status)

    def _offered(self) -> frozenset[tuple[int, int, int]]:
        size = ctypes.c_uint64
        ask = self._function("detkern_offers", [ctypes.POINTER(mirror.Offer), size, ctypes.POINTER(size)])
        count = size()
        status = ask(None, 0, count)
        table = (mirror.Offer * count.value)()
        if status := status or ask(table, count.value, count):
            self._fail("detkern_offers", status)
        return frozenset(
            (offer.operation, offer.variant, dtype)
            for offer in table
            for dtype in range(64)
            if offer.dtypes >> dtype & 1
        )

    def _function(self, name: str, arguments: list[Any] | None, result: Any = ctypes.c_int32) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise BackendUnavailable(f"{self.path} has no function {name}; it is not a detkern library") from None
        if arguments is not None:
            function.argtypes = arguments
        function.restype = result
        return function

    def _fail(self, function: str, status: int) -> NoReturn:
        said = (self._last_error() or b"").decode(errors="replace") or "no message"
        kind = mirror.STATUS_NAMES.get(status, "unknown status")
        raise _ERRORS.get(status, DeviceError)(f"{function}: {kind} ({status}): {said}")
