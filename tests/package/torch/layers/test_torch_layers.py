"""detkern.torch.Linear, convert and revert: drop-ins for torch.nn.Linear, in both directions."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from frameworks import from_torch, same, same_bits, tensor

import detkern
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary.contracts import TREE
from detkern.vocabulary.dtypes import BF16, F32

torch = pytest.importorskip("torch", reason="torch is not installed")
import detkern.torch as dt


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.ReLU(),
        torch.nn.ModuleDict({"router": torch.nn.Linear(16, 4, bias=False), "up": torch.nn.Linear(16, 8)}),
        torch.nn.Linear(8, 3),
    )


def test_linear_is_a_torch_linear() -> None:
    torch.manual_seed(3)
    layer = dt.Linear(8, 6, contract="tree", dtype=torch.bfloat16)
    torch.manual_seed(3)
    theirs = torch.nn.Linear(8, 6, dtype=torch.bfloat16)
    assert isinstance(layer, torch.nn.Linear)
    assert same_bits(layer.weight, theirs.weight)
    assert same_bits(layer.bias, theirs.bias)
    x = tensor("normal", BF16, (5, 8), 1)
    expected = numpy_replay.gemm(TREE, from_torch(x), from_torch(layer.weight.T), bias=from_torch(layer.bias))
    assert same(from_torch(layer(x)), expected)
    assert layer(x.reshape(1, 5, 1, 8)).shape == (1, 5, 1, 6)
    assert dt.Linear(8, 6, False).bias is None
    assert dt.Linear(8, 6, dtype=torch.bfloat16, out_dtype="float32")(x).dtype == torch.float32


def test_from_torch_shares_the_parameters() -> None:
    theirs = torch.nn.Linear(8, 6).eval()
    ours = dt.Linear.from_torch(theirs, contract="fma")
    assert ours.weight is theirs.weight
    assert ours.bias is theirs.bias
    assert (ours.training, ours.contract) == (False, "fma")
    assert dt.Linear.from_torch(torch.nn.Linear(8, 6, bias=False)).bias is None


class Doubled(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Inherits(torch.nn.Linear):
    pass


def parametrized() -> torch.nn.Linear:
    layer = torch.nn.Linear(8, 6)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Tanh())
    return layer


def hooked() -> torch.nn.Linear:
    layer = torch.nn.Linear(8, 6)
    layer.forward = lambda input: torch.nn.functional.linear(input * 2, layer.weight)
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.nn.Conv1d(8, 6, 1),
            r"layer is not a torch\.nn\.Linear but Conv1d; build a detkern\.torch\.Linear",
        ),
        (lambda: "linear", r"layer is not a torch\.nn\.Linear but str"),
        (
            lambda: Doubled(8, 6),
            r"layer, a Doubled, has a forward of its own, .*: call detkern\.torch\.linear\(x, layer",
        ),
        (hooked, r"layer, a Linear, has a forward of its own"),
        (parametrized, r"layer\.weight is a Tensor and no plain parameter.*: detkern\.torch\.convert keeps"),
        (lambda: torch.nn.LazyLinear(6), r"layer\.weight has no shape yet: call the LazyLinear once"),
    ],
    ids=["conv", "str", "subclass", "instance", "parametrized", "lazy"],
)
def test_from_torch_refuses_what_does_more(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(detkern.ArgumentError, match=message):
        dt.Linear.from_torch(make())


def test_from_torch_takes_a_subclass_that_inherits_forward() -> None:
    theirs = Inherits(8, 6)
    ours = dt.Linear.from_torch(theirs)
    assert type(ours) is dt.Linear
    assert ours.weight is theirs.weight
    assert dt.Linear.from_torch(ours, contract="fma").weight is theirs.weight


def traced(net: Any, x: Any, way: str) -> Any:
    if way == "fx":
        return torch.fx.symbolic_trace(net)
    if way == "jit":
        return torch.jit.trace(net, x)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(net, x), file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("way", ["fx", "jit", "saved"])
def test_traced_models_have_the_bits_of_the_contract(way: str, device: str) -> None:
    net = dt.convert(
        torch.nn.Sequential(torch.nn.Linear(200, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)), contract="fma"
    )
    net = net.to(device)
    made = traced(net, tensor("normal", F32, (4, 200), 2, device), way)
    results = []
    for model in (net, made):
        model.zero_grad()
        x = tensor("normal", F32, (5, 200), 1, device, True)
        y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(parameter.grad.clone() for parameter in model.parameters())])
    assert len(results[1]) == 6
    assert all(map(same_bits, *results))
    assert device != "cpu" or not same_bits(results[1][0], dt.revert(net)(x))


def test_functions_are_traced_by_fx(device: str) -> None:
    def function(a: Any, b: Any) -> Any:
        return dt.bmm(a, b, contract="fma") + dt.matmul(a, b, contract="fma")

    a, b = tensor("normal", F32, (2, 3, 20), 1, device), tensor("normal", F32, (2, 20, 4), 2, device)
    made = torch.fx.symbolic_trace(function)
    assert same_bits(made(a, b), function(a, b))
    assert [node.target for node in made.graph.nodes if node.op == "call_function"][:2] == [dt.bmm, dt.matmul]


def test_traced_models_gather_gradients_or_say_why_not() -> None:
    net, x = dt.convert(model(), accumulate=True)[0], tensor("normal", F32, (16, 8), 1)
    dt.zero_main_grads(net)
    torch.fx.symbolic_trace(net)(x).sum().backward()
    assert net.weight.main_grad.any()
    assert net.weight.grad is None
    with pytest.raises(detkern.ArgumentError, match=r"inside of torch\.jit\.trace: .* without accumulate"):
        torch.jit.trace(net, x)


def test_a_model_cannot_be_scripted_and_the_error_says_what_works() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU())
    dt.convert(net)
    with pytest.raises(
        detkern.ArgumentError, match=r"torch\.jit\.script compiles .*: use torch\.jit\.trace, .*revert\(model\)"
    ):
        torch.jit.script(net)
    x = tensor("normal", F32, (5, 8), 1)
    assert same_bits(torch.jit.script(dt.revert(net))(x), net(x))


def test_state_dicts_interchange_both_ways() -> None:
    theirs, ours = torch.nn.Linear(8, 6), dt.Linear(8, 6, contract="fma", out_dtype=torch.bfloat16)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight", "bias"]
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert same_bits(ours.weight, theirs.weight)
    torch.nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert same_bits(ours.weight, theirs.weight)
    assert ours.contract == "fma"


def test_the_repr_shows_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(dt.Linear(8, 6, contract="tree")) == "Linear(in_features=8, out_features=6, bias=True, contract=tree)"
    assert "contract=fma (default)" in repr(dt.Linear(8, 6))
    assert "contract=mma16 (default)" in repr(dt.Linear(8, 6, dtype=torch.float16))
    monkeypatch.setattr(detkern.config, "contract", "tree")
    assert "contract=tree (default)" in repr(dt.Linear(8, 6, dtype=torch.float16))
    text = repr(dt.Linear(8, 6, False, out_dtype="f32", accumulate=True, backend="cpu"))
    assert text.endswith("bias=False, contract=fma (default), out_dtype=torch.float32, accumulate=True, backend=cpu)")
    assert "contract=default" in repr(dt.Linear(8, 6, device="meta"))


def test_copies_and_pickles_keep_the_settings() -> None:
    layer = dt.Linear(8, 6, contract="fma", out_dtype=torch.float32)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert (other.contract, other.out_dtype, other.accumulate) == ("fma", torch.float32, False)
        assert same_bits(other.weight, layer.weight)


def test_convert_and_revert_in_place() -> None:
    net = model()
    plain = copy.deepcopy(net)
    layers, parameters = list(net.modules()), list(net.parameters())
    calls = []
    handle = net[0].register_forward_hook(lambda *_: calls.append("hook"))
    assert dt.convert(net, contract="fma") is net
    assert all(left is right for left, right in zip(net.modules(), layers, strict=True))
    assert all(left is right for left, right in zip(net.parameters(), parameters, strict=True))
    assert [type(layer) for layer in net.modules()].count(dt.Linear) == 4
    assert all(layer.contract == "fma" for layer in net.modules() if isinstance(layer, dt.Linear))
    x = tensor("normal", F32, (5, 8), 1)
    assert same_bits(net[0](x), detkern.torch.linear(x, net[0].weight, net[0].bias, contract="fma"))
    assert calls == ["hook"]
    handle.remove()
    assert dt.revert(net) is net
    assert [type(layer) for layer in net.modules()].count(torch.nn.Linear) == 4
    assert repr(net) == repr(plain)
    assert net[0].__dict__.keys() == plain[0].__dict__.keys()
    assert same_bits(net[0](x), plain[0](x))
    assert calls == ["hook"]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ("3", ["3"]),
        (["2.router", "0"], ["0", "2.router"]),
        ("*.router", ["2.router"]),
        ("2.*", ["2.router", "2.up"]),
        (lambda name, layer: layer.bias is None, ["2.router"]),
    ],
    ids=lambda value: "a function" if callable(value) else str(value),
)
def test_what_is_skipped_stays(skip: object, left: list[str]) -> None:
    net = dt.convert(model(), skip=skip)
    assert [name for name, layer in net.named_modules() if type(layer) is torch.nn.Linear] == left
    dt.convert(net)
    dt.revert(net, skip=skip)
    assert [name for name, layer in net.named_modules() if type(layer) is dt.Linear] == left


def test_convert_of_odd_modules() -> None:
    alone = torch.nn.Linear(8, 6)
    assert type(dt.convert(alone)) is dt.Linear
    assert type(dt.revert(alone)) is torch.nn.Linear
    tied = torch.nn.ModuleDict({"a": alone, "b": alone})
    dt.convert(tied)
    assert tied["a"] is tied["b"]
    dt.revert(tied)
    dt.convert(tied, skip="b")
    assert type(alone) is torch.nn.Linear

    class Mine(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    with pytest.warns(UserWarning, match="the module itself: Mine has a forward of its own"):
        assert type(dt.convert(Mine(8, 6))) is Mine


def test_wrong_arguments_change_nothing() -> None:
    net = model()
    with pytest.raises(
        detkern.ArgumentError, match=r"skip='head' is the name of no Linear here; there are '0', '2\.router'"
    ):
        dt.convert(net, skip=["0", "head"])
    with pytest.raises(detkern.ArgumentError, match=r"skip=3 is not a name"):
        dt.convert(net, skip=3)  # type: ignore[arg-type]
    for change in (dt.convert, dt.revert):
        with pytest.raises(detkern.ArgumentError, match=r"module is not a torch\.nn\.Module but list"):
            change([net])  # type: ignore[arg-type]
    with pytest.raises(detkern.ContractUnsupported, match="does not exist"):
        dt.convert(net, contract="exact")
    with pytest.raises(detkern.DTypeError):
        dt.convert(net, out_dtype="int8")
    assert not any(isinstance(layer, dt.Linear) for layer in net.modules())
    with pytest.raises(detkern.ContractUnsupported):
        dt.Linear(8, 6, contract="exact")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_detkern_torch_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys, torch, detkern; print('detkern.torch' in sys.modules)\n"
        "import detkern.torch.functions.gradients; print(torch.ops.detkern.linear)\n"
        "print(sorted({'jax', 'cupy', 'triton', 'torch._dynamo'} & {*sys.modules}))"
    )
    assert run(code).splitlines() == ["False", "detkern.linear", "[]"]


def test_without_torch_the_import_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import detkern, detkern.operations.gemm.gradient\n"
        "try: import detkern.torch\n"
        "except ImportError as error: print(error)\n"
    )
    assert run(code).startswith('detkern.torch needs PyTorch: pip install ".[torch]" in the folder of detkern')
