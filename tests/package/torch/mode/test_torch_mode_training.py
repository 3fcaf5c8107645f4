"""Training under the mode with convert(model, accumulate=True): no gradient depends on how the batch was cut or laid
out."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits
from language_models import MODELS, make_model
from training_layouts import differing, gather, layouts, main_gradients, sequences, trained

import detkern.torch as dt
from detkern.errors import ArgumentError
from detkern.torch import batch_invariant_mode

LENGTHS = [16, 48, 32]
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}


def strict(**settings: Any) -> Any:
    return batch_invariant_mode(strict=True, **settings)


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_the_same_in_every_cut_and_layout(name: str, tied: bool) -> None:
    model = make_model(name, "cpu", torch.bfloat16, **SIZES)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    dt.convert(model, accumulate=True)
    given = layouts(sequences(LENGTHS, 40, "cpu"), torch.bfloat16)
    found = {layout: main_gradients(model, parts, strict()) for layout, parts in given.items()}
    expected = found["whole, packed"]
    assert len(expected) == len(list(model.parameters())) + tied  # a tied weight's uses are gathered apart
    assert all(x.any() for x in expected.values())
    for layout, gradients in found.items():
        assert not differing(expected, gradients), layout


def test_weights_after_20_steps_are_the_same_in_every_cut_and_layout() -> None:
    found = {}
    for layout in ("whole, packed", "cut, padded", "another cut, packed"):
        model = make_model("qwen3", "cpu", torch.bfloat16, **SIZES, num_hidden_layers=1)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        dt.convert(model, accumulate=True)
        parts = layouts(sequences(LENGTHS, 40, "cpu"), torch.bfloat16)[layout]
        found[layout] = trained(model, parts, strict(), 20)
        assert differing(before, found[layout]).keys() == before.keys()
    for layout, weights in found.items():
        assert not differing(found["whole, packed"], weights), layout


def test_a_cut_inside_of_a_group_of_16_tokens_changes_bits_under_mma16_and_none_under_fma() -> None:
    """What docs/batch-invariant-mode.md says of cuts."""
    tokens = torch.randint(0, 40, (24,), generator=torch.Generator().manual_seed(2))
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    found = {}
    for contract in ("mma16", "fma"):
        embedding = torch.nn.Embedding(40, 32, dtype=torch.bfloat16)
        model = torch.nn.Sequential(embedding, torch.nn.Linear(32, 24, dtype=torch.bfloat16))
        dt.convert(model, accumulate=True, contract=contract)
        for cut in (16, 9):
            dt.zero_main_grads(model)
            for part in (slice(0, cut), slice(cut, 24)):
                with strict(contract=contract):
                    (model(tokens[part]) * x[part, :24]).sum().backward()
            found[contract, cut] = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    assert not differing(found["fma", 16], found["fma", 9])
    changed = differing(found["mma16", 16], found["mma16", 9])
    assert changed.keys() == {"1.weight"}  # the product over tokens; chains over rows have no groups


def test_a_marked_norm_goes_on_where_the_micro_batch_before_ended() -> None:
    norm = torch.nn.RMSNorm(40, dtype=torch.bfloat16)
    dt.convert(norm, accumulate=True)
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for cuts in ([7], [1, 4, 2]):
        dt.zero_main_grads(norm)
        for part in x.split(cuts):
            with strict():
                y = norm(part)
            y.backward(torch.ones_like(y))
        found.append(norm.weight.main_grad.clone())
    assert same_bits(*found)
    assert found[0].any()
    assert norm.weight.grad is None


@pytest.mark.parametrize("shape", [(6,), (5, 6), (4, 1, 1), (1, 5, 1), (), (1,)], ids=str)
def test_whatever_is_broadcast_is_gathered_in_the_order_of_the_batch(shape: tuple[int, ...]) -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(5)))

        def forward(self, x: Any) -> Any:
            return x * self.by

    model = dt.convert(Scale(), accumulate=True)
    x, dy = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(6)).unbind()
    found = []
    for cuts in ([3], [1, 2]):
        dt.zero_main_grads(model)
        for part, incoming in zip(x.split(cuts), dy.split(cuts), strict=True):
            with strict():
                y = model(part)
            y.backward(incoming)
        found.append(model.by.main_grad.clone())
    assert same_bits(*found)
    lead = 4 - len(shape)
    summed = [d for d in range(4) if d < lead or (shape[d - lead] == 1 and x.shape[d] != 1)]
    exact = (x.double() * dy.double()).sum(summed).reshape(shape)
    assert torch.allclose(found[0].double(), exact, rtol=1e-5, atol=1e-5)


def test_gradients_go_where_the_backward_asks_and_to_autograd_without_the_mode() -> None:
    norm = dt.convert(torch.nn.RMSNorm(8), accumulate=True)
    dt.zero_main_grads(norm)
    x = torch.randn(3, 8, requires_grad=True)
    with strict():
        y = norm(x).sum()
    (given,) = torch.autograd.grad(y, norm.weight, retain_graph=True)
    assert given.any()
    assert not norm.weight.main_grad.any()
    y.backward(inputs=[x], retain_graph=True)
    assert not norm.weight.main_grad.any()
    y.backward(retain_graph=True)
    assert torch.allclose(norm.weight.main_grad, given)
    assert norm.weight.grad is None
    with pytest.raises(ArgumentError, match="create_graph"):
        y.backward(create_graph=True)
    norm(x).sum().backward()
    assert norm.weight.grad is not None
    dt.revert(norm)
    with strict():
        norm(x).sum().backward()
    assert torch.allclose(norm.weight.main_grad, given)


def test_a_model_without_accumulators_is_told_and_a_copy_gets_its_own() -> None:
    model = dt.convert(torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.RMSNorm(4)), accumulate=True)
    tokens = torch.tensor([[1, 2, 2]])
    with strict(), pytest.raises(ArgumentError, match="zero_main_grads"):
        model(tokens)
    with strict(), torch.no_grad():
        model(tokens)
    copied = copy.deepcopy(model)
    dt.zero_main_grads(copied)
    with strict():
        copied(tokens).sum().backward()
    assert all(p.main_grad.any() and p.grad is None for p in copied.parameters())
    assert not hasattr(model[0].weight, "main_grad")


def test_layers_that_skip_names_are_not_marked() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.RMSNorm(4))
    dt.convert(model, accumulate=True, skip="1")
    dt.zero_main_grads(model)
    with strict():
        model(torch.randn(3, 4)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["1.weight", "1.bias"]


def test_without_marks_the_cut_shows() -> None:
    """The tests above can fail: .grad is rounded after each micro-batch."""
    model = make_model("llama", "cpu", torch.bfloat16, **SIZES)
    given = layouts(sequences(LENGTHS, 40, "cpu"), torch.bfloat16)
    found = []
    for layout in ("whole, packed", "cut, packed"):
        model.zero_grad()
        gather(model, given[layout], strict())
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert differing(*found)


def test_a_functional_embedding_of_a_marked_weight() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 4))
    holder = torch.nn.ParameterList([weight])
    dt.convert(holder, accumulate=True)
    dt.zero_main_grads(holder)
    with strict():
        F.embedding(torch.tensor([1, 1, 5]), weight).sum().backward()
    assert same_bits(weight.main_grad, torch.tensor([0.0, 2, 0, 0, 0, 1])[:, None].expand(6, 4))
