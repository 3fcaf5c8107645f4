"""Operations whose records say how to differentiate them, as PyTorch ops and functions: nothing here names one.

A record's `gradients` maps a variant to its Derivatives: which variant of which operands gives the gradient of each
operand. Each variant becomes `torch.ops.detkern.<variant>`, with a fake kernel, autograd and vmap, and a function of
detkern.torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import DTypeError
from ...operations.operation import Derivative, Operation
from ...operations.table import OPERATIONS
from .casting import torch_dtype
from .registration import Op, call

__all__ = ["FUNCTIONS", "OPS", "function_of", "op_of"]


def op_of(operation: Operation[Any], variant: str) -> Op:
    """The op of a variant that the record's `gradients` lists."""
    public, derivatives = operation.call(variant), operation.gradients[variant]
    count, shape_of = len(public.operands), operation.shape_of
    assert shape_of is not None

    def kernel(*arguments: Any) -> Any:
        *tensors, out_dtype, backend = arguments
        shape = tuple(shape_of(variant, [tensor.shape for tensor in tensors]))
        return public(tensors, shape, out_dtype=out_dtype, backend=backend)

    def fake(*arguments: Any) -> Any:
        *tensors, out_dtype, _ = arguments
        shape = shape_of(variant, [tensor.shape for tensor in tensors])
        return tensors[-1].new_empty(tuple(shape), dtype=out_dtype or tensors[-1].dtype)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        named = dict(zip(public.operands, inputs, strict=False)) | {"out": output}
        needed = dict.fromkeys(source for d in derivatives for source in d.operands if source != "incoming")
        ctx.sources, ctx.backend = tuple(needed), inputs[count + 1]
        ctx.dtypes = [tensor.dtype for tensor in inputs[:count]]
        ctx.save_for_backward(*(named[source] for source in needed))

    def backward(ctx: Any, incoming: Any) -> Any:
        named = dict(zip(ctx.sources, ctx.saved_tensors, strict=True)) | {"incoming": incoming}
        gradients: list[Any] = [None] * count
        for derivative in derivatives:
            index = public.operands.index(derivative.of)
            if ctx.needs_input_grad[index]:
                gradients[index] = _gradient(derivative, named, ctx.dtypes[index], ctx.backend)
        return gradients

    def vmap(call: Any, size: int, dims: Sequence[Any], *arguments: Any) -> tuple[Any, int]:
        moved = [
            tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(arguments[:count], dims, strict=False)
        ]
        return call(*moved, *arguments[count:]), 0

    return Op(
        variant,
        f"({', '.join(f'Tensor {name}' for name in public.operands)}, ScalarType? out_dtype=None, str? backend=None) "
        f"-> Tensor",
        kernel,
        fake,
        setup=setup,
        backward=backward,
        vmap=vmap if set(operation.independent(variant)) == {0} else None,  # a batch is more rows
    )


def _gradient(derivative: Derivative, named: dict[str, Any], dtype: Any, backend: str | None) -> Any:
    given = [named[source] for source in derivative.operands]
    return getattr(torch.ops.detkern, derivative.variant).default(*given, dtype, backend)


def function_of(operation: Operation[Any], op: Op) -> Callable[..., Any]:
    """The function for users, of an op that is registered before it is called."""
    public = operation.call(op.name)

    def function(*tensors: Any, out_dtype: Any = None, backend: str | None = None) -> Any:
        for tensor, name in zip(tensors, public.operands, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise DTypeError(
                    f"{name} is not a torch.Tensor but {type(tensor).__name__}; {public.module} takes other arrays"
                )
        wanted = None if out_dtype is None else torch_dtype(out_dtype)
        third = tensors[1] if len(tensors) > 2 else None
        return call(op, (*tensors, wanted, backend), tensors[0], tensors[-1], third)

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = f"`{public.module}.{public.name}` of tensors, with gradients by the same arithmetic."
    return function


_PAIRS = [
    (operation, op_of(operation, variant))
    for operation in OPERATIONS
    if operation.shape_of is not None
    for variant in operation.gradients
]
OPS = tuple(op for _, op in _PAIRS)
FUNCTIONS = {op.name: function_of(operation, op) for operation, op in _PAIRS}
