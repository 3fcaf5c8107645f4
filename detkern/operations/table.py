"""All operations, one line each. Whatever is done for every operation walks over this table."""

from __future__ import annotations

from typing import Any

from .bias_gradient.operation import BIAS_GRADIENT
from .block_scaled.operation import BLOCK_SCALED
from .gemm.operation import GEMM
from .linear_logp.operation import DELTA, FOLD, MERGE
from .operation import Operation
from .rows.operation import ROWS
from .scatter_sum.operation import SCATTER_SUM

__all__ = ["OPERATIONS", "operation_of"]

OPERATIONS: tuple[Operation[Any], ...] = (
    GEMM,
    BLOCK_SCALED,
    BIAS_GRADIENT,
    ROWS,
    SCATTER_SUM,
    FOLD,
    MERGE,
    DELTA,
)

_BY_NAME = {operation.name: operation for operation in OPERATIONS}


def operation_of(name: str) -> Operation[Any]:
    """The record called `name`."""
    return _BY_NAME[name]
