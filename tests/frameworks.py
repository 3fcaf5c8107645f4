"""The array frameworks that tests go through, and arrays of NumPy to and from each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import DType, from_numpy


@dataclass(frozen=True)
class Framework:
    """make: an ndarray (ml_dtypes types too) to an array of the framework, without a copy where it can;
    read: one of its arrays back to an ndarray."""

    name: str
    make: Callable[[np.ndarray], Any]
    read: Callable[[Any], np.ndarray]
    writable: bool = True
    negative_strides: bool = False


class OnlyDLPack:
    """An array that has `__dlpack__` and nothing else: NumPy's capsule of the bits, its element type put in by hand."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self) -> Any:
        from detkern.tensors.dlpack import Exported

        bits = self.array.view(f"u{self.array.itemsize}")
        return Exported(bits, from_numpy(self.array.dtype), bits.__dlpack__).__dlpack__()


def to_torch(array: np.ndarray) -> Any:
    import torch

    name = array.dtype.name
    bits = {1: np.uint8, 2: np.int16, 4: np.int32}[array.itemsize]
    return torch.from_numpy(array.view(bits)).view(getattr(torch, name))


def from_torch(tensor: Any) -> np.ndarray:
    import ml_dtypes
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().cpu().view(bits).numpy().view(getattr(ml_dtypes, name, None) or name)


def to_jax(array: np.ndarray) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(array)


FRAMEWORKS = {
    "numpy": Framework("numpy", lambda x: x, lambda x: x, negative_strides=True),
    "torch": Framework("torch", to_torch, from_torch),
    "jax": Framework("jax", to_jax, np.asarray, writable=False),
    "dlpack": Framework("dlpack", OnlyDLPack, lambda x: x.array if isinstance(x, OnlyDLPack) else x),
}


def framework(name: str) -> Framework:
    """The framework, or a skip that names the package which is missing."""
    if name in ("torch", "jax"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    return FRAMEWORKS[name]


def bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers, in which results are compared."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal shape, type and bits."""
    return left.dtype == right.dtype and left.shape == right.shape and bool((bits(left) == bits(right)).all())


def tensor(kind: str, dtype: DType, shape: tuple[int, ...], seed: int, device: str = "cpu", grad: bool = False) -> Any:
    """A PyTorch tensor of generated operands; a leaf that requires grad, if asked."""
    return to_torch(operands.generate(kind, dtype, shape, seed)).to(device).requires_grad_(grad)


def same_bits(left: Any, right: Any) -> bool:
    """Equal shape, type and bits of two PyTorch tensors."""
    return same(from_torch(left), from_torch(right))
