"""The emulation headers themselves: barriers and shared memory of a block of threads; every mistake in waiting,
addressing and queueing that the Ascend C one has to find."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from emulated import EMULATION, NPU, nvcc, recipe

from detkern.abi.build import Recipe, build
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F32


@pytest.fixture(scope="module")
def probes() -> dict[str, ctypes.CDLL]:
    """The small kernels of tests/emulation/probes, compiled against the headers."""
    loaded = {}
    for name, platform in (("musa", "musa"), ("ascend", "ascend"), ("exact_fma", "ascend")):
        made = recipe(platform)
        source: Path = EMULATION / "probes" / f"{name}.cpp"
        path = build(Recipe(f"probe-{name}", (source,), made.headers, (*made.flags, "-O0"), made.link_flags))
        loaded[name] = ctypes.CDLL(str(path))
    loaded["ascend"].run.restype = ctypes.c_char_p
    return loaded


def reverse(probe: ctypes.CDLL, count: int, grid: int, barrier: bool) -> np.ndarray:
    data = np.arange(4 * count, dtype=np.int32)
    assert probe.run(ctypes.c_void_p(data.ctypes.data), count, grid, int(barrier)) == 0
    return data.reshape(4, count)


@pytest.mark.parametrize(("count", "grid"), [(1, 1), (32, 3), (255, 4), (1024, 2)])
def test_threads_of_a_block_meet_at_barriers(probes: dict[str, ctypes.CDLL], count: int, grid: int) -> None:
    want = np.arange(4 * count).reshape(4, count)[:, ::-1]
    for _ in range(3):
        assert (reverse(probes["musa"], count, grid, True) == want).all()


def test_a_missing_barrier_shows(probes: dict[str, ctypes.CDLL]) -> None:
    want = np.arange(128).reshape(4, 32)[:, ::-1]
    assert (reverse(probes["musa"], 32, 1, False) != want).any()


def test_a_launch_that_no_device_takes_is_an_error(probes: dict[str, ctypes.CDLL]) -> None:
    data = np.zeros(8, np.int32)
    for count, grid in ((1, 0), (1025, 1)):
        assert probes["musa"].run(ctypes.c_void_p(data.ctypes.data), count, grid, 1) == 1


MISTAKES = (
    None,
    r"missing wait: Add on V reads what an earlier instruction on MTE2 wrote",
    r"missing wait: Adds on V reads what an earlier instruction on V wrote",
    r"missing wait: GetValue on S reads what an earlier instruction on V wrote",
    r"missing wait: Adds on V reads what an earlier instruction on S wrote",
    r"missing wait: Adds on V writes what an earlier instruction on S reads",
    r"Adds reads local memory that was never written",
    r"Duplicate: a local address is no multiple of 32 bytes",
    r"Compare: the operands are no multiple of 256 bytes",
    r"InitBuffer: local memory is too small",
    r"AllocTensor: every buffer of the queue is in use",
    r"DeQue: the queue is empty",
    r"WaitFlag of a flag that nobody sets",
    r"the kernel ends with a flag that nobody waits for",
    r"DataCopyPad: blockCount is not in 1\.\.4095",
    r"Duplicate of more elements than the tensor has",
    r"missing wait: DataCopyPad on MTE3 reads what an earlier instruction on V wrote",
)


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_of_a_kernel_are_found(probes: dict[str, ctypes.CDLL], mistake: int) -> None:
    assert probes["ascend"].mistakes() == len(MISTAKES)
    data = np.arange(64, dtype=np.float32)
    said = probes["ascend"].run(mistake, ctypes.c_void_p(data.ctypes.data))
    expected = MISTAKES[mistake]
    if expected is None:
        assert said is None
        assert (data == 2 * np.arange(64)).all()
    else:
        assert re.search(expected, (said or b"").decode()), said


@pytest.mark.parametrize("kind", operands.KINDS)
def test_the_integer_multiply_add_rounds_once(probes: dict[str, ctypes.CDLL], kind: str) -> None:
    """Against the host's fma: factors of every kind, with addends of every kind and ones that nearly cancel the
    product."""
    count = 20000
    a, b = (operands.generate(kind, BF16, (count,), seed).astype(np.float32) for seed in (1, 2))
    with np.errstate(all="ignore"):
        opposed = -(a * b)
    addends = [
        np.nextafter(opposed, np.float32(0)),
        opposed,
        *(operands.generate(other, F32, (count,), 3) for other in operands.KINDS),
    ]
    for c in addends:
        pointers = [ctypes.c_void_p(np.ascontiguousarray(array).ctypes.data) for array in (a, b, c)]
        assert probes["exact_fma"].differing(*pointers, ctypes.c_size_t(count)) == 0


def test_nvcc_takes_the_musa_source(tmp_path: Path) -> None:
    """What test_npu_gpu.py runs; here without optimisation, for each pair of contract and type with either tile."""
    compiler = nvcc()
    if compiler is None:
        pytest.skip("gpu: nvcc is not installed")
    made = tmp_path / "musa.ptx"
    options = ["-x", "cu", "-std=c++17", "--ptx", "-Xcicc", "-O0", "-arch=sm_80", f"-I{EMULATION / 'cuda_shim'}"]
    command = [compiler, *options, str(NPU / "musa" / "det_gemm.mu"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert made.read_text().count(".entry") == 5 * 2 + 1
