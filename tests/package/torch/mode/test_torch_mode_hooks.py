"""What modes hear of from PyTorch: whether autograd records, and whether a function is traced."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.checkpoint import checkpoint

import detkern.torch as dt
from detkern.torch import batch_invariant_mode
from detkern.torch.mode import entered, hooks

X, SCALE = torch.randn(6, 40), torch.randn(40).requires_grad_()


def seen() -> bool:
    """Whether the gradient of what is broadcast here is detkern's."""
    y = X * SCALE
    assert y.requires_grad
    ((node, _), *_) = [pair for pair in y.grad_fn.next_functions if pair[0] is not None]
    return not hasattr(node, "variable")  # PyTorch's own goes straight to the leaf


def recorded() -> bool:
    recording = entered.is_recording()
    assert recording is not None
    return recording


def test_blocks_without_autograd_see_less_and_restore_it() -> None:
    with batch_invariant_mode():
        for block in (torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)):
            assert seen()
            with block():
                assert not recorded()
                assert not (X * SCALE).requires_grad
                with torch.inference_mode(False), torch.enable_grad():
                    assert seen()
                    with torch.no_grad():
                        assert not recorded()
                    assert seen()
                assert not recorded()
            assert seen()
        with pytest.raises(KeyError), torch.no_grad():
            raise KeyError
        assert seen()
        before = torch.no_grad()(recorded)
        assert before() is False
        torch.set_grad_enabled(False)
        torch.set_grad_enabled(True)
        assert seen()


def test_a_mode_entered_where_autograd_is_off_sees_it_come_back() -> None:
    mode = batch_invariant_mode()
    with torch.no_grad():
        with mode:
            assert not recorded()
            torch.set_grad_enabled(True)
            assert seen()
            torch.set_grad_enabled(False)
            with torch.enable_grad():
                assert seen()
        mode.enable()
    try:
        assert seen()
    finally:
        mode.disable()


def _forward(inner: Callable[[], Any]) -> Any:
    class Function(torch.autograd.Function):
        """PyTorch switches autograd off for its forward, and on again, in C++."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            inner()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            inner()
            return dy

    return Function.apply


def _nothing_recorded() -> None:
    with torch.no_grad():
        X.exp()


def _recorded_inside() -> None:
    with torch.enable_grad():
        assert seen()
    with torch.inference_mode():
        X.exp()


def _mode_inside() -> None:
    with batch_invariant_mode(contract="fma"):
        X.exp()


@pytest.mark.parametrize("inner", [_nothing_recorded, _recorded_inside, _mode_inside])
def test_what_cpp_switches_off_and_on_hides_nothing(inner: Callable[[], Any]) -> None:
    with batch_invariant_mode():
        y = _forward(inner)(X.clone().requires_grad_())
        assert seen()
        y.sum().backward()
        assert seen()
        with torch.no_grad():
            _forward(inner)(X)
            assert not recorded()
        assert seen()


def test_a_backward_pass_sees_what_it_records() -> None:
    found: list[tuple[bool, bool]] = []
    x = X.clone().requires_grad_()
    with batch_invariant_mode():
        for graph in (False, True):
            y = x.exp()
            y.register_hook(lambda _: found.append((torch.is_grad_enabled(), recorded())))
            torch.autograd.grad(y, x, X, retain_graph=True, create_graph=graph)
            with torch.no_grad():  # which records a graph that is asked for all the same
                torch.autograd.grad(y, x, X, create_graph=graph)
                assert not recorded()
            assert seen()
        for reentrant in (False, True):
            checkpoint(
                lambda x: found.append((torch.is_grad_enabled(), recorded())) or x.exp(), x, use_reentrant=reentrant
            ).sum().backward()
    assert all(recording or not enabled for enabled, recording in found)
    assert (True, True) in found
    assert (False, False) in found


def test_the_fused_path_of_attention_is_left_out_in_the_thread_alone() -> None:
    enabled = torch.backends.mha.get_fastpath_enabled
    with batch_invariant_mode():
        pass
    assert torch.backends.mha.get_fastpath_enabled()
    with batch_invariant_mode():
        assert not torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(True)
        assert not torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert enabled()


def test_a_compiler_that_is_imported_inside_of_the_mode_traces_it() -> None:
    source = """
import sys, torch, detkern.torch as dt
layer, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
graphs = []
def backend(module, inputs):
    graphs.append(module)
    return module.forward
with dt.batch_invariant_mode():
    assert "torch._dynamo.eval_frame" not in sys.modules
    y = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert torch.equal(y, layer(x))
print([node.target for node in graphs[0].graph.nodes if node.op == "call_function"])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "detkern.linear" in done.stdout


def test_compiled_code_sees_the_gradients_of_what_it_does_not_compile() -> None:
    @torch._dynamo.disable
    def skipped() -> bool:
        return seen()

    compiled = torch.compile(lambda x: (x.sin(), skipped()), backend="eager")
    with dt.batch_invariant_mode():
        assert compiled(X)[1]
        with torch.no_grad():
            torch.compile(lambda x: x.cos(), backend="eager")(X)
            assert not recorded()
        assert seen()


def test_lazy_modules_of_others_are_not_loaded_for_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CuPy's cupyx is, which takes a third of a second."""

    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            looked_into.append(name)
            return super().__getattribute__(name)

    looked_into: list[str] = []
    before, exporting, importer = contextlib.nullcontext, ModuleType("torch.exporting"), ModuleType("torch.importer")
    for module in (exporting, importer):
        monkeypatch.setattr(module, "_compiling_state_context", before, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "others_lazy", Lazy("others_lazy"))
    looked_into.clear()
    hooks._around_export(exporting)
    assert not looked_into
    assert importer._compiling_state_context is exporting._compiling_state_context is not before
