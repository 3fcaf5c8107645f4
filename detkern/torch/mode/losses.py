"""Losses as PyTorch names them, under batch_invariant_mode; handlers as in products.py. The losses of all elements are
one row.

What has no sum, reduction="none", is PyTorch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..functions import rows
from ..functions.broadcasting import expanded
from ..functions.losses import element_losses
from .products import finish
from .reductions import log_softmax

__all__ = ["HANDLERS", "cross_entropy", "functional_kl_div"]

_NONE, _MEAN = 0, 1  # of PyTorch's numbers for a reduction; 2 is a sum


def cross_entropy(
    mode: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """torch.nn.functional.cross_entropy out of log_softmax and sums. PyTorch's is one call below Python.

    With class indices the losses of all elements are one row, and so are the weights that a mean divides by.
    """
    if not isinstance(input, torch.Tensor) or input.dim() == 0 or size_average is not None or reduce is not None:
        return NotImplemented
    if reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if not mode.covers("log_softmax", input):
        return NotImplemented
    if input.dim() == 1:  # a batch of one
        target = target if target.dim() == 1 and not target.is_floating_point() else target[None]
        loss = cross_entropy(mode, input[None], target, weight, None, ignore_index, None, reduction, label_smoothing)
        return loss if loss is NotImplemented or reduction != "none" else loss[0]
    logp = log_softmax(mode, input, 1)
    classes = input.shape[1]
    # Without classes every sum is 0, and PyTorch's mean and smoothing are 0 / 0.
    share = label_smoothing / classes if classes else math.inf
    if target.is_floating_point():
        if target.shape != input.shape:
            return NotImplemented
        target = target * (1 - label_smoothing) + share if label_smoothing else target
        terms = logp * target
        losses = -rows.sum(terms if weight is None else terms * _along(weight, input), 1)
        if not classes and reduction == "mean":
            losses = losses + math.nan
        return losses if reduction == "none" else _total(losses, reduction, None)
    losses = torch.nn.functional.nll_loss(logp, target, weight, ignore_index=ignore_index, reduction="none")
    counted = (target != ignore_index).to(losses.dtype)
    weights = counted if weight is None else counted * weight[target.clamp(min=0) * (target != ignore_index)]
    if label_smoothing:
        smooth = -rows.sum(logp if weight is None else logp * _along(weight, input), 1)
        smooth = smooth.masked_fill(target == ignore_index, 0.0)  # not times 0: an ignored row may hold NaN
        losses = losses * (1 - label_smoothing) + smooth * share
    return losses if reduction == "none" else _total(losses, reduction, weights)


def _along(weight: Any, input: Any) -> Any:
    return weight.reshape(1, -1, *(1,) * (input.dim() - 2))


def _total(losses: Any, reduction: str, weights: Any) -> Any:
    losses = losses.reshape(-1)
    if reduction == "mean" and weights is None:
        return rows.mean(losses)
    total = rows.sum(losses, out_dtype=torch.float32)
    if reduction == "mean":
        total = total / rows.sum(weights.reshape(-1), out_dtype=torch.float32)
    return total.to(losses.dtype)


def _class_losses(name: str) -> Callable[..., Any]:
    native = getattr(torch._C._nn, name)

    def handler(
        mode: Any, input: Any, target: Any, weight: Any = None, reduction: int = _MEAN, ignore_index: int = -100
    ) -> Any:
        """Negative log-likelihoods by class; weights and what is ignored as in cross_entropy."""
        if reduction == _NONE or not mode.covers("nll_loss", input):
            return native(input, target, weight, reduction, ignore_index)
        losses = native(input, target, weight, _NONE, ignore_index)
        counted = (target != ignore_index).to(losses.dtype)
        weights = counted if weight is None else counted * weight[target.clamp(min=0) * (target != ignore_index)]
        return _total(losses, "mean" if reduction == _MEAN else "sum", weights)

    return handler


def _pair(mode: Any, name: str, *operands: Any) -> tuple[list[Any], Any] | None:
    """The operands in float32, of one shape, None among them too, and the result's type; None where the mode does not
    cover them."""
    given = [x for x in operands if x is not None]
    if not mode.covers(name, *given) or any(x.device != given[0].device for x in given):
        return None
    dtype = given[0].dtype
    for x in given[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    if torch.is_autocast_enabled(given[0].device.type):
        dtype = torch.float32
    try:
        shape = torch.broadcast_shapes(*(x.shape for x in given))
    except RuntimeError:
        return None
    return [None if x is None else expanded(x.float(), shape) for x in operands], dtype


def _of_elements(losses: Any, reduction: int, dtype: Any) -> Any:
    """The mean or the sum of all, rounded once to the type."""
    run = rows.mean if reduction == _MEAN else rows.sum
    return run(losses.reshape(-1), out_dtype=dtype)


def _summed(native: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a loss that `native` computes where there is no sum."""

    def handled(mode: Any, input: Any, target: Any, *given: Any, **named: Any) -> Any:
        place = 2 if native is torch.binary_cross_entropy_with_logits else 0
        reduction = given[place] if len(given) > place else named.get("reduction", _MEAN)
        run = native if reduction == _NONE else functools.partial(handler, mode)
        return run(input, target, *given, **named)

    return handled


def _mse_loss(mode: Any, input: Any, target: Any, reduction: int = _MEAN, *, out: Any = None) -> Any:
    pair = _pair(mode, "mse_loss", input, target)
    if pair is None:
        return NotImplemented
    (x, t), dtype = pair
    d = (x - t).reshape(-1)
    return finish(rows.mean_square(d, out_dtype=dtype) if reduction == _MEAN else rows.sum(d * d, out_dtype=dtype), out)


def _of_distance(name: str, default: float) -> Callable[..., Any]:
    """A loss of input - target; its parameter is beta or delta, or nothing."""

    def handler(
        mode: Any,
        input: Any,
        target: Any,
        reduction: int = _MEAN,
        parameter: float = default,
        *,
        beta: float | None = None,
        delta: float | None = None,
        out: Any = None,
    ) -> Any:
        parameter = next((given for given in (beta, delta) if given is not None), parameter)
        pair = _pair(mode, name, input, target)
        if pair is None or parameter < 0 or (name == "huber_loss" and parameter == 0):
            return NotImplemented
        (x, t), dtype = pair
        kind = name.removesuffix("_loss") if parameter else "l1"
        return finish(_of_elements(element_losses(kind, x - t, parameter), reduction, dtype), out)

    return handler


def _kl_div(mode: Any, input: Any, target: Any, reduction: int = _MEAN, *, log_target: bool = False) -> Any:
    pair = _pair(mode, "kl_div", input, target)
    if pair is None:
        return NotImplemented
    (x, t), dtype = pair
    losses = t.exp() * (t - x) if log_target else torch.xlogy(t, t) - t * x
    return _of_elements(losses, reduction, dtype)


def functional_kl_div(
    mode: Any,
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """torch.nn.functional.kl_div in a compiled graph, which the warning of its own about the mean breaks."""
    number = {"mean": _MEAN, "sum": 2, "batchmean": 2}.get(reduction)
    if number is None or size_average is not None or reduce is not None or not torch.compiler.is_compiling():
        return NotImplemented
    loss = _kl_div(mode, input, target, number, log_target=log_target)
    return loss if loss is NotImplemented or reduction != "batchmean" or not input.dim() else loss / input.shape[0]


def _bce_with_logits(
    mode: Any, input: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = _MEAN
) -> Any:
    if not isinstance(input, torch.Tensor) or input.shape != getattr(target, "shape", None):
        return NotImplemented
    pair = _pair(mode, "binary_cross_entropy_with_logits", input, target, weight, pos_weight)
    if pair is None or pair[0][0].shape != input.shape:
        return NotImplemented
    (x, t, w, p), dtype = pair
    hits = t * element_losses("softplus", -x)
    losses = (1 - t) * element_losses("softplus", x) + (hits if p is None else p * hits)
    return _of_elements(losses if w is None else losses * w, reduction, dtype)


HANDLERS: dict[str, Callable[..., Any]] = {
    "nll_loss": _class_losses("nll_loss"), "nll_loss2d": _class_losses("nll_loss2d"),
    "nll_loss_nd": _class_losses("nll_loss_nd"), "mse_loss": _summed(torch._C._nn.mse_loss, _mse_loss),
    "l1_loss": _summed(torch._C._nn.l1_loss, _of_distance("l1_loss", 0.0)),
    "smooth_l1_loss": _summed(torch._C._nn.smooth_l1_loss, _of_distance("smooth_l1_loss", 1.0)),
    "huber_loss": _summed(torch._C._nn.huber_loss, _of_distance("huber_loss", 1.0)),
    "kl_div": _summed(torch.kl_div, _kl_div),
    "binary_cross_entropy_with_logits": _summed(torch.binary_cross_entropy_with_logits, _bce_with_logits),
}  # fmt: skip
