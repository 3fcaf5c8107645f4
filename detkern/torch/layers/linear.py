"""`Linear`, a drop-in for torch.nn.Linear whose bits follow a contract."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ArgumentError
from ...vocabulary.arguments import flag
from ...vocabulary.contracts import get_contract
from ..functions import main_grads, route
from ..functions.casting import torch_dtype
from ..functions.functional import linear
from ..functions.logits import Logits
from . import instance_forward

__all__ = ["MARK", "SETTINGS", "Contracted", "Linear", "zero_main_grads"]

# On a module whose parameters are marked.
MARK = "_detkern_accumulate"
SETTINGS = ("out_dtype", "accumulate", "contract", "backend", "logits")


class Contracted:
    """What every layer that computes by a contract has: the settings of its products,
    and what its repr says of them."""

    out_dtype: Any = None
    accumulate: bool = False
    contract: str | None = None
    backend: str | None = None
    logits: str | None = None  # "fused": the layer is a head that gives Logits

    def configure(
        self,
        *,
        out_dtype: torch.dtype | str | None = None,
        accumulate: bool = False,
        contract: str | None = None,
        backend: str | None = None,
    ) -> None:
        """Set how the layer computes; arguments as the constructor's."""
        self.out_dtype = torch_dtype(out_dtype)
        self.accumulate = flag(accumulate, "accumulate")
        self.contract = None if contract is None else get_contract(contract).name
        self.backend = backend

    def settings(self) -> str:
        """The contract and the settings that are not the defaults. A contract that the layer does not name itself is
        marked as the default, and none is claimed where another forward was put on the layer."""
        kind: Any = type(self)
        if not instance_forward.runs(self, kind.forward):
            return "contract=none: another forward was put on this layer"
        weight: Any = self.weight  # type: ignore[attr-defined]
        if self.contract is not None:
            contract = self.contract
        else:
            default = route.freeze(None, weight.dtype, weight.device)
            contract = "default" if default is None else f"{default} (default)"
        more = [f"out_dtype={self.out_dtype}"] if self.out_dtype is not None else []
        more += ["accumulate=True"] if self.accumulate else []
        more += [f"backend={self.backend}"] if self.backend is not None else []
        more += [f"logits={self.logits!r}"] if self.logits is not None else []
        return ", ".join([f"contract={contract}", *more])

    def __prepare_scriptable__(self) -> Any:
        # torch.jit.script asks for it before it compiles anything.
        raise ArgumentError(
            f"torch.jit.script compiles Python's source, which a product by a contract ({type(self).__name__}) is not "
            f"made of: "
            "use torch.jit.trace, torch.export or torch.compile, or script the model after detkern.torch.revert(model)"
        )


class Linear(Contracted, torch.nn.Linear):  # type: ignore[misc]
    """torch.nn.Linear computed by `detkern.torch.linear`: weight [out_features, in_features], bias [out_features].

    Parameters, their initial values and state dicts are torch.nn.Linear's own.

    Args:
        in_features, out_features, bias, device, dtype: as torch.nn.Linear.
        out_dtype, accumulate, contract, backend: as `detkern.torch.linear`; contract None: the default at each forward.

    Raises:
        ContractUnsupported: no such contract. DTypeError: a result cannot be of out_dtype.
    """

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
        """A layer that shares weight and bias with `layer`. Hooks stay with `layer`; `detkern.torch.convert` keeps
        them.

        Args:
            layer: a torch.nn.Linear, or of a subclass that has no forward of its own.
            out_dtype, accumulate, contract, backend: as the constructor's.

        Raises:
            ArgumentError: another module, or a layer that does more than torch.nn.Linear's forward with parameters that
                can be shared.
        """
        _need_plain(layer)
        # On the meta device nothing is allocated for parameters that are replaced at once.
        new = cls(layer.in_features, layer.out_features, layer.bias is not None, "meta", layer.weight.dtype)
        new.configure(out_dtype=out_dtype, accumulate=accumulate, contract=contract, backend=backend)
        new.weight, new.bias = layer.weight, layer.bias
        return new.train(layer.training)  # type: ignore[no-any-return]

    def forward(self, input: torch.Tensor) -> Any:
        """input [.., in_features] -> [.., out_features]; of a fused head `Logits` of that shape."""
        if not isinstance(self, Contracted):
            # A function that was put around this method keeps it when the layer is made a torch.nn.Linear again.
            return torch.nn.functional.linear(input, self.weight, self.bias)
        if self.logits is not None:
            return Logits(
                input,
                self.weight,
                self.bias,
                accumulate=self.accumulate,
                contract=self.contract,
                backend=self.backend,
            )
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
        """torch.nn.Linear's, then the contract and what else was set."""
        return f"{super().extra_repr()}, {self.settings()}"


def _need_plain(layer: Any) -> None:
    if not isinstance(layer, torch.nn.Linear):
        raise ArgumentError(
            f"layer is not a torch.nn.Linear but {type(layer).__name__}; build a detkern.torch.Linear and copy the "
            f"weight, as "
            "[out_features, in_features], or call detkern.torch.linear in the module's own forward"
        )
    name = type(layer).__name__
    if type(layer).forward not in (torch.nn.Linear.forward, Linear.forward) or not instance_forward.plain(layer):
        raise ArgumentError(
            f"layer, a {name}, has a forward of its own, which a Linear that shares its weight would not run: call "
            "detkern.torch.linear(x, layer.weight, layer.bias) in that forward, or give the torch.nn.Linear inside of "
            "it"
        )
    for part in ("weight", "bias"):
        tensor = getattr(layer, part)
        if tensor is None or type(tensor) is torch.nn.Parameter:
            continue
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            raise ArgumentError(f"layer.{part} has no shape yet: call the {name} once, or use detkern.torch.convert")
        raise ArgumentError(
            f"layer.{part} is a {type(tensor).__name__} and no plain parameter, so it cannot be shared: "
            "detkern.torch.convert keeps parametrizations and hooks that compute it"
        )


def zero_main_grads(module: torch.nn.Module) -> None:
    """Set the accumulators of every layer with accumulate=True to zeros, and those of every parameter that
    `convert(model, accumulate=True)` has marked, making `main_grad` where there is none.

    A parameter that several operations use gets the list `further_main_grads` beside it (docs/pytorch.md,
    "Micro-batches").

    Args:
        module: searched with all its submodules. A main_grad that fits is zeroed in place.

    Raises:
        ArgumentError: module is not a torch.nn.Module, or a parameter is sharded or computed.
    """
    main_grads.need_module(module)
    found: dict[int, Any] = {}
    for layer in module.modules():
        if isinstance(layer, Contracted) and layer.accumulate:
            found |= {id(p): p for p in (layer.weight, layer.bias) if p is not None and p.requires_grad}  # type: ignore[attr-defined]
        if MARK in layer.__dict__:
            for parameter in layer.parameters(recurse=False):
                main_grads.mark(parameter)  # a copy of a model has parameters without marks
                if main_grads.marked(parameter) and parameter.requires_grad:
                    found[id(parameter)] = parameter
    main_grads.zero(*found.values())
