"""Elementwise functions on the CPU, under batch_invariant_mode; handlers as in products.py.

PyTorch's CPU kernels compute some functions in vectors, and what is left over at the end of a thread's share by other
code with other bits: an element's result depends on where it stands, so on the batch. On a GPU each element is computed
alike, and PyTorch's own kernels are left to it, as they are under torch.compile. Here results are of float32, rounded
once, and computed in one of two ways:

- sigmoid, silu, gelu, rsqrt, polar: out of exp, erf, tanh, sin, cos and the arithmetic operations, whose vectors and
  leftovers agree.
- The others as *leftovers* all of them: of operands whose elements lie apart, for which the kernels use no vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..functions import route
from ..functions.broadcasting import expanded
from ..functions.functionalized import overwritten
from .products import finish

__all__ = ["HANDLERS"]


class _Sigmoid(torch.autograd.Function):  # type: ignore[misc]
    """1 / (1 + exp(-x)) with e = exp(-|x|), which does not overflow."""

    @staticmethod
    def forward(x: Any) -> Any:
        e = torch.exp(-x.abs())
        return torch.where(x < 0, e, torch.ones_like(e)) / (e + 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (y,) = ctx.saved_tensors
        return dy * (y * (1 - y))

    @staticmethod
    @route.forward_rule
    def jvp(ctx: Any, dx: Any) -> Any:
        (y,) = route.primals(ctx)
        return dx.to(y.dtype) * (y * (1 - y))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any) -> tuple[Any, Any]:
        return _Sigmoid.apply(x), in_dims[0]

    @staticmethod
    def below(x: Any) -> Any:
        return _Sigmoid.apply(x)


def _sigmoid(x: Any) -> Any:
    return _Sigmoid.apply(x)


def _silu(x: Any) -> Any:
    # At -inf PyTorch gives NaN too.
    return x * _Sigmoid.apply(x)


def _gelu(x: Any) -> Any:
    return x * 0.5 * (torch.erf(x * math.sqrt(0.5)) + 1)


def _gelu_tanh(x: Any) -> Any:
    return x * 0.5 * (torch.tanh((x * x * x * 0.044715 + x) * math.sqrt(2 / math.pi)) + 1)


def _on_cpu(mode: Any, x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and "cpu" in mode.device_types
        and not torch.compiler.is_compiling()
    )


def _rounded(run: Callable[[Any], Any], input: Any) -> Any:
    """run(input) in float32, rounded once; of a number as of a vector of one, whose tangents stay float32."""
    x = input.float()
    return (run(x) if x.dim() else run(x.reshape(1)).reshape(())).to(input.dtype)


def _given(input: Any, run: Callable[[Any], Any], out: Any) -> Any:
    """The result, in `out` where there is one of its type; conversions are PyTorch's."""
    return finish(_rounded(run, input), out) if out is None or out.dtype == input.dtype else NotImplemented


def _unary(run: Callable[[Any], Any]) -> Callable[..., Any]:
    def handler(mode: Any, input: Any, *, out: Any = None) -> Any:
        return _given(input, run, out) if _on_cpu(mode, input) else NotImplemented

    return handler


def _apart(x: Any) -> Any:
    """x with its elements two places from each other in memory."""
    return torch.stack([x, x.detach()], -1)[..., 0]


def _as_leftovers(run: Callable[..., Any]) -> Callable[..., Any]:
    """run(x, settings), of one operand."""

    def handler(mode: Any, input: Any, *settings: Any, out: Any = None, **named: Any) -> Any:
        if not _on_cpu(mode, input):
            return NotImplemented
        return _given(input, lambda x: run(_apart(x), *settings, **named), out)

    return handler


def _as_leftovers_in_place(run: Callable[..., Any]) -> Callable[..., Any]:
    def handler(mode: Any, input: Any, *settings: Any, **named: Any) -> Any:
        return _in_place(lambda x: run(_apart(x), *settings, **named))(mode, input)

    return handler


def _pair(mode: Any, input: Any, other: Any) -> tuple[Any, Any, Any] | None:
    """Both operands in float32 and of one shape, and the result's type; None for what is PyTorch's."""
    if not _on_cpu(mode, input) or not _on_cpu(mode, other):
        return None
    try:
        shape = torch.broadcast_shapes(input.shape, other.shape)
    except RuntimeError:
        return None
    return expanded(input.float(), shape), expanded(other.float(), shape), torch.result_type(input, other)


def _pair_as_leftovers(run: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def handler(mode: Any, input: Any, other: Any, *, out: Any = None) -> Any:
        pair = _pair(mode, input, other)
        if pair is None or (out is not None and out.dtype != pair[2]):
            return NotImplemented
        x, y, dtype = pair
        if not x.dim():
            return finish(run(_apart(x.reshape(1)), _apart(y.reshape(1))).reshape(()).to(dtype), out)
        return finish(run(_apart(x), _apart(y)).to(dtype), out)

    return handler


def _changed(handler: Callable[..., Any]) -> Callable[..., Any]:
    """In place, of two operands."""

    def changed(mode: Any, self: Any, other: Any) -> Any:
        x = self.clone() if torch.is_grad_enabled() and _on_cpu(mode, self) and self.requires_grad else self
        result = handler(mode, x, other)
        fits = result is not NotImplemented and result.shape == self.shape and result.dtype == self.dtype
        return overwritten(self, result) if fits else NotImplemented

    return changed


_scaled = _pair_as_leftovers(lambda x, y: x * torch.pow(2.0, y))


def ldexp(mode: Any, input: Any, other: Any, *, out: Any = None) -> Any:
    if isinstance(other, torch.Tensor) and not (other.is_floating_point() or other.is_complex()):
        other = other.float()  # as torch.pow has it
    return _scaled(mode, input, other, out=out)


def polar(mode: Any, abs: Any, angle: Any, *, out: Any = None) -> Any:
    pair = _pair(mode, abs, angle)
    if pair is None or abs.dtype is not torch.float32 or angle.dtype is not torch.float32:
        return NotImplemented
    r, phi, _ = pair
    return finish(torch.complex(r * torch.cos(phi), r * torch.sin(phi)), out)


def _in_place(run: Callable[[Any], Any]) -> Callable[..., Any]:
    def handler(mode: Any, input: Any) -> Any:
        if not _on_cpu(mode, input):
            return NotImplemented
        # What autograd keeps of the operand must not be written to.
        x = input.clone() if torch.is_grad_enabled() and input.requires_grad else input
        return overwritten(input, _rounded(run, x))

    return handler


def functional_silu(mode: Any, input: Any, inplace: bool = False) -> Any:
    """torch.nn.functional.silu's signature."""
    return _in_place(_silu)(mode, input) if inplace else _unary(_silu)(mode, input)


def gelu(mode: Any, input: Any, *, approximate: str = "none", out: Any = None) -> Any:
    if not _on_cpu(mode, input) or approximate not in ("none", "tanh"):
        return NotImplemented
    return _given(input, _gelu if approximate == "none" else _gelu_tanh, out)


_LEFTOVERS: dict[str, Callable[..., Any]] = {
    "elu": torch._C._nn.elu, "celu": torch.celu, "selu": torch.selu, "mish": torch._C._nn.mish, "exp2": torch.exp2,
    "sinh": torch.sinh, "cosh": torch.cosh, "atanh": torch.atanh, "acos": torch.acos, "asin": torch.asin,
    "acosh": torch.acosh, "asinh": torch.asinh,
}  # fmt: skip
_ATAN2 = _pair_as_leftovers(torch.atan2)
HANDLERS: dict[str, Callable[..., Any]] = {
    "sigmoid": _unary(_sigmoid), "sigmoid_": _in_place(_sigmoid), "special_expit": _unary(_sigmoid),
    "silu": _unary(_silu), "silu_": _in_place(_silu), "gelu": gelu, "rsqrt": _unary(torch.rsqrt),
    "rsqrt_": _in_place(torch.rsqrt), "polar": polar,
    **{name: _as_leftovers(run) for name, run in _LEFTOVERS.items()},
    **{f"{name}_": _as_leftovers_in_place(run) for name, run in _LEFTOVERS.items()},
    "softplus": _as_leftovers(torch._C._nn.softplus), "softshrink": _as_leftovers(torch._C._nn.softshrink),
    "special_i0e": _as_leftovers(torch.special.i0e),
    "atan2": _ATAN2, "atan2_": _changed(_ATAN2), "ldexp": ldexp, "ldexp_": _changed(ldexp),
    "logaddexp": _pair_as_leftovers(torch.logaddexp),
}  # fmt: skip
