"""Whether two commits compile to the same kernels: `python -m benchmarks.machine_code COMMIT`.

Compares the working tree with COMMIT, on builds of the same file, macros and name, for sm_90a: the smallest and the
largest tile of each kernel and pair of load paths, and a seeded sample of the others. What is compared is instructions,
their constants, shared memory and registers. --all compares every build, by its PTX first, but for the constants of the
source that no instruction reads: ptxas is a function of it, so equal PTX is equal machine code. Needs no GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["compare", "instructions", "machine_code", "sections"]

ROOT = Path(__file__).resolve().parent.parent
PTX, CUBIN = "compute_90a", "sm_90a"
# Of a kernel: its instructions, their parameters and constants, its shared memory. What else a cubin has numbers its
# symbols.
_CODE = (".text.", ".nv.constant0.", ".nv.constant2.", ".nv.constant3", ".nv.shared.")
_REGISTERS = 24  # the bit of a .text section's `info` from which on it is the number of a thread's registers


def sections(image: bytes) -> Iterator[tuple[str, int, bytes]]:
    """The sections of a 64-bit ELF file: name, `info`, content."""
    offset, size, count, names = struct.unpack_from("<Q10xHHH", image, 0x28)
    headers = [struct.unpack_from("<IIQQQQII", image, offset + number * size) for number in range(count)]
    strings = image[headers[names][4] :]
    for name, kind, _, _, start, length, _, info in headers:
        label = strings[name : strings.index(b"\0", name)].decode()
        yield label, info, b"" if kind == 8 else image[start : start + length]  # SHT_NOBITS has none in the file


def machine_code(image: bytes) -> bytes:
    """Of a cubin what a device runs, with nothing that says where it came from."""
    found = sorted(section for section in sections(image) if section[0].startswith(_CODE))
    return b"".join(
        f"{name} {info >> _REGISTERS if name.startswith('.text') else ''}\0".encode() + code
        for name, info, code in found
    )


def instructions(ptx: bytes) -> bytes:
    """PTX without the constants of the source that nothing in it reads, which NVRTC lists in the order of their
    definition."""
    named = re.compile(rb"^\.global .*?([\w$]+)(?:\[\d*\])?(?: = .*)?;$")
    lines = ptx.splitlines()
    used = collections.Counter(re.findall(rb"[\w$]+", ptx))
    return b"\n".join(line for line in lines if not ((found := named.match(line)) is not None and used[found[1]] == 1))


def _digest(build: Any, architecture: str) -> str:
    from detkern.cu.loader import compile_kernel

    image, _ = compile_kernel(build, architecture)
    return hashlib.sha256(instructions(image) if architecture == PTX else machine_code(image)).hexdigest()


def every_build() -> dict[str, Any]:
    """The builds of this process's detkern for compute capability 9.0, by what they are compiled with."""
    from detkern.cu import ahead, backend

    found = ahead.builds(backend.offered((9, 0)), (9, 0))
    if hasattr(backend.BACKEND, "other_builds"):
        found += backend.BACKEND.other_builds((9, 0))
    else:  # an older commit
        from detkern.cu import column_sum, rows, scatter_sum

        found += column_sum.builds() + rows.builds((9, 0)) + scatter_sum.builds()
    return {str(build): build for build in found}


def sampled(names: Iterable[str], count: int, seed: int = 1) -> list[str]:
    """The smallest and the largest tile of each kernel and pair of load paths, and `count` others."""
    ordered = sorted(names)
    kinds: dict[tuple[str, ...], list[str]] = {}
    for name in ordered:
        kinds.setdefault((name.partition(" ")[0], *re.findall(r"-DLOAD\w*=\d", name)), []).append(name)

    def size(name: str) -> tuple[int, int]:
        sides = [int(side) for side in re.findall(r"-DTILE_[MN]=(\d+)", name)]
        return (sides[0] * sides[1] if len(sides) == 2 else sum(sides), len(name))

    ends = {pick(of_kind, key=size) for of_kind in kinds.values() for pick in (min, max)}
    rest = [name for name in ordered if name not in ends]
    return sorted(ends) + random.Random(seed).sample(rest, min(count, len(rest)))


def _print_digests(architecture: str, wanted: list[str], processes: int) -> None:
    """What a child does, with another tree's detkern: a line of JSON a build."""
    builds = every_build()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        running = {pool.submit(_digest, builds[name], architecture): name for name in wanted}
        for done in concurrent.futures.as_completed(running):
            print(json.dumps([running[done], done.result()]), flush=True)


def digests(tree: Path, architecture: str, wanted: list[str], processes: int) -> dict[str, str]:
    """build -> SHA-256 of what a tree compiles it to."""
    command = [sys.executable, str(Path(__file__).resolve()), "--digests", architecture, "--processes", str(processes)]
    done = subprocess.run(
        command,
        input=json.dumps(wanted),
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


def extract(commit: str, folder: Path) -> None:
    """Put a commit's package into a folder."""
    archive = subprocess.run(["git", "archive", commit, "detkern"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def names(tree: Path) -> list[str]:
    """The builds of a tree."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--names"],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return sorted(json.loads(done.stdout))


def compare(old: Path, new: Path, sample: int | None, processes: int, source: str = "") -> dict[str, Any]:
    """What is the same in two trees: {"builds", "only_old", "only_new", "compared", "changed"}, the last one those
    whose machine code came out different.

    sample: see `sampled`; None: all of them. source: what a build's kernel file begins with.
    """
    before, after = ({name for name in names(tree) if name.startswith(source)} for tree in (old, new))
    both = sorted(before & after)
    if sample is None:
        ptx = [digests(tree, PTX, both, processes) for tree in (old, new)]
        compared, asked = both, [name for name in both if ptx[0][name] != ptx[1][name]]
    else:
        compared = asked = sampled(both, sample)
    code = [digests(tree, CUBIN, asked, processes) for tree in (old, new)]
    return {
        "builds": len(both),
        "only_old": sorted(before - after),
        "only_new": sorted(after - before),
        "compared": len(compared),
        "changed": [name for name in asked if code[0][name] != code[1][name]],
    }


def main() -> int:
    """Compare; status 1 where a build is on one side alone or has other machine code."""
    parser = argparse.ArgumentParser(description="Compare the kernels of the working tree with a commit's.")
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument(
        "--sample", type=int, default=60, help="builds that are compared beside the smallest and largest"
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--all", action="store_true", help="compare every build, by its PTX first")
    parser.add_argument("--source", default="", help="of one kernel file alone, such as mma_wgmma.cu")
    parser.add_argument("--output", type=Path, help="a file for what was found, as JSON")
    parser.add_argument("--digests", metavar="ARCHITECTURE", help=argparse.SUPPRESS)
    parser.add_argument("--names", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.names:
        print(json.dumps(list(every_build())))
        return 0
    if arguments.digests:
        _print_digests(arguments.digests, json.load(sys.stdin), arguments.processes)
        return 0
    commit = subprocess.run(
        ["git", "rev-parse", arguments.commit], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder) / "old", Path(folder) / "new"
        extract(commit, old)
        shutil.copytree(ROOT / "detkern", new / "detkern")  # it takes minutes, in which the tree may be edited
        sample = None if arguments.all else arguments.sample
        found = {"commit": commit, **compare(old, new, sample, arguments.processes, arguments.source)}
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{found['builds']} builds: of {found['compared']} the machine code was compared and {len(found['changed'])} "
        f"differ; "
        f"{len(found['only_old'])} only in {commit[:9]}, {len(found['only_new'])} only here"
    )
    for name in found["changed"]:
        print("changed:", name)
    return int(bool(found["changed"] or found["only_old"] or found["only_new"]))


if __name__ == "__main__":
    sys.exit(main())
