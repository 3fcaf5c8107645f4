"""`detkern info`: what is here, what works, and which defaults are in force."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__, config, registry
from ..contracts import CONTRACTS
from ..dtypes import DTYPES, DType
from ..errors import DetkernError
from ..operands import VERSION
from ..tensors import Device
from .devices import devices, no_device

__all__ = ["info"]

# Distributions whose versions matter for a report, looked up by name: nothing is imported for it.
_PACKAGES = ("numpy", "ml_dtypes", "torch", "jax", "jaxlib", "triton", "cuda-bindings", "nvidia-cuda-nvrtc")
_VARIABLES = {"contract": "DETKERN_CONTRACT", "num_threads": "DETKERN_NUM_THREADS", "cache_dir": "DETKERN_CACHE_DIR"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def info(as_json: bool) -> None:
    """Backends, devices, versions, why each unavailable backend is, and the defaults in force.

    \b
    Examples:
      detkern info
      detkern info --json > environment.json
    """
    facts = gather()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _print(Console(width=None if sys.stdout.isatty() else 100, highlight=False), facts)


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
    if getattr(config, setting) is None:
        return "default"
    given = os.environ.get(_VARIABLES[setting])
    return f"environment {_VARIABLES[setting]}" if given and str(getattr(config, setting)) == given else "set"


def _backends() -> list[dict[str, Any]]:
    """Each backend on each device of its kinds, and on a kind that has no device why."""
    found: list[dict[str, Any]] = []
    present = devices()
    for row in registry.TABLE:
        for kind in row.devices:
            here = [device for device in present if device.kind == kind]
            found += [_backend(row, device) for device in here]
            if not here:
                found.append({"name": row.name, "device": kind, "unavailable": no_device(kind), "contracts": {}})
    return found


def _backend(row: registry.Row, device: Device) -> dict[str, Any]:
    record: dict[str, Any] = {"name": row.name, "device": str(device), "dispatched": row.dispatched, "contracts": {}}
    try:
        backend = registry.load(row.name)
        reason = backend.unavailable(device)
    except (ImportError, DetkernError) as error:
        return record | {"unavailable": f"{type(error).__name__}: {error}"}
    record |= {"unavailable": reason, "deterministic": backend.deterministic}
    if reason is not None:
        return record
    for contract, dtype in backend.contracts(device):
        record["contracts"].setdefault(contract.name, []).append(dtype.short)
    # What a backend has to say about itself there: its library, the outcome of its self-check.
    facts = getattr(backend, "facts", None)
    if facts is not None:
        record["facts"] = {str(name): str(value) for name, value in facts(device).items()}
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
