"""`Linear`, a drop-in for torch.nn.Linear whose bits follow a contract."""

from __future__ import annotations

from typing import Any

import torch

from ..contracts import get_contract
from . import ops, route
from .functional import linear

__all__ = ["Linear", "zero_main_grads"]


class Linear(torch.nn.Linear):  # type: ignore[misc]
    """torch.nn.Linear computed by `detkern.torch.linear`: weight [out_features, in_features], bias [out_features].

    Parameters, their initial values and state dicts are torch.nn.Linear's own.

    Args:
        in_features, out_features, bias, device, dtype: as torch.nn.Linear.
        out_dtype, accumulate, contract, backend: as `detkern.torch.linear`; contract None: the default at each forward.

    Raises:
        ContractUnsupported: no such contract. DTypeError: a result cannot be of out_dtype.
    """

    out_dtype: Any = None
    accumulate: bool = False
    contract: str | None = None
    backend: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        out_dtype: torch.dtype | str | None = None,
        accumulate: bool = False,
        contract: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.configure(out_dtype=out_dtype, accumulate=accumulate, contract=contract, backend=backend)

    def configure(
        self,
        *,
        out_dtype: torch.dtype | str | None = None,
        accumulate: bool = False,
        contract: str | None = None,
        backend: str | None = None,
    ) -> None:
        """Set how the layer computes; arguments as the constructor's."""
        self.out_dtype = ops.torch_dtype(out_dtype)
        self.accumulate = accumulate
        self.contract = None if contract is None else get_contract(contract).name
        self.backend = backend

    @classmethod
    def from_torch(
        cls,
        layer: torch.nn.Linear,
        *,
        out_dtype: torch.dtype | str | None = None,
        accumulate: bool = False,
        contract: str | None = None,
        backend: str | None = None,
    ) -> Linear:
        """A layer that shares weight and bias with `layer`. Hooks stay with `layer`; `detkern.torch.convert` keeps them.

        Args:
            layer: a torch.nn.Linear.
            out_dtype, accumulate, contract, backend: as the constructor's.
        """
        # On the meta device nothing is allocated for parameters that are replaced at once.
        new = cls(layer.in_features, layer.out_features, layer.bias is not None, "meta", layer.weight.dtype)
        new.configure(out_dtype=out_dtype, accumulate=accumulate, contract=contract, backend=backend)
        new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)  # type: ignore[no-any-return]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [.., in_features] -> [.., out_features]."""
        return linear(
            input,
            self.weight,
            self.bias,
            out_dtype=self.out_dtype,
            accumulate=self.accumulate,
            contract=self.contract,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """torch.nn.Linear's, then the contract; one that the layer does not name itself is marked as the default."""
        if self.contract is not None:
            contract = self.contract
        else:
            default = route.freeze(None, self.weight.dtype, self.weight.device)
            contract = "default" if default is None else f"{default} (default)"
        more = [f"out_dtype={self.out_dtype}"] if self.out_dtype is not None else []
        more += ["accumulate=True"] if self.accumulate else []
        more += [f"backend={self.backend}"] if self.backend is not None else []
        return ", ".join([super().extra_repr(), f"contract={contract}", *more])


def zero_main_grads(module: torch.nn.Module) -> None:
    """Set `main_grad` of the parameters of every `Linear` with accumulate=True to zeros, making it where there is none.

    Args:
        module: searched with all its submodules. A main_grad that fits is zeroed in place.
    """
    for layer in module.modules():
        if not isinstance(layer, Linear) or not layer.accumulate:
            continue
        for parameter in (layer.weight, layer.bias):
            if parameter is None or not parameter.requires_grad:
                continue
            main_grad = getattr(parameter, "main_grad", None)
            if main_grad is None or main_grad.shape != parameter.shape or main_grad.device != parameter.device:
                parameter.main_grad = torch.zeros_like(
                    parameter, dtype=torch.float32, memory_format=torch.contiguous_format, requires_grad=False
                )
            else:
                main_grad.zero_()
