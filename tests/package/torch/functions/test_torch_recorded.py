"""Ops made of records alone, on records that are made up of row operations which have ops of their
own to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import detkern.torch
from detkern.errors import DTypeError
from detkern.operations.operation import Derivative, Operation, PublicCall
from detkern.operations.rows.operation import ROWS
from detkern.tensors.types import OUTPUTS
from detkern.torch.functions import recorded
from detkern.torch.functions.registration import register

CALLS = {
    "recorded_softmax": PublicCall("detkern.rows", "softmax", ("x",)),
    "recorded_softmax_backward": PublicCall("detkern.rows", "softmax_backward", ("dy", "y")),
    "recorded_mean_square": PublicCall("detkern.rows", "mean_square", ("x",)),
    "recorded_mean_square_backward": PublicCall("detkern.rows", "mean_square_backward", ("dy", "x")),
}


def _shape_of(variant: str, shapes: Sequence[Sequence[Any]]) -> Sequence[Any]:
    return shapes[0][:-1] if variant == "recorded_mean_square" else shapes[-1]


RECORD: Operation[Any] = Operation(
    name="recorded", problem=ROWS.problem, variants=dict.fromkeys(CALLS, OUTPUTS), variant_of=ROWS.variant_of,
    bind=ROWS.bind,
    misfit=ROWS.misfit, replay=ROWS.replay, piece="", cases=ROWS.cases, samples=ROWS.samples,
    independent=lambda variant: (0,) * len(CALLS[variant].operands), call=CALLS.__getitem__,
    gradients={
        "recorded_softmax": (Derivative("x", "recorded_softmax_backward", ("incoming", "out")),),
        "recorded_softmax_backward": (),
        "recorded_mean_square": (Derivative("x", "recorded_mean_square_backward", ("incoming", "x")),),
        "recorded_mean_square_backward": (),
    },
    shape_of=_shape_of,
)  # fmt: skip
OPS = [recorded.op_of(RECORD, variant) for variant in RECORD.gradients]
for _op in OPS:
    register(_op)
FUNCTIONS = {op.name: recorded.function_of(RECORD, op) for op in OPS}
PAIRS = [("recorded_softmax", detkern.torch.softmax), ("recorded_mean_square", detkern.torch.mean_square)]
X = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "known"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(name: str, known: Any, dtype: torch.dtype) -> None:
    results = []
    for function in (FUNCTIONS[name], known):
        x = X.to(dtype).clone().requires_grad_()
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 0.5))
        with torch.no_grad():
            assert torch.equal(function(x), y)
        assert function(x.detach(), out_dtype="float32").dtype == torch.float32
        results.append((y, dx))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype == dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize(("name", "known"), PAIRS)
def test_under_a_compiler_and_a_transform(name: str, known: Any) -> None:
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    compiled(x).sum().backward()
    known(other).sum().backward()
    assert torch.equal(x.grad, other.grad)
    stack = torch.stack([X, 2 * X, -X])
    assert torch.equal(torch.vmap(FUNCTIONS[name])(stack), torch.stack([known(x) for x in stack]))
    torch.library.opcheck(getattr(torch.ops.detkern, name).default, (X,), test_utils=("test_schema", "test_faketensor"))


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(DTypeError, match=r"x is not a torch\.Tensor but list"):
        FUNCTIONS["recorded_softmax"]([1.0])
    with pytest.raises(AttributeError, match="no attribute 'row_median'"):
        detkern.torch.row_median  # noqa: B018
