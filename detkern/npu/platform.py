"""What tells one vendor's devices from another's for the backend that both share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Platform"]


@dataclass(frozen=True)
class Platform:
    """name: of the backend and of the kind of device; variable: the environment variable that names a library; source:
    the kernel's file, within this package; tile: what a kernel computes at once."""

    name: str
    variable: str
    source: Path
    tile: str
