"""Whether a call may go straight to the kernels, and the contract that it freezes.

PyTorch's dispatcher costs a custom op in Python more time than the whole of a small product. So tensors that nothing
watches (no tracer, no mode, no transform, no subclass) pass it by; everything else goes through the
registered ops of ops.py, which give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import has_torch_function_variadic

from ...config import configured_contract
from ...dispatch import registry
from ...tensors import Device
from ...tensors.torch import torch_adapter
from ...vocabulary.contracts import get_contract
from ...vocabulary.dtypes import DTYPES, DType

__all__ = [
    "TYPES",
    "direct",
    "forward_mode",
    "forward_rule",
    "freeze",
    "place",
    "primals",
    "recorded",
    "refuse_cut",
    "tangents",
    "transformed",
]

# Bound once: they are asked in every call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_transforms = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled

_PLAIN = (torch.Tensor, torch.nn.Parameter)
TYPES: dict[Any, DType] = {getattr(torch, dtype.name): dtype for dtype in DTYPES}
_KINDS = {"cpu": "cpu", "cuda": "rocm" if torch.version.hip else "cuda", "musa": "musa", "npu": "ascend"}


def direct(first: Any, second: Any, third: Any = None) -> bool:
    """Whether nothing watches these tensors. `third` may be None."""
    return not (
        type(first) not in _PLAIN
        or type(second) not in _PLAIN
        or (third is not None and type(third) not in _PLAIN)
        or has_torch_function_variadic(first, second)  # true in every torch-function mode
        or _dispatch_modes()
        or _transforms()
        or _tracing_state() is not None
        or (forward_ad._current_level >= 0 and forward_mode())
        or first.is_meta
        # what a Function saved inside of a transform that has ended; PyTorch's dispatcher takes the wrapper off
        or _wrapped(first)
        or _wrapped(second)
        or (third is not None and _wrapped(third))
    )


def forward_mode() -> bool:
    """Whether forward-mode differentiation is at work: a level is entered (one number for all threads), and this thread
    records tangents, which it does not below autograd (see watch.py)."""
    return bool(forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled())


def forward_rule(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """The jvp of an autograd.Function, with tangents recorded: PyTorch calls it with recording off, for the transforms
    around the one that asks too, whose derivatives of the tangent would be zero in silence. Its saved tensors are
    to be taken by `primals`."""

    @functools.wraps(jvp)
    def rule(ctx: Any, *tangents: Any) -> Any:
        before = torch._C._is_fwd_grad_enabled()
        torch._C._set_fwd_grad_enabled(True)
        try:
            return jvp(ctx, *tangents)
        finally:
            torch._C._set_fwd_grad_enabled(before)

    return rule


def primals(ctx: Any) -> list[Any]:
    """What a Function saved, without tangents at the level that asks for one."""
    return [forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors]


def tangents(given: Iterable[Any], dtypes: Iterable[Any]) -> list[Any]:
    """Tangents, None among them too, of their operands' types:
    PyTorch's own of a 0-d tensor plus a number is float64."""
    return [t if t is None else t.to(dtype) for t, dtype in zip(given, dtypes, strict=False)]


def transformed() -> bool:
    """Whether a transform of torch.func is at work, or forward-mode differentiation: both are served by
    autograd.Function, not by ops."""
    active: bool = _transforms() or forward_mode()
    return active


def recorded(first: Any, second: Any, third: Any = None) -> bool:
    """Whether autograd records an operation on these tensors."""
    return _grad_enabled() and (
        first.requires_grad or second.requires_grad or (third is not None and third.requires_grad)
    )


def refuse_cut(tensor: Any, argument: str) -> None:
    """ArgumentError where the storage of a plain tensor was cut short,
    before PyTorch itself reads or writes beyond it."""
    if not torch.compiler.is_compiling() and direct(tensor, tensor):
        torch_adapter().view(tensor.detach(), argument)


def place(tensor: Any) -> tuple[DType, Device] | None:
    """The type and the device of a tensor as detkern names them; None where it has no name for one of them."""
    operand, kind = TYPES.get(tensor.dtype), _KINDS.get(tensor.device.type)
    return None if operand is None or kind is None else (operand, Device(kind, tensor.device.index or 0))


def freeze(contract: str | None, dtype: Any, device: Any, stated: str = "") -> str | None:
    """The name of the contract that a call on operands of this torch type and device follows, now and in its backward.

    None where the type or the device has none: the call itself then says why. `stated` is not used: torch.compile
    compiles anew where config._stated, given for it, has changed.
    """
    if contract is not None:
        return get_contract(contract).name
    operand = TYPES.get(dtype)
    if operand is None:
        return None
    configured = configured_contract(operand)
    if configured is not None:
        return configured.name
    key = (dtype, device)
    name = _defaults.get(key)
    if name is None:
        kind = _KINDS.get(device.type)
        if kind is None:
            return None
        name = registry.contract_for(operand, Device(kind, device.index or 0), None, None).name
        _defaults[key] = name
    return name


# torch.compile calls it while it traces and keeps what it returns: a graph's contract is frozen with the graph. (The
# decorator for this, torch.compiler.assume_constant_result, imports the whole compiler and does nothing more.)
freeze._dynamo_marked_constant = True  # type: ignore[attr-defined]

_defaults: dict[Any, str] = {}
