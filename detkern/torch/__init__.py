"""detkern for PyTorch: products and layers with autograd, torch.compile, torch.export, autocast and vmap.

Importing it needs PyTorch (2.6 or newer); `import detkern` alone does not. docs/pytorch.md says what holds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from ..dispatch.requirements import install

    raise ImportError(f"detkern.torch needs PyTorch: {install('torch')} ({error})") from error

from .functions import table as _table  # noqa: F401  (registers the ops)
from .functions.functional import bmm, linear, matmul
from .functions.indexing import embedding, gather, index_add, index_put, index_select, scatter_add, take
from .functions.linear_logp import linear_cross_entropy, linear_logp
from .functions.main_grads import main_grads_to_grad
from .functions.recorded import FUNCTIONS as _FUNCTIONS
from .functions.reductions import logsumexp, std, var, vector_norm
from .functions.rows import cumsum, log_softmax, mean, mean_square, softmax, sum
from .functions.scattered import rows_summed as scatter_sum
from .layers.convert import ConversionReport, convert, revert
from .layers.linear import Linear, zero_main_grads

if TYPE_CHECKING:
    from .mode.mode import batch_invariant_mode
    from .mode.process import disable, enable, is_enabled

__all__ = [
    "ConversionReport", "Linear", "batch_invariant_mode", "bmm", "convert", "cumsum", "disable", "embedding", "enable",
    "gather", "index_add", "index_put", "index_select", "is_enabled", "linear", "linear_cross_entropy", "linear_logp",
    "log_softmax", "logsumexp", "main_grads_to_grad", "matmul", "mean", "mean_square", "revert", "scatter_add",
    "scatter_sum", "softmax", "std", "sum", "take", "var", "vector_norm", "zero_main_grads",
]  # fmt: skip


# Loaded at their first use: the mode's tables of PyTorch's functions take half of the time of this import.
_LATER = {
    "batch_invariant_mode": "mode.mode",
    "disable": "mode.process",
    "enable": "mode.process",
    "is_enabled": "mode.process",
}


def __getattr__(name: str) -> Any:
    """What is loaded later, and the operations that have no module of their own here."""
    if name in _LATER:
        value = globals()[name] = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
        return value
    try:
        return _FUNCTIONS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_FUNCTIONS})
