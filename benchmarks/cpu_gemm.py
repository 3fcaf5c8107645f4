"""The CPU backend's speed and memory on this machine: `python -m benchmarks.cpu_gemm`.

Prints a table and writes benchmarks/results/cpu-<model>/gemm.json. NumPy's float32 matmul (OpenBLAS) is the peer, with
as many threads, in the same run, in turn with detkern. NumPy's idle threads spin for a while after a call, so each
measurement waits first. Times are medians in µs: of wall time, and of the CPU time of all threads, which is what rates
per core are taken from. The ratio to NumPy is of wall times, and with one thread of CPU times also, so that work of
others on the machine does not count. Ends with status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detkern.measure import records

FMA_TARGET = 0.7  # of NumPy's float32 rate at 1024^3
MMA16_TARGET = 2.0  # G multiply-adds a second per core, bf16
MEMORY_TARGET = 64 << 20  # bytes beyond operands and result

ROOT = Path(__file__).resolve().parent.parent
REPETITIONS = 9
PAUSE = 0.3  # seconds; OpenBLAS threads spin for tens of ms


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def timed(calls: list[Callable[[], object]]) -> list[tuple[float, float]]:
    """Median wall time and median CPU time of each call in seconds; the calls are taken in turn.

    After each pause a call is made once untimed: waking a halted virtual core takes milliseconds, for every library.
    """
    walls: list[list[float]] = [[] for _ in calls]
    cpus: list[list[float]] = [[] for _ in calls]
    for repetition in range(REPETITIONS + 1):
        for call, wall, cpu in zip(calls, walls, cpus, strict=True):
            time.sleep(PAUSE)
            call()
            start, start_cpu = time.perf_counter(), time.process_time()
            call()
            if repetition:  # the first warms up
                wall.append(time.perf_counter() - start)
                cpu.append(time.process_time() - start_cpu)
    return [(statistics.median(wall), statistics.median(cpu)) for wall, cpu in zip(walls, cpus, strict=True)]


def measure(threads: int) -> list[dict[str, Any]]:
    """The rows for one number of threads. NumPy's own number comes from this process's environment."""
    import numpy as np

    import detkern
    from detkern import config
    from detkern.api import block_scaled_gemm
    from detkern.vocabulary import operands
    from detkern.vocabulary.dtypes import BF16, E4M3, F16, F32

    config.num_threads = threads
    size = 1024
    types = {dtype.short: dtype for dtype in (F32, F16, BF16)}
    arrays = {
        name: tuple(operands.generate("normal", dtype, (size, size), seed) for seed in (1, 2))
        for name, dtype in types.items()
    }
    eights = tuple(operands.generate("normal", E4M3, (size, size), seed) for seed in (1, 2))
    scale_a, scale_b = np.ones((size, size // 128), np.float32), np.ones((size // 128, size), np.float32)

    def product(contract: str, dtype: str) -> Callable[[], object]:
        if contract == "fp8-block128":
            return lambda: block_scaled_gemm(eights[0], scale_a, eights[1], scale_b)
        a, b = arrays[dtype]
        return lambda: detkern.gemm(a, b, contract=contract)

    cases = [
        ("fma", "f32"), ("fma", "bf16"), ("fma", "f16"), ("mma16", "bf16"), ("mma16", "f16"), ("mma8", "bf16"),
        ("tree", "bf16"), ("tree-mma16", "bf16"), ("fp8-block128", "e4m3"),
    ]  # fmt: skip
    a, b = arrays["f32"]
    (peer_wall, peer_cpu), *ours = timed([lambda: a @ b, *(product(*case) for case in cases)])
    rows = []
    for (contract, dtype), (wall, cpu) in zip(cases, ours, strict=True):
        row = {
            "shape": [size, size, size], "contract": contract, "type": dtype, "threads": threads,
            "detkern_us": round(wall * 1e6, 1), "numpy_f32_us": round(peer_wall * 1e6, 1),
            "detkern_cpu_us": round(cpu * 1e6, 1), "of_numpy": round(peer_wall / wall, 3),
            "gmac_per_s_per_core": round(size**3 / cpu / 1e9, 2),
        }  # fmt: skip
        if threads == 1:  # more threads of NumPy spin while they wait, which is no work
            row |= {"numpy_f32_cpu_us": round(peer_cpu * 1e6, 1), "of_numpy_cpu": round(peer_cpu / cpu, 3)}
        rows.append(row)
    tiny = np.ones((1, 16), np.float32), np.ones((16, 8), np.float32)
    loops = 2000
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(loops):
            detkern.gemm(*tiny)
        taken_once = (time.perf_counter() - start) / loops
    rows.append(
        {
            "shape": [1, 8, 16],
            "contract": "fma",
            "type": "f32",
            "threads": threads,
            "detkern_us": round(taken_once * 1e6, 1),
        }
    )
    return rows


def measure_memory(threads: int) -> list[dict[str, Any]]:
    """Peak resident memory beyond operands and result, for products much larger than the scratch."""
    import numpy as np

    import detkern
    from detkern import config

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    import ml_dtypes

    config.num_threads = threads
    rows = []
    for contract, (m, n, k) in (
        ("fma", (3072, 3072, 2048)),
        ("mma16", (2048, 2048, 1024)),
        ("tree", (2048, 2048, 2048)),
    ):
        a, b = np.ones((m, k), ml_dtypes.bfloat16), np.ones((n, k), ml_dtypes.bfloat16).T
        out = np.ones((m, n), np.float32)
        detkern.gemm(a[:8, :64], b[:64, :8], contract=contract)
        ctypes.CDLL(None).malloc_trim(0)  # scratch of earlier calls that the allocator kept
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status("VmRSS")
        detkern.gemm(a, b, out=out, contract=contract)
        rows.append(
            {
                "shape": [m, n, k], "contract": contract, "type": "bf16", "threads": threads,
                "operands_and_result_bytes": a.nbytes + b.nbytes + out.nbytes,
                "peak_bytes_beyond": status("VmHWM") - before,
            }
        )  # fmt: skip
    return rows


def in_child(function: str, threads: int, numpy_threads: int) -> list[dict[str, Any]]:
    """`function(threads)` in a process whose OpenBLAS has that many threads and chooses its kernels by itself."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        environment[variable] = str(numpy_threads)
    code = f"import json; from benchmarks import cpu_gemm; print(json.dumps(cpu_gemm.{function}({threads})))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def sources() -> dict[str, str]:
    from detkern.cpu.compiled import recipe

    made = recipe()
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((*made.sources, *made.headers))
    }


def versions() -> dict[str, str]:
    import numpy as np

    from detkern.abi.build import find_compiler
    from detkern.cpu.backend import library

    built = library()
    return {
        "python": platform.python_version(), "numpy": np.__version__, "library": built.name if built else "numpy",
        "compiler": find_compiler().version.splitlines()[0], "system": platform.platform(),
    }  # fmt: skip


def show(row: dict[str, Any]) -> str:
    name = f"{row['contract']:13s}{row['type']:5s}{'x'.join(map(str, row['shape'])):16s}{row['threads']:2d} threads"
    if "peak_bytes_beyond" in row:
        return f"{name}  peak {row['peak_bytes_beyond'] / 2**20:.1f} MiB beyond operands and result"
    if "of_numpy" not in row:
        return f"{name}  {row['detkern_us']:10.1f} µs a call"
    ratio = f"{row['of_numpy']:.2f}" + (f" (CPU time {row['of_numpy_cpu']:.2f})" if "of_numpy_cpu" in row else "")
    rate = f"{row['gmac_per_s_per_core']:.2f} G multiply-adds/s per core"
    return f"{name}  {row['detkern_us']:10.1f} µs  {ratio} of NumPy's float32  {rate}"


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The rows under a target."""
    wrong = []
    for row in rows:
        if row.get("peak_bytes_beyond", 0) > MEMORY_TARGET:
            wrong.append(f"{show(row)}: more than {MEMORY_TARGET >> 20} MiB")
        elif (
            row["contract"] == "fma"
            and row["type"] != "f16"
            and row.get("of_numpy_cpu", row.get("of_numpy", 1)) < FMA_TARGET
        ):
            wrong.append(f"{show(row)}: less than {FMA_TARGET}")
        elif (row["contract"], row["type"]) == ("mma16", "bf16") and row.get("gmac_per_s_per_core", 9) < MMA16_TARGET:
            wrong.append(f"{show(row)}: less than {MMA16_TARGET}")
    return wrong


def main() -> int:
    from detkern.cpu import compiled
    from detkern.cpu.threads import available

    argparse.ArgumentParser(description="Time the CPU backend against NumPy, and record it.").parse_args()
    compiled.rebuild()  # by the compiler that the record names; the cache's may be another's
    counts = sorted({1, available()})
    rows = [row for threads in counts for row in in_child("measure", threads, threads)]
    rows += in_child("measure_memory", counts[-1], 1)
    for row in rows:
        print(show(row))
    folder = ROOT / "benchmarks" / "results" / ("cpu-" + re.sub(r"[^a-z0-9]+", "-", cpu_model().lower()).strip("-"))
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "what": "cpu gemm", "date": records.now(),
        "gpu": None, "cpu": cpu_model(), "driver": None, "versions": versions(),
        "load_average": list(os.getloadavg()), "command": "python -m benchmarks.cpu_gemm", "sources": sources(),
        "rows": rows,
    }  # fmt: skip
    (folder / "gemm.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {(folder / 'gemm.json').relative_to(ROOT)}")
    wrong = missed(rows)
    for line in wrong:
        print(f"target missed: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
