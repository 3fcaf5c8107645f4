"""Recorded runs: what a measurement writes down, and whether its sources have changed since.

A record is benchmarks/results/<gpu>/<what>.json: {"what", "date", "gpu", "driver", "versions", "command", "sources":
{path: SHA-256 of a source that it used}, "rows": [...]}. A run replaces its file; git keeps the history.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import itertools
import json
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "ROOT", "changed_sources", "command", "cuda_sources", "kept", "slug", "versions", "write"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"  # of a checkout; where detkern is installed, `folder` says where to write

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "torch",
    "triton",
    "jax",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-cuda-nvrtc",
    "nvidia-cublas",
    "deep-gemm",
    "sgl-deep-gemm",
    "sgemm-bi",
)


def slug(gpu: str) -> str:
    """The folder of a GPU: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia").strip()).strip("-")


def cuda_sources() -> list[Path]:
    """The kernel sources and tile tables of the CUDA backend."""
    folder = ROOT / "detkern" / "cu"
    return sorted([*folder.glob("kernels/**/*.cu"), *folder.glob("kernels/**/*.cuh"), *folder.glob("tiles/*.json")])


def product_sources() -> list[Path]:
    """Those of them that a matrix product is made of: its kernels, what they include, and the tables."""
    from ..cu import loader
    from ..cu.gemm_kernels import KERNELS

    names = {name for kernel in KERNELS.values() for name, _ in loader.read_sources(kernel.source)}
    used = {loader.FOLDER / name for name in names}
    return [path for path in cuda_sources() if path in used or path.suffix == ".json"]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def now() -> str:
    """The date and time of a record."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Python, and the packages that are installed of those that matter to a measurement."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(
    what: str,
    rows: list[dict[str, Any]],
    *,
    gpu: str,
    driver: str,
    sources: Iterable[Path],
    folder: Path | None = None,
    more: dict[str, str] | None = None,
    about: dict[str, Any] | None = None,
) -> Path:
    """Write a record and return its path.

    gpu: the device's name. folder: instead of the one under RESULTS. more: versions beside those of packages. about:
    what else the record says of its rows, by name.
    """
    record = {
        "what": what,
        "date": now(),
        "gpu": gpu,
        "driver": driver,
        "versions": versions() | (more or {}),
        "command": command(),
        "sources": {str(path.relative_to(ROOT)): _digest(path) for path in sources},
        **(about or {}),
        "rows": rows,
    }
    path = (folder or RESULTS / slug(gpu)) / f"{what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def write_here(
    what: str,
    rows: list[dict[str, Any]],
    sources: Iterable[Path],
    folder: Path | None,
    about: dict[str, Any] | None = None,
) -> Path:
    """`write` for this process's first CUDA device, with the CUDA that PyTorch, the peer, was built for; says where."""
    import torch

    from ..cu.device import describe

    facts = describe(0)
    path = write(
        what, rows, gpu=facts.name, driver=facts.driver, sources=sources, folder=folder,
        more={"cuda of torch": str(torch.version.cuda)}, about=about,
    )  # fmt: skip
    print(path)
    return path


def shown(row: dict[str, Any]) -> str:
    """A row for people."""
    return "  ".join(f"{name}={value}" for name, value in row.items())


def kept(
    record: Path, *, gpu: str, driver: str, sources: Iterable[Path], more: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """The rows of a record that a run with these facts may add its own to: all of them, where the GPU, the driver, the
    sources and every package that both name are the same; else none."""
    made = json.loads(record.read_text())
    now = versions() | (more or {})
    same = (
        made["gpu"] == gpu
        and made["driver"] == driver
        and made["sources"] == {str(path.relative_to(ROOT)): _digest(path) for path in sources}
        and all(made["versions"][name] == now[name] for name in made["versions"].keys() & now.keys())
    )
    rows: list[dict[str, Any]] = made["rows"] if same else []
    return rows


def command() -> str:
    """What ran, without the folder that --output named: it is no part of what was measured."""
    rest = [
        argument
        for before, argument in itertools.pairwise(sys.argv)
        if before != "--output" and argument.partition("=")[0] != "--output"
    ]
    program = Path(sys.argv[0]).resolve()
    named = program.is_relative_to(ROOT)
    module = ["-m", ".".join(program.relative_to(ROOT).with_suffix("").parts)] if named else [sys.argv[0]]
    return " ".join(["python", *module, *rest])


def changed_sources(record: Path) -> list[str]:
    """The sources of a record that have changed, or are gone, since it was made."""
    sources = json.loads(record.read_text())["sources"]
    return [name for name, digest in sources.items() if not (ROOT / name).is_file() or _digest(ROOT / name) != digest]
