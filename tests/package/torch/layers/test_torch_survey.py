"""What convert cannot convert, it leaves and names: in a warning, in the report, in strict's error."""

from __future__ import annotations

from typing import Any

import pytest

import detkern
from detkern.vocabulary.contracts import FMA

torch = pytest.importorskip("torch", reason="torch is not installed")
from linear_layers import Doubles, converted, follows, linear, operands

import detkern.torch as dt

parametrize = torch.nn.utils.parametrize


class Own(torch.nn.Linear):
    def forward(self, input: Any) -> Any:
        return super().forward(input) * 2


class OwnCall(torch.nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return torch.nn.functional.linear(*args, self.weight, self.bias)


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x, self.weight)


class Quantised(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Marked(torch.nn.Parameter):
    """As the parameters of inference engines, which carry attributes and compute as any other."""


def with_weight(weight: Any) -> Any:
    layer = torch.nn.Linear(8, 8)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def nested() -> Any:
    layer = torch.nn.Linear(8, 8)
    del layer.weight
    layer.weight = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(6, 8)])
    return layer


def quantised() -> Any:
    layer = torch.nn.Linear(8, 8)
    del layer.weight
    layer.weight = torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8)
    return layer


ODD = {
    "own": (lambda: Own(8, 6), "Own has a forward of its own"),
    "call": (lambda: OwnCall(8, 6), "OwnCall has a __call__ of its own"),
    "f64": (lambda: torch.nn.Linear(8, 6).double(), "its weight is torch.float64, and products by a contract take"),
    "int8": (lambda: with_weight(torch.ones(8, 8, dtype=torch.int8)), "its weight is torch.int8"),
    "subclass": (
        lambda: with_weight(torch.ones(8, 8).as_subclass(Quantised)),
        "its weight is a Quantised, which computes",
    ),
    "nested": (nested, "its weight is a nested tensor"),
    "quantised": (quantised, "its weight is torch.qint8"),
    "dynamic": (
        lambda: torch.ao.nn.quantized.dynamic.Linear(8, 6),
        "Linear is not a torch.nn.Linear",
    ),
    "conv": (lambda: torch.nn.Conv2d(3, 4, 2), "Conv2d computes products of another kind"),
    "lstm": (lambda: torch.nn.LSTM(8, 6), "LSTM computes products of another kind"),
    "bilinear": (lambda: torch.nn.Bilinear(8, 6, 4), "Bilinear computes products of another kind"),
    "router": (Router, r"Router is not a torch.nn.Linear and holds weight [4, 8], whose products have no contract"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_converted_is_left_and_named(name: str) -> None:
    make, reason = ODD[name]
    odd = make()
    model = torch.nn.ModuleDict({"plain": torch.nn.Linear(8, 6), "odd": odd, "norm": torch.nn.LayerNorm((4, 8))})
    kind = type(odd)
    with pytest.raises(detkern.ArgumentError, match="1 layer cannot be converted") as error:
        dt.convert(model, strict=True)
    assert f"odd: {reason}" in str(error.value)
    assert type(model["plain"]) is torch.nn.Linear
    with pytest.warns(UserWarning, match="left 1 layer without a contract") as caught:
        model, report = dt.convert(model, report=True)
    assert len(caught) == 1
    assert reason in str(caught[0].message)
    assert caught[0].filename == __file__
    assert report.converted == ("plain",)
    assert list(report.left) == ["odd"]
    assert report.left["odd"].startswith(reason)
    assert f"left: odd: {reason}" in str(report)
    assert type(odd) is kind
    report = converted(model, skip="odd", strict=True, report=True)[1]
    assert (report.converted, report.already, report.skipped, dict(report.left)) == ((), ("plain",), ("odd",), {})


def test_weights_that_compute_as_plain_ones_are_converted() -> None:
    layer = linear()
    layer.weight = Marked(layer.weight.detach())
    assert type(layer.weight) is Marked
    assert follows(converted(layer, contract="fma"), FMA, operands(layer))
    with torch._subclasses.FakeTensorMode():
        fake = converted(torch.nn.Linear(8, 6))
        assert fake(torch.ones(3, 8)).shape == (3, 6)


def test_computed_weights_gather_no_gradients() -> None:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Doubles())
    with pytest.warns(UserWarning, match="its weight is computed at each forward, and accumulate=True gathers"):
        dt.convert(layer, accumulate=True)
    assert not isinstance(layer, dt.Linear)


def test_many_layers_of_one_kind_are_named_by_a_pattern_that_skip_takes() -> None:
    model = torch.nn.ModuleList(
        torch.nn.ModuleDict({"mlp2": Own(8, 8), "up": torch.nn.Linear(8, 8)}) for _ in range(12)
    )
    with pytest.raises(detkern.ArgumentError, match=r"12 layers cannot .*: \*\.mlp2 \(12 layers\): Own has a forward"):
        dt.convert(model, strict=True)
    report = converted(model, skip="*.mlp2", report=True)[1]
    assert len(report.skipped) == len(report.converted) == 12
    assert "converted: *.up (12 layers)" in str(report)


def test_a_report_is_frozen_and_names_a_tied_layer_once() -> None:
    shared = linear()
    _, report = converted(torch.nn.ModuleDict({"a": shared, "b": shared}), report=True)
    assert report.converted == ("a",)
    with pytest.raises(AttributeError):
        report.converted = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        report.left["a"] = ""  # type: ignore[index]
    assert str(report).splitlines() == ["converted 1, already 0, skipped 0, left 0", "converted: a"]
    assert "converted: the module itself" in str(converted(linear(), report=True)[1])


def test_a_function_is_asked_about_linear_layers_only() -> None:
    model = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(3, 4, 2), "own": Own(8, 6), "plain": torch.nn.Linear(8, 6)})
    asked: list[str] = []
    with pytest.warns(UserWarning, match="conv: Conv2d"):
        dt.convert(model, skip=lambda name, layer: asked.append(name) or name == "own")
    assert asked == ["own", "plain"]


def test_settings_that_a_layer_has_already_are_not_changed_in_silence() -> None:
    model = torch.nn.ModuleDict({"a": dt.Linear(8, 6, contract="fma"), "b": torch.nn.Linear(8, 6)})
    report = converted(model, skip="b", report=True)[1]
    assert report.already == ("a",)
    with pytest.raises(
        detkern.ArgumentError, match="a: it was converted before, with accumulate=False, contract=fma: revert"
    ):
        dt.convert(model, contract="tree", accumulate=True, strict=True)
    with pytest.warns(UserWarning, match="a: it was converted before, with contract=fma: revert it first"):
        report = dt.convert(model, contract="tree", report=True)[1]
    assert (report.converted, report.already) == (("b",), ())
    assert (model["a"].contract, model["b"].contract) == ("fma", "tree")
    assert converted(model["b"], contract="tree", report=True)[1].already == ("",)
