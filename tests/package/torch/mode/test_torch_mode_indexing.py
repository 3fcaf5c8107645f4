"""Reading and writing by an index under batch_invariant_mode: sums by the scattered sum, the rest PyTorch's,
as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from frameworks import same_bits, tensor
from language_models import MODELS, make_model

import detkern
from detkern.errors import ContractUnsupported
from detkern.vocabulary.dtypes import BF16, F32

torch = pytest.importorskip("torch", reason="torch is not installed")
import torch.nn.functional as F

import detkern.torch as dt
from detkern.torch import batch_invariant_mode

M = 300
INDEX = torch.arange(M) ** 2 % 5
DY = tensor("wide", F32, (M, 4), 1)
SUMMED = detkern.scatter_sum(DY, INDEX, 5)
EACH = INDEX[:, None].expand(M, 4)


def functions() -> dict[str, Callable[[Any], Any]]:
    """What reads x [5, 4] so that DY is added to the rows of its gradient by INDEX."""
    flat = INDEX[:, None] * 4 + torch.arange(4)
    return {
        "F.embedding": lambda x: F.embedding(INDEX, x),
        "a module": lambda x: torch.func.functional_call(torch.nn.Embedding(5, 4), {"weight": x}, (INDEX,)),
        "torch.embedding": lambda x: torch.embedding(x, INDEX),
        "aten.embedding": lambda x: torch.ops.aten.embedding(x, INDEX),
        "brackets": lambda x: x[INDEX],
        "brackets with None": lambda x: x[None, INDEX][0],
        "both dimensions": lambda x: x[INDEX[:, None], torch.arange(4)],
        "the last dimension": lambda x: x.t()[:, INDEX].t(),
        "aten.index": lambda x: torch.ops.aten.index(x, [INDEX]),
        "index_select": lambda x: x.index_select(0, INDEX),
        "torch.index_select": lambda x: torch.index_select(input=x, dim=0, index=INDEX.int()),
        "gather": lambda x: x.gather(0, EACH),
        "take_along_dim": lambda x: torch.take_along_dim(x, INDEX[:, None], 0),
        "take": lambda x: torch.take(x, flat),
        "repeat_interleave": lambda x: torch.repeat_interleave(
            x, torch.bincount(INDEX, minlength=5), dim=0
        )[torch.argsort(torch.argsort(INDEX, stable=True))],
    }  # fmt: skip


@pytest.mark.parametrize("name", functions())
def test_gradients_of_what_is_read_are_the_scattered_sum(name: str) -> None:
    x = tensor("normal", F32, (5, 4), 2, grad=True)
    with batch_invariant_mode(strict=True):
        y = functions()[name](x)
    y.backward(DY)
    assert torch.equal(y.detach(), x.detach()[INDEX])
    assert same_bits(x.grad, SUMMED)


def writes() -> dict[str, Callable[[Any, Any], Any]]:
    """What adds y [M, 4] to the rows of x by INDEX."""
    return {
        "index_add": lambda x, y: x.index_add(0, INDEX, y),
        "torch.index_add": lambda x, y: torch.index_add(input=x, dim=-2, index=INDEX, source=y),
        "index_add_": lambda x, y: x.clone().index_add_(0, INDEX, y),
        "aten.index_add": lambda x, y: torch.ops.aten.index_add(x, 0, INDEX, y),
        "scatter_add": lambda x, y: x.scatter_add(0, EACH, y),
        "scatter_add_": lambda x, y: x.clone().scatter_add_(0, EACH, y),
        "scatter": lambda x, y: torch.scatter(x, 0, EACH, y, reduce="add"),
        "scatter_reduce": lambda x, y: x.scatter_reduce(0, EACH, y, "sum"),
        "index_put": lambda x, y: torch.index_put(x, (INDEX,), y, accumulate=True),
        "index_put_": lambda x, y: x.clone().index_put_((INDEX,), y, accumulate=True),
    }


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", writes())
def test_sums_onto_a_tensor(name: str, dtype: Any) -> None:
    start, y = tensor("normal", dtype, (5, 4), 2), tensor("wide", dtype, (M, 4), 1)
    expected = start.clone()
    detkern.scatter_sum(y, INDEX, out=expected, accumulate=True)
    with batch_invariant_mode(strict=True), torch.no_grad():
        assert same_bits(writes()[name](start, y), expected)
    x = start.clone().requires_grad_()
    given = y.clone().requires_grad_()
    if name == "scatter":
        return  # PyTorch has no derivative of it, and none is promised
    with batch_invariant_mode(strict=True):
        result = writes()[name](x, given)
    dy = tensor("normal", dtype, (5, 4), 3)
    result.backward(dy)
    assert same_bits(result.detach(), expected)
    assert same_bits(x.grad, dy)
    assert same_bits(given.grad, dy[INDEX])


def test_in_place_it_is_the_same_tensor_also_of_a_part() -> None:
    memory = torch.zeros(3, 5)
    with batch_invariant_mode():
        part = memory[1:].t()
        assert part.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 2)) is part
    assert memory.tolist() == [[0] * 5, [0, 2, 0, 0, 0], [0, 2, 0, 0, 0]]
    leaf = torch.zeros(3, requires_grad=True)
    with batch_invariant_mode(), pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        leaf.index_add_(0, torch.tensor([1]), torch.ones(1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda w: F.embedding(INDEX, w, sparse=True), r"embedding \(sparse\)"),
        (lambda w: F.embedding(INDEX, w, scale_grad_by_freq=True), r"embedding \(scale_grad_by_freq\)"),
        (lambda w: F.embedding_bag(INDEX.reshape(10, 30), w), "embedding_bag"),
        (lambda w: w.scatter_reduce(0, EACH, DY, "mean"), r"scatter_reduce \(reduce='mean'\)"),
        (lambda w: w.scatter_reduce(0, EACH, DY, "sum", include_self=False), r"scatter_reduce \(reduce='sum'\)"),
        (lambda w: w.index_reduce(0, INDEX, DY, "mean"), "index_reduce"),
        (lambda w: F.embedding(INDEX, w.double()), r"embedding \(torch\.float64\)"),
    ],
)
def test_what_is_not_covered_is_refused_and_otherwise_pytorchs(
    call: Callable[[Any], Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detkern.torch.mode.mode, "_said", set())  # a warning is given once
    weight = tensor("normal", F32, (5, 4), 2, grad=True)
    with batch_invariant_mode(strict=True), pytest.raises(ContractUnsupported, match=said):
        call(weight)
    theirs = call(weight)
    with batch_invariant_mode(), pytest.warns(UserWarning, match=said):
        assert torch.equal(call(weight), theirs)


def test_max_norm_scales_the_weight_as_pytorch_does() -> None:
    weights = [4 * torch.ones(5, 4) for _ in range(2)]
    for weight, mode in zip(weights, (batch_invariant_mode(strict=True), torch.enable_grad()), strict=True):
        with mode:
            y = F.embedding(torch.tensor([1, 1, 3]), weight.requires_grad_(), max_norm=1.0)
        y.sum().backward()
    assert torch.equal(*(w.detach() for w in weights))
    assert torch.equal(*(w.grad for w in weights))


def test_uses_without_a_sum_are_pytorchs() -> None:
    x = tensor("normal", F32, (5, 4), 2)
    with batch_invariant_mode(strict=True):
        assert torch.equal(x[INDEX], x.index_select(0, INDEX))
        assert x.clone().requires_grad_()[1:3, 0]._is_view()
        assert torch.zeros(5).scatter_(0, torch.tensor([1]), 1.0).tolist() == [0, 1, 0, 0, 0]
        assert F.one_hot(torch.tensor([2]), 3).tolist() == [[0, 0, 1]]
        assert torch.zeros(5).index_put_((torch.tensor([1]),), torch.ones(1)).tolist() == [0, 1, 0, 0, 0]
        assert torch.zeros(5).index_put((torch.tensor([1]),), torch.ones(1), False).tolist() == [0, 1, 0, 0, 0]
        assert torch.zeros(5, dtype=torch.int64).index_add(0, INDEX, INDEX).sum() == INDEX.sum()
        assert torch.zeros(3).scatter_reduce(0, torch.tensor([1, 1]), torch.tensor([2.0, 3]), "amax").tolist() == [
            0,
            3,
            0,
        ]
        assert F.gumbel_softmax(x, hard=True).sum() == 5
        out = torch.empty(M, 4)
        assert torch.index_select(x, 0, INDEX, out=out) is out
    with pytest.raises(IndexError), batch_invariant_mode():
        x.clone().requires_grad_()[torch.tensor([7])]


def test_compiled_the_same_bits() -> None:
    def step(x: Any) -> Any:
        return F.embedding(INDEX, x, 1) * DY + x.index_add(0, INDEX, DY)[INDEX.clamp(max=0)]

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = tensor("wide", F32, (5, 4), 2, grad=True)
        with batch_invariant_mode(strict=True):
            y = (
                F.embedding(INDEX, x, 1)
                if function is step
                else torch.compile(lambda x: F.embedding(INDEX, x, 1), fullgraph=True, backend="aot_eager")(x)
            )
            z = function(x.detach())
        y.backward(DY)
        found.append((x.grad, z))
    for a, b in zip(*found, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_a_models_embedding_does_not_depend_on_the_cut(name: str) -> None:
    """Four sequences of 32 tokens at once and one by one, into main_grad: the same bits, by mma16 and bf16."""
    ids = torch.arange(4 * 32).reshape(4, 32) ** 2 % 40
    found = []
    for parts in (1, 4):
        model = make_model(name, "cpu", torch.bfloat16, tie_word_embeddings=False)
        weight = model.get_input_embeddings().weight
        weight.main_grad = torch.zeros(weight.shape)
        model.get_input_embeddings().forward = lambda tokens, w=weight: dt.embedding(tokens, w, accumulate=True)
        for part in ids.chunk(parts):
            with batch_invariant_mode(strict=True):
                logits = model(part, use_cache=False).logits
                F.cross_entropy(logits.flatten(0, 1).float(), part.flatten(), reduction="sum").backward()
        found.append(weight.main_grad)
    assert found[0].abs().max() > 0
    assert same_bits(*found)


@pytest.mark.parametrize("name", ["index_add", "scatter_add", "index_put"])
def test_torch_func_differentiates_sums_under_strict(name: str) -> None:
    functions = {
        "index_add": lambda y: torch.zeros(5, 4).index_add(0, INDEX, y),
        "scatter_add": lambda y: torch.zeros(5, 4).scatter_add(0, EACH, y),
        "index_put": lambda y: torch.zeros(5, 4).index_put((INDEX,), y, accumulate=True),
    }
    with batch_invariant_mode(strict=True):
        found = torch.func.grad(lambda y: (functions[name](y) ** 3).sum())(DY)
    assert same_bits(found, (3 * SUMMED**2)[INDEX])


def test_lists_that_pytorch_takes_for_tuples() -> None:
    x = tensor("normal", F32, (5, 4), 2, grad=True)
    for key in ([slice(0, 2), 1], [[0, 1], [1, 2]], [INDEX, None]):
        with batch_invariant_mode(strict=True):
            found = x[key]
        assert torch.equal(found, x.detach()[key])


@pytest.mark.parametrize("change", ["scatter", "scatter_"])
def test_a_number_that_is_scattered_is_added_one_by_one(change: str) -> None:
    x = tensor("normal", F32, (5, 4), 2)
    with batch_invariant_mode(strict=True):
        found = getattr(x.clone(), change)(0, EACH, 0.1, reduce="add")
    assert same_bits(found, detkern.scatter_sum(torch.full((M, 4), 0.1), INDEX, out=x.clone(), accumulate=True))
