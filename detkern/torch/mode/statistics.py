"""logsumexp, var, std, norms and prefix sums as PyTorch names them, under batch_invariant_mode; handlers as in
products.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..functions import reductions, rows
from ..functions.functionalized import overwritten
from .products import finish
from .reductions import chosen, typed

__all__ = ["HANDLERS"]


def _over(mode: Any, name: str, input: Any, dim: Any, dtype: Any, out: Any) -> tuple[Any, Any, Any] | None:
    """The operand with a dimension at least, the dimensions of a row, and the result's type; None for what PyTorch is
    to answer."""
    if not isinstance(input, torch.Tensor) or not input.is_floating_point():
        return None
    types = typed(mode, name, input, dtype, out)
    dims = chosen(input, dim)
    if types is None or dims is None:
        return None
    x, result_dtype = types
    return (x, dims, result_dtype) if input.dim() else (x.reshape(1), [0], result_dtype)


def _shaped(result: Any, input: Any) -> Any:
    """Of a number a number, with and without keepdim."""
    return result if input.dim() else result.reshape(())


def logsumexp(mode: Any, input: Any, dim: Any, keepdim: bool = False, *, out: Any = None) -> Any:
    over = _over(mode, "logsumexp", input, dim, None, out)
    if over is None:
        return NotImplemented
    x, dims, dtype = over
    return finish(_shaped(reductions.logsumexp(x, dims, keepdim, out_dtype=dtype), input), out)


def _spread(name: str, with_mean: bool) -> Callable[..., Any]:
    """var, std, var_mean, std_mean: (unbiased), (dim, unbiased, keepdim) or (dim, correction=, keepdim=)."""
    run = reductions.std if name == "std" else reductions.var

    def handler(
        mode: Any,
        input: Any,
        *given: Any,
        dim: Any = None,
        unbiased: Any = None,
        correction: Any = None,
        keepdim: bool = False,
        out: Any = None,
    ) -> Any:
        if given and isinstance(given[0], bool):
            unbiased, given = given[0], given[1:]
        elif given:
            dim, *rest = given
            unbiased = rest[0] if rest else unbiased
            keepdim = rest[1] if len(rest) > 1 else keepdim
            given = tuple(rest[2:])
        over = _over(mode, name, input, dim, None, out)
        if given or over is None or isinstance(correction, torch.Tensor):
            return NotImplemented
        x, dims, dtype = over
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        result = run(x, dims, correction=correction, keepdim=keepdim, out_dtype=dtype)
        if not with_mean:
            return finish(_shaped(result, input), out)
        return _shaped(result, input), _shaped(rows.mean(x, dims, keepdim, out_dtype=dtype), input)

    return handler


def vector_norm(
    mode: Any, input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> Any:
    over = _over(mode, "vector_norm", input, dim, dtype, out)
    if over is None or isinstance(ord, torch.Tensor):
        return NotImplemented
    x, dims, result_dtype = over
    if ord not in reductions.NORMS:
        mode.uncovered("vector_norm", f"ord={ord}", input)
        return NotImplemented
    if ord in (float("inf"), float("-inf")) and any(x.shape[d] == 0 for d in dims):
        return NotImplemented
    return finish(_shaped(reductions.vector_norm(x, ord, dims, keepdim, out_dtype=result_dtype), input), out)


def norm(
    mode: Any, input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    """torch.norm, Tensor.norm and aten::norm."""
    if p is not None and isinstance(p, str) and p != "fro":
        return NotImplemented
    return vector_norm(mode, input, 2 if p in (None, "fro") else p, dim, keepdim, dtype=dtype, out=out)


def linalg_norm(
    mode: Any, A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, out: Any = None, dtype: Any = None
) -> Any:
    """Of a vector, and of a matrix where its norm is that of its elements."""
    if not isinstance(A, torch.Tensor):
        return NotImplemented
    count = (A.dim() if dim is None else 1 if isinstance(dim, int) else len(dim)) if ord is not None else 1
    if count == 2:
        return matrix_norm(mode, A, ord, (-2, -1) if dim is None else dim, keepdim, dtype=dtype, out=out)
    if count != 1 or isinstance(ord, str):
        return NotImplemented
    return vector_norm(mode, A, 2 if ord is None else ord, dim, keepdim, dtype=dtype, out=out)


def matrix_norm(
    mode: Any,
    A: Any,
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    *,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    if ord != "fro" or not isinstance(A, torch.Tensor) or A.dim() < 2 or not isinstance(dim, (tuple, list)):
        return NotImplemented
    return vector_norm(mode, A, 2, dim, keepdim, dtype=dtype, out=out) if len(dim) == 2 else NotImplemented


def foreach_norm(mode: Any, tensors: Any, ord: Any = 2, dtype: Any = None) -> Any:
    found = [vector_norm(mode, x, ord, dtype=dtype) for x in tensors]
    return NotImplemented if any(x is NotImplemented for x in found) else tuple(found)


def cumsum(mode: Any, input: Any, dim: Any, *, dtype: Any = None, out: Any = None) -> Any:
    if not isinstance(input, torch.Tensor) or not isinstance(dim, int):
        return NotImplemented
    types = typed(mode, "cumsum", input, dtype, out)
    if types is None or chosen(input, dim) is None:
        return NotImplemented
    x, result_dtype = types
    if input.dim() == 0:
        return finish(rows.cumsum(x.reshape(1), out_dtype=result_dtype).reshape(()), out)
    return finish(rows.cumsum(x, dim, out_dtype=result_dtype), out)


def _cumsum_in_place(mode: Any, self: Any, dim: Any, *, dtype: Any = None) -> Any:
    result = cumsum(mode, self, dim, dtype=dtype)
    return NotImplemented if result is NotImplemented or result.dtype != self.dtype else overwritten(self, result)


HANDLERS: dict[str, Callable[..., Any]] = {
    "logsumexp": logsumexp, "special_logsumexp": logsumexp, "var": _spread("var", False), "std": _spread("std", False),
    "var_mean": _spread("var", True), "std_mean": _spread("std", True), "norm": norm, "linalg_norm": linalg_norm,
    "linalg_vector_norm": vector_norm, "linalg_matrix_norm": matrix_norm, "_foreach_norm": foreach_norm,
    "cumsum": cumsum, "cumsum_": _cumsum_in_place,
}  # fmt: skip
