"""The loader of shared libraries that speak abi.h. ctypes releases the GIL around every call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..errors import ArgumentError, BackendUnavailable, ContractUnsupported, DetkernError, DeviceError
from . import mirror

__all__ = ["Library"]

_ERRORS: dict[int, type[DetkernError]] = {
    mirror.INVALID: ArgumentError,
    mirror.UNSUPPORTED: ContractUnsupported,
    mirror.OUT_OF_MEMORY: DeviceError,
    mirror.DEVICE_FAULT: DeviceError,
}


def _is_cut(path: Path) -> bool:
    """Whether an ELF file ends before its section headers, which linkers write last. Mapping one that does kills the process."""
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
    """A loaded library, its version checked.

    path:        the file.
    name:        what it calls itself.
    host_memory: whether the pointers that it takes are host pointers.
    gemm_offers: the pairs (contract code, type code) that `gemm` takes.

    Raises BackendUnavailable where the file cannot be loaded, lacks a function, or has another ABI version.
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
        if version != mirror.ABI_VERSION:
            raise BackendUnavailable(
                f"{path} has ABI version {version}, this detkern needs {mirror.ABI_VERSION}; rebuild the library"
            )
        self._last_error = self._function("detkern_last_error", [], ctypes.c_char_p)
        pointer = ctypes.POINTER
        self._gemm = self._function("detkern_gemm", [pointer(mirror.GemmDescriptor)])
        self._block_scaled = self._function("detkern_block_scaled_gemm", [pointer(mirror.BlockScaledDescriptor)])
        self._column_sum = self._function("detkern_column_sum", [pointer(mirror.ColumnSumDescriptor)])
        self._rows = self._function("detkern_rows", [pointer(mirror.RowDescriptor)])
        self._gemm_scratch = self._function(
            "detkern_gemm_scratch", [pointer(mirror.GemmDescriptor), pointer(ctypes.c_uint64)]
        )
        self._device_count = self._function("detkern_device_count", [pointer(ctypes.c_int32)])
        self._get_device = self._function("detkern_get_device", [pointer(mirror.Device)])
        size, address = ctypes.c_uint64, ctypes.c_void_p
        self._allocate = self._function("detkern_allocate", [ctypes.c_int32, size, pointer(address)])
        self._free = self._function("detkern_free", [ctypes.c_int32, address])
        self._copy = self._function("detkern_copy", [ctypes.c_int32, address, address, size, ctypes.c_int32])
        get_capabilities = self._function("detkern_get_capabilities", [pointer(mirror.Capabilities)])
        capabilities = mirror.described(mirror.Capabilities)
        if status := get_capabilities(capabilities):
            self._fail("detkern_get_capabilities", status)
        self.name = capabilities.name.decode(errors="replace")
        self.host_memory = bool(capabilities.host_memory)
        offers = capabilities.gemm_offers
        self.gemm_offers = frozenset(divmod(bit, 8) for bit in range(64) if offers >> bit & 1)

    def gemm(self, descriptor: mirror.GemmDescriptor) -> None:
        """Run `descriptor`; a status other than 0 raises with the library's own words."""
        if status := self._gemm(descriptor):
            self._fail("detkern_gemm", status)

    def block_scaled_gemm(self, descriptor: mirror.BlockScaledDescriptor) -> None:
        """Run `descriptor`; a status other than 0 raises with the library's own words."""
        if status := self._block_scaled(descriptor):
            self._fail("detkern_block_scaled_gemm", status)

    def column_sum(self, descriptor: mirror.ColumnSumDescriptor) -> None:
        """Run `descriptor`; a status other than 0 raises with the library's own words."""
        if status := self._column_sum(descriptor):
            self._fail("detkern_column_sum", status)

    def rows(self, descriptor: mirror.RowDescriptor) -> None:
        """Run `descriptor`; a status other than 0 raises with the library's own words."""
        if status := self._rows(descriptor):
            self._fail("detkern_rows", status)

    def gemm_scratch(self, descriptor: mirror.GemmDescriptor) -> int:
        """Bytes of scratch memory that `gemm` needs for `descriptor`, whose pointers are not read."""
        count = ctypes.c_uint64()
        if status := self._gemm_scratch(descriptor, count):
            self._fail("detkern_gemm_scratch", status)
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

    def _function(self, name: str, arguments: list[Any], result: Any = ctypes.c_int32) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise BackendUnavailable(f"{self.path} has no function {name}; it is no detkern library") from None
        function.argtypes = arguments
        function.restype = result
        return function

    def _fail(self, function: str, status: int) -> NoReturn:
        said = (self._last_error() or b"").decode(errors="replace") or "no message"
        kind = mirror.STATUS_NAMES.get(status, "unknown status")
        raise _ERRORS.get(status, DeviceError)(f"{function}: {kind} ({status}): {said}")
