"""How torch.func.vmap goes through the ops. A row's bits do not depend on its neighbours, so a batch that is folded
into the rows, or into the batch of a product, has the bits of a loop over it.

`call` is the op itself; each rule gives a result and the place of its batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import ArgumentError

__all__ = ["each", "linear", "matmul", "refuse_main_grads"]


def _front(tensor: Any, dim: int | None) -> Any:
    return tensor if dim is None else tensor.movedim(dim, 0)


def each(call: Callable[..., Any], size: int, dims: Sequence[int | None], *tensors: Any) -> tuple[Any, int]:
    """A loop over the batch. An empty one goes once over zeros, whose result has the shape of the others."""
    if not size:
        empty = (t if dim is None else t.sum(dim) for t, dim in zip(tensors, dims, strict=True))
        return call(*empty).unsqueeze(0)[:0], 0
    results = [
        call(*(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, dims, strict=True)))
        for i in range(size)
    ]
    return torch.stack(results), 0


def linear(
    call: Callable[..., Any], size: int, dims: Sequence[int | None], x: Any, weight: Any, bias: Any
) -> tuple[Any, int]:
    """x folds into rows. A batch of weights or biases is a loop: no one product has several."""
    if dims[1] is None and dims[2] is None:
        return call(_front(x, dims[0]), weight, bias), 0
    return each(call, size, dims, x, weight, bias)


def matmul(call: Callable[..., Any], dims: Sequence[int | None], a: Any, b: Any) -> tuple[Any, int]:
    """One product of a stack. Vectors become matrices, and an operand of fewer dimensions gets those that it lacks."""
    a_batched, b_batched = dims[0] is not None, dims[1] is not None
    a, b = _front(a, dims[0]), _front(b, dims[1])
    a_vector, b_vector = a.dim() - a_batched == 1, b.dim() - b_batched == 1
    a, b = a.unsqueeze(-2) if a_vector else a, b.unsqueeze(-1) if b_vector else b
    rank = max(a.dim() - a_batched, b.dim() - b_batched)
    if a_batched:
        a = a.reshape(a.shape[0], *(1,) * (rank + 1 - a.dim()), *a.shape[1:])
    if b_batched:
        b = b.reshape(b.shape[0], *(1,) * (rank + 1 - b.dim()), *b.shape[1:])
    result = call(a, b)
    if b_vector:
        result = result.squeeze(-1)
    return result.squeeze(-1 if b_vector else -2) if a_vector else result, 0


def refuse_main_grads(*main_grads: Any) -> None:
    """ArgumentError where a call inside of vmap would add to main_grad."""
    if any(main_grad is not None for main_grad in main_grads):
        raise ArgumentError("accumulate=True cannot be used inside torch.func.vmap: main_grad has no batch dimension")
