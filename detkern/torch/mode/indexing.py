"""Reading and writing by an index, as PyTorch names it, under batch_invariant_mode: sums by `detkern.scatter_sum`, in
index_add and its like, and in the gradient of whatever is read. Handlers as in products.py.

What is read is PyTorch's where nothing is recorded: a copy has no sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..functions import functional, indexing, route
from ..functions.functionalized import overwritten
from .products import finish

__all__ = ["ELEMENTWISE", "HANDLERS", "NAMES", "READING", "functional_embedding"]

# What the mode calls them, for their types and devices.
NAMES = ("embedding", "index", "index_select", "gather", "index_add", "scatter_add", "index_put")

# A use without a sum.
_PLAIN = object()


def _recorded(mode: Any, op: str, x: Any) -> bool:
    """Whether a gradient of x will be summed, by detkern."""
    if not isinstance(x, torch.Tensor) or not torch.is_grad_enabled() or not (x.requires_grad or route.transformed()):
        return False
    return bool(mode.covers(op, x))


def functional_embedding(
    mode: Any,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """torch.nn.functional.embedding. With max_norm PyTorch first scales the rows that are used, each by itself."""
    if not _summed(mode, weight, scale_grad_by_freq, sparse):
        return torch.nn.functional.embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    if weight.dim() != 2 or not isinstance(input, torch.Tensor) or input.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        return NotImplemented
    if max_norm is not None:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)
    return indexing.gathering_embedding(input, weight, padding_idx, functional.gathered(weight), None)


def _embedding(
    mode: Any,
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    out: Any = None,
) -> Any:
    """aten::embedding's signature, where -1 is no row."""
    if out is not None:
        return torch.ops.aten.embedding.out(weight, indices, padding_idx, scale_grad_by_freq, sparse, out=out)
    if not _summed(mode, weight, scale_grad_by_freq, sparse) or weight.dim() != 2:
        return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    ignored = padding_idx if padding_idx >= 0 else None
    return indexing.gathering_embedding(indices, weight, ignored, functional.gathered(weight), None)


def _summed(mode: Any, weight: Any, scale_grad_by_freq: bool, sparse: bool) -> bool:
    if not _recorded(mode, "embedding", weight):
        return False
    for name, given in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if given:
            mode.uncovered("embedding", name, weight)
            return False
    return True


def _index_select(mode: Any, input: Any, dim: Any, index: Any, *, out: Any = None) -> Any:
    if out is not None or type(dim) is not int or not _recorded(mode, "index_select", input):
        return torch.index_select(input, dim, index, out=out)
    return indexing.index_select(input, dim, index)


def _gather(mode: Any, input: Any, dim: Any, index: Any, *, sparse_grad: bool = False, out: Any = None) -> Any:
    if out is not None or type(dim) is not int or sparse_grad or not _recorded(mode, "gather", input):
        return torch.gather(input, dim, index, sparse_grad=sparse_grad, out=out)
    return indexing.gather(input, dim, index)


def _take_along_dim(mode: Any, input: Any, indices: Any, dim: int | None = None, *, out: Any = None) -> Any:
    if out is not None or not _recorded(mode, "gather", input):
        return torch.take_along_dim(input, indices, dim, out=out)
    if dim is None:
        input, indices, dim = input.reshape(-1), indices.reshape(-1), 0
    return indexing.read(input, lambda coordinates: torch.take_along_dim(coordinates, indices, dim))


def _take(mode: Any, input: Any, index: Any, *, out: Any = None) -> Any:
    if out is not None or not _recorded(mode, "index", input):
        return torch.take(input, index, out=out)
    return indexing.read(input, lambda coordinates: torch.take(coordinates, index))


def _index(mode: Any, self: Any, indices: Any, *, out: Any = None) -> Any:
    """aten::index."""
    if out is not None or not _recorded(mode, "index", self):
        return _PLAIN
    return indexing.take(self, tuple(slice(None) if i is None else i for i in indices))


def _getitem(mode: Any, x: Any, key: Any) -> Any:
    items = key if isinstance(key, tuple) else (key,)
    if all(item is None or item is ... or isinstance(item, (int, slice)) for item in items):
        return NotImplemented  # a view
    return indexing.take(x, key) if _recorded(mode, "index", x) else NotImplemented


def _repeat_interleave(
    mode: Any,
    input: Any,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
    out: Any = None,
) -> Any:
    if repeats is None or out is not None or not _recorded(mode, "index_select", input):
        return _PLAIN
    x = input.reshape(-1) if dim is None else input
    d = 0 if dim is None else dim
    if x.dim() == 0 or not -x.dim() <= d < x.dim():
        return NotImplemented
    places = torch.arange(x.shape[d], device=x.device)
    return indexing.index_select(x, d, torch.repeat_interleave(places, repeats, output_size=output_size))


def _index_add(mode: Any, input: Any, dim: Any, index: Any, source: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    if not mode.covers("index_add", input, source) or input.dtype != source.dtype or type(dim) is not int:
        return NotImplemented
    if input.dim() == 0 or index.dim() > 1 or not -input.dim() <= dim < input.dim():
        return NotImplemented
    d = dim % input.dim()
    if source.shape != (*input.shape[:d], index.numel(), *input.shape[d + 1 :]):
        return NotImplemented
    return finish(indexing.index_add(input, d, index, source, alpha=alpha), out)


def _scatter_add(mode: Any, input: Any, dim: Any, index: Any, src: Any, *, out: Any = None) -> Any:
    if not mode.covers("scatter_add", input, src) or input.dtype != src.dtype or type(dim) is not int:
        return NotImplemented
    ranks = {input.dim(), index.dim(), src.dim()}
    if len(ranks) > 1 or input.dim() == 0 or any(n > m for n, m in zip(index.shape, src.shape, strict=True)):
        return NotImplemented
    return finish(indexing.scatter_add(input, dim, index, src), out)


def _scatter(
    mode: Any,
    input: Any,
    dim: Any,
    index: Any,
    src: Any = None,
    *,
    reduce: Any = None,
    value: Any = None,
    out: Any = None,
) -> Any:
    if reduce is None:
        return _PLAIN
    if reduce == "add":
        added = value if src is None else src
        if isinstance(added, (int, float)) and mode.covers("scatter_add", input):
            added = torch.full(index.shape, added, dtype=input.dtype, device=input.device)
        if isinstance(added, torch.Tensor):
            return _scatter_add(mode, input, dim, index, added, out=out)
    mode.uncovered("scatter", f"reduce={reduce!r}", input)
    return _PLAIN


def _scatter_reduce(
    mode: Any, input: Any, dim: Any, index: Any, src: Any, reduce: Any, *, include_self: bool = True, out: Any = None
) -> Any:
    if reduce == "sum" and include_self:
        return _scatter_add(mode, input, dim, index, src, out=out)
    if reduce in ("sum", "mean", "prod"):
        mode.uncovered("scatter_reduce", f"reduce={reduce!r}", input)
    return _PLAIN


def _index_put(mode: Any, input: Any, indices: Any, values: Any, accumulate: bool = False, *, out: Any = None) -> Any:
    if not accumulate:
        return _PLAIN
    if not mode.covers("index_put", input, values) or input.dtype != values.dtype:
        return NotImplemented
    return finish(indexing.index_put(input, tuple(indices), values), out)


def _of(native: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of a function of PyTorch's that has uses without a sum."""

    def handled(mode: Any, *args: Any, **kwargs: Any) -> Any:
        result = handler(mode, *args, **kwargs)
        return native(*args, **kwargs) if result is _PLAIN else result

    return handled


def _in_place(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of the method `name` that changes its tensor."""

    def changed(mode: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        result = handler(mode, input, *args, **kwargs)
        return result if result is NotImplemented or result is _PLAIN else overwritten(input, result)

    return _of(getattr(torch.Tensor, name), changed)


HANDLERS: dict[str, Callable[..., Any]] = {
    "embedding": _embedding, "index_select": _index_select, "gather": _gather, "take_along_dim": _take_along_dim,
    "take": _take,
    "index": _of(torch.ops.aten.index, _index),
    "repeat_interleave": _of(torch.ops.aten.repeat_interleave, _repeat_interleave),
    "index_add": _index_add, "index_add_": _in_place("index_add_", _index_add),
    "scatter_add": _scatter_add, "scatter_add_": _in_place("scatter_add_", _scatter_add),
    "scatter": _of(torch.scatter, _scatter), "scatter_": _in_place("scatter_", _scatter),
    "scatter_reduce": _of(torch.scatter_reduce, _scatter_reduce),
    "scatter_reduce_": _in_place("scatter_reduce_", _scatter_reduce),
    "index_put": _of(torch.ops.aten.index_put, _index_put), "index_put_": _in_place("index_put_", _index_put),
}  # fmt: skip
# Reading with brackets: torch.compile makes its own of it.
ELEMENTWISE: dict[str, Callable[..., Any]] = {"__getitem__": _getitem}
# Their gradient is a sum, which is PyTorch's where they are composed below Python.
READING = ("embedding", "index_select", "gather", "index")
