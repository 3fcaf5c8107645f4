"""Products of tensors by a contract, with gradients: `matmul`, `bmm` and `linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ... import config
from ...errors import ArgumentError, DTypeError, ShapeError
from ...vocabulary.arguments import flag
from . import eager, gradients, main_grads, route
from .casting import autocast, torch_dtype

__all__ = ["bmm", "gathered", "gathering_linear", "gathers", "linear", "matmul"]


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype | str | None = None,
    contract: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The matrix product a @ b by a contract, with gradients by the same contract.

    Args:
        a: [.., M, K], or [K]. float32, float16 or bfloat16; any strides.
        b: [.., K, N], or [K], of a's type and on its device. Batch dimensions broadcast as in torch.matmul.
        out_dtype: the result's type, a torch dtype or a name. Default: the operands'. The incoming gradient is rounded
            to the operands' type before the products of the backward.
        contract: the contract's name. Default: `detkern.config.contract`, else that of type and device. It is read now
            and holds for the backward too.
        backend: the name of the one backend to use, not "native".

    Returns:
        A new contiguous tensor [.., M, N].

    Raises:
        ShapeError, DTypeError, DeviceError, ContractUnsupported, BackendUnavailable, BuildError: as `detkern.gemm`.
    """
    if not isinstance(a, torch.Tensor) and has_torch_function((a, b)):
        return handle_torch_function(matmul, (a, b), a, b, out_dtype=out_dtype, contract=contract, backend=backend)
    if out_dtype is not None:
        out_dtype = torch_dtype(out_dtype)
    if backend is not None:
        _need_backend(backend)
    if torch.compiler.is_compiling():
        return torch.ops.detkern.matmul.default(
            a, b, route.freeze(contract, a.dtype, a.device, config._stated), out_dtype, backend
        )
    _need_tensors((a, "a"), (b, "b"))
    if torch._C._is_any_autocast_enabled():
        a, b = autocast(a, b)
    return gradients.matmul(a, b, gradients.Settings(route.freeze(contract, a.dtype, a.device), out_dtype, backend))


def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype | str | None = None,
    contract: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The products of two stacks of matrices, as torch.bmm: nothing broadcasts.

    Args:
        a: [B, M, K].
        b: [B, K, N].
        out_dtype, contract, backend: as in `matmul`.

    Returns:
        [B, M, N].

    Raises:
        As `matmul`; ShapeError also where an operand has not three dimensions, or B differs.
    """
    if not isinstance(a, torch.Tensor) and has_torch_function((a, b)):
        return handle_torch_function(bmm, (a, b), a, b, out_dtype=out_dtype, contract=contract, backend=backend)
    _need_tensors((a, "a"), (b, "b"))
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0]:
        raise ShapeError(
            f"a {list(a.shape)} and b {list(b.shape)} do not fit: bmm takes [B, M, K] and [B, K, N]; matmul broadcasts"
        )
    return matmul(a, b, out_dtype=out_dtype, contract=contract, backend=backend)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | str | None = None,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The linear layer x @ weight.T + bias by a contract, with gradients by the same contract.

    Args:
        x: [.., K], or [K]. float32, float16 or bfloat16; any strides.
        weight: [N, K], of x's type.
        bias: [N], of any of the three types.
        out_dtype, contract, backend: as in `matmul`.
        accumulate: add the gradients of weight and bias to `weight.main_grad` and `bias.main_grad`, float32 tensors of
            their shapes, instead of giving them to autograd: `.grad` stays as it is. Micro-batches, taken in order and
            cut where the contract allows (docs/contracts.md, "Accumulate"), so give the bits of the whole batch.

    Returns:
        A new contiguous tensor [.., N].

    Raises:
        As `matmul`; ArgumentError, with accumulate, where a parameter that requires grad has no fitting main_grad.
    """
    if not isinstance(x, torch.Tensor) and has_torch_function((x, weight, bias)):
        return handle_torch_function(
            linear, (x, weight, bias), x, weight, bias,
            out_dtype=out_dtype, accumulate=accumulate, contract=contract, backend=backend,
        )  # fmt: skip
    if out_dtype is not None:
        out_dtype = torch_dtype(out_dtype)
    if backend is not None:
        _need_backend(backend)
    main_grad = bias_main_grad = None
    if accumulate is not False and flag(accumulate, "accumulate"):
        main_grad = gathers(weight, "weight")
        bias_main_grad = None if bias is None else gathers(bias, "bias")
    return gathering_linear(x, weight, bias, main_grad, bias_main_grad, out_dtype, contract, backend)


def gathering_linear(
    x: Any,
    weight: Any,
    bias: Any,
    main_grad: Any,
    bias_main_grad: Any,
    out_dtype: Any,
    contract: str | None,
    backend: str | None,
) -> Any:
    """`linear` with checked settings, and with the tensors that gradients are added to instead of given to autograd,
    laid as weight and bias are; None where they are given to it."""
    if torch.compiler.is_compiling():
        frozen = route.freeze(contract, x.dtype, x.device, config._stated)
        return torch.ops.detkern.linear.default(x, weight, bias, main_grad, bias_main_grad, frozen, out_dtype, backend)
    if torch._C._is_any_autocast_enabled():
        x, weight, bias = autocast(x, weight, bias)
    # What most calls are, with nothing done twice.
    if route.direct(x, weight, bias):
        if not route.recorded(x, weight, bias):
            return eager.linear(x, weight, bias, contract, out_dtype, backend)
        frozen = route.freeze(contract, x.dtype, x.device)
        settings = gradients.Settings(frozen, out_dtype, backend, main_grad, bias_main_grad)
        return gradients.record_linear(x, weight, bias, settings)
    _need_tensors((x, "x"), (weight, "weight"), (bias, "bias"))
    frozen = route.freeze(contract, x.dtype, x.device)
    return gradients.linear(x, weight, bias, gradients.Settings(frozen, out_dtype, backend, main_grad, bias_main_grad))


def _need_backend(backend: str | None) -> None:
    if backend == "native":
        raise ArgumentError(
            "backend='native' follows no contract, and the functions of detkern.torch do; call "
            "torch.nn.functional.linear or torch.matmul, or detkern.gemm with backend='native'"
        )


def gathers(parameter: Any, name: str) -> Any:
    """Where the gradient of a parameter is gathered; None where none will be asked for."""
    if not parameter.requires_grad or not torch.is_grad_enabled():
        return None
    if not parameter.is_leaf:
        raise ArgumentError(
            f"accumulate=True gathers the gradients of parameters, and {name} is computed from others: leave "
            "accumulate out"
        )
    main_grad = main_grads.check(parameter, name)
    if main_grad is None:
        raise ArgumentError(
            f"accumulate=True needs {name}.main_grad, a float32 tensor of shape {list(parameter.shape)}: set it to "
            "zeros before the first micro-batch, as detkern.torch.zero_main_grads(module) does"
        )
    if not torch.compiler.is_compiling():
        _need_a_place_for_gradients()
    return main_grad


def gathered(parameter: Any, name: str = "weight") -> Any:
    """`gathers` of an operand that may be a marked parameter (main_grads.mark), and None of any other."""
    return gathers(parameter, name) if parameter is not None and main_grads.marked(parameter) else None


def _need_a_place_for_gradients() -> None:
    """torch.jit.trace would keep the main_grad of this moment for ever. DistributedDataParallel averages .grad, which
    stays zero, and every process would step by its own gradients."""
    if torch._C._get_tracing_state() is not None:
        raise ArgumentError(
            "accumulate=True inside of torch.jit.trace: a traced graph has no parameters to gather gradients for; "
            "trace a copy of the model without accumulate"
        )
    active = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and active.require_backward_grad_sync:
        raise ArgumentError(
            "accumulate=True inside of DistributedDataParallel: it averages .grad, and these gradients are in "
            "main_grad. Train the module that it wraps and reduce main_grad after the last micro-batch, as "
            "docs/pytorch.md shows, or call it under no_sync()"
        )


def _need_tensors(*arguments: tuple[Any, str]) -> None:
    for value, name in arguments:
        if not isinstance(value, torch.Tensor) and not (value is None and name == "bias"):
            raise DTypeError(
                f"{name} is not a torch.Tensor but {type(value).__qualname__}; detkern.gemm and detkern.linear take "
                f"the "
                "arrays of other frameworks"
            )
