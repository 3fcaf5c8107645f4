"""From checked arguments of linear_logp to its plans. No data is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import config
from ...dispatch import registry
from ...dispatch.plan import FREE_ROWS, Planned, new_plan, plans, result_type, result_view
from ...errors import ArgumentError, ContractUnsupported, DTypeError, ShapeError
from ...tensors import TensorView, contiguous_strides
from ...tensors.types import OUTPUTS
from ...vocabulary.contracts import Contract, get_contract
from ...vocabulary.dtypes import F32, INDICES, DType
from .operation import BY_CONTRACT
from .problem import (
    PARTS,
    STATE,
    Scaling,
    delta_problem,
    fold_problem,
    merge_problem,
    part_edges,
    shard_parts,
)  # fmt: skip

__all__ = ["contract_of", "plan_delta", "plan_fold", "plan_merge", "scaling_of"]

_SMALLEST = 2.0**-126


def scaling_of(temperature: Any, softcap: Any) -> Scaling:
    """What is done to logits. ArgumentError where a factor is no positive normal number of binary32."""
    tau = cap = inverse = None
    if temperature != 1:
        tau = _factor("temperature", temperature, "1 / temperature", lambda value: 1 / value)
    if softcap is not None:
        cap = _factor("softcap", softcap, "softcap", lambda value: value)
        inverse = _factor("softcap", softcap, "1 / softcap", lambda value: 1 / value)
    return Scaling(tau, cap, inverse)


def _factor(argument: str, given: Any, name: str, of: Any) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        raise ArgumentError(f"{argument}={given!r} must be a number") from None
    with np.errstate(all="ignore"):
        found = float(np.float32(of(value))) if value else math.inf
    if not _SMALLEST <= found < math.inf:
        raise ArgumentError(f"{argument}={given!r}: {name} must be a positive normal number of float32")
    return found


def contract_of(hidden: TensorView, asked: str | None) -> Contract:
    """The contract of a call: as a product's, if linear_logp is defined by it."""
    wanted = None if asked is None else get_contract(asked)
    configured = None if asked is not None else config.configured_contract(hidden.dtype)
    chosen = registry.contract_for(hidden.dtype, hidden.device, wanted, configured)
    if chosen not in BY_CONTRACT or hidden.dtype not in chosen.operands:
        names = " or ".join(f"contract='{one}'" for one in reversed(BY_CONTRACT) if hidden.dtype in one.operands)
        said = f"{chosen} is what hidden's type and device have" if asked is None else f"contract={asked!r} was given"
        raise ContractUnsupported(f"linear_logp of {hidden.dtype} takes {names}; {said}")
    return chosen


def _layout(view: TensorView | None) -> tuple[object, ...] | None:
    return None if view is None else (view.shape, view.strides, view.dtype.code, view.pointer & 15)


def _rows(view: TensorView, axis: int, m: int, free: bool) -> tuple[object, ...]:
    """A layout without the number of rows, which lie along an axis, where that is free."""
    if not free:
        return view.shape, view.strides, view.dtype.code, view.pointer & 15
    shape = (*view.shape[:axis], *view.shape[axis + 1 :])
    # Lines of M numbers, one behind the other, have strides that hold M.
    dense = axis > 0 and view.strides == contiguous_strides(view.shape)
    return shape, None if dense else view.strides, view.dtype.code, view.pointer & 15


def plan_fold(
    hidden: TensorView,
    weight: TensorView,
    target: TensorView,
    bias: TensorView | None,
    out: TensorView | None,
    *,
    vocabulary: int,
    start: int,
    scaling: Scaling,
    entropy: bool,
    contract: str | None,
    backend: str | None,
) -> Planned:
    """The plan of a fold, its rows and the shape of its result."""
    m = hidden.shape[0] if hidden.shape else 0
    free = len(hidden.shape) == 2 and 1 < m < FREE_ROWS and target.shape[:1] == (m,) and out is None
    key = (
        "linear_logp", vocabulary, start, scaling, entropy, contract, None if contract is not None else config._stated,
        backend, hidden.device.kind, hidden.device.index, _rows(hidden, 0, m, free), _layout(weight),
        _rows(target, 0, m, free), _layout(bias), None if out is None else (*_layout(out), out.readonly),  # type: ignore[misc]
    )  # fmt: skip
    plan = plans.get(key) or plans.recall(key)
    if plan is not None:
        return plan, m, (STATE + plan.problem.targets, m)
    _check_product(hidden, weight, target, bias)
    parts = shard_parts(vocabulary, start, weight.shape[0])
    if parts is None:
        raise ShapeError(_not_a_shard(vocabulary, start, weight.shape[0]))
    chosen = contract_of(hidden, contract)
    shape = (STATE + (target.shape[1] if len(target.shape) == 2 else 1), m)
    dtype = _float32(out)
    problem = fold_problem(
        chosen, hidden, weight, target, bias, result_view(out, shape, dtype, hidden.device),
        vocabulary=vocabulary, start=start, first=parts[0], count=parts[1], scaling=scaling, entropy=entropy,
    )  # fmt: skip
    return new_plan(key, problem, backend, dtype, None), m, shape


def plan_merge(
    states: TensorView,
    target: TensorView,
    out: TensorView | None,
    *,
    vocabulary: int,
    ignore_index: int,
    entropy: bool,
    backend: str | None,
) -> Planned:
    """The plan of a merge, its rows and the shape of its result."""
    m = states.shape[2] if len(states.shape) == 3 else 0
    free = 1 < m < FREE_ROWS and target.shape[:1] == (m,) and out is None
    key = (
        "linear_logp_merge", vocabulary, ignore_index, entropy, backend, states.device.kind, states.device.index,
        _rows(states, 2, m, free), _rows(target, 0, m, free),
        None if out is None else (*_layout(out), out.readonly),  # type: ignore[misc]
    )  # fmt: skip
    plan = plans.get(key) or plans.recall(key)
    if plan is not None:
        return plan, m, (plan.problem.rows, m)
    if states.dtype != F32:
        raise DTypeError(f"states is {states.dtype}; it is float32, as linear_logp_partial gives it")
    _check_target(target)
    targets = target.shape[1] if len(target.shape) == 2 else 1
    if len(states.shape) != 3 or states.shape[0] not in (1, 2, 4, 8):
        raise ShapeError(
            f"states has shape {list(states.shape)}; linear_logp_merge needs [P, 3 + K, M], the states of P = "
            f"1, 2, 4 or 8 "
            "shards in their order"
        )
    if len(target.shape) not in (1, 2) or target.shape[0] != m or states.shape[1] != STATE + targets:
        raise ShapeError(
            f"states {list(states.shape)} and target {list(target.shape)} must be [P, 3 + K, M] and [M, K] or [M]"
        )
    shape = (targets + 1 + entropy, m)
    dtype = _float32(out)
    problem = merge_problem(
        states, target, result_view(out, shape, dtype, states.device),
        vocabulary=vocabulary, ignore_index=ignore_index, entropy=entropy,
    )  # fmt: skip
    return new_plan(key, problem, backend, dtype, None), m, shape


def plan_delta(
    hidden: TensorView,
    weight: TensorView,
    target: TensorView,
    state: TensorView,
    grads: TensorView,
    bias: TensorView | None,
    out: TensorView | None,
    out_dtype: DType | None,
    *,
    vocabulary: int,
    start: int,
    ignore_index: int,
    scaling: Scaling,
    contract: str | None,
    backend: str | None,
) -> Planned:
    """The plan of a gradient of logits, its rows and the shape of its result."""
    m = hidden.shape[0] if hidden.shape else 0
    lines = all(len(view.shape) == 2 and view.shape[1] == m for view in (state, grads))
    free = len(hidden.shape) == 2 and 1 < m < FREE_ROWS and target.shape[:1] == (m,) and lines and out is None
    key = (
        "linear_logp_delta", vocabulary, start, ignore_index, scaling, contract,
        None if contract is not None else config._stated, None if out_dtype is None else out_dtype.code, backend,
        hidden.device.kind, hidden.device.index, _rows(hidden, 0, m, free), _layout(weight), _rows(target, 0, m, free),
        _rows(state, 1, m, free), _rows(grads, 1, m, free), _layout(bias),
        None if out is None else (*_layout(out), out.readonly),  # type: ignore[misc]
    )  # fmt: skip
    plan = plans.get(key) or plans.recall(key)
    if plan is not None:
        return plan, m, (m, plan.problem.n)
    _check_product(hidden, weight, target, bias)
    targets = target.shape[1] if len(target.shape) == 2 else 1
    for view, name in ((state, "state"), (grads, "grads")):
        if view.dtype != F32:
            raise DTypeError(f"{name} is {view.dtype}; it is float32")
    if not lines or state.shape[0] < STATE or grads.shape[0] not in (targets + 1, targets + 2):
        raise ShapeError(
            f"state {list(state.shape)} and grads {list(grads.shape)} must be [3 or more, {m}] and [{targets + 1} or "
            f"{targets + 2}, {m}]"
        )
    if start < 0 or start + weight.shape[0] > vocabulary:
        raise ShapeError(f"columns {start} to {start + weight.shape[0]} are not within a vocabulary of {vocabulary}")
    chosen = contract_of(hidden, contract)
    shape = (m, weight.shape[0])
    dtype = result_type(out, out_dtype, False, hidden.dtype)
    problem = delta_problem(
        chosen, hidden, weight, target, state, grads, bias, result_view(out, shape, dtype, hidden.device),
        vocabulary=vocabulary, start=start, ignore_index=ignore_index, scaling=scaling,
    )  # fmt: skip
    return new_plan(key, problem, backend, dtype, None), m, shape


def _float32(out: TensorView | None) -> DType:
    if out is not None and out.dtype != F32:
        raise DTypeError(f"out is {out.dtype}; results of linear_logp are float32")
    return F32


def _check_product(hidden: TensorView, weight: TensorView, target: TensorView, bias: TensorView | None) -> None:
    if hidden.dtype not in OUTPUTS:
        raise DTypeError(f"hidden is {hidden.dtype}; linear_logp takes float32, float16 and bfloat16")
    if weight.dtype != hidden.dtype:
        raise DTypeError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}, and operands of different types are not "
            f"mixed: cast "
            f"weight to {hidden.dtype} or hidden to {weight.dtype}"
        )
    _check_target(target)
    if len(hidden.shape) != 2 or len(weight.shape) != 2 or hidden.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} do not fit: [.., D] and [V, D] are needed"
        )
    if len(target.shape) not in (1, 2) or target.shape[0] != hidden.shape[0]:
        raise ShapeError(
            f"target has shape {list(target.shape)}; hidden {list(hidden.shape)} needs [{hidden.shape[0]}] or "
            f"[{hidden.shape[0]}, K]"
        )
    if bias is not None:
        if bias.dtype not in OUTPUTS:
            raise DTypeError(f"bias is {bias.dtype}; it can be float32, float16 or bfloat16")
        if bias.shape != weight.shape[:1]:
            raise ShapeError(
                f"bias has shape {list(bias.shape)}; weight {list(weight.shape)} needs [{weight.shape[0]}]"
            )


def _check_target(target: TensorView) -> None:
    if target.dtype not in INDICES:
        raise DTypeError(f"target is {target.dtype}; linear_logp takes targets of int32 and int64")


def _not_a_shard(vocabulary: int, start: int, columns: int) -> str:
    edges = part_edges(vocabulary)
    cuts = "; ".join(
        f"{shards}: {', '.join(str(edges[i]) for i in range(0, PARTS + 1, PARTS // shards))}" for shards in (1, 2, 4, 8)
    )
    return (
        f"weight has the columns {start} to {start + columns} of a vocabulary of {vocabulary}, which are no "
        f"shard of it; the "
        f"edges of shards are, by their number, {cuts}"
    )
