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
    x, dy = (torch.randn(4097 * 17, generator=torch.Generator().manual_seed(i)).to(dtype) * 3 for i in range(2))

    def both(x: Any, dy: Any) -> Any:
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return torch.stack([y.detach(), torch.autograd.grad(y, leaf, dy)[0]])

    with batch_invariant_mode(strict=True):
        whole = both(x, dy)
        for piece in PIECES:
            for start in range(0, len(x) - piece, len(x) // 40):
                part = slice(start, start + piece)
                if name == "layer_norm":
                    part = slice(start // 17 * 17, start // 17 * 17 + piece)
                assert same_bits(both(x[part], dy[part]), whole[:, part].contiguous())


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "gelu tanh", "rsqrt"])
def test_values_and_slopes_are_pytorchs(name: str) -> None:
    function = FUNCTIONS[name]
    x = torch.cat([torch.linspace(-100, 100, 1001), torch.tensor([0.0, -0.0, 1e-30, 3e4, -3e4])]).requires_grad_()
    wanted = function(x.double())
    (slope,) = torch.autograd.grad(wanted.sum(), x)
    with batch_invariant_mode():
        got = function(x)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=2e-6)
    (got_slope,) = torch.autograd.grad(got.sum(), x, create_graph=True)
    torch.testing.assert_close(got_slope, slope, rtol=1e-5, atol=1e-5)
    assert got_slope.sum().requires_grad


def test_in_place_and_gpu_only_modes() -> None:
    x = torch.randn(37)
    plain = torch.sigmoid(x)
    with batch_invariant_mode():
        wanted = torch.sigmoid(x), F.silu(x)
        assert same_bits(x.clone().sigmoid_(), wanted[0])
        assert same_bits(F.silu(x.clone(), inplace=True), wanted[1])
    with batch_invariant_mode(device_types="cuda"):
        assert same_bits(torch.sigmoid(x), plain)
