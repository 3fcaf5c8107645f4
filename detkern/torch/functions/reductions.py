"""logsumexp, var, std and norms of tensors, with gradients: row operations, and between them arithmetic that rounds
once (docs/contracts.md, "Reductions made of row operations"). Each is an op (registration.py says what that is).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import ArgumentError, DTypeError, ShapeError
from . import route, rows
from .casting import torch_dtype
from .registration import Op, call

__all__ = ["NORMS", "OPS", "logsumexp", "std", "var", "vector_norm"]

Dim = int | Sequence[int] | None
NORMS = (0, 1, 2, math.inf, -math.inf)


def logsumexp(
    x: torch.Tensor,
    dim: Dim = -1,
    keepdim: bool = False,
    *,
    out_dtype: torch.dtype | str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """m + log(sum(exp(x - m))) of each row, m its largest element; m where it is infinite, and -inf of no columns.

    Args, returns, raises: as `detkern.torch.sum`.
    """
    return _reduced(LOGSUMEXP, x, dim, keepdim, out_dtype, backend)


def var(
    x: torch.Tensor,
    dim: Dim = -1,
    *,
    correction: float = 1,
    keepdim: bool = False,
    out_dtype: torch.dtype | str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The variance of each row: the sum of the squared distances from the mean, divided by N - correction, or by 0
    where that is negative.

    Args, returns, raises: as `detkern.torch.sum`.
    """
    return _reduced(VAR, x, dim, keepdim, out_dtype, backend, float(correction))


def std(
    x: torch.Tensor,
    dim: Dim = -1,
    *,
    correction: float = 1,
    keepdim: bool = False,
    out_dtype: torch.dtype | str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The square root of `var`. Args, returns, raises: as `var`."""
    return _reduced(STD, x, dim, keepdim, out_dtype, backend, float(correction))


def vector_norm(
    x: torch.Tensor,
    ord: float = 2,
    dim: Dim = -1,
    keepdim: bool = False,
    *,
    out_dtype: torch.dtype | str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The norm of each row: the square root of the sum of squares (ord 2), the sum of magnitudes (1), the number of
    elements that are not zero (0), the largest (inf) or smallest (-inf) magnitude.

    Args:
        ord: 0, 1, 2, inf or -inf.
        x, dim, keepdim, out_dtype, backend: as in `detkern.torch.sum`.

    Raises:
        ArgumentError: another ord. IndexError: of no columns there is no largest magnitude. All others as
        `detkern.torch.sum`.
    """
    if ord not in NORMS:
        raise ArgumentError(
            f"ord={ord!r}: there are norms of 0, 1, 2, inf and -inf; others need powers, which no contract has"
        )
    if ord == 2:
        return _reduced(NORM, x, dim, keepdim, out_dtype, backend)
    dtype = _checked(x, "vector_norm").dtype if out_dtype is None else torch_dtype(out_dtype)
    if ord == 1:
        return rows.sum(x.abs(), dim, keepdim, out_dtype=dtype, backend=backend)
    if ord == 0:
        # The sign is 0 times itself in value; it carries the gradient, which is 0.
        return rows.sum((x != 0).to(x.dtype) + x.sign() * 0, dim, keepdim, out_dtype=dtype, backend=backend)
    largest = torch.amax if ord > 0 else torch.amin
    return rows.reduced(lambda lines: largest(lines.abs(), -1).to(dtype), x, dim, keepdim)


def _checked(x: Any, name: str) -> Any:
    if not isinstance(x, torch.Tensor):
        raise DTypeError(f"x is not a torch.Tensor but {type(x).__name__}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        said = str(x.dtype).removeprefix("torch.")
        raise DTypeError(f"x is {said}; {name} takes float32, float16 and bfloat16: cast it, as in x.to(torch.float32)")
    if x.dim() == 0:
        raise ShapeError(f"x has no dimensions; {name} needs [.., N]")
    return x


def _reduced(
    op: Op, x: Any, dim: Dim, keepdim: bool, out_dtype: Any, backend: str | None, *settings: float
) -> torch.Tensor:
    wanted = None if out_dtype is None else torch_dtype(out_dtype)

    def run(lines: Any) -> Any:
        return call(op, (lines, *settings, wanted, backend), lines, lines)

    return rows.reduced(run, _checked(x, op.name), dim, keepdim)


# ---- the arithmetic, on [.., N], in float32 --------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row operation's operand and settings. correction is that of a variance, else 0."""

    x: Any
    correction: float
    backend: str | None

    def sum(self, terms: Any) -> Any:
        return rows.sum(terms, out_dtype=torch.float32, backend=self.backend)

    def centred(self) -> Any:
        """Each element less its row's mean."""
        return self.x.float() - rows.mean(self.x, -1, True, out_dtype=torch.float32, backend=self.backend)

    @property
    def divisor(self) -> float:
        return max(float(self.x.shape[-1]) - self.correction, 0.0)

    def again(self, op: Op) -> Any:
        """The operation's own result."""
        settings = (self.correction,) if op is STD else ()
        return call(op, (self.x, *settings, torch.float32, self.backend), self.x, self.x)


def _divided(x: Any, divisor: float) -> Any:
    """x / divisor, rounded once: by a number that is not a tensor PyTorch divides as by its reciprocal on a GPU."""
    return x / torch.full((), divisor, dtype=torch.float32, device=x.device)


def _root(x: Any) -> Any:
    """The square root, rounded once: PyTorch's of binary32 had other bits on an H200 than on the CPU. A root of a
    binary32 number lies further from the middle of two others than binary64 errs."""
    return x.double().sqrt().float()


def _column(x: Any) -> Any:
    return x.unsqueeze(-1)


def _logsumexp(row: _Row) -> Any:
    if row.x.shape[-1] == 0:
        return row.x.new_full(row.x.shape[:-1], -math.inf, dtype=torch.float32)
    largest = row.x.amax(-1).float()
    # Where x is the largest, log_softmax is 0 - log(s).
    log = -rows.log_softmax(row.x, out_dtype=torch.float32, backend=row.backend).amax(-1)
    return torch.where(largest.isinf(), largest, largest + log)


def _shares(row: _Row) -> Any:
    return rows.softmax(row.x, out_dtype=torch.float32, backend=row.backend)


def _var(row: _Row) -> Any:
    distance = row.centred()
    return _divided(row.sum(distance * distance), row.divisor)


def _var_backward(row: _Row, dy: Any) -> Any:
    distance = row.centred()
    each = _divided(dy, row.divisor)
    return _column(each + each) * distance


def _var_forward(row: _Row, dx: Any) -> Any:
    each = _divided(row.sum(row.centred() * dx), row.divisor)
    return each + each


def _without_zeros(y: Any) -> tuple[Any, Any]:
    """Where a root is zero, and the root with ones there: its derivative is taken as zero."""
    zero = y == 0
    return zero, torch.where(zero, 1.0, y)


def _std_backward(row: _Row, dy: Any) -> Any:
    zero, y = _without_zeros(row.again(STD))
    return _var_backward(row, torch.where(zero, 0.0, dy / (y + y)))


def _std_forward(row: _Row, dx: Any) -> Any:
    zero, y = _without_zeros(row.again(STD))
    return torch.where(zero, 0.0, _var_forward(row, dx) / (y + y))


def _norm(row: _Row) -> Any:
    x = row.x.float()
    return _root(row.sum(x * x))


def _norm_backward(row: _Row, dy: Any) -> Any:
    zero, y = _without_zeros(row.again(NORM))
    return _column(torch.where(zero, 0.0, dy / y)) * row.x.float()


def _norm_forward(row: _Row, dx: Any) -> Any:
    zero, y = _without_zeros(row.again(NORM))
    return torch.where(zero, 0.0, row.sum(row.x.float() * dx) / y)


# ---- as ops ----------------------------------------------------------------------------------------------------------

_Of = Callable[..., Any]


def _op(name: str, corrected: bool, value: _Of, backward: _Of, forward: _Of) -> Op:
    """value: of a _Row. backward: of it and the incoming gradient, that of x. forward: of it and x's tangent, the
    result's."""

    def row_of(x: Any, *settings: Any) -> _Row:
        return _Row(x, settings[0] if corrected else 0.0, settings[-1])

    def kernel(x: Any, *settings: Any) -> Any:
        return (value(row_of(x, *settings)) + 0.0).to(settings[-2] or x.dtype)

    def fake(x: Any, *settings: Any) -> Any:
        return x.new_empty(x.shape[:-1], dtype=settings[-2] or x.dtype)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.settings, ctx.out_dtype = inputs[1:], output.dtype

    def gradient(ctx: Any, incoming: Any) -> tuple[Any]:
        (x,) = ctx.saved_tensors
        with torch.autocast(incoming.device.type, enabled=False):
            return (backward(row_of(x, *ctx.settings), incoming.float()).to(x.dtype),)

    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        (x,) = route.primals(ctx)
        return forward(row_of(x, *ctx.settings), tangent.float()).to(ctx.out_dtype)

    def vmap(again: Any, size: int, dims: Sequence[Any], x: Any, *settings: Any) -> tuple[Any, int]:
        return again(x.movedim(dims[0], 0), *settings), 0  # a batch is more rows

    extra = "float correction, " if corrected else ""
    return Op(
        name,
        f"(Tensor x, {extra}ScalarType? out_dtype=None, str? backend=None) -> Tensor",
        kernel,
        fake,
        setup=setup,
        backward=gradient,
        kept=lambda arguments, output: (arguments[0],),
        jvp=jvp,
        vmap=vmap,
    )


LOGSUMEXP = _op(
    "logsumexp",
    False,
    _logsumexp,
    lambda row, dy: _column(dy) * _shares(row),
    lambda row, dx: row.sum(_shares(row) * dx),
)
VAR = _op("var", True, _var, _var_backward, _var_forward)
STD = _op("std", True, lambda row: _root(_var(row)), _std_backward, _std_forward)
NORM = _op("vector_norm", False, _norm, _norm_backward, _norm_forward)
OPS = (LOGSUMEXP, VAR, STD, NORM)
