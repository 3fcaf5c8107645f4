"""Log-probabilities from hidden states, with gradients: `linear_logp`, and the loss that is made of it,
`linear_cross_entropy`.

The arithmetic is that of `detkern.linear_logp`, forward and backward; logits are never kept. The op gives the results
of each row as lines, [K + 1 or K + 2, M], and the rows' states, which its backward needs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ...errors import ArgumentError, DTypeError, ShapeError
from ...operations.linear_logp import call as calls
from ...operations.linear_logp.backward import gradients
from ...operations.linear_logp.operation import IGNORED
from ...operations.linear_logp.problem import STATE
from . import main_grads, route, rows
from .casting import autocast
from .functional import gathers
from .registration import Op, call

__all__ = ["OPS", "linear_cross_entropy", "linear_logp"]


def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
    return_lse: bool = False,
    return_entropy: bool = False,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
    check: bool = False,
) -> Any:
    """log softmax(hidden @ weight.T + bias) at each row's targets, with gradients, without ever making the logits.

    Args:
        hidden, weight, target, bias, temperature, softcap, ignore_index, return_lse, return_entropy, backend, check: as
            in `detkern.linear_logp`.
        accumulate: add the gradients of weight and bias to their `main_grad`, as in `detkern.torch.linear`:
            micro-batches of multiples of 16 rows, in order, give the bits of the whole batch.
        contract: as in `detkern.linear_logp`; it is read now and holds for the backward too.

    Returns:
        float32 tensors: the log-probabilities in target's shape, or the tuple (log-probabilities[, lse][, entropy]).
        Gradients of hidden, weight and bias go through all of them; they cannot be differentiated again.

    Raises:
        As `detkern.linear_logp`; ArgumentError, with accumulate, where a parameter that requires grad has no fitting
        main_grad.
    """
    if not isinstance(hidden, torch.Tensor) and has_torch_function((hidden, weight, target, bias)):
        return handle_torch_function(
            linear_logp, (hidden, weight, target, bias), hidden, weight, target, bias,
            temperature=temperature, softcap=softcap, ignore_index=ignore_index, return_lse=return_lse,
            return_entropy=return_entropy, accumulate=accumulate, contract=contract, backend=backend, check=check,
        )  # fmt: skip
    _need_tensors(hidden, weight, target, bias)
    if backend == "native":
        raise ArgumentError("backend='native' follows no contract, and linear_logp does; leave backend out")
    lead, shape = tuple(hidden.shape[:-1]), tuple(target.shape)
    if hidden.dim() == 0 or (shape != lead and shape[:-1] != lead):
        raise ShapeError(
            f"target has shape {list(shape)}; hidden {list(hidden.shape)} needs {list(lead)}, or {[*lead, 'K']}"
        )
    one = shape == lead
    main_grad = bias_main_grad = None
    if accumulate:
        main_grad = gathers(weight, "weight")
        bias_main_grad = None if bias is None else gathers(bias, "bias")
    if torch._C._is_any_autocast_enabled() and not torch.compiler.is_compiling():
        hidden, weight, bias = autocast(hidden, weight, bias)
    m = prod(lead)
    columns = target.reshape((m,) if one else (m, shape[-1]))
    if check:
        calls.check_targets(columns, weight.shape[0], ignore_index)
    frozen = route.freeze(contract, hidden.dtype, hidden.device)
    arguments = (
        hidden if hidden.dim() == 2 else hidden.reshape(m, hidden.shape[-1]), weight, columns, bias, main_grad,
        bias_main_grad, float(temperature), None if softcap is None else float(softcap), int(ignore_index),
        bool(return_entropy),
        frozen, backend,
    )  # fmt: skip
    lines, _ = call(LOGP, arguments, arguments[0], weight, bias)
    targets = 1 if one else shape[-1]
    logp = lines[0] if one else lines[:targets].t().reshape(-1)
    given = [logp.reshape(shape)]
    if return_lse:
        given.append(lines[targets].reshape(lead))
    if return_entropy:
        given.append(lines[targets + 1].reshape(lead))
    return tuple(given) if len(given) > 1 else given[0]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduction: str = "mean",
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
    check: bool = False,
) -> torch.Tensor:
    """The cross-entropy of the logits hidden @ weight.T + bias with target, without making them.

    Args:
        target: [..], a column for each row.
        reduction: "none": -`linear_logp`, [..], +0 where target is ignored; "sum": `detkern.torch.sum` of that, exact
            up to one rounding; "mean": that divided once by the number of targets that are not ignored, NaN where there
            is none.
        All others: as in `linear_logp`.

    Returns:
        A float32 tensor.

    Raises:
        As `linear_logp`; ArgumentError for another reduction.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ArgumentError(f"reduction={reduction!r} must be 'none', 'sum' or 'mean'")
    logp = linear_logp(
        hidden, weight, target, bias, temperature=temperature, softcap=softcap, ignore_index=ignore_index,
        accumulate=accumulate, contract=contract, backend=backend, check=check,
    )  # fmt: skip
    if logp.shape != hidden.shape[:-1]:
        raise ShapeError(f"target has shape {list(target.shape)}; linear_cross_entropy needs {list(hidden.shape[:-1])}")
    loss = 0.0 - logp
    if reduction == "none":
        return loss
    total = rows.sum(loss.reshape(-1), backend=backend)
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _need_tensors(hidden: Any, weight: Any, target: Any, bias: Any) -> None:
    for value, name in ((hidden, "hidden"), (weight, "weight"), (target, "target"), (bias, "bias")):
        if not isinstance(value, torch.Tensor) and not (value is None and name == "bias"):
            raise DTypeError(
                f"{name} is not a torch.Tensor but {type(value).__qualname__}; detkern.linear_logp takes the arrays of "
                "other frameworks"
            )


def _forward(
    hidden: Any, weight: Any, target: Any, bias: Any, main_grad: Any, bias_main_grad: Any, temperature: float,
    softcap: float | None, ignore_index: int, entropy: bool, contract: str | None, backend: str | None,
) -> tuple[Any, Any]:  # fmt: skip
    state = calls.fold(
        hidden, weight, target, bias,
        temperature=temperature, softcap=softcap, entropy=entropy, contract=contract, backend=backend,
    )  # fmt: skip
    lines = calls.merge(
        state[None], target, vocab_size=weight.shape[0], entropy=entropy, ignore_index=ignore_index, backend=backend
    )
    return lines, state


def _fake(hidden: Any, weight: Any, target: Any, bias: Any, *settings: Any) -> tuple[Any, Any]:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} do not fit: [.., D] and [V, D] are needed"
        )
    if hidden.dtype != weight.dtype:
        raise DTypeError(f"hidden is {hidden.dtype} and weight is {weight.dtype}: operands of one type are needed")
    targets, m, entropy = target.shape[1] if target.dim() == 2 else 1, hidden.shape[0], settings[5]
    return (
        hidden.new_empty((targets + 1 + entropy, m), dtype=torch.float32),
        hidden.new_empty((STATE + targets, m), dtype=torch.float32),
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, target, bias, main_grad, bias_main_grad, *settings, contract, backend = inputs
    ctx.save_for_backward(hidden, weight, target, bias, output[1])
    # Not saved as tensors are: the backwards of other micro-batches change them in the meantime, and should.
    ctx.main_grads = main_grad, bias_main_grad
    ctx.settings = *settings[:3], route.freeze(contract, hidden.dtype, hidden.device), backend
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dlines: Any, dstate: Any) -> tuple[Any, ...]:
    if dlines is None:
        return None, None, None, None
    hidden, weight, target, bias, state = ctx.saved_tensors
    needs = (*ctx.needs_input_grad, *(False,) * 4)
    wanted = [needs[0], needs[1], needs[3]]
    plain = type(dlines) is torch.Tensor
    if plain and torch.is_grad_enabled():
        raise ArgumentError(
            "the gradients of linear_logp cannot be differentiated: leave create_graph=True out, or take the "
            "gradient of "
            "log_softmax(linear(...))"
        )
    outs = list(ctx.main_grads)
    if plain:
        # What a compiled backward is asked for shows only when its graph runs; the op that accumulates looks then.
        for index, place in ((0, 1), (1, 2)):
            if outs[index] is not None and wanted[place]:
                asked = main_grads.asked(ctx.next_functions, outs[index])
                wanted[place] = asked is not False
                outs[index] = None if asked is None else outs[index]
    outs = [out if needed else None for out, needed in zip(outs, wanted[1:], strict=True)]
    arguments = (dlines, hidden, weight, target, bias, state, wanted, *ctx.settings)
    if outs == [None, None]:
        found = GRADIENTS.overload(*arguments)
    elif route.direct(dlines, hidden, weight):
        found = _onto(ctx.next_functions, outs, *arguments)
    else:
        found = ACCUMULATE.overload(*outs, *arguments)
    returned = [needed and out is None for needed, out in zip(wanted, (None, *outs), strict=True)]
    dhidden, dweight, dbias = (gradient if needed else None for gradient, needed in zip(found, returned, strict=True))
    return dhidden, dweight, None, dbias


def _gradients(
    dlines: Any, hidden: Any, weight: Any, target: Any, bias: Any, state: Any, wanted: Any, temperature: float,
    softcap: float | None, ignore_index: int, contract: str | None, backend: str | None, outs: Any = (None, None),
) -> tuple[Any, Any, Any]:  # fmt: skip
    found = gradients(
        hidden, weight, target, bias, state, dlines.detach(), temperature=temperature, softcap=softcap,
        ignore_index=ignore_index, wanted=tuple(wanted), weight_out=outs[0], bias_out=outs[1], contract=contract,
        backend=backend,
    )  # fmt: skip
    given = (None, *outs)
    dhidden, dweight, dbias = (
        hidden.new_empty(0) if gradient is None or out is not None else gradient
        for gradient, out in zip(found, given, strict=True)
    )
    return dhidden, dweight, dbias


def _fake_gradients(
    dlines: Any, hidden: Any, weight: Any, target: Any, bias: Any, state: Any, wanted: Any, *settings: Any
) -> tuple[Any, Any, Any]:
    dhidden, dweight, dbias = (
        like.new_empty(like.shape) if needed and like is not None else hidden.new_empty(0)
        for like, needed in zip((hidden, weight, bias), wanted, strict=True)
    )
    return dhidden, dweight, dbias


def _onto(
    functions: Any, outs: Any, dlines: Any, hidden: Any, weight: Any, target: Any, bias: Any, state: Any, *rest: Any
) -> Any:
    """The gradients, those of weight and bias added where `main_grads.destination` says, if anywhere."""
    wanted, temperature, softcap, ignore_index, contract, backend = rest
    places = [None if out is None else main_grads.destination(functions, out) for out in outs]
    needed = [wanted[0]]
    for out, place, want in zip(outs, places, wanted[1:], strict=True):
        needed.append(want and (out is None or place is not None))
    with torch.no_grad():
        return _gradients(
            dlines,
            hidden,
            weight,
            target,
            bias,
            state,
            needed,
            temperature,
            softcap,
            ignore_index,
            contract,
            backend,
            places,
        )


def _accumulate(main_grad: Any, bias_main_grad: Any, *arguments: Any) -> Any:
    node = torch._C._current_autograd_node()
    return _onto(() if node is None else node.next_functions, [main_grad, bias_main_grad], *arguments)


def _fake_accumulate(main_grad: Any, bias_main_grad: Any, *arguments: Any) -> tuple[Any, Any, Any]:
    dlines, hidden, weight, target, bias, state, wanted, *_ = arguments
    returned = [wanted[0], wanted[1] and main_grad is None, wanted[2] and bias_main_grad is None]
    return _fake_gradients(dlines, hidden, weight, target, bias, state, returned)


_OPERANDS = "Tensor dlines, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor state, bool[] wanted"
_SCALING = "float temperature=1.0, float? softcap=None, int ignore_index=-100"
_BY = "str? contract=None, str? backend=None"

LOGP = Op(
    "linear_logp",
    "(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, Tensor? main_grad=None, Tensor? "
    "bias_main_grad=None, "
    f"{_SCALING}, bool entropy=False, {_BY}) -> (Tensor, Tensor)",
    _forward,
    _fake,
    setup=_setup,
    backward=_backward,
    autocast=4,
)
GRADIENTS = Op(
    "linear_logp_gradients",
    f"({_OPERANDS}, {_SCALING}, {_BY}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
ACCUMULATE = Op(
    "linear_logp_accumulate_",
    f"(Tensor(a!)? main_grad, Tensor(b!)? bias_main_grad, {_OPERANDS}, {_SCALING}, {_BY}) -> (Tensor, Tensor, Tensor)",
    _accumulate,
    _fake_accumulate,
)
OPS = (LOGP, GRADIENTS, ACCUMULATE)
