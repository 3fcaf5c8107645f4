"""`enable`, `disable`, `is_enabled`: batch_invariant_mode for a whole process.

PyTorch keeps modes for each thread by itself. So the mode is put below all others in the thread that calls `enable`,
and in each thread that is started afterwards, around its `run`. `disable` cannot reach the other threads: there the
mode stays where it is and does nothing any more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping

from ...errors import ArgumentError
from . import entered
from .mode import DEVICE_TYPES, batch_invariant_mode

__all__ = ["disable", "enable", "is_enabled"]

_lock = threading.RLock()
_mode: batch_invariant_mode | None = None
_start: Callable[[threading.Thread], None] | None = None  # what stands for Thread.start


def enable(
    *,
    contract: str | Mapping[str, str] | None = None,
    device_types: str | Iterable[str] = DEVICE_TYPES,
    strict: bool = False,
) -> None:
    """Put this thread, each thread that is started from now on with `threading`, as pools are, and the backward passes
    of all of them under `batch_invariant_mode`, until `disable()`.

    Modes in `with` blocks nest in it, also those that this thread is in already: the innermost decides. A thread that
    was running before joins by a call of its own with the same arguments. A forked process inherits it; a spawned one
    calls `enable` itself.

    Args:
        contract, device_types, strict: as `batch_invariant_mode`.

    Raises:
        ArgumentError: it is on with other settings, or an argument is wrong. ContractUnsupported: no such contract.
    """
    global _mode
    wanted = batch_invariant_mode(contract=contract, device_types=device_types, strict=strict)
    with _lock:
        if _mode is None:
            _mode = wanted
            _watch_threads()
        elif repr(_mode) != repr(wanted):
            raise ArgumentError(f"enable() holds with other settings, {_mode!r}: call disable() first")
        if not is_enabled():
            _mode.enter_outermost()


def disable() -> None:
    """Leave what `enable()` put the process under, in every thread; without effect where it is off. Modes in `with`
    blocks stay.

    In a thread that is in the middle of a call that call ends under the mode.
    """
    global _mode
    with _lock:
        if _mode is None:
            return
        _mode.ended, _mode = True, None
        _watch_no_threads()
        entered.prune()


def is_enabled() -> bool:
    """Whether this thread is in the mode that `enable()` has put the process under."""
    return _mode is not None and _mode in entered.modes()


def _watch_threads() -> None:
    """Have threads that start enter the mode."""
    global _start
    before = threading.Thread.start
    if before is _start:
        return

    @functools.wraps(before)
    def start(self: threading.Thread) -> None:
        # Others may have put theirs around an earlier one of these.
        if _mode is not None and getattr(self.run, "func", None) is not _run:
            self.run = functools.partial(_run, self, self.run)  # type: ignore[method-assign]
        before(self)

    _start = threading.Thread.start = start  # type: ignore[method-assign]


def _watch_no_threads() -> None:
    """Take that away again; where others have put their own around it since, it stays, and does nothing while the mode
    is off."""
    if _start is not None and threading.Thread.start is _start:
        threading.Thread.start = _start.__wrapped__  # type: ignore[attr-defined, method-assign]


def _run(thread: threading.Thread, run: Callable[[], None]) -> None:
    thread.__dict__.pop("run", None)  # or the thread would hold itself
    mode = _mode
    if mode is None:
        run()
        return
    mode.enter_outermost()
    try:
        run()
    finally:
        entered.clear()
