"""Sums, means and softmaxes as PyTorch names them, under batch_invariant_mode; handlers as in products.py."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..functions import rows
from ..functions.broadcasting import expanded
from .products import finish

__all__ = ["HANDLERS", "NARROW", "chosen", "log_softmax", "typed"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KEPT_BY_AUTOCAST = ("mean", "var", "std")  # which has no rule for them on a GPU
NARROW = (torch.float16, torch.bfloat16)


def chosen(x: Any, dim: Any) -> list[int] | None:
    """The dimensions that dim means, or None for what PyTorch is to refuse. Of a number 0 and -1 name none."""
    rank, size = x.dim(), x.dim() or 1
    if type(dim) is int:
        return [dim % size][:rank] if -size <= dim < size else None
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(rank))
    dims = [_number(d) for d in dim] if isinstance(dim, (tuple, list)) else [_number(dim)]
    if any(d is None or not -size <= d < size for d in dims):
        return None
    dims = [d % size for d in dims]
    return dims[:rank] if len(set(dims)) == len(dims) else None


def _number(dim: Any) -> Any:
    """A dimension as a whole number; None for a name."""
    if isinstance(dim, int):
        return dim
    return operator.index(dim) if hasattr(dim, "__index__") else None


def typed(mode: Any, op: str, x: Any, dtype: Any, out: Any) -> tuple[Any, Any] | None:
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
    if dtype in (torch.float32, *NARROW) and not x.is_floating_point() and not x.is_complex():
        x = x.to(dtype)
    if dtype is not None and dtype != x.dtype and dtype not in (torch.float32, *NARROW):
        if mode.covers(op, x) and (dtype.is_floating_point or dtype.is_complex):
            mode.uncovered(op, str(dtype), x)
        return None
    if not mode.covers(op, x) and (dtype is None or x.is_floating_point() or x.is_complex()):
        return None
    if not x.is_floating_point() or x.dtype not in (torch.float32, *NARROW):
        return None
    if dtype is None and op not in _KEPT_BY_AUTOCAST and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.float32
    if dtype in NARROW and x.dtype != dtype:
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
        types = typed(mode, op, input, dtype, out)
        if types is None:
            return NotImplemented
        x, result_dtype = types
        dims = chosen(x, dim)
        if dims is None:
            return NotImplemented
        run = rows.mean if op == "mean" else rows.sum
        if not dims:  # of no dimensions: one number, a row by itself
            return finish(run(x.reshape(1), out_dtype=result_dtype).reshape(()), out)
        return finish(run(x, dims, keepdim, out_dtype=result_dtype), out)

    return handler


def _softmax(op: str) -> Callable[..., Any]:
    run = rows.softmax if op == "softmax" else rows.log_softmax

    def handler(mode: Any, input: Any, dim: Any = None, dtype: Any = None, *, out: Any = None) -> Any:
        types = typed(mode, op, input, dtype, out)
        if types is None:
            return NotImplemented
        x, result_dtype = types
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
