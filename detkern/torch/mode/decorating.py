"""A mode as a decorator of functions: on during each call, in the thread that runs it.

A generator and a coroutine run in steps, with their caller or other tasks in between, so the mode is entered for each
step and left after it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from ...errors import ArgumentError

__all__ = ["decorated"]


def decorated(mode: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, each call of which runs in the mode; a mode that may be entered again while it is on.

    Raises:
        ArgumentError: a class, an async generator, or nothing that can be called.
    """
    if isinstance(function, type) or not callable(function):
        raise ArgumentError(
            f"batch_invariant_mode decorates functions and methods, not {function!r}: decorate its forward, or use a "
            f"with block"
        )
    # Of an object that is called, its class says what the call is.
    kind = (
        function if inspect.isroutine(function) or isinstance(function, functools.partial) else type(function).__call__
    )
    named = functools.wraps(function, updated=("__dict__",) if inspect.isroutine(function) else ())
    if inspect.isasyncgenfunction(kind):
        raise ArgumentError(
            f"batch_invariant_mode cannot decorate the async generator {function!r}; use a with block that holds no "
            f"yield and "
            "no await"
        )
    if inspect.isgeneratorfunction(kind):

        @named
        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from _stepped(mode, function(*args, **kwargs)))

        return generator
    if inspect.iscoroutinefunction(kind):

        @named
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _awaited(mode, function(*args, **kwargs))

        return coroutine

    @named
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


def _stepped(mode: AbstractContextManager[Any], steps: Any) -> Generator[Any, Any, Any]:
    """A generator or a coroutine, each of whose steps runs in the mode."""
    step, given = steps.send, None
    while True:
        try:
            with mode:
                item = step(given)
        except StopIteration as end:
            return end.value
        try:
            step, given = steps.send, (yield item)
        except GeneratorExit:
            with mode:
                steps.close()
            raise
        except BaseException as error:  # noqa: BLE001 - all of them are the function's, a cancellation too
            step, given = steps.throw, error


_awaited = types.coroutine(_stepped)
