"""Arrays out of .npy, .npz and .safetensors files, with the types that NumPy's own formats lose.

NumPy writes bfloat16 and float8_e4m3fn as raw bytes ("V2", "V1") and float8_e5m2 under a name that it cannot read back;
safetensors knows all of them by name. Nothing is unpickled.
"""

from __future__ import annotations

import ast
import json
import lzma
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, DetkernError, DTypeError, ShapeError
from ..vocabulary.dtypes import BF16, DTYPES, E4M3, E5M2, F16, F32, I32, I64, DType, from_numpy

__all__ = ["Location", "load", "parse_location"]

SUFFIXES = (".npy", ".npz", ".safetensors")

# The types of https://huggingface.co/docs/safetensors that an operation takes.
_SAFETENSORS = {"F32": F32, "F16": F16, "BF16": BF16, "F8_E4M3": E4M3, "F8_E5M2": E5M2, "I32": I32, "I64": I64}
# What reading a file of another content raises.
_MALFORMED = (
    ValueError, LookupError, TypeError, AttributeError, SyntaxError, ArithmeticError, EOFError, MemoryError,
    RuntimeError,
    struct.error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
)  # fmt: skip
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors format, in bytes


@dataclass(frozen=True)
class Location:
    """A file, and the array in it where it may hold several."""

    path: str
    key: str | None

    def __str__(self) -> str:
        return self.path if self.key is None else f"{self.path}:{self.key}"


def parse_location(text: str) -> Location:
    """FILE or FILE:KEY, by the suffix of FILE, so that a colon in a folder's name does no harm."""
    matched = re.match(r"(?is)(.*?\.(npy|npz|safetensors))(?::(.+))?$", text)
    if matched is None:
        raise ArgumentError(
            f"{text!r} is not an array file: give FILE.npy, FILE.npz:KEY or FILE.safetensors:KEY "
            "(:KEY may be left out where the file holds one array)"
        )
    path, suffix, key = matched.groups()
    if suffix.lower() == "npy" and key is not None:
        raise ArgumentError(f"{text!r}: a .npy file holds one array, so :{key} selects nothing; leave it out")
    return Location(path, key)


def load(location: Location, raw: DType | None = None) -> npt.NDArray[Any]:
    """The array at `location`, native-endian, in one of detkern's types.

    raw: what raw bytes and unsigned integers of its size are taken for; other arrays are left alone.
    Raises ArgumentError where the file or its key is not right, DTypeError for a type that no product takes, OSError
    where the file cannot be read.
    """
    suffix = os.path.splitext(location.path)[1].lower()
    if suffix == ".npy":
        with open(location.path, "rb") as file:
            array = _read_npy(file, location)
    elif suffix == ".npz":
        array = _load_npz(location)
    else:
        array = _load_safetensors(location)
    return _interpret(array, raw, location)


def _interpret(array: npt.NDArray[Any], raw: DType | None, location: Location) -> npt.NDArray[Any]:
    """`array` in one of detkern's types, the values unchanged."""
    is_raw = (
        array.dtype.kind in "Vui"
        and array.dtype.names is None
        and from_numpy(array.dtype) not in DTYPES
        and array.dtype.itemsize in (1, 2, 4)
    )
    if is_raw and raw is not None and raw.itemsize == array.dtype.itemsize:
        array = array.view(f"{array.dtype.byteorder}u{raw.itemsize}".replace("|", ""))
        return np.ascontiguousarray(array.astype(raw.bits, copy=False)).view(raw.numpy)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if from_numpy(array.dtype) is not None:  # an index among them
        return array
    if is_raw:
        stored = f"{location}: holds raw elements of {array.dtype.itemsize} bytes ({array.dtype.str})"
        fitting = {1: "--dtype e4m3 or --dtype e5m2", 2: "--dtype bf16 or --dtype f16", 4: "--dtype f32"}
        said = "" if raw is None else f", which {raw.short} ({raw.itemsize} bytes) does not fit"
        raise DTypeError(f"{stored}{said}; say what they are with {fitting[array.dtype.itemsize]}")
    raise DTypeError(
        f"{location}: holds {array.dtype}; a product takes float32, float16, bfloat16 and the float8 types"
    )


def _read_npy(file: IO[bytes], location: Location) -> npt.NDArray[Any]:
    """The array of a .npy stream (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html)."""
    with _wrong_format(location, ".npy"):
        major, _ = np.lib.format.read_magic(file)
        if major not in (1, 2, 3):
            raise ValueError(f"its format has version {major}; 1 to 3 are known")
        size = struct.unpack("<H", _exactly(file, 2))[0] if major == 1 else struct.unpack("<I", _exactly(file, 4))[0]
        header = ast.literal_eval(_exactly(file, size).decode("latin1" if major < 3 else "utf8"))
        descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
        # What NumPy writes for float8_e5m2, and does not know when it reads.
        dtype = E5M2.numpy if descr in ("<f1", "|f1") else np.dtype(descr)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        count = _count(shape)
        if not isinstance(fortran, bool):
            raise TypeError(f"its fortran_order is {fortran!r}")
        data = np.frombuffer(_exactly(file, count * dtype.itemsize), dtype, count)
        return data.reshape(shape, order="F" if fortran else "C")


def _count(shape: Any) -> int:
    """How many elements an array of the shape in a file's header has."""
    if not isinstance(shape, (tuple, list)) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"its shape is {shape!r}")
    return math.prod(shape)


def _exactly(file: IO[bytes], size: int) -> bytes:
    try:
        data = file.read(size)
    except (MemoryError, OverflowError):
        raise ValueError(f"it claims {size} bytes, more than memory holds") from None
    if len(data) != size:
        raise ValueError(f"it ends {size - len(data)} bytes early")
    return data


@contextmanager
def _wrong_format(location: Location, suffix: str) -> Iterator[None]:
    try:
        yield
    except _MALFORMED as error:
        if isinstance(error, DetkernError):
            raise
        said = str(error) or type(error).__name__
        raise ArgumentError(f"{location.path} is not a readable {suffix} file: {said:.200}") from None


def _pick(location: Location, keys: list[str]) -> str:
    """The key asked for, or the only one; ArgumentError lists what there is."""
    if location.key is None and len(keys) == 1:
        return keys[0]
    if location.key in keys:
        return str(location.key)
    shown = ", ".join(keys[:40]) + (f", … ({len(keys)} in all)" if len(keys) > 40 else "")
    if not keys:
        raise ArgumentError(f"{location.path} holds no array")
    if location.key is None:
        raise ArgumentError(f"{location.path} holds {len(keys)} arrays; choose one as {location.path}:KEY from {shown}")
    raise ArgumentError(f"{location.path} has no array {location.key!r}; it has {shown}")


def _load_npz(location: Location) -> npt.NDArray[Any]:
    with _wrong_format(location, ".npz"), zipfile.ZipFile(location.path) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        with archive.open(members[_pick(location, list(members))]) as file:
            return _read_npy(file, location)


def _load_safetensors(location: Location) -> npt.NDArray[Any]:
    """One tensor: the header is 8 bytes of its length, then JSON of names to types, shapes and offsets after it."""
    with _wrong_format(location, ".safetensors"), open(location.path, "rb") as file:
        (size,) = struct.unpack("<Q", _exactly(file, 8))
        if size > _LONGEST_HEADER:
            raise ValueError(f"its header claims {size} bytes")
        header = json.loads(_exactly(file, size))
        if not isinstance(header, dict):
            raise TypeError(f"its header is a JSON {type(header).__name__}, not an object of arrays by name")
        key = _pick(location, [name for name in header if name != "__metadata__"])
        entry = header[key]
        if not isinstance(entry, dict):
            raise TypeError(f"the entry of {key} is a JSON {type(entry).__name__}, not an object")
        start, end = entry["data_offsets"]
        dtype = _SAFETENSORS.get(entry["dtype"])
        if dtype is None:
            known = ", ".join(_SAFETENSORS)
            raise DTypeError(f"{location.path}:{key} holds {entry['dtype']}; a product takes {known}")
        shape = tuple(entry["shape"])
        if start < 0:
            raise ValueError(f"{key} would begin {-start} bytes before the data")
        if end - start != _count(shape) * dtype.itemsize:
            raise ShapeError(f"{location.path}:{key}: {end - start} bytes do not make {shape} of {dtype}")
        file.seek(8 + size + start)
        patterns = np.frombuffer(_exactly(file, end - start), dtype.bits.newbyteorder("<"))
        return patterns.astype(dtype.bits, copy=False).view(dtype.numpy).reshape(shape)
