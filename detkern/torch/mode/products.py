"""Matrix products as PyTorch names them, under batch_invariant_mode: each handler is called as its function, and gives
a result, or NotImplemented where PyTorch is to answer (with its own error, or because the mode does not cover the
tensors).

`mode` is the batch_invariant_mode at work. Shapes that do not fit are left to PyTorch, whose messages users know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..functions import functional, route, rows
from ..functions.affine import affine
from ..functions.casting import autocast
from ..functions.functionalized import overwritten

__all__ = ["HANDLERS", "finish", "product"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def finish(result: Any, out: Any) -> Any:
    """The result, or `out` holding it, under the rules of PyTorch's out= arguments."""
    if out is None:
        return result
    if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
        raise RuntimeError(
            "functions with out=... arguments don't support automatic differentiation, but one of the arguments "
            "requires grad."
        )
    if out.dtype != result.dtype:
        raise RuntimeError(f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead")
    if out.device != result.device:
        raise RuntimeError(f"Expected out tensor to be on {result.device}, but got {out.device}")
    if out.shape != result.shape:
        out.resize_(result.shape)
    route.refuse_cut(out, "out")
    with torch.no_grad():
        out.copy_(result)
    return out


def product(mode: Any, op: str, a: Any, b: Any, out_dtype: Any = None) -> Any:
    """a @ b by the contract that the mode gives the op."""
    return functional.matmul(a, b, out_dtype=out_dtype, contract=mode.contract_for(op, a.dtype))


def _operands(mode: Any, op: str, a: Any, b: Any) -> tuple[Any, Any] | None:
    """The operands as autocast wants them, where the mode covers them."""
    if not mode.covers(op, a, b):
        return None
    a, b = autocast(a, b)
    return (a, b) if a.dtype == b.dtype else None


def _exact(ranks: tuple[int, int], op: str, mode: Any, a: Any, b: Any, out_dtype: Any, out: Any) -> Any:
    """A product of operands that have just these numbers of dimensions, and one batch."""
    pair = _operands(mode, op, a, b)
    if pair is None or (a.dim(), b.dim()) != ranks:
        return NotImplemented
    if a.shape[-1] != b.shape[max(-2, -b.dim())] or a.shape[:-2] != b.shape[:-2]:
        return NotImplemented
    return finish(product(mode, op, *pair, out_dtype), out)


def mm(mode: Any, input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> Any:
    return _exact((2, 2), "mm", mode, input, mat2, out_dtype, out)


def bmm(mode: Any, input: Any, mat2: Any, out_dtype: Any = None, *, out: Any = None) -> Any:
    return _exact((3, 3), "bmm", mode, input, mat2, out_dtype, out)


def mv(mode: Any, input: Any, vec: Any, *, out: Any = None) -> Any:
    return _exact((2, 1), "mv", mode, input, vec, None, out)


def dot(mode: Any, input: Any, tensor: Any = None, other: Any = None, *, out: Any = None) -> Any:
    return _exact((1, 1), "dot", mode, input, other if tensor is None else tensor, None, out)


def matmul(mode: Any, input: Any, other: Any, *, out: Any = None) -> Any:
    """Of the op that PyTorch makes of it for these numbers of dimensions: where it folds a stack into rows or not,
    depending on strides and on whether gradients are recorded, this one does not."""
    if out is None and type(input) in _PLAIN and type(other) in _PLAIN and input.dtype is other.dtype:
        # The products of an attention, with nothing asked twice.
        left, right = input.shape, other.shape
        if len(left) == len(right) > 2 and left[-1] == right[-2] and left[:-2] == right[:-2]:
            return product(mode, "bmm", input, other) if mode.covers("bmm", input, other) else NotImplemented
    ranks = [x.dim() if isinstance(x, torch.Tensor) else 0 for x in (input, other)]
    if 0 in ranks:
        return NotImplemented
    vector = "dot" if ranks[0] == 1 else "mv"
    op = {1: vector, 2: "mm"}.get(ranks[1], "bmm")
    pair = _operands(mode, op, input, other)
    if pair is None or input.shape[-1] != other.shape[max(-2, -ranks[1])]:
        return NotImplemented
    for m, n in zip(reversed(input.shape[:-2]), reversed(other.shape[:-2]), strict=False):
        if m != n and 1 not in (m, n):
            return NotImplemented
    return finish(product(mode, op, *pair), out)


def rmatmul(mode: Any, self: Any, other: Any) -> Any:
    return matmul(mode, other, self)


def linear(mode: Any, input: Any, weight: Any, bias: Any = None, *, out: Any = None) -> Any:
    op = "mm" if bias is None else "addmm"
    if not mode.covers(op, input, weight):
        return NotImplemented
    if weight.dim() == 1 and bias is None:
        return matmul(mode, input, weight, out=out)
    x, w, b = autocast(input, weight, bias)
    if weight.dim() != 2 or input.dim() == 0 or input.shape[-1] != weight.shape[1] or x.dtype != w.dtype:
        return NotImplemented
    contract = mode.contract_for(op, x.dtype)
    if b is None or (b.dim() == 1 and b.shape[0] == weight.shape[0] and b.dtype == x.dtype):
        main_grads = functional.gathered(weight), functional.gathered(bias, "bias")
        return finish(functional.gathering_linear(x, w, b, *main_grads, None, contract, None), out)
    if b.dtype != x.dtype or not _expands(b.shape, (*input.shape[:-1], weight.shape[0])):
        return NotImplemented
    product = functional.linear(x, w, out_dtype=torch.float32, contract=contract)
    return finish(affine(product, b, 1.0, 1.0, x.dtype), out)


def _plus(op: str, mode: Any, input: Any, a: Any, b: Any, beta: Any, alpha: Any, out_dtype: Any, out: Any) -> Any:
    """beta * input + alpha * (a @ b), by fma(beta, input, alpha * acc)."""
    if not mode.covers(op, a, b) or not isinstance(input, torch.Tensor) or input.device != a.device:
        return NotImplemented
    ranks = {"addmm": (2, 2), "baddbmm": (3, 3), "addmv": (2, 1)}[op]
    if (a.dim(), b.dim()) != ranks or a.shape[-1] != b.shape[max(-2, -b.dim())] or a.shape[:-2] != b.shape[:-2]:
        return NotImplemented
    shape = (*a.shape[:-1], *b.shape[-1:]) if b.dim() > 1 else a.shape[:-1]
    if not _expands(input.shape, shape):
        return NotImplemented
    given = input.dtype
    a, b, input = autocast(a, b, input)
    if a.dtype != b.dtype or (input.dtype != a.dtype and input.dtype != out_dtype and given != out_dtype):
        return NotImplemented
    # Of a 0-d tensor the number is read here; PyTorch reads it too.
    alpha, beta = (x.item() if isinstance(x, torch.Tensor) else x for x in (alpha, beta))
    dtype = a.dtype if out_dtype is None else out_dtype
    if beta == 0 and not (torch.is_grad_enabled() and input.requires_grad):
        input = None
        if alpha == 1:
            return finish(product(mode, op, a, b, out_dtype), out)
    elif op == "addmm" and alpha == 1 and beta == 1 and input.dim() == 1 and input.shape[0] == b.shape[1]:
        result = functional.linear(a, b.t(), input, out_dtype=out_dtype, contract=mode.contract_for(op, a.dtype))
        return finish(result, out)
    acc = product(mode, op, a, b, torch.float32)
    return finish(affine(acc, input, float(alpha), float(beta), dtype), out)


def _expands(shape: Any, target: Any) -> bool:
    if len(shape) > len(target):
        return False
    return all(m in (1, n) for m, n in zip(reversed(shape), reversed(target), strict=False))


def _adding(op: str) -> Callable[..., Any]:
    def handler(
        mode: Any, input: Any, a: Any, b: Any, *rest: Any, beta: Any = 1, alpha: Any = 1, out: Any = None, **named: Any
    ) -> Any:
        if not isinstance(input, torch.Tensor):
            # The old signatures: (beta, input, mat1, mat2) and (beta, input, alpha, mat1, mat2).
            if len(rest) == 1:
                return _plus(op, mode, a, b, rest[0], input, 1, None, out)
            if len(rest) == 2:
                return _plus(op, mode, a, *rest, input, b, None, out)
            return NotImplemented
        out_dtype = rest[0] if rest else named.get("out_dtype")
        return _plus(op, mode, input, a, b, beta, alpha, out_dtype, out)

    # The names that torch gives the products' operands.
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}[op]

    def named_handler(mode: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("input", *names):
            if name in kwargs:
                args = (*args, kwargs[name])
                kwargs = {key: value for key, value in kwargs.items() if key != name}
        return handler(mode, *args, **kwargs)

    return named_handler


addmm, baddbmm, addmv = _adding("addmm"), _adding("baddbmm"), _adding("addmv")


def addbmm(mode: Any, input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    """The sum over a stack of products, which is one product whose chain goes through (batch, k)."""
    if not all(isinstance(x, torch.Tensor) and x.dim() == 3 for x in (batch1, batch2)):
        return NotImplemented
    if batch1.shape[0] != batch2.shape[0] or batch1.shape[2] != batch2.shape[1]:
        return NotImplemented
    left = batch1.transpose(0, 1).flatten(1)
    return addmm(mode, input, left, batch2.flatten(0, 1), beta=beta, alpha=alpha, out=out)


def addr(mode: Any, input: Any, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    """Of two vectors a product over one k, which is exact."""
    if not all(isinstance(x, torch.Tensor) and x.dim() == 1 for x in (vec1, vec2)):
        return NotImplemented
    return addmm(mode, input, vec1.unsqueeze(1), vec2.unsqueeze(0), beta=beta, alpha=alpha, out=out)


def _in_place(handler: Callable[..., Any]) -> Callable[..., Any]:
    def changed(mode: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = handler(mode, self, *args, **kwargs)
        return NotImplemented if result is NotImplemented or result.shape != self.shape else overwritten(self, result)

    return changed


def inner(mode: Any, input: Any, other: Any, *, out: Any = None) -> Any:
    if input.dim() == 0 or other.dim() == 0:
        return NotImplemented
    return tensordot(mode, input, other, [-1], [-1], out=out)


def tensordot(mode: Any, a: Any, b: Any, dims: Any = 2, dims_other: Any = None, *, out: Any = None) -> Any:
    """torch.tensordot and torch._VF.tensordot: the contracted dimensions are flattened, in the order in which they are
    given."""
    if not mode.covers("mm", a, b) or a.dtype != b.dtype:
        return NotImplemented
    if dims_other is not None:
        dims_a, dims_b = dims, dims_other
    elif isinstance(dims, int):
        if not 0 <= dims <= min(a.dim(), b.dim()):
            return NotImplemented
        dims_a, dims_b = range(a.dim() - dims, a.dim()), range(dims)
    elif isinstance(dims, (tuple, list)) and len(dims) == 2:
        dims_a, dims_b = ([d] if isinstance(d, int) else d for d in dims)
    else:
        return NotImplemented
    if len(dims_a) != len(dims_b) or not all(
        -x.dim() <= d < x.dim() for x, ds in ((a, dims_a), (b, dims_b)) for d in ds
    ):
        return NotImplemented
    dims_a, dims_b = [d % a.dim() for d in dims_a], [d % b.dim() for d in dims_b]
    for i, j in zip(dims_a, dims_b, strict=True):
        if a.shape[i] == b.shape[j]:
            continue
        if 1 not in (a.shape[i], b.shape[j]) or not mode.covers("sum", a, b):
            return NotImplemented
        # Of one against many PyTorch sums the many first.
        a, b = (a, rows.sum(b, j, True)) if a.shape[i] == 1 else (rows.sum(a, i, True), b)
    free_a = [d for d in range(a.dim()) if d not in dims_a]
    free_b = [d for d in range(b.dim()) if d not in dims_b]
    shape = [*(a.shape[d] for d in free_a), *(b.shape[d] for d in free_b)]
    k = functools.reduce(lambda x, y: x * y, (a.shape[d] for d in dims_a), 1)
    left = a.permute((*free_a, *dims_a)).reshape(_count(a, free_a), k)
    right = b.permute((*dims_b, *free_b)).reshape(k, _count(b, free_b))
    return finish(product(mode, "mm", *autocast(left, right)).reshape(shape), out)


def _count(x: Any, dims: Any) -> Any:
    return functools.reduce(lambda m, n: m * n, (x.shape[d] for d in dims), 1)


def multi_dot(mode: Any, tensors: Any, *, out: Any = None) -> Any:
    """From left to right: the order that PyTorch finds cheapest depends on the number of rows."""
    tensors = list(tensors)
    if len(tensors) < 2 or not all(x.dim() == 2 for x in tensors[1:-1]):
        return NotImplemented
    if not {tensors[0].dim(), tensors[-1].dim()} <= {1, 2}:
        return NotImplemented
    result = tensors[0]
    for other in tensors[1:]:
        result = matmul(mode, result, other)
        if result is NotImplemented:
            return NotImplemented
    return finish(result, out)


def chain_matmul(mode: Any, *matrices: Any, out: Any = None) -> Any:
    matrices = matrices[0] if len(matrices) == 1 and not isinstance(matrices[0], torch.Tensor) else matrices
    if not all(x.dim() == 2 for x in matrices):
        return NotImplemented
    return multi_dot(mode, matrices, out=out)


def vecdot(mode: Any, x: Any, y: Any, *, dim: int = -1, out: Any = None) -> Any:
    if not mode.covers("dot", x, y) or x.dtype != y.dtype or x.dim() == 0 or y.dim() == 0:
        return NotImplemented
    x, y = torch.broadcast_tensors(x, y)
    x, y = x.movedim(dim, -1).unsqueeze(-2), y.movedim(dim, -1).unsqueeze(-1)
    return finish(product(mode, "dot", *autocast(x, y)).squeeze(-1).squeeze(-1), out)


# By PyTorch's name for the function, the method or the aten op.
HANDLERS: dict[str, Callable[..., Any]] = {
    "mm": mm, "bmm": bmm, "mv": mv, "dot": dot, "vdot": dot, "matmul": matmul, "linalg_matmul": matmul,
    "linear": linear,
    "addmm": addmm, "baddbmm": baddbmm, "addmv": addmv, "addbmm": addbmm, "addmm_": _in_place(addmm),
    "baddbmm_": _in_place(baddbmm), "addmv_": _in_place(addmv), "addbmm_": _in_place(addbmm), "addr": addr,
    "addr_": _in_place(addr), "inner": inner,
    "linalg_vecdot": vecdot, "linalg_multi_dot": multi_dot, "chain_matmul": chain_matmul,
}  # fmt: skip
