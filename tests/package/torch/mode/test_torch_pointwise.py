"""On the CPU, under batch_invariant_mode, an element's bits do not depend on where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits

from detkern.torch import batch_invariant_mode

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "rsqrt": lambda x: (x * x + 1e-3).rsqrt(),
    "polar": lambda x: torch.polar(x.float(), x.float() + 1).imag,
    "ldexp": lambda x: torch.ldexp(x, (x.detach() / 2).floor()),
    "ldexp of whole numbers": lambda x: torch.ldexp(x, (x.detach() / 2).int().abs()),
    "atan2": lambda x: torch.atan2(x, x.detach().roll(0) + 2),
    "logaddexp": lambda x: torch.logaddexp(x, 1 - x),
    "softplus": F.softplus, "softshrink": F.softshrink, "elu": F.elu, "celu": F.celu, "selu": F.selu, "mish": F.mish,
    "exp2": torch.exp2, "sinh": torch.sinh, "cosh": torch.cosh, "i0e": torch.special.i0e,
    "acos": lambda x: torch.acos(x.tanh() * 0.9), "asin": lambda x: torch.asin(x.tanh() * 0.9),
    "atanh": lambda x: torch.atanh(x.tanh() * 0.9),
    "acosh": lambda x: torch.acosh(x.abs() + 1.5), "asinh": torch.asinh,
    # What those are made of, and what norms and rotary embeddings need; PyTorch's own.
    "exp": torch.exp, "erf": torch.erf, "tanh": torch.tanh, "cos": torch.cos, "sin": torch.sin,
    "pow": lambda x: x.pow(2),
    "layer_norm": lambda x: F.layer_norm(x.reshape(-1, 17), (17,)).reshape(x.shape),
}  # fmt: skip
PIECES = (17, 51, 34 * 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pieces_have_the_bits_of_the_whole(name: str, dtype: Any) -> None:
    function = FUNCTIONS[name]
    x, dy = (torch.randn(1237 * 17, generator=torch.Generator().manual_seed(i)).to(dtype) * 3 for i in range(2))

    def both(x: Any, dy: Any) -> Any:
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return torch.stack([y.detach(), torch.autograd.grad(y, leaf, dy)[0]])

    with batch_invariant_mode(strict=True):
        whole = both(x, dy)
        for piece in PIECES:
            for start in range(0, len(x) - piece, len(x) // 20):
                part = slice(start, start + piece)
                if name == "layer_norm":
                    part = slice(start // 17 * 17, start // 17 * 17 + piece)
                assert same_bits(both(x[part], dy[part]), whole[:, part].contiguous())


MADE = ("exp", "erf", "tanh", "cos", "sin", "pow", "layer_norm")


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in (*MADE, "polar")])
def test_values_and_slopes_are_pytorchs(name: str) -> None:
    function = FUNCTIONS[name]
    widest = 60 if name in ("exp2", "sinh", "cosh") or "ldexp" in name else 100
    ends = [] if widest == 60 else [3e4, -3e4]
    x = torch.cat([torch.linspace(-widest, widest, 1001), torch.tensor([0.0, -0.0, 1e-30, *ends])]).requires_grad_()
    wanted = function(x.double())
    (slope,) = torch.autograd.grad(wanted.sum(), x)
    with batch_invariant_mode():
        got = function(x)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=2e-6)
    (got_slope,) = torch.autograd.grad(got.sum(), x, create_graph=True)
    torch.testing.assert_close(got_slope, slope, rtol=1e-5, atol=1e-5)
    assert got_slope.requires_grad or "ldexp" in name  # which is linear


def test_polar_ldexp_and_pairs_that_broadcast() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(shape, generator=generator).requires_grad_() for shape in ((7, 5), (5,)))
    for run in (torch.polar, torch.atan2, torch.ldexp, torch.logaddexp):
        found = []
        for under in (False, True):
            with batch_invariant_mode(strict=True) if under else torch.enable_grad():
                z = run(x, y)
                found.append((z, *torch.autograd.grad(z.abs().sum(), (x, y))))
        for got, wanted in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, wanted)
    with batch_invariant_mode(strict=True):
        assert torch.ldexp(torch.tensor(3.0), torch.tensor(-2)) == 0.75
        assert torch.atan2(torch.tensor(0.0), torch.tensor(-1.0)).shape == ()
        half = torch.ones(3, dtype=torch.float16)
        assert torch.atan2(half, half.bfloat16()).dtype is torch.float32
        assert torch.ldexp(half, torch.tensor([1, 2, 3])).dtype is torch.float32
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch.atan2(torch.ones(3), torch.ones(4))


@pytest.mark.parametrize("name", ["atanh_", "elu_", "sinh_", "exp2_", "asin_", "mish_"])
def test_in_place_and_out_have_the_bits_of_the_call(name: str) -> None:
    plain = getattr(torch, name[:-1], None) or getattr(torch._C._nn, name[:-1])
    change = getattr(torch, name, None) or getattr(torch.Tensor, name, None) or getattr(torch._C._nn, name)
    x = torch.linspace(-0.9, 0.9, 37)
    with batch_invariant_mode(strict=True):
        wanted, y = plain(x), x.clone()
        assert change(y) is y
        assert same_bits(y, wanted)
        out = torch.empty(0)
        assert plain(x, out=out) is out
        assert same_bits(out, wanted)
        leaf = x.clone().requires_grad_()
        gradients = [torch.autograd.grad(z.sum(), leaf)[0] for z in (plain(leaf), change(leaf * 1))]
        assert same_bits(*gradients)


def test_in_place_and_gpu_only_modes() -> None:
    x = torch.randn(37)
    plain = torch.sigmoid(x)
    with batch_invariant_mode():
        wanted = torch.sigmoid(x), F.silu(x)
        assert same_bits(x.clone().sigmoid_(), wanted[0])
        assert same_bits(F.silu(x.clone(), inplace=True), wanted[1])
    with batch_invariant_mode(device_types="cuda"):
        assert same_bits(torch.sigmoid(x), plain)
