"""torch.nn.functional.linear_cross_entropy under the mode, where PyTorch has it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
F: Any = torch.nn.functional
if not hasattr(F, "linear_cross_entropy"):
    pytest.skip("PyTorch has no linear_cross_entropy", allow_module_level=True)

from frameworks import same_bits

import detkern.torch as dt
from detkern import ContractUnsupported


def operands(dtype: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, 50, (9,), generator=generator)
    target[2] = -100
    return x, weight, target, torch.randn(50, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_indices_make_no_logits(dtype: Any, reduction: str) -> None:
    x, weight, target, bias = operands(dtype)
    contract = "fma" if dtype is torch.float32 else "mma16"
    for options in (None, torch.nn.LinearCrossEntropyOptions()):
        with dt.batch_invariant_mode(strict=True, contract={"addmm": "fma"}):
            loss = F.linear_cross_entropy(x, weight, target, linear_bias=bias, reduction=reduction, options=options)
            other = F.linear_cross_entropy(x, weight, target.clamp(min=0), ignore_index=3, reduction=reduction)
            one = F.linear_cross_entropy(x[0], weight, target[0], linear_bias=bias)
        want = dt.linear_cross_entropy(x, weight, target, bias, reduction=reduction, contract="fma")
        assert loss.dtype == dtype
        assert same_bits(loss, want.to(dtype))
        assert same_bits(one, dt.linear_cross_entropy(x[:1], weight, target[:1], bias, contract="fma").to(dtype))
        ignoring: Any = {"ignore_index": 3, "reduction": reduction, "contract": contract}
        assert same_bits(other, dt.linear_cross_entropy(x, weight, target.clamp(min=0), **ignoring).to(dtype))
        ones = torch.ones_like(loss)
        for got, expected in zip(
            torch.autograd.grad(loss, (x, weight), ones), torch.autograd.grad(want, (x, weight), ones.float()),
            strict=True,
        ):  # fmt: skip
            assert same_bits(got, expected)


def test_autocast() -> None:
    x, weight, target, _ = operands(torch.float32)
    with dt.batch_invariant_mode(strict=True), torch.autocast("cpu", torch.bfloat16):
        loss = F.linear_cross_entropy(x, weight, target)
    assert same_bits(loss, dt.linear_cross_entropy(x.bfloat16(), weight.bfloat16(), target))


@pytest.mark.parametrize("more", ["label_smoothing", "weight", "probabilities"])
def test_other_losses_are_linear_and_cross_entropy(more: str) -> None:
    x, weight, target, bias = operands(torch.float32)
    settings: dict[str, Any] = {"label_smoothing": 0.1} if more == "label_smoothing" else {}
    settings |= {"weight": torch.linspace(0.1, 1, 50)} if more == "weight" else {}
    target = torch.softmax(torch.ones(9, 50), -1) if more == "probabilities" else target
    with dt.batch_invariant_mode(strict=True):
        loss = F.linear_cross_entropy(x, weight, target, linear_bias=bias, **settings)
        want = F.cross_entropy(F.linear(x, weight, bias), target, **settings)
    assert same_bits(loss, want)


def test_losses_of_several_dimensions_are_refused_by_strict() -> None:
    x, _, _, _ = operands(torch.float32)
    weight, target = torch.randn(5, 2, 16), torch.randint(0, 5, (9, 2))
    with (
        dt.batch_invariant_mode(strict=True),
        pytest.raises(ContractUnsupported, match=r"linear_cross_entropy \(of these dimensions\) is not covered"),
    ):
        F.linear_cross_entropy(x, weight, target)


def _without_logits(graph: Any, inputs: Any) -> Any:
    """A backend that looks for the op."""
    assert torch.ops.detkern.linear_logp.default in {node.target for node in graph.graph.nodes}
    return graph.forward


def test_main_grads_and_compiled() -> None:
    x, _, target, _ = operands(torch.bfloat16)
    layer = torch.nn.Linear(16, 50, dtype=torch.bfloat16)

    def run(x: Any, target: Any) -> Any:
        return F.linear_cross_entropy(x, layer.weight, target, linear_bias=layer.bias)

    with dt.batch_invariant_mode(strict=True):
        want = torch.autograd.grad(run(x, target), (layer.weight, layer.bias))
        compiled = torch.compile(run, backend=_without_logits, fullgraph=True)
        for seed in range(8):
            another = torch.randn(9, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
            assert same_bits(compiled(another, target), run(another, target))
        dt.convert(layer, accumulate=True)
        dt.zero_main_grads(layer)
        run(x, target).backward()
    assert layer.weight.grad is None
    assert same_bits(layer.weight.main_grad.bfloat16(), want[0])
    assert same_bits(layer.bias.main_grad.bfloat16(), want[1])
