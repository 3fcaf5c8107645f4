"""The classes that layers get: for a class of layers its twin that computes by a contract, and back."""

from __future__ import annotations

import copyreg
import functools
import sys
from typing import Any

import torch

from ...errors import ArgumentError
from ..functions.functional import gathering_linear, gathers, linear
from .linear import Contracted, Linear

__all__ = ["contracted", "is_conv1d", "origin", "twin"]

_ORIGIN = "_detkern_origin"


class _Conv1D(Contracted):
    """transformers' Conv1D, the linear layer of GPT-2: weight [K, N], and x @ weight + bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., K] -> [.., N]."""
        layer: Any = self
        if not isinstance(self, Contracted):
            return torch.nn.functional.linear(x, layer.weight.t(), layer.bias)
        if not self.accumulate:
            return linear(
                x, layer.weight.t(), layer.bias, out_dtype=self.out_dtype, contract=self.contract, backend=self.backend
            )
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"x is not a torch.Tensor but {type(x).__name__}; a Conv1D with accumulate=True is called with "
                f"tensors, not traced"
            )
        main_grad = gathers(layer.weight, "weight")
        return gathering_linear(
            x,
            layer.weight.t(),
            layer.bias,
            None if main_grad is None else main_grad.t(),
            gathers(layer.bias, "bias"),
            self.out_dtype,
            self.contract,
            self.backend,
        )

    def __repr__(self) -> str:
        layer: Any = self
        return f"Conv1D(nf={layer.nf}, nx={layer.weight.shape[0]}, {self.settings()})"


def is_conv1d(kind: type) -> bool:
    """Whether a class is transformers' Conv1D or inherits from it; transformers is not imported for that."""
    module = sys.modules.get("transformers.pytorch_utils")
    return module is not None and issubclass(kind, module.Conv1D)


def contracted(kind: type) -> Any:
    """The class whose forward layers of this kind get: Linear or the one for Conv1D."""
    return _Conv1D if is_conv1d(kind) else Linear


def origin(kind: type) -> Any:
    """The class whose forward layers of this kind have, where they have none of their own."""
    return sys.modules["transformers.pytorch_utils"].Conv1D if is_conv1d(kind) else torch.nn.Linear


def twin(kind: Any) -> Any:
    """The class with detkern's forward for `kind`, the class with the original one for a class that has detkern's; None
    where `kind` is not one of those that this function gives."""
    if kind is Linear:
        return torch.nn.Linear
    if kind is torch.nn.Linear:
        return Linear
    if _ORIGIN in kind.__dict__:
        return kind.__dict__[_ORIGIN]
    if _made_by_torch(kind):
        # As though the layer had had the other class when PyTorch put this one over it, which its functions to take it
        # away again expect. It may change the class later, so each gets one of its own.
        twins = {base: twin(base) for base in kind.__bases__ if issubclass(base, (torch.nn.Linear, Contracted))}
        if None in twins.values():
            return None
        names = {name: value for name, value in kind.__dict__.items() if name not in ("__dict__", "__weakref__")}
        return type(kind)(kind.__name__, tuple(twins.get(base) or base for base in kind.__bases__), names)
    return None if issubclass(kind, Contracted) else _extended(kind)


@functools.cache
def _extended(kind: Any) -> Any:
    ours = contracted(kind)
    names: dict[str, Any] = {_ORIGIN: kind, "__module__": kind.__module__, "__reduce_ex__": _reduce}
    if getattr(kind, "cls_to_become", None) is torch.nn.Linear:  # a lazy layer's class once it knows its size
        names["cls_to_become"] = Linear
    bases = (ours, kind) if ours is _Conv1D else (kind, ours)
    return type(kind)(kind.__name__, bases, names)


def _made_by_torch(kind: type) -> bool:
    """Whether PyTorch made the class for one layer, as torch.nn.utils.parametrize and fully_shard do."""
    if not kind.__module__.startswith("torch."):
        return False
    return getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickled by the name of the original class, since the twin has none to be found by."""
    kind = type(self).__dict__[_ORIGIN]
    reduced = kind.__reduce_ex__(self, protocol)
    if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    return _new, (kind,), *reduced[2:]


def _new(kind: type) -> Any:
    made: Any = twin(kind)
    return made.__new__(made)
