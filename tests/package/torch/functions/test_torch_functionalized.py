"""torch.func.functionalize of what batch_invariant_mode covers, nested in other transforms, and of Functions that are
not detkern's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from torch.func import functionalize, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import detkern.torch
from detkern.torch import batch_invariant_mode

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: F.linear(x, x, x[0]),
    "softmax": lambda x: x.softmax(-1),
    "addmm_": lambda x: (x * 1).addmm_(x, x).sum(0),
    "index_add_": lambda x: (x * 1).index_add_(0, torch.tensor([1, 1]), x[:2]),
    "silu in place": lambda x: F.silu(x * 2, inplace=True),
    "embedding": lambda x: F.embedding(torch.tensor([1, 1, 3]), x),
    "broadcast": lambda x: x * x[0] - x.mean(-1, keepdim=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}
TRANSFORMS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "alone": lambda f, x: functionalize(f)(x),
    "without views": lambda f, x: functionalize(f, remove="mutations_and_views")(x),
    "in grad": lambda f, x: grad(lambda x: functionalize(f)(x).square().sum())(x),
    "around grad": lambda f, x: functionalize(grad(lambda x: f(x).square().sum()))(x),
    "in vmap": lambda f, x: vmap(functionalize(f))(torch.stack([x, x.sin()])),
    "around vmap": lambda f, x: functionalize(vmap(f))(torch.stack([x, x.sin()])),
    "in jvp": lambda f, x: jvp(functionalize(f), (x,), (x.cos(),))[1],
    "traced": lambda f, x: make_fx(functionalize(f))(x)(x),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functionalize_gives_what_pytorch_gives_wherever_it_stands(name: str) -> None:
    function, x = FUNCTIONS[name], torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for transform in TRANSFORMS.values():
        wanted = transform(function, x)
        with batch_invariant_mode(strict=True):
            got = transform(function, x)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_written_in_place_has_the_bits_of_the_call_itself() -> None:
    x = torch.randn(4, 4)
    with batch_invariant_mode(strict=True):
        for name in ("addmm_", "silu in place", "softmax"):
            assert torch.equal(functionalize(FUNCTIONS[name])(x), FUNCTIONS[name](x))


def test_functions_that_are_not_detkerns_are_left_to_pytorch() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

    # PyTorch's own rule for it raises. Where a later version has one, this says that ours is not needed.
    with pytest.raises((RuntimeError, TypeError)):
        functionalize(Double.apply)(torch.ones(3))
    assert torch.equal(functionalize(detkern.torch.sum)(torch.ones(2, 3)), torch.full((2,), 3.0))
