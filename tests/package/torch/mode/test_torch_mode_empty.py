"""batch_invariant_mode on sizes of zero: shapes, types, values,
gradients and tangents as PyTorch has them without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F

import detkern.torch as dt
from detkern.torch import batch_invariant_mode

SIZES = {"b": 2, "m": 4, "k": 5, "n": 3, "h": 6, "1": 1}

# The shape of each operand, a letter a dimension ("-" for none), and what is called.
CASES: dict[str, tuple[str, Callable[..., Any]]] = {
    "mm": ("mk kn", torch.mm),
    "bmm": ("bmk bkn", torch.bmm),
    "mv": ("mk k", torch.mv),
    "dot": ("k k", torch.dot),
    "vdot": ("k k", torch.vdot),
    "matmul of vectors": ("k k", torch.matmul),
    "matmul of a vector and a stack": ("k bkn", torch.matmul),
    "matmul of a stack and a matrix": ("bmk kn", torch.matmul),
    "matmul of a matrix and a stack": ("mk bkn", torch.matmul),
    "matmul that broadcasts": ("hbmk b1kn", lambda x, y: x @ y.transpose(1, 0)),
    "linear": ("bmk nk", F.linear),
    "linear with bias": ("bmk nk n", F.linear),
    "linear with a bias of rows": ("mk nk m1", F.linear),
    "addmm": ("mn mk kn", lambda c, a, b: torch.addmm(c, a, b, alpha=2, beta=0.5)),
    "addmm with a bias": ("n mk kn", torch.addmm),
    "addmm with a column": ("m1 mk kn", lambda c, a, b: torch.addmm(c, a, b, beta=0.5)),
    "addmm with a number": ("- mk kn", lambda c, a, b: torch.addmm(c, a, b, beta=0.5)),
    "addmm of no beta": ("mn mk kn", lambda c, a, b: torch.addmm(c, a, b, alpha=2, beta=0)),
    "addmm of no alpha": ("mn mk kn", lambda c, a, b: torch.addmm(c, a, b, alpha=0)),
    "addmv": ("m mk k", lambda c, a, b: torch.addmv(c, a, b, alpha=2)),
    "baddbmm": ("bmn bmk bkn", lambda c, a, b: torch.baddbmm(c, a, b, alpha=2)),
    "baddbmm with rows": ("1n bmk bkn", lambda c, a, b: torch.baddbmm(c, a, b, alpha=2)),
    "addbmm": ("mn bmk bkn", lambda c, a, b: torch.addbmm(c, a, b, alpha=2)),
    "inner": ("mk bnk", torch.inner),
    "tensordot": ("bmk bkn", lambda a, b: torch.tensordot(a, b, dims=([0, 2], [0, 1]))),
    "vecdot": ("mk k", torch.linalg.vecdot),
    "multi_dot": ("mk kn nh", lambda *x: torch.linalg.multi_dot(x)),
    "einsum of a stack": ("bmk bkn", lambda a, b: torch.einsum("bmk,bkn->bmn", a, b)),
    "einsum over two": ("bmk bkn", lambda a, b: torch.einsum("bmk,bkn->mn", a, b)),
    "einsum that sums before": ("bmk kn", lambda a, b: torch.einsum("bmk,kn->n", a, b)),
    "einsum of three": ("mk kn hn", lambda *x: torch.einsum("mk,kn,hn->mh", *x)),
    "einsum without contraction": ("mk mn", lambda a, b: torch.einsum("mk,mn->mkn", a, b)),
    "sum of all": ("mkn", torch.sum),
    "sum of the last": ("mk", lambda x: x.sum(-1)),
    "sum of two": ("mkn", lambda x: x.sum((0, 2), keepdim=True)),
    "mean of all": ("mk", torch.mean),
    "mean of the last": ("mk", lambda x: x.mean(-1, keepdim=True)),
    "mean of the first": ("mk", lambda x: x.mean(0)),
    "centred": ("mk", lambda x: x - x.mean(-1, keepdim=True)),
    "softmax of the last": ("mk", lambda x: x.softmax(-1)),
    "softmax of the first": ("mk", lambda x: x.softmax(0)),
    "log_softmax of the last": ("mk", lambda x: x.log_softmax(-1)),
    "rms_norm": ("mh h", lambda x, g: F.rms_norm(x, g.shape, g)),
    "rms_norm over two": ("bmh", lambda x: F.rms_norm(x, x.shape[1:], eps=1e-5)),
    "cross_entropy of rows": ("mn", lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long).fill_(-100))),
    "cross_entropy of shares": ("mn mn", F.cross_entropy),
    "cross_entropy, smoothed": ("mn mn n", lambda x, t, w: F.cross_entropy(x, t.exp(), w.exp(), label_smoothing=0.1)),
    "cross_entropy, summed": ("mnb mnb", lambda x, t: F.cross_entropy(x, t, reduction="sum")),
    "times a gain": ("mk k", torch.mul),
    "times a column": ("mk m1", lambda x, s: x * s),
    "plus a number": ("mk -", torch.add),
    "less a middle": ("bmk b1k", torch.sub),
    "divided in place": ("mk k", lambda x, s: x.clone().div_(s.exp())),
    "from the right": ("k mk", lambda x, y: x.__rsub__(y)),
    "where": ("mk k", lambda x, y: torch.where(x > 0, x, y)),
    "maximum": ("mk m1", torch.maximum),
    "pow": ("mk k", lambda x, y: torch.pow(x.exp(), y)),
    "addcmul": ("k mk m1", torch.addcmul),
    "lerp": ("k mk m1", torch.lerp),
    "expand": ("b1k", lambda x: x.expand(-1, 7, -1)),
    "expand_as": ("k mk", lambda x, y: x.expand_as(y) * 1),
    "broadcast_to": ("1k", lambda x: torch.broadcast_to(x, (3, *x.shape))),
    "grouped keys": ("bnk", lambda x: x[:, :, None].expand(*x.shape[:2], 2, x.shape[2]).flatten(1, 2)),
    "grouped keys of nothing": ("bnk", lambda x: x[:, :, None].expand(*x.shape[:2], 0, x.shape[2]).flatten(1, 2)),
    "silu": ("mk", F.silu),
    "gelu": ("mk", F.gelu),
    "rsqrt": ("mk", lambda x: torch.rsqrt(x.exp())),
    "matrix_power": ("bkk", lambda x: torch.linalg.matrix_power(x, 3)),
    "logsumexp": ("mk", lambda x: torch.logsumexp(x, -1)),
    "var": ("mk", lambda x: torch.var(x, -1)),
    "layer_norm": ("mh h h", lambda x, g, c: F.layer_norm(x, g.shape, g, c)),
}  # fmt: skip
FEW = (
    "addmm",
    "addbmm",
    "rms_norm",
    "centred",
    "times a gain",
    "grouped keys",
    "cross_entropy of shares",
    "einsum over two",
)


def _operands(shapes: str, empty: tuple[str, ...], dtype: Any, device: str = "cpu") -> list[Any]:
    sizes = {**SIZES, **dict.fromkeys(empty, 0)}
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn([sizes[letter] for letter in shape.replace("-", "")], generator=generator).to(device, dtype)
        for shape in shapes.split()
    ]


def _empties(shapes: str) -> list[tuple[str, ...]]:
    letters = sorted(set(shapes) - set(" -1"))
    return [
        x for count in (1, 2, len(letters)) for x in itertools.combinations(letters, count) if len(letters) >= count
    ]


def _backward(function: Callable[..., Any], operands: list[Any]) -> list[Any]:
    leaves = [x.clone().requires_grad_() for x in operands]
    y = function(*leaves)
    dy = (
        torch.ones_like(y)
        if not y.numel()
        else torch.linspace(-1, 1, y.numel(), device=y.device).to(y.dtype).view(y.shape)
    )
    return [y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)]


def _tangent(function: Callable[..., Any], operands: list[Any]) -> list[Any]:
    return list(torch.func.jvp(function, tuple(operands), tuple(x.cos() for x in operands)))


def _answer(how: Callable[..., Any], function: Callable[..., Any], operands: list[Any]) -> Any:
    """What a call gives: its tensors, or the type of what it raises."""
    try:
        return how(function, operands)
    except Exception as error:  # noqa: BLE001  whatever PyTorch raises
        return type(error)


def _agree(got: Any, wanted: Any, tolerance: dict[str, float]) -> None:
    if isinstance(wanted, type):
        assert got is wanted
        return
    assert isinstance(got, list), got
    for mine, theirs in zip(got, wanted, strict=True):
        if theirs is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, theirs, equal_nan=True, **tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_every_size_of_zero_is_answered_as_by_pytorch(name: str, dtype: Any) -> None:
    shapes, function = CASES[name]
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.1, "atol": 0.1}
    for empty in _empties(shapes):
        operands = _operands(shapes, empty, dtype)
        wanted = _answer(_backward, function, operands)
        with batch_invariant_mode():
            _agree(_answer(_backward, function, operands), wanted, tolerance)
        wanted = _answer(_tangent, function, operands)
        # Beside a mean of nothing, NaN, or a logsumexp of nothing, -inf, PyTorch's tangent is NaN or 0, as the function
        # has it.
        if dtype is torch.float32 and not isinstance(wanted, type) and wanted[0].isfinite().all():
            with batch_invariant_mode():
                _agree(_answer(_tangent, function, operands), wanted, tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_every_size_of_zero_is_answered_so_when_compiled(name: str) -> None:
    shapes, function = CASES[name]
    for empty in _empties(shapes)[:1]:
        operands = _operands(shapes, empty, torch.float32)
        wanted = _answer(_backward, function, operands)
        torch._dynamo.reset()
        with batch_invariant_mode(strict=True):
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            _agree(_answer(_backward, compiled, operands), wanted, {"rtol": 1e-3, "atol": 1e-4})


@pytest.mark.parametrize("name", ["sum", "mean", "mean_square", "softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0), (0,), (3, 0, 2)])
def test_row_functions_differentiate_what_is_empty(name: str, shape: tuple[int, ...]) -> None:
    function = getattr(dt, name)
    reference = {
        "sum": lambda x: x.sum(-1), "mean": lambda x: x.mean(-1), "mean_square": lambda x: x.square().mean(-1),
        "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1),
    }[name]  # fmt: skip
    x = torch.randn(shape)
    _agree(_backward(function, [x]), _backward(reference, [x]), {"rtol": 1e-3, "atol": 1e-4})
    _agree(_tangent(function, [x]), _tangent(reference, [x]), {"rtol": 1e-3, "atol": 1e-4})
    found = []
    for f in (function, reference):
        leaf = x.clone().requires_grad_()
        slope = torch.ones(f(x).shape).requires_grad_()
        (dx,) = torch.autograd.grad(f(leaf), leaf, slope, create_graph=True)
        (twice,) = torch.autograd.grad(dx, slope, torch.ones_like(dx))
        found.append([dx.detach(), twice])
    _agree(*found, {"rtol": 1e-3, "atol": 1e-4})


X, W, C = torch.randn(4, 5), torch.randn(3, 5), torch.randn(3)
STACKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "linear over x": lambda x, w, c: F.linear(x, W, C),
    "linear over weights": lambda x, w, c: F.linear(X, w),
    "linear over biases": lambda x, w, c: F.linear(X, W, c),
    "linear over all": F.linear,
    "matmul": lambda x, w, c: x @ w.t(),
    "addmm": lambda x, w, c: torch.addmm(c, X, w.t(), alpha=2),
    "softmax": lambda x, w, c: x.softmax(-1),
    "rms_norm": lambda x, w, c: F.rms_norm(x, (5,), w[0]),
    "gradients": lambda x, w, c: torch.func.grad(lambda c: F.linear(X, w, c).softmax(-1).square().sum())(c),
}


@pytest.mark.parametrize("name", STACKS)
def test_vmap_over_nothing(name: str) -> None:
    function, stacks = STACKS[name], [torch.randn(0, *x.shape) for x in (X, W, C)]
    wanted = torch.func.vmap(function)(*stacks)
    loss = lambda *stacks: torch.func.vmap(function)(*stacks).sum()
    slopes = torch.func.grad(loss, (0, 1, 2))(*stacks)
    with batch_invariant_mode(strict=True):
        _agree([torch.func.vmap(function)(*stacks)], [wanted], {})
        _agree(list(torch.func.grad(loss, (0, 1, 2))(*stacks)), list(slopes), {})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_every_size_of_zero_is_answered_so_on_a_gpu(name: str) -> None:
    shapes, function = CASES[name]
    for empty in _empties(shapes):
        operands = _operands(shapes, empty, torch.float32, "cuda")
        wanted = _answer(_backward, function, operands)
        with batch_invariant_mode(strict=True):
            _agree(_answer(_backward, function, operands), wanted, {"rtol": 1e-3, "atol": 1e-4})
