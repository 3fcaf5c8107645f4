"""benchmarks.train_step and benchmarks.decode_host: what they run, and how they judge it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from frameworks import same_bits
from torch.overrides import _len_torch_function_stack

from benchmarks import decode_host, language_model, train_step

SMALL = {**language_model.SMALL, "num_hidden_layers": 1}


def test_every_variant_of_a_step_computes_its_gradients_and_leaves_no_trace() -> None:
    model = language_model.make("qwen3", "cpu", SMALL)
    ids = language_model.tokens(model, 2, 16)
    found: dict[str, Any] = {}
    for name, (_, _, wide) in train_step.VARIANTS.items():
        with train_step.Variant(name, model, ids) as one:
            one.step()
            parameters = list(model.parameters())
            found[name] = [p.main_grad if wide else p.grad.float() for p in parameters]
            assert all((p.grad is None) == wide for p in parameters)
        assert not any(hasattr(p, "main_grad") or hasattr(p, "further_main_grads") for p in model.parameters())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks)
    for gradients in found.values():
        for one, other in zip(gradients, found["eager attention"], strict=True):
            assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.99
    for mode, wide in zip(found["mode"], found["mode, main_grad"], strict=True):
        assert same_bits(mode, wide.bfloat16().float())
    assert type(model.lm_head) is torch.nn.Linear


def test_steps_are_measured_and_their_kernels_named() -> None:
    rows = train_step.measure("llama", "cpu", SMALL, (1, 16), 1, ["eager attention", "mode"])
    assert [row["variant"] for row in rows] == ["eager attention", "mode"]
    for row in rows:
        assert row["ms"] > 0
        times = [kernel["ms"] for kernel in row["kernels"]]
        assert times == sorted(times, reverse=True)
    assert any("aten::mm" in kernel["kernel"] for kernel in rows[0]["kernels"])
    assert any(kernel["kernel"] == "_Linear" for kernel in rows[1]["kernels"])  # detkern's autograd function


@pytest.mark.parametrize(
    ("ms", "peak", "met"), [(105.0, 1050, True), (105.2, 1000, False), (90.0, 1060, False)], ids=str
)
def test_a_step_is_judged_by_time_and_memory(ms: float, peak: int, met: bool) -> None:
    rows = [
        {"model": "llama", "variant": "eager attention", "ms": 100.0, "peak_mb": 1000},
        {"model": "llama", "variant": "mode", "ms": ms, "peak_mb": peak},
    ]
    (judged,) = train_step.compare(rows)
    assert judged["met"] is met
    assert judged["ratio"] == round(ms / 100, 3)
    assert not train_step.compare(rows[1:])


def test_decode_steps_are_measured_with_either_cache() -> None:
    variants = decode_host.decodings("llama", "cpu", SMALL)
    rows = decode_host.measure(variants, "llama", 1, 3)
    assert [row["variant"] for row in rows] == list(decode_host.VARIANTS)
    assert all(row["steps"] == 3 and row["host_us"] >= row["least_us"] > 0 for row in rows)
    assert not _len_torch_function_stack()
    assert "torch/mode/kernels.py" in decode_host.profiled(variants["mode"], 2, 40)
    for row in rows:
        row["host_us"] = 115.0 if row["variant"].startswith("mode") else 100.0
    assert [judged["met"] for judged in decode_host.compare(rows)] == [True, True]
    rows[3]["host_us"] = 115.2
    assert [judged["met"] for judged in decode_host.compare(rows)] == [False, True]
