"""detkern.torch.Linear, convert and revert: drop-ins for torch.nn.Linear, in both directions."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
from frameworks import from_torch, same, same_bits, tensor

import detkern
from detkern.contracts import TREE
from detkern.dtypes import BF16, F32
from detkern.operations.gemm import replay as numpy_replay

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

    assert type(dt.convert(Mine(8, 6))) is Mine
    attention = torch.nn.MultiheadAttention(8, 2)
    dt.convert(attention)
    assert not any(isinstance(layer, dt.Linear) for layer in attention.modules())


def test_wrong_arguments_change_nothing() -> None:
    net = model()
    with pytest.raises(
        detkern.ArgumentError, match=r"skip='head' is the name of no Linear here; there are '0', '2\.router'"
    ):
        dt.convert(net, skip=["0", "head"])
    with pytest.raises(detkern.ArgumentError, match=r"skip=3 is no name"):
        dt.convert(net, skip=3)  # type: ignore[arg-type]
    for change in (dt.convert, dt.revert):
        with pytest.raises(detkern.ArgumentError, match=r"module is no torch\.nn\.Module but list"):
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
        "import detkern.autograd.torch; print(torch.ops.detkern.linear)\n"
        "print(sorted({'jax', 'cupy', 'triton', 'torch._dynamo'} & {*sys.modules}))"
    )
    assert run(code).splitlines() == ["False", "detkern.linear", "[]"]


def test_without_torch_the_import_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import detkern, detkern.operations.gemm.gradient\n"
        "try: import detkern.torch\n"
        "except ImportError as error: print(error)\n"
    )
    assert run(code).startswith("detkern.torch needs PyTorch, as in pip install 'detkern[torch]'")
