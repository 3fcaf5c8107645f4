"""`Logits`: what a head gives in the place of logits that are never made.

It holds hidden states and the head. What models and losses do to logits on the way to a loss is noted (scaling, a
softcap, slices and views of the rows), and the loss or the log-probabilities are `linear_logp`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from ...errors import ArgumentError, ShapeError
from .functional import linear
from .linear_logp import linear_cross_entropy, linear_logp

__all__ = ["LogProbabilities", "Logits"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class MissingLogits(ArgumentError, AttributeError):
    """What logits have and `Logits` does not."""


class _Rows:
    """Shapes, indices and views that leave the vocabulary alone, of hidden states [.., D]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    dtype: torch.dtype

    def _of(self, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return int(self.hidden.dim())

    @property
    def requires_grad(self) -> bool:
        return bool(self.hidden.requires_grad or self.weight.requires_grad)

    def dim(self) -> int:
        return int(self.hidden.dim())

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, not made)"

    # Rows are float32 whatever type they are said to have, and lie nowhere.

    def float(self) -> Any:
        return self._of(self.hidden, torch.float32)

    def contiguous(self, *arguments: Any, **named: Any) -> Any:
        return self

    def to(self, *arguments: Any, **named: Any) -> Any:
        """Another type, which is but a name here, or the device that it is on."""
        dtype = self.dtype
        for value in (*arguments, *named.values()):
            if isinstance(value, torch.Tensor):
                value = value.dtype
            if isinstance(value, torch.dtype):
                if value not in _FLOATS:
                    _refuse(f"to({value})")
                dtype = value
            elif not isinstance(value, bool) and value is not None and torch.device(value) != self.device:
                _refuse(f"to({str(value)!r}) of what is on {self.device}")
        return self._of(self.hidden, dtype)

    def view(self, *shape: Any) -> Any:
        """Other dimensions of rows; the last one stays the vocabulary."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not sizes or sizes[-1] not in (self.shape[-1], -1):
            raise ShapeError(f"logits that are not made are viewed as [.., {self.shape[-1]}], not as {list(sizes)}")
        if sizes[-1] == -1 and -1 in sizes[:-1]:
            raise ShapeError(f"only one dimension can be -1, not two of {list(sizes)}")
        if sizes[-1] == -1 and math.prod(sizes[:-1]) != math.prod(self.shape[:-1]):
            raise ShapeError(f"logits that are not made are viewed as [.., {self.shape[-1]}], not as {list(sizes)}")
        return self._of(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]), self.dtype)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim % self.dim() == self.dim() - 1:
            _refuse("flatten with the vocabulary")
        return self._of(self.hidden.flatten(start_dim, end_dim), self.dtype)

    def squeeze(self, dim: int) -> Any:
        return self if dim % self.dim() == self.dim() - 1 else self._of(self.hidden.squeeze(dim), self.dtype)

    def unsqueeze(self, dim: int) -> Any:
        if dim % (self.dim() + 1) == self.dim():
            _refuse("unsqueeze behind the vocabulary")
        return self._of(self.hidden.unsqueeze(dim % (self.dim() + 1)), self.dtype)

    def __getitem__(self, index: Any) -> Any:
        parts = list(index) if isinstance(index, tuple) else [index]
        taken = [0 if part is None or part is Ellipsis else _dimensions(part) for part in parts]
        at = next((place for place, part in enumerate(parts) if part is Ellipsis), None)
        if at is not None:
            behind = sum(taken[at + 1 :])
            parts[at : at + 1] = [slice(None)] * (self.dim() - sum(taken))
            reaches = behind > 0 or sum(taken) == self.dim()
        else:
            reaches = sum(taken) == self.dim()
        if reaches:
            last = parts.pop()
            if not (isinstance(last, slice) and last.indices(self.shape[-1]) == (0, self.shape[-1], 1)):
                _refuse("an index of the vocabulary")
        elif at is not None:
            parts.pop()  # the vocabulary, which the Ellipsis stands for
        return self._of(self.hidden[tuple(parts)], self.dtype)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f".{name}", MissingLogits)


class Logits(_Rows):
    """The logits of a head over hidden states, not made; float32 in effect.

    `torch.nn.functional.cross_entropy` takes it, as losses of Hugging Face call it; `logp` gives log-probabilities,
    `made` the logits themselves. Divisions and multiplications by a number, tanh between two of them (a softcap),
    slices and views of the rows are noted. Whatever else needs the logits is refused with an ArgumentError.

    Args:
        hidden: [.., D]. weight: [V, D]. bias: [V] or None.
        accumulate, contract, backend: as in `detkern.torch.linear_logp`.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        accumulate: bool = False,
        contract: str | None = None,
        backend: str | None = None,
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.accumulate, self.contract, self.backend = accumulate, contract, backend
        self.dtype = hidden.dtype
        # logits = softcap * tanh(z / softcap) / temperature; `waiting`: after tanh, for the factor that ends a softcap.
        self.temperature = 1.0
        self.softcap: float | None = None
        self.waiting = False

    def _of(self, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> Logits:
        made = Logits(
            hidden, self.weight, self.bias, accumulate=self.accumulate, contract=self.contract, backend=self.backend
        )
        made.dtype = self.dtype if dtype is None else dtype
        made.temperature, made.softcap, made.waiting = self.temperature, self.softcap, self.waiting
        return made

    # ---- scaling --------------------------------------------------------------------------------------------------

    def _divided(self, factor: Any, inverse: bool) -> Logits:
        """By a number, or with `inverse` multiplied by it."""
        if isinstance(factor, torch.Tensor):
            _refuse("scaling by a tensor")
        factor = float(factor)
        made = self._of(self.hidden)
        if self.waiting:
            if not inverse or factor != self.softcap:
                raise ArgumentError(
                    f"logits were divided by {self.softcap} before tanh; a softcap multiplies them by the same number "
                    "at once"
                )
            made.waiting = False
            return made
        made.temperature = self.temperature / factor if inverse else self.temperature * factor
        return made

    def __truediv__(self, factor: Any) -> Logits:
        return self._divided(factor, False)

    def __mul__(self, factor: Any) -> Logits:
        return self._divided(factor, True)

    __rmul__ = __mul__
    div = __truediv__
    mul = __mul__

    def div_(self, factor: Any) -> Logits:
        changed = self._divided(factor, False)
        self.temperature, self.waiting = changed.temperature, changed.waiting
        return self

    __itruediv__ = div_

    def tanh(self) -> Logits:
        """The middle of a softcap c: logits / c, tanh, times c."""
        if self.softcap is not None:
            _refuse("a second softcap")
        made = self._of(self.hidden)
        made.softcap, made.temperature, made.waiting = self.temperature, 1.0, True
        return made

    def _scaling(self) -> dict[str, Any]:
        if self.waiting:
            raise ArgumentError("logits end with tanh; a softcap multiplies them by what they were divided by")
        return {"temperature": self.temperature, "softcap": self.softcap}

    # ---- results --------------------------------------------------------------------------------------------------

    def logp(self, target: torch.Tensor, **settings: Any) -> Any:
        """`detkern.torch.linear_logp` of the rows at target; settings: its ignore_index, return_lse, return_entropy and
        check, and a temperature beside the one that is noted."""
        scaling = self._scaling()
        scaling["temperature"] *= settings.pop("temperature", 1.0)
        return linear_logp(self.hidden, self.weight, target, self.bias, **scaling, **self._by(), **settings)

    def cross_entropy(self, target: torch.Tensor, **settings: Any) -> torch.Tensor:
        """`detkern.torch.linear_cross_entropy` of the rows; settings: its reduction, ignore_index and check."""
        return linear_cross_entropy(
            self.hidden, self.weight, target, self.bias, **self._scaling(), **self._by(), **settings
        )

    def log_softmax(self, dim: int = -1, dtype: torch.dtype | None = None) -> LogProbabilities:
        """Log-probabilities, not made either: gather gives those of some columns."""
        if dim % self.dim() != self.dim() - 1:
            _refuse("log_softmax along another dimension than the vocabulary")
        return LogProbabilities(self, self.dtype if dtype is None else dtype)

    def made(self) -> torch.Tensor:
        """The logits [.., V], float32, by `detkern.torch.linear`; a softcap and a temperature are PyTorch's
        arithmetic."""
        scaling = self._scaling()
        settings = self._by()
        logits = linear(self.hidden, self.weight, self.bias, out_dtype=torch.float32, **settings)
        if scaling["softcap"] is not None:
            logits = scaling["softcap"] * torch.tanh(logits / scaling["softcap"])
        return logits if scaling["temperature"] == 1 else logits / scaling["temperature"]

    def _by(self) -> dict[str, Any]:
        return {"accumulate": self.accumulate, "contract": self.contract, "backend": self.backend}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _FUNCTIONS.get(func)
        if handler is None:
            _refuse(getattr(func, "__name__", str(func)))
        return handler(*args, **(kwargs or {}))


class LogProbabilities(_Rows):
    """log_softmax of `Logits` along the vocabulary, not made: gather along it gives `linear_logp`'s results."""

    def __init__(self, logits: Logits, dtype: torch.dtype) -> None:
        self.logits, self.dtype = logits, dtype
        self.hidden, self.weight = logits.hidden, logits.weight

    def _of(self, hidden: torch.Tensor, dtype: torch.dtype | None = None) -> LogProbabilities:
        return LogProbabilities(self.logits._of(hidden), self.dtype if dtype is None else dtype)

    def gather(self, dim: int, index: torch.Tensor) -> Any:
        """Those of the columns index [.., K], float32."""
        if dim % self.dim() != self.dim() - 1:
            _refuse("gather along another dimension than the vocabulary")
        return self.logits.logp(index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.gather:
            _refuse(getattr(func, "__name__", str(func)))
        return _gather(*args, **(kwargs or {}))


def _dimensions(part: Any) -> int:
    """How many dimensions an index takes up."""
    return int(part.dim()) if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def _refuse(what: str, kind: type[ArgumentError] = ArgumentError) -> NoReturn:
    raise kind(
        f"{what} needs logits, and a head with logits='fused' makes none: .made() makes them, .logp(target) gives "
        "log-probabilities, lse and entropy, and detkern.torch.revert(model) takes the fused head away"
    )


def _cross_entropy(
    input: Logits,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """torch.nn.functional.cross_entropy of rows [N, V] or one row."""
    for given, name in ((weight, "weight"), (size_average, "size_average"), (reduce, "reduce")):
        if given is not None:
            _refuse(f"cross_entropy with {name}")
    if label_smoothing:
        _refuse("cross_entropy with label_smoothing")
    if target.is_floating_point():
        _refuse("cross_entropy with probabilities")
    if input.dim() > 2:
        _refuse("cross_entropy with classes in another dimension than the last")
    return input.cross_entropy(target, reduction=reduction, ignore_index=ignore_index)


def _log_softmax(input: Logits, dim: int = -1, _stacklevel: int = 3, dtype: Any = None) -> LogProbabilities:
    return input.log_softmax(dim, dtype)


def _gather(input: LogProbabilities, dim: int, index: torch.Tensor, **named: Any) -> torch.Tensor:
    return input.gather(dim, index)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.cross_entropy: _cross_entropy,
    torch.nn.functional.log_softmax: _log_softmax,
    torch.log_softmax: lambda input, dim, dtype=None: input.log_softmax(dim, dtype),
    torch.tanh: Logits.tanh,
    torch.div: Logits.div,
    torch.mul: Logits.mul,
}
