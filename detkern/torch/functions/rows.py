"""Row operations on tensors, with gradients: `sum`, `mean`, `mean_square`, `softmax`, `log_softmax`, `cumsum` over the
last dimension or others.

The arithmetic is that of `detkern.rows`, forward and backward, by the rules of detkern/operations/rows/gradient.py.
Each operation is an op (registration.py says what that is).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ... import rows
from ...errors import ArgumentError, DTypeError, ShapeError
from ...operations.rows.gradient import RULES, Recorded
from ...operations.rows.problem import RowKind
from . import eager, route
from .casting import torch_dtype
from .registration import Op, call

__all__ = ["OPS", "cumsum", "log_softmax", "mean", "mean_square", "reduced", "softmax", "sum"]


Dim = int | Sequence[int] | None


def sum(
    x: torch.Tensor,
    dim: Dim = -1,
    keepdim: bool = False,
    *,
    out_dtype: torch.dtype | str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The sum of each row, `detkern.rows.sum`.

    Args:
        x: [.., N], float32, float16 or bfloat16; any strides.
        dim: the dimension that is summed, or several, which are then one row, with one rounding for all of them; None
            or an empty tuple: all, as torch.sum has it. Default: the last.
        keepdim: keep what is summed as dimensions of size 1.
        out_dtype: the result's type, a torch dtype or a name. Default: x's.
        backend: the name of the one backend to use.

    Returns:
        x's shape without dim, or with keepdim with 1 there.

    Raises:
        ShapeError: x has no such dimension. ArgumentError: dim is not a whole number, or names a dimension twice.
        All others as `detkern.rows.sum`.
    """
    return _reduced("sum", x, dim, keepdim, out_dtype, backend)


def mean(
    x: torch.Tensor,
    dim: Dim = -1,
    keepdim: bool = False,
    *,
    out_dtype: torch.dtype | str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The mean of each row, `detkern.rows.mean`. Args, returns, raises: as `sum`."""
    return _reduced("mean", x, dim, keepdim, out_dtype, backend)


def mean_square(
    x: torch.Tensor,
    dim: Dim = -1,
    keepdim: bool = False,
    *,
    out_dtype: torch.dtype | str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The mean of each row's squares, `detkern.rows.mean_square`. Args, returns, raises: as `sum`."""
    return _reduced("mean_square", x, dim, keepdim, out_dtype, backend)


def softmax(
    x: torch.Tensor, dim: int = -1, *, out_dtype: torch.dtype | str | None = None, backend: str | None = None
) -> torch.Tensor:
    """The softmax of each row, `detkern.rows.softmax`.

    Args:
        x, out_dtype, backend: as in `sum`.
        dim: the dimension along which the rows lie. Default: the last.

    Returns:
        x's shape, contiguous.

    Raises:
        As `sum`.
    """
    return _along("softmax", x, dim, out_dtype, backend)


def log_softmax(
    x: torch.Tensor, dim: int = -1, *, out_dtype: torch.dtype | str | None = None, backend: str | None = None
) -> torch.Tensor:
    """The log-softmax of each row, `detkern.rows.log_softmax`. Args, returns, raises: as `softmax`."""
    return _along("log_softmax", x, dim, out_dtype, backend)


def cumsum(
    x: torch.Tensor, dim: int = -1, *, out_dtype: torch.dtype | str | None = None, backend: str | None = None
) -> torch.Tensor:
    """The prefix sums of each row, `detkern.rows.cumsum`. Args, returns, raises: as `softmax`."""
    return _along("cumsum", x, dim, out_dtype, backend)


def _reduced(name: str, x: Any, dim: Any, keepdim: bool, out_dtype: Any, backend: str | None) -> Any:
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or (dim == -1 and not keepdim):
        return _run(name, out_dtype, backend, x)
    return reduced(functools.partial(_run, name, out_dtype, backend), x, dim, keepdim)


def reduced(run: Any, x: Any, dim: Any, keepdim: bool) -> Any:
    """run, which makes [..] of [.., N], over the dimensions that dim means, which are one row. x has dimensions."""
    rank = x.dim()
    dims = [rank - 1] if dim == -1 or dim == [rank - 1] else _dimensions(x, dim)
    last = list(range(rank - len(dims), rank))
    moved = x if dims == last else x.movedim(dims, last)
    result = run(moved if len(dims) == 1 else moved.flatten(last[0]))
    if keepdim and dims == last and len(dims) == 1:
        result = result.unsqueeze(-1)
    elif keepdim:
        for d in dims:
            result = result.unsqueeze(d)
    return result


def _along(name: str, x: Any, dim: Any, out_dtype: Any, backend: str | None) -> Any:
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or dim == -1:
        return _run(name, out_dtype, backend, x)
    if dim is None or isinstance(dim, (tuple, list)):
        raise ArgumentError(f"dim={dim!r}: {name} is along one dimension, a whole number")
    (d,) = _dimensions(x, dim)
    if d == x.dim() - 1:
        return _run(name, out_dtype, backend, x)
    return _run(name, out_dtype, backend, x.movedim(d, -1)).movedim(-1, d).contiguous()


def _dimensions(x: Any, dim: Any) -> list[int]:
    """The dimensions that dim means, ascending."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(x.dim()))
    found = []
    for d in dim if isinstance(dim, (tuple, list)) else (dim,):
        if not isinstance(d, int) and not hasattr(d, "__index__"):
            raise ArgumentError(f"dim={dim!r}: {d!r} must be a whole number")
        d = operator.index(d)
        if not -x.dim() <= d < x.dim():
            raise ShapeError(
                f"dim={dim!r}: x has shape {list(x.shape)}, and dimensions from {-x.dim()} to {x.dim() - 1}"
            )
        found.append(d % x.dim())
    if len(set(found)) < len(found):
        raise ArgumentError(f"dim={dim!r} names a dimension of x {list(x.shape)} twice")
    return sorted(found)


def _run(name: str, out_dtype: Any, backend: str | None, *operands: Any) -> Any:
    """The operation in the form that fits the tensors."""
    if not isinstance(operands[0], torch.Tensor):
        raise DTypeError(
            f"x is not a torch.Tensor but {type(operands[0]).__name__}; detkern.rows takes the arrays of other "
            f"frameworks"
        )
    if out_dtype is not None:
        out_dtype = torch_dtype(out_dtype)
    first, last = operands[0], operands[-1]
    return call(
        _BY_NAME[name], (*operands, out_dtype, backend), first, last if isinstance(last, torch.Tensor) else first
    )


class _Torch:
    """The rules' Framework: PyTorch, with a backend."""

    float32 = torch.float32

    def __init__(self, backend: str | None) -> None:
        self.backend = backend

    def call(self, variant: str, out_dtype: Any, *operands: Any) -> Any:
        return _run(variant, out_dtype, self.backend, *operands)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.to(dtype)

    def exp(self, x: Any) -> Any:
        return x.exp()

    def column(self, x: Any) -> Any:
        return x.unsqueeze(-1)

    def spread(self, x: Any, width: Any) -> Any:
        return x.unsqueeze(-1).expand(*x.shape, width)


def _setup(name: str, ctx: Any, inputs: Any, output: Any) -> None:
    *operands, _, backend = inputs
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    ctx.dtypes, ctx.out_dtype, ctx.backend = [x.dtype for x in tensors], output.dtype, backend
    ctx.width = tensors[-1].shape[-1] if tensors[-1].dim() else 1
    kept = {"none": [], "in": tensors, "out": [output]}[RULES[name].saves]
    ctx.save_for_backward(*kept)


def _backward(name: str, ctx: Any, incoming: Any) -> tuple[Any, ...]:
    forward = Recorded(ctx.saved_tensors, ctx.dtypes, ctx.width)
    with torch.autocast(incoming.device.type, enabled=False):
        return RULES[name].backward(_Torch(ctx.backend), forward, incoming)


def _kept(arguments: Any, output: Any) -> list[Any]:
    return [*(x for x in arguments if isinstance(x, torch.Tensor)), output]


def _jvp(name: str, ctx: Any, *tangents: Any) -> Any:
    *operands, y = route.primals(ctx)
    given = route.tangents(tangents[: len(operands)], ctx.dtypes)
    width = y.shape[-1] if name.endswith("_backward") else ctx.width
    return RULES[name].forward(_Torch(ctx.backend), operands, y, ctx.out_dtype, given, width)


def _vmap(name: str, call: Any, size: int, dims: Sequence[Any], *arguments: Any) -> tuple[Any, int]:
    """A batch is more rows."""
    *operands, out_dtype, backend = arguments
    moved = [
        x if not isinstance(x, torch.Tensor) else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(operands, dims, strict=False)
    ]
    if moved[0].dim() == 1 and not name.endswith("_backward"):
        raise ShapeError(f"x has no dimensions inside of vmap; {name} needs [.., N]")
    return call(*moved, out_dtype, backend), 0


def _kernel(name: str, count: int) -> Any:
    function = getattr(rows, name)

    def one(x: Any, out_dtype: Any, backend: str | None) -> Any:
        return function(x, out_dtype=out_dtype, backend=backend)

    def two(x: Any, y: Any, out_dtype: Any, backend: str | None) -> Any:
        return function(x, y, out_dtype=out_dtype, backend=backend)

    return one if count == 1 else two


def _plain(name: str, count: int) -> Any:
    """As `_kernel`; None where an operand is a number."""
    kind = RowKind[name.upper()]
    if kind == RowKind.MEAN_BACKWARD:
        return None

    def one(x: Any, out_dtype: Any, backend: str | None) -> Any:
        return eager.row_operation(name, kind, (x,), out_dtype, backend)

    def two(x: Any, y: Any, out_dtype: Any, backend: str | None) -> Any:
        return eager.row_operation(name, kind, (x, y), out_dtype, backend)

    return one if count == 1 else two


def _fake(name: str, *arguments: Any) -> Any:
    *operands, out_dtype, _ = arguments
    last = operands[-1] if isinstance(operands[-1], torch.Tensor) else operands[0]
    shape = tuple(last.shape)
    if name in ("sum", "mean", "mean_square"):
        shape = shape[:-1]
    elif name == "mean_backward":
        shape = (*shape, operands[-1])
    return last.new_empty(shape, dtype=out_dtype or last.dtype)


def _op(name: str, operands: str) -> Op:
    def of(rule: Any) -> Any:
        return functools.partial(rule, name)

    count = operands.count(",") + 1
    return Op(
        name,
        f"({operands}, ScalarType? out_dtype=None, str? backend=None) -> Tensor",
        _kernel(name, count),
        of(_fake),
        setup=of(_setup),
        backward=of(_backward),
        kept=_kept,
        jvp=of(_jvp),
        vmap=of(_vmap),
        plain=_plain(name, count),
    )


OPS = (
    _op("sum", "Tensor x"),
    _op("mean", "Tensor x"),
    _op("mean_square", "Tensor x"),
    _op("softmax", "Tensor x"),
    _op("log_softmax", "Tensor x"),
    _op("cumsum", "Tensor x"),
    _op("mean_backward", "Tensor dy, SymInt width"),
    _op("mean_square_backward", "Tensor dy, Tensor x"),
    _op("softmax_backward", "Tensor dy, Tensor y"),
    _op("log_softmax_backward", "Tensor dy, Tensor y"),
    _op("cumsum_backward", "Tensor dy"),
)
_BY_NAME = {op.name: op for op in OPS}
