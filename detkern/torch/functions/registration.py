"""How an operation becomes an op of PyTorch's dispatcher and an autograd.Function: one record, registered in one way.

An Op has two forms, and both have one kernel, one backward and one vmap rule:

- `torch.ops.detkern.<name>`, for compilers, tracers, modes and subclasses;
- an autograd.Function in the new style, which torch.func and forward-mode differentiation need.

`call` picks the form that fits the tensors. table.py holds all ops and registers them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ArgumentError
from . import route
from .casting import autocast

__all__ = ["Op", "call", "library", "register"]

library = torch.library.Library("detkern", "FRAGMENT")
# Any strides are read where they lie, so a compiler need not copy an operand into those that it saw when tracing.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


@dataclass(frozen=True, eq=False)
class Op:
    """An op. Every function gets all arguments of the schema, in its order, with defaults filled in.

    name:     in torch.ops.detkern.
    schema:   its arguments and results, as torch.library.Library.define takes them.
    kernel:   computes it, on tensors that record nothing.
    plain:    the same on tensors of which `route.direct` is true, where that takes less.
    fake:     shapes and types of the results, and the errors that need no data. Sizes may be symbolic.
    setup:    (ctx, inputs, output), as PyTorch's setup_context: saves what `backward` needs.
    backward: (ctx, *gradients of the results) -> those of the leading arguments; the others have none.
    kept:     (arguments, output) -> the tensors that `jvp` finds by route.primals(ctx).
    jvp:      (ctx, *tangents of the arguments) -> that of the result. None: forward-mode differentiation is refused.
    vmap:     (call, size, in_dims, *arguments) -> the result and the place of its batch dimension; `call` takes the
              arguments.
    autocast: so many leading arguments are cast as torch.nn.functional.linear's are.
    """

    name: str
    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    setup: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    kept: Callable[..., Sequence[Any]] = lambda arguments, output: ()
    jvp: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    autocast: int = 0
    plain: Callable[..., Any] | None = None

    @functools.cached_property
    def overload(self) -> Any:
        """The registered op."""
        return getattr(torch.ops.detkern, self.name).default

    @functools.cached_property
    def defaults(self) -> tuple[Any, ...]:
        """Of all arguments; None where there is none."""
        return tuple(argument.default_value for argument in self.overload._schema.arguments)

    @functools.cached_property
    def function(self) -> Any:
        """The autograd.Function."""
        return _function(self)

    def evaluate(self, *arguments: Any) -> Any:
        """The kernel, with nothing recorded."""
        with torch.no_grad():
            return self.kernel(*(_plain(x) if isinstance(x, torch.Tensor) else x for x in arguments))

    def gradients(self, ctx: Any, *incoming: Any) -> tuple[Any, ...]:
        """Those of all arguments."""
        assert self.backward is not None
        found = self.backward(ctx, *incoming)
        return *found, *(None,) * (len(self.defaults) - len(found))


def _plain(x: Any) -> Any:
    """What records nothing, and has memory: forward mode makes zeros that have none."""
    return x.clone() if x._is_zerotensor() else x.detach()


def call(op: Op, arguments: Sequence[Any], first: Any, second: Any, third: Any = None) -> Any:
    """The op on these arguments, in the form that fits the tensors among them: `first`, `second` and, if any,
    `third`."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.detkern, op.name).default(*arguments)
    if route.direct(first, second, third):
        if route.recorded(first, second, third):
            return op.function.apply(*arguments)
        return (op.plain or op.kernel)(*arguments)
    return (op.function.apply if route.transformed() else op.overload)(*arguments)


def register(op: Op) -> None:
    """Define the op in torch.ops.detkern, with all that it has."""
    library.define(op.name + op.schema, tags=_TAGS)
    writes = op.overload._schema.is_mutable
    library.impl(op.name, _guarded(op, op.kernel if writes else op.evaluate), "CompositeExplicitAutograd")
    name = f"detkern::{op.name}"
    torch.library.register_fake(name, _guarded(op, op.fake), lib=library)
    if op.backward is not None:
        torch.library.register_autograd(name, op.gradients, setup_context=op.setup, lib=library)
    if op.vmap is not None:
        rule = op.vmap

        def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
            dims = (*in_dims, *(None,) * (len(op.defaults) - len(in_dims)))
            return rule(op.overload, info.batch_size, dims, *_filled(op, arguments))

        torch.library.register_vmap(name, vmap, lib=library)
    if op.autocast:
        for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            library.impl(op.name, _autocast(op, device), key)


def _filled(op: Op, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The dispatcher leaves out arguments that have their default."""
    return *arguments, *op.defaults[len(arguments) :]


def _guarded(op: Op, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that refuses forward-mode differentiation, whose tangents PyTorch drops at registered ops in silence."""

    @functools.wraps(kernel)
    def guarded(*arguments: Any) -> Any:
        if route.forward_mode():
            raise ArgumentError(
                "torch.ops.detkern has no forward-mode derivative, and torch.compile traces nothing else: call the "
                "functions "
                "of detkern.torch, uncompiled, which have one"
            )
        return kernel(*_filled(op, arguments))

    return guarded


def _autocast(op: Op, device_type: str) -> Callable[..., Any]:
    """torch.nn.functional.linear's and torch.matmul's own rule, which casts every floating operand, bias too, to the
    type that autocast has now. torch.library.register_autocast casts to one type fixed at registration."""
    count = op.autocast

    def kernel(*arguments: Any) -> Any:
        cast = autocast(*arguments[:count])
        with torch.autocast(device_type, enabled=False):
            return op.overload(*cast, *arguments[count:])

    return kernel


def _function(op: Op) -> Any:
    class Function(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(*arguments: Any) -> Any:
            return op.evaluate(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            if op.setup is not None:
                op.setup(ctx, inputs, output)
            ctx.save_for_forward(*op.kept(inputs, output))

        @staticmethod
        def backward(ctx: Any, *incoming: Any) -> Any:
            return op.gradients(ctx, *incoming)

        @staticmethod
        @route.forward_rule
        def jvp(ctx: Any, *tangents: Any) -> Any:
            if op.jvp is None:
                raise ArgumentError(
                    f"{op.name} has no forward-mode derivative: call it outside of forward-mode differentiation"
                )
            return op.jvp(ctx, *tangents)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
            if op.vmap is None:
                raise ArgumentError(f"{op.name} has no rule for torch.func.vmap: call it in a loop")
            return op.vmap(functools.partial(_again, op), info.batch_size, in_dims, *arguments)

    Function.below = functools.partial(_again, op)
    Function.__name__ = Function.__qualname__ = op.name
    return Function


def _again(op: Op, *arguments: Any) -> Any:
    """Below a vmap or functionalize: plain tensors, or those of the next transform."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    return call(op, arguments, tensors[0], tensors[-1], tensors[1] if len(tensors) > 2 else None)
