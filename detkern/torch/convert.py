"""Every torch.nn.Linear of a model made a `detkern.torch.Linear`, in place, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..errors import ArgumentError
from .layers import Linear

__all__ = ["convert", "revert"]

Skip = str | Iterable[str] | Callable[[str, torch.nn.Linear], bool]


def convert(
    module: torch.nn.Module,
    *,
    skip: Skip = (),
    out_dtype: torch.dtype | str | None = None,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
) -> torch.nn.Module:
    """Make every torch.nn.Linear in `module` a `detkern.torch.Linear`, in place.

    The objects stay the same, and with them parameters, hooks, tied layers and references held elsewhere; only their
    class changes. Subclasses of torch.nn.Linear have a forward of their own and are left alone (one of them is the output
    projection of torch.nn.MultiheadAttention, which never calls it).

    Args:
        module: the model, or a torch.nn.Linear itself.
        skip: qualified names of layers to leave alone, patterns allowed ("lm_head", "*.router"), or a function (name,
            layer) -> bool.
        out_dtype, accumulate, contract, backend: as `detkern.torch.Linear`.

    Returns:
        `module`.

    Raises:
        ArgumentError: a name in `skip` that no linear layer of `module` has, or an argument of another kind; nothing is
            changed.
        ContractUnsupported, DTypeError: as `detkern.torch.Linear`; nothing is changed.
    """
    Linear(1, 1, False, "meta", out_dtype=out_dtype, accumulate=accumulate, contract=contract, backend=backend)
    for layer in _chosen(module, torch.nn.Linear, skip):
        layer.__class__ = Linear
        layer.configure(out_dtype=out_dtype, accumulate=accumulate, contract=contract, backend=backend)
    return module


def revert(module: torch.nn.Module, *, skip: Skip = ()) -> torch.nn.Module:
    """Make every `detkern.torch.Linear` in `module` a torch.nn.Linear again, in place.

    Args:
        module, skip: as `convert`.

    Returns:
        `module`.

    Raises:
        ArgumentError: as `convert`.
    """
    for layer in _chosen(module, Linear, skip):
        for setting in ("out_dtype", "accumulate", "contract", "backend"):
            layer.__dict__.pop(setting, None)
        layer.__class__ = torch.nn.Linear
    return module


def _chosen(module: torch.nn.Module, kind: type[torch.nn.Linear], skip: Skip) -> list[Any]:
    """The layers of exactly this kind that are not skipped. A layer with several names is skipped by any of them."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"module is no torch.nn.Module but {type(module).__name__}")
    if not isinstance(skip, Iterable) and not callable(skip):
        raise ArgumentError(f"skip={skip!r} is no name, no names and no function (name, layer) -> bool")
    named = [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if type(layer) is kind]
    if callable(skip):
        skipped = {id(layer) for name, layer in named if skip(name, layer)}
    else:
        skipped = set()
        for pattern in [skip] if isinstance(skip, str) else skip:
            found = {id(layer) for name, layer in named if fnmatchcase(name, pattern)}
            if not found:
                names = ", ".join(repr(name) for name, _ in named) or "none"
                raise ArgumentError(f"skip={pattern!r} is the name of no {kind.__name__} here; there are {names}")
            skipped |= found
    return list({id(layer): layer for _, layer in named if id(layer) not in skipped}.values())
