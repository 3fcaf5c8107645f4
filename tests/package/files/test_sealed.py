"""Sealed files: only what was sealed comes out again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from detkern.files.sealed import damage, is_sealed, opened, sealed

CONTENT = bytes(range(256)) * 3


@pytest.mark.parametrize("content", [b"", b"x", CONTENT])
def test_what_was_sealed_comes_out(content: bytes, tmp_path: Path) -> None:
    data = sealed(content)
    assert data.startswith(content)
    assert opened(data) == content
    assert is_sealed(data)
    assert opened(content) is None
    assert not is_sealed(content)
    path = tmp_path / "file"
    path.write_bytes(data)
    assert damage(path) is None


def test_every_other_state_of_the_file_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = sealed(CONTENT)
    changed = [data[:n] for n in range(0, len(data), 13)] + [data + b"\0", CONTENT]
    changed += [data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :] for n in range(0, len(data), 13)]
    for content in changed:
        path.write_bytes(content)
        assert opened(content) is None
        assert str(path) in (damage(path) or ""), len(content)
    path.write_bytes(CONTENT)
    assert "do not end in detkern's digest" in (damage(path) or "")
    assert damage(path, may_be_unsealed=True) is None
    path.write_bytes(b"?" + data[1:])
    assert "its digest does not fit" in (damage(path, may_be_unsealed=True) or "")
    assert "cannot be read: No such file" in (damage(tmp_path / "nowhere") or "")
    assert "cannot be read: Is a directory" in (damage(tmp_path) or "")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # In another process: a fault here hangs.
    pipe = str(tmp_path / "pipe")
    asked = f"from pathlib import Path; from detkern.files.sealed import damage; print(damage(Path({pipe!r})))"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=30, check=True).stdout
    assert said == f"{tmp_path / 'pipe'} is not a regular file\n"
