"""The registered ops and whatever goes through them: torch.compile, torch.export, autocast, torch.func, modes. The bits
are always those of the eager call."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from frameworks import same_bits, tensor

import detkern
from detkern import config
from detkern.vocabulary.dtypes import BF16, F16, F32

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import detkern.torch as dt
from detkern.torch.functions import gradients


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def mlp(device: str, dtype: Any = BF16, **options: Any) -> Any:
    """Two layers with a GELU between them; each call gives the same parameters."""
    layers = torch.nn.Sequential(torch.nn.Linear(48, 80), torch.nn.GELU(), torch.nn.Linear(80, 24))
    with torch.no_grad():
        for seed, parameter in enumerate(layers.parameters()):
            parameter.copy_(tensor("normal", F32, tuple(parameter.shape), 50 + seed) / 8)
    return dt.convert(layers.to(device, getattr(torch, dtype.name)), **options)


def forward_and_gradients(function: Any, model: Any, x: Any) -> list[Any]:
    leaves = [x, *model.parameters()]
    y = function(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]


class Watch(TorchDispatchMode):
    """Notes what reaches PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def all_same(left: list[Any], right: list[Any]) -> bool:
    return all(same_bits(x, y) for x, y in zip(left, right, strict=True))


OPCHECKS = {
    "linear": lambda d: (
        tensor("normal", BF16, (2, 5, 16), 1, d, True), tensor("normal", BF16, (8, 16), 2, d, True),
        tensor("normal", F32, (8,), 3, d, True), None, None, "mma16", torch.float32, None,
    ),
    "matmul": lambda d: (
        tensor("normal", F32, (3, 1, 4, 16), 1, d, True), tensor("normal", F32, (2, 16, 5), 2, d, True), "fma", None,
        None,
    ),
    "bias_gradient": lambda d: (tensor("normal", BF16, (3, 4, 16), 1, d, True), torch.float32, None),
    "matmul_accumulate_": lambda d: (
        tensor("normal", F32, (8, 5), 1, d), tensor("normal", BF16, (8, 16), 2, d),
        tensor("normal", BF16, (16, 5), 3, d),
        "mma16", None,
    ),
    "bias_gradient_accumulate_": lambda d: (tensor("normal", F32, (8,), 1, d), tensor("normal", BF16, (3, 8), 2, d),
        None),
}  # fmt: skip


def test_every_op_is_checked() -> None:
    assert sorted(OPCHECKS) == sorted(op.name for op in gradients.OPS)


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str, device: str) -> None:
    torch.library.opcheck(getattr(torch.ops.detkern, name).default, OPCHECKS[name](device))


@pytest.mark.parametrize("name", ["linear", "matmul"])
def test_the_op_and_the_way_past_it_give_the_same_bits(name: str, device: str) -> None:
    arguments = OPCHECKS[name](device)
    leaves = [x for x in arguments if isinstance(x, torch.Tensor)]
    by_op = getattr(torch.ops.detkern, name).default(*arguments)
    function, count = {"linear": (dt.linear, 3), "matmul": (dt.matmul, 2)}[name]
    contract, out_dtype, _ = arguments[-3:]
    past = function(*arguments[:count], contract=contract, out_dtype=out_dtype)
    dc = tensor("normal", F32, tuple(past.shape), 9, device)
    assert same_bits(by_op, past)
    assert "Generated" in type(by_op.grad_fn).__name__
    assert "Generated" not in type(past.grad_fn).__name__
    assert all_same(list(torch.autograd.grad(by_op, leaves, dc)), list(torch.autograd.grad(past, leaves, dc)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_mlp_has_the_bits_of_eager(backend: str, device: str) -> None:
    """fullgraph=True raises at any graph break.
    Inductor computes a GELU in other bits than eager PyTorch, but no ReLU."""
    model, x = mlp(device), tensor("normal", BF16, (2, 9, 48), 1, device, True)
    if backend == "inductor":
        model[1] = torch.nn.ReLU()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert all_same(forward_and_gradients(compiled, model, x), forward_and_gradients(model, model, x))


def test_compiled_with_a_dynamic_batch_has_the_bits_of_eager(device: str) -> None:
    model = mlp(device)
    model[1] = torch.nn.ReLU()
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    counted = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    for m in (2, 1, 3, 16, 17, 100, 256, 513):
        x = tensor("normal", BF16, (m, 48), m, device, True)
        assert all_same(forward_and_gradients(compiled, model, x), forward_and_gradients(model, model, x))
        counted(x)
    assert len(graphs) <= 2  # one for M = 1, which PyTorch always specializes, one for all others


def test_matmul_and_bmm_compile(device: str) -> None:
    a, b = tensor("normal", F32, (3, 4, 16), 1, device, True), tensor("normal", F32, (16, 5), 2, device, True)
    c = tensor("normal", F32, (3, 5, 6), 3, device, True)

    def chain(a: Any, b: Any, c: Any) -> Any:
        return dt.bmm(dt.matmul(a, b), c)

    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    results = []
    for function in (chain, compiled):
        y = function(a, b, c)
        results.append([y, *torch.autograd.grad(y.sum(), (a, b, c))])
    assert all_same(*results)


def test_a_compiled_function_follows_the_process_default(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen into the graph, and the graph is made anew when the default has changed."""
    x, weight = tensor("normal", BF16, (4, 640), 1, device), tensor("normal", BF16, (8, 640), 2, device)
    for function in (lambda: dt.linear(x, weight), lambda: dt.matmul(x, weight.T)):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        seen = []
        for contract in (None, "tree", {"bf16": "fma"}, None):
            monkeypatch.setattr(config, "contract", contract)
            seen.append(compiled())
            assert same_bits(seen[-1], function())
        assert not same_bits(seen[0], seen[1])
        assert same_bits(seen[0], seen[3])


def test_compiled_accumulation_has_the_bits_of_eager(device: str) -> None:
    gathered = []
    for compile_it in (False, True):
        model = mlp(device, accumulate=True)
        model[1] = torch.nn.ReLU()
        function = torch.compile(model, fullgraph=True, backend="aot_eager") if compile_it else model
        dt.zero_main_grads(model)
        for seed in (1, 2):
            function(tensor("normal", BF16, (16, 48), seed, device, True)).float().square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        gathered.append([parameter.main_grad for parameter in model.parameters()])
    assert all_same(*gathered)
    assert all(bool(main_grad.any()) for main_grad in gathered[0])


def test_compile_says_what_is_wrong() -> None:
    compiled = torch.compile(dt.linear, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="do not fit"):
        compiled(torch.ones(4, 8), torch.ones(6, 7))
    with pytest.raises(Exception, match="cast weight"):
        compiled(torch.ones(4, 8), torch.ones(6, 8).half())
    with pytest.raises(Exception, match=r"bias has shape \[5\]"):
        compiled(torch.ones(4, 8), torch.ones(6, 8), torch.ones(5))


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_ops(strict: bool, device: str) -> None:
    model, x = mlp(device), tensor("normal", BF16, (5, 48), 1, device)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("M", max=600)},), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if "detkern" in str(node.target)]
    assert targets == ["detkern.linear.default"] * 2
    assert "mma16" in str(program.graph)  # frozen into the graph
    for m in (2, 5, 301):
        x = tensor("normal", BF16, (m, 48), m, device)
        assert same_bits(program.module()(x), model(x))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_is_that_of_torch_linear(compiled: bool, device: str) -> None:
    """Everything is cast to autocast's type, bias too; parameters get gradients of their own type."""
    layer = torch.nn.Linear(48, 24).to(device)
    ours = dt.Linear.from_torch(layer)
    x = tensor("normal", F32, (5, 48), 1, device, True)
    cast = [value.detach().bfloat16() for value in (x, layer.weight, layer.bias)]
    function = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    with torch.autocast(device, dtype=torch.bfloat16):
        y = function(x)
        assert y.dtype == layer(x).dtype == torch.bfloat16
        assert dt.linear(x, layer.weight, out_dtype=torch.float32).dtype == torch.float32
        assert dt.matmul(x, layer.weight.T).dtype == torch.bfloat16
        with torch.autocast(device, enabled=False):
            assert ours(x).dtype == torch.float32
    assert same_bits(y, dt.linear(*cast))
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    by_op = torch.ops.detkern.linear.default
    with torch.autocast(device, dtype=torch.float16):
        assert by_op(x, layer.weight, layer.bias).dtype == torch.float16
        double = torch.ones(2, 8, device=device, dtype=torch.float64)
        with pytest.raises(detkern.DTypeError):
            dt.linear(double, double)


def test_a_backward_inside_of_autocast_keeps_its_types(device: str) -> None:
    """Past the dispatcher, and through the ops, as in a mode."""
    x, weight = tensor("normal", F32, (5, 48), 1, device, True), tensor("normal", F32, (24, 48), 2, device, True)
    expected = list(torch.autograd.grad(dt.linear(x, weight).sum(), (x, weight)))
    expected_product = list(torch.autograd.grad(dt.matmul(x, weight.T).sum(), (x, weight)))
    for function in (dt.linear, torch.ops.detkern.linear.default):
        for mode in (contextlib.nullcontext(), Watch()):
            y, product = function(x, weight), dt.matmul(x, weight.T)
            with torch.autocast(device, dtype=torch.bfloat16), mode:
                assert all_same(list(torch.autograd.grad(y.sum(), (x, weight))), expected)
                assert all_same(list(torch.autograd.grad(product.sum(), (x, weight))), expected_product)


@pytest.mark.parametrize(
    "dims", [(0, None, None), (1, None, None), (None, 0, None), (0, 0, None), (0, 0, 0), (2, 1, 0)]
)
def test_vmap_has_the_bits_of_a_loop(dims: tuple[int | None, ...], device: str) -> None:
    shapes = [(5, 16), (8, 16), (8,)]
    arguments = []
    for seed, (shape, dim) in enumerate(zip(shapes, dims, strict=True)):
        full = shape if dim is None else (*shape[:dim], 3, *shape[dim:])
        arguments.append(tensor("normal", BF16, full, seed, device))
    got = torch.func.vmap(dt.linear, in_dims=dims)(*arguments)
    by_op = torch.func.vmap(torch.ops.detkern.linear.default, in_dims=dims)(*arguments)
    for i in range(3):
        one = [x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)]
        assert same_bits(got[i], dt.linear(*one))
        assert same_bits(by_op[i], dt.linear(*one))


MATMULS = [
    ((4, 16), (16, 5)),
    ((16,), (16, 5)),
    ((4, 16), (16,)),
    ((16,), (16,)),
    ((2, 4, 16), (16, 5)),
    ((16,), (2, 16, 5)),
]


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (1, 0)])
@pytest.mark.parametrize(("a_shape", "b_shape"), MATMULS, ids=str)
def test_vmap_of_matmul_has_the_bits_of_a_loop(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], dims: tuple[int | None, int | None]
) -> None:
    arguments = []
    for seed, (shape, dim) in enumerate(((a_shape, dims[0]), (b_shape, dims[1]))):
        full = shape if dim is None else (*shape[:dim], 3, *shape[dim:])
        arguments.append(tensor("normal", F32, full, seed))
    got = torch.func.vmap(dt.matmul, in_dims=dims)(*arguments)
    by_op = torch.func.vmap(torch.ops.detkern.matmul.default, in_dims=dims)(*arguments)
    for i in range(3):
        one = dt.matmul(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)))
        assert same_bits(got[i], one)
        assert same_bits(by_op[i], one)


def test_torch_func_transforms(device: str) -> None:
    x = tensor("normal", F32, (3, 5, 16), 1, device)
    weight, bias = tensor("normal", F32, (8, 16), 2, device), tensor("normal", F32, (8,), 3, device)

    def loss(weight: Any, bias: Any, x: Any) -> Any:
        return dt.linear(x, weight, bias).pow(3).sum()

    leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves, x[0]), leaves)
    assert all_same(list(torch.func.grad(loss, argnums=(0, 1))(weight, bias, x[0])), list(expected))
    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, None, 0))(weight, bias, x)
    for i in range(3):
        one = torch.func.grad(loss, argnums=(0, 1))(weight, bias, x[i])
        assert all_same([part[i] for part in per_sample], list(one))

    reference = torch.func.hessian(lambda b: torch.nn.functional.linear(x[0].double(), weight.double(), b).pow(3).sum())
    hessian = torch.func.hessian(lambda b: loss(weight, b, x[0]))(bias)
    assert torch.allclose(hessian.double(), reference(bias.double()), rtol=1e-4, atol=1e-3)


def test_forward_mode(device: str) -> None:
    """A tangent is never dropped: the functions have one, the bare op refuses."""
    x, weight, bias = (tensor("normal", F32, shape, 1, device) for shape in ((5, 16), (8, 16), (8,)))
    tangents = tuple(tensor("normal", F32, tuple(t.shape), 7, device) for t in (x, weight, bias))
    y, tangent = torch.func.jvp(dt.linear, (x, weight, bias), tangents)
    expected = torch.func.jvp(
        torch.nn.functional.linear, tuple(t.double() for t in (x, weight, bias)), tuple(t.double() for t in tangents)
    )[1]
    assert same_bits(y, dt.linear(x, weight, bias))
    assert torch.allclose(tangent.double(), expected, atol=1e-4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangents[0])
        for function in (lambda v: dt.linear(v, weight), lambda v: dt.matmul(v, weight.T)):
            got = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
            assert same_bits(got, dt.linear(tangents[0], weight))
        with pytest.raises(detkern.ArgumentError, match="no forward-mode derivative"):
            torch.ops.detkern.linear.default(dual, weight)
    with pytest.raises(Exception, match="no forward-mode derivative"):
        torch.compile(
            lambda: torch.func.jvp(lambda v: dt.linear(v, weight), (x,), (x,)), fullgraph=True, backend="aot_eager"
        )()


def test_modes_and_subclasses_see_the_op(device: str) -> None:
    x, weight = tensor("normal", F32, (4, 16), 1, device, True), tensor("normal", F32, (8, 16), 2, device, True)
    expected = dt.linear(x, weight)
    with Watch() as mode:
        y = dt.linear(x, weight)
    assert mode.seen == ["detkern.linear.default"]
    assert same_bits(y, expected)

    called = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    with Listen():
        assert same_bits(dt.linear(x, weight), expected)
    assert "detkern.linear.default" in called

    class Named(torch.Tensor):
        pass

    named = dt.linear(x.detach().as_subclass(Named), weight)
    assert same_bits(named.detach().as_subclass(torch.Tensor), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_jit_trace_keeps_the_op(device: str) -> None:
    """Also where the same call is ready: its result must not become a constant of the trace."""
    x, weight = tensor("normal", F32, (4, 16), 1, device), tensor("normal", F32, (8, 16), 2, device)
    dt.linear(x, weight)
    traced = torch.jit.trace(dt.linear, (x, weight))
    assert "detkern::linear" in str(traced.graph)
    other = tensor("normal", F32, (5, 16), 3, device)
    assert same_bits(traced(other, weight), dt.linear(other, weight))


def test_fake_and_meta_tensors_give_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = dt.linear(torch.empty(2, 4, 16, device="meta"), torch.empty(8, 16, device="meta"))
    assert (meta.shape, meta.device.type) == ((2, 4, 8), "meta")
    with FakeTensorMode() as mode:
        x, weight = torch.empty(4, 16, dtype=torch.bfloat16), torch.empty(8, 16, dtype=torch.bfloat16)
        y = dt.linear(x, weight, out_dtype=torch.float32)
        assert y.fake_mode is mode
        assert (y.shape, y.dtype) == ((4, 8), torch.float32)
        for a, b in (((16,), (16,)), ((2, 4, 16), (16,)), ((16,), (2, 16, 3)), ((2, 1, 4, 16), (3, 16, 5))):
            wanted = torch.matmul(torch.empty(a), torch.empty(b)).shape
            assert dt.matmul(torch.empty(a), torch.empty(b)).shape == wanted
        with pytest.raises(detkern.ShapeError):
            dt.matmul(torch.empty(4, 16), torch.empty(15, 3))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_threads_share_what_is_ready(dtype: Any, device: str) -> None:
    x, weight = tensor("normal", dtype, (9, 48), 1, device, True), tensor("normal", dtype, (24, 48), 2, device, True)
    expected = [dt.linear(x, weight), *torch.autograd.grad(dt.linear(x, weight).sum(), (x, weight))]
    wrong = []

    def work() -> None:
        for _ in range(20):
            y = dt.linear(x, weight)
            if not all_same([y, *torch.autograd.grad(y.sum(), (x, weight))], expected):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
