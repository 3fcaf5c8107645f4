"""The classic operators by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..dispatch import registry
from ..errors import ArgumentError
from .det_gemm import DetGemm
from .linear_logp import LinearLogp

__all__ = ["get_op", "list_ops"]

_OPS: dict[str, Callable[..., DetGemm | LinearLogp]] = {
    "det_gemm": DetGemm,
    "linear_logp": functools.partial(LinearLogp, "linear_logp"),
    "batch_invariant_linear_logp": functools.partial(LinearLogp, "batch_invariant_linear_logp"),
}


def list_ops() -> tuple[str, ...]:
    """The names that `get_op` takes."""
    return tuple(_OPS)


def get_op(name: str, *, contract: str | None = None, backend: str | None = None) -> Any:
    """The operator called `name`.

    Args:
        name: one of `list_ops()`.
        contract: of every call that names none, instead of the operator's own (see `DetGemm` and `LinearLogp`).
        backend: the name of the one backend to use, instead of the first that takes the call.

    Raises:
        ArgumentError: there is no such operator or backend, or the backend is not deterministic; it names those there
            are.
        ContractUnsupported: there is no such contract.
    """
    op = _OPS.get(name) if isinstance(name, str) else None
    if op is None:
        raise ArgumentError(f"there is no op {name!r}; the ops are {', '.join(_OPS)}")
    able = registry.dispatched_names()
    if backend is not None and backend not in able:
        known = ", ".join(able)
        if backend in registry.backend_names():
            raise ArgumentError(f"backend={backend!r} follows no contract, which {name} does; its backends are {known}")
        raise ArgumentError(f"backend={backend!r} does not exist; the backends of {name} are {known}")
    return op(contract=contract, backend=backend)
