"""The gradients of row operations, free of any framework: backwards, the backwards of these, and forward mode.

A rule gets a Framework, which calls row operations that are differentiable again, so what a rule gives can be
differentiated in turn. Between row operations all is elementwise, in float32, and rounded once to the type of the
operand:

- A product of two rows that is summed is rounded element by element and then summed by the sum's rule, as in the
  gradient of softmax (docs/contracts.md, "Row operations").
- The incoming gradient is rounded to the operand's type where it meets a row operation's second operand in a backward
  of a backward.

The variants are those of operation.py. `mean_backward` has a number, its width, for a second operand; all others are
arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

__all__ = ["RULES", "Framework", "Recorded", "Rule"]


class Framework(Protocol):
    """What a rule needs of a framework, beside +, -, * and [..., 0] of its arrays."""

    @property
    def float32(self) -> Any:
        """The framework's name for the type."""

    def call(self, variant: str, out_dtype: Any, *operands: Any) -> Any:
        """A row operation, differentiable: as the function of detkern.rows."""

    def cast(self, x: Any, dtype: Any) -> Any:
        """x, each element rounded to a type."""

    def exp(self, x: Any) -> Any:
        """The exponential of a float32 array, element by element."""

    def column(self, x: Any) -> Any:
        """[..] as [.., 1]."""

    def spread(self, x: Any, width: Any) -> Any:
        """[..] as [.., width], each number repeated."""


class Recorded(NamedTuple):
    """What a rule knows of the forward.

    saved:  the arrays among its operands ("in"), its result ("out") or none, as the rule's `saves` says.
    dtypes: the types of the arrays among its operands.
    width:  the columns of its rows.
    """

    saved: Sequence[Any]
    dtypes: Sequence[Any]
    width: Any


Backward = Callable[[Framework, Recorded, Any], tuple[Any, ...]]
# (framework, operands that are arrays, result, its type, the operands' tangents, None among them, columns) -> the
# result's tangent, of its type.
Forward = Callable[[Framework, Sequence[Any], Any, Any, Sequence[Any], Any], Any]


class Rule(NamedTuple):
    """saves: what the backward needs. backward: the gradients of the arrays among the operands. forward: of forward
    mode."""

    saves: Literal["in", "out", "none"]
    backward: Backward
    forward: Forward


def _dot(f: Framework, u: Any, v: Any) -> Any:
    """The sum of each row's products, [.., 1], of float32 arrays: never without dimensions, where numbers are of
    another type to PyTorch."""
    return f.column(f.call("sum", f.float32, u * v))


def _floats(f: Framework, *arrays: Any) -> list[Any]:
    return [f.cast(x, f.float32) for x in arrays]


def _by_call(variant: str) -> Backward:
    """The backward that is a row operation of the incoming gradient and of what was saved."""

    def backward(f: Framework, forward: Recorded, dy: Any) -> tuple[Any, ...]:
        return (f.call(variant, forward.dtypes[0], dy, *(forward.saved or (forward.width,))),)

    return backward


def _of_incoming(variant: str) -> Backward:
    """The backward that is a row operation of the incoming gradient alone."""

    def backward(f: Framework, forward: Recorded, dy: Any) -> tuple[Any, ...]:
        return (f.call(variant, forward.dtypes[0], dy),)

    return backward


def _sum_backward(f: Framework, forward: Recorded, dy: Any) -> tuple[Any, ...]:
    return (f.spread(f.cast(dy, forward.dtypes[0]), forward.width),)


# The backwards of the backwards.


def _mean_backward_backward(f: Framework, forward: Recorded, g: Any) -> tuple[Any, ...]:
    # Of no columns a sum: 0, which the mean of nothing is not.
    return (f.call("mean" if g.shape[-1] else "sum", forward.dtypes[0], g),)


def _mean_square_backward_backward(f: Framework, forward: Recorded, g: Any) -> tuple[Any, ...]:
    (dy, x), (dy_type, x_type) = forward.saved, forward.dtypes
    g = f.cast(g, x_type)
    ddy = (_dot(f, f.cast(g, f.float32), f.cast(x, f.float32)) * (2.0 / max(forward.width, 1)))[..., 0]
    return f.cast(ddy, dy_type), f.call("mean_square_backward", x_type, dy, g)


def _softmax_backward_backward(f: Framework, forward: Recorded, g: Any) -> tuple[Any, ...]:
    # dx = y (dy - <y, dy>): symmetric in dy; for y, g (dy - <y, dy>) - dy <y, g>.
    (dy, y), (dy_type, y_type) = forward.saved, forward.dtypes
    g = f.cast(g, y_type)
    g32, dy32, y32 = _floats(f, g, dy, y)
    by_y = g32 * (dy32 - _dot(f, y32, dy32)) - dy32 * _dot(f, y32, g32)
    return f.call("softmax_backward", dy_type, g, y), f.cast(by_y, y_type)


def _log_softmax_backward_backward(f: Framework, forward: Recorded, g: Any) -> tuple[Any, ...]:
    # dx = dy - exp(y) sum(dy): for dy, g - <g, exp(y)>; for y, -g exp(y) sum(dy).
    (dy, y), (dy_type, y_type) = forward.saved, forward.dtypes
    g32, y32 = _floats(f, g, y)
    p = f.exp(y32)
    by_dy = g32 - _dot(f, g32, p)
    by_y = -(g32 * p) * f.column(f.call("sum", f.float32, dy))
    return f.cast(by_dy, dy_type), f.cast(by_y, y_type)


# Forward mode.


def _linear_forward(variant: str) -> Forward:
    def forward(f: Framework, operands: Any, y: Any, out_dtype: Any, tangents: Any, width: Any) -> Any:
        return f.call(variant, out_dtype, tangents[0])

    return forward


def _mean_square_forward(f: Framework, operands: Any, y: Any, out_dtype: Any, tangents: Any, width: Any) -> Any:
    x, dx = _floats(f, operands[0], tangents[0])
    return f.cast((_dot(f, x, dx) * (2.0 / width if width else math.nan))[..., 0], out_dtype)


def _softmax_forward(f: Framework, operands: Any, y: Any, out_dtype: Any, tangents: Any, width: Any) -> Any:
    # Its Jacobian is symmetric.
    return f.call("softmax_backward", out_dtype, f.cast(tangents[0], out_dtype), y)


def _log_softmax_forward(f: Framework, operands: Any, y: Any, out_dtype: Any, tangents: Any, width: Any) -> Any:
    dx, y32 = _floats(f, tangents[0], y)
    return f.cast(dx - _dot(f, dx, f.exp(y32)), out_dtype)


def _backward_forward(variant: str) -> Forward:
    """The backwards are linear in dy; `more` is what the second operand adds."""

    def forward(f: Framework, operands: Any, y: Any, out_dtype: Any, tangents: Any, width: Any) -> Any:
        dy, by_dy, by_second = operands[0], tangents[0], tangents[1] if len(operands) > 1 else None
        found = None
        if by_dy is not None:
            found = f.call(variant, out_dtype, by_dy, operands[1] if len(operands) > 1 else width)
        if by_second is None:
            return found
        if variant == "mean_square_backward":
            more = f.call(variant, out_dtype, dy, by_second)
        else:
            y, t, u = _floats(f, operands[1], by_second, dy)
            if variant == "softmax_backward":
                more = f.cast(t * (u - _dot(f, y, u)) - y * _dot(f, t, u), out_dtype)
            else:
                more = f.cast(-(t * f.exp(y)) * f.column(f.call("sum", f.float32, dy)), out_dtype)
        return more if found is None else found + more

    return forward


RULES: Mapping[str, Rule] = {
    "sum": Rule("none", _sum_backward, _linear_forward("sum")),
    "mean": Rule("none", _by_call("mean_backward"), _linear_forward("mean")),
    "mean_square": Rule("in", _by_call("mean_square_backward"), _mean_square_forward),
    "softmax": Rule("out", _by_call("softmax_backward"), _softmax_forward),
    "log_softmax": Rule("out", _by_call("log_softmax_backward"), _log_softmax_forward),
    "cumsum": Rule("none", _of_incoming("cumsum_backward"), _linear_forward("cumsum")),
    "mean_backward": Rule("none", _mean_backward_backward, _backward_forward("mean_backward")),
    "mean_square_backward": Rule("in", _mean_square_backward_backward, _backward_forward("mean_square_backward")),
    "softmax_backward": Rule("in", _softmax_backward_backward, _backward_forward("softmax_backward")),
    "log_softmax_backward": Rule("in", _log_softmax_backward_backward, _backward_forward("log_softmax_backward")),
    "cumsum_backward": Rule("none", _of_incoming("cumsum"), _linear_forward("cumsum_backward")),
}
