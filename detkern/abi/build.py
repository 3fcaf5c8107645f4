"""Shared libraries from C++ sources: which compiler, where the result is kept, and many processes at once.

A library's file name carries a hash of everything that decides its code: the sources, the flags, the compiler's version, the
features of this CPU (a home folder may be shared by different machines) and the ABI version. A build happens under a
file lock, into a temporary file that is renamed when it is complete: a process sees a whole library or none.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .. import config
from ..errors import BuildError
from .mirror import ABI_VERSION

__all__ = ["Compiler", "Recipe", "build", "cache_folder", "cpu_features", "find_compiler"]

_log = logging.getLogger("detkern")


@dataclass(frozen=True)
class Compiler:
    """A compiler that answered: its command (program and fixed arguments) and what `--version` printed."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Recipe:
    """A library to build.

    name:    the stem of its file.
    sources: compiled each on its own, then linked.
    headers: part of the cache key only.
    flags:   for compiling; `link_flags` for linking.
    """

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def find_compiler(candidates: Sequence[str] = ("g++", "clang++", "c++"), variable: str = "CXX") -> Compiler:
    """The first of the command in the environment's `variable` and `candidates` that answers `--version`.

    Raises BuildError, which says where it looked.
    """
    asked = os.environ.get(variable)
    return _find_compiler((asked,) if asked else tuple(candidates), variable, os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find_compiler(commands: tuple[str, ...], variable: str, path: str) -> Compiler:
    tried = []
    for text in commands:
        command = tuple(shlex.split(text))
        program = shutil.which(command[0], path=path) if command else None
        if program is None:
            tried.append(f"{text}: not found")
            continue
        try:
            answer = subprocess.run(
                [program, *command[1:], "--version"], capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            tried.append(f"{text}: {error}")
            continue
        return Compiler((program, *command[1:]), answer.stdout.strip())
    raise BuildError(
        f"no C++ compiler: tried {'; '.join(tried)}; looked in PATH={path or '(empty)'}; "
        f"install one (g++ or clang++) or name it in {variable}"
    )


def cpu_features() -> str:
    """The machine and the features of its CPU, as far as a compiler told -march=native could use them."""
    lines = set()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
        for line in info:
            key, _, value = line.partition(":")
            if key.strip().lower() in ("flags", "features", "model name", "cpu part", "cpu implementer"):
                lines.add(f"{key.strip()}={value.strip()}")
    return "\n".join([platform.machine(), *sorted(lines)])


def cache_folder() -> Path:
    """The folder for built libraries, made if need be: detkern.config.cache_dir, else $XDG_CACHE_HOME/detkern, else
    ~/.cache/detkern; where none can be written, a folder of this user's own among the temporary files, which is logged.

    Raises BuildError where a folder asked for by name, or every one, cannot be written.
    """
    configured = config.cache_dir
    if configured is not None:
        if reason := _unwritable(configured):
            raise BuildError(f"cache_dir={str(configured)!r} cannot be written: {reason}")
        return configured
    base = os.environ.get("XDG_CACHE_HOME", "")
    usual = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    usual = usual / "detkern"
    reason = _unwritable(usual)
    if reason is None:
        return usual
    fallback = Path(tempfile.gettempdir()) / f"detkern-{os.getuid()}"
    if worse := _unwritable(fallback, private=True):
        raise BuildError(f"no folder for built libraries: {usual}: {reason}; {fallback}: {worse}")
    _log.warning("detkern keeps built libraries in %s: %s cannot be written (%s)", fallback, usual, reason)
    return fallback


def _unwritable(folder: Path, private: bool = False) -> str | None:
    """Why `folder` cannot hold libraries that we will load, or None. A private one must be ours and closed to others."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return "exists and belongs to, or can be written by, somebody else"
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def build(recipe: Recipe, compiler: Compiler | None = None, folder: Path | None = None) -> Path:
    """The library of `recipe`, from the cache or built now.

    Raises BuildError, with the compiler's output where it refused.
    """
    compiler = compiler or find_compiler()
    digest = hashlib.sha256()
    for part in (
        str(ABI_VERSION),
        *compiler.command,
        compiler.version,
        *recipe.flags,
        *recipe.link_flags,
        cpu_features(),
    ):
        digest.update(part.encode() + b"\0")
    for source in (*recipe.sources, *recipe.headers):
        content = source.read_bytes()
        digest.update(f"{source.name} {len(content)}\0".encode() + content)
    folder = cache_folder() if folder is None else folder
    library = folder / f"{recipe.name}-{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    with _locked(library.with_suffix(".lock")):
        if not library.exists():
            _compile(recipe, compiler, library)
    return library


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the file stays, since removing it would let two holders in."""
    import fcntl

    with open(path, "w") as file:
        # Some network file systems have no locks. The rename keeps the result right; only the work is done twice.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(recipe: Recipe, compiler: Compiler, library: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{recipe.name}-", dir=library.parent) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in recipe.sources]
        compile_one = [*compiler.command, *recipe.flags, "-c"]
        _run([[*compile_one, str(s), "-o", o] for s, o in zip(recipe.sources, objects, strict=True)], scratch)
        linked = Path(scratch) / library.name
        _run([[*compiler.command, *recipe.flags, *objects, *recipe.link_flags, "-o", str(linked)]], scratch)
        os.chmod(linked, 0o755)
        with open(linked, "rb") as file:
            os.fsync(file.fileno())  # a crash of the machine must not leave the name without the content
        os.replace(linked, library)


def _run(commands: list[list[str]], folder: str) -> None:
    """Run all commands at once; BuildError with each one that failed and what it printed."""
    environment = {**os.environ, "TMPDIR": folder}
    processes: list[subprocess.Popen[str]] = []
    failures = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, env=environment, text=True, errors="replace",
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        for command, process in zip(commands, processes, strict=True):
            output, _ = process.communicate()
            if process.returncode:
                said = f"the compiler failed with status {process.returncode}: {shlex.join(command)}"
                failures.append(f"{said}\n{output.strip()}")
    except OSError as error:
        raise BuildError(f"{commands[0][0]} cannot be run: {error}") from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if failures:
        raise BuildError("\n\n".join(failures))
