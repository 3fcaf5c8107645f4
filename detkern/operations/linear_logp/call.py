"""The public functions of linear_logp, and the three calls that they are made of: fold, merge and delta."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

from ...dispatch import registry
from ...dispatch.call import Call
from ...errors import ArgumentError, DTypeError, ShapeError
from ...tensors import adapter_for, dtype_argument
from ...vocabulary.dtypes import F32
from .checks import plan_delta, plan_fold, plan_merge, scaling_of
from .operation import IGNORED
from .problem import STATE

__all__ = ["check_targets", "delta", "fold", "linear_logp", "linear_logp_merge", "linear_logp_partial", "merge"]


def linear_logp(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
    return_lse: bool = False,
    return_entropy: bool = False,
    contract: str | None = None,
    backend: str | None = None,
    check: bool = False,
) -> Any:
    """log softmax(hidden @ weight.T + bias) at each row's targets, without the logits (docs/contracts.md,
    "linear_logp").

    Its bits are not those of `log_softmax` of a layer's logits: a rollout and a trainer that shall agree both use this.

    Args:
        hidden: [.., D], float32, float16 or bfloat16; any strides.
        weight: [V, D], of hidden's type.
        target: [..] or [.., K], int32 or int64: one column of the vocabulary for each row, or K of them; any strides.
        bias: [V], of any of the three types, added in binary32.
        temperature: logits are multiplied by 1 / temperature.
        softcap: c in c tanh(logit / c), before temperature. None: none.
        ignore_index: a target whose log-probability is +0.
        return_lse, return_entropy: give the logarithm of the sum of exponentials of the scaled logits, and the entropy
            of their softmax, [..], too.
        contract: "mma16" or "fma"; default as in `detkern.gemm`.
        backend: as in `detkern.gemm`; "native" has no such op.
        check: raise ArgumentError for a target outside of [0, V) that is not ignored, which waits for the device.
            Without, the log-probability of such a target is NaN.

    Returns:
        New float32 arrays of hidden's framework: the log-probabilities in target's shape, or the tuple
        (log-probabilities[, lse][, entropy]).

    Raises:
        ShapeError, DTypeError, ArgumentError, DeviceError: arguments that do not fit.
        ContractUnsupported: no backend computes this contract here, or linear_logp is not defined by it.
        BackendUnavailable, BuildError: as `detkern.gemm`.
    """
    rows, columns, lead = _flattened(hidden, target)
    vocabulary = _vocabulary(weight)
    if check:
        check_targets(columns, vocabulary, ignore_index)
    state = fold(
        rows, weight, columns, bias,
        temperature=temperature, softcap=softcap, entropy=return_entropy, contract=contract, backend=backend,
    )  # fmt: skip
    return _answer(
        state[None],
        columns,
        _shape(target, "target"),
        lead,
        vocabulary,
        ignore_index,
        return_lse,
        return_entropy,
        backend,
    )


def linear_logp_partial(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any = None,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = True,
    contract: str | None = None,
    backend: str | None = None,
) -> Any:
    """What a shard of the vocabulary contributes to `linear_logp`; linear_logp_merge makes the results of it.

    Args:
        hidden, target, temperature, softcap, contract, backend: as in `linear_logp`; targets are columns of the whole
            vocabulary.
        weight, bias: the shard's, [N, D] and [N].
        vocab_start: the shard's first column.
        vocab_size: V of the whole; default: weight is the whole. Of 1, 2, 4 or 8 shards the edges are min(i L, V), L a
            part of V rounded up to a multiple of 64.
        return_entropy: prepare the entropy too.

    Returns:
        The state, a new float32 array [3 + K, M] of hidden's framework; M counts the rows of all leading dimensions.

    Raises:
        As `linear_logp`; ShapeError also where the columns are not one of 1, 2, 4 or 8 shards, with the edges of these.
    """
    rows, columns, _ = _flattened(hidden, target)
    return fold(
        rows, weight, columns, bias, vocab_start=vocab_start, vocab_size=vocab_size, temperature=temperature,
        softcap=softcap, entropy=return_entropy, contract=contract, backend=backend,
    )  # fmt: skip


def linear_logp_merge(
    states: Any,
    target: Any,
    *,
    vocab_size: int,
    ignore_index: int = IGNORED,
    return_lse: bool = False,
    return_entropy: bool = False,
    backend: str | None = None,
    check: bool = False,
) -> Any:
    """The results of `linear_logp` from the states of the shards of a vocabulary, bit for bit those of the whole.

    Args:
        states: float32 [P, 3 + K, M], what `linear_logp_partial` gave on the shards, in their order, P = 1, 2, 4 or 8:
            as an all-gather puts them together.
        target: [..] or [.., K] as there; M rows. States of one target leave open which of the two [.., 1] is: it is
            taken for [..], so lse and entropy have its shape.
        vocab_size: V of the whole.
        ignore_index, return_lse, return_entropy, backend, check: as in `linear_logp`. The entropy needs states that
            were made with return_entropy.

    Returns:
        As `linear_logp`, of the framework of states.

    Raises:
        As `linear_logp`; ShapeError also where states and target do not fit.
    """
    shape = _shape(states, "states")
    given = _shape(target, "target")
    if len(shape) != 3 or shape[1] < STATE:
        raise ShapeError(f"states has shape {list(shape)}; linear_logp_merge needs [P, 3 + K, M]")
    m, targets = shape[2], shape[1] - STATE
    if targets == 1 and prod(given) == m:
        lead, columns = given, _reshaped(target, "target", given, (m,))
    elif given and given[-1] == targets and prod(given[:-1]) == m:
        lead, columns = given[:-1], _reshaped(target, "target", given, (m, targets))
    else:
        raise ShapeError(
            f"target has shape {list(given)}; states {list(shape)} have {targets} targets for each of {m} rows"
        )
    if check:
        check_targets(columns, vocab_size, ignore_index)
    return _answer(states, columns, given, lead, vocab_size, ignore_index, return_lse, return_entropy, backend)


def fold(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any = None,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = True,
    out: Any = None,
    out_dtype: Any = "float32",
    contract: str | None = None,
    backend: str | None = None,
) -> Any:
    """The state [3 + K, M] of hidden [M, D] over the columns of weight, for target [M] or [M, K]; else
    `linear_logp_partial`."""
    scaling = scaling_of(temperature, softcap)
    _settings(out_dtype, backend)
    call = Call(((hidden, "hidden"), (weight, "weight"), (target, "target"), (bias, "bias")), out)
    columns = call.views[1].shape[0] if call.views[1].shape else 0
    rows, matrix, columns_of, column = call.views
    planned = plan_fold(
        rows, matrix, columns_of, column, call.out,
        vocabulary=columns if vocab_size is None else _whole("vocab_size", vocab_size),
        start=_whole("vocab_start", vocab_start), scaling=scaling, entropy=bool(entropy), contract=contract,
        backend=backend,
    )  # fmt: skip
    return call.complete(planned)


def merge(
    states: Any,
    target: Any,
    *,
    vocab_size: int,
    lines: int | None = None,
    entropy: bool = False,
    ignore_index: int = IGNORED,
    out: Any = None,
    out_dtype: Any = "float32",
    backend: str | None = None,
) -> Any:
    """logp of each target, lse and, where it is asked for, entropy, [K + 1 or K + 2, M], of states [P, 3 + K, M] and
    target [M] or [M, K]. lines: K + 2 asks for entropy too."""
    _settings(out_dtype, backend)
    call = Call(((states, "states"), (target, "target")), out)
    if lines is not None and len(call.views[0].shape) == 3:
        entropy = lines + STATE > call.views[0].shape[1] + 1
    stack, columns_of = call.views
    planned = plan_merge(
        stack, columns_of, call.out, vocabulary=_whole("vocab_size", vocab_size),
        ignore_index=_integer("ignore_index", ignore_index), entropy=bool(entropy), backend=backend,
    )  # fmt: skip
    return call.complete(planned)


def delta(
    hidden: Any,
    weight: Any,
    target: Any,
    state: Any,
    grads: Any,
    bias: Any = None,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
    out: Any = None,
    out_dtype: Any = None,
    contract: str | None = None,
    backend: str | None = None,
) -> Any:
    """The gradient of the logits before scaling, [M, N], of the columns of weight [N, D] from vocab_start on.

    Args:
        state: [3 or more, M], `fold`'s of the whole vocabulary. grads: [K + 1 or K + 2, M], those of what `merge`
            gives.
        hidden, target, bias, temperature, softcap, contract: as the forward had them; any columns of weight, not just
            shards.
        out, out_dtype: as in `detkern.gemm`; default hidden's type.
    """
    scaling = scaling_of(temperature, softcap)
    _settings(None, backend)
    dtype = None if out_dtype is None else dtype_argument(out_dtype)
    operands = ((hidden, "hidden"), (weight, "weight"), (target, "target"), (state, "state"), (grads, "grads"))
    call = Call((*operands, (bias, "bias")), out)
    columns = call.views[1].shape[0] if call.views[1].shape else 0
    rows, matrix, columns_of, lines, incoming, column = call.views
    planned = plan_delta(
        rows, matrix, columns_of, lines, incoming, column, call.out, dtype,
        vocabulary=columns if vocab_size is None else _whole("vocab_size", vocab_size),
        start=_whole("vocab_start", vocab_start), ignore_index=_integer("ignore_index", ignore_index), scaling=scaling,
        contract=contract, backend=backend,
    )  # fmt: skip
    return call.complete(planned)


def _answer(
    states: Any,
    target: Any,
    shape: tuple[int, ...],
    lead: tuple[int, ...],
    vocabulary: int,
    ignore_index: int,
    return_lse: bool,
    return_entropy: bool,
    backend: str | None,
) -> Any:
    lines = merge(
        states, target, vocab_size=vocabulary, ignore_index=ignore_index, entropy=return_entropy, backend=backend
    )
    targets = lines.shape[0] - 1 - bool(return_entropy)
    # Each row's targets lie one behind the other, as in target.
    logp = lines[0] if targets == 1 else lines[:targets].T.reshape((targets * lines.shape[1],))
    given = [logp.reshape(shape)]
    if return_lse:
        given.append(lines[targets].reshape(lead))
    if return_entropy:
        given.append(lines[targets + 1].reshape(lead))
    return tuple(given) if len(given) > 1 else given[0]


def _flattened(hidden: Any, target: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """hidden as [M, D], target as [M] or [M, K], and the leading dimensions."""
    shape, given = _shape(hidden, "hidden"), _shape(target, "target")
    if not shape:
        raise ShapeError("hidden has no dimensions; linear_logp needs [.., D]")
    lead = shape[:-1]
    m = prod(lead)
    if given == lead:
        flat: tuple[int, ...] = (m,)
    elif given[:-1] == lead and len(given) == len(lead) + 1:
        flat = (m, given[-1])
    else:
        raise ShapeError(
            f"target has shape {list(given)}; hidden {list(shape)} needs {list(lead)}, or {[*lead, 'K']} for K "
            f"targets a row"
        )
    return _reshaped(hidden, "hidden", shape, (m, shape[-1])), _reshaped(target, "target", given, flat), lead


def _shape(array: Any, argument: str) -> tuple[int, ...]:
    if hasattr(array, "shape"):
        return tuple(array.shape)
    return adapter_for(array, argument).view(array, argument, planned_copies=[]).shape


def _reshaped(array: Any, argument: str, given: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    if given == shape:
        return array
    if not hasattr(array, "reshape"):
        raise ArgumentError(
            f"{argument} has shape {list(given)}, and {type(array).__name__} has no reshape: give {list(shape)}"
        )
    return array.reshape(shape)


def _vocabulary(weight: Any) -> int:
    shape = _shape(weight, "weight")
    return shape[0] if shape else 0


def check_targets(target: Any, vocabulary: int, ignore_index: int) -> None:
    """ArgumentError for a column outside of the vocabulary that is not ignored. It waits for the device."""
    if not hasattr(target, "reshape"):
        raise ArgumentError(f"check=True cannot compare the elements of {type(target).__name__}; give a NumPy array")
    outside = (target != ignore_index) & ((target < 0) | (target >= vocabulary))
    if bool(outside.any()):
        raise ArgumentError(
            f"target has columns outside of [0, {vocabulary}) that are not ignore_index={ignore_index}; mask "
            f"them, or leave "
            "check out, which makes their log-probabilities NaN"
        )


def _settings(out_dtype: Any, backend: Any) -> None:
    if out_dtype is not None and dtype_argument(out_dtype) != F32:
        raise DTypeError(f"out_dtype={out_dtype}; results of linear_logp are float32")
    if backend is not None and type(backend) is not str:
        names = ", ".join(registry.backend_names())
        raise ArgumentError(f"backend={backend!r} must be a backend's name or None; the names are {names}")


def _integer(argument: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{argument}={value!r} must be a whole number") from None


def _whole(argument: str, value: Any) -> int:
    number = _integer(argument, value)
    if not 0 <= number < 1 << 62:
        raise ArgumentError(f"{argument}={value!r} must be a whole number from 0 on")
    return number
