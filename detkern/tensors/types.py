"""Element types as frameworks spell them, and the sentences that refuse the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DTypeError
from ..vocabulary.dtypes import BF16, E4M3, E5M2, F16, F32, DType, by_name

__all__ = ["FP8", "OUTPUTS", "WHOLE", "dtype_argument", "refuse_type"]

# What a result, an `out` and a bias may be.
OUTPUTS: tuple[DType, ...] = (F32, F16, BF16)
# What only block_scaled_gemm takes.
FP8: tuple[DType, ...] = (E4M3, E5M2)

# The operands that hold whole numbers, by the names that all calls give them.
WHOLE = ("index", "target")

_REPLACEMENTS = {
    "float8_e4m3fnuz": "float8_e4m3fn",
    "float8_e5m2fnuz": "float8_e5m2",
    "float8_e4m3b11fnuz": "float8_e4m3fn",
}


def dtype_argument(value: Any, argument: str = "out_dtype") -> DType:
    """The output type that `value` names: "float32" or "f32", or a dtype of NumPy, ml_dtypes, PyTorch or JAX.

    DTypeError where it names no type, or one that results cannot have.
    """
    if isinstance(value, DType):
        name = value.name
    elif isinstance(value, str):
        name = value
    elif type(value).__module__ == "torch":
        name = str(value).removeprefix("torch.")
    elif isinstance(value, np.dtype):
        name = value.name if value.isnative else value.str
    elif isinstance(value, type):
        try:
            name = np.dtype(value).name
        except TypeError:
            name = repr(value)
    else:
        name = f"{value!r:.80}"  # not np.dtype(value), which reads an array as its type, and much else
    dtype = by_name(name)
    if dtype not in OUTPUTS:
        raise DTypeError(f"{argument}={name} cannot be a result's type; float32, float16 and bfloat16 can")
    return dtype


def refuse_type(argument: str, found: str, cast: str) -> DTypeError:
    """The error for an element type that detkern has no arithmetic for. `cast` is what the caller would write to get
    float32 in the framework of the array."""
    if found in _REPLACEMENTS:
        wanted = _REPLACEMENTS[found]
        return DTypeError(
            f"{argument} is {found}, whose values are not those of {wanted} under the same bits; "
            f"quantize it to {wanted}"
        )
    if found.startswith("complex"):
        return DTypeError(
            f"{argument} is {found}; there is no complex product: multiply real and imaginary parts apart"
        )
    if argument in WHOLE:
        return DTypeError(
            f"{argument} is {found}; it holds whole numbers, int32 or int64: cast it, as in "
            f"{cast.replace('float32', 'int64')}"
        )
    return DTypeError(
        f"{argument} is {found}; detkern takes float32, float16, bfloat16, float8_e4m3fn and float8_e5m2: "
        f"cast it, as in {cast}"
    )
