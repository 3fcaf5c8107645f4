"""alpha and beta: fma(beta, input, alpha * acc), rounded once on every device."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import from_torch, same_bits

import detkern
from detkern.torch import batch_invariant_mode
from detkern.torch.affine import affine, sum_to


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
        wanted = torch.autograd.grad(plain, leaves, dy, allow_unused=True)
        got = torch.autograd.grad(ours, leaves, dy, allow_unused=True)
        for mine, theirs in zip(got, wanted, strict=True):
            if mine is None:
                assert beta == 0
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


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
