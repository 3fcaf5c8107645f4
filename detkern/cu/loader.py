"""Kernel sources to loaded functions: NVRTC, a cache on disk, one module per device.

A kernel is one .cu file and the macros that fix its tile. It is compiled to machine code of the device's architecture
(to PTX, for the driver to compile, where NVRTC does not know the device yet), kept on disk under a name that hashes
everything the code depends on, and loaded once per device at first use.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dispatch.requirements import install
from ..errors import BuildError, DeviceError
from ..files import cache, sealed

__all__ = [
    "ENTRY",
    "KernelBuild",
    "compile_kernel",
    "compiled_image",
    "kernel_folder",
    "load_function",
    "loaded_architecture",
    "source_digest",
    "target",
]

_log = logging.getLogger("detkern")

FOLDER = Path(__file__).parent / "kernels"  # from which all includes are named
# What sources call the kernel. Each build renames it, so that a profiler's list says what ran.
ENTRY = "detkern_kernel"
# -fmad=false: a product and a sum are never contracted, so every fused multiply-add is one that the kernel wrote.
OPTIONS = ("-std=c++17", "-fmad=false")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# Architectures whose own instructions (wgmma, tcgen05) need the suffix; such code runs on no other.
_SPECIFIC = {(9, 0): "sm_90a", (10, 0): "sm_100a"}


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """One compilation: a file of kernels/ and its macros, in the order given. name: what of the kernel a profiler
    should show, in any characters."""

    source: str
    macros: tuple[tuple[str, int], ...]
    shared_bytes: int
    name: str = ""

    @property
    def entry(self) -> str:
        """The kernel's name in its image."""
        return "_".join(("detkern", *re.findall(r"\w+", self.name))) if self.name else ENTRY

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros, and the kernel's name, as compiler options."""
        renamed = (f"-D{ENTRY}={self.entry}",) if self.name else ()
        return *(f"-D{name}={value}" for name, value in self.macros), *renamed

    def __str__(self) -> str:
        return " ".join((self.source, *self.defines))


@functools.cache
def read_sources(source: str) -> tuple[tuple[str, str], ...]:
    """(name, text) of a kernel file and of every header that it includes, itself first."""
    texts: dict[str, str] = {}
    wanted = [source]
    while wanted:
        name = wanted.pop(0)
        if name not in texts:
            texts[name] = (FOLDER / name).read_text()
            wanted += _INCLUDE.findall(texts[name])
    return tuple(texts.items())


def source_digest(sources: tuple[str, ...]) -> str:
    """SHA-256 over the texts of kernel files and of the headers that they include."""
    digest = hashlib.sha256()
    for source in sources:
        for name, text in read_sources(source):
            digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def target(capability: tuple[int, int], supported: tuple[int, ...]) -> str:
    """The architecture to compile for: `sm_…` for machine code, `compute_…` for PTX that the driver compiles.

    capability: of the device. supported: NVRTC's list (90 for 9.0). Machine code of a lower minor number runs on every
    device of the same major number; PTX runs on every newer one.
    """
    number = 10 * capability[0] + capability[1]
    if capability in _SPECIFIC and number in supported:
        return _SPECIFIC[capability]
    older = [arch for arch in supported if arch <= number]
    if not older:
        known = ", ".join(f"sm_{arch}" for arch in supported)
        raise BuildError(
            f"NVRTC does not compile for compute capability {capability[0]}.{capability[1]}, only for {known}"
        )
    best = max(older)
    return f"sm_{best}" if best // 10 == capability[0] else f"compute_{best}"


def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except ImportError as error:
        raise BuildError(
            f"compiling a CUDA kernel needs CuPy, which cannot be imported ({error}); {install('cuda13', 'cuda12')}"
        ) from error
    except Exception as error:  # CuPy reports a missing libnvrtc with a type of its own
        raise BuildError(
            f"compiling a CUDA kernel needs NVRTC, which CuPy does not find ({error}); "
            "pip install nvidia-cuda-nvrtc, or install the CUDA toolkit"
        ) from error
    return nvrtc


def supported_architectures() -> tuple[int, ...]:
    """What the installed NVRTC compiles for (90 for sm_90), ascending."""
    return tuple(sorted(_nvrtc().getSupportedArchs()))


def loaded_architecture(capability: tuple[int, int]) -> str:
    """The architecture whose kernels a device loads: `target`'s; without NVRTC the device's own, if the cache has
    kernels for it.

    Raises BuildError where there is neither.
    """
    try:
        return target(capability, supported_architectures())
    except BuildError:
        own = target(capability, (10 * capability[0] + capability[1],))
        if any(kernel_folder().glob(f"*-{own}-*-nvrtc{_cuda_major()}.*.cubin")):
            return own
        raise


def compile_kernel(build: KernelBuild, architecture: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """(image, log): the cubin (PTX for `compute_…`) of a kernel and what the compiler said. Needs no device.

    options: appended to the usual ones ("--ptxas-options=-v" puts registers and spills in the log). Raises BuildError
    with the compiler's log where it refuses the source.
    """
    nvrtc = _nvrtc()
    (_, text), *headers = read_sources(build.source)
    program = nvrtc.createProgram(
        text,
        build.source,
        tuple(text.encode() for _, text in headers),
        tuple(name.encode() for name, _ in headers),
    )
    flags = (*OPTIONS, f"--gpu-architecture={architecture}", *build.defines, *options)
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).rstrip("\0\n")
            raise BuildError(f"NVRTC refused {build} for {architecture} ({error}):\n{log}") from error
        log = nvrtc.getProgramLog(program).rstrip("\0\n")
        if architecture.startswith("compute_"):
            return bytes(nvrtc.getPTX(program)), log
        # CuPy takes the last byte of a cubin for a terminator and strips it; it is the last of the ELF file, a zero.
        return bytes(nvrtc.getCUBIN(program)) + b"\0", log
    finally:
        nvrtc.destroyProgram(program)


def _cache_path(build: KernelBuild, architecture: str) -> Path:
    """Where the kernel is kept, or would be. Where there is no NVRTC: the newest of the same major version of CUDA."""
    key = hashlib.sha256("\0".join((source_digest((build.source,)), architecture, *OPTIONS, *build.defines)).encode())
    stem = f"{build.source.removesuffix('.cu')}-{architecture}-{key.hexdigest()[:32]}"
    folder = kernel_folder()
    try:
        major, minor = _nvrtc().getVersion()
    except BuildError:
        kept = folder.glob(f"{stem}-nvrtc{_cuda_major()}.*.cubin")
        newest = max(kept, key=lambda path: int(path.stem.rpartition(".")[2]), default=None)
        if newest is None:
            raise
        return newest
    return folder / f"{stem}-nvrtc{major}.{minor}.cubin"


def _cuda_major() -> int | None:
    """The major version of CUDA that CuPy is built for; None without CuPy, which loads the kernels."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return None
    return int(runtime.runtimeGetVersion()) // 1000


def kernel_folder() -> Path:
    """Where compiled kernels are kept; it may be read-only or not exist yet."""
    return cache.folder("cuda")


def compiled_image(build: KernelBuild, architecture: str) -> bytes:
    """The kernel's image from the cache on disk; compiled now, and put there, where it is missing."""
    path = _cache_path(build, architecture)
    image = _read(path)
    if image is None:
        image, _ = compile_kernel(build, architecture)
        cache.keep(path, sealed.sealed(image))
    return image


def _read(path: Path) -> bytes | None:
    """The image in a cache file, or None where there is not a regular file, or a damaged one."""
    try:
        # A pipe would be waited for.
        return sealed.opened(path.read_bytes()) if path.is_file() else None
    except OSError:
        return None


_functions: dict[tuple[int, KernelBuild], Any] = {}
_lock = threading.Lock()


def load_function(device: int, capability: tuple[int, int], build: KernelBuild, stream: int) -> Any:
    """The CuPy function of a kernel on a device, which must be current; compiled and loaded at first use.

    stream: where the caller is about to launch. Loading a module may synchronise, which breaks a graph capture, so an
    unloaded kernel is refused with DeviceError while that stream is capturing.
    """
    function = _functions.get((device, build))
    if function is not None:
        return function
    with _lock:
        function = _functions.get((device, build))
        if function is None:
            function = _functions[device, build] = _load(device, capability, build, stream)
    return function


def _capturing(stream: int) -> bool:
    from cupy.cuda import runtime

    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as error:
        # What the default stream answers while another stream captures.
        if "CaptureImplicit" in str(error):
            return True
        raise


_said = False


def _say_once(build: KernelBuild, architecture: str) -> None:
    """One line before the first kernel that this process compiles; a warning, since that is shown by default."""
    global _said
    if not _said and not _cache_path(build, architecture).exists():
        _said = True
        _log.warning(
            "detkern compiles CUDA kernels as calls need them, seconds each, once; `detkern build cuda` compiles all "
            "ahead"
        )


def _load(device: int, capability: tuple[int, int], build: KernelBuild, stream: int) -> Any:
    from cupy.cuda import driver, function

    if _capturing(stream):
        raise DeviceError(
            f"the kernel {build.source} is not loaded on cuda:{device} yet and cannot be while a graph is captured; "
            "make the same call once before the capture"
        )
    architecture = loaded_architecture(capability)
    _say_once(build, architecture)
    image = compiled_image(build, architecture)
    try:
        module = function.Module()
        module.load(image)
        kernel = module.get_function(build.entry)
        driver.funcSetAttribute(kernel.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, build.shared_bytes)
    except driver.CUDADriverError as error:
        raise DeviceError(f"cuda:{device} did not load {build}: {error}") from error
    return kernel
