"""From kernel source to loaded function: architectures, NVRTC's log, the cache on disk,
and what a capture may not do."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from detkern import config
from detkern.cu import ahead, loader
from detkern.cu.loader import KernelBuild
from detkern.errors import BuildError, DeviceError
from detkern.files import sealed

pytest.importorskip("cupy", reason="CuPy is not installed")

BUILD = KernelBuild("tiny.cu", (("VALUE", 7),), 0)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of small sources, and a cache that is empty."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cu").write_text(
        '#include "inner.cuh"\nextern "C" __global__ void detkern_kernel(int* out) { *out = inner() + VALUE; }\n'
    )
    (sources / "inner.cuh").write_text('#pragma once\n#include "innermost.cuh"\n')
    (sources / "innermost.cuh").write_text("#pragma once\n__device__ int inner() { return 1; }\n")
    monkeypatch.setattr(loader, "FOLDER", sources)
    monkeypatch.setattr(config, "cache_dir", tmp_path / "cache")
    loader.read_sources.cache_clear()
    yield sources
    loader.read_sources.cache_clear()


SUPPORTED = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.mark.parametrize(
    ("capability", "supported", "expected"),
    [
        ((8, 0), SUPPORTED, "sm_80"),
        ((8, 6), SUPPORTED, "sm_86"),
        ((8, 9), SUPPORTED, "sm_89"),
        ((9, 0), SUPPORTED, "sm_90a"),
        ((10, 0), SUPPORTED, "sm_100a"),
        ((10, 3), SUPPORTED, "sm_103"),
        ((10, 3), (90, 100), "sm_100"),  # sm_100a code runs on 10.0 alone
        ((12, 0), SUPPORTED, "sm_120"),
        ((12, 1), (90, 120), "sm_120"),
        ((13, 0), SUPPORTED, "compute_121"),
        ((10, 0), (80, 90), "compute_90"),  # an older NVRTC
        ((9, 0), (80, 86), "compute_86"),
    ],
)
def test_target_of_a_capability(capability: tuple[int, int], supported: tuple[int, ...], expected: str) -> None:
    assert loader.target(capability, supported) == expected


def test_a_capability_older_than_everything_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"does not compile for compute capability 7\.0, only for sm_75, sm_80"):
        loader.target((7, 0), (75, 80))


def test_sources_are_followed_through_their_includes(folder: Path) -> None:
    assert [name for name, _ in loader.read_sources("tiny.cu")] == ["tiny.cu", "inner.cuh", "innermost.cuh"]
    before = loader.source_digest(("tiny.cu",))
    (folder / "innermost.cuh").write_text("#pragma once\n__device__ int inner() { return 2; }\n")
    loader.read_sources.cache_clear()
    assert loader.source_digest(("tiny.cu",)) != before


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "compute_90"])
def test_an_image_is_whole(architecture: str, folder: Path) -> None:
    """A cubin is an ELF file whose headers lie inside it; PTX is text that names its entry."""
    image, _ = loader.compile_kernel(BUILD, architecture)
    if architecture.startswith("compute_"):
        assert b".entry detkern_kernel" in image
        return
    assert image.startswith(b"\x7fELF")
    program, section = (int.from_bytes(image[at : at + 8], "little") for at in (32, 40))
    sizes = [int.from_bytes(image[at : at + 2], "little") for at in (54, 56, 58, 60)]
    assert max(program + sizes[0] * sizes[1], section + sizes[2] * sizes[3]) <= len(image)


def test_a_pipe_in_the_cache_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # In another process: a fault here hangs.
    asked = (
        f"from pathlib import Path; from detkern.cu.loader import _read; print(_read(Path({str(tmp_path / 'pipe')!r})))"
    )
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=30, check=True).stdout
    assert said == "None\n"


def test_kernels_are_named_for_what_they_compute() -> None:
    """A profiler shows the names: of all builds of a device each has its own, an identifier."""
    from detkern.cu import column_sum, rows
    from detkern.cu.backend import offered

    builds = [*ahead.builds(offered((9, 0)), (9, 0)), *column_sum.builds(), *rows.builds((9, 0))]
    names = [build.entry for build in builds]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name.startswith("detkern_") for name in names)
    assert any(name.startswith("detkern_gemm_mma16_bf16_128x192x64x5_in_turn_KK") for name in names)
    assert any(name.startswith("detkern_bias_gradient_f32_") for name in names)
    assert any(name.startswith("detkern_rows_SOFTMAX_bf16_") for name in names)


def test_a_named_kernel_is_found_by_its_name(folder: Path) -> None:
    image, _ = loader.compile_kernel(KernelBuild("tiny.cu", (("VALUE", 7),), 0, "tiny f32 8x8"), "compute_90")
    assert b".entry detkern_tiny_f32_8x8(" in image


def test_a_refused_source_shows_the_compilers_words(folder: Path) -> None:
    with pytest.raises(BuildError) as caught:
        loader.compile_kernel(KernelBuild("tiny.cu", (), 0), "sm_90a")
    assert "NVRTC refused tiny.cu for sm_90a" in str(caught.value)
    assert 'tiny.cu(2): error: identifier "VALUE" is undefined' in str(caught.value)


def test_options_reach_the_compiler(folder: Path) -> None:
    _, log = loader.compile_kernel(BUILD, "sm_90a", ("--ptxas-options=-v",))
    assert "Used" in log
    assert "\0" not in log


def test_contraction_is_off(folder: Path) -> None:
    (folder / "tiny.cu").write_text(
        'extern "C" __global__ void detkern_kernel(float* x) { x[0] = x[1] * x[2] + x[3]; }\n'
    )
    loader.read_sources.cache_clear()
    image, _ = loader.compile_kernel(BUILD, "compute_90")
    assert b"fma" not in image
    assert b"mul.rn.f32" in image or b"mul.f32" in image
    assert b".ftz" not in image


def _count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    real = loader.compile_kernel

    def compile_kernel(*arguments: Any) -> Any:
        made.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(loader, "compile_kernel", compile_kernel)
    return made


def test_compiled_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _count_compilations(monkeypatch)
    first = loader.compiled_image(BUILD, "sm_90a")
    assert loader.compiled_image(BUILD, "sm_90a") == first
    assert len(made) == 1
    loader.compiled_image(BUILD, "sm_80")
    loader.compiled_image(KernelBuild("tiny.cu", (("VALUE", 8),), 0), "sm_90a")
    assert len(made) == 3
    (folder / "innermost.cuh").write_text("#pragma once\n__device__ int inner() { return 2; }\n")
    loader.read_sources.cache_clear()
    assert loader.compiled_image(BUILD, "sm_90a") != first
    assert len(made) == 4
    assert config.cache_dir is not None
    assert not list((config.cache_dir / "cuda").glob(".*")), "no temporary file stays"


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:40], lambda content: b""])
def test_a_damaged_file_is_compiled_again(damage: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _count_compilations(monkeypatch)
    image = loader.compiled_image(BUILD, "sm_90a")
    assert config.cache_dir is not None
    (kept,) = (config.cache_dir / "cuda").glob("*.cubin")
    kept.write_bytes(damage(kept.read_bytes()))
    assert loader.compiled_image(BUILD, "sm_90a") == image
    assert len(made) == 2
    assert loader.compiled_image(BUILD, "sm_90a") == image
    assert len(made) == 2


def test_a_cache_that_cannot_be_written_is_said_and_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = _count_compilations(monkeypatch)
    image = loader.compiled_image(BUILD, "sm_90a")
    # A file where a folder should be is unwritable for root as well.
    monkeypatch.setattr(config, "cache_dir", folder / "tiny.cu")
    with caplog.at_level(logging.WARNING, "detkern"):
        assert loader.compiled_image(BUILD, "sm_90a") == image
    assert "cannot be written" in caplog.text
    assert len(made) == 2


def test_kernels_are_compiled_ahead_by_several_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the package's own sources, since the processes begin afresh: the smallest kernel,
    twice in different types."""
    monkeypatch.setenv("DETKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config, "cache_dir", tmp_path)
    from detkern.cu.gemm_tile import Load, build_for, tiles_for
    from detkern.vocabulary.contracts import FMA
    from detkern.vocabulary.dtypes import F32

    wanted = build_for(FMA, F32, tiles_for(FMA, F32)[-1], Load.MN_MAJOR, Load.MN_MAJOR)
    assert [build for build, _ in ahead.compile_ahead([wanted], "sm_80", 1)] == [wanted]
    assert len(list((tmp_path / "cuda").glob("fma-sm_80-*.cubin"))) == 1
    bad = KernelBuild("fma.cu", (), 0)
    with pytest.raises(BuildError, match="NVRTC refused"):
        list(ahead.compile_ahead([bad], "sm_80", 1))


class _Cuda:
    """cupy.cuda's driver, runtime and function modules, as far as loading goes."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    class CUDADriverError(Exception):
        pass

    class CUDARuntimeError(Exception):
        pass

    def __init__(self) -> None:
        self.loaded = 0
        self.attributes: list[Any] = []
        self.capturing: bool | Exception = False
        self.refuse = False
        outer = self

        class Module:
            def load(self, image: bytes) -> None:
                if outer.refuse:
                    raise outer.CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")
                outer.loaded += 1

            def get_function(self, name: str) -> Any:
                assert name == "detkern_kernel"
                return types.SimpleNamespace(ptr=99, module=self)

        self.Module = Module

    def runtimeGetVersion(self) -> int:
        return 13000

    def streamIsCapturing(self, stream: int) -> bool:
        if isinstance(self.capturing, Exception):
            raise self.capturing
        return self.capturing

    def funcSetAttribute(self, *arguments: int) -> None:
        self.attributes.append(arguments)


@pytest.fixture
def cuda(folder: Path, monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    fake = _Cuda()
    module = types.ModuleType("cupy.cuda")
    module.driver = module.runtime = module.function = fake  # type: ignore[attr-defined]
    module.nvrtc = sys.modules["cupy.cuda"].nvrtc  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy.cuda", module)
    monkeypatch.setattr(loader, "_functions", {})
    return fake


def test_a_kernel_is_loaded_once_a_device_with_its_shared_memory(cuda: _Cuda) -> None:
    build = KernelBuild("tiny.cu", (("VALUE", 7),), 98304)
    first = loader.load_function(0, (9, 0), build, 5)
    assert loader.load_function(0, (9, 0), build, 5) is first
    assert loader.load_function(1, (9, 0), build, 5) is not first
    assert cuda.loaded == 2
    assert cuda.attributes == [(99, 8, 98304)] * 2


def test_threads_load_a_kernel_once(cuda: _Cuda) -> None:
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(loader.load_function(0, (9, 0), BUILD, 0))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cuda.loaded == 1
    assert len({id(function) for function in found}) == 1
    assert len(found) == 8


@pytest.mark.parametrize("capturing", [True, _Cuda.CUDARuntimeError("cudaErrorStreamCaptureImplicit: …")])
def test_nothing_is_loaded_while_a_graph_is_captured(capturing: Any, cuda: _Cuda) -> None:
    cuda.capturing = capturing
    with pytest.raises(DeviceError, match=r"tiny\.cu is not loaded on cuda:0 yet .* once before the capture"):
        loader.load_function(0, (9, 0), BUILD, 5)
    assert cuda.loaded == 0
    cuda.capturing = False
    function = loader.load_function(0, (9, 0), BUILD, 5)
    cuda.capturing = capturing
    assert loader.load_function(0, (9, 0), BUILD, 5) is function


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> Any:
    def remove() -> None:
        def missing() -> Any:
            raise BuildError("compiling a CUDA kernel needs NVRTC")

        monkeypatch.setattr(loader, "_nvrtc", missing)

    return remove


def test_a_filled_cache_serves_without_nvrtc(cuda: _Cuda, no_nvrtc: Any) -> None:
    loader.compiled_image(BUILD, "sm_90a")
    no_nvrtc()
    assert loader.loaded_architecture((9, 0)) == "sm_90a"
    loader.load_function(0, (9, 0), BUILD, 0)
    assert cuda.loaded == 1
    for capability, build in (((8, 0), BUILD), ((9, 0), KernelBuild("tiny.cu", (("VALUE", 8),), 0))):
        with pytest.raises(BuildError, match="needs NVRTC"):
            loader.load_function(1, capability, build, 0)


def test_without_cupy_the_error_is_the_one_that_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: loader.compiled_image(BUILD, "sm_90a"), lambda: loader.loaded_architecture((9, 0))):
        with pytest.raises(BuildError, match="needs CuPy, which cannot be imported"):
            call()


def test_without_nvrtc_the_newest_of_the_same_cuda_serves(cuda: _Cuda, no_nvrtc: Any) -> None:
    image = loader.compiled_image(BUILD, "sm_90a")
    assert config.cache_dir is not None
    (kept,) = (config.cache_dir / "cuda").glob("tiny-sm_90a-*.cubin")
    stem = kept.name.partition("-nvrtc")[0]
    kept.unlink()
    for version, content in (("12.9", b"older CUDA"), ("13.2", b"older"), ("13.10", image), ("14.0", b"newer CUDA")):
        kept.with_name(f"{stem}-nvrtc{version}.cubin").write_bytes(sealed.sealed(content))
    no_nvrtc()
    assert loader.compiled_image(BUILD, "sm_90a") == image


def test_the_first_compilation_of_a_process_is_said(
    cuda: _Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "_said", False)
    loader.compiled_image(BUILD, "sm_90a")
    with caplog.at_level(logging.WARNING, "detkern"):
        loader.load_function(0, (9, 0), BUILD, 0)
        assert caplog.messages == []  # it was in the cache
        for value in (8, 9):
            loader.load_function(0, (9, 0), KernelBuild("tiny.cu", (("VALUE", value),), 0), 0)
    (message,) = caplog.messages
    assert "compiles CUDA kernels as calls need them" in message
    assert "`detkern build cuda` compiles all ahead" in message


def test_a_driver_that_refuses_the_image_is_a_device_error(cuda: _Cuda) -> None:
    cuda.refuse = True
    with pytest.raises(DeviceError, match=r"cuda:0 did not load tiny\.cu -DVALUE=7: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        loader.load_function(0, (9, 0), BUILD, 5)


def test_processes_share_a_cache(folder: Path, tmp_path: Path) -> None:
    """Eight at once write the same file; each reads a whole one."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def work() -> None:
        answers.put(len(loader.compiled_image(BUILD, "sm_90a")))

    workers = [context.Process(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    sizes = {answers.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(sizes) == 1
    assert len(os.listdir(tmp_path / "cache" / "cuda")) == 1


ON_A_DEVICE = """
import subprocess
import sys
import cupy, numpy
import detkern
from detkern.cu import loader

def missing():
    raise detkern.BuildError("no NVRTC here")

if sys.argv[1] == "no nvrtc":
    loader._nvrtc = missing
a = cupy.asarray(numpy.arange(64 * 64, dtype=numpy.float32).reshape(64, 64) / 7)
print(detkern.gemm(a, a, contract="fma", backend="cuda").get().tobytes().hex())
"""


@pytest.mark.gpu
def test_a_damaged_cache_and_one_without_nvrtc_on_a_device(tmp_path: Path) -> None:
    def run(choice: str) -> tuple[str, bool]:
        environment = {**os.environ, "DETKERN_CACHE_DIR": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, "-c", ON_A_DEVICE, choice], env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout, "compiles CUDA kernels as calls need them" in ran.stderr

    first, said = run("with nvrtc")
    assert said
    assert run("no nvrtc") == (first, False)
    kept = list((tmp_path / "cuda").glob("*.cubin"))
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[:5000])
    assert run("with nvrtc")[0] == first
    assert all(sealed.damage(path) is None for path in kept)
    assert run("no nvrtc") == (first, False)
