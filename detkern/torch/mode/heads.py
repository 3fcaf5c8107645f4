"""torch.nn.functional.linear_cross_entropy under batch_invariant_mode, where PyTorch has it; a handler as in
products.py."""

from __future__ import annotations

from typing import Any

import torch

from ..functions.casting import autocast
from ..functions.functional import gathered
from ..functions.linear_logp import linear_cross_entropy as fused
from . import losses, products

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    mode: Any,
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Any:
    """Without logits where the target is class indices and nothing weights the classes; else linear and cross_entropy,
    as PyTorch says that it is. `options`, which cut PyTorch's own kernel into chunks, change nothing."""
    if not mode.covers("mm", input, linear_weight) or linear_weight.dim() != 2 or input.dim() not in (1, 2):
        if mode.covers("mm", input, linear_weight):
            mode.uncovered("linear_cross_entropy", "of these dimensions", input, linear_weight)
        return NotImplemented
    x, w, b = autocast(input, linear_weight, linear_bias)
    plain = weight is None and not label_smoothing and not target.is_floating_point()
    if not plain or x.dtype != w.dtype or target.shape != input.shape[:-1] or reduction not in ("none", "mean", "sum"):
        logits = products.linear(mode, input, linear_weight, linear_bias)
        if logits is NotImplemented:
            return NotImplemented
        ignored = -100 if ignore_index is None else ignore_index
        return losses.cross_entropy(mode, logits, target, weight, None, ignored, None, reduction, label_smoothing)
    op = "mm" if linear_bias is None else "addmm"
    gathers = gathered(linear_weight) is not None and (linear_bias is None or gathered(linear_bias, "bias") is not None)
    loss = fused(
        x, w, target, b,
        reduction=reduction, ignore_index=-100 if ignore_index is None else ignore_index, accumulate=gathers,
        contract=mode.contract_for(op, x.dtype),
    )  # fmt: skip
    return loss if torch.is_autocast_enabled(x.device.type) else loss.to(x.dtype)
