"""Row operations on tensors: the bits of detkern.rows in every form, and gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits

import detkern.torch
from detkern import rows
from detkern.errors import ArgumentError, DTypeError, ShapeError
from detkern.torch.functions import rows as torch_rows

torch.manual_seed(0)
REFERENCES = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "mean_square": lambda x: x.square().mean(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.cumsum(-1),
}
BACKWARDS = {
    "mean": lambda dy, x, y: rows.mean_backward(dy, x.shape[-1]),
    "mean_square": lambda dy, x, y: rows.mean_square_backward(dy, x),
    "softmax": lambda dy, x, y: rows.softmax_backward(dy, y),
    "log_softmax": lambda dy, x, y: rows.log_softmax_backward(dy, y),
    "sum": lambda dy, x, y: rows.sum_backward(dy, x.shape[-1]),
    "cumsum": lambda dy, x, y: rows.cumsum_backward(dy),
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


@pytest.mark.parametrize("name", [op.name for op in torch_rows.OPS])
def test_registered_ops_keep_pytorchs_rules(name: str) -> None:
    x = torch.randn(3, 9, requires_grad=True)
    if name == "mean_backward":
        operands: tuple[Any, ...] = (torch.randn(3, requires_grad=True), 9)
    elif name == "mean_square_backward":
        operands = (torch.randn(3, requires_grad=True), x)
    elif name.endswith("_backward") and name != "cumsum_backward":
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


PYTORCHS = {
    "sum": torch.sum, "mean": torch.mean, "mean_square": lambda x, *rest, **named: x.square().mean(*rest, **named),
    "softmax": torch.softmax, "log_softmax": torch.log_softmax, "cumsum": torch.cumsum,
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_dimensions_are_chosen_as_pytorchs_functions_choose_them(name: str) -> None:
    function, reference = getattr(detkern.torch, name), PYTORCHS[name]
    x = torch.randn(3, 4, 5, dtype=torch.float32).transpose(0, 1)
    reduces = name in ("sum", "mean", "mean_square")
    chosen: list[Any] = [0, 1, 2, -1, -2, -3]
    chosen += [(0, 2), [1, 0], (-1, 0), (0, 1, 2), (2,), (), None] if reduces else []
    for dim in chosen:
        for named in ({}, {"keepdim": True}) if reduces else ({},):
            wanted, got = reference(x, dim, **named), function(x, dim, **named)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
            assert same_bits(function(x, dim=dim, **named), got)
            assert got.is_contiguous()
            dy, grads = torch.randn(wanted.shape), []
            for f in (function, reference):
                leaf = x.clone().requires_grad_()
                grads.append(torch.autograd.grad(f(leaf, dim, **named), leaf, dy)[0])
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
            batched = functools.partial(function, dim=dim, **named)
            assert same_bits(torch.func.vmap(batched)(x[None])[0], got)
    moved = getattr(rows, name)(x.movedim(0, -1))
    assert same_bits(function(x, 0), moved if reduces else moved.movedim(-1, 0).contiguous())
    assert same_bits(function(x), function(x, -1))  # without dim: the last
    if reduces:
        assert same_bits(function(x, (1, 0)), getattr(rows, name)(x.permute(2, 0, 1).reshape(5, 12)))
        assert same_bits(function(x, 1, True), function(x, 1).unsqueeze(1))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x, 0), backend="eager", fullgraph=True)
    assert same_bits(compiled(x), function(x, 0))
    assert function(x.bfloat16(), 0, out_dtype="float32").dtype is torch.float32


@pytest.mark.parametrize("name", REFERENCES)
def test_a_dimension_that_there_is_not_is_named(name: str) -> None:
    function, x = getattr(detkern.torch, name), torch.randn(2, 3)
    for dim in (2, -3):
        with pytest.raises(ShapeError, match=rf"dim={dim}: x has shape \[2, 3\].* from -2 to 1"):
            function(x, dim)
    with pytest.raises(ArgumentError, match=r"dim='rows'"):
        function(x, "rows")
    with pytest.raises(ArgumentError, match=r"dim=\(0, -2\)"):
        function(x, (0, -2))
    if name in ("softmax", "log_softmax"):
        with pytest.raises(ArgumentError, match="one dimension"):
            function(x, None)


def test_what_is_no_tensor_is_named() -> None:
    for name in REFERENCES:
        with pytest.raises(DTypeError, match=r"x is not a torch\.Tensor but ndarray"):
            getattr(detkern.torch, name)(torch.ones(2, 3).numpy())


def test_forward_mode_of_a_registered_op_is_refused() -> None:
    with pytest.raises(ArgumentError, match="forward-mode"):
        torch.func.jvp(torch.ops.detkern.softmax.default, (torch.randn(2, 3),), (torch.ones(2, 3),))


def _awkward() -> dict[str, Any]:
    base = torch.randn(6, 5, 40)
    with torch.inference_mode():
        inferred = base.clone()
    return {
        "vector": base[0, 0],
        "strided": base[:, :, ::3],
        "turned": base.transpose(0, 2),
        "broadcast": base[:, :1].expand(6, 7, 40),
        "negative bit": torch._neg_view(base),
        "no rows": base[:0],
        "no columns": base[:, :, :0],
        "parameter": torch.nn.Parameter(base),
        "inference": inferred,
    }


@pytest.mark.parametrize("kind", _awkward())
@pytest.mark.parametrize("name", REFERENCES)
def test_plain_tensors_go_straight_to_the_same_bits(name: str, kind: str) -> None:
    x = _awkward()[kind]
    with torch.no_grad():
        for settings in ({}, {"out_dtype": torch.bfloat16}, {"out_dtype": "float32"}):
            found = getattr(detkern.torch, name)(x, **settings)
            wanted = getattr(rows, name)(x, **settings)
            assert found.is_contiguous()
            assert (type(found), found.shape, found.dtype) == (torch.Tensor, wanted.shape, wanted.dtype)
            assert same_bits(found, wanted)


def test_what_rows_refuse_is_refused_with_the_same_words() -> None:
    cut = torch.randn(4, 8)
    cut.untyped_storage().resize_(8)
    tensors = (cut, torch.ones(2, 3, dtype=torch.int32), torch.ones(()), torch.ones(2, 3).to_sparse())
    for x, settings in (
        *((x, {}) for x in tensors),
        (torch.ones(2, 3), {"backend": 5}),
        (torch.ones(2, 3), {"backend": "no"}),
    ):
        with pytest.raises(detkern.errors.DetkernError) as wanted:
            rows.softmax(x, **settings)
        with pytest.raises(type(wanted.value)) as found:
            detkern.torch.softmax(x, **settings)
        assert str(found.value) == str(wanted.value)
