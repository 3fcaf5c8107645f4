"""Shared libraries from C++ sources: which compiler, where the result is kept, and many processes at once.

A library's file name carries a hash of what it was built for: the sources, the flags (those in CXX too), the features
of this CPU (a home folder may be shared by different machines) and the ABI version. Which compiler built it is not in
the name: a filled cache serves a machine that has none. A build happens under a file lock, into a temporary file that
is renamed when it is complete: a process sees a whole library or none. What a crash, a full disk or somebody else made
of the file since then, its seal shows (sealed.py), and it is built anew.
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
from ..files import sealed
from .mirror import ABI_VERSION

__all__ = ["Compiler", "Recipe", "build", "cache_folder", "cpu_features", "find_compiler", "put"]

_log = logging.getLogger("detkern")


@dataclass(frozen=True)
class Compiler:
    """A compiler that answered: its command (program and fixed arguments), what `--version` printed, and the variable
    that named it ("CXX=clang++"), empty where it is one of the usual ones."""

    command: tuple[str, ...]
    version: str
    named: str = ""


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
    return _find_compiler((asked,) if asked else tuple(candidates), variable, bool(asked), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find_compiler(commands: tuple[str, ...], variable: str, asked: bool, path: str) -> Compiler:
    tried = []
    for text in commands:
        named = f"{variable}={text}" if asked else ""
        command = _words(text, variable)
        program = shutil.which(command[0], path=path) if command else None
        if program is None:
            tried.append(f"{named or text}: not found")
            continue
        program = os.path.abspath(program)  # it runs in a folder of its own
        try:
            answer = subprocess.run(
                [program, *command[1:], "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=60, check=True,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            tried.append(f"{named or text}: {error}")
            continue
        return Compiler((program, *command[1:]), answer.stdout.strip(), named)
    raise BuildError(
        f"no C++ compiler: tried {'; '.join(tried)}; looked in the folders of "
        f"PATH{'' if path else ', which is empty'}; "
        f"install one (g++ or clang++) or name it in {variable}"
    )


def _words(text: str, variable: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BuildError(f"{variable}={text} is not a command: {error}; write a compiler and its arguments") from None


def _flags_of_the_environment(variable: str = "CXX") -> tuple[str, ...]:
    """The flags in `variable`, behind the compiler and what launches it ("ccache g++ -m64")."""
    words = _words(os.environ.get(variable, ""), variable)
    first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    return words[first:]


def cpu_features() -> str:
    """The machine and the features of its CPU, as far as a compiler told -march=native could use them."""
    lines = set()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
        for line in info:
            key, _, value = line.partition(":")
            if key.strip().lower() in ("flags", "features", "model name", "cpu part", "cpu implementer"):
                lines.add(f"{key.strip()}={value.strip()}")
    try:
        libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")[0]
    except (ValueError, OSError):  # another one, whose programs cannot load what is linked with glibc
        libc = ""
    return "\n".join([platform.machine(), libc, *sorted(lines)])


def cache_folder() -> Path:
    """The folder for built libraries, made if need be: detkern.config.cache_dir, else $XDG_CACHE_HOME/detkern, else
    ~/.cache/detkern; where none can be written, a folder of this user's own among the temporary files, which is logged.

    Raises BuildError where a folder asked for by name, or every one, cannot be written.
    """
    usual = _usual_folder()
    reason = "no home folder" if usual is None else _unwritable(usual)
    if usual is not None and reason is None:
        return usual
    if config.cache_dir is not None:
        raise BuildError(f"cache_dir={str(usual)!r} (DETKERN_CACHE_DIR) cannot be written: {reason}")
    try:
        fallback = Path(tempfile.gettempdir()) / f"detkern-{os.getuid()}"
    except OSError as error:  # TMPDIR and all the usual places
        raise BuildError(f"no folder for built libraries: {usual}: {reason}; {error.strerror or error}") from error
    if worse := _unwritable(fallback, private=True):
        raise BuildError(f"no folder for built libraries: {usual}: {reason}; {fallback}: {worse}")
    _log.warning("detkern keeps built libraries in %s: %s cannot be written (%s)", fallback, usual, reason)
    return fallback


def _usual_folder() -> Path | None:
    """Where libraries are looked for first, whether it can be written or not; None where there is no home."""
    if config.cache_dir is not None:
        return config.cache_dir
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()).absolute() / "detkern"
    except RuntimeError:  # neither HOME nor an entry of this user
        return None


def _unwritable(folder: Path, private: bool = False) -> str | None:
    """Why `folder` cannot hold libraries that we will load, or None.
    A private one must be ours and closed to others."""
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


def build(recipe: Recipe, folder: Path | None = None, again: bool = False) -> Path:
    """The library of `recipe`, from the cache or built now, which is said in one line of the log.

    folder: where it is kept instead of the cache folder.
    again: build it anew although it is there and whole, unless another process does so meanwhile.

    Raises BuildError, with the compiler's output where it refused; it names a file of the cache that is damaged and
    could not be replaced.
    """
    name = _file_name(recipe)
    damaged = None
    # A folder that cannot be written may have been filled before.
    first = _usual_folder() if folder is None else folder
    if first is not None and not again:
        reason = sealed.damage(first / name)
        if reason is None:
            return first / name
        damaged = reason if os.path.lexists(first / name) else None
    try:
        library = (cache_folder() if folder is None else folder) / name
        before = _identity(library)
        with _locked(library):
            replaced = again and before is not None and _identity(library) == before
            if replaced or (reason := sealed.damage(library)) is not None:
                if not replaced and os.path.lexists(library):
                    damaged = reason
                _compile(recipe, find_compiler(), library, damaged)
    except BuildError as error:
        raise BuildError(f"{damaged}; {error}" if damaged else str(error)) from error
    except OSError as error:
        said = f"{error.filename or name} cannot be written: {error.strerror or error}"
        raise BuildError(f"{damaged}; {said}" if damaged else said) from error
    return library


def _file_name(recipe: Recipe) -> str:
    digest = hashlib.sha256()
    for part in (str(ABI_VERSION), *_flags_of_the_environment(), *recipe.flags, *recipe.link_flags, cpu_features()):
        digest.update(os.fsencode(part) + b"\0")
    for source in (*recipe.sources, *recipe.headers):
        content = source.read_bytes()
        digest.update(f"{source.name} {len(content)}\0".encode() + content)
    return f"{recipe.name}-{digest.hexdigest()[:32]}.so"


def _identity(path: Path) -> tuple[int, int] | None:
    """What a file that is renamed to `path` changes; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


@contextmanager
def _locked(library: Path) -> Iterator[None]:
    """Hold an exclusive lock for a library; its file stays, since removing it would let two holders in."""
    import fcntl

    with open(library.with_suffix(".lock"), "w") as file:
        # Some network file systems have no locks. The rename keeps the result right; only the work is done twice.
        with suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.warning("detkern waits for another process that compiles %s", library)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(recipe: Recipe, compiler: Compiler, library: Path, damaged: str | None) -> None:
    # A warning, because that is what is shown where nobody has set logging up, and half a minute of silence looks like
    # a hang.
    _log.warning(
        "detkern compiles its library %s with %s, once, for up to half a minute%s",
        recipe.name, compiler.named or compiler.command[0], f": {damaged}" if damaged else "",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=f".{recipe.name}-", dir=library.parent) as scratch:
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in recipe.sources]
        compile_one = [*compiler.command, *recipe.flags, "-c"]
        linked = Path(scratch) / library.name
        try:
            _run([[*compile_one, str(s), "-o", o] for s, o in zip(recipe.sources, objects, strict=True)], scratch)
            _run([[*compiler.command, *recipe.flags, *objects, *recipe.link_flags, "-o", str(linked)]], scratch)
            if not linked.is_file():
                raise BuildError(
                    f"{shlex.join(compiler.command)} made no library and said nothing; is it a C++ compiler?"
                )
        except BuildError as error:
            raise BuildError(f"{compiler.named}: {error}" if compiler.named else str(error)) from error
        put(linked, library)


def put(made: Path, library: Path) -> None:
    """Seal a library that was built and move it to its place, on the same file system, in one step."""
    content = sealed.sealed(made.read_bytes())
    with open(made, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a crash of the machine must not leave the name without the content
    os.chmod(made, 0o755)
    os.replace(made, library)


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
