"""torch.func.functionalize through detkern's autograd.Functions.

PyTorch has no rule for an autograd.Function there and says so by an error. None of detkern's changes an operand or
gives a view of one that is written to, so the rule is to call it below with what the functional tensors hold. It is put
in front of PyTorch's, which keeps every other Function.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

__all__ = ["overwritten", "register"]


def register() -> None:
    """Have functionalize call each Function that has a `below`, a function of its operands, by that."""
    table = custom_function_call.functorch_table
    others = table[TransformType.Functionalize]
    if isinstance(others, functools.partial):  # the module is imported anew
        others = others.args[0]
    table[TransformType.Functionalize] = functools.partial(_rule, others)


def _rule(others: Any, interpreter: Any, function: Any, *operands: Any, **named: Any) -> Any:
    below = getattr(function, "below", None)
    if below is None:
        return others(interpreter, function, *operands, **named)
    functional = FunctorchFunctionalizeAPI(interpreter)
    plain = functional.unwrap_tensors(operands)
    with functional.redispatch_to_next():
        result = below(*plain)
    return functional.wrap_tensors(result)


def overwritten(target: Any, value: Any) -> Any:
    """target.copy_(value); through functionalize, which makes of it an op without derivatives, by one that has them."""
    if torch._C._are_functorch_transforms_active() and any(
        level.key() == TransformType.Functionalize for level in torch._C._functorch.get_interpreter_stack() or ()
    ):
        return target.masked_scatter_(torch.ones_like(target, dtype=torch.bool), value.to(target.dtype))
    return target.copy_(value)
