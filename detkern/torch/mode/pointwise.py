"""sigmoid, silu, gelu and rsqrt on the CPU, under batch_invariant_mode; handlers as in products.py.

PyTorch's CPU kernels compute these in vectors, and what is left over at the end of a thread's share by other code with
other bits: an element's result depends on where it stands, so on the batch. Here they are made of exp, erf, tanh and
the arithmetic operations, in float32, whose vectors and leftovers agree; 16-bit results are rounded once. On a GPU each
element is computed alike, and PyTorch's own kernels are left to it, as they are under torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..functions import route

__all__ = ["HANDLERS"]


class _Sigmoid(torch.autograd.Function):  # type: ignore[misc]
    """1 / (1 + exp(-x)) with e = exp(-|x|), which does not overflow."""

    generate_vmap_rule = True

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


def _unary(run: Callable[[Any], Any]) -> Callable[..., Any]:
    def handler(mode: Any, input: Any, *, out: Any = None) -> Any:
        if not _on_cpu(mode, input) or out is not None:
            return NotImplemented
        return _rounded(run, input)

    return handler


def _in_place(run: Callable[[Any], Any]) -> Callable[..., Any]:
    def handler(mode: Any, input: Any) -> Any:
        return input.copy_(_rounded(run, input)) if _on_cpu(mode, input) else NotImplemented

    return handler


def functional_silu(mode: Any, input: Any, inplace: bool = False) -> Any:
    """torch.nn.functional.silu's signature."""
    return _in_place(_silu)(mode, input) if inplace else _unary(_silu)(mode, input)


def gelu(mode: Any, input: Any, *, approximate: str = "none") -> Any:
    if not _on_cpu(mode, input) or approximate not in ("none", "tanh"):
        return NotImplemented
    return _rounded(_gelu if approximate == "none" else _gelu_tanh, input)


HANDLERS: dict[str, Callable[..., Any]] = {
    "sigmoid": _unary(_sigmoid), "sigmoid_": _in_place(_sigmoid), "special_expit": _unary(_sigmoid),
    "silu": _unary(_silu), "silu_": _in_place(_silu), "gelu": gelu, "rsqrt": _unary(torch.rsqrt),
    "rsqrt_": _in_place(torch.rsqrt),
}  # fmt: skip
