"""What PyTorch composes below Python, seen one aten op at a time.

batch_invariant_mode sees a function before it runs, and some functions reach a product or a sum only further down, in
C++. Under this dispatch mode such an op is computed by detkern too. PyTorch has recorded it for autograd by then, and
its backward is PyTorch's own outside of the mode: where that is a product or a softmax, the mode is told. Tangents of
forward mode it has computed too, by ops that are seen here in turn: what runs here records neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..functions import route
from . import coverage, indexing, products

__all__ = ["Watch"]

# Their backward is made of products or sums. That of a sum repeats one number.
_SUMMING_BACKWARD = frozenset(
    ("softmax", "log_softmax", "_softmax", "_log_softmax", *products.HANDLERS, *indexing.READING)
)


@contextmanager
def _unrecorded() -> Iterator[None]:
    before = torch._C._is_fwd_grad_enabled()
    torch._C._set_fwd_grad_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch._C._set_fwd_grad_enabled(before)


def _materialised(x: Any) -> Any:
    """Forward mode makes lazy tensors of zeros, which have no memory; below a dispatch mode PyTorch's kernels read it.
    Views of them are lazy too, and autograd may rely on that."""
    return x.clone() if x._is_zerotensor() else x


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """For one call of a function.

    Args:
        mode: the batch_invariant_mode.
        name: of the function, for messages.
        recorded: whether autograd records the call.
    """

    def __init__(self, mode: Any, name: str, recorded: bool) -> None:
        super().__init__()
        self.mode, self.name, self.recorded = mode, name, recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if route.forward_mode() and not func.is_view:
            args, kwargs = tree_map_only(torch.Tensor, _materialised, (args, kwargs))
        handler = coverage.HANDLERS.get(func)
        name = coverage.name_of(func)
        if handler is not None:
            with _unrecorded():
                result = handler(self.mode, *args, **kwargs)
            if result is NotImplemented:
                result = func(*args, **kwargs)  # with PyTorch's error, where the call is wrong
                if self.mode.covers(name, *(x for x in args if isinstance(x, torch.Tensor))):
                    self.mode.uncovered(name, "called in this way", *args)
            elif self.recorded and name in _SUMMING_BACKWARD:
                self.mode.uncovered(
                    self.name, f"the backward of aten::{name} inside of", *args, what="is PyTorch's own"
                )
            return result
        elementwise = coverage.ELEMENTWISE.get(func)
        if elementwise is not None:
            with _unrecorded():
                result = elementwise(self.mode, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in coverage.UNCOVERED:
            self.mode.uncovered(name, "", *args)
        else:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)
