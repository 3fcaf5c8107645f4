"""A `forward` that a layer carries itself, as an attribute, and that runs instead of its class's.

accelerate's hooks are such: `layer.forward` is a functools.partial of a function that calls `layer._old_forward`,
looked up at each call, which is the method that was there before. What they call can be exchanged, so it is known what
runs. Of any other function it is not.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

__all__ = ["exchange", "plain", "runs"]

_SLOTS = ("forward", "_old_forward")


def runs(layer: Any, forward: Any) -> bool:
    """Whether calling the layer runs `forward`, a function that takes the layer first."""
    own = layer.__dict__.get("forward")
    if own is None:
        return type(layer).forward is forward
    if _calls_old_forward(layer, own):
        return _is(layer.__dict__.get("_old_forward"), layer, forward)
    return _is(own, layer, forward)


def plain(layer: Any) -> bool:
    """Whether the layer carries no forward, or its own method only: nothing is lost with it."""
    own = layer.__dict__.get("forward")
    return own is None or (isinstance(own, MethodType) and own.__self__ is layer)


def exchange(layer: Any, old: Any, new: Any) -> None:
    """Where the layer carries `old` as its method, let it carry `new`."""
    for slot in _SLOTS:
        if _is(layer.__dict__.get(slot), layer, old):
            layer.__dict__[slot] = MethodType(new, layer)


def _is(method: Any, layer: Any, forward: Any) -> bool:
    return isinstance(method, MethodType) and method.__self__ is layer and method.__func__ is forward


def _calls_old_forward(layer: Any, own: Any) -> bool:
    return (
        isinstance(own, functools.partial)
        and len(own.args) == 1
        and own.args[0] is layer
        and "_old_forward" in getattr(getattr(own.func, "__code__", None), "co_names", ())
    )
