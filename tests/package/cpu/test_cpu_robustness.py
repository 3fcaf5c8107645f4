"""The CPU backend where processes are unkind: forks, threads, modes, no compiler, no home, no memory; and other
machines."""

from __future__ import annotations

import ast
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from c_library import HEADER, STUB
from test_cpu_backend import PAIRS, block_scaled, differing, gemm

import detkern
from detkern import config
from detkern.abi.build import Recipe, build, find_compiler
from detkern.abi.library import Library
from detkern.cpu import backend, compiled, threads
from detkern.files import sealed
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary import operands
from detkern.vocabulary.arithmetic.float_environment import default_float_environment
from detkern.vocabulary.contracts import CONTRACTS, FMA, FP8_BLOCK128, MMA16, TREE, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

# Of modules that a child imports: this one, and the helpers.
FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
SOURCES = Path(compiled.__file__).parent


@pytest.fixture(autouse=True, scope="module")
def native_library() -> Library:
    library = backend.library()
    assert library is not None
    return library


def operand_pair(dtype: DType, shape: tuple[int, int, int], kind: str = "wide") -> tuple[np.ndarray, np.ndarray]:
    m, n, k = shape
    return operands.generate(kind, dtype, (m, k), 1), operands.generate(kind, dtype, (k, n), 2)


# --- forks and threads ---


def test_a_forked_child_computes_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "num_threads", 4)
    a, b = operand_pair(BF16, (80, 96, 300))
    want = [gemm(contract, a, b) for contract in (FMA, MMA16, TREE)]
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            gemm(FMA, a, b)

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        children = []
        for _ in range(4):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    bad = sum(differing(gemm(c, a, b), w) for c, w in zip((FMA, MMA16, TREE), want, strict=True))
                    status = 0 if bad == 0 else 2
                finally:
                    os._exit(status)
            children.append(child)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    finally:
        stop.set()
        busy.join()


def test_eight_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "num_threads", 3)
    jobs = [(contract, *operand_pair(dtype, (65 + i, 70 + i, 90))) for i, (contract, dtype) in enumerate(PAIRS[:8])]
    want = [gemm(*job) for job in jobs]
    assert differing(want[0], numpy_replay.gemm(*jobs[0], out_dtype=F32)) == 0
    barrier = threading.Barrier(8)

    def work(index: int) -> int:
        barrier.wait()
        return sum(differing(gemm(*jobs[index]), want[index]) for _ in range(30))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [0] * 8


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=lambda value: str(value))
def test_the_number_of_threads_changes_nothing(
    contract: Contract, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = operand_pair(dtype, (130, 150, 200))
    made = []
    for count in (1, 2, 7, 64, 1000):
        monkeypatch.setattr(config, "num_threads", count)
        made.append(gemm(contract, a, b))
    assert [differing(made[0], other) for other in made[1:]] == [0] * 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_calls_leave_the_callers_affinity_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc takes a thread that has ended for the caller: now and then a call moved its thread off a core, for good."""
    monkeypatch.setattr(config, "num_threads", 4)
    a, b = np.ones((64, 256), np.float32), np.ones((256, 64), np.float32)
    before = os.sched_getaffinity(0)
    try:
        for _ in range(5000):
            detkern.gemm(a, b, backend="cpu")
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)


def test_affinity_and_quotas_limit_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    inner = root / "outer" / "inner"
    inner.mkdir(parents=True)
    groups.write_text("0::/outer/inner\n")
    assert threads.cgroup_cpus(groups, root) is None
    (inner / "cpu.max").write_text("max 100000\n")
    (root / "outer" / "cpu.max").write_text("250000 100000\n")
    threads.cgroup_cpus.cache_clear()
    assert threads.cgroup_cpus(groups, root) == 3
    (inner / "cpu.max").write_text("50000 100000\n")
    threads.cgroup_cpus.cache_clear()
    assert threads.cgroup_cpus(groups, root) == 1
    groups.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    old = root / "cpu,cpuacct"
    (old / "job").mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("-1")
    (old / "job" / "cpu.cfs_quota_us").write_text("200000")
    (old / "job" / "cpu.cfs_period_us").write_text("100000")
    threads.cgroup_cpus.cache_clear()
    assert threads.cgroup_cpus(groups, root) == 2
    threads.cgroup_cpus.cache_clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    for quota, count in ((None, 6), (4, 4), (9, 6)):
        monkeypatch.setattr(threads, "cgroup_cpus", lambda quota=quota: quota)
        assert threads.available() == count


# --- the caller's floating-point modes ---

MODES = """
#include <fenv.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
extern "C" unsigned long get() { return _mm_getcsr() & ~0x3fu; }  // but for the sticky flags
extern "C" void set(unsigned long value) { _mm_setcsr(static_cast<unsigned>(value)); }
extern "C" unsigned long flushing() { return get() | 0x8040; }
#else
extern "C" unsigned long get() { unsigned long v; asm volatile("mrs %0, fpcr" : "=r"(v)); return v; }
extern "C" void set(unsigned long value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
extern "C" unsigned long flushing() { return get() | 1ul << 24; }
#endif
extern "C" unsigned long rounding(int mode) {
  // Restored as a whole: on x86-64 it is the x87 unit's too, which set() does not reach.
  const int before = fegetround();
  fesetround(mode == 0 ? FE_UPWARD : mode == 1 ? FE_DOWNWARD : FE_TOWARDZERO);
  const unsigned long result = get();
  fesetround(before);
  return result;
}
"""


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """get() and set() of the thread's control register, and its values with a mode changed."""
    folder = tmp_path_factory.mktemp("modes")
    (folder / "modes.cpp").write_text(MODES)
    library = folder / "modes.so"
    command = [*find_compiler().command, "-O1", "-shared", "-fPIC", str(folder / "modes.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    made = ctypes.CDLL(str(library))
    for name in ("get", "flushing", "rounding"):
        getattr(made, name).restype = ctypes.c_ulong
    made.set.argtypes = [ctypes.c_ulong]
    return made


@contextmanager
def mode(modes: ctypes.CDLL, value: int) -> Iterator[None]:
    before = modes.get()
    modes.set(value)
    try:
        yield
        assert modes.get() == value
    finally:
        modes.set(before)


def mode_values(modes: ctypes.CDLL) -> list[int]:
    roundings = [modes.rounding(number) for number in range(3)]
    return [modes.flushing(), *roundings, modes.flushing() | roundings[0]]


@pytest.mark.parametrize("count", [1, 4])
def test_the_callers_modes_do_not_matter_and_come_back(
    modes: ctypes.CDLL, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "num_threads", count)
    shape = (60, 64, 300)
    cases = [(c, operand_pair(d, shape, kind), d) for c, d in PAIRS for kind in ("normal", "subnormal")]
    want = [gemm(contract, *pair, out_dtype=dtype) for contract, pair, dtype in cases]
    eights = [
        operands.generate("normal", d, s, 3) for d, s in zip(FP8_BLOCK128.operands, ((9, 128), (128, 9)), strict=True)
    ]
    scales = operands.generate("subnormal", F32, (9, 1), 4), operands.generate("normal", F32, (1, 9), 5)
    out = np.empty((9, 9), np.float32)
    want_fp8 = block_scaled(eights[0], scales[0], eights[1], scales[1], out).copy()
    assert np.abs(want_fp8).min() < 2**-126  # something for a flush to flush
    for value in mode_values(modes):
        got = []
        with mode(modes, value):
            for contract, pair, dtype in cases:
                got.append(gemm(contract, *pair, out_dtype=dtype))
            block_scaled(eights[0], scales[0], eights[1], scales[1], out)
        assert differing(out, want_fp8) == 0
        for (contract, _, dtype), one, other in zip(cases, got, want, strict=True):
            assert differing(one, other) == 0, (hex(value), contract, dtype)


def test_numpy_is_shielded_from_the_callers_modes(modes: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(c, operand_pair(d, (3, 4, 40), "subnormal")) for c, d in ((FMA, F32), (MMA16, BF16), (TREE, F16))]
    want = [gemm(contract, *pair) for contract, pair in cases]
    monkeypatch.setattr(backend, "library", lambda: None)
    for value in mode_values(modes):
        got = []
        with mode(modes, value):
            for contract, pair in cases:
                got.append(gemm(contract, *pair))
        assert [differing(one, other) for one, other in zip(got, want, strict=True)] == [0] * 3
    with mode(modes, modes.flushing()), pytest.raises(KeyError), default_float_environment():
        raise KeyError


def test_loading_the_library_sets_no_mode(modes: ctypes.CDLL, native_library: Library, tmp_path: Path) -> None:
    copy = shutil.copy(native_library.path, tmp_path / "copy.so")  # a new file: its constructors run
    before = modes.get()
    Library(copy)
    assert modes.get() == before


# --- builds in hostile places ---

CHILD = """
import logging, sys, warnings
logging.basicConfig()
sys.path[:0] = sys.argv[1:]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import numpy as np
    from detkern.cpu import backend
    from test_cpu_robustness import CONTRACTS, digest_of_small_products
    first, second = digest_of_small_products(), digest_of_small_products()
said = [str(w.message) for w in caught if "NumPy version serves" in str(w.message)]
library = backend.library()
print(first, first == second, len(said), library and library.path.parent, said)
"""


def digest_of_small_products() -> str:
    made = []
    for contract in CONTRACTS.values():
        if contract != FP8_BLOCK128:
            made.append(gemm(contract, *operand_pair(contract.operands[-1], (9, 17, 70))))
    return operands.digest(np.stack(made))


def start_child(environment: dict[str, str]) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DETKERN", "XDG", "CXX"))}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *FOLDERS], env={**kept, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def quick_compiler(folder: Path) -> tuple[Path, Path]:
    """A compiler that takes seconds instead of tens of them, and the file in which it notes its calls."""
    script, log = folder / "quick-c++", folder / "calls"
    compiler = " ".join(find_compiler().command)
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> {log}\nexec {compiler} "$@" -O0\n')
    script.chmod(0o755)
    return script, log


def test_eight_processes_build_at_once_with_a_read_only_home(tmp_path: Path) -> None:
    script, log = quick_compiler(tmp_path)
    no_home = tmp_path / "file"
    no_home.write_text("")  # below a file nothing can be made, by root either
    environment = {"HOME": str(no_home), "TMPDIR": str(tmp_path), "CXX": str(script)}
    children = [start_child(environment) for _ in range(8)]
    answers = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * 8, answers[0][1]
    expected = f"{digest_of_small_products()} True 0 {tmp_path / f'detkern-{os.getuid()}'} []\n"
    assert [out for out, _ in answers] == [expected] * 8
    assert all(str(no_home) in err and "cannot be written" in err for _, err in answers)
    assert len(log.read_text().splitlines()) == len(compiled.recipe().sources) + 1


@pytest.mark.parametrize("choice", ["no compiler", "failing compiler", "asked for"])
def test_numpy_serves_without_a_library_and_says_so_once(tmp_path: Path, choice: str) -> None:
    environment = {"DETKERN_CACHE_DIR": str(tmp_path)}
    if choice == "no compiler":
        environment |= {"CXX": "no-such-c++"}
    elif choice == "failing compiler":
        script = tmp_path / "broken-c++"
        script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho internal compiler error\nexit 4\n')
        script.chmod(0o755)
        environment |= {"CXX": str(script)}
    else:
        environment |= {"DETKERN_CPU": "numpy"}
    child = start_child(environment)
    out, err = child.communicate()
    assert child.returncode == 0, err
    said = 0 if choice == "asked for" else 1
    assert out.startswith(f"{digest_of_small_products()} True {said} None "), out
    assert {"no compiler": "no-such-c++: not found", "failing compiler": "internal compiler error"}.get(
        choice, ""
    ) in out


def test_the_library_may_be_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Library:
        raise backend.BuildError("no compiler here")

    monkeypatch.setattr(compiled, "load", refuse)
    monkeypatch.setenv("DETKERN_CPU", "native")
    with pytest.raises(backend.BuildError, match="no compiler here"):
        backend.library.__wrapped__()
    monkeypatch.setenv("DETKERN_CPU", "gpu")
    with pytest.raises(backend.ArgumentError, match="auto, numpy or native"):
        backend.library.__wrapped__()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(backend.BuildError, match="not on darwin"):
        compiled.load()


def test_a_library_that_this_system_cannot_load_is_built_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a machine with a newer C++ runtime: whole, and of no use."""
    source = tmp_path / "stub.cpp"
    source.write_text(f'#include "{HEADER}"\n{STUB}')
    small = Recipe("detkern-cpu", (source,), (), ("-O0", "-fPIC"), ("-shared",))
    monkeypatch.setattr(compiled, "recipe", lambda: small)
    monkeypatch.setattr(config, "cache_dir", tmp_path)
    path = build(small)
    path.write_bytes(sealed.sealed(b"needs a newer loader"))
    with monkeypatch.context() as without:
        without.setenv("CXX", "no-such-c++")
        with pytest.raises(
            backend.BackendUnavailable, match=rf"{path} cannot be loaded: .* built here: .*no-such-c\+\+: not found"
        ):
            compiled.load()
    assert compiled.load().name == "stub"
    assert sealed.damage(path) is None


GARBAGE_ELSEWHERE = {
    "CXX": ('g++ "', 'CXX=g++ " is not a command: No closing quotation'),
    "DETKERN_CACHE_DIR": (str(Path(__file__)), "(DETKERN_CACHE_DIR) cannot be written"),
}


@pytest.mark.parametrize("variable", GARBAGE_ELSEWHERE)
def test_garbage_in_a_variable_leaves_numpy_which_names_it(variable: str, tmp_path: Path) -> None:
    value, said = GARBAGE_ELSEWHERE[variable]
    child = start_child({"DETKERN_CACHE_DIR": str(tmp_path), variable: value})
    out, err = child.communicate()
    assert child.returncode == 0, err
    assert out.startswith(f"{digest_of_small_products()} True 1 None "), out
    assert said in ast.literal_eval(out.split(" None ")[1])[0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DETKERN_NUM_THREADS", "abc"),
        ("DETKERN_CPU", "fast"),
        ("DETKERN_CONTRACT", "tf32"),
        ("DETKERN_CACHE_DIR", "~nobody-here/x"),
    ],
)
def test_garbage_in_a_setting_is_a_typed_error_that_names_it(variable: str, value: str) -> None:
    code = "import numpy as np, detkern\ntry: detkern.gemm(np.ones((2, 2)), np.ones((2, 2)))\n"
    code = code.replace("np.ones((2, 2))", "np.ones((2, 2), np.float32)")
    code += "except detkern.DetkernError as error: print(error)"
    environment = {**os.environ, variable: value}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert variable in ran.stdout
    assert value.partition("/")[0] in ran.stdout


# --- memory ---

MEMORY = """
import resource, sys
sys.path[:0] = sys.argv[1:]
import numpy as np
import detkern
from detkern import config
from detkern.vocabulary.contracts import CONTRACTS
from detkern.errors import DeviceError
from test_cpu_robustness import BF16, gemm, operand_pair, differing

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
"""

PEAK = """
config.num_threads = 64
a, b = np.ones((2000, 1024), BF16.numpy), np.ones((1024, 2000), BF16.numpy)
for name in ("fma", "mma16", "tree-mma16"):
    gemm(CONTRACTS[name], a[:64], b[:, :64])
    out = np.zeros((2000, 2000), np.float32) + 1
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = status("VmRSS")
    gemm(CONTRACTS[name], a[:, :256], b[:256], out=out)
    print(status("VmHWM") - before)
"""

EXHAUSTED = """
config.num_threads = 1
small = operand_pair(BF16, (96, 96, 4096))
large = operand_pair(BF16, (600, 2000, 300))
want = gemm(CONTRACTS["fma"], *small)
out = np.full((600, 2000), 7, np.float32)
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + (3 << 20), resource.RLIM_INFINITY))
config.num_threads = 4
got = gemm(CONTRACTS["fma"], *small, out=np.empty_like(want))  # no room for a thread's stack
config.num_threads = 64
try:
    gemm(CONTRACTS["fma"], *large, out=out)
except DeviceError as error:
    message = str(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(differing(got, want), (out == 7).all(), message)
"""


def run_memory(script: str) -> str:
    command = [sys.executable, "-c", MEMORY + script, *FOLDERS]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_scratch_stays_under_64_mib_whatever_the_threads() -> None:
    peaks = [int(line) for line in run_memory(PEAK).splitlines()]
    assert len(peaks) == 3
    assert max(peaks) <= 64 << 20


def test_no_memory_is_slower_or_an_error_and_out_is_untouched() -> None:
    answer = run_memory(EXHAUSTED)
    assert answer.startswith("0 True "), answer
    assert "out of memory" in answer


# --- other machines ---


def test_a_machine_without_vector_instructions_has_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oldest = {"x86_64": "-march=x86-64", "aarch64": "-march=armv8-a"}[platform.machine()]
    changed = {"-O3": "-O0", "-march=native": oldest, "-mcpu=native": oldest}
    recipe = compiled.recipe()
    recipe = replace(recipe, flags=tuple(changed.get(flag, flag) for flag in recipe.flags))
    other = Library(build(recipe, folder=tmp_path))
    assert "portable" in other.name
    cases = [
        (contract, *operand_pair(dtype, shape, kind))
        for contract, dtype in PAIRS
        for shape in ((7, 40, 70), (40, 3, 257))
        for kind in ("wide", "subnormal", "bits", "special")
    ]
    want = [gemm(*case) for case in cases]
    transposed = [gemm(c, np.asfortranarray(a), np.asfortranarray(b), out_dtype=F16) for c, a, b in cases]
    eights = [
        operands.generate("bits", d, s, 3) for d, s in zip(FP8_BLOCK128.operands, ((9, 256), (256, 9)), strict=True)
    ]
    scales = operands.generate("wide", F32, (9, 2), 4), operands.generate("wide", F32, (2, 9), 5)
    want_fp8 = block_scaled(eights[0], scales[0], eights[1], scales[1], np.empty((9, 9), np.float32))
    monkeypatch.setattr(backend, "library", lambda: other)
    for case, one, two in zip(cases, want, transposed, strict=True):
        contract, a, b = case
        assert differing(gemm(*case), one) == 0, (contract, a.dtype)
        assert differing(gemm(contract, np.asfortranarray(a), np.asfortranarray(b), out_dtype=F16), two) == 0
    assert (
        differing(block_scaled(eights[0], scales[0], eights[1], scales[1], np.empty((9, 9), np.float32)), want_fp8) == 0
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-512 is x86-64's")
def test_the_avx512_form_compiles(tmp_path: Path) -> None:
    flags = ["-march=skylake-avx512" if flag.startswith("-march") else flag for flag in compiled.recipe().flags]
    for source in ("tree.cpp", "packing.cpp"):
        command = [*find_compiler().command, *flags, "-O0", "-S", str(SOURCES / source), "-o", str(tmp_path / "out.s")]
        subprocess.run(command, check=True)
        assert "zmm" in (tmp_path / "out.s").read_text()
