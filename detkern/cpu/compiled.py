"""The C++ library of this machine: what it is made of, built and loaded on first use."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from ..abi.build import Recipe, build
from ..abi.library import Library
from ..errors import BackendUnavailable, BuildError

__all__ = ["load", "rebuild", "recipe"]

_FOLDER = Path(__file__).parent


def recipe() -> Recipe:
    """The sources and flags. Nothing here may contract, reassociate or flush: -fno-fast-math comes last, against a
    compiler command that asks for it."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return Recipe(
        name="detkern-cpu",
        sources=tuple(sorted(_FOLDER.glob("*.cpp"))),
        headers=(*sorted(_FOLDER.glob("*.h")), *sorted((_FOLDER.parent / "abi").glob("*.h"))),
        flags=(
            "-O3", "-std=c++17", native, "-fPIC", "-pthread", "-fvisibility=hidden", "-Wno-psabi",
            "-ffp-contract=off", "-fno-fast-math",
        ),
        link_flags=("-shared",),
    )  # fmt: skip


def load() -> Library:
    """Build the library if need be, and load it.

    Raises BuildError or BackendUnavailable.
    """
    _need_linux()
    path = build(recipe())
    try:
        return Library(path)
    except BackendUnavailable as error:
        # Whole, but this system cannot load it: built where the C++ runtime is newer. What is built here loads there
        # too.
        try:
            return rebuild()
        except BuildError as failed:
            raise BackendUnavailable(f"{error}, and it cannot be built here: {failed}") from error


def rebuild() -> Library:
    """Build the library although it is in the cache, and load it. Raises as `load`."""
    _need_linux()
    return Library(build(recipe(), again=True))


def _need_linux() -> None:
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the C++ kernels are built on Linux, not on {sys.platform}")
