"""Folders and files of the cache on disk, for what is slow to make: compiled kernels, outcomes of self-checks."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from .. import config
from ..abi.build import cache_folder
from ..errors import BuildError

__all__ = ["folder", "keep"]

_log = logging.getLogger("detkern")


def folder(name: str) -> Path:
    """A backend's own folder; it may be read-only or not exist yet."""
    try:
        return cache_folder() / name
    except BuildError:
        # A folder asked for by name may be filled once and read-only ever after.
        if config.cache_dir is None:
            raise
        return config.cache_dir / name


def keep(path: Path, content: bytes) -> None:
    """Write a cache file, under a temporary name first: a process sees a whole file or none. A failure is logged."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    except OSError as error:
        _log.warning("detkern does this work anew in each process: %s cannot be written (%s)", path, error)
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("detkern does this work anew in each process: %s cannot be written (%s)", path, error)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
