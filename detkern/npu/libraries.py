"""Which library serves a platform, and loading it once.

The environment variable names one; without it, what `detkern build` left in the cache folder serves the platform's own
devices. A library that takes host memory (the kernels compiled against emulation headers) is loaded by the variable
alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from pathlib import Path

from ..abi import mirror
from ..abi.library import Library
from ..dispatch import requirements
from ..errors import BackendUnavailable
from ..files import cache, sealed
from .platform import Platform

__all__ = ["built_library", "find_library"]

_loaded: dict[tuple[Path, int, int], Library] = {}
_lock = threading.Lock()


def built_library(platform: Platform) -> Path:
    """Where `detkern build` puts a platform's library unless it is told another place: one name for each state of its
    sources.

    Raises BuildError where no folder can be written.
    """
    return cache.folder(platform.name) / f"detkern-{platform.name}-{_sources(platform)[:32]}.so"


@functools.cache
def _sources(platform: Platform) -> str:
    """SHA-256 of what a library is built of: the kernels, the ABI, and the module that has the compiler's options."""
    here = Path(__file__)
    files = [
        *platform.source.parent.iterdir(),
        *Path(mirror.__file__).parent.glob("*.h"),
        here.with_name("toolchain.py"),
    ]
    digest = hashlib.sha256()
    for path in sorted((path for path in files if path.is_file()), key=lambda path: path.name):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()


def find_library(platform: Platform, on_host: bool) -> Library:
    """The library for the platform's devices, or for host memory.

    Raises BackendUnavailable, saying what to set or build, where there is none, it cannot be loaded, it calls itself
    the library of another backend, or it is for the other memory.
    """
    named = os.environ.get(platform.variable)
    if named:
        path = Path(named)
    elif on_host:
        raise BackendUnavailable(
            f"it works on host memory only through an emulated library that {platform.variable} names, and that is not "
            f"set"
        )
    else:
        path = built_library(platform)
        if not path.exists():
            raise BackendUnavailable(
                f"its library is not built: run `detkern build {platform.name}`, or name one in {platform.variable} "
                f"(looked for {path})"
            )
    try:
        library = _load(path, f"build it again, as `detkern build {platform.name}` does", bool(named))
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{platform.variable}={named}: {error}" if named else str(error)) from error
    maker = library.name.replace(",", " ").partition(" ")[0]
    if maker != platform.name and any(maker == row.name for row in requirements.TABLE):
        raise BackendUnavailable(
            f"{path} ({library.name}) is the library of the {maker} backend, not of {platform.name}"
        )
    if library.host_memory and not on_host:
        raise BackendUnavailable(
            f"{path} ({library.name}) is emulated and takes host memory, not memory of a {platform.name} device"
        )
    if on_host and not library.host_memory:
        raise BackendUnavailable(f"{path} ({library.name}) takes memory of {platform.name} devices, not host memory")
    return library


def _load(path: Path, remedy: str, foreign: bool) -> Library:
    """foreign: somebody else may have built it, without a seal. remedy: what to do where a file is damaged."""
    try:
        status = path.stat()
    except OSError as error:
        raise BackendUnavailable(f"{path} cannot be loaded: {error.strerror}") from error
    key = (path.resolve(), status.st_ino, status.st_mtime_ns)
    with _lock:
        if key not in _loaded:
            if path.is_file() and (reason := sealed.damage(path, may_be_unsealed=foreign)):
                raise BackendUnavailable(f"{reason}; {remedy}")
            _loaded[key] = Library(path.resolve())
        return _loaded[key]
