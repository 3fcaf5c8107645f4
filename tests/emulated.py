"""The NPU kernels' own sources as libraries that run here: compiled for the host against tests/emulation, kept in the
cache folder by the digest of everything they are made of; and the MUSA one by nvcc, for an NVIDIA GPU."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from detkern import abi, npu
from detkern.abi.build import Recipe, build, cache_folder
from detkern.cpu import compiled
from detkern.npu import ascend, musa

EMULATION = Path(__file__).with_name("emulation")
NPU = Path(npu.__file__).parent
SOURCES = {"musa": EMULATION / "musa" / "library.cpp", "ascend": NPU / "ascend" / "det_gemm.cpp"}


def recipe(platform: str) -> Recipe:
    """The recipe of a platform's emulated library; its arithmetic flags are those of the CPU backend's library."""
    suffixes = ("*.h", "*.mu", "*.muh")
    folders = (EMULATION, NPU, Path(abi.__file__).parent, Path(compiled.__file__).parent)
    headers = [path for folder in folders for suffix in suffixes for path in folder.rglob(suffix)]
    return Recipe(
        name=f"detkern-emulated-{platform}",
        sources=(SOURCES[platform],),
        headers=tuple(sorted(headers)),
        flags=(
            *compiled.recipe().flags, "-O1", "-ftree-vectorize", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
            "-U_FORTIFY_SOURCE",
            f"-I{EMULATION / platform}",
        ),
        link_flags=("-shared",),
    )  # fmt: skip


@functools.cache
def library_path(platform: str) -> Path:
    """The library, built if need be."""
    return build(recipe(platform))


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Both libraries named as a user names them."""
    with pytest.MonkeyPatch.context() as patch:
        for platform in (musa.PLATFORM, ascend.PLATFORM):
            patch.setenv(platform.variable, str(library_path(platform.name)))
        yield


def nvcc() -> str | None:
    """NVIDIA's compiler, where there is one."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def library_for_cuda(architecture: str) -> Path:
    """The MUSA source as a library for an NVIDIA GPU ("sm_90"), built by nvcc if need be."""
    compiler = nvcc()
    assert compiler is not None
    options = [
        "-x", "cu", "-std=c++17", "-O3", "-fmad=false", f"-arch={architecture}", "--split-compile=0", "-shared",
        "-Xcompiler", "-fPIC", f"-I{EMULATION / 'cuda_shim'}",
    ]  # fmt: skip
    source = NPU / "musa" / "det_gemm.mu"
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [*options, version, source.read_text(), *(path.read_text() for path in recipe("musa").headers)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    library = cache_folder() / f"detkern-musa-by-nvcc-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            done = subprocess.run(
                [compiler, *options, str(source), "-o", str(made)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            made.replace(library)
    return library
