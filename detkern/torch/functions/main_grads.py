"""The accumulators of `accumulate=True`: which one a backward adds to, and how an optimizer gets them.

`parameter.main_grad` takes the place of `parameter.grad`: a backward that runs down to the parameter adds to it, one
that asks for other gradients alone does not, and torch.autograd.grad returns the gradient and adds nothing.

An operation that uses a parameter is one *use* of it. Within one backward the uses are numbered as the backward comes
to them, so the last operation of the forward is the first use. The first use adds to `main_grad`, the next ones to the
tensors of the list `parameter.further_main_grads`, each an unbroken chain over the micro-batches. A parameter that has
no such list (`zero_main_grads` makes it) adds all uses to main_grad.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ArgumentError, DetkernError, DeviceError, DTypeError, ShapeError
from .casting import OPERANDS

__all__ = [
    "asked",
    "check",
    "destination",
    "main_grads_to_grad",
    "mark",
    "marked",
    "need_module",
    "need_no_graph",
    "running_destination",
    "zero",
]

# On a parameter whose gradient the functions of batch_invariant_mode gather, without being told to in the call.
_MARK = "_detkern_accumulate"
# On the parameter: (graph task, uses that it has come to), and how many uses hold what no optimizer has been given.
_USES, _PENDING = "_detkern_uses", "_detkern_pending"
_warned: weakref.WeakSet[Any] = weakref.WeakSet()
_hooks: list[Any] = []


def mark(parameter: Any, on: bool = True) -> None:
    """Have every operation under batch_invariant_mode add the parameter's gradient to its main_grad, or no operation
    any more. Only of a plain parameter of an operand's type; others are autograd's."""
    if not on:
        parameter.__dict__.pop(_MARK, None)
    elif type(parameter) is torch.nn.Parameter and parameter.dtype in OPERANDS:
        setattr(parameter, _MARK, True)


def marked(parameter: Any) -> bool:
    """Whether `mark` has been called for it."""
    return getattr(parameter, _MARK, False)


def need_no_graph(instead: str) -> None:
    """ArgumentError in a backward that is itself recorded. instead: what to do then."""
    if torch.is_grad_enabled():
        raise ArgumentError(
            f"accumulate=True adds to main_grad, which records nothing, so its backward cannot be differentiated: "
            f"{instead}"
        )


def _leaves(functions: Any) -> list[Any]:
    """Among the next functions of a node, those of parameters that have a main_grad."""
    found = []
    for function, _ in functions:
        # Between the operation and its parameter there may be a transposition and a cast, as autocast's.
        for _ in range(2):
            if function is not None and not hasattr(function, "variable") and len(function.next_functions) == 1:
                function = function.next_functions[0][0]
        if function is not None and getattr(getattr(function, "variable", None), "main_grad", None) is not None:
            found.append(function)
    return found


def _of(leaves: list[Any], main_grad: Any) -> Any:
    """The leaf whose parameter has this main_grad, or the memory of it; None where there is none."""
    pointer = main_grad.data_ptr()
    for leaf in leaves:
        own = leaf.variable.main_grad
        if own is main_grad or (own.data_ptr() == pointer and pointer != 0):
            return leaf
    return None


def _reached(leaf: Any) -> bool | None:
    """Whether the backward that is running will come to this leaf; None where torch.autograd.grad asks for its
    gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # its answer for a leaf whose gradient is to be returned, not accumulated
        return None


def asked(functions: Any, main_grad: Any) -> bool | None:
    """Whether a backward asks for the gradient of the parameter with this main_grad; None where torch.autograd.grad
    does, which returns gradients and accumulates none.

    Args:
        functions: the `next_functions` of the node that is running its backward.
        main_grad: the parameter's, or a transposed view of it.
    """
    leaf = _of(_leaves(functions), main_grad)
    return True if leaf is None else _reached(leaf)


def destination(functions: Any, main_grad: Any) -> Any:
    """The tensor that the operation adds its parameter's gradient to, laid as main_grad; None where it is not asked
    for.

    Args:
        functions: the `next_functions` of the node that is running its backward; () where no node is.
        main_grad: the parameter's, a transposed view of it, or a copy that a compiler made of it.

    Raises:
        ArgumentError: a compiled backward cannot give what is asked for.
    """
    leaves = _leaves(functions)
    leaf = _of(leaves, main_grad)
    reached = {_reached(x) for x in (leaves if leaf is None else [leaf])}
    if None in reached:
        raise ArgumentError(
            "torch.autograd.grad asks for the gradient of a parameter whose compiled backward adds it to main_grad: "
            "call "
            "backward(), or torch.autograd.grad on the model that is not compiled"
        )
    if len(reached) == 2:
        raise ArgumentError(
            "backward(inputs=...) names some of the parameters that a compiled backward adds gradients of to "
            "main_grad: name "
            "all or none of them, or call the model that is not compiled"
        )
    if reached == {False}:
        return None
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_warn_of_a_silent_step))
    for each in leaves if leaf is None else [leaf]:
        setattr(each.variable, _PENDING, max(getattr(each.variable, _PENDING, 0), 1))
    if leaf is None:
        return main_grad
    return _of_this_use(leaf.variable, main_grad)


def running_destination(main_grad: Any) -> Any:
    """`destination` for the node that is running its backward, if any, as the ops that accumulate ask: what a backward
    asks for is known only when it runs, not when a compiler traces it."""
    node = torch._C._current_autograd_node()
    return main_grad if node is None else destination(node.next_functions, main_grad)


def _of_this_use(parameter: Any, main_grad: Any) -> Any:
    task = torch._C._current_graph_task_id()
    before, use = getattr(parameter, _USES, (None, 0))
    use = use if before == task else 0
    setattr(parameter, _USES, (task, use + 1))
    further = getattr(parameter, "further_main_grads", None)
    if use == 0 or further is None:
        return main_grad
    setattr(parameter, _PENDING, max(getattr(parameter, _PENDING), use + 1))
    while len(further) < use:
        further.append(_zeros(parameter))
    found = further[use - 1]
    return found if found.stride() == main_grad.stride() else found.t()


def _zeros(parameter: Any) -> Any:
    return torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format, requires_grad=False)


def zero(*parameters: Any) -> None:
    """Set the accumulators of parameters to zeros, making main_grad where there is none that fits."""
    for parameter in parameters:
        lazy = isinstance(parameter, torch.nn.parameter.UninitializedParameter)
        if lazy or not isinstance(parameter, torch.nn.Parameter) or hasattr(parameter, "device_mesh"):
            raise ArgumentError(
                f"accumulate=True needs parameters that hold their elements, and one here is a "
                f"{type(parameter).__name__}: "
                "call a lazy layer once before, and use layers without accumulate where weights are computed or "
                "sharded "
                "(FSDP, tensor parallelism)"
            )
    if any(getattr(p, _PENDING, 0) > 1 and getattr(p, "further_main_grads", None) for p in parameters):
        warnings.warn(
            "zero_main_grads drops further_main_grads, the gradients of further uses of a parameter, which no "
            "optimizer "
            "was given: call detkern.torch.main_grads_to_grad(module) before the step, which adds them to main_grad",
            stacklevel=3,
        )
    for parameter in parameters:
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is None or _misfit(parameter, main_grad, "parameter") is not None:
            parameter.main_grad, parameter.further_main_grads = _zeros(parameter), []
        elif not hasattr(parameter, "further_main_grads"):
            parameter.further_main_grads = []
        _clear(parameter)


def _clear(parameter: Any) -> None:
    for accumulator in (parameter.main_grad, *getattr(parameter, "further_main_grads", ())):
        accumulator.zero_()
    setattr(parameter, _PENDING, 0)


def check(parameter: Any, name: str) -> Any:
    """A parameter's main_grad; an error where it cannot be one. None where there is none."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None and (error := _misfit(parameter, main_grad, name)) is not None:
        raise error
    return main_grad


def _misfit(parameter: Any, main_grad: Any, name: str) -> DetkernError | None:
    """Why main_grad cannot be the accumulator of a parameter; None where it can."""
    if not isinstance(main_grad, torch.Tensor):
        return ArgumentError(
            f"{name}.main_grad is not a torch.Tensor but {type(main_grad).__name__}; give a float32 tensor of shape "
            f"{list(parameter.shape)}"
        )
    if main_grad.dtype != torch.float32:
        return DTypeError(f"{name}.main_grad is {main_grad.dtype}; it must be float32, the accumulator's type")
    if main_grad.shape != parameter.shape:
        return ShapeError(
            f"{name}.main_grad has shape {list(main_grad.shape)}, {name} has {list(parameter.shape)}; they must be "
            f"equal"
        )
    if main_grad.device != parameter.device:
        return DeviceError(
            f"{name}.main_grad is on {main_grad.device}, {name} on {parameter.device}; they must be equal"
        )
    if main_grad.layout is not torch.strided:
        return ArgumentError(f"{name}.main_grad is {main_grad.layout}; give a dense tensor")
    if main_grad.requires_grad:
        return ArgumentError(f"{name}.main_grad requires grad; give {name}.main_grad.detach()")
    return None


def main_grads_to_grad(module: torch.nn.Module) -> None:
    """Give what `main_grad` has gathered to the optimizer: add it to `.grad`, and set it to zeros.

    For every parameter of `module` that has a main_grad, in float32 and in this order: `.grad` where there is one (what
    operations outside of detkern gave the parameter, an embedding for one), + main_grad, + each of further_main_grads.
    The sum is rounded once to the parameter's type and becomes `.grad`. Call it after the last micro-batch, before
    gradients are clipped and before `optimizer.step()`; `optimizer.zero_grad()` stays necessary.

    Args:
        module: searched with all its submodules.

    Raises:
        ArgumentError: module is not a torch.nn.Module.
        DTypeError, ShapeError, DeviceError, ArgumentError: a main_grad that is not a float32 tensor of its parameter's
            shape and device; nothing is changed.
    """
    need_module(module)
    parameters = [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and check(parameter, name) is not None
    ]
    with torch.no_grad():
        for parameter in parameters:
            _hand_over(parameter)


def need_module(module: Any) -> None:
    """ArgumentError for what is not a torch.nn.Module."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"module is not a torch.nn.Module but {type(module).__qualname__}; give the one that holds the layers"
        )


def _hand_over(parameter: Any) -> None:
    grad, total = parameter.grad, parameter.main_grad
    dense = grad is not None and grad.layout is torch.strided
    if grad is not None:
        total = (grad if dense else grad.to_dense()).float() + total
    for further in getattr(parameter, "further_main_grads", ()):
        total = total + further
    if dense:
        grad.copy_(total)
    else:
        parameter.grad = total.to(parameter.dtype, copy=True)
    _clear(parameter)


def _warn_of_a_silent_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: parameters whose gradients it cannot see."""
    if torch.compiler.is_compiling() or optimizer in _warned:
        return
    silent = sum(
        getattr(parameter, _PENDING, 0) > 0 and parameter.grad is None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    if silent:
        _warned.add(optimizer)
        warnings.warn(
            f"this step leaves {silent} parameters as they are: accumulate=True gathered their gradients in main_grad "
            f"and "
            "their .grad is None; call detkern.torch.main_grads_to_grad(model) before optimizer.step()",
            stacklevel=3,
        )
