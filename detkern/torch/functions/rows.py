"""Row operations on tensors, with gradients: `sum`, `mean`, `mean_square`, `softmax`, `log_softmax` over the last dimension or others.

The arithmetic is that of `detkern.rows`, forward and backward. As with products there is a registered op for compilers,
tracers and modes, and an autograd.Function for plain tensors and for torch.func; both have the same backward, which is
made of differentiable operations again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import rows
from ...errors import ArgumentError, DTypeError, ShapeError
from . import ops, route

__all__ = ["OPS", "log_softmax", "mean", "mean_square", "softmax", "sum"]


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
        dim: the dimension that is summed, or several, which are then one row, with one rounding for all of them; None or an
            empty tuple: all, as torch.sum has it. Default: the last.
        keepdim: keep what is summed as dimensions of size 1.
        out_dtype: the result's type, a torch dtype or a name. Default: x's.
        backend: the name of the one backend to use.

    Returns:
        x's shape without dim, or with keepdim with 1 there.

    Raises:
        ShapeError: x has no such dimension. ArgumentError: dim is no whole number, or names a dimension twice.
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


def _reduced(name: str, x: Any, dim: Any, keepdim: bool, out_dtype: Any, backend: str | None) -> Any:
    if not isinstance(x, torch.Tensor) or x.dim() == 0 or (dim == -1 and not keepdim):
        return _run(name, out_dtype, backend, x)
    dims = _dimensions(x, dim)
    last = list(range(x.dim() - len(dims), x.dim()))
    moved = x if dims == last else x.movedim(dims, last)
    result = _run(name, out_dtype, backend, moved if len(dims) == 1 else moved.flatten(last[0]))
    if keepdim:
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


_SETTINGS = "ScalarType? out_dtype=None, str? backend=None) -> Tensor"
_SCHEMAS = {
    "sum": "Tensor x",
    "mean": "Tensor x",
    "mean_square": "Tensor x",
    "softmax": "Tensor x",
    "log_softmax": "Tensor x",
    "mean_backward": "Tensor dy, SymInt width",
    "mean_square_backward": "Tensor dy, Tensor x",
    "softmax_backward": "Tensor dy, Tensor y",
    "log_softmax_backward": "Tensor dy, Tensor y",
}
OPS: tuple[str, ...] = tuple(_SCHEMAS)


def _run(name: str, out_dtype: Any, backend: str | None, *operands: Any) -> Any:
    """The operation in the form that fits the tensors."""
    if not isinstance(operands[0], torch.Tensor):
        raise DTypeError(
            f"x is no torch.Tensor but {type(operands[0]).__name__}; detkern.rows takes the arrays of other frameworks"
        )
    if out_dtype is not None:
        out_dtype = ops.torch_dtype(out_dtype)
    if not torch.compiler.is_compiling():
        second = operands[-1] if isinstance(operands[-1], torch.Tensor) else operands[0]
        if route.direct(operands[0], second):
            if route.recorded(operands[0], second):
                return _Row.apply(name, out_dtype, backend, *operands)
            return getattr(rows, name)(*operands, out_dtype=out_dtype, backend=backend)
        if route.transformed():
            return _Row.apply(name, out_dtype, backend, *operands)
    return getattr(torch.ops.detkern, name).default(*operands, out_dtype, backend)


# The backwards. Each takes (dy, what was saved) and gives the gradients of the tensors among the operands.


def _spread(dy: Any, width: Any, dtype: Any) -> Any:
    return dy.to(dtype).unsqueeze(-1).expand(*dy.shape, width)


def _dot(u: Any, v: Any, backend: str | None) -> Any:
    """The sum of each row's products, [.., 1] in float32: each rounded, then the sum's rule, as in the gradient of softmax."""
    return _run("sum", torch.float32, backend, u.float() * v.float()).unsqueeze(-1)


def _sum_backward(ctx: Any, dy: Any) -> Any:
    return (_spread(dy, ctx.width, ctx.dtypes[0]),)


def _mean_backward(ctx: Any, dy: Any) -> Any:
    return (_run("mean_backward", ctx.dtypes[0], ctx.backend, dy, ctx.width),)


def _mean_square_backward(ctx: Any, dy: Any) -> Any:
    return (_run("mean_square_backward", ctx.dtypes[0], ctx.backend, dy, ctx.saved_tensors[0]),)


def _softmax_backward(ctx: Any, dy: Any) -> Any:
    return (_run("softmax_backward", ctx.dtypes[0], ctx.backend, dy, ctx.saved_tensors[0]),)


def _log_softmax_backward(ctx: Any, dy: Any) -> Any:
    return (_run("log_softmax_backward", ctx.dtypes[0], ctx.backend, dy, ctx.saved_tensors[0]),)


# Those of the backwards. Between elementwise operations nothing is summed but by row sums.


def _mean_backward_backward(ctx: Any, g: Any) -> Any:
    # Of no columns a sum: 0, which the mean of nothing is not.
    return (_run("mean" if g.shape[-1] else "sum", ctx.dtypes[0], ctx.backend, g),)


def _mean_square_backward_backward(ctx: Any, g: Any) -> Any:
    dy, x = ctx.saved_tensors
    g = g.to(x.dtype)
    ddy = (_dot(g, x, ctx.backend) * (2.0 / max(ctx.width, 1))).squeeze(-1).to(dy.dtype)
    return ddy, _run("mean_square_backward", x.dtype, ctx.backend, dy, g)


def _softmax_backward_backward(ctx: Any, g: Any) -> Any:
    # dx = y (dy - <y, dy>): symmetric in dy; for y, g (dy - <y, dy>) - dy <y, g>.
    dy, y = ctx.saved_tensors
    g = g.to(y.dtype)
    by_y = g.float() * (dy.float() - _dot(y, dy, ctx.backend)) - dy.float() * _dot(y, g, ctx.backend)
    return _run("softmax_backward", dy.dtype, ctx.backend, g, y), by_y.to(y.dtype)


def _log_softmax_backward_backward(ctx: Any, g: Any) -> Any:
    # dx = dy - exp(y) sum(dy): for dy, g - <g, exp(y)>; for y, -g exp(y) sum(dy).
    dy, y = ctx.saved_tensors
    p = y.float().exp()
    by_dy = g.float() - _dot(g.float(), p, ctx.backend)
    by_y = -(g.float() * p) * _run("sum", torch.float32, ctx.backend, dy).unsqueeze(-1)
    return by_dy.to(dy.dtype), by_y.to(y.dtype)


# Their derivatives in forward mode: linear in dy, and what the second operand adds.


def _backward_jvp(ctx: Any, operands: Sequence[Any], width: int, tangents: Sequence[Any]) -> Any:
    dy, dtype, backend = operands[0], ctx.out_dtype, ctx.backend
    by_dy, by_second = tangents[0], tangents[1] if len(operands) > 1 else None
    found = None
    if by_dy is not None:
        second = width if ctx.name == "mean_backward" else operands[1]
        found = _run(ctx.name, dtype, backend, by_dy, second)
    if by_second is None:
        return found
    if ctx.name == "mean_square_backward":
        more = _run("mean_square_backward", dtype, backend, dy, by_second)
    else:
        y, t, u = operands[1].float(), by_second.float(), dy.float()
        if ctx.name == "softmax_backward":
            more = (t * (u - _dot(y, u, backend)) - y * _dot(t, u, backend)).to(dtype)
        else:
            more = (-(t * y.exp()) * _run("sum", torch.float32, backend, dy).unsqueeze(-1)).to(dtype)
    return more if found is None else found + more


# What is saved: "in", the operands; "out", the result; "none".
_RULES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "sum": ("none", _sum_backward),
    "mean": ("none", _mean_backward),
    "mean_square": ("in", _mean_square_backward),
    "softmax": ("out", _softmax_backward),
    "log_softmax": ("out", _log_softmax_backward),
    "mean_backward": ("none", _mean_backward_backward),
    "mean_square_backward": ("in", _mean_square_backward_backward),
    "softmax_backward": ("in", _softmax_backward_backward),
    "log_softmax_backward": ("in", _log_softmax_backward_backward),
}


def _save(ctx: Any, name: str, backend: str | None, operands: Sequence[Any], output: Any) -> None:
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    ctx.dtypes, ctx.backend = [x.dtype for x in tensors], backend
    ctx.width = tensors[-1].shape[-1] if tensors[-1].dim() else 1
    kept = {"none": [], "in": tensors, "out": [output]}[_RULES[name][0]]
    ctx.save_for_backward(*kept)


def _no_autocast(dy: Any) -> Any:
    return torch.autocast(dy.device.type, enabled=False)


class _Row(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(name: str, out_dtype: Any, backend: str | None, *operands: Any) -> Any:
        plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in operands]
        return getattr(rows, name)(*plain, out_dtype=out_dtype, backend=backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        name, _, backend, *operands = inputs
        ctx.name, ctx.out_dtype = name, output.dtype
        ctx.operands = len(operands)
        _save(ctx, name, backend, operands, output)
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        ctx.save_for_forward(*tensors, output)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        with _no_autocast(dy):
            gradients = _RULES[ctx.name][1](ctx, dy)
        return None, None, None, *gradients, *(None,) * (ctx.operands - len(gradients))

    @staticmethod
    @route.forward_rule
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *operands, y = route.primals(ctx)
        given = route.tangents(tangents[3 : 3 + len(operands)], ctx.dtypes)
        if ctx.name.endswith("_backward"):
            return _backward_jvp(ctx, operands, y.shape[-1], given)
        (dx,) = given
        if ctx.name in ("sum", "mean"):
            return _run(ctx.name, ctx.out_dtype, ctx.backend, dx)
        if ctx.name == "mean_square":
            (x,) = operands
            share = 2.0 / ctx.width if ctx.width else math.nan
            return (_dot(x, dx, ctx.backend) * share).squeeze(-1).to(ctx.out_dtype)
        if ctx.name == "softmax":  # its Jacobian is symmetric
            return _run("softmax_backward", ctx.out_dtype, ctx.backend, dx.to(y.dtype), y)
        return (dx.float() - _dot(dx.float(), y.float().exp(), ctx.backend)).to(ctx.out_dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, name: str, out_dtype: Any, backend: str | None, *operands: Any) -> Any:
        return _batched(name, info.batch_size, in_dims[3:], operands, out_dtype, backend)


def _batched(
    name: str, size: int, dims: Sequence[Any], operands: Sequence[Any], out_dtype: Any, backend: str | None
) -> tuple[Any, int]:
    """vmap: a batch is more rows."""
    moved = [
        x if not isinstance(x, torch.Tensor) else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(operands, dims, strict=False)
    ]
    if moved[0].dim() == 1 and not name.endswith("_backward"):
        raise ShapeError(f"x has no dimensions inside of vmap; {name} needs [.., N]")
    return _run(name, out_dtype, backend, *moved), 0


# The registered ops.


def _register(name: str) -> None:
    reduces = name in ("sum", "mean", "mean_square")
    count = 1 + (name.endswith("_backward"))

    def kernel(*arguments: Any) -> Any:
        # The dispatcher leaves out arguments that have their default.
        operands, (out_dtype, backend) = arguments[:count], (*arguments[count:], None, None)[:2]
        with torch.no_grad():
            plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in operands]
            return getattr(rows, name)(*plain, out_dtype=out_dtype, backend=backend)

    def fake(*arguments: Any) -> Any:
        operands, (out_dtype, _) = arguments[:count], (*arguments[count:], None, None)[:2]
        last = operands[-1] if isinstance(operands[-1], torch.Tensor) else operands[0]
        if reduces:
            shape = last.shape[:-1]
        elif name == "mean_backward":
            shape = (*last.shape, operands[-1])
        else:
            shape = last.shape
        return last.new_empty(tuple(shape), dtype=out_dtype or last.dtype)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, name, inputs[count + 1], inputs[:count], output)

    def backward(ctx: Any, dy: Any) -> Any:
        with _no_autocast(dy):
            gradients = _RULES[name][1](ctx, dy)
        return *gradients, *(None,) * (count + 2 - len(gradients))

    def vmap(info: Any, in_dims: Sequence[Any], *arguments: Any) -> Any:
        out_dtype, backend = (*arguments[count:], None, None)[:2]
        return _batched(name, info.batch_size, in_dims[:count], arguments[:count], out_dtype, backend)

    library = ops.library
    library.define(
        f"{name}({_SCHEMAS[name]}, {_SETTINGS}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    )
    library.impl(name, ops.guarded(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"detkern::{name}", ops.guarded(fake), lib=library)
    torch.library.register_autograd(f"detkern::{name}", backward, setup_context=setup, lib=library)
    torch.library.register_vmap(f"detkern::{name}", vmap, lib=library)


for _name in OPS:
    _register(_name)
