"""The classic operator of log-probabilities: `get_op("linear_logp")`, and under the name that batch-invariant libraries
have for it."""

from __future__ import annotations

from typing import Any

from ..operations.linear_logp import call
from ..vocabulary.contracts import get_contract
from .det_gemm import is_tensor

__all__ = ["LinearLogp"]


class LinearLogp:
    """Log-probabilities straight from hidden states, by `detkern.linear_logp`.

    contract, backend: of every call that names none. None: as in `detkern.linear_logp`.

    On PyTorch tensors it records gradients, by detkern.torch.
    """

    def __init__(self, name: str, *, contract: str | None = None, backend: str | None = None) -> None:
        self.name = name
        self.contract = None if contract is None else get_contract(contract).name
        self.backend = backend

    def __repr__(self) -> str:
        return f"LinearLogp({self.name!r}, contract={self.contract!r}, backend={self.backend!r})"

    def __call__(self, hidden: Any, weight: Any, target: Any, bias: Any = None, **settings: Any) -> Any:
        """The log-probabilities, float32, in target's shape. settings, returns, raises: as `detkern.linear_logp`."""
        settings = {"contract": self.contract, "backend": self.backend, **settings}
        if is_tensor(hidden):
            from .. import torch

            return torch.linear_logp(hidden, weight, target, bias, **settings)
        return call.linear_logp(hidden, weight, target, bias, **settings)
