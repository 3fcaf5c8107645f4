"""alpha and beta: fma(beta, input, alpha * acc), rounded once on every device."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import from_torch, same_bits

import detkern
from detkern.torch import batch_invariant_mode
from detkern.torch.functions.affine import affine
from detkern.torch.functions.broadcasting import sum_to


def _nearest(exact: Fraction) -> np.float32:
    """To nearest even in binary32, by whole numbers."""
    if exact == 0:
        return np.float32(0)
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    below, rest = divmod(magnitude, unit)
    below += rest * 2 > unit or (rest * 2 == unit and below % 2)
    return np.float32((1 if exact > 0 else -1) * float(below * unit))


def test_the_sum_is_rounded_once() -> None:
    generator = np.random.default_rng(0)
    acc = (generator.standard_normal(4000) * 2.0 ** generator.integers(-145, 20, 4000)).astype(np.float32)
    x = (generator.standard_normal(4000) * 2.0 ** generator.integers(-70, 20, 4000)).astype(np.float32)
    beta = float(np.float32(1 + 2**-23))
    acc[:2000] = -x[:2000] * np.float32(beta) * (1 + 2.0 ** generator.integers(-26, 2, 2000)).astype(np.float32)
    # Exact sums a hair from the middle of two neighbours, nearer than binary64 sees: 1 + 2^-23 + 2^-24 (1 - 2^-46), the
    # same above the middle, and below 2^-126.
    hair = np.float32(1 - 2**-23)
    acc[-4:] = [1 + 2**-23, -(1 + 2**-23), 1 + 2**-22, 2**-126 * (1 + 2**-23)]
    x[-4:] = [hair * 2**-24, -hair * 2**-24, hair * 2**-24, hair * 2**-150]
    got = from_torch(affine(torch.from_numpy(acc), torch.from_numpy(x), 1.0, beta, torch.float32))
    for i in range(len(acc)):
        wanted = _nearest(Fraction(float(x[i])) * Fraction(beta) + Fraction(float(acc[i])))
        assert got[i] == wanted, (acc[i], x[i])


def test_alpha_is_rounded_in_between() -> None:
    acc, x = torch.randn(3, 500), torch.randn(500).bfloat16()
    alpha, beta = float(np.float32(0.3)), float(np.float32(-1.7))
    scaled = (acc.double() * alpha).float()
    got = affine(acc, x, 0.3, -1.7, torch.float32)
    for i in range(3):
        for j in range(0, 500, 7):
            exact = Fraction(beta) * Fraction(float(x[j])) + Fraction(float(scaled[i, j]))
            assert float(got[i, j]) == float(_nearest(exact))
    assert same_bits(affine(acc, x, 0.3, -1.7, torch.bfloat16), got.bfloat16())


def test_special_values() -> None:
    inf, nan = float("inf"), float("nan")
    acc = torch.tensor([inf, inf, -inf, nan, 3e38, 0.0, -1.0])
    x = torch.tensor([1.0, -inf, 5.0, 1.0, 3e38, -0.0, 0.5])
    got = affine(acc, x, 1.0, 2.0, torch.float32)
    assert from_torch(got).view(np.uint32).tolist() == [
        0x7F800000, 0x7FFFFFFF, 0xFF800000, 0x7FFFFFFF, 0x7F800000, 0, 0,
    ]  # fmt: skip
    narrow = from_torch(affine(acc, x, 1.0, 2.0, torch.bfloat16)).view(np.uint16).tolist()
    assert narrow == [0x7F80, 0x7FFF, 0xFF80, 0x7FFF, 0x7F80, 0, 0]
    a, b = torch.randn(4, 20), torch.randn(20, 3)
    with batch_invariant_mode():
        assert same_bits(torch.addmm(torch.full((4, 3), nan), a, b, beta=0, alpha=2), detkern.gemm(a, b) * 2)
        assert torch.addmm(torch.full((4, 3), nan), a, b, beta=1e-30).isnan().all()


@pytest.mark.parametrize("shape", [(3,), (1,), (4, 1), (1, 3), (4, 3), ()])
def test_gradients_reach_input_of_every_shape_that_expands(shape: tuple[int, ...]) -> None:
    leaves = [
        torch.randn(shape).requires_grad_(),
        torch.randn(4, 20).requires_grad_(),
        torch.randn(20, 3).requires_grad_(),
    ]
    for alpha, beta in ((1, 1), (2, 0.5), (0.5, 0)):
        plain = torch.addmm(*leaves, alpha=alpha, beta=beta)
        with batch_invariant_mode(strict=True):
            ours = torch.addmm(*leaves, alpha=alpha, beta=beta)
        dy = torch.randn(4, 3)
        wanted = torch.autograd.grad(plain, leaves, dy)
        got = torch.autograd.grad(ours, leaves, dy)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


SHAPES = {
    "addmm": ((4, 3), (4, 20), (20, 3)), "addmv": ((4,), (4, 20), (20,)), "addbmm": ((4, 3), (2, 4, 20), (2, 20, 3)),
    "baddbmm": ((2, 4, 3), (2, 4, 20), (2, 20, 3)),
}  # fmt: skip
ZERO_FACTORS = ((0, 1), (0, 0.5), (0, 0), (1, 0), (2, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_what_zero_multiplies_does_not_enter(name: str, dtype: Any) -> None:
    function = getattr(torch, name)
    for (alpha, beta), bad, where in itertools.product(ZERO_FACTORS, (torch.nan, torch.inf), range(3)):
        operands = [torch.randn(shape).to(dtype) for shape in SHAPES[name]]
        operands[where].view(-1)[0] = bad
        input, a, b = operands
        with batch_invariant_mode(strict=True):
            got = function(*operands, alpha=alpha, beta=beta)
            changed = getattr(input.clone(), f"{name}_")(a, b, alpha=alpha, beta=beta)
            written = function(*operands, alpha=alpha, beta=beta, out=torch.empty_like(input))
            without = function(torch.zeros_like(input), a, b, alpha=alpha, beta=0)
        assert same_bits(got, changed)
        assert same_bits(got, written)
        if beta == 0:
            assert same_bits(got, without)
        if alpha == 0:
            wanted = torch.zeros_like(input) if beta == 0 else (input.float() * beta).to(dtype)
            assert torch.equal(got.isnan(), wanted.isnan())
            assert same_bits(got.nan_to_num(), wanted.nan_to_num())
        if name == "addmm" and dtype is torch.float32:  # elsewhere PyTorch's answer depends on sizes and libraries
            torch.testing.assert_close(got, function(*operands, alpha=alpha, beta=beta), equal_nan=True)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_factors_of_zero_are_pytorchs(name: str) -> None:
    function = getattr(torch, name)
    for (alpha, beta), where in itertools.product(ZERO_FACTORS, (None, 0, 1, 2)):
        leaves = [torch.randn(shape) for shape in SHAPES[name]]
        if where is not None:
            leaves[where].view(-1)[0] = torch.nan
        for leaf in leaves:
            leaf.requires_grad_()
        plain = function(*leaves, alpha=alpha, beta=beta)
        with batch_invariant_mode(strict=True):
            ours = function(*leaves, alpha=alpha, beta=beta)
        dy = torch.randn(plain.shape)
        for mine, theirs in zip(*(torch.autograd.grad(y, leaves, dy) for y in (ours, plain)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    alone = torch.randn(SHAPES[name][0], requires_grad=True)
    with batch_invariant_mode():
        y = function(alone, *(torch.ones(shape) for shape in SHAPES[name][1:]), beta=0)
    assert not torch.autograd.grad(y.sum(), alone)[0].any()


def test_a_factor_that_rounds_to_zero_in_binary32_is_zero() -> None:
    acc, x = torch.full((3,), torch.nan), torch.full((3,), torch.inf)
    assert same_bits(affine(acc, torch.ones(3), 2.0**-150, 1.0, torch.float32), torch.ones(3))
    assert same_bits(affine(torch.ones(3), x, 1.0, -(2.0**-150), torch.float32), torch.ones(3))
    assert affine(acc, torch.ones(3), 2.0**-149, 1.0, torch.float32).isnan().all()
    assert affine(torch.ones(3), x, 1.0, 2.0**-149, torch.float32).isinf().all()
    negative = torch.full((3,), -0.0)
    assert same_bits(affine(torch.ones(3), negative, 0.0, 1.0, torch.float32), negative)
    assert same_bits(affine(torch.full((3,), -1.0), None, 0.0, 0.0, torch.bfloat16), torch.zeros(3).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_what_zero_multiplies_does_not_enter_on_a_gpu(name: str) -> None:
    for (alpha, beta), dtype in itertools.product(ZERO_FACTORS, (torch.float32, torch.bfloat16)):
        operands = [torch.randn(shape).to(dtype) for shape in SHAPES[name]]
        operands[1 if alpha == 0 else 0].view(-1)[0] = torch.nan
        with batch_invariant_mode(strict=True, contract="fma"):
            here = getattr(torch, name)(*operands, alpha=alpha, beta=beta)
            there = getattr(torch, name)(*(x.cuda() for x in operands), alpha=alpha, beta=beta)
        assert not here.isnan().any()
        assert same_bits(there.cpu(), here)


def test_the_registered_op_keeps_pytorchs_rules() -> None:
    acc, x = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    for operands in ((acc, x, 2.0, 0.5, torch.bfloat16), (acc, None, 2.0, 0.0, torch.float32)):
        torch.library.opcheck(torch.ops.detkern.affine.default, operands)


def test_a_sum_to_a_shape_is_a_bias_gradient_or_a_row_sum() -> None:
    x = torch.randn(3, 4, 5)
    flat: Any = detkern.rows.sum
    assert same_bits(sum_to(x, (5,)), detkern.bias_gradient(x))
    assert same_bits(sum_to(x, (4, 1)), flat(x.permute(1, 0, 2).reshape(4, 15))[:, None])
    assert same_bits(sum_to(x, ()), flat(x.reshape(-1)))
    assert same_bits(sum_to(x[0], (1,)), flat(x[0].reshape(1, -1)))
    assert sum_to(x, (3, 4, 5)) is x
