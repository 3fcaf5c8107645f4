"""The ops that a mode has to see, at the dispatcher's keys of entered.py.

Each overload of aten that coverage.py has a handler for, that strict refuses, or that is composed below Python, has a
kernel at `KEY`; what has a gradient to be summed, and nothing else, has one at `RECORDING`. The dispatcher passes all
others by. A kernel calls the handler with both keys excluded, as a TorchFunctionMode is off while it runs.

What PyTorch itself does inside of an op stays PyTorch's: below autograd, in the levels of torch.func, and in the
formulas of a backward pass. What Python calls there, in a hook or in a checkpoint that runs a forward anew, is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...errors import ArgumentError
from . import broadcasting, coverage, hooks, indexing, losses, products
from .einsum import einsum
from .entered import KEY, NAME, RECORDING, prune

__all__ = ["register"]

_exclude, _is_excluded = (
    torch._C._dispatch_tls_set_dispatch_key_excluded,
    torch._C._dispatch_tls_is_dispatch_key_excluded,
)
_FRONT = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_transforms, _graph_task = torch._C._are_functorch_transforms_active, torch._C._current_graph_task_id
_grad_enabled, _inference, _compiling = (
    torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.compiler.is_compiling,
)  # fmt: skip
_ENGINE = torch.autograd.graph._engine_run_backward.__code__

_get = torch._C._get_obj_in_tls

Action = Callable[[tuple[Any, ...], Any, Any], Any]

_libraries: list[Any] = []


def _cross_entropy(
    mode: Any,
    self: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """aten::cross_entropy_loss's signature."""
    named = ("none", "mean", "sum")[reduction]
    return losses.cross_entropy(mode, self, target, weight, None, ignore_index, None, named, label_smoothing)


def _einsum(mode: Any, equation: str, tensors: Any, *, path: Any = None) -> Any:
    """aten::einsum's signature. The order of the products is the mode's."""
    return einsum(mode, equation, *tensors)


# Functions that are Python of PyTorch's own for a TorchFunctionMode, with other signatures.
_NATIVE: dict[str, Callable[..., Any]] = {
    "cross_entropy_loss": _cross_entropy, "einsum": _einsum, "tensordot": products.tensordot,
}  # fmt: skip
# Handlers of what has a gradient to be summed, and is else PyTorch's.
_READING = frozenset((*indexing.READING, "take", "take_along_dim", "repeat_interleave"))


def register() -> None:
    """Give the dispatcher the kernels, at the first call."""
    if _libraries:
        return
    aten = torch.library.Library("aten", "IMPL")
    for key, kernels in (("TESTING_ONLY_GenericMode", _at_work()), ("TESTING_ONLY_GenericWrapper", _recording())):
        every = torch._C._dispatch_library("IMPL", "_", key)
        every.fallback_fallthrough(key)
        _libraries.append(every)
        for overload, kernel in kernels:
            aten.impl(overload, kernel, key)
    _libraries.append(aten)
    # Operators that take functions of Python ask each key, present ones and those that are still to be defined.
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.extend((KEY, RECORDING))
    for name, operator in torch._ops._higher_order_ops.items():
        operator.fallthrough(RECORDING)
        if name in coverage.UNCOVERED:
            operator.py_impl(KEY)(_kernel(operator, _uncovered(operator)))
        else:
            operator.fallthrough(KEY)


def _at_work() -> Iterator[tuple[Any, Callable[..., Any]]]:
    handled = {coverage.name_of(func) for func in coverage.HANDLERS} - _READING
    names = dict.fromkeys([*handled, *_NATIVE, *coverage.POINTWISE, *coverage.UNCOVERED, *_composed_names()])
    for name, overload in _overloads(names):
        if name in handled or name in _NATIVE:
            yield overload, _kernel(overload, _covered(overload, _NATIVE.get(name)))
        elif name in coverage.POINTWISE:
            yield overload, _kernel(overload, _elementwise(overload, coverage.ELEMENTWISE[overload]))
        elif name in coverage.UNCOVERED:
            yield overload, _kernel(overload, _uncovered(overload))
        elif name not in _READING:
            yield overload, _kernel(overload, _composed(overload))


def _composed_names() -> Iterator[str]:
    """Of what may be made of covered ops below Python."""
    for name in dict.fromkeys(schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()):
        inner = name.startswith(("_", "sym_", "is_", "lift", "q_")) or name.endswith(("_copy", "_backward"))
        if not inner and name.isidentifier() and not {name, name.removesuffix("_")} & coverage.PLAIN:
            yield name


def _recording() -> Iterator[tuple[Any, Callable[..., Any]]]:
    for _, overload in _overloads(_READING):
        if any(argument.name == "out" for argument in overload._schema.arguments):
            continue  # no gradient
        yield overload, _recorded(overload, overload, _covered(overload))
    for name, overload in _overloads(broadcasting.NAMES):
        arguments = overload._schema.arguments
        tensors = [argument for argument in arguments if str(argument.type) == "Tensor"]
        if any(argument.name == "out" for argument in arguments):
            continue
        if len(tensors) > 1 or name == "expand":  # what is broadcast to another one
            plain = getattr(torch, name, overload)
            handler = broadcasting.handler_of(plain, name)
            yield overload, _recorded(overload, plain, _elementwise(overload, handler, plain))


def _overloads(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """aten's overloads of these names that the dispatcher knows and that take a tensor."""
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            found = getattr(packet, overload)
            taken = any("Tensor" in str(argument.type) for argument in found._schema.arguments)
            if taken and torch._C._dispatch_has_kernel(found.name()):
                yield name, found


def _kernel(overload: Any, action: Action) -> Callable[..., Any]:
    """The kernel of an overload, whose result an action gives."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        _exclude(KEY, True)
        _exclude(RECORDING, True)
        try:
            try:
                now = _get(NAME)
            except RuntimeError:  # the key was put back by somebody who had kept it
                return overload(*args, **kwargs)
            if (
                now.suspended
                or (_graph_task() != -1 and _called_by_engine())
                or (_transforms() and _is_excluded(_FRONT))
                or (_is_excluded(_AUTOGRAD) and not _inference())
            ):
                return overload(*args, **kwargs)
            if not hooks.export_is_seen and _compiling():
                raise ArgumentError(
                    "what traces here (torch.export, say) does not see into batch_invariant_mode with this version of "
                    "PyTorch: trace with strict=True, or outside of the mode"
                )
            return action(now.modes, args, kwargs)
        finally:
            _exclude(KEY, False)
            _exclude(RECORDING, False)

    return kernel


def _recorded(overload: Any, plain: Callable[..., Any], action: Action) -> Callable[..., Any]:
    """As _kernel, for what is PyTorch's where autograd records nothing. `plain` is the op as Python calls it, which
    takes less time."""
    seen = _kernel(overload, action)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _grad_enabled():
            return seen(*args, **kwargs)
        _exclude(RECORDING, True)
        try:
            return plain(*args, **kwargs)
        finally:
            _exclude(RECORDING, False)

    return kernel


def _called_by_engine() -> bool:
    """Whether the Python that runs below the kernel is the start of a backward pass, or none at all, in a thread of the
    engine."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is None or frame.f_code is _ENGINE


# Actions: (modes, args, kwargs) -> the result. The innermost mode decides; what it leaves to PyTorch goes to the next.


def _covered(overload: Any, native: Callable[..., Any] | None = None) -> Action:
    """By a handler as in products.py."""
    name = coverage.name_of(overload)

    def run(modes: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        mode = modes[0]
        if mode.ended:
            return _ended(run, modes, overload)(*args, **kwargs)
        result = (native or coverage.HANDLERS[overload])(mode, *args, **kwargs)
        if result is NotImplemented:
            return mode.left_to_pytorch(_next(run, modes, overload), name, args, kwargs)
        return result

    return run


def _elementwise(overload: Any, handler: Callable[..., Any], plain: Callable[..., Any] | None = None) -> Action:
    """By a handler, and what it does not take is PyTorch's, unwatched."""
    plain = plain or overload

    def run(modes: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        if modes[0].ended:
            return _ended(run, modes, plain)(*args, **kwargs)
        result = handler(modes[0], *args, **kwargs)
        return _next(run, modes, plain)(*args, **kwargs) if result is NotImplemented else result

    return run


def _uncovered(overload: Any) -> Action:
    """Refused, or said."""
    name = coverage.name_of(overload)

    def run(modes: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        if modes[0].ended:
            return _ended(run, modes, overload)(*args, **kwargs)
        modes[0].uncovered(name, "", *args, *kwargs.values())
        return _next(run, modes, overload)(*args, **kwargs)

    return run


def _composed(overload: Any) -> Action:
    """Watched."""
    name = coverage.name_of(overload)

    def run(modes: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        if modes[0].ended:
            return _ended(run, modes, overload)(*args, **kwargs)
        return modes[0].left_to_pytorch(_next(run, modes, overload), name, args, kwargs)

    return run


def _next(run: Action, modes: tuple[Any, ...], op: Callable[..., Any]) -> Callable[..., Any]:
    """The op as it is around modes[0]."""
    return op if len(modes) == 1 else lambda *args, **kwargs: run(modes[1:], args, kwargs)


def _ended(run: Action, modes: tuple[Any, ...], op: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where modes[0] has ended elsewhere."""
    prune()
    return _next(run, modes, op)
