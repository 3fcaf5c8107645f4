"""PyTorch's functions that read or write by an index, with sums by `detkern.scatter_sum`: forward or in the gradient.

Each becomes rows taken or rows summed (scattered.py) by *positions*: where in the dimensions that are indexed, taken as
one, an element stands. They are found by indexing the coordinates in the same way, so whatever PyTorch understands as
an index is right here, and what it refuses is refused with its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from ...errors import ArgumentError, DTypeError, ShapeError
from ...vocabulary.arguments import flag
from . import functional
from .broadcasting import expanded
from .scattered import rows_summed, rows_taken

__all__ = [
    "embedding", "gather", "gathering_embedding", "index_add", "index_put", "index_select", "positions", "read",
    "scatter_add",
    "take",
]  # fmt: skip


def embedding(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    *,
    accumulate: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """The rows of weight that tokens name, torch.nn.functional.embedding, with the gradient of weight by
    `detkern.scatter_sum`: each row is one chain over the tokens that name it, in row-major order of their positions.

    Args:
        tokens: [..], int32 or int64.
        weight: [V, N].
        padding_idx: a row whose gradient is 0; negative: from the end.
        accumulate: add the gradient to `weight.main_grad`, float32 [V, N], instead of giving it to autograd, as in
            `linear`. Micro-batches, taken in order and cut anywhere, so give the bits of the whole batch.
        backend: the name of the one backend for the gradient.

    Returns:
        [.., N].

    Raises:
        ShapeError: weight is not a matrix. DTypeError: tokens or weight is no tensor, or tokens are no whole numbers.
        ArgumentError: padding_idx names no row; with accumulate, weight has no fitting main_grad. IndexError:
            PyTorch's, for a token that names no row.
    """
    _need_tensors("embedding", tokens=tokens, weight=weight)
    if weight.dim() != 2:
        raise ShapeError(f"weight has shape {list(weight.shape)}; embedding needs [V, N]")
    _need_index("embedding", "tokens", tokens)
    if padding_idx is not None and (not isinstance(padding_idx, int) or isinstance(padding_idx, bool)):
        raise ArgumentError(f"padding_idx={padding_idx!r} must be a whole number or None")
    main_grad = functional.gathers(weight, "weight") if flag(accumulate, "accumulate") else None
    return gathering_embedding(tokens, weight, padding_idx, main_grad, backend)


def gathering_embedding(tokens: Any, weight: Any, padding_idx: int | None, main_grad: Any, backend: str | None) -> Any:
    """`embedding` with the tensor that the gradient is added to; None where autograd gets it."""
    ignored = -1
    if padding_idx is not None:
        ignored = padding_idx + weight.shape[0] if padding_idx < 0 else padding_idx
        if not 0 <= ignored < weight.shape[0]:
            raise ArgumentError(f"padding_idx={padding_idx} names no row of weight {list(weight.shape)}")
    return rows_taken(weight, tokens.reshape(-1), ignored, main_grad, backend).reshape((*tokens.shape, weight.shape[1]))


def index_select(x: torch.Tensor, dim: int, index: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """torch.index_select, whose gradient is summed by `detkern.scatter_sum`, over index ascending.

    Args:
        x: any shape. float32, float16 or bfloat16.
        dim: the dimension that is indexed.
        index: [M], or of no dimensions, int32 or int64.
        backend: the name of the one backend for the gradient.

    Returns:
        x's shape with M in dim, contiguous.

    Raises:
        IndexError, RuntimeError: PyTorch's, for a dim or an index that there is not.
    """
    if x.dim() == 0 or index.dim() > 1:
        return torch.index_select(x, dim, index)
    taken = rows_taken(x.movedim(dim, 0), index.reshape(-1), backend=backend)
    return taken.movedim(0, dim).contiguous()


def gather(x: torch.Tensor, dim: int, index: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """torch.gather, whose gradient is summed by `detkern.scatter_sum`, along dim ascending.

    Args:
        x, dim, backend: as in `index_select`.
        index: of as many dimensions as x, int64, at most x's size in each but dim.

    Returns:
        index's shape.

    Raises:
        As `index_select`.
    """
    return read(x, lambda coordinates: torch.gather(coordinates, dim, index), backend)


def read(x: Any, chosen: Callable[[Any], Any], backend: str | None = None) -> Any:
    """chosen(x), for a function that reads single elements, whatever they are, with the gradient of `gather`."""
    where = _combined(x.shape, x.device, chosen)
    return rows_taken(x.reshape(-1), where.reshape(-1), backend=backend).reshape(where.shape)


def take(x: torch.Tensor, key: Any, *, backend: str | None = None) -> torch.Tensor:
    """x[key], whose gradient is summed by `detkern.scatter_sum`, over the elements of the result in row-major order.

    Args:
        x, backend: as in `index_select`.
        key: whatever indexes a tensor: a tensor of whole numbers, a mask, a list, slices, None, a tuple of these.

    Returns:
        A new tensor of the shape of x[key].

    Raises:
        As x[key].
    """
    where, indexed = positions(x.shape, key, x.device)
    rest = x.shape[indexed:]
    taken = rows_taken(x.reshape(prod(x.shape[:indexed]), *rest), where.reshape(-1), backend=backend)
    return taken.reshape((*where.shape, *rest))


def index_add(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: float = 1,
    backend: str | None = None,
) -> torch.Tensor:
    """torch.index_add by `detkern.scatter_sum`: each chain starts at x's value and goes over index ascending, in
    binary32; one rounding to x's type.

    Args:
        x, dim, backend: as in `index_select`.
        index: [M], or of no dimensions, int32 or int64.
        source: x's shape with M in dim, and of x's type.
        alpha: what source is multiplied by first, in binary32, rounded there; 1 multiplies nothing.

    Returns:
        x's shape, new.

    Raises:
        ShapeError: source does not fit, or index is of more dimensions. DTypeError: source is of another type than x,
            or index holds no whole numbers. IndexError: PyTorch's, for an index that there is not.
    """
    _need_tensors("index_add", x=x, index=index, source=source)
    _need_index("index_add", "index", index)
    _need_type("index_add", "source", source, x)
    d = dim + x.dim() if dim < 0 else dim
    if index.dim() > 1:
        raise ShapeError(f"index has shape {list(index.shape)}; index_add needs [M], a number for each place along dim")
    index = index.reshape(-1)
    if not 0 <= d < x.dim() or source.shape != (*x.shape[:d], index.shape[0], *x.shape[d + 1 :]):
        raise ShapeError(
            f"x {list(x.shape)}, index {list(index.shape)} and source {list(source.shape)} do not fit along dim {dim}: "
            "source has x's shape, with a number in index for each place along dim"
        )
    if alpha != 1:
        source = source.float() * alpha
    # Only what names a row; the sum itself leaves out the rest.
    index = torch.arange(x.shape[d], device=x.device).index_select(0, index)
    total = rows_summed(source.movedim(d, 0), index, x.shape[d], initial=x.movedim(d, 0), backend=backend)
    return total.movedim(0, d).contiguous()


def scatter_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """torch.scatter_add by `detkern.scatter_sum`, with chains as in `index_add`, along dim ascending.

    Args:
        x, dim, backend: as in `index_select`.
        index: of as many dimensions as x, int64, at most x's size in each but dim.
        src: of as many dimensions, at least index's size in each, and of x's type.

    Returns:
        x's shape, new.

    Raises:
        ShapeError: src does not fit. DTypeError: src is of another type than x, or index does not hold whole numbers.
        IndexError, RuntimeError: PyTorch's, for an index that there is not.
    """
    _need_tensors("scatter_add", x=x, index=index, src=src)
    _need_index("scatter_add", "index", index)
    _need_type("scatter_add", "src", src, x)
    if src.dim() != index.dim() or any(n > have for n, have in zip(index.shape, src.shape, strict=True)):
        raise ShapeError(
            f"src {list(src.shape)} must have the dimensions of index {list(index.shape)}, and its sizes at least"
        )
    where = _combined(x.shape, index.device, lambda coordinates: torch.gather(coordinates, dim, index))
    added = src[tuple(slice(0, n) for n in index.shape)]
    total = rows_summed(added.reshape(-1), where.reshape(-1), x.numel(), initial=x.reshape(-1), backend=backend)
    return total.reshape(x.shape)


def index_put(x: torch.Tensor, indices: Any, values: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """torch.index_put(accumulate=True) by `detkern.scatter_sum`, with chains as in `index_add`, over the elements of
    x[indices] in row-major order.

    Args:
        x, backend: as in `index_select`.
        indices: a tuple of tensors of whole numbers or masks, None for a dimension that is taken whole.
        values: broadcastable to the shape of x[indices], and of x's type.

    Returns:
        x's shape, new.

    Raises:
        DTypeError: values are of another type than x. IndexError, RuntimeError: PyTorch's, for what does not fit.
    """
    _need_tensors("index_put", x=x, values=values)
    _need_type("index_put", "values", values, x)
    key = tuple(slice(None) if i is None else i for i in indices)
    where, indexed = positions(x.shape, key, x.device)
    rest = x.shape[indexed:]
    values = expanded(values, (*where.shape, *rest))
    rows = prod(x.shape[:indexed])
    total = rows_summed(
        values.reshape(where.numel(), *rest), where.reshape(-1), rows, initial=x.reshape(rows, *rest), backend=backend
    )
    return total.reshape(x.shape)


def _need_tensors(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise DTypeError(f"{name} is not a torch.Tensor but {type(value).__qualname__}; {function} takes tensors")


def _need_index(function: str, name: str, index: Any) -> None:
    if index.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{name} is {index.dtype}; {function} takes torch.int32 and torch.int64")


def _need_type(function: str, name: str, values: Any, x: Any) -> None:
    if values.dtype != x.dtype:
        raise DTypeError(f"{name} is {values.dtype} and x is {x.dtype}; {function} needs one type: cast {name}")


def positions(shape: Any, key: Any, device: Any) -> tuple[Any, int]:
    """Which of the elements of a tensor's leading dimensions tensor[key] has, in row-major order of these dimensions;
    and how many dimensions they are. Those after them are taken whole."""
    indexed = _indexed(key if isinstance(key, tuple) else (key,), len(shape))
    return _combined(shape[:indexed], device, lambda coordinates: coordinates[key]), indexed


def _indexed(key: tuple[Any, ...], rank: int) -> int:
    """How many leading dimensions a key reaches; all where that is not plain to see."""
    reached = 0
    for item in key:
        if item is None:
            continue
        if isinstance(item, list) and not all(isinstance(i, (int, bool)) for i in item):
            return rank  # PyTorch takes some lists for tuples
        if isinstance(item, slice):
            reached += 1
            continue
        if item is ... or isinstance(item, bool):
            return rank
        index = item if isinstance(item, torch.Tensor) else torch.as_tensor(item)
        if index.dtype not in (torch.bool, torch.uint8):
            reached += 1
        elif index.dim() == 0:
            return rank
        else:
            reached += index.dim()
    return min(reached, rank)


def _combined(shape: Any, device: Any, chosen: Callable[[Any], Any]) -> Any:
    """Which elements of a tensor of this shape `chosen` reads, counted in row-major order: it reads the coordinates
    along each dimension, and they are made one number."""
    if not shape:
        return chosen(torch.zeros((), dtype=torch.int64, device=device))
    total = None
    for d, size in enumerate(shape):
        line = torch.arange(size, device=device).reshape(-1, *(1,) * (len(shape) - d - 1))
        coordinate = chosen(line.expand(shape))
        total = coordinate if total is None else total * size + coordinate
    return total
