"""What modes have to hear of and PyTorch says to nobody: functions put around its own when the first mode is entered.

- `no_grad` and its like: the ops that are seen for the sake of their gradients cost nothing while Python has switched
  autograd off. C++ switches it too, and back, unheard; so they are unseen only inside of such a block.
- A backward pass: its formulas record nothing, unless it makes a graph.
- torch.compile and torch.export, which trace functions of Python: see entered.py.
- The fused path of MultiheadAttention, which PyTorch leaves out where something watches its functions.
- `linear_cross_entropy`, which the mode computes as one, and PyTorch by several ops.

In a thread that is in no mode each does what it did.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import torch

from . import coverage, entered

__all__ = ["export_is_seen", "install", "never_a_graph"]

_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_OUTER = "_detkern_recording"
_installed = False
# PyTorch before 2.7 has nothing to put a function around: kernels.py refuses to be traced there.
export_is_seen = True

F = TypeVar("F", bound=Callable[..., Any])


def never_a_graph(function: F) -> F:
    """For what takes any function of PyTorch as an argument, or asks the dispatcher. After a graph break dynamo
    compiles each function of Python that is called, with no guard on an argument that is a method of C: the graph of
    one would run for another. As a part of another function's graph it is traced as ever."""
    _NEVER_A_GRAPH.append(function.__code__)
    return function


_NEVER_A_GRAPH = [
    function.__code__ for function in (coverage.name_of, entered.current, entered.is_recording, entered.record)
]


def install() -> None:
    """Put them there, once."""
    global _installed
    if _installed:
        return
    _installed = True
    for kind in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode):
        _around_block(kind)
    _around_switch()
    _around_backward()
    _around_fused_attention()
    _around_linear_cross_entropy()
    _after_import("torch._dynamo.eval_frame", _around_compiled)
    _after_import("torch._export.utils", _around_export)


# Recording.


def _around_block(kind: Any) -> None:
    """A block that sets whether autograd records: what it sets holds for the mode too, until its end."""
    enter, leave = kind.__enter__, kind.__exit__

    @never_a_graph
    @functools.wraps(enter)
    def entering(self: Any) -> Any:
        before = entered.is_recording()
        result = enter(self)
        if before is not None:
            entered.record(torch.is_grad_enabled())
        self.__dict__[_OUTER] = before
        return result

    @never_a_graph
    @functools.wraps(leave)
    def leaving(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        before = self.__dict__.pop(_OUTER, None)
        # A mode that was entered inside, or again, sees what the block around it records.
        entered.record(bool(before) or torch.is_grad_enabled())
        return result

    kind.__enter__, kind.__exit__ = entering, leaving


def _around_switch() -> None:
    """torch.set_grad_enabled(True) as a function."""
    before = torch.set_grad_enabled.__init__

    @never_a_graph
    @functools.wraps(before)
    def init(self: Any, mode: bool) -> None:
        before(self, mode)
        if mode:
            entered.record(True)

    torch.set_grad_enabled.__init__ = init


def _around_backward() -> None:
    before = torch.autograd._engine_run_backward

    @never_a_graph
    @functools.wraps(before)
    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        recording = entered.is_recording()
        if recording is None:
            return before(t_outputs, *args, **kwargs)
        # In a transform of torch.func the sums are PyTorch's own. There a number may be a wrapper without memory, with
        # which no kernel in Python can be called.
        transformed = any(isinstance(x, torch.Tensor) and _wrapped(x) for x in t_outputs)
        entered.record(not transformed and bool(kwargs.get("create_graph", args[2] if len(args) > 2 else True)))
        try:
            return before(t_outputs, *args, **kwargs)
        finally:
            entered.record(recording)

    torch.autograd._engine_run_backward = run


def _around_fused_attention() -> None:
    before = torch.backends.mha.get_fastpath_enabled

    @functools.wraps(before)
    def get_fastpath_enabled() -> bool:
        if torch.compiler.is_compiling():  # dynamo looks into this function, and not into PyTorch's
            return bool(torch.backends.mha._is_fastpath_enabled)
        return entered.is_recording() is None and before()

    torch.backends.mha.get_fastpath_enabled = get_fastpath_enabled


_linear_cross_entropy: Callable[..., Any] | None = getattr(torch.nn.functional, "linear_cross_entropy", None)


def linear_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's, which is no op, asked about as a TorchFunctionMode is. A function of this module, for dynamo finds no
    closure in a dictionary."""
    assert _linear_cross_entropy is not None
    if torch.compiler.is_dynamo_compiling():
        depth = torch._C._len_torch_function_stack()
        if depth == 0:
            return _linear_cross_entropy(*args, **kwargs)
        # Dynamo asks no mode about a function of Python that it looks into.
        mode = torch._C._get_function_stack_at(depth - 1)
        torch._C._pop_torch_function_stack()
        try:
            return mode.__torch_function__(_linear_cross_entropy, (), args, kwargs)
        finally:
            torch._C._push_on_torch_function_stack(mode)
    if entered.is_recording() is None:
        return _linear_cross_entropy(*args, **kwargs)
    with entered.suspended():
        return _linear_cross_entropy(*args, **kwargs)


def _around_linear_cross_entropy() -> None:
    if _linear_cross_entropy is None:
        return
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(linear_cross_entropy, name, getattr(_linear_cross_entropy, name))
    linear_cross_entropy.__signature__ = inspect.signature(_linear_cross_entropy)  # type: ignore[attr-defined]
    torch.nn.functional.linear_cross_entropy = linear_cross_entropy
    coverage.HANDLERS[linear_cross_entropy] = coverage.HANDLERS[_linear_cross_entropy]  # it names itself so now


# Tracers.


def _around_compiled(module: ModuleType) -> None:
    """What calls compiled code has dynamo look at each function before it, and ends that after it, by this function.
    What dynamo is not to look at calls it too, in between."""
    before: Callable[[Any], Any] = module._maybe_set_eval_frame

    def _maybe_set_eval_frame(callback: Any) -> Any:
        # No function of Python is called after `before` has set a callback, or before it takes it away.
        entered.call_compiled(sys._getframe(1), begins=callback is not None)
        return before(callback)

    module._maybe_set_eval_frame = _maybe_set_eval_frame  # type: ignore[attr-defined]
    for code in _NEVER_A_GRAPH:
        module.skip_code(code)


def _around_export(module: ModuleType) -> None:
    global export_is_seen
    before = getattr(module, "_compiling_state_context", None)
    if before is None:
        export_is_seen = False
        return

    @contextmanager
    def compiling_state_context() -> Any:
        with entered.suspended(), before():
            yield

    # Those that have imported it too. Modules of others may be lazy, and load when one looks into them.
    for name, holder in list(sys.modules.items()):
        seen = name.startswith("torch.") and isinstance(holder, ModuleType)
        if seen and vars(holder).get("_compiling_state_context") is before:
            holder._compiling_state_context = compiling_state_context  # type: ignore[attr-defined]


def _after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module now, or when it is imported."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as others do, once, and has it changed after its own code has run."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute, change = spec.loader.exec_module, self.change

            def exec_module(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
