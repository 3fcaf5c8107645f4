"""Row operations: sum, mean, mean of squares, softmax, log-softmax and prefix sums over the last dimension, and their
gradients.

Sums are aligned sums: terms are cut to multiples of 2^(E - 43), E the exponent of the row's largest term, added exactly
and rounded once. exp and log are written-out polynomials; docs/contracts.md says what each bit is. So a row's result
depends on nothing but the row: not on how many others there are, where they lie or what computes them, nor on the order
of its columns or on zeros (in softmax: masked columns, -inf) anywhere among them.

All functions take arrays of the frameworks that `detkern.gemm` takes, float32, float16 or bfloat16, with any strides,
and give an array of the first operand's framework on its device, ordered on the caller's current stream. They record no
gradients.
"""

from __future__ import annotations

import operator
from typing import Any

from .dispatch import registry
from .dispatch.call import Call
from .errors import ArgumentError
from .operations.rows.checks import plan_rows
from .operations.rows.problem import RowKind
from .tensors import dtype_argument

__all__ = [
    "cumsum", "cumsum_backward", "log_softmax", "log_softmax_backward", "mean", "mean_backward", "mean_square",
    "mean_square_backward", "softmax",
    "softmax_backward", "sum", "sum_backward",
]  # fmt: skip


def sum(x: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The sum of each row, exact up to one rounding (docs/contracts.md, "The aligned sum").

    Args:
        x: [.., N], float32, float16 or bfloat16; any strides.
        out: [..], as in `detkern.gemm`.
        out_dtype: as in `detkern.gemm`; default x's type.
        backend: as in `detkern.gemm`; "native" has no row operations.

    Returns:
        `out`, or a new array [..] of x's framework; +0 where N is 0.

    Raises:
        ShapeError, DTypeError, ArgumentError, DeviceError: arguments that do not fit; `out` is untouched.
        ContractUnsupported, BackendUnavailable, BuildError: as `detkern.gemm`.
    """
    return _run(RowKind.SUM, ((x, "x"),), out, out_dtype, backend)


def mean(x: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The mean of each row: the sum of `sum` in binary32, divided once by N. NaN where N is 0; infinite where the sum
    is.

    Args, returns, raises: as `sum`.
    """
    return _run(RowKind.MEAN, ((x, "x"),), out, out_dtype, backend)


def mean_square(x: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The mean of each row's squares, as RMSNorm needs it: the aligned sum of x[j] * x[j], each rounded to binary32,
    divided once by N. NaN where N is 0.

    Args, returns, raises: as `sum`.
    """
    return _run(RowKind.MEAN_SQUARE, ((x, "x"),), out, out_dtype, backend)


def softmax(x: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """exp(x - m) / s of each row: m its largest element, s the aligned sum of the exponentials.

    -inf is a masked column: its result is +0 and it changes no bit of the others. A row of nothing but -inf, and one
    with +inf or NaN, is all NaN.

    Args:
        x: [.., N], float32, float16 or bfloat16; any strides.
        out: [.., N], as in `detkern.gemm`.
        out_dtype: as in `detkern.gemm`; default x's type.
        backend: as in `sum`.

    Returns:
        `out`, or a new row-major array [.., N] of x's framework.

    Raises:
        As `sum`.
    """
    return _run(RowKind.SOFTMAX, ((x, "x"),), out, out_dtype, backend)


def log_softmax(x: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """(x - m) - log(s) of each row, m and s as in `softmax`. A masked column stays -inf.

    Args, returns, raises: as `softmax`.
    """
    return _run(RowKind.LOG_SOFTMAX, ((x, "x"),), out, out_dtype, backend)


def cumsum(x: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The prefix sums of each row: of x[0] to x[j], exact up to one rounding (docs/contracts.md, "Prefix sums").

    What follows a column, and zeros before it, change no bit of it.

    Args, returns, raises: as `softmax`.
    """
    return _run(RowKind.CUMSUM, ((x, "x"),), out, out_dtype, backend)


def cumsum_backward(dy: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The gradient of x in y = cumsum(x): the sums of dy[j] to the row's end, by the rule of `cumsum`.

    Args, returns, raises: as `softmax`, of dy [.., N].
    """
    return _run(RowKind.CUMSUM_BACKWARD, ((dy, "dy"),), out, out_dtype, backend)


def sum_backward(dy: Any, width: int, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The gradient of x in y = sum(x): dy in every column.

    Args:
        dy: [..], the gradient of y, float32, float16 or bfloat16.
        width: N, the columns of x.
        out: [.., N], as in `detkern.gemm`.
        out_dtype: as in `detkern.gemm`; default dy's type.
        backend: as in `sum`.

    Returns:
        `out`, or a new row-major array [.., N] of dy's framework.

    Raises:
        As `sum`.
    """
    return _run(RowKind.SUM_BACKWARD, ((dy, "dy"),), out, out_dtype, backend, _width(width))


def mean_backward(dy: Any, width: int, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The gradient of x in y = mean(x): dy / N, divided in binary32, in every column.

    Args, returns, raises: as `sum_backward`.
    """
    return _run(RowKind.MEAN_BACKWARD, ((dy, "dy"),), out, out_dtype, backend, _width(width))


def mean_square_backward(dy: Any, x: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The gradient of x in y = mean_square(x): d = dy / N; (d + d) * x; each rounded to binary32.

    Args:
        dy: [..], the gradient of y; of any of the three types.
        x: [.., N].
        out: [.., N], as in `detkern.gemm`.
        out_dtype: as in `detkern.gemm`; default x's type.
        backend: as in `sum`.

    Returns:
        `out`, or a new row-major array [.., N] of dy's framework.

    Raises:
        As `sum`.
    """
    return _run(RowKind.MEAN_SQUARE_BACKWARD, ((dy, "dy"), (x, "x")), out, out_dtype, backend)


def softmax_backward(dy: Any, y: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The gradient of x in y = softmax(x): t the aligned sum of y[j] * dy[j], each rounded to binary32; y * (dy - t).

    Args:
        dy: [.., N], the gradient of y.
        y: [.., N], what `softmax` gave, of dy's type.
        out: [.., N], as in `detkern.gemm`.
        out_dtype: as in `detkern.gemm`; default y's type.
        backend: as in `sum`.

    Returns:
        `out`, or a new row-major array [.., N] of dy's framework.

    Raises:
        As `sum`.
    """
    return _run(RowKind.SOFTMAX_BACKWARD, ((dy, "dy"), (y, "y")), out, out_dtype, backend)


def log_softmax_backward(dy: Any, y: Any, *, out: Any = None, out_dtype: Any = None, backend: str | None = None) -> Any:
    """The gradient of x in y = log_softmax(x): t the aligned sum of dy; fma(-exp(y), t, dy).

    Args, returns, raises: as `softmax_backward`, y being what `log_softmax` gave.
    """
    return _run(RowKind.LOG_SOFTMAX_BACKWARD, ((dy, "dy"), (y, "y")), out, out_dtype, backend)


def _width(width: Any) -> int:
    try:
        number = operator.index(width)
    except TypeError:
        number = -1
    if isinstance(width, bool) or not 0 <= number < 1 << 63:
        raise ArgumentError(f"width={width!r} must be the number of columns, a whole number from 0 on")
    return number


def _run(
    kind: RowKind,
    operands: tuple[tuple[Any, str], ...],
    out: Any,
    out_dtype: Any,
    backend: str | None,
    width: int | None = None,
) -> Any:
    if backend is not None and type(backend) is not str:
        names = ", ".join(registry.backend_names())
        raise ArgumentError(f"backend={backend!r} must be a backend's name or None; the names are {names}")
    call = Call(operands, out)
    a = call.views[0]
    b = call.views[1] if len(operands) > 1 else None
    planned = plan_rows(
        kind,
        a,
        b,
        width,
        call.out,
        None if out_dtype is None else dtype_argument(out_dtype),
        backend,
    )
    return call.complete(planned)
