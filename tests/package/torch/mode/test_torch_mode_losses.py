"""Losses under batch_invariant_mode: the steps of docs/contracts.md, "Losses", in exact arithmetic; what may not change
a bit; PyTorch's values, errors and weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits
from oracles.elementary import product, quotient
from oracles.rational import add, aligned_sum

from detkern.errors import ContractUnsupported
from detkern.torch import batch_invariant_mode
from detkern.torch.functions import losses

# The loss of a distance and its slope, each step rounded once to binary32.
STEPS: dict[str, tuple[Callable[..., Any], Callable[[float], float], Callable[[float], float]]] = {
    "l1": (F.l1_loss, abs, lambda d: math.copysign(float(d != 0), d)),
    "smooth l1": (
        lambda x, t, **k: F.smooth_l1_loss(x, t, beta=0.375, **k),
        lambda d: quotient(product(product(abs(d), 0.5), abs(d)), 0.375) if abs(d) < 0.375 else add(abs(d), -0.1875),
        lambda d: max(-1.0, min(1.0, quotient(d, 0.375))),
    ),
    "huber": (
        lambda x, t, **k: F.huber_loss(x, t, delta=0.75, **k),
        lambda d: product(product(abs(d), 0.5), abs(d)) if abs(d) <= 0.75 else product(add(abs(d), -0.375), 0.75),
        lambda d: max(-0.75, min(0.75, d)),
    ),
    "mse": (F.mse_loss, lambda d: product(d, d), lambda d: add(d, d)),
}


def _operands(*shape: int, dtype: Any = torch.float32) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(shape, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", STEPS)
def test_distances_in_exact_arithmetic(name: str, reduction: str) -> None:
    run, value, slope = STEPS[name]
    x, t = _operands(5, 9)
    x[0, :3] = t[0, :3] + torch.tensor([0, 0.375, -0.75])
    leaf = x.requires_grad_()
    with batch_invariant_mode(strict=True):
        loss = run(leaf, t, reduction=reduction)
        (dx,) = torch.autograd.grad(loss, leaf)
    distances = [add(a, -b) for a, b in zip(x.flatten().tolist(), t.flatten().tolist(), strict=True)]
    total = aligned_sum([value(d) for d in distances])
    assert loss.item() == (quotient(total, 45) if reduction == "mean" else total)
    each = quotient(1.0, 45) if reduction == "mean" else 1.0
    if name == "mse":
        assert dx.flatten().tolist() == [product(add(each, each), d) for d in distances]
    else:
        assert dx.flatten().tolist() == [product(each, slope(d)) for d in distances]


LOSSES: dict[str, Callable[..., Any]] = {
    **{name: run for name, (run, _, _) in STEPS.items()},
    "smooth l1 of beta 0": lambda x, t, **k: F.smooth_l1_loss(x, t, beta=0, **k),
    "kl": lambda x, t, **k: F.kl_div(x, t, **k),
    "kl of logs": lambda x, t, **k: F.kl_div(x, t.log(), log_target=True, **k),
    "bce": lambda x, t, **k: F.binary_cross_entropy_with_logits(x, t, **k),
    "bce weighted": lambda x, t, **k: F.binary_cross_entropy_with_logits(x, t, t.detach() + 1, **k),
    "bce pos_weight": lambda x, t, **k: F.binary_cross_entropy_with_logits(
        x, t, pos_weight=torch.tensor(2.5).to(x), **k
    ),
}


def _both(run: Callable[..., Any], x: Any, t: Any, **named: Any) -> list[Any]:
    leaf, target = x.detach().requires_grad_(), t.detach().requires_grad_()
    loss = run(leaf, target, **named)
    return [loss.detach(), *torch.autograd.grad(loss.sum(), (leaf, target))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_pytorchs_and_none_sums_nothing(name: str, dtype: Any) -> None:
    run = LOSSES[name]
    x, t = _operands(7, 13, dtype=dtype)
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for named in ({}, {"reduction": "sum"}, {"reduction": "none"}):
        with batch_invariant_mode(strict=True):
            got = _both(run, x, t, **named)
        for mine, theirs in zip(got, _both(run, x.double(), t.double(), **named), strict=True):
            assert mine.dtype is dtype
            torch.testing.assert_close(mine.double(), theirs, **close)
    with batch_invariant_mode(strict=True):
        tangent = torch.func.jvp(lambda x: run(x, t), (x,), (x.sin(),))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(lambda x: run(x, t), (x,), (x.sin(),))[1], **close)


@pytest.mark.parametrize("name", LOSSES)
def test_no_order_layout_or_shape_changes_a_bit(name: str) -> None:
    run, (x, t) = LOSSES[name], _operands(5003)
    x = x * 8 - 4
    order = torch.randperm(5003, generator=torch.Generator().manual_seed(1))
    spread = torch.empty(5003, 3)
    spread[:, 1], spread[:, 2] = x, t
    with batch_invariant_mode(strict=True):
        whole = _both(run, x, t)
        for a, b, back in (
            (x[order], t[order], torch.argsort(order)),
            (spread[:, 1], spread[:, 2], slice(None)),
            (x.reshape(1, 5003, 1), t.reshape(1, 5003, 1), slice(None)),
        ):
            loss, *gradients = _both(run, a, b)
            assert same_bits(loss, whole[0])
            for mine, wanted in zip(gradients, whole[1:], strict=True):
                assert same_bits(mine.flatten()[back], wanted)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", ["mse", "l1", "smooth l1", "huber"])
def test_broadcast_operands_get_a_row_sum(name: str) -> None:
    x, t = _operands(700, 6)
    with batch_invariant_mode(strict=True):
        loss, dx, dt = _both(LOSSES[name], x, t[:1], reduction="sum")
        wide = _both(LOSSES[name], x, t[:1].expand(700, 6), reduction="sum")
        assert same_bits(loss, wide[0])
        assert same_bits(dx, wide[1])
        assert same_bits(dt, wide[2].sum(0, True))


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_classes_ignored_and_weighted(dims: int) -> None:
    generator = torch.Generator().manual_seed(dims)
    x = torch.randn(9, 7, *(3, 2)[:dims], generator=generator).log_softmax(1)
    target = torch.randint(0, 7, (9, *x.shape[2:]), generator=generator)
    target[2] = -100
    weight = torch.rand(7, generator=generator)
    for named in ({}, {"weight": weight}, {"weight": weight, "ignore_index": 3, "reduction": "sum"}):
        leaf = x.clone().requires_grad_()
        wanted = F.nll_loss(leaf, target.clamp(min=0) if "ignore_index" in named else target, **named)
        with batch_invariant_mode(strict=True):
            got = F.nll_loss(leaf, target.clamp(min=0) if "ignore_index" in named else target, **named)
            torch.testing.assert_close(got, wanted)
            gradients = [torch.autograd.grad(y, leaf)[0] for y in (got, wanted)]
            torch.testing.assert_close(*gradients)
            if not named:
                assert same_bits(F.cross_entropy(x, target), F.nll_loss(x.log_softmax(1), target))
    row = torch.full((4,), -100)
    with batch_invariant_mode(strict=True):
        assert F.nll_loss(x[:4].flatten(1)[:, :7], row).isnan()


@pytest.mark.parametrize("name", ["huber", "bce", "kl"])
def test_compiled_and_under_autocast(name: str) -> None:
    run, (x, t) = LOSSES[name], _operands(40, 7)
    with batch_invariant_mode(strict=True):
        wanted = _both(run, x, t)
        got = _both(torch.compile(run, backend="aot_eager", fullgraph=True), x, t)
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            assert same_bits(run(x, t), wanted[0])
            assert run(x.bfloat16(), t.bfloat16()).dtype is torch.float32


def test_what_pytorch_refuses_is_refused_and_float64_is_said() -> None:
    x, t = _operands(3, 4)
    with batch_invariant_mode(strict=True):
        for call in (
            lambda: F.binary_cross_entropy_with_logits(x, t[:2]), lambda: F.mse_loss(x, t[:2]),
            lambda: F.smooth_l1_loss(x, t, beta=-1), lambda: F.huber_loss(x, t, delta=0),
            lambda: F.nll_loss(x, torch.tensor([0, 1, 9])), lambda: F.mse_loss(x, t, reduction="median"),
        ):  # fmt: skip
            with pytest.raises((RuntimeError, ValueError, IndexError)) as raised:
                call()
            assert not isinstance(raised.value, ContractUnsupported)
        with pytest.raises(ContractUnsupported, match=r"mse_loss \(torch\.float64\)"):
            F.mse_loss(x.double(), t)


@pytest.mark.parametrize("kind", ["l1", "smooth_l1", "huber", "softplus"])
def test_the_registered_op_keeps_pytorchs_rules(kind: str) -> None:
    d = torch.randn(3, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.detkern.element_losses.default, (d, kind, 0.5))
    again = torch.func.hessian(lambda d: losses.element_losses(kind, d, 0.5).sum())(d.detach()[0])
    theirs = {
        "l1": lambda d: d.abs(), "softplus": F.softplus,
        "smooth_l1": lambda d: F.smooth_l1_loss(d, d * 0, beta=0.5, reduction="none"),
        "huber": lambda d: F.huber_loss(d, d * 0, delta=0.5, reduction="none"),
    }[kind]  # fmt: skip
    torch.testing.assert_close(again, torch.func.hessian(lambda d: theirs(d).sum())(d.detach()[0]))
