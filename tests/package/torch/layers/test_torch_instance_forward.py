"""Layers that carry a forward of their own: what accelerate's hooks are, and what nobody can look into."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import pytest

from detkern.vocabulary.contracts import FMA

torch = pytest.importorskip("torch", reason="torch is not installed")
from linear_layers import converted, follows, linear, operands, plain

import detkern.torch as dt


class Hook:
    """What accelerate's hooks are made of: something before the forward and after it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("before")
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        self.calls.append("after")
        return output


def add_hook(module: Any, hook: Hook) -> None:
    """As accelerate's add_hook_to_module puts it on a module."""
    if not (hasattr(module, "_hf_hook") and hasattr(module, "_old_forward")):
        module._old_forward = module.forward
    module._hf_hook = hook

    def with_hook(module: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
        return module._hf_hook.post_forward(module, module._old_forward(*args, **kwargs))

    module.forward = functools.update_wrapper(functools.partial(with_hook, module), module._old_forward)


def remove_hook(module: Any) -> None:
    del module._hf_hook
    module.forward = module._old_forward
    del module._old_forward


def test_hooks_of_accelerate_call_the_contract(device: str) -> None:
    layer, hook = linear().to(device), Hook()
    x = operands(layer, device)
    add_hook(layer, hook)
    converted(layer, contract="fma")
    assert follows(layer, FMA, x)
    assert hook.calls == ["before", "after"]
    assert "contract=fma" in repr(layer)
    dt.revert(layer)
    assert type(layer) is torch.nn.Linear
    assert plain(layer, x)
    assert hook.calls == ["before", "after"] * 2
    converted(layer, contract="fma")
    remove_hook(layer)  # leaves the method as an attribute of the layer
    assert follows(layer, FMA, x)
    dt.revert(layer)
    assert plain(layer, x)
    converted(layer, contract="fma")
    assert follows(layer, FMA, x)
    assert len(hook.calls) == 4


def test_hooks_added_after_convert_stay_after_revert() -> None:
    layer, hook, x = converted(linear(), contract="fma"), Hook(), operands(linear())
    add_hook(layer, hook)
    assert follows(layer, FMA, x)
    assert "contract=fma" in repr(layer)
    dt.revert(layer)
    assert plain(layer, x)
    remove_hook(layer)
    assert plain(layer, x)
    assert hook.calls == ["before", "after"] * 2


def test_another_forward_on_the_layer_is_named_and_no_contract_claimed() -> None:
    model = torch.nn.Sequential(linear(), linear(6, 6))
    own = model[0].forward
    model[0].forward = lambda x: own(x) * 2
    with pytest.warns(
        UserWarning, match=r"left 1 layer without a contract.*: 0: a forward was put on the layer itself"
    ):
        dt.convert(model)
    assert type(model[0]) is torch.nn.Linear
    assert "contract" not in repr(model[0])
    assert type(model[1]) is dt.Linear
    other = linear()
    model[1].forward = MethodType(type(other).forward, other)  # of another layer
    assert "contract=none" in repr(model[1])
    with pytest.warns(UserWarning, match="1: another forward was put on it after it was converted"):
        dt.convert(model, skip="0")


def test_a_wrapper_that_keeps_the_method_works_after_revert() -> None:
    layer = converted(linear(), contract="fma")
    own = layer.forward
    layer.forward = lambda x: own(x)
    x = operands(layer)
    assert follows(layer, FMA, x)
    dt.revert(layer)
    assert plain(layer, x)
