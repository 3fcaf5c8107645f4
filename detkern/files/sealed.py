"""Files of the cache that show whether they are whole: the content, then a mark and the SHA-256 of the content.

The seal is at the end, where the loader of shared libraries looks for nothing. A library that was cut short kills the
process that maps it, so it is read and compared before: about a millisecond for the largest.
"""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

__all__ = ["damage", "is_sealed", "opened", "sealed"]

_MARK = b"detkern-sha256:\0"
_LENGTH = len(_MARK) + hashlib.sha256().digest_size


def sealed(content: bytes) -> bytes:
    """The content with its seal."""
    return content + _MARK + hashlib.sha256(content).digest()


def is_sealed(data: bytes) -> bool:
    """Whether there is a seal, broken or not."""
    return data[-_LENGTH:].startswith(_MARK) and len(data) >= _LENGTH


def opened(data: bytes) -> bytes | None:
    """The content of sealed data; None where the seal is missing or does not fit."""
    content = data[:-_LENGTH]
    return (
        content if is_sealed(data) and hashlib.sha256(content).digest() == data[len(content) + len(_MARK) :] else None
    )


def damage(path: Path, may_be_unsealed: bool = False) -> str | None:
    """Why the file is not as it was sealed, naming it; or None."""
    try:
        # A pipe would be waited for. A directory says so itself.
        if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
            return f"{path} is not a regular file"
        data = path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if opened(data) is not None or (may_be_unsealed and not is_sealed(data)):
        return None
    found = "its digest does not fit" if is_sealed(data) else f"its {len(data)} bytes do not end in detkern's digest"
    return f"{path} is damaged: {found}"
