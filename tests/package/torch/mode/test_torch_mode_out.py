"""out= and in place under batch_invariant_mode: the bits of the call without, PyTorch's errors, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits

from detkern.torch import batch_invariant_mode

aten = torch.ops.aten
torch.manual_seed(0)
X, W, B = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)
INDEX = torch.tensor([1, 0, 1])
CALLS: dict[str, Callable[..., Any]] = {
    "linear": lambda **out: torch._C._nn.linear(X, W, B, **out),
    "F.linear": lambda **out: F.linear(X, W, B, **out),
    "F.linear of one row": lambda **out: F.linear(X, W[0], **out),
    "F.gelu": lambda **out: F.gelu(X, **out),
    "F.gelu tanh": lambda **out: F.gelu(X, approximate="tanh", **out),
    "sigmoid": lambda **out: torch.sigmoid(X, **out),
    "rsqrt": lambda **out: torch.rsqrt(X.square(), **out),
    "addr": lambda **out: torch.addr(X, X[:, 0], X[0], **out),
    "sum": lambda **out: torch.sum(X, 0, **out),
    "mean": lambda **out: torch.mean(X, 1, **out),
    "softmax": lambda **out: torch.softmax(X, 1, **out),
    "log_softmax": lambda **out: torch.log_softmax(X, 1, **out),
    "index_add": lambda **out: torch.index_add(X, 0, INDEX, X[:3], **out),
    "aten.embedding": lambda **out: aten.embedding(X, INDEX) if not out else aten.embedding.out(X, INDEX, **out),
    "aten.index_put": lambda **out: (
        aten.index_put(X, [INDEX], X[:3], True) if not out else aten.index_put.out(X, [INDEX], X[:3], True, **out)
    ),
    "aten.repeat_interleave": lambda **out: (
        aten.repeat_interleave(INDEX) if not out else aten.repeat_interleave.Tensor_out(INDEX, **out)
    ),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", CALLS)
def test_out_holds_the_bits_of_the_call_without(name: str) -> None:
    call, plain = CALLS[name], CALLS[name]()
    with batch_invariant_mode(strict=True):
        wanted = call()
        out = torch.full_like(wanted, 7)
        assert call(out=out) is out
        same = same_bits if wanted.is_floating_point() else torch.equal
        assert same(out, wanted)
        small = torch.empty(0, dtype=wanted.dtype)
        assert same(call(out=small), wanted)
    torch.testing.assert_close(wanted, plain)


@pytest.mark.parametrize("name", ["F.linear", "F.gelu", "sigmoid", "addr"])
def test_out_and_gradients_do_not_go_together(name: str) -> None:
    out = torch.empty(0, requires_grad=True)
    with batch_invariant_mode(strict=True), pytest.raises(RuntimeError, match="automatic differentiation"):
        CALLS[name](out=out)


def test_sums_of_numbers_are_numbers_under_strict() -> None:
    x = torch.tensor(-0.0)
    for dim in (0, -1, (0,), (), [-1], None):
        for name in ("sum", "mean"):
            with batch_invariant_mode(strict=True):
                got = getattr(x, name)(dim=dim)
            assert got.shape == ()
            assert same_bits(got, torch.tensor(0.0))
    for dim in (1, -2, (0, 0), (0, -1)):
        with batch_invariant_mode(strict=True), pytest.raises((IndexError, RuntimeError)):
            x.sum(dim=dim)
    with batch_invariant_mode(strict=True):
        assert F.cosine_similarity(torch.tensor(2.0), torch.tensor(3.0), dim=0) == 1


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "sigmoid_": lambda x: x.sigmoid_(),
    "rsqrt_": lambda x: x.rsqrt_(),
    "addmm_": lambda x: x.addmm_(x.detach().clone()[:, :3], x.detach().clone()[:3], beta=0.5),
    "addr_": lambda x: x.addr_(x.detach().clone()[:, 0], x.detach().clone()[0]),
    "index_add_": lambda x: x.index_add_(0, INDEX, x.detach().clone()[:3]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place_can_be_trained(name: str, dtype: Any) -> None:
    leaf, function = (X.square() + 0.5).to(dtype).requires_grad_(), IN_PLACE[name]
    wanted = function(leaf * 1)
    (wanted_gradient,) = torch.autograd.grad(wanted.float().square().sum(), leaf)
    with batch_invariant_mode(strict=True):
        y = leaf * 1
        got = function(y)
        (gradient,) = torch.autograd.grad(got.float().square().sum(), leaf)
        assert got is y
        assert same_bits(got.detach(), function(leaf.detach().clone()))
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        gradient, wanted_gradient, **({"rtol": 3e-2, "atol": 3e-2} if dtype is not torch.float32 else {})
    )


def test_what_dispatch_modes_break_is_kept_from_them() -> None:
    a, out = torch.eye(4), torch.full((), -1)
    for under in (False, True):
        with batch_invariant_mode(strict=True) if under else torch.no_grad():
            torch.linalg.matrix_rank(a, out=out)
        assert out.item() == 4
        out.fill_(-1)


@pytest.mark.parametrize("vector", [0, 1])
def test_addr_in_forward_mode_and_its_gradients(vector: int) -> None:
    vectors = X[:, 0], X[0]

    def function(v: Any) -> Any:
        return torch.addr(X, *(v if i == vector else u for i, u in enumerate(vectors)), beta=0.5, alpha=2)

    for transform in (torch.func.jacfwd, torch.func.jacrev):
        wanted = transform(function)(vectors[vector])
        with batch_invariant_mode(strict=True):
            torch.testing.assert_close(transform(function)(vectors[vector]), wanted)


def test_a_dimension_of_one_is_contracted_with_many() -> None:
    a, b = torch.randn(1, 1, 3, requires_grad=True), torch.randn(2, 1, 2, requires_grad=True)
    found = []
    for under in (False, True):
        with batch_invariant_mode(strict=True) if under else torch.enable_grad():
            y = torch.tensordot(a, b, ([0, 1], [2, 0]))
            found.append((y, *torch.autograd.grad(y.square().sum(), (a, b))))
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_gradient_of_an_outer_product_does_not_depend_on_the_batch() -> None:
    u, v = torch.randn(700), torch.randn(300)
    dy = torch.randn(700, 300)
    with batch_invariant_mode(strict=True):
        for form in (torch.outer, torch.ger):
            leaf = u.clone().requires_grad_()
            (whole,) = torch.autograd.grad(form(leaf, v), leaf, dy)
            (part,) = torch.autograd.grad(form(leaf[:9], v), leaf, dy[:9])
            assert same_bits(part[:9], whole[:9])
