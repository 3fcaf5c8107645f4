"""logsumexp, var, std and norms: the steps of docs/contracts.md, "Reductions made of row operations", in exact
arithmetic; derivatives; what may not change a bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits
from oracles import rational
from oracles.elementary import exp, log, product, quotient

import detkern.torch as dt
from detkern.errors import ArgumentError, DTypeError, ShapeError
from detkern.torch.functions import reductions
from detkern.vocabulary.dtypes import F32
from detkern.vocabulary.operands import generate

INF = math.inf
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "logsumexp": (dt.logsumexp, torch.logsumexp),
    "var": (dt.var, torch.var),
    "var 0": (
        lambda x, *a, **k: dt.var(x, *a, correction=0, **k),
        lambda x, *a, **k: torch.var(x, *a, correction=0, **k),
    ),
    "std": (dt.std, torch.std),
    **{
        f"norm {order}": (
            lambda x, *a, n=order, **k: dt.vector_norm(x, n, *a, **k),
            lambda x, *a, n=order, **k: torch.linalg.vector_norm(x, n, *a, **k),
        )
        for order in (0, 1, 2, INF, -INF)
    },
}


# ---- the steps in exact arithmetic ----------------------------------------------------------------------------------


def _root(value: float) -> float:
    """A square root rounded once to binary32, from integers."""
    if value <= 0 or not math.isfinite(value):
        return value if value >= 0 else math.nan
    scaled = Fraction(value) * Fraction(4) ** 120
    root = math.isqrt(scaled.numerator // scaled.denominator)
    exact = Fraction(root, 2**120)
    if exact * exact != Fraction(value):
        exact += Fraction(1, 2**121)  # beyond what is kept, and above it
    return rational.round_fraction(exact, F32)


def _distances(x: list[float]) -> list[float]:
    mean = quotient(rational.aligned_sum(x), len(x))
    return [rational.add(value, -mean) for value in x]


def _halved(x: float, y: float) -> float:
    return math.nan if y == 0 and x == 0 else math.copysign(INF, x) if y == 0 else quotient(x, y)


def _exact(name: str, x: list[float], dy: float) -> tuple[float, list[float]]:
    """The result and the gradient, each step rounded once to binary32."""
    if name == "logsumexp":
        distances = [exp(rational.add(value, -max(x))) for value in x]
        s = rational.aligned_sum(distances)
        return rational.add(max(x), log(s)), [product(dy, quotient(e, s)) for e in distances]
    if name.startswith("norm"):
        order = float(name.split()[1])
        if order == 2:
            y = _root(rational.aligned_sum([product(value, value) for value in x]))
            return y, [0.0 if y == 0 else product(quotient(dy, y), value) for value in x]
        if order == 1:
            return rational.aligned_sum([abs(value) for value in x]), [
                0.0 if value == 0 else math.copysign(1, value) * dy for value in x
            ]
        assert order == 0
        return rational.aligned_sum([float(value != 0) for value in x]), [0.0] * len(x)
    distances = _distances(x)
    divisor = float(len(x) - (name != "var 0"))
    variance = quotient(rational.aligned_sum([product(d, d) for d in distances]), divisor)
    if name == "std":
        root = _root(variance)
        dy = 0.0 if root == 0 else quotient(dy, rational.add(root, root))
        each = quotient(dy, divisor)
        return root, [product(rational.add(each, each), d) for d in distances]
    each = quotient(dy, divisor)
    return variance, [product(rational.add(each, each), d) for d in distances]


@pytest.mark.parametrize("values", ["normal", "cancel", "subnormal", "tiny", "wide"])
@pytest.mark.parametrize("name", [name for name in CALLS if "inf" not in name])
def test_against_exact_arithmetic(name: str, values: str) -> None:
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        host = np.clip(generate(values, F32, (4, 7), number), -(2.0**50), 2.0**50)
        x = torch.from_numpy(host).to(dtype).requires_grad_()
        dy = torch.tensor([1, -0.75, 3, 2.0**-20])
        y = CALLS[name][0](x, -1, out_dtype="float32")
        (dx,) = torch.autograd.grad(y, x, dy)
        for row in range(4):
            terms = x[row].tolist()
            want, slopes = _exact(name, terms, float(dy[row]))
            assert y[row].item() == want, (dtype, row)
            assert dx[row].tolist() == torch.tensor(slopes).to(dtype).tolist(), (dtype, row)


def test_square_roots_and_quotients_round_once() -> None:
    """What the bits on every device rest on."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 300, generator=generator).exp2() * torch.tensor([2.0**-120, 3e7])[:, None]
    assert reductions._root(x).tolist() == [_root(value) for value in x.tolist()]
    assert (x / y).tolist() == [quotient(*pair) for pair in zip(x.tolist(), y.tolist(), strict=True)]


# ---- beside PyTorch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_values_and_derivatives_of_both_orders_are_pytorchs(name: str) -> None:
    ours, theirs = CALLS[name]
    x = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(2))
    for dim, keepdim in ((-1, False), (0, True), ((0, 2), False), (None, False)):
        if dim is None and name == "logsumexp":
            continue  # which PyTorch has not
        got, wanted = ours(x, dim, keepdim=keepdim), theirs(x.double(), dim, keepdim=keepdim)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=1e-6)
        tangent = torch.func.jvp(lambda z, d=dim, k=keepdim: ours(z, d, keepdim=k), (x,), (x.sin(),))[1]
        expected = torch.func.jvp(lambda z, d=dim, k=keepdim: theirs(z, d, keepdim=k), (x,), (x.sin(),))[1]
        torch.testing.assert_close(tangent, expected, rtol=1e-5, atol=1e-5)
    if "norm" not in name:
        hessians = [torch.func.hessian(lambda z, f=f: f(z, -1))(x[0, 0]) for f in (ours, theirs)]
        torch.testing.assert_close(*hessians, rtol=1e-4, atol=1e-5)
    leaf = x.clone().requires_grad_()
    both = []
    for f in (ours, theirs):
        found = [(leaf * 1 + f(leaf, 1, keepdim=True).sin()).sum()]
        for _ in range(2):
            (dx,) = torch.autograd.grad(found[-1].square().sum(), leaf, create_graph=True)
            found.append(dx)
        both.append(found)
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


SPECIAL = torch.tensor(
    [[-INF] * 3, [INF, 1, 2], [INF, INF, 1], [-INF, INF, 1], [math.nan, 1, 2], [-INF, 0, 1], [3e38, 3e38, -1],
     [0, 0, -0.0], [1e-45, 0, 0]]
)  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_special_rows_are_pytorchs(name: str) -> None:
    ours, theirs = CALLS[name]
    for dtype in (torch.float32, torch.bfloat16):
        # PyTorch's squares of std are of float64 on the CPU; those of var and norms are not.
        x = (SPECIAL[SPECIAL.abs().amax(-1) != 3e38] if name == "std" else SPECIAL).to(dtype)
        torch.testing.assert_close(ours(x, -1), theirs(x, -1), equal_nan=True)
        one, none = x[:6, :1], torch.zeros(3, 0, dtype=dtype)
        torch.testing.assert_close(ours(one, -1), theirs(one, -1), equal_nan=True)
        if "inf" not in name:
            torch.testing.assert_close(ours(none, -1), theirs(none, -1), equal_nan=True)
    flat = torch.ones(2, 5, requires_grad=True)
    (dx,) = torch.autograd.grad(ours(flat * 0 + 2, -1).sum(), flat)  # where roots are 0
    assert not dx.isnan().any()


@pytest.mark.parametrize("correction", [1, 0, 2.5, 7, 20])
def test_variances_of_few_numbers_are_pytorchs(correction: float) -> None:
    x = torch.tensor([[1, 2, 4, 8, 9, 9, 7.0], [3] * 7], requires_grad=True)
    found = []
    for f in (dt.var, torch.var):
        y = f(x, -1, correction=correction)
        found.append((y, torch.autograd.grad(y.sum(), x)[0]))
    torch.testing.assert_close(found[0][0], found[1][0], equal_nan=True)
    if correction <= 7:  # beyond that PyTorch's gradient is that of a negative divisor, which its variance has not
        torch.testing.assert_close(found[0][1], found[1][1], equal_nan=True)
    else:
        assert found[0][1].tolist()[0] == [math.copysign(INF, v) for v in (-4.7, -3.7, -1.7, 2.2, 3.2, 3.2, 1.2)]


# ---- forms, and what may not change a bit ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_a_row_has_the_same_bits_in_every_batch_order_and_layout(name: str, dtype: Any) -> None:
    run = CALLS[name][0]
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(40, 333, generator=generator).to(dtype) * 3, torch.randn(40, generator=generator).to(dtype)

    def both(x: Any, dy: Any, dim: int = -1) -> tuple[Any, Any]:
        leaf = x.detach().requires_grad_()
        y = run(leaf, dim)
        return y.detach(), torch.autograd.grad(y, leaf, dy)[0]

    y, dx = both(x, dy)
    part, dpart = both(x[7:9], dy[7:9])
    assert same_bits(part, y[7:9])
    assert same_bits(dpart, dx[7:9])
    turned, dturned = both(x.t(), dy, 0)
    assert same_bits(turned, y)
    assert same_bits(dturned.t().contiguous(), dx)
    order = torch.randperm(333, generator=generator)
    mixed, dmixed = both(x[:, order], dy)
    assert same_bits(mixed, y)
    assert same_bits(dmixed, dx[:, order])
    assert same_bits(torch.func.vmap(run)(x), y)
    assert same_bits(torch.func.vmap(run, in_dims=1)(x.t()), y)


@pytest.mark.parametrize("op", reductions.OPS, ids=lambda op: op.name)
def test_registered_ops_keep_pytorchs_rules(op: Any) -> None:
    x = torch.randn(3, 9, requires_grad=True)
    settings = (1.0,) if op.name in ("var", "std") else ()
    torch.library.opcheck(getattr(torch.ops.detkern, op.name).default, (x, *settings))


def test_wrong_calls() -> None:
    with pytest.raises(ArgumentError, match=r"ord=3: there are norms of 0, 1, 2, inf and -inf"):
        dt.vector_norm(torch.ones(3), 3)
    for run in (dt.logsumexp, dt.var, dt.std, dt.vector_norm, CALLS["norm inf"][0], CALLS["norm 1"][0]):
        with pytest.raises(ShapeError, match="x has no dimensions"):
            run(torch.tensor(1.0))
        with pytest.raises(DTypeError, match=r"x is not a torch\.Tensor"):
            run([1.0])
        with pytest.raises(DTypeError, match="float64"):
            run(torch.ones(3, dtype=torch.float64))
        with pytest.raises(ShapeError, match="dim=1"):
            run(torch.ones(3), dim=1)
