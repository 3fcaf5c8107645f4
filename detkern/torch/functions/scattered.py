"""Rows taken by an index and rows summed by one: two ops, each the other's gradient. indexing.py makes PyTorch's
functions of them.

The sum is `detkern.scatter_sum`: the gradient of a row is one chain over the places that took it, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import DTypeError, ShapeError
from ...operations.scatter_sum.call import scatter_sum
from . import batching, main_grads, route
from .registration import Op, call

__all__ = ["OPS", "rows_summed", "rows_taken"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rows_taken(x: Any, index: Any, ignored: int = -1, main_grad: Any = None, backend: str | None = None) -> Any:
    """x[index], with gradients.

    Args:
        x: [rows, *rest].
        index: [M], int32 or int64, in [0, rows).
        ignored: a row whose gradient is 0, whoever takes it; -1: none.
        main_grad: float32 [rows, N], of an x [rows, N], which the gradient is added to instead of being given to
            autograd; see main_grads.py.
        backend: the backend of the gradient.

    Returns:
        [M, *rest].
    """
    return call(TAKE, (x, index, ignored, main_grad, backend), x, index)


def rows_summed(
    source: Any,
    index: Any,
    rows: Any,
    ignored: int = -1,
    initial: Any = None,
    out_dtype: Any = None,
    backend: str | None = None,
) -> Any:
    """For each row the chain of the sources that index names it for, with gradients.

    Args:
        source: [M, *rest]. float32, float16 or bfloat16; any strides.
        index: [M], int32 or int64. What is outside of [0, rows) names no row.
        rows: of the result.
        ignored: a row that is summed nothing to; -1: none.
        initial: [rows, *rest], where the chains start, instead of +0.
        out_dtype: the result's; None: that of initial, or source's.
        backend: the name of the one backend to use.

    Returns:
        [rows, *rest], new.

    Raises:
        ShapeError: source has no dimensions, or index or initial does not fit it. Else as `detkern.scatter_sum`.
    """
    if source.dim() == 0 or index.shape != source.shape[:1]:
        raise ShapeError(
            f"source has shape {list(source.shape)} and index {list(index.shape)}; scatter_sum needs [M, ...] and [M]"
        )
    if initial is not None:
        if initial.shape != (rows, *source.shape[1:]):
            raise ShapeError(
                f"initial has shape {list(initial.shape)}; scatter_sum of source {list(source.shape)} into {rows} rows "
                f"needs {[rows, *source.shape[1:]]}"
            )
        if initial.dtype not in FLOATS:
            raise DTypeError(f"initial is {initial.dtype}; scatter_sum takes float32, float16 and bfloat16")
    return call(SUM, (source, index, rows, ignored, initial, out_dtype, backend), source, index, initial)


def _named(index: Any, ignored: int) -> Any:
    """The index without the row that is ignored."""
    return index if ignored < 0 else torch.where(index == ignored, -1, index)


def _flat(x: Any) -> Any:
    """[rows, *rest] as [rows, N], a view where the strides allow one."""
    columns = 1
    for size in x.shape[1:]:
        columns = columns * size
    return x.reshape(x.shape[0], columns)


def _take(x: Any, index: Any, ignored: int, main_grad: Any, backend: Any) -> Any:
    return x.index_select(0, index)


def _fake_take(x: Any, index: Any, ignored: int, main_grad: Any, backend: Any) -> Any:
    return x.new_empty((index.shape[0], *x.shape[1:]))


def _setup_take(ctx: Any, inputs: Any, output: Any) -> None:
    x, index, ctx.ignored, ctx.main_grad, ctx.backend = inputs
    ctx.rows, ctx.dtype = x.shape[0], x.dtype
    ctx.save_for_backward(index)


def _take_gradient(ctx: Any, dy: Any) -> tuple[Any]:
    (index,) = ctx.saved_tensors
    main_grad = ctx.main_grad
    if main_grad is not None:
        main_grads.need_no_graph("call embedding without accumulate where create_graph=True")
        # What a compiled backward is asked for shows only when its graph runs: see gradients.py.
        if type(dy) is torch.Tensor:
            asked = main_grads.asked(ctx.next_functions, main_grad)
            if asked is False:
                return (None,)
            main_grad = None if asked is None else main_grad
    if main_grad is None:
        return (rows_summed(dy, index, ctx.rows, ctx.ignored, None, ctx.dtype, ctx.backend),)
    if route.direct(dy, index, main_grad):
        _onto(main_grads.destination(ctx.next_functions, main_grad), dy, index, ctx.ignored, ctx.backend)
    else:
        SUM_ACCUMULATE.overload(main_grad, dy, index, ctx.ignored, ctx.backend)
    return (None,)


def _take_jvp(ctx: Any, dx: Any, *_: Any) -> Any:
    (index,) = route.primals(ctx)
    return rows_taken(dx.to(ctx.dtype), index, ctx.ignored, None, ctx.backend)


def _batched_take(
    call: Any, size: int, dims: Sequence[Any], x: Any, index: Any, ignored: int, main_grad: Any, backend: Any
) -> tuple[Any, int]:
    batching.refuse_main_grads(main_grad)
    if dims[1] is None:
        return call(x.movedim(dims[0], 1), index, ignored, None, backend), 1
    index = index.movedim(dims[1], 0)
    if dims[0] is not None:
        return batching.each(lambda x, i: call(x, i, ignored, None, backend), size, (dims[0], 0), x, index)
    taken = call(x, index.reshape(-1), ignored, None, backend)
    return taken.reshape(*index.shape, *x.shape[1:]), 0


def _sum(source: Any, index: Any, rows: int, ignored: int, initial: Any, out_dtype: Any, backend: Any) -> Any:
    index, flat = _named(index, ignored), _flat(source)
    if initial is None:
        total = scatter_sum(flat, index, rows, out_dtype=out_dtype, backend=backend)
    else:
        total = _flat(initial).to(out_dtype or initial.dtype, copy=True, memory_format=torch.contiguous_format)
        scatter_sum(flat, index, out=total, accumulate=True, backend=backend)
    return total.reshape(rows, *source.shape[1:])


def _fake_sum(source: Any, index: Any, rows: Any, ignored: int, initial: Any, out_dtype: Any, backend: Any) -> Any:
    dtype = out_dtype or (source if initial is None else initial).dtype
    return source.new_empty((rows, *source.shape[1:]), dtype=dtype)


def _setup_sum(ctx: Any, inputs: Any, output: Any) -> None:
    source, index, ctx.rows, ctx.ignored, initial, ctx.out_dtype, ctx.backend = inputs
    ctx.dtypes = source.dtype, None if initial is None else initial.dtype
    ctx.save_for_backward(index)


def _sum_gradients(ctx: Any, dy: Any) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    dsource = dinitial = None
    if ctx.needs_input_grad[0]:
        # What names no row got nothing; row 0 stands in for it.
        named = (index >= 0) & (index < ctx.rows) & (index != ctx.ignored)
        taken = rows_taken(dy, torch.where(named, index, 0), backend=ctx.backend)
        dsource = taken.masked_fill(~named.reshape(-1, *(1,) * (taken.dim() - 1)), 0).to(ctx.dtypes[0])
    if (*ctx.needs_input_grad, *(False,) * 5)[4]:
        dinitial = dy.to(ctx.dtypes[1])
    return dsource, None, None, None, dinitial


def _sum_jvp(ctx: Any, dsource: Any, dindex: Any, drows: Any, dignored: Any, dinitial: Any, *_: Any) -> Any:
    (index,) = route.primals(ctx)
    dsource, dinitial = route.tangents((dsource, dinitial), ctx.dtypes)
    if dsource is None:
        return dinitial
    return rows_summed(dsource, index, ctx.rows, ctx.ignored, dinitial, ctx.out_dtype, ctx.backend)


def _batched_sum(
    call: Any,
    size: int,
    dims: Sequence[Any],
    source: Any,
    index: Any,
    rows: Any,
    ignored: int,
    initial: Any,
    *settings: Any,
) -> tuple[Any, int]:
    if dims[1] is None:
        # A batch is more columns.
        source = (
            source.unsqueeze(1).expand(-1, size, *source.shape[1:]) if dims[0] is None else source.movedim(dims[0], 1)
        )
        if initial is not None:
            along = dims[4]
            initial = (
                initial.unsqueeze(1).expand(-1, size, *initial.shape[1:])
                if along is None
                else initial.movedim(along, 1)
            )
        return call(source, index, rows, ignored, initial, *settings), 1
    if initial is None:
        return batching.each(
            lambda s, i: call(s, i, rows, ignored, None, *settings), size, (dims[0], dims[1]), source, index
        )
    return batching.each(
        lambda s, i, start: call(s, i, rows, ignored, start, *settings),
        size,
        (dims[0], dims[1], dims[4]),
        source,
        index,
        initial,
    )


def _onto(out: Any, source: Any, index: Any, ignored: int, backend: Any) -> None:
    """Adds to the accumulator, a matrix, that `main_grads.destination` gave, if any."""
    if out is not None:
        scatter_sum(_flat(source), _named(index, ignored), out=out, accumulate=True, backend=backend)


def _accumulate(out: Any, source: Any, index: Any, ignored: int, backend: Any) -> None:
    _onto(main_grads.running_destination(out), source, index, ignored, backend)


TAKE = Op(
    "rows_taken",
    "(Tensor x, Tensor index, int ignored=-1, Tensor? main_grad=None, str? backend=None) -> Tensor",
    _take,
    _fake_take,
    setup=_setup_take,
    backward=_take_gradient,
    kept=lambda arguments, output: arguments[1:2],
    jvp=_take_jvp,
    vmap=_batched_take,
)
SUM = Op(
    "scatter_sum",
    "(Tensor source, Tensor index, SymInt rows, int ignored=-1, Tensor? initial=None, ScalarType? out_dtype=None, "
    "str? backend=None) -> Tensor",
    _sum,
    _fake_sum,
    setup=_setup_sum,
    backward=_sum_gradients,
    kept=lambda arguments, output: arguments[1:2],
    jvp=_sum_jvp,
    vmap=_batched_sum,
)
SUM_ACCUMULATE = Op(
    "scatter_sum_accumulate_",
    "(Tensor(out!) out, Tensor source, Tensor index, int ignored=-1, str? backend=None) -> ()",
    _accumulate,
    lambda *arguments: None,
)
OPS = (TAKE, SUM, SUM_ACCUMULATE)
