"""What the examples need of a machine.
Where it is missing they end with one sentence on standard error and status 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["leave", "packages", "peak_memory", "torch_device"]


def leave(reason: str) -> NoReturn:
    print(reason, file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def packages() -> Iterator[None]:
    """Around the imports of what ".[examples]" installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        leave(f'{error.name} is not installed: pip install ".[examples]"')
    except ImportError as error:
        leave(f"cannot import what this needs: {str(error).splitlines()[0]}")


def torch_device(name: str) -> Any:
    """The torch.device called `name`, on which PyTorch has arrays and detkern a backend."""
    import torch

    import detkern

    try:
        device = torch.device(name)
        probe = torch.zeros(16, 16, device=device)
        detkern.explain(probe, probe)
    except (detkern.errors.DetkernError, RuntimeError, AssertionError) as error:
        leave(f"cannot run on --device {name}: {str(error).splitlines()[0]}")
    return device


@contextmanager
def peak_memory(device: Any, found: dict[str, str], name: str) -> Iterator[None]:
    """Puts into found[name] the most memory that PyTorch's tensors took at once on a CUDA device; elsewhere that it is
    not counted."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
    yield
    found[name] = (
        f"{torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB" if device.type == "cuda" else "not counted"
    )
