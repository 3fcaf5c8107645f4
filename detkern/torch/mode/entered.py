"""Which modes a thread is in, and by which of two mechanisms they work.

PyTorch asks a TorchFunctionMode about every call and every reading of a shape, which takes more time than all that a
mode does. So modes work at two of the dispatcher's keys (kernels.py): thread-local bits for which only the ops that a
mode has to see have a kernel, so that the others cost nothing.

- `KEY` is on while the thread is in a mode.
- `RECORDING` too, for the ops that a mode sees for the sake of their gradients, but where Python has switched autograd
  off, as `no_grad` does (hooks.py).

torch.compile and torch.export trace functions of Python, not the dispatcher. While they are at work in a thread its
modes are *suspended*: the keys are off and the modes are TorchFunctionModes on PyTorch's stack.

What a thread is in lies in an immutable object in PyTorch's own thread-local storage, which follows a backward pass
into the threads of the autograd engine, as the keys do.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode

__all__ = [
    "KEY", "NAME", "RECORDING", "Entered", "by_keys", "call_compiled", "clear", "current", "enter", "is_recording",
    "leave", "modes", "prune", "record", "suspended", "switch_off",
]  # fmt: skip

# PyTorch has these two above all others, those of torch.func among them, for its own tests of the dispatcher: nothing
# else gives them a kernel or puts them on a tensor.
KEY: Any = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")
RECORDING: Any = torch._C._parse_dispatch_key("TESTING_ONLY_GenericWrapper")
NAME = "detkern.torch.mode"

_include, _is_included = (
    torch._C._dispatch_tls_set_dispatch_key_included,
    torch._C._dispatch_tls_is_dispatch_key_included,
)
_has, _get = torch._C._is_key_in_tls, torch._C._get_obj_in_tls


def _takes_a_reference() -> bool:
    """Whether PyTorch takes the reference that it gives back when it drops an object. 2.11 does not, 2.13 does."""
    probe = object()
    count = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(NAME, probe)
    if sys.getrefcount(probe) > count:
        return True
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return False


def _set(name: str, value: Any) -> None:
    if not _COUNTED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


_COUNTED = _takes_a_reference()
# A thread that ends with an object of Python there waits for the interpreter, so nothing stays. Earlier versions of
# PyTorch lack the function, and leave an object there themselves.
_remove = getattr(torch._C, "_remove_obj_from_tls", None) or (lambda name: _set(name, None))
_remove(NAME)


@dataclass(frozen=True, eq=False)
class _Entry:
    mode: Any
    lasting: bool  # by enable(), not by a with block
    off: bool = False  # by disable(), for the rest of its with block


class Entered:
    """What a thread is in.

    entries:   the innermost first.
    modes:     theirs, of those that are not off.
    suspended: whether they are on PyTorch's stack of function modes, and the keys off.
    caller:    the frame of Python that calls compiled code, for which they are suspended.
    recorded:  what RECORDING was when they were suspended.
    """

    __slots__ = ("caller", "entries", "modes", "recorded", "suspended")

    def __init__(self, entries: tuple[_Entry, ...], suspended: bool, caller: Any, recorded: bool) -> None:
        self.entries, self.suspended, self.caller, self.recorded = entries, suspended, caller, recorded
        self.modes = tuple(entry.mode for entry in entries if not entry.off)


def current() -> Entered | None:
    """What this thread is in; None for no mode."""
    return _get(NAME) if _has(NAME) else None


def modes() -> tuple[Any, ...]:
    """This thread's modes, the innermost first."""
    now = current()
    return () if now is None else now.modes


def enter(mode: Any, *, lasting: bool = False, outermost: bool = False) -> None:
    """Put this thread into the mode, which lies in those that it is in already, or around them."""
    prune()
    now = current()
    entry = _Entry(mode, lasting)
    entries: tuple[_Entry, ...]
    if now is None:
        entries, hidden = (entry,), _traced()
    else:
        entries = (*now.entries, entry) if outermost else (entry, *now.entries)
        hidden = now.suspended
    _become(entries, hidden)
    # A with block that begins where autograd is off ends there too.
    if lasting or torch.is_grad_enabled():
        record(True)


def leave(mode: Any, *, lasting: bool = False) -> bool:
    """Take this thread out of the mode where it entered it last, by a with block or by enable(); whether it had."""
    now = current()
    if now is None:
        return False
    for i, entry in enumerate(now.entries):
        if entry.mode is mode and entry.lasting is lasting:
            _become(now.entries[:i] + now.entries[i + 1 :], now.suspended)
            return True
    return False


def switch_off(mode: Any) -> bool:
    """Take this thread out of the mode for the rest of the innermost with block that it is at work in; whether there
    is one."""
    now = current()
    if now is None:
        return False
    for i, entry in enumerate(now.entries):
        if entry.mode is mode and not entry.lasting and not entry.off:
            _become((*now.entries[:i], replace(entry, off=True), *now.entries[i + 1 :]), now.suspended)
            return True
    return False


def clear() -> None:
    """Take this thread out of all of its modes."""
    _become((), False)


def prune() -> None:
    """Forget the modes of this thread that have ended elsewhere."""
    now = current()
    if now is not None and any(entry.mode.ended for entry in now.entries):
        _become(tuple(entry for entry in now.entries if not entry.mode.ended), now.suspended)


def _become(entries: Iterable[_Entry], hidden: bool, caller: Any = None) -> None:
    before = current()
    if hidden and before is not None and before.suspended:
        caller = before.caller
    recorded = _is_included(RECORDING) if before is None or not before.suspended else before.recorded
    after = Entered(tuple(entries), hidden, caller, recorded) if entries else None
    gone = list(before.modes) if before is not None and before.suspended else []
    come = list(after.modes) if after is not None and after.suspended else []
    for mode in list(come):
        if mode in gone:
            gone.remove(mode)
            come.remove(mode)
    _take_off(gone)
    for mode in reversed(come):
        _push_mode(mode)
    if after is not None:
        _set(NAME, after)
    elif before is not None:
        _remove(NAME)
    at_work = after is not None and not after.suspended and bool(after.modes)
    _include(KEY, at_work)
    if not at_work:
        _include(RECORDING, False)


def _take_off(gone: list[Any]) -> None:
    """Take modes off PyTorch's stack, from where the others stay."""
    kept = []
    while gone and _len_torch_function_stack():
        mode = _pop_mode()
        if mode in gone:
            gone.remove(mode)
        else:
            kept.append(mode)
    for mode in reversed(kept):
        _push_mode(mode)


# Gradients.


def is_recording() -> bool | None:
    """Whether ops are seen for the sake of their gradients; None where no mode is at work here, or it is suspended."""
    return _is_included(RECORDING) if _is_included(KEY) else None


def record(on: bool) -> None:
    """See ops for the sake of their gradients, or no longer; without effect where no mode is at work."""
    if _is_included(KEY):
        _include(RECORDING, on)


# Tracers.


def _suspend(caller: Any) -> None:
    now = current()
    if now is not None and not now.suspended:
        _become(now.entries, True, caller)


def _resume() -> None:
    now = current()
    if now is not None and now.suspended:
        _become(now.entries, False)
        record(now.recorded or torch.is_grad_enabled())


def call_compiled(caller: Any, *, begins: bool) -> None:
    """Suspend this thread's modes where a frame of Python begins to call compiled code; the same frame ends that by its
    next call. What lies in between changes nothing."""
    now = current()
    if now is None:
        return
    if not now.suspended:
        if begins:
            _suspend(caller)
    elif now.caller is caller:
        _resume()


@contextmanager
def suspended() -> Iterator[None]:
    """With this thread's modes on PyTorch's stack, and those that it enters meanwhile; where they are there already
    they stay."""
    now = current()
    ours = now is not None and not now.suspended
    before, _tracing.here = getattr(_tracing, "here", False), True
    _suspend(None)
    try:
        yield
    finally:
        _tracing.here = before
        if ours:
            _resume()


_tracing = threading.local()


@contextmanager
def by_keys() -> Iterator[None]:
    """In a call that a suspended mode has been asked about, and for which it is off PyTorch's stack: with the keys for
    what runs inside of it."""
    now = current()
    if now is None or not now.suspended:
        yield
        return
    _set(NAME, Entered(now.entries, False, None, now.recorded))
    _include(KEY, True)
    _include(RECORDING, True)
    try:
        yield
    finally:
        _include(KEY, False)
        _include(RECORDING, False)
        _set(NAME, now)


def _traced() -> bool:
    """Whether this thread traces functions of Python, or looks at each that is called, as torch.compile does."""
    if getattr(_tracing, "here", False) or torch._guards.CompileContext.try_get() is not None:
        return True
    tracer = sys.modules.get("torch._C._dynamo.eval_frame")
    callback: Callable[[], Any] | None = getattr(tracer, "get_eval_frame_callback", None)
    return callback is not None and callback() is not None
