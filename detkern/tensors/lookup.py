"""Which adapter serves which type of array."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import DTypeError
from .adapter import Adapter
from .types import WHOLE

__all__ = ["adapter_for"]

_BY_TYPE: dict[type, Adapter] = {}


def adapter_for(array: Any, argument: str) -> Adapter:
    """The adapter of the array's type; DTypeError, naming what would work, where it is not an array."""
    adapter = _BY_TYPE.get(type(array))
    if adapter is None:
        adapter = _find(array, argument)
        _BY_TYPE[type(array)] = adapter
    return adapter


def _is(array: Any, module: str, name: str) -> bool:
    """Whether the array is an instance of a framework's class, if the caller has imported that framework."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(array, kind)


def _find(array: Any, argument: str) -> Adapter:
    if _is(array, "numpy", "ndarray"):
        from .numpy import NUMPY

        return NUMPY
    if _is(array, "torch", "Tensor"):
        from .torch import torch_adapter

        return torch_adapter()
    if _is(array, "cupy", "ndarray"):
        from .cupy import cupy_adapter

        return cupy_adapter()
    if _is(array, "jax", "Array"):
        from .jax import jax_adapter

        return jax_adapter()
    if not isinstance(array, type):
        from .foreign import CUDA_ARRAY_INTERFACE, DLPACK

        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") and not _is(array, "numpy", "generic"):
            return DLPACK
        if hasattr(array, "__cuda_array_interface__"):
            return CUDA_ARRAY_INTERFACE
    kind = type(array)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.startswith("scipy.sparse"):
        raise DTypeError(f"{argument} is sparse ({name}); make it dense, as in {argument}.toarray()")
    wanted = "np.int64" if argument in WHOLE else "np.float32"
    raise DTypeError(f"{argument} is not an array but {name}; give an array, as in np.asarray({argument}, {wanted})")
