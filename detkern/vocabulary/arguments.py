"""What an argument must be, where every public call has the same one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError

__all__ = ["flag"]


def flag(value: Any, argument: str) -> bool:
    """A flag as a bool.

    Raises:
        ArgumentError: it is neither True nor False; "no" and 0 are not taken for one of them.
    """
    if value is True or value is False or isinstance(value, np.bool_):
        return bool(value)
    raise ArgumentError(f"{argument}={value!r} must be True or False")
