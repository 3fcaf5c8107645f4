"""Deterministic, batch-invariant matrix multiplication: every bit of a result is fixed by a written contract."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import config, rows
from .api import Explanation, bias_gradient, explain, gemm, gemm_da, gemm_db, linear
from .dispatch.ahead import preload
from .errors import (
    ArgumentError,
    BackendUnavailable,
    BuildError,
    ContractUnsupported,
    DetkernError,
    DeviceError,
    DTypeError,
    ShapeError,
)
from .operations.scatter_sum.call import scatter_sum

if TYPE_CHECKING:
    from .compat.engine import Engine
    from .compat.ops import get_op, list_ops
    from .operations.linear_logp.call import linear_logp, linear_logp_merge, linear_logp_partial

__version__ = "0.1.0"

__all__ = [
    "ArgumentError", "BackendUnavailable", "BuildError", "ContractUnsupported", "DTypeError", "DetkernError",
    "DeviceError", "Engine", "Explanation", "ShapeError", "__version__", "bias_gradient", "config", "explain", "gemm",
    "gemm_da", "gemm_db", "get_op", "linear", "linear_logp", "linear_logp_merge", "linear_logp_partial", "list_ops",
    "preload", "rows", "scatter_sum",
]  # fmt: skip

# Loaded at their first use: together they take an eighth of the time of `import detkern`.
_LATER = {
    "Engine": "compat.engine",
    "get_op": "compat.ops",
    "linear_logp": "operations.linear_logp.call",
    "linear_logp_merge": "operations.linear_logp.call",
    "linear_logp_partial": "operations.linear_logp.call",
    "list_ops": "compat.ops",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
