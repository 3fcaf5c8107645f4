"""Ascend AI cores: contracts `tree` and `fma`. Emulated; building and running on the device unverified."""

from pathlib import Path

from ..backend import NpuBackend
from ..platform import Platform

__all__ = ["BACKEND", "PLATFORM"]

PLATFORM = Platform(
    name="ascend",
    variable="DETKERN_ASCEND_LIBRARY",
    source=Path(__file__).with_name("det_gemm.cpp"),
    tile="8x256",
)
BACKEND = NpuBackend(PLATFORM)
