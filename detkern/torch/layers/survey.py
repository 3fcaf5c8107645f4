"""Which layers of a model `convert` can give a contract, and why it leaves the others as they are."""

from __future__ import annotations

import sys
from typing import Any

import torch

from . import instance_forward
from .classes import is_conv1d, origin, twin
from .linear import SETTINGS, Contracted, Linear

__all__ = ["is_linear", "read_not_called", "why_left"]

_OPERANDS = (torch.float32, torch.float16, torch.bfloat16)
_FUNCTIONS = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # of plain tensors
# Modules of PyTorch whose products no layer of detkern computes.
_OTHER_PRODUCTS = (torch.nn.Bilinear, torch.nn.modules.conv._ConvNd, torch.nn.RNNBase, torch.nn.RNNCellBase)
# What holds matrices and multiplies by none of them itself.
_TABLES = (
    torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.LayerNorm, torch.nn.utils.parametrize.ParametrizationList,
)  # fmt: skip


def is_linear(layer: Any) -> bool:
    """Whether it is a layer that convert is about: torch.nn.Linear, transformers' Conv1D,
    and what inherits from them."""
    return isinstance(layer, torch.nn.Linear) or is_conv1d(type(layer))


def read_not_called(module: torch.nn.Module) -> set[int]:
    """The ids of layers whose parameters another module reads, without a call of the layer."""
    return {
        id(part.out_proj)
        for part in module.modules()
        if isinstance(part, torch.nn.MultiheadAttention)
        and type(part).forward is torch.nn.MultiheadAttention.forward
        and hasattr(part, "out_proj")
    }


def why_left(layer: Any, read: set[int], wanted: Linear) -> str | None:
    """Why a layer cannot be given a contract; None where it can, or where it computes no product that is known.

    Args:
        layer: any module.
        read: of `read_not_called`.
        wanted: a layer with the settings that it is to have.
    """
    kind: Any = type(layer)
    if issubclass(kind, Contracted):
        if instance_forward.runs(layer, kind.forward):
            given = {name: getattr(wanted, name) for name in SETTINGS if getattr(wanted, name)}
            other = [f"{name}={getattr(layer, name)}" for name in given if getattr(layer, name) != given[name]]
            return f"it was converted before, with {', '.join(other)}: revert it first" if other else None
        return "another forward was put on it after it was converted"
    if not is_linear(layer):
        return _why_unknown(layer)
    if id(layer) in read:
        return "torch.nn.MultiheadAttention reads its weight and does not call it (batch_invariant_mode covers it)"
    if kind.forward is not origin(kind).forward:
        return f"{kind.__name__} has a forward of its own"
    if kind.__call__ is not torch.nn.Module.__call__:
        return f"{kind.__name__} has a __call__ of its own"
    if not instance_forward.runs(layer, kind.forward):
        return "a forward was put on the layer itself, and whether it calls the layer's own is unknown"
    for name in ("weight", "bias"):
        reason = _why_no_operand(layer, getattr(layer, name, None), name, wanted.accumulate)
        if reason is not None:
            return reason
    try:
        made = twin(kind)
    except TypeError as error:
        return f"{kind.__name__} cannot be extended: {error}"
    return None if made is not None else f"{kind.__name__} was made from a class that cannot be converted"


def _why_no_operand(layer: Any, tensor: Any, name: str, accumulate: bool) -> str | None:
    if tensor is None:
        return None
    kind = type(tensor).__name__
    if hasattr(tensor, "device_mesh"):
        if accumulate:
            return f"its {name} is a {kind}, and accumulate=True needs parameters that are whole"
        # FSDP puts the whole parameter in its place for the forward; tensor parallelism does not.
        if getattr(layer, "_is_fsdp_managed_module", False) and tensor.device_mesh.ndim == 1:
            return None
        return f"its {name} is a {kind}; a layer converted before fully_shard computes with the gathered one"
    if getattr(tensor, "is_nested", False):
        return f"its {name} is a nested tensor"
    if getattr(tensor, "is_quantized", False) or tensor.dtype not in _OPERANDS:
        return f"its {name} is {tensor.dtype}, and products by a contract take float32, float16 and bfloat16"
    if _intercepts(type(tensor)):
        return f"its {name} is a {kind}, which computes products in its own way"
    if accumulate and not isinstance(tensor, torch.nn.Parameter):
        return f"its {name} is computed at each forward, and accumulate=True gathers the gradients of parameters"
    return None


def _intercepts(kind: Any) -> bool:
    """Whether a tensor class has arithmetic of its own, as quantised ones have; fake tensors stand for plain ones."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    if issubclass(kind, fake) or issubclass(kind, torch.nn.parameter.UninitializedTensorMixin):
        return False
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return function not in _FUNCTIONS or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _why_unknown(module: Any) -> str | None:
    """Modules that are known to compute products, and those that hold what looks like a matrix to multiply by."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        scripted = getattr(module, "original_name", "")
        return f"{scripted} was scripted, and its products with it" if "Linear" in scripted else None
    if isinstance(module, torch.nn.MultiheadAttention):
        return f"{kind} computes its projections itself (batch_invariant_mode covers them)"
    if isinstance(module, _OTHER_PRODUCTS):
        return f"{kind} computes products of another kind"
    if isinstance(module, _TABLES) or "Embedding" in kind:
        return None
    matrices = [
        f"{name} {list(parameter.shape)}"
        for name, parameter in module.named_parameters(recurse=False)
        if not isinstance(parameter, torch.nn.parameter.UninitializedParameter)
        and parameter.dim() > 1
        and parameter.shape[0] > 1
        and parameter[0].numel() > 1
    ]
    if matrices:
        return f"{kind} is not a torch.nn.Linear and holds {', '.join(matrices)}, whose products have no contract"
    return f"{kind} is not a torch.nn.Linear" if _is_other_linear(module) else None


def _is_other_linear(module: Any) -> bool:
    """Whether it is called Linear and holds no parameters but other state, as layers do whose weights are quantised."""
    kind = type(module).__name__
    if "Linear" not in kind or "Packed" in kind or next(module.parameters(), None) is not None:
        return False
    return len(module.state_dict()) > 0
