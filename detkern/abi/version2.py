"""Libraries of ABI version 2, which users have built and name by an environment variable: a function for each operation
instead of detkern_run, and descriptors of exactly one size, which are the first fields of today's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure, byref, c_char, c_int32, c_uint64
from typing import Any

from ..errors import ContractUnsupported
from . import mirror

__all__ = ["VERSION", "Capabilities", "Functions"]

VERSION = 2

# Of each operation's code: the function, the size of its descriptor, and the codes of the variants and types of all
# libraries that have it. For products the capabilities say which.
_FUNCTIONS: dict[int, tuple[str, int, range, range]] = {
    1: ("detkern_gemm", 432, range(0), range(0)),
    2: ("detkern_block_scaled_gemm", 184, range(6, 7), range(4, 6)),
    3: ("detkern_column_sum", 1088, range(1), range(1, 4)),
    4: ("detkern_rows", 2120, range(1, 11), range(1, 4)),
}


class Capabilities(Structure):
    """detkern_capabilities of version 2."""

    _fields_ = (
        ("size", c_uint64),
        ("abi_version", c_int32),
        ("host_memory", c_int32),
        ("gemm_offers", c_uint64),
        ("name", c_char * 64),
    )


class Functions:
    """A library's functions as those of today. find: a function by its name and argument types."""

    def __init__(self, find: Callable[[str, list[Any]], Any]) -> None:
        self._functions = {code: find(name, [ctypes.c_void_p]) for code, (name, *_) in _FUNCTIONS.items()}
        self._gemm_scratch = find("detkern_gemm_scratch", [ctypes.c_void_p, ctypes.c_void_p])

    def run(self, operation: int, reference: Any) -> int:
        """detkern_run. reference: byref of a descriptor.

        Raises ContractUnsupported for an operation or a field that version 2 did not have.
        """
        status: int = self._functions[self._known(operation)](byref(_cut(operation, reference)))
        return status

    def scratch(self, operation: int, reference: Any, count: Any) -> int:
        """detkern_scratch. Raises as `run`."""
        if self._known(operation) != 1:
            return mirror.OK
        status: int = self._gemm_scratch(byref(_cut(operation, reference)), count)
        return status

    def offers(self, gemm_offers: int) -> frozenset[tuple[int, int, int]]:
        """What `Library.offers` is, by the capabilities' field."""
        offers = {(1, *divmod(bit, 8)) for bit in range(64) if gemm_offers >> bit & 1}
        for code, (_, size, variants, dtypes) in _FUNCTIONS.items():
            # Where there is a kernel, its function refuses a descriptor of no size as one that it does not understand.
            if code != 1 and self._functions[code](byref((ctypes.c_char * size)())) == mirror.INVALID:
                offers |= {(code, variant, dtype) for variant in variants for dtype in dtypes}
        return frozenset(offers)

    def _known(self, operation: int) -> int:
        if operation not in self._functions:
            raise ContractUnsupported(f"a library of ABI version {VERSION} has no operation {operation}; rebuild it")
        return operation


def _cut(operation: int, reference: Any) -> Any:
    """A copy of a descriptor with the size that version 2 had."""
    content = bytes(reference._obj)
    size = _FUNCTIONS[operation][1]
    if any(content[size:]):
        raise ContractUnsupported(f"a library of ABI version {VERSION} does not know a field of this call; rebuild it")
    return (ctypes.c_char * size).from_buffer_copy(size.to_bytes(8, "little") + content[8:size])
