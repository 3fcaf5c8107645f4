"""batch_invariant_mode and torch.compile: covered ops are opaque ops of detkern in the graph, with the eager bits."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits

from detkern.errors import ContractUnsupported
from detkern.torch import batch_invariant_mode
from detkern.torch.mode import mode

torch.manual_seed(0)
X, W, BIAS = torch.randn(6, 24), torch.randn(24, 24), torch.randn(24)
ATTENTION = torch.nn.MultiheadAttention(24, 2, batch_first=True).eval()


class Graphs:
    """A backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs.append(module)
        return module.forward

    def called(self) -> set[str]:
        return {str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _every(x: Any, w: Any, bias: Any) -> Any:
    h = torch.addmm(x, F.linear(x, w, bias), w, alpha=2, beta=0.5)
    h = torch.einsum("ij,kj->ik", h, w).softmax(-1) + h.mean(-1, keepdim=True) + h.sum((0, 1))
    return F.cross_entropy(ATTENTION(h[None], h[None], h[None])[0][0], torch.arange(x.shape[0]))


def test_the_graph_holds_detkerns_ops_and_no_product_or_row_sum_of_pytorchs() -> None:
    backend = Graphs()
    compiled = torch.compile(_every, backend=backend, fullgraph=True)
    plain = _every(X, W, BIAS)
    with torch.no_grad(), batch_invariant_mode(strict=True):
        assert same_bits(compiled(X, W, BIAS), _every(X, W, BIAS))
    called = backend.called()
    for op in ("linear", "matmul", "affine", "softmax", "log_softmax", "mean", "sum"):
        assert f"detkern.{op}.default" in called
    methods = {node.target for graph in backend.graphs for node in graph.graph.nodes if node.op == "call_method"}
    assert not methods & {"softmax", "mean", "sum", "matmul", "mm", "addmm"}
    for name in ("linear", "addmm", "softmax", "cross_entropy", "einsum", "bmm", "baddbmm", "matmul"):
        assert not any(name in op for op in called if not op.startswith("detkern.")), called
    with torch.no_grad():
        assert same_bits(_every(X, W, BIAS), plain)


def test_what_was_compiled_outside_is_compiled_anew_inside_and_the_other_way_round() -> None:
    def product(x: Any, w: Any) -> Any:
        return (x @ w).bfloat16() @ w.bfloat16()

    compiled = torch.compile(product, backend="eager", fullgraph=True)
    plain = product(X, W)
    for _ in range(2):
        assert same_bits(compiled(X, W), plain)
        for contract in ("fma", "tree"):
            with batch_invariant_mode(contract=contract):
                assert same_bits(compiled(X, W), product(X, W))
    assert same_bits(compiled(X, W), plain)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_compiled_functions_have_the_eager_bits_outside_of_the_mode_too(backend: str) -> None:
    def chain(x: Any, w: Any, bias: Any) -> Any:
        return torch.matmul(F.linear(x, w, bias).softmax(-1), w).log_softmax(-1)

    leaves = [x.clone().requires_grad_() for x in (X, W, BIAS)]
    dy = torch.randn(6, 24)
    with batch_invariant_mode(strict=True):
        eager = chain(*leaves)
        compiled = torch.compile(chain, backend=backend, fullgraph=True)(*leaves)
    assert same_bits(compiled, eager)
    wanted, got = torch.autograd.grad(eager, leaves, dy), torch.autograd.grad(compiled, leaves, dy)
    assert same_bits(got[2], wanted[2])
    assert same_bits(got[0], wanted[0])
    assert same_bits(got[1], wanted[1])


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: 1 - x,
        lambda x: 1 / x,
        lambda x: x**2,
        lambda x: 2.0**x,
        lambda x: x ** x[0],
        lambda x: x + x[0] * x,
        lambda x: x * (1 << x.detach().int()),
    ],
    ids=["rsub", "rdiv", "pow", "rpow", "pow of a tensor", "broadcast", "shift"],
)
def test_operators_compile_with_their_gradients(operator: Any) -> None:
    x, dy = (X.abs() + 0.5).requires_grad_(), torch.randn(X.shape)
    plain = operator(x)
    with batch_invariant_mode(strict=True):
        compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)(x)
    assert same_bits(compiled, plain)
    assert torch.allclose(*(torch.autograd.grad(y, x, dy)[0] for y in (compiled, plain)))


def test_a_mode_entered_in_the_compiled_function() -> None:
    def inside(x: Any, w: Any) -> Any:
        with batch_invariant_mode(contract="fma"):
            return x @ w

    with batch_invariant_mode(contract="fma"):
        wanted = X @ W
    assert same_bits(torch.compile(inside, backend="eager")(X, W), wanted)


@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_built_in_the_compiled_function(inside: bool) -> None:
    """The graph breaks at its parameters, and dynamo looks at each function that its initialisation calls."""

    def build(x: Any) -> tuple[Any, Any]:
        with batch_invariant_mode(contract="fma") if inside else contextlib.nullcontext():
            layer = torch.nn.Linear(24, 5)
            return layer, layer(x)

    with contextlib.nullcontext() if inside else batch_invariant_mode(contract="fma"):
        layer, y = torch.compile(build, backend="eager")(X)
    with batch_invariant_mode(contract="fma"):
        assert same_bits(y, layer(X))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_strict_raises_on_what_it_does_not_cover_and_else_it_is_said_once(fullgraph: bool) -> None:
    q = torch.randn(1, 2, 5, 8)
    calls = [lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1), lambda q: q.double() @ q.double().mT]
    if fullgraph:  # else the graph breaks, and it runs watched and covered
        calls.append(lambda q: torch.linalg.matrix_power(q[..., :5], 3))
    for call in calls:
        compiled = torch.compile(call, backend="eager", fullgraph=fullgraph)
        expected = torch._dynamo.exc.Unsupported if fullgraph else ContractUnsupported
        with batch_invariant_mode(strict=True), pytest.raises(expected):
            compiled(q)
        mode._said.clear()
        with batch_invariant_mode(), pytest.warns(UserWarning, match="batch_invariant_mode"):
            compiled(q)
        with batch_invariant_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(q)
