"""Moore Threads GPUs: contracts `fma` and `tree`. Emulated; building and running on the device unverified."""

from pathlib import Path

from ..backend import NpuBackend
from ..platform import Platform

__all__ = ["BACKEND", "PLATFORM"]

PLATFORM = Platform(
    name="musa",
    variable="DETKERN_MUSA_LIBRARY",
    source=Path(__file__).with_name("det_gemm.mu"),
    tile="64x64 or 128x128",
)
BACKEND = NpuBackend(PLATFORM)
