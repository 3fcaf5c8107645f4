"""linear_logp of tensors: gradients against float64 and bit for bit against the definition, and every way that PyTorch
calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import same_bits

import detkern
from detkern.errors import ArgumentError, ContractUnsupported, DTypeError, ShapeError
from detkern.operations.linear_logp.backward import gradients

torch = pytest.importorskip("torch", reason="torch is not installed")
import detkern.torch as dt

VOCABULARY, WIDTH = 300, 24
SCALED = {"temperature": 0.7, "softcap": 20.0}


def operands(dtype: Any = None, rows: tuple[int, ...] = (2, 16), seed: int = 0, grad: bool = True) -> Any:
    """hidden, weight, target, bias; one target is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or torch.bfloat16).requires_grad_(grad)
        for shape in ((*rows, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    target = torch.randint(0, VOCABULARY, rows, generator=generator)
    target.view(-1)[3] = -100
    return hidden, weight, target, bias


def reference(hidden: Any, weight: Any, target: Any, bias: Any, temperature: float = 1.0, softcap: Any = None) -> Any:
    """logp, lse and entropy by PyTorch's own operations."""
    z = hidden @ weight.T + bias
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    logs = torch.log_softmax(z, -1)
    logp = logs.gather(-1, target.clamp(min=0)[..., None])[..., 0] * (target >= 0)
    return logp, torch.logsumexp(z, -1), -(logs.exp() * logs).sum(-1)


def all_of(hidden: Any, weight: Any, target: Any, bias: Any, **settings: Any) -> Any:
    return dt.linear_logp(hidden, weight, target, bias, return_lse=True, return_entropy=True, **settings)


def weighted(results: Any) -> Any:
    """A sum in which every number counts differently."""
    return sum((r.double() * torch.linspace(-1, 2, r.numel()).reshape(r.shape)).sum() for r in results)


def parameters(weight: Any, bias: Any) -> Any:
    """Both as parameters that have a main_grad."""
    holder = torch.nn.Module()
    holder.weight, holder.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
    for parameter in holder.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return holder


def grads_of(function: Any, leaves: Any, **settings: Any) -> list[Any]:
    hidden, weight, target, bias = leaves
    for leaf in (hidden, weight, bias):
        leaf.grad = None
    weighted(function(hidden, weight, target, bias, **settings)).backward()
    return [hidden.grad, weight.grad, bias.grad]


@pytest.mark.parametrize("settings", [{}, SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 3e-6), ("float16", 2e-3), ("bfloat16", 8e-3)])
def test_results_and_gradients_beside_float64(dtype: str, bound: float, settings: dict[str, Any]) -> None:
    """The gradients' error is the rounding of the logits' gradient to the operands' type."""
    leaves = operands(getattr(torch, dtype))
    exact = [x if x is leaves[2] else x.detach().double().requires_grad_() for x in leaves]
    for got, want in zip(all_of(*leaves, **settings), reference(*exact, **settings), strict=True):
        assert got.dtype == torch.float32
        assert (got.detach() - want.detach()).abs().max() < 2e-5
    for got, want in zip(grads_of(all_of, leaves, **settings), grads_of(reference, exact, **settings), strict=True):
        assert (got - want).abs().max() < bound * want.abs().max()


@pytest.mark.parametrize("contract", ["mma16", "fma"])
def test_gradients_are_the_definition(contract: str) -> None:
    """The same calls on NumPy, which test_operations_linear_logp.py holds to exact arithmetic."""
    leaves = operands(torch.float16)
    found = grads_of(all_of, leaves, contract=contract, **SCALED)
    hidden, weight, target, bias = (x.detach().numpy() for x in leaves)
    rows, columns = hidden.reshape(-1, WIDTH), target.reshape(-1)
    state = detkern.linear_logp_partial(rows, weight, columns, bias, contract=contract, **SCALED)
    line = np.linspace(-1, 2, len(rows)).astype(np.float32)
    defined = gradients(rows, weight, columns, bias, state, np.stack([line] * 3), contract=contract, **SCALED)
    for got, want in zip(found, defined, strict=True):
        assert (got.numpy().reshape(want.shape).view(np.uint16) == want.view(np.uint16)).all()


def test_several_targets_are_those_of_one_each() -> None:
    hidden, weight, target, bias = operands()
    several = torch.stack([target, target.flip(1), target.roll(1, 1)], -1)
    logp = dt.linear_logp(hidden, weight, several, bias)
    assert logp.is_contiguous()
    assert logp.shape == several.shape
    for k in range(3):
        assert same_bits(logp[..., k].detach(), dt.linear_logp(hidden, weight, several[..., k], bias).detach())
    none = dt.linear_logp(hidden, weight, several[..., :0], bias, return_lse=True)
    assert none[0].shape == (2, 16, 0)
    assert same_bits(none[1].detach(), all_of(hidden, weight, target, bias)[1].detach())


def test_only_what_is_wanted() -> None:
    hidden, weight, target, bias = operands()
    whole = grads_of(all_of, (hidden, weight, target, bias))
    for chosen in (0, 1, 2):
        leaves = [hidden.detach(), weight.detach(), bias.detach()]
        leaves[chosen] = leaves[chosen].clone().requires_grad_()
        weighted(all_of(leaves[0], leaves[1], target, leaves[2])).backward()
        assert same_bits(leaves[chosen].grad, whole[chosen])
        assert [leaf.grad is None for leaf in leaves].count(True) == 2
    with torch.no_grad():
        assert not dt.linear_logp(hidden, weight, target, bias).requires_grad


def test_the_ratio_of_old_and_new_is_one() -> None:
    """What reinforcement learning needs: in whatever batch the old ones were made."""
    hidden, weight, target, bias = operands(grad=False)
    new = dt.linear_logp(hidden, weight, target, bias)
    old = torch.cat(
        [dt.linear_logp(hidden[:, i : i + 3], weight, target[:, i : i + 3], bias) for i in range(0, 16, 3)], 1
    )
    assert ((new - old).exp() == 1).all()


def test_compiled_and_checkpointed() -> None:
    leaves = operands()
    eager = grads_of(all_of, leaves, **SCALED)

    def scaled(*given: Any, **settings: Any) -> Any:
        return all_of(*given, **SCALED)

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    for got, want in zip(grads_of(compiled, leaves), eager, strict=True):
        assert same_bits(got, want)

    def again(*given: Any, **settings: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(scaled, *given, use_reentrant=False)

    for got, want in zip(grads_of(again, leaves), eager, strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_micro_batches_have_the_bits_of_the_whole(compiled: bool) -> None:
    def function(*given: Any) -> Any:
        return dt.linear_logp(*given, accumulate=True)

    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    hidden, weight, target, bias = operands(rows=(64,))
    gathered = []
    for pieces in ([slice(0, 64)], [slice(0, 32), slice(32, 64)]):
        holder = parameters(weight, bias)
        weight, bias = holder.weight, holder.bias
        for piece in pieces:
            function(hidden[piece], weight, target[piece], bias).sum().backward()
        assert weight.grad is None
        gathered.append([weight.main_grad.clone(), bias.main_grad.clone()])
    for whole, parts in zip(*gathered, strict=True):
        assert same_bits(whole, parts)
        assert whole.abs().max() > 0
    dt.linear_logp(hidden.detach(), weight, target, bias, contract=None).sum().backward()
    assert same_bits(weight.grad, gathered[0][0].to(torch.bfloat16))


def test_a_backward_that_asks_for_hidden_alone_adds_nothing() -> None:
    hidden, weight, target, bias = operands(rows=(16,))
    holder = parameters(weight, bias)
    weight, bias = holder.weight, holder.bias
    logp = dt.linear_logp(hidden, weight, target, bias, accumulate=True).sum()
    logp.backward(inputs=[hidden], retain_graph=True)
    assert not weight.main_grad.any()
    assert not bias.main_grad.any()
    (found,) = torch.autograd.grad(logp, weight)
    assert found.abs().max() > 0
    assert not weight.main_grad.any()


def test_cross_entropy_is_made_of_it() -> None:
    hidden, weight, target, bias = operands()
    logp = dt.linear_logp(hidden, weight, target, bias).detach()
    each = dt.linear_cross_entropy(hidden, weight, target, bias, reduction="none").detach()
    assert same_bits(each, 0 - logp)
    total = dt.linear_cross_entropy(hidden, weight, target, bias, reduction="sum").detach()
    assert same_bits(total, dt.sum(each.reshape(-1)))
    mean = dt.linear_cross_entropy(hidden, weight, target, bias)
    assert same_bits(mean.detach(), total / 31)
    assert not torch.signbit(each.view(-1)[3])
    mean.backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    torch.nn.functional.cross_entropy(
        (exact[0] @ exact[1].T + exact[2]).reshape(-1, VOCABULARY), target.reshape(-1)
    ).backward()
    for got, want in zip((hidden, weight, bias), exact, strict=True):
        assert (got.grad - want.grad).abs().max() < 8e-3 * want.grad.abs().max()


def test_autocast_casts_as_linear_does() -> None:
    leaves = operands(torch.float32, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        cast = dt.linear_logp(*leaves)
        through = torch.ops.detkern.linear_logp(
            leaves[0].reshape(-1, WIDTH), leaves[1], leaves[2].reshape(-1), leaves[3]
        )
    hidden, weight, target, bias = leaves
    by_hand = dt.linear_logp(hidden.bfloat16(), weight.bfloat16(), target, bias.bfloat16())
    assert same_bits(cast, by_hand)
    assert same_bits(through[0][0], by_hand.reshape(-1))


def test_bad_calls() -> None:
    hidden, weight, target, bias = operands()
    with pytest.raises(DTypeError, match=r"target is not a torch\.Tensor but list"):
        dt.linear_logp(hidden, weight, [1], bias)
    with pytest.raises(DTypeError, match="target is float32"):
        dt.linear_logp(hidden, weight, target.float(), bias)
    with pytest.raises(
        ShapeError, match=r"target has shape \[3\]; hidden \[2, 16, 24\] needs \[2, 16\], or \[2, 16, 'K'\]"
    ):
        dt.linear_logp(hidden, weight, target.reshape(-1)[:3], bias)
    with pytest.raises(
        ContractUnsupported, match="linear_logp of bfloat16 takes contract='mma16' or contract='fma'; contract='tree'"
    ):
        dt.linear_logp(hidden, weight, target, bias, contract="tree")
    with pytest.raises(ArgumentError, match="cannot be differentiated"):
        torch.autograd.grad(dt.linear_logp(hidden, weight, target, bias).sum(), hidden, create_graph=True)
    with pytest.raises(ArgumentError, match="native"):
        dt.linear_logp(hidden, weight, target, bias, backend="native")
    with pytest.raises(ArgumentError, match=r"target has columns outside of \[0, 300\)"):
        dt.linear_logp(hidden, weight, target + VOCABULARY, bias, check=True)
    with pytest.raises(ArgumentError, match="reduction='max' must be"):
        dt.linear_cross_entropy(hidden, weight, target, bias, reduction="max")
    with pytest.raises(ArgumentError, match=r"needs weight\.main_grad"):
        dt.linear_logp(hidden, torch.nn.Parameter(weight.detach()), target, bias, accumulate=True)
    with pytest.raises(ArgumentError, match=r"detkern\.torch"):
        detkern.linear_logp(hidden, weight, target, bias)
