"""batch_invariant_mode under torch.func and forward-mode differentiation, through what it covers and what PyTorch
keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits
from torch.autograd import forward_ad

import detkern
import detkern.torch as dt
from detkern.torch import batch_invariant_mode

KEPT: dict[str, Callable[[Any], Any]] = {
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "var": lambda x: torch.var(x, -1),
    "var_mean": lambda x: torch.var_mean(x, -1)[1],
    "std": lambda x: x.std(0),
    "norm": lambda x: x.norm(dim=-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3.0),
    "matrix_norm": torch.linalg.matrix_norm,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x[None], 2)[0],
    "cumsum": lambda x: x.cumsum(-1),
    "nansum": lambda x: x.nansum(-1),
    "prod": lambda x: x.prod(-1),
    "trace": torch.trace,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 0),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() * 0),
    "nll_loss": lambda x: F.nll_loss(x, torch.tensor([1, 0, 2, 1])),
    "softplus": F.softplus,
    "det": lambda x: torch.linalg.det(x[:, :4]),
    "inv": lambda x: torch.linalg.inv(x[:, :4] + 4 * torch.eye(4)),
    "solve": lambda x: torch.linalg.solve(x[:, :4] + 4 * torch.eye(4), x[:, 4]),
    "matrix_power": lambda x: torch.linalg.matrix_power(x[:, :4], 3),
    "addr": lambda x: torch.addr(x, x[:, 0], x[0]),  # whose tangent makes lazy zeros
    "kron": lambda x: torch.kron(x[:2, :2], x[:2, :2]),
    "cov": torch.cov,
    "index": lambda x: x[:, [0, 2, 0]],
    "embedding": lambda x: F.embedding(torch.tensor([1, 1, 3]), x),
    "amax": lambda x: x.amax(-1),
    "sort": lambda x: x.sort(-1).values,
}
COVERED: dict[str, Callable[[Any], Any]] = {
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "rms_norm of a row": lambda x: F.rms_norm(x[0], x.shape[-1:], x[1], 1e-5),
    "rms_norm of all": lambda x: F.rms_norm(x, x.shape),
    "mean of all": lambda x: x.mean() + 0.5,
    "sum to a number": lambda x: (x.sum() * 0.1).sigmoid(),
    "silu of a number": lambda x: F.silu(x[0, 0]) + F.gelu(x[0, 1]) + torch.rsqrt(x[0, 2].exp()),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([1, 0, 2, 1])),
    "cross_entropy of a row": lambda x: F.cross_entropy(x[0], torch.tensor(1), label_smoothing=0.1),
    "cross_entropy of shares": lambda x: F.cross_entropy(x, x.detach().softmax(-1)),
    "addmm": lambda x: torch.addmm(x[0, :4], x, x.t(), alpha=0.3, beta=0.7),
    "addmm of no beta": lambda x: torch.addmm(x[0, :4], x, x.t(), alpha=0.3, beta=0),
    "linear": lambda x: F.linear(x, x, x[0, :4]),
    "dot": lambda x: torch.dot(x[0], x[1]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "attention": lambda x: (x @ x.t()).softmax(-1) @ x,
    "broadcast": lambda x: x * x[0] - x.mean(-1, keepdim=True),
}
TRANSFORMS: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(f(x))),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x.sin()])),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    "jvp of a jvp": lambda f, x: torch.func.jvp(
        lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1], (x,), (torch.ones_like(x),)
    ),
}


def _x() -> Any:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def _flat(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else [x for item in value for x in _flat(item)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*KEPT, *COVERED])
def test_every_transform_gives_what_pytorch_gives(name: str) -> None:
    function, x = {**KEPT, **COVERED}[name], _x()
    for transform in TRANSFORMS.values():
        try:
            wanted = _flat(transform(function, x))
        except (RuntimeError, NotImplementedError):
            continue  # PyTorch itself has no such derivative
        with batch_invariant_mode():
            got = _flat(transform(function, x))
        for mine, theirs in zip(got, wanted, strict=True):
            # PyTorch's own tangent of a 0-d tensor plus a number is float64.
            wide = theirs.dtype is torch.float64
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, check_dtype=not wide)
            assert mine.dtype is torch.float32 or wide
    assert torch._C._is_fwd_grad_enabled()
    assert torch.is_grad_enabled()


def test_what_is_watched_has_detkerns_bits_in_forward_mode_too() -> None:
    a, da = torch.randn(6, 6), torch.randn(6, 6)
    with batch_invariant_mode(strict=True):
        y, dy = torch.func.jvp(lambda x: torch.linalg.matrix_power(x, 2), (a,), (da,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a, da)
            again = forward_ad.unpack_dual(torch.linalg.matrix_power(dual, 2))
            summed = torch.linalg.matrix_norm(torch.linalg.matrix_power(dual, 2), 1)
            assert forward_ad.unpack_dual(summed).tangent is not None
    assert same_bits(y, detkern.gemm(a, a))
    assert same_bits(dy, detkern.gemm(da, a) + detkern.gemm(a, da))
    assert same_bits(again.primal, y)
    assert same_bits(again.tangent, dy)


def test_forward_mode_and_recording_at_once() -> None:
    x, gain, t = torch.randn(4, 5).requires_grad_(), torch.randn(5).requires_grad_(), torch.randn(4, 5)
    found = []
    for mode in (batch_invariant_mode(strict=True), nullcontext()):
        with mode, forward_ad.dual_level():
            y = F.rms_norm(forward_ad.make_dual(x, t) * gain, (5,), gain)
            y, dy = forward_ad.unpack_dual(y)
            found.append([y.detach(), dy.detach(), *torch.autograd.grad(y.sum(), (x, gain))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "matmul": (lambda x: dt.matmul(x, x.t()), lambda x: x @ x.t()),
    "linear": (lambda x: dt.linear(x, x.sin(), x[0, :4]), lambda x: F.linear(x, x.sin(), x[0, :4])),
    "sum": (lambda x: dt.sum(x * x), lambda x: (x * x).sum(-1)),
    "mean_square": (dt.mean_square, lambda x: x.square().mean(-1)),
    "softmax": (dt.softmax, lambda x: x.softmax(-1)),
    "log_softmax": (dt.log_softmax, lambda x: x.log_softmax(-1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_over_forward_mode_loses_no_derivative(name: str) -> None:
    x = _x()
    for transform in (
        TRANSFORMS["jvp of a jvp"],
        lambda f, x: torch.func.jacfwd(torch.func.jacfwd(f))(x),
        lambda f, x: torch.func.jacfwd(torch.func.hessian(lambda x: f(x).square().sum()))(x),
    ):
        mine, theirs = (_flat(transform(f, x)) for f in FUNCTIONS[name])
        for got, wanted in zip(mine, theirs, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["logsumexp", "var", "mse_loss", "matrix_power", "rms_norm of a row", "addmm", "attention"]
)
def test_every_transform_gives_what_pytorch_gives_on_a_gpu(name: str) -> None:
    function, x = {**KEPT, **COVERED}[name], _x().cuda()
    for transform in TRANSFORMS.values():
        wanted = _flat(transform(function, x))
        with batch_invariant_mode():
            got = _flat(transform(function, x))
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
