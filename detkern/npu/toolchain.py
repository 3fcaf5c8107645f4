"""The vendors' compilers: where they are looked for, whether a device is visible, and the command that builds a
library.

MUSA:   mcc (MUSA SDK), options as in "mcc user guide" and clang's.
Ascend: bisheng (CANN 8.5.0), options as in "Compilation Using BiSheng Command Lines" and "Common Compilation Options".
Nothing in a command may contract, reassociate or flush: the contracts' bits depend on it.
"""

from __future__ import annotations

import glob
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..abi.build import put
from ..errors import ArgumentError, BuildError
from . import ascend, musa
from .libraries import built_library
from .platform import Platform

__all__ = ["ASCEND", "MUSA", "Compiler", "Toolchain", "build_library", "device_nodes", "find_compiler", "refusal"]

_log = logging.getLogger("detkern")


@dataclass(frozen=True)
class Compiler:
    """A vendor's compiler. home: the folder of its SDK."""

    program: Path
    home: Path


@dataclass(frozen=True)
class Toolchain:
    """How a platform's library is built.

    compiler:      the program's name; looked for under each home in `folders`, then in the PATH.
    homes:         environment variables that name an SDK's folder, then `usual_homes`.
    device_files:  glob patterns of which one matches where the driver shows a device.
    force:         the environment variable that, set to 1, builds with no device visible.
    architectures: what `architecture` may be; the first `defaults` of them are built where none is given.
    """

    platform: Platform
    compiler: str
    folders: tuple[str, ...]
    homes: tuple[str, ...]
    usual_homes: tuple[str, ...]
    device_files: tuple[str, ...]
    force: str
    architectures: tuple[str, ...]
    defaults: tuple[str, ...]
    options: Callable[[Compiler, Sequence[str]], list[str]]


def _musa_options(compiler: Compiler, architectures: Sequence[str]) -> list[str]:
    return [
        "-x", "musa", "-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off",
        "-fno-fast-math",
        *(f"--offload-arch={architecture}" for architecture in architectures),
        f"-I{compiler.home / 'include'}", f"-L{compiler.home / 'lib'}", "-lmusart",
    ]  # fmt: skip


def _ascend_options(compiler: Compiler, architectures: Sequence[str]) -> list[str]:
    return [
        "-x", "asc", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off",
        "-fno-fast-math",
        *(f"--npu-arch={architecture}" for architecture in architectures),
        f"-I{compiler.home / 'include'}", f"-L{compiler.home / 'lib64'}", "-lascendcl",
    ]  # fmt: skip


MUSA = Toolchain(
    platform=musa.PLATFORM,
    compiler="mcc",
    folders=("bin",),
    homes=("MUSA_HOME", "MUSA_PATH"),
    usual_homes=("/usr/local/musa",),
    device_files=("/dev/mtgpu*",),
    force="FORCE_MUSA",
    architectures=("mp_21", "mp_22", "mp_31"),
    defaults=("mp_21", "mp_22", "mp_31"),
    options=_musa_options,
)
ASCEND = Toolchain(
    platform=ascend.PLATFORM,
    compiler="bisheng",
    folders=("bin", "compiler/ccec_compiler/bin", "tools/bisheng_compiler/bin"),
    homes=("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"),
    usual_homes=("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"),
    device_files=("/dev/davinci[0-9]*",),
    force="FORCE_ASCEND",
    architectures=("dav-2201",),
    defaults=("dav-2201",),
    options=_ascend_options,
)


def find_compiler(toolchain: Toolchain) -> Compiler | None:
    """The compiler of an SDK that the environment names, of a usual place, or of the PATH; None where there is none."""
    for home in _homes(toolchain):
        for folder in toolchain.folders:
            program = home / folder / toolchain.compiler
            if os.access(program, os.X_OK) and program.is_file():
                return Compiler(program, home)
    found = shutil.which(toolchain.compiler)
    if found is None:
        return None
    program = Path(found)
    return Compiler(program, program.resolve().parent.parent)


def _homes(toolchain: Toolchain) -> list[Path]:
    named = [Path(os.environ[variable]) for variable in toolchain.homes if os.environ.get(variable)]
    return [*named, *map(Path, toolchain.usual_homes)]


def device_nodes(toolchain: Toolchain) -> list[str]:
    """The device files by which the driver shows its devices; empty where no device is visible."""
    return sorted(path for pattern in toolchain.device_files for path in glob.glob(pattern))


def refusal(toolchain: Toolchain, compiler: Compiler | None, devices: Sequence[str]) -> str | None:
    """Why nothing can be built, or None where it can: with a compiler, and with a device or FORCE_... set to 1."""
    platform = toolchain.platform
    if compiler is None:
        looked = [str(home / folder) for home in _homes(toolchain) for folder in toolchain.folders]
        unset = [variable for variable in toolchain.homes if not os.environ.get(variable)]
        also = f" ({' and '.join(unset)} not set)" if unset else ""
        return (
            f"no {toolchain.compiler}: looked in {', '.join(looked)}{also} and the folders of PATH; install "
            f"the {platform.name} toolkit and set {toolchain.homes[0]} to its folder"
        )
    if not devices and os.environ.get(toolchain.force) != "1":
        return (
            f"no {platform.name} device is visible ({', '.join(toolchain.device_files)}), and what is built here could "
            f"not "
            f"be tried; set {toolchain.force}=1 to build it nevertheless"
        )
    return None


def build_library(toolchain: Toolchain, architectures: Sequence[str] = (), output: Path | None = None) -> Path:
    """Build a platform's library, for `architectures` or the usual ones, at `output` or where the backend looks for it.

    Raises BuildError where there is no compiler or device, or the compiler refuses; ArgumentError for an architecture
    that the sources are not written for.
    """
    if unknown := [name for name in architectures if name not in toolchain.architectures]:
        known = ", ".join(toolchain.architectures)
        raise ArgumentError(f"architecture {', '.join(unknown)} is not known; the kernels are written for {known}")
    compiler = find_compiler(toolchain)
    reason = refusal(toolchain, compiler, device_nodes(toolchain))
    if compiler is None or reason is not None:
        raise BuildError(f"{toolchain.platform.name}: {reason}")
    library = built_library(toolchain.platform) if output is None else output
    _log.warning("detkern compiles %s with %s, which may take minutes", library, compiler.program)
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{library.stem}-", dir=library.parent) as folder:
            made = Path(folder) / library.name
            _run(_command(toolchain, compiler, architectures or toolchain.defaults, made))
            if not made.is_file():
                raise BuildError(f"{compiler.program} said nothing and made no {made.name}")
            put(made, library)
    except OSError as error:
        raise BuildError(f"{library} cannot be written: {error.strerror or error}") from error
    return library


def _command(toolchain: Toolchain, compiler: Compiler, architectures: Sequence[str], library: Path) -> list[str]:
    options = toolchain.options(compiler, architectures)
    source = str(toolchain.platform.source)
    libraries = [option for option in options if option.startswith("-l")]
    others = [option for option in options if not option.startswith("-l")]
    # Libraries after the source: a linker takes from them what it has been asked for so far.
    return [str(compiler.program), *others, source, "-o", str(library), *libraries]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False,
        )  # fmt: skip
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(
            f"the compiler failed with status {done.returncode}: {shlex.join(command)}\n{done.stdout.strip()}"
        )
