"""Deterministic, batch-invariant matrix multiplication: every bit of a result is fixed by a written contract."""

from . import config, rows
from .api import Explanation, bias_gradient, explain, gemm, gemm_da, gemm_db, linear
from .compat.engine import Engine
from .compat.ops import get_op, list_ops
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
from .operations.linear_logp.call import linear_logp, linear_logp_merge, linear_logp_partial
from .operations.scatter_sum.call import scatter_sum

__version__ = "0.1.0"

__all__ = [
    "ArgumentError", "BackendUnavailable", "BuildError", "ContractUnsupported", "DTypeError", "DetkernError",
    "DeviceError", "Engine", "Explanation", "ShapeError", "__version__", "bias_gradient", "config", "explain", "gemm",
    "gemm_da", "gemm_db", "get_op", "linear", "linear_logp", "linear_logp_merge", "linear_logp_partial", "list_ops",
    "preload", "rows", "scatter_sum",
]  # fmt: skip
