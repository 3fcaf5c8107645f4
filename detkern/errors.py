"""Every error that detkern raises on purpose.

Each is a `DetkernError` and also the builtin that users of NumPy and PyTorch catch. A message names the argument,
its shape or type, and what would work.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackendUnavailable",
    "BuildError",
    "ContractUnsupported",
    "DTypeError",
    "DetkernError",
    "DeviceError",
    "ShapeError",
]


class DetkernError(Exception):
    """The base of every error below."""


class ShapeError(DetkernError, ValueError):
    """Sizes that do not fit together."""


class DTypeError(DetkernError, TypeError):
    """An element type, or an object that is not an array, where another is needed."""


class ArgumentError(DetkernError, ValueError):
    """An argument's value, or two arguments that exclude each other."""


class DeviceError(DetkernError, RuntimeError):
    """Operands on different devices, a device that no backend serves, or a fault reported by a device."""


class ContractUnsupported(DetkernError, NotImplementedError):
    """No backend that may run here computes the contract that was asked for."""


class BackendUnavailable(DetkernError, RuntimeError):
    """A backend asked for by name cannot run here."""


class BuildError(DetkernError, RuntimeError):
    """A compiler is missing, or refused a source of ours."""
