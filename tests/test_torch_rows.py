"""Row operations on tensors: the bits of detkern.rows in every form, and gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits

import detkern.torch
from detkern import rows
from detkern.errors import ArgumentError, DTypeError
from detkern.torch import rows as torch_rows

torch.manual_seed(0)
REFERENCES = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "mean_square": lambda x: x.square().mean(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
}
BACKWARDS = {
    "mean": lambda dy, x, y: rows.mean_backward(dy, x.shape[-1]),
    "mean_square": lambda dy, x, y: rows.mean_square_backward(dy, x),
    "softmax": lambda dy, x, y: rows.softmax_backward(dy, y),
    "log_softmax": lambda dy, x, y: rows.log_softmax_backward(dy, y),
    "sum": lambda dy, x, y: rows.sum_backward(dy, x.shape[-1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", REFERENCES)
def test_every_form_has_the_bits_of_detkern_rows(name: str, dtype: Any) -> None:
    x = torch.randn(3, 4, 37).to(dtype)
    function, op = getattr(detkern.torch, name), getattr(torch.ops.detkern, name).default
    y = getattr(rows, name)(x)
    assert same_bits(function(x), y)
    assert same_bits(op(x), y)
    assert same_bits(torch.func.vmap(function)(x), y)
    assert same_bits(function(x, out_dtype="float32"), getattr(rows, name)(x, out_dtype="float32"))
    dy = torch.randn(y.shape).to(dtype)
    wanted = BACKWARDS[name](dy, x, y)
    for form in (function, op):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(form(leaf), leaf, dy)
        assert same_bits(dx.contiguous(), wanted)
    assert same_bits(torch.func.vjp(function, x)[1](dy)[0].contiguous(), wanted)


@pytest.mark.parametrize("name", REFERENCES)
def test_derivatives_of_both_orders_and_forward_mode_agree_with_pytorch(name: str) -> None:
    function, reference = getattr(detkern.torch, name), REFERENCES[name]
    x = torch.randn(3, 9, requires_grad=True)
    found = []
    generator = torch.Generator().manual_seed(1)
    dy, ddx = torch.randn(reference(x).shape, generator=generator), torch.randn(3, 9, generator=generator)
    for f in (function, reference):
        leaf = dy.clone().requires_grad_()
        (dx,) = torch.autograd.grad(f(x), x, leaf, create_graph=True)
        more = torch.autograd.grad(dx, (leaf, x), ddx, allow_unused=True)
        found.append((dx, *more, torch.func.jvp(f, (x.detach(),), (ddx,))[1]))
    for got, wanted in zip(*found, strict=True):
        assert (got is None) == (wanted is None) or not bool(wanted.any())
        if got is not None and wanted is not None:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", torch_rows.OPS)
def test_registered_ops_keep_pytorchs_rules(name: str) -> None:
    x = torch.randn(3, 9, requires_grad=True)
    if name == "mean_backward":
        operands: tuple[Any, ...] = (torch.randn(3, requires_grad=True), 9)
    elif name == "mean_square_backward":
        operands = (torch.randn(3, requires_grad=True), x)
    elif name.endswith("_backward"):
        operands = (torch.randn(3, 9, requires_grad=True), x)
    else:
        operands = (x,)
    torch.library.opcheck(getattr(torch.ops.detkern, name).default, operands)


@pytest.mark.parametrize("name", REFERENCES)
def test_hessians_and_forward_mode_of_the_gradients_agree_with_pytorch(name: str) -> None:
    function, reference = getattr(detkern.torch, name), REFERENCES[name]
    x = torch.randn(7)
    hessian = [torch.func.hessian(lambda z, f=f: (f(z) * z.sin()).sum())(x) for f in (function, reference)]
    torch.testing.assert_close(*hessian)
    stack = torch.randn(2, 3, 7)
    tangents = torch.randn(reference(stack).shape), torch.randn(stack.shape)
    for given in ((0,), (1,), (0, 1)):  # by dy alone, by x alone, by both
        found = []
        for f in (function, reference):
            zero = [torch.zeros_like(t) if i not in given else t for i, t in enumerate(tangents)]
            dy = torch.ones(tangents[0].shape)
            found.append(torch.func.jvp(lambda dy, x, f=f: torch.func.vjp(f, x)[1](dy)[0], (dy, stack), tuple(zero))[1])
        torch.testing.assert_close(*found)


def test_what_is_no_tensor_is_named() -> None:
    for name in REFERENCES:
        with pytest.raises(DTypeError, match=r"x is no torch\.Tensor but ndarray"):
            getattr(detkern.torch, name)(torch.ones(2, 3).numpy())


def test_forward_mode_of_a_registered_op_is_refused() -> None:
    with pytest.raises(ArgumentError, match="forward-mode"):
        torch.func.jvp(torch.ops.detkern.softmax.default, (torch.randn(2, 3),), (torch.ones(2, 3),))
