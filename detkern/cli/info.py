"""`detkern info`: what is here, what works, and which defaults are in force."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import warnings
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import detkern

from .. import __version__, config
from ..abi.build import cache_folder, find_compiler
from ..cpu import threads
from ..dispatch import registry, requirements
from ..errors import BuildError, DetkernError
from ..operations.table import OPERATIONS
from ..tensors import Device
from ..vocabulary.contracts import CONTRACTS
from ..vocabulary.dtypes import DTYPES
from ..vocabulary.operands import VERSION
from .devices import devices, no_device
from .options import json_option
from .output import print_json, terminal

__all__ = ["info"]

# Distributions whose versions matter for a report, looked up by name: nothing is imported for it.
_PACKAGES = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "triton", "cuda-bindings", "nvidia-cuda-nvrtc")
_VARIABLES = {
    "contract": "DETKERN_CONTRACT",
    "num_threads": "DETKERN_NUM_THREADS",
    "cache_dir": "DETKERN_CACHE_DIR",
    "dependent_launch": "DETKERN_DEPENDENT_LAUNCH",
}


@click.command()
@json_option
def info(as_json: bool) -> None:
    """Backends, devices, versions, why each unavailable backend is, and the defaults in force.

    \b
    Examples:
      detkern info
      detkern info --json > environment.json
    """
    facts = gather()
    if as_json:
        print_json(facts)
    else:
        _print(terminal(), facts)


def gather() -> dict[str, Any]:
    """Everything that `detkern info --json` prints."""
    return {
        "detkern": __version__,
        "operands": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "compiler": _compiler(),
        "cache": _cache(),
        "threads": _threads(),
        "dependent_launch": {"allowed": config.dependent_launch, "source": _source("dependent_launch")},
        "devices": [str(device) for device in devices()],
        "backends": _backends(),
        "defaults": _defaults(),
    }


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    # CuPy's wheels carry the version of CUDA in their name.
    cupy = [d for d in importlib.metadata.distributions() if re.fullmatch(r"cupy(-cuda\d+x)?", d.name or "")]
    versions["cupy"] = ", ".join(sorted({f"{d.version} ({d.name})" for d in cupy})) or None
    return versions


def _source(setting: str) -> str:
    """Where a setting of detkern.config comes from."""
    value = getattr(config, setting)
    given = os.environ.get(_VARIABLES[setting])
    if value is None or (value is True and not given):
        return "default"
    text = str(int(value)) if isinstance(value, bool) else str(value)
    return f"environment {_VARIABLES[setting]}" if given and text == given else "set"


def _backends() -> list[dict[str, Any]]:
    """Each backend on each device of its kinds, and on a kind that has no device why."""
    found: list[dict[str, Any]] = []
    present = devices()
    for row in registry.TABLE:
        for kind in row.devices:
            here = [device for device in present if device.kind == kind]
            found += [_backend(row, device) for device in here]
            if not here:
                found.append(_without_device(row, kind))
    return found


def _without_device(row: registry.Row, kind: str) -> dict[str, Any]:
    """A backend on a kind of which no device is listed, and what is missing, as far as it can be said without importing
    PyTorch. CuPy lists devices; where it cannot, and PyTorch is built for that kind, the backend is asked."""
    reason = row.not_installed()
    if reason is None and "torch" in (package.module for package in row.packages):
        version = importlib.metadata.version("torch")
        build = "rocm" if "rocm" in version else None if "cpu" in version else "cuda"
        if build != kind:
            title = {"cuda": "CUDA", "rocm": "ROCm"}.get(kind, kind)
            reason = f"the installed PyTorch {version} is not built for {title}, and {row.name} runs through it"
        elif kind == "rocm" or requirements.row("cuda").not_installed():
            return _backend(row, Device(kind))
    return {"name": row.name, "device": kind, "unavailable": reason or no_device(kind), "contracts": {}}


def _backend(row: registry.Row, device: Device) -> dict[str, Any]:
    record: dict[str, Any] = {"name": row.name, "device": str(device), "contracts": {}}
    record["dispatched"] = row.chosen_on(device.kind)
    try:
        backend = registry.load(row.name)
        reason = backend.unavailable(device)
    except (ImportError, DetkernError) as error:
        return record | {"unavailable": f"{type(error).__name__}: {error}"}
    record |= {
        "unavailable": reason,
        "deterministic": backend.deterministic,
        "operations": registry.operations(backend),
    }
    if reason is not None:
        return record
    for operation in OPERATIONS:
        if set(operation.variants) <= set(CONTRACTS):
            for name, dtype in registry.computed(backend, operation, device):
                record["contracts"].setdefault(name, []).append(dtype.short)
    # What a backend has to say about itself there, such as the outcome of a self-check.
    facts = getattr(backend, "facts", None)
    record["facts"] = dict(facts(device)) if facts is not None else {}
    if row.name == "cpu":
        record["facts"] = _cpu_kernels() | record["facts"]
    return record


def _defaults() -> list[dict[str, str]]:
    """The contract of a call that names none, for each device and operand type."""
    rows = []
    for device in devices():
        for dtype in DTYPES:
            configured = config.configured_contract(dtype)
            try:
                name = registry.contract_for(dtype, device, None, configured).name
            except (ImportError, DetkernError) as error:
                name = f"{type(error).__name__}: {error}"
            rows.append(
                {
                    "device": str(device),
                    "dtype": dtype.short,
                    "contract": name,
                    "source": "default" if configured is None else _source("contract"),
                }
            )
    return rows


def _compiler() -> dict[str, str | None]:
    """The C++ compiler that the CPU backend would use."""
    try:
        found = find_compiler()
    except BuildError as error:
        return {"command": None, "version": None, "missing": str(error)}
    return {"command": " ".join(found.command), "version": found.version.splitlines()[0], "missing": None}


def _cache() -> dict[str, str | None]:
    try:
        return {"folder": str(cache_folder()), "source": _source("cache_dir"), "unusable": None}
    except BuildError as error:
        return {"folder": None, "source": _source("cache_dir"), "unusable": str(error)}


def _cpu_kernels() -> dict[str, str]:
    """Which of its two versions the CPU backend runs, found out by asking it, which builds the library if need be."""
    one = np.ones((1, 1), np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            plan = detkern.explain(one, one, contract="fma", backend="cpu")
        except DetkernError as error:
            return {"kernels": f"{type(error).__name__}: {error}"}
    facts = {"kernels": plan.kernel.replace(" fma", "")}
    return facts | ({"said": "; ".join(str(w.message) for w in caught)} if caught else {})


def _threads() -> dict[str, Any]:
    return {
        "count": config.num_threads or threads.available(),
        "available": threads.available(),
        "source": _source("num_threads"),
    }


def _print(console: Console, facts: dict[str, Any]) -> None:
    def section(title: str) -> Table:
        console.print(Text(f"\n{title}" if title != "versions" else title, "bold"))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        return table

    table = section("versions")
    table.add_row("  detkern", f"{facts['detkern']} (operand generator {facts['operands']})")
    table.add_row("  python", f"{facts['python']} on {facts['platform']}")
    for name, version in facts["packages"].items():
        table.add_row(f"  {name}", version or Text("not installed", "dim"))
    console.print(table)

    table = section("this machine")
    table.add_row("  devices", ", ".join(facts["devices"]))
    compiler = facts["compiler"]
    table.add_row(
        "  compiler", f"{compiler['command']}: {compiler['version']}" if compiler["command"] else compiler["missing"]
    )
    cache = facts["cache"]
    table.add_row("  cache", f"{cache['folder']} ({cache['source']})" if cache["folder"] else cache["unusable"])
    count = facts["threads"]
    table.add_row("  CPU threads", f"{count['count']} of {count['available']} available ({count['source']})")
    dependent = facts["dependent_launch"]
    table.add_row("  dependent launch", f"{'on' if dependent['allowed'] else 'off'} ({dependent['source']})")
    console.print(table)

    table = section("backends")
    for record in facts["backends"]:
        where = record["name"] if record["name"] == record["device"] else f"{record['name']} on {record['device']}"
        if record["unavailable"] is not None:
            table.add_row(f"  {where}", Text(f"unavailable: {record['unavailable']}", "yellow"))
            continue
        offers = ", ".join(f"{name} ({' '.join(types)})" for name, types in record["contracts"].items())
        only = "" if record["dispatched"] else "only when named with backend=; "
        table.add_row(f"  {where}", only + (offers or "computes no contract: its bits are the framework's"))
        table.add_row("", Text(f"operations: {', '.join(record['operations'])}", "dim"))
        for name, value in record.get("facts", {}).items():
            table.add_row("", Text(f"{name}: {value}", "dim"))
    console.print(table)

    table = section("contract of a call that names none")
    for device in facts["devices"]:
        rows = [row for row in facts["defaults"] if row["device"] == device]
        for row in rows:
            table.add_row(f"  {device} {row['dtype']}", f"{row['contract']} ({row['source']})")
    console.print(table)
