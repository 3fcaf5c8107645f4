"""`detkern build`: compile ahead what would otherwise be compiled when a call first needs it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import track

from ..dispatch import requirements
from ..errors import ArgumentError, BackendUnavailable, ContractUnsupported
from ..vocabulary.contracts import CONTRACTS
from .options import contracts_option

if TYPE_CHECKING:
    from ..npu.toolchain import Toolchain

__all__ = ["build"]


@click.group()
def build() -> None:
    """Compile a backend's kernels ahead of their first use."""


def _capability(text: str) -> tuple[int, int]:
    matched = re.fullmatch(r"(\d+)\.(\d)", text)
    if matched is None:
        raise click.BadParameter(f"{text!r} is not a compute capability; write one as 9.0")
    return int(matched[1]), int(matched[2])


@build.command()
@click.option(
    "--again", is_flag=True, help="Compile it although it is in the cache, by the compiler that CXX names now."
)
def cpu(again: bool) -> None:
    """Compile the CPU library into the cache folder.

    It is otherwise compiled, in up to half a minute, by the first call that needs it. With a filled cache no compiler
    is needed where the CPU has the same features; DETKERN_CACHE_DIR says where it lies.

    \b
    Examples:
      detkern build cpu
      CXX=clang++ detkern build cpu --again

    \b
    Exit codes: 0 it is there, 2 no compiler, or the compiler refused a source.
    """
    from ..cpu import compiled

    start = time.perf_counter()
    library = compiled.rebuild() if again else compiled.load()
    click.echo(f"{library.path} in {time.perf_counter() - start:.0f} s")


@build.command()
@click.option(
    "--capability",
    type=_capability,
    metavar="X.Y",
    help="Compute capability to compile for, needing no GPU; default: that of the first CUDA device.",
)
@contracts_option("Default: all that the capability offers, the bias gradient and the row operations.")
@click.option("--processes", type=click.IntRange(1), help="Compilers at a time; default: one a core.")
def cuda(capability: tuple[int, int] | None, contracts: tuple[str, ...], processes: int | None) -> None:
    """Compile the CUDA kernels into the cache folder.

    A kernel is otherwise compiled, in a few seconds, by the first call that needs it; under CUDA graph capture such a
    call is refused. What is in the cache already is not compiled again.

    \b
    Examples:
      detkern build cuda
      detkern build cuda --capability 9.0 --contract mma16

    \b
    Exit codes: 0 all compiled, 2 no device and no --capability, or the compiler refused a source.
    """
    from ..cu.ahead import builds, compile_ahead
    from ..cu.backend import BACKEND, offered
    from ..cu.device import describe, missing
    from ..cu.loader import kernel_folder, supported_architectures, target

    row, supported = requirements.row("cuda"), supported_architectures()
    if capability is None:
        if reason := missing(0):
            raise BackendUnavailable(f"no device to compile for: {reason}; --capability 9.0, say, needs none")
        capability = describe(0).capability
    elif reason := row.too_old(f"--capability {capability[0]}.{capability[1]}: the device", capability):
        raise ArgumentError(reason)
    elif 10 * capability[0] + capability[1] not in supported:
        known = ", ".join(f"{a // 10}.{a % 10}" for a in supported if row.too_old("", divmod(a, 10)) is None)
        raise ArgumentError(
            f"--capability {capability[0]}.{capability[1]}: the installed NVRTC knows no such device; it compiles for "
            f"{known}"
        )
    here = offered(capability)
    asked = [CONTRACTS[name] for name in contracts] or here
    if missing_here := [contract.name for contract in asked if contract not in here]:
        has = ", ".join(contract.name for contract in here) or "nothing"
        raise ContractUnsupported(
            f"compute capability {capability[0]}.{capability[1]} has {has}, not {', '.join(missing_here)}"
        )
    architecture = target(capability, supported)
    wanted = builds(asked, capability) + ([] if contracts else BACKEND.other_builds(capability))
    start = time.perf_counter()
    count = processes or len(os.sched_getaffinity(0))
    running, terminal = compile_ahead(wanted, architecture, count), Console(stderr=True)
    if terminal.is_terminal:
        bar = track(running, f"kernels for {architecture}", total=len(wanted), transient=True, console=terminal)
        running = iter(bar)
    else:
        click.echo(f"compiling {len(wanted)} kernels for {architecture}, {count} at a time: minutes, once", err=True)
    for _ in running:
        pass
    seconds = time.perf_counter() - start
    click.echo(f"{len(wanted)} kernels for {architecture} in {seconds:.0f} s, in {kernel_folder()}")


_OUTPUT = click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the library goes; default: the cache folder, where the backend looks for it.",
)


def _library(toolchain: Toolchain, architectures: tuple[str, ...], output: Path | None) -> None:
    from ..npu.toolchain import build_library

    start = time.perf_counter()
    library = build_library(toolchain, architectures, output)
    click.echo(f"{library} in {time.perf_counter() - start:.0f} s")
    if output is not None:
        click.echo(f"set {toolchain.platform.variable}={library} for the backend to use it")


@build.command()
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    metavar="NAME",
    help="mp_21, mp_22 or mp_31, may be repeated; default: all.",
)
@_OUTPUT
def musa(architectures: tuple[str, ...], output: Path | None) -> None:
    """Compile the MUSA library with mcc, of MUSA_HOME or the PATH.

    With no Moore Threads device visible it is built only where FORCE_MUSA=1 is set. The sources have been run in
    emulation only: building and running on the device is unverified.

    \b
    Examples:
      detkern build musa
      FORCE_MUSA=1 detkern build musa --arch mp_31 --output detkern-musa.so

    \b
    Exit codes: 0 built, 2 no compiler or no device, or the compiler refused a source.
    """
    from ..npu.toolchain import MUSA

    _library(MUSA, architectures, output)


@build.command()
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    metavar="NAME",
    help="dav-2201 (Atlas A2 and A3), the only one and default.",
)
@_OUTPUT
def ascend(architectures: tuple[str, ...], output: Path | None) -> None:
    """Compile the Ascend library with CANN's bisheng, of ASCEND_HOME_PATH or the PATH.

    With no Ascend device visible it is built only where FORCE_ASCEND=1 is set. The sources have been run in emulation
    only: building and running on the device is unverified.

    \b
    Examples:
      detkern build ascend
      FORCE_ASCEND=1 detkern build ascend --output detkern-ascend.so

    \b
    Exit codes: 0 built, 2 no compiler or no device, or the compiler refused a source.
    """
    from ..npu.toolchain import ASCEND

    _library(ASCEND, architectures, output)
