"""The calling thread's floating-point modes set to the default ones for a while, through the C library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["default_float_environment"]

_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl


@functools.cache
def _functions() -> tuple[Any, Any] | None:
    try:
        library = ctypes.CDLL("libm.so.6")
    except OSError:
        try:
            library = ctypes.CDLL(None)
        except (OSError, TypeError):
            return None
    try:
        return library.fegetenv, library.fesetenv
    except AttributeError:
        return None


@contextmanager
def default_float_environment() -> Iterator[None]:
    """Round to nearest, subnormals kept; the caller's modes come back at the end. Where the C library has no such call
    (Windows) the modes stay as they are."""
    functions = _functions()
    if functions is None:
        yield
        return
    get, put = functions
    saved = ctypes.create_string_buffer(256)
    get(saved)
    put(_DEFAULT)
    try:
        yield
    finally:
        put(saved)
