"""Types of PyTorch: what an `out_dtype` argument names, and what autocast makes of operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...tensors import dtype_argument
from ...vocabulary.dtypes import DTYPES

__all__ = ["OPERANDS", "autocast", "torch_dtype"]

OPERANDS = (torch.float32, torch.float16, torch.bfloat16)
_NAMES = {dtype.name: getattr(torch, dtype.name) for dtype in DTYPES}


def torch_dtype(value: Any) -> Any:
    """The torch dtype that an `out_dtype` argument names; DTypeError where a result cannot have it."""
    if value is None or value in OPERANDS:
        return value
    return _NAMES[dtype_argument(value).name]


def autocast(*operands: Any) -> Sequence[Any]:
    """The operands (None among them too) as autocast wants them on the first one's device."""
    if not torch._C._is_any_autocast_enabled():
        return operands
    device_type = operands[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return operands
    wanted = torch.get_autocast_dtype(device_type)
    return [x.to(wanted) if x is not None and x.dtype in OPERANDS else x for x in operands]
