"""Sums, means and softmaxes as PyTorch names them, under batch_invariant_mode; handlers as in products.py."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from ..functions import rows
from ..functions.broadcasting import expanded
from .products import finish

__all__ = ["HANDLERS", "cross_entropy"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NARROW = (torch.float16, torch.bfloat16)


def _chosen(x: Any, dim: Any) -> list[int] | None:
    """The dimensions that dim means, or None for what PyTorch is to refuse."""
    if type(dim) is int:
        rank = x.dim()
        return [dim % rank] if -rank <= dim < rank else None
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(x.dim()))
    dims = [_number(d) for d in dim] if isinstance(dim, (tuple, list)) else [_number(dim)]
    if any(d is None or not -x.dim() <= d < x.dim() for d in dims):
        return None
    dims = [d % x.dim() for d in dims]
    return dims if len(set(dims)) == len(dims) else None


def _number(dim: Any) -> Any:
    """A dimension as a whole number; None for a name."""
    if isinstance(dim, int):
        return dim
    return operator.index(dim) if hasattr(dim, "__index__") else None


def _types(mode: Any, op: str, x: Any, dtype: Any, out: Any) -> tuple[Any, Any] | None:
    """x as it enters the sum, and the result's type; None where the mode does not cover them.

    A wider type is the result's alone: the operand's conversion is exact.
    """
    if (
        out is None
        and type(x) in _PLAIN
        and x.is_floating_point()
        and (dtype is torch.float32 or (dtype is None and not torch._C._is_any_autocast_enabled()))
    ):  # what most calls are, with nothing asked twice
        return (x, dtype or x.dtype) if mode.covers(op, x) else None
    if dtype is None and out is not None:
        dtype = out.dtype
    if not isinstance(x, torch.Tensor):
        return None
    if dtype in (torch.float32, *_NARROW) and not x.is_floating_point() and not x.is_complex():
        x = x.to(dtype)
    if dtype is not None and dtype != x.dtype and dtype not in (torch.float32, *_NARROW):
        if mode.covers(op, x) and (dtype.is_floating_point or dtype.is_complex):
            mode.uncovered(op, str(dtype), x)
        return None
    if not mode.covers(op, x) and (dtype is None or x.is_floating_point() or x.is_complex()):
        return None
    if not x.is_floating_point() or x.dtype not in (torch.float32, *_NARROW):
        return None
    if dtype is None and op != "mean" and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32
    if dtype in _NARROW and x.dtype != dtype:
        x = x.to(dtype)
    return x, x.dtype if dtype is None else dtype


def _reduction(op: str) -> Callable[..., Any]:
    def handler(
        mode: Any,
        input: Any,
        dim: Any = None,
        keepdim: Any = False,
        *,
        dtype: Any = None,
        out: Any = None,
        axis: Any = None,
        keepdims: Any = None,
    ) -> Any:
        dim = axis if dim is None else dim
        keepdim = keepdim if keepdims is None else keepdims
        typed = _types(mode, op, input, dtype, out)
        if typed is None:
            return NotImplemented
        x, result_dtype = typed
        dims = _chosen(x, dim)
        if dims is None:
            return NotImplemented
        if not dims:  # of no dimensions: one number, which is its own sum
            return finish((x + 0).to(result_dtype), out)
        run = rows.mean if op == "mean" else rows.sum
        return finish(run(x, dims, keepdim, out_dtype=result_dtype), out)

    return handler


def _softmax(op: str) -> Callable[..., Any]:
    run = rows.softmax if op == "softmax" else rows.log_softmax

    def handler(mode: Any, input: Any, dim: Any = None, dtype: Any = None, *, out: Any = None) -> Any:
        typed = _types(mode, op, input, dtype, out)
        if typed is None:
            return NotImplemented
        x, result_dtype = typed
        if dim is None:
            dim = 0 if x.dim() in (0, 1, 3) else 1  # as torch.nn.functional chooses where none is given
        dim = _number(dim)
        if dim is None or not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
            return NotImplemented
        if x.dim() == 0:
            return finish(run(x.reshape(1), out_dtype=result_dtype).reshape(()), out)
        return finish(run(x, dim, out_dtype=result_dtype), out)

    return handler


softmax, log_softmax = _softmax("softmax"), _softmax("log_softmax")


def functional_softmax(mode: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """torch.nn.functional.softmax's signature."""
    return softmax(mode, input, dim, dtype)


def functional_log_softmax(mode: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return log_softmax(mode, input, dim, dtype)


def _raw(handler: Callable[..., Any]) -> Callable[..., Any]:
    """aten::_softmax's signature."""

    def raw(mode: Any, self: Any, dim: int, half_to_float: bool, *, out: Any = None) -> Any:
        return handler(mode, self, dim, torch.float32 if half_to_float else None, out=out)

    return raw


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


def rms_norm(mode: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """x / sqrt(mean_square(x) + eps) in float32, rounded to x's type, times weight. eps is by default that of the
    arithmetic, float32, for 16-bit x too."""
    if not isinstance(normalized_shape, (tuple, list)):
        return NotImplemented
    shape = tuple(normalized_shape)
    if not mode.covers("mean", input, *([] if weight is None else [weight])):
        return NotImplemented
    lead = input.dim() - len(shape)
    if lead < 0 or not shape or tuple(input.shape[lead:]) != shape or (weight is not None and weight.shape != shape):
        return NotImplemented
    x = input.float()
    # With its dimensions, one of them at least: PyTorch's own tangent of a 0-d tensor plus a number is float64.
    square = rows.mean_square(x.flatten(lead)).reshape(*x.shape[:lead], *(1,) * len(shape))
    factor = torch.rsqrt(square + (torch.finfo(torch.float32).eps if eps is None else eps))
    normed = (x * expanded(factor, x.shape)).to(input.dtype)
    return normed if weight is None else normed * expanded(weight, normed.shape)


HANDLERS: dict[str, Callable[..., Any]] = {
    "sum": _reduction("sum"), "mean": _reduction("mean"), "softmax": softmax, "log_softmax": log_softmax,
    "_softmax": _raw(softmax), "_log_softmax": _raw(log_softmax), "special_softmax": softmax,
    "special_log_softmax": log_softmax, "rms_norm": rms_norm,
}  # fmt: skip
