"""The gradients of linear_logp: blocks of the logits' gradient, made again from hidden and weight, and the products of
these."""

from __future__ import annotations

from typing import Any

from ... import api
from ...errors import ArgumentError
from ...tensors import adapter_for, contiguous_strides
from ...vocabulary.dtypes import F32, DType
from .call import delta
from .checks import contract_of
from .operation import IGNORED
from .problem import PARTS, UNIT, part_edges

__all__ = ["BLOCK_BYTES", "ROWS_BYTES", "gradients"]

BLOCK_BYTES = 160 << 20  # of a block of the logits' gradient
ROWS_BYTES = 32 << 20  # of a part's product, where it is made by rows


def gradients(
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any,
    state: Any,
    grads: Any,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = IGNORED,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    weight_out: Any = None,
    bias_out: Any = None,
    contract: str | None = None,
    backend: str | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients of hidden, weight and bias (docs/contracts.md, "linear_logp"), each None where it is not wanted.

    Args:
        hidden, weight, target, bias: the forward's, hidden [M, D], target [M] or [M, K].
        state: float32 [3 or more, M], `linear_logp_partial`'s of the whole vocabulary.
        grads: float32 [K + 1 or K + 2, M], the gradients of the log-probabilities, of lse and, if it was asked for, of
            the entropy.
        wanted: which of the three.
        weight_out, bias_out: float32 [V, D] and [V], which these two gradients are added to, going on with the chains
            over rows; None: new arrays, of the operand's type.

    Memory beside operands and results: a block of the logits' gradient, at most BLOCK_BYTES where 64 columns are no
    more, and three float32 arrays of hidden's shape and ROWS_BYTES; where a part is more than a block, four arrays.
    """
    (m, depth), vocabulary = tuple(hidden.shape), weight.shape[0]
    view = adapter_for(hidden, "hidden").view(hidden, "hidden")
    chosen = str(contract_of(view, contract))
    settings: dict[str, Any] = {"contract": chosen, "backend": backend}
    of_hidden, of_weight, of_bias = wanted[0], wanted[1], wanted[2] and bias is not None
    if bias is None and bias_out is not None:
        raise ArgumentError("bias_out is given, and there is no bias")
    dweight = weight_out if weight_out is not None or not of_weight else _new(weight, tuple(weight.shape))
    dbias = bias_out if bias_out is not None or not of_bias else _new(bias, (vocabulary,))
    step = max(BLOCK_BYTES // max(m * view.dtype.itemsize, 1) // UNIT * UNIT, UNIT)
    edges = part_edges(vocabulary)
    sums = _PartSums(settings)
    for part in range(PARTS):
        blocks = range(edges[part], edges[part + 1], step)
        partial = None
        for low in blocks:
            columns = slice(low, min(low + step, edges[part + 1]))
            block = delta(
                hidden, weight[columns], target, state, grads, None if bias is None else bias[columns],
                vocab_start=low, vocab_size=vocabulary, temperature=temperature, softcap=softcap,
                ignore_index=ignore_index, **settings,
            )  # fmt: skip
            if of_weight:
                api.gemm(
                    block, hidden, trans_a=True, out=dweight[columns], accumulate=weight_out is not None, **settings
                )
            if of_bias:
                api.bias_gradient(block, out=dbias[columns], accumulate=bias_out is not None, backend=backend)
            if of_hidden and len(blocks) == 1:
                sums.add_product(block, weight[columns])
            elif of_hidden and partial is None:
                partial = api.gemm(block, weight[columns], out_dtype="float32", **settings)
            elif of_hidden:
                api.gemm(block, weight[columns], out=partial, accumulate=True, **settings)
            del block  # before the next one is made
        if of_hidden and len(blocks) != 1:
            sums.add(partial)
        partial = None
    dhidden = None
    if of_hidden:
        total = sums.total
        dhidden = _new(hidden, (m, depth)) if total is None else _rounded(total, view.dtype, backend)
        if total is None:
            dhidden[...] = 0
    return dhidden, dweight if of_weight else None, dbias if of_bias else None


class _PartSums:
    """The sums of parts' products by a binary counter: float32 arrays of hidden's shape, each of how many parts; None
    of a part of no columns, which adds +0 and changes nothing. settings: of products."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._waiting: list[tuple[int, Any]] = []

    @property
    def total(self) -> Any:
        """Of all parts."""
        return self._waiting[0][1]

    def add(self, partial: Any) -> None:
        """One more part, behind the others."""
        parts, lefts = self._pop_lefts()
        for left in lefts:
            if left is not None and partial is not None:
                _add(left, partial, self._settings["backend"])
            partial = partial if left is None else left
        self._waiting.append((parts, partial))

    def add_product(self, block: Any, weight: Any) -> None:
        """One more part, block @ weight, by rows where it is added to another at once: so it needs no memory of its own
        but for ROWS_BYTES."""
        parts, lefts = self._pop_lefts()
        if not lefts:
            self._waiting.append((1, api.gemm(block, weight, out_dtype="float32", **self._settings)))
            return
        step = max(ROWS_BYTES // (4 * max(weight.shape[1], 1)), 1)
        for first in range(0, block.shape[0], step):
            rows = slice(first, first + step)
            right = api.gemm(block[rows], weight, out_dtype="float32", **self._settings)
            for left in lefts:
                _add(left[rows], right, self._settings["backend"])
                right = left[rows]
        self._waiting.append((parts, lefts[-1]))

    def _pop_lefts(self) -> tuple[int, list[Any]]:
        """What the next part is added to, one after the other, and of how many parts the sum is then."""
        parts, lefts = 1, []
        while self._waiting and self._waiting[-1][0] == parts:
            lefts.append(self._waiting.pop()[1])
            parts *= 2
        return parts, lefts


def _add(left: Any, right: Any, backend: str | None) -> None:
    """left + right in binary32, into left: the column sum of one row that starts at left."""
    if left.size if isinstance(left.size, int) else left.numel():
        api.bias_gradient(right.reshape((1, -1)), out=left.reshape((-1,)), accumulate=True, backend=backend)


def _rounded(total: Any, dtype: DType, backend: str | None) -> Any:
    """One rounding to the operands' type."""
    if dtype == F32:
        return total
    return api.bias_gradient(total.reshape((-1,)), out_dtype=dtype.name, backend=backend).reshape(tuple(total.shape))


def _new(like: Any, shape: tuple[int, ...]) -> Any:
    """A new row-major array of an array's framework, type and device."""
    adapter = adapter_for(like, "weight")
    view = adapter.view(like, "weight")
    execution = adapter.execution(view.device)
    memory = adapter.empty(like, shape, contiguous_strides(shape), view.dtype, execution)
    return adapter.result(like, memory, execution)
