"""Deterministic, batch-invariant matrix multiplication: every bit of a result is fixed by a written contract."""

from . import config, rows
from .api import Explanation, bias_gradient, explain, gemm, gemm_da, gemm_db, linear
from .compat.det_gemm import get_op, list_ops
from .compat.engine import Engine
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

__version__ = "0.1.0"

__all__ = [
    "ArgumentError", "BackendUnavailable", "BuildError", "ContractUnsupported", "DTypeError", "DetkernError",
    "DeviceError", "Engine", "Explanation", "ShapeError", "__version__", "bias_gradient", "config", "explain", "gemm",
    "gemm_da", "gemm_db", "get_op", "linear", "list_ops", "preload", "rows", "scatter_sum",
]  # fmt: skip
