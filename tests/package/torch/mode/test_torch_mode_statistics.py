"""logsumexp, var, std, norms and cumsum as PyTorch names them, under batch_invariant_mode: every form has the bits of
detkern.torch's functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits

import detkern.torch as dt
from detkern.errors import ContractUnsupported
from detkern.torch import batch_invariant_mode

aten, linalg = torch.ops.aten, torch.linalg
# What PyTorch is called by, and detkern's function.
FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "logsumexp": (lambda x: x.logsumexp(-1), lambda x: dt.logsumexp(x)),
    "special.logsumexp": (lambda x: torch.special.logsumexp(x, (0, 1)), lambda x: dt.logsumexp(x, None)),
    "aten.logsumexp": (lambda x: aten.logsumexp(x, [0], True), lambda x: dt.logsumexp(x, 0, True)),
    "var": (lambda x: x.var(), lambda x: dt.var(x, None)),
    "var of a dimension": (lambda x: torch.var(x, 0, False, True), lambda x: dt.var(x, 0, correction=0, keepdim=True)),
    "var unbiased": (lambda x: x.var(unbiased=False), lambda x: dt.var(x, None, correction=0)),
    "var unbiased in place": (lambda x: torch.var(x, True), lambda x: dt.var(x, None)),
    "var correction": (lambda x: torch.var(x, dim=1, correction=2), lambda x: dt.var(x, correction=2)),
    "aten.var": (lambda x: aten.var.correction(x, [0], correction=0.5), lambda x: dt.var(x, 0, correction=0.5)),
    "std": (lambda x: torch.std(x, (0, 1), keepdim=True), lambda x: dt.std(x, (0, 1), keepdim=True)),
    "var_mean": (lambda x: torch.var_mean(x, 1), lambda x: (dt.var(x), dt.mean(x))),
    "std_mean": (lambda x: torch.std_mean(x, 0, correction=0), lambda x: (dt.std(x, 0, correction=0), dt.mean(x, 0))),
    "Tensor.norm": (lambda x: x.norm(), lambda x: dt.vector_norm(x, 2, None)),
    "torch.norm": (lambda x: torch.norm(x, p=1, dim=0), lambda x: dt.vector_norm(x, 1, 0)),
    "norm fro": (lambda x: torch.norm(x, "fro", dim=(0, 1)), lambda x: dt.vector_norm(x, 2, None)),
    "norm inf": (lambda x: x.norm(math.inf, 1, True), lambda x: dt.vector_norm(x, math.inf, 1, True)),
    "linalg.norm": (lambda x: linalg.norm(x), lambda x: dt.vector_norm(x, 2, None)),
    "linalg.norm of vectors": (lambda x: linalg.norm(x, 0, 1), lambda x: dt.vector_norm(x, 0)),
    "linalg.norm of matrices": (lambda x: linalg.norm(x, "fro"), lambda x: dt.vector_norm(x, 2, None)),
    "linalg.vector_norm": (lambda x: linalg.vector_norm(x, -math.inf, 0), lambda x: dt.vector_norm(x, -math.inf, 0)),
    "linalg.matrix_norm": (lambda x: linalg.matrix_norm(x), lambda x: dt.vector_norm(x, 2, (0, 1))),
    "foreach_norm": (
        lambda x: torch._foreach_norm([x, x[0]]), lambda x: (dt.vector_norm(x, 2, None), dt.vector_norm(x[0]))
    ),
    "cumsum": (lambda x: x.cumsum(0), lambda x: dt.cumsum(x, 0)),
    "cumsum_": (lambda x: (x * 1).cumsum_(-1), lambda x: dt.cumsum(x)),
    "aten.cumsum": (lambda x: aten.cumsum(x, 1), lambda x: dt.cumsum(x)),
    "float32": (lambda x: torch.cumsum(x, 1, dtype=torch.float32), lambda x: dt.cumsum(x, out_dtype="float32")),
    "float32 norm": (lambda x: x.norm(dim=1, dtype=torch.float32), lambda x: dt.vector_norm(x, out_dtype="float32")),
}  # fmt: skip


def _tensors(x: Any) -> list[Any]:
    return [x] if isinstance(x, torch.Tensor) else list(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_bits_of_detkerns_function(name: str, dtype: Any) -> None:
    form, function = FORMS[name]
    x = (torch.randn(11, 70, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    found = []
    for run, strict in ((form, True), (function, False)):
        leaf = x.clone().requires_grad_()
        with batch_invariant_mode(strict=True) if strict else torch.enable_grad():
            ys = _tensors(run(leaf))
        dys = [torch.linspace(-1, 2, y.numel()).to(y.dtype).reshape(y.shape) for y in ys]
        found.append([*(y.detach() for y in ys), torch.autograd.grad(ys, leaf, dys)[0]])
    assert all(same_bits(a.contiguous(), b.contiguous()) for a, b in zip(*found, strict=True))
    (plain, *_), got = _tensors(form(x.float())), found[0][0]
    torch.testing.assert_close(plain.to(got.dtype), got, rtol=1e-2, atol=1e-2)


OUT: dict[str, Callable[..., Any]] = {
    "logsumexp": lambda x, **out: torch.logsumexp(x, 1, **out),
    "var": lambda x, **out: torch.var(x, 1, correction=0, **out),
    "std": lambda x, **out: torch.std(x, 1, **out),
    "norm": lambda x, **out: torch.norm(x, dim=0, **out),
    "linalg.norm": lambda x, **out: linalg.norm(x, **out),
    "linalg.vector_norm": lambda x, **out: linalg.vector_norm(x, 1, **out),
    "cumsum": lambda x, **out: torch.cumsum(x, 1, **out),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", OUT)
def test_out_compiled_and_mapped_have_the_same_bits(name: str) -> None:
    x, run = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)), OUT[name]
    with batch_invariant_mode(strict=True):
        wanted = run(x)
        for out in (torch.full_like(wanted, 7), torch.empty(0)):
            assert run(x, out=out) is out
            assert same_bits(out, wanted)
        assert same_bits(torch.func.vmap(run)(torch.stack([x.sin(), x]))[1].contiguous(), wanted)
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert same_bits(compiled(x), wanted)
        grown = x.clone().requires_grad_()
        gradients = [torch.autograd.grad(f(grown).sum(), grown)[0] for f in (run, compiled)]
        assert same_bits(*gradients)


def test_gradients_are_clipped_by_a_norm_of_every_element() -> None:
    def clipped(foreach: bool) -> list[Any]:
        parameters = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (5, 700, 1)]
        for i, p in enumerate(parameters):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        with batch_invariant_mode(strict=True):
            total = torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=foreach)
        each = [dt.vector_norm(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), 2, None)
                for i, p in enumerate(parameters)]  # fmt: skip
        assert same_bits(total, dt.vector_norm(torch.stack(each)))
        return [p.grad for p in parameters]

    assert all(same_bits(a, b) for a, b in zip(clipped(True), clipped(False), strict=True))


def test_of_a_number_each_is_a_number() -> None:
    x = torch.tensor(-3.0)
    for run in (
        lambda x: x.logsumexp(0), lambda x: x.norm(), lambda x: x.norm(1, 0), lambda x: x.cumsum(0),
        lambda x: x.var(correction=0), lambda x: linalg.vector_norm(x, 0), lambda x: x.std(-1, correction=0),
    ):  # fmt: skip
        wanted = run(x)
        with batch_invariant_mode(strict=True):
            got = run(x)
        assert got.shape == ()
        assert got == wanted


def test_what_is_not_covered_is_said_and_whole_numbers_pass() -> None:
    x = torch.randn(4, 3)
    refused: list[tuple[str, Callable[[], Any]]] = [
        (r"vector_norm \(ord=3\)", lambda: x.norm(3)),
        (r"vector_norm \(ord=0\.5\)", lambda: linalg.vector_norm(x, 0.5)),
        (r"vector_norm \(torch\.float64\)", lambda: x.double().norm()),
        (r"vector_norm \(torch\.complex64\)", lambda: linalg.norm(x.to(torch.complex64))),
        (r"cumsum \(torch\.float64\)", lambda: x.cumsum(0, dtype=torch.float64)),
        (r"var \(torch\.float64\)", lambda: x.double().var()),
    ]
    for message, call in refused:
        with batch_invariant_mode(strict=True), pytest.raises(ContractUnsupported, match=message):
            call()
    whole = torch.arange(6)
    with batch_invariant_mode(strict=True):
        assert whole.cumsum(0).tolist() == [0, 1, 3, 6, 10, 15]
        assert (whole > 2).cumsum(0).dtype is torch.int64
        for call in (lambda: x.var(5), lambda: x.norm(dim=(0, 0)), lambda: x.cumsum(2), lambda: x.logsumexp((0, -2))):
            with pytest.raises((IndexError, RuntimeError)):
                call()
