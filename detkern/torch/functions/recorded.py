"""Operations whose records say how to differentiate them, as PyTorch ops and functions: nothing here names one.

A record's `gradients` maps a variant to its Derivatives: which variant of which operands gives the gradient of each operand. Each
variant becomes `torch.ops.detkern.<variant>`, with a fake kernel, autograd and vmap, and a function of detkern.torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import DTypeError
from ...operations.operation import Derivative, Operation
from ...operations.table import OPERATIONS
from . import ops, route

__all__ = ["FUNCTIONS", "register"]


def register(operation: Operation[Any], library: Any) -> dict[str, Callable[..., Any]]:
    """Define the ops of an operation in a torch.library.Library; the functions for users, by variant."""
    return {variant: _register(operation, variant, library) for variant in operation.gradients}


def _register(operation: Operation[Any], variant: str, library: Any) -> Callable[..., Any]:
    call, derivatives = operation.call(variant), operation.gradients[variant]
    count, shape_of = len(call.operands), operation.shape_of
    assert shape_of is not None

    def kernel(*arguments: Any) -> Any:
        # The dispatcher leaves out arguments that have their default.
        tensors, (out_dtype, backend) = arguments[:count], (*arguments[count:], None, None)[:2]
        with torch.no_grad():
            plain = [tensor.detach() for tensor in tensors]
            shape = tuple(shape_of(variant, [tensor.shape for tensor in plain]))
            return call(plain, shape, out_dtype=out_dtype, backend=backend)

    def fake(*arguments: Any) -> Any:
        tensors, (out_dtype, _) = arguments[:count], (*arguments[count:], None, None)[:2]
        shape = shape_of(variant, [tensor.shape for tensor in tensors])
        return tensors[-1].new_empty(tuple(shape), dtype=out_dtype or tensors[-1].dtype)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        named = dict(zip(call.operands, inputs, strict=False)) | {"out": output}
        needed = dict.fromkeys(source for d in derivatives for source in d.operands if source != "incoming")
        ctx.sources, ctx.backend = tuple(needed), inputs[count + 1]
        ctx.dtypes = [tensor.dtype for tensor in inputs[:count]]
        ctx.save_for_backward(*(named[source] for source in needed))

    def backward(ctx: Any, incoming: Any) -> Any:
        named = dict(zip(ctx.sources, ctx.saved_tensors, strict=True)) | {"incoming": incoming}
        gradients: list[Any] = [None] * (count + 2)
        for derivative in derivatives:
            index = call.operands.index(derivative.of)
            if ctx.needs_input_grad[index]:
                gradients[index] = _gradient(derivative, named, ctx.dtypes[index], ctx.backend)
        return tuple(gradients)

    def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        moved = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(arguments[:count], in_dims, strict=False)
        ]
        return op(*moved, *arguments[count:]), 0

    tensors = ", ".join(f"Tensor {name}" for name in call.operands)
    library.define(
        f"{variant}({tensors}, ScalarType? out_dtype=None, str? backend=None) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
    )
    library.impl(variant, ops.guarded(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"detkern::{variant}", ops.guarded(fake), lib=library)
    torch.library.register_autograd(f"detkern::{variant}", backward, setup_context=setup, lib=library)
    if set(operation.independent(variant)) == {0}:  # a batch is more rows
        torch.library.register_vmap(f"detkern::{variant}", vmap, lib=library)
    op = getattr(torch.ops.detkern, variant).default

    def function(*tensors: Any, out_dtype: Any = None, backend: str | None = None) -> Any:
        for tensor, name in zip(tensors, call.operands, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise DTypeError(
                    f"{name} is no torch.Tensor but {type(tensor).__name__}; {call.module} takes other arrays"
                )
        wanted = None if out_dtype is None else ops.torch_dtype(out_dtype)
        recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if not recorded and not torch.compiler.is_compiling() and route.direct(tensors[0], tensors[-1]):
            return kernel(*tensors, wanted, backend)
        return op(*tensors, wanted, backend)

    function.__name__ = function.__qualname__ = variant
    function.__doc__ = f"`{call.module}.{call.name}` of tensors, with gradients by the same arithmetic."
    return function


def _gradient(derivative: Derivative, named: dict[str, Any], dtype: Any, backend: str | None) -> Any:
    given = [named[source] for source in derivative.operands]
    return getattr(torch.ops.detkern, derivative.variant).default(*given, dtype, backend)


FUNCTIONS: dict[str, Callable[..., Any]] = {}
for _operation in OPERATIONS:
    if _operation.shape_of is not None:
        FUNCTIONS |= register(_operation, ops.library)
