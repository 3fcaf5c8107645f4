"""Losses of elements in float32, with their slopes (docs/contracts.md, "Losses"): what the sums of losses are made of.
One op (registration.py says what that is), told apart by a kind, so that compilers and transforms see no more than it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import route
from .registration import Op, call

__all__ = ["OPS", "element_losses"]


def element_losses(kind: str, d: torch.Tensor, parameter: float = 0.0) -> torch.Tensor:
    """The loss of each element of d, float32, of any shape.

    Args:
        kind: "l1", "smooth_l1" (parameter: beta), "huber" (parameter: delta), or "softplus", log(1 + exp(d)).
        d: input - target; of softplus what it is of.
    """
    return call(ELEMENT_LOSSES, (d, kind, float(parameter)), d, d)


class _Kind(NamedTuple):
    """value, slope: of (d, parameter). A slope is made of what PyTorch differentiates."""

    value: Callable[[Any, float], Any]
    slope: Callable[[Any, float], Any]


def _divided(x: Any, divisor: float) -> Any:
    return x / torch.full((), divisor, dtype=torch.float32, device=x.device)


def _smooth_l1(d: Any, beta: float) -> Any:
    z = d.abs()
    return torch.where(z < beta, _divided(z * 0.5 * z, beta), z - 0.5 * beta)


def _huber(d: Any, delta: float) -> Any:
    z = d.abs()
    return torch.where(z <= delta, z * 0.5 * z, (z - 0.5 * delta) * delta)


def _softplus(d: Any, _: float) -> Any:
    return d.clamp(min=0) + (-d.abs()).exp().log1p()


def _sigmoid(d: Any, _: float) -> Any:
    e = (-d.abs()).exp()
    return torch.where(d < 0, e, 1.0) / (e + 1)


_KINDS = {
    "l1": _Kind(lambda d, _: d.abs(), lambda d, _: d.sgn()),
    "smooth_l1": _Kind(_smooth_l1, lambda d, beta: _divided(d, beta).clamp(-1, 1)),
    "huber": _Kind(_huber, lambda d, delta: d.clamp(-delta, delta)),
    "softplus": _Kind(_softplus, _sigmoid),
}


def _kernel(d: Any, kind: str, parameter: float) -> Any:
    return _KINDS[kind].value(d, parameter)


def _fake(d: Any, kind: str, parameter: float) -> Any:
    return d.new_empty(d.shape)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    d, ctx.kind, ctx.parameter = inputs
    ctx.save_for_backward(d)


def _backward(ctx: Any, incoming: Any) -> tuple[Any]:
    (d,) = ctx.saved_tensors
    return (incoming * _KINDS[ctx.kind].slope(d, ctx.parameter),)


def _jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
    (d,) = route.primals(ctx)
    return tangent.to(d.dtype) * _KINDS[ctx.kind].slope(d, ctx.parameter)


def _vmap(again: Any, size: int, dims: Sequence[Any], d: Any, *settings: Any) -> tuple[Any, Any]:
    return again(d, *settings), dims[0]


ELEMENT_LOSSES = Op(
    "element_losses",
    "(Tensor d, str kind, float parameter) -> Tensor",
    _kernel,
    _fake,
    setup=_setup,
    backward=_backward,
    kept=lambda arguments, output: (arguments[0],),
    jvp=_jvp,
    vmap=_vmap,
)
OPS = (ELEMENT_LOSSES,)
