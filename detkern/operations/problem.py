"""What every problem is, and what it reads."""

from __future__ import annotations

from typing import Protocol, Self

from ..tensors.view import Device, TensorView

__all__ = ["Operands", "Problem"]

# What a problem reads, in the order that its class states; None where an optional operand is left out.
Operands = tuple[TensorView | None, ...]


class Problem(Protocol):
    """Everything that a backend needs to choose and launch a kernel, except the pointers. Immutable and hashable.

    operation: the name of the operation's record. m: the rows. about: what it is and its sizes, for messages.
    """

    @property
    def operation(self) -> str: ...
    @property
    def device(self) -> Device: ...
    @property
    def m(self) -> int: ...
    @property
    def about(self) -> str: ...

    def with_rows(self, m: int) -> Self: ...
