"""accumulate=True: which backward adds to main_grad, one accumulator for each use,
and how an optimizer gets the sum."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frameworks import same_bits, tensor

import detkern
from detkern.errors import ArgumentError
from detkern.vocabulary.dtypes import BF16, F32

torch = pytest.importorskip("torch", reason="torch is not installed")
import detkern.torch as dt

TOKENS, WIDTH = 64, 24


def layer(device: str = "cpu", **options: Any) -> Any:
    made = torch.nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        made.weight.copy_(tensor("normal", F32, (WIDTH, WIDTH), 5) / 6)
        made.bias.copy_(tensor("normal", F32, (WIDTH,), 6))
    dt.convert(made.to(device, torch.bfloat16), **{"accumulate": True, "contract": "mma16", **options})
    if made.accumulate:
        dt.zero_main_grads(made)
    return made


def inputs(device: str = "cpu", seed: int = 1, grad: bool = False) -> Any:
    return tensor("normal", BF16, (TOKENS, WIDTH), seed, device, grad)


def gathered(module: Any) -> list[Any]:
    return [accumulator.clone() for p in module.parameters() for accumulator in (p.main_grad, *p.further_main_grads)]


def equal(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(same_bits, left, right))


def once(device: str) -> list[Any]:
    """What one whole backward gathers."""
    made = layer(device)
    made(inputs(device)).float().square().sum().backward()
    return gathered(made)


# Which backward adds.


class Looks(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["direct", "mode", "checkpoint", "eager", "aot_eager", "inductor"])
def test_a_backward_adds_what_it_asks_for(way: str, device: str) -> None:
    made = layer(device)
    x = inputs(device, grad=True)
    if way == "direct":
        call: Callable[[Any], Any] = made
    elif way == "mode":
        call = made
    elif way == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        def call(x: Any) -> Any:
            return checkpoint(made, x, use_reentrant=False)

    else:
        torch._dynamo.reset()
        call = torch.compile(made, backend=way, fullgraph=True)

    def loss() -> Any:
        return call(x).float().square().sum()

    def run() -> None:
        none = gathered(made)
        (dx,) = torch.autograd.grad(loss(), x)
        assert dx.any()
        loss().backward(inputs=[x])
        assert equal(gathered(made), none)
        assert not any(map(torch.any, none))
        loss().backward(inputs=[made.weight, made.bias])
        assert equal(gathered(made), once(device))
        dt.zero_main_grads(made)
        # One forward, its backward in parts. A compiled backward runs once for each forward.
        split = loss()
        if way not in ("aot_eager", "inductor"):
            split.backward(inputs=[x], retain_graph=True)
            assert equal(gathered(made), none)
            split.backward(inputs=[made.weight, made.bias], retain_graph=True)
            assert equal(gathered(made), once(device))
            torch.autograd.grad(split, x)
            assert equal(gathered(made), once(device))
            dt.zero_main_grads(made)
        loss().backward()
        assert equal(gathered(made), once(device))
        assert made.weight.grad is made.bias.grad is None

    if way == "mode":
        with Looks():
            run()
    else:
        run()


def test_one_of_the_parameters_may_be_asked_for(device: str) -> None:
    made = layer(device)
    made(inputs(device)).float().square().sum().backward(inputs=[made.bias])
    assert not made.weight.main_grad.any()
    assert same_bits(made.bias.main_grad, once(device)[1])


def test_without_gradients_nothing_has_to_be_there(device: str) -> None:
    made = dt.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16, accumulate=True)
    with torch.no_grad():
        assert made(inputs(device)).shape == (TOKENS, WIDTH)
    with pytest.raises(detkern.ArgumentError, match=r"needs weight\.main_grad"):
        made(inputs(device))


def test_autograd_grad_returns_gradients_and_adds_nothing(device: str) -> None:
    made, plain = layer(device), layer(device, accumulate=False)
    found = torch.autograd.grad(made(inputs(device)).float().square().sum(), list(made.parameters()))
    expected = torch.autograd.grad(plain(inputs(device)).float().square().sum(), list(plain.parameters()))
    assert equal(list(found), list(expected))
    assert not any(map(torch.any, gathered(made)))


def test_a_compiled_backward_refuses_what_it_cannot_tell_apart(device: str) -> None:
    made = layer(device)
    torch._dynamo.reset()
    call = torch.compile(made, backend="aot_eager", fullgraph=True)
    with pytest.raises(detkern.ArgumentError, match=r"torch\.autograd\.grad asks for .* compiled backward"):
        torch.autograd.grad(call(inputs(device)).sum(), made.weight)
    assert not any(map(torch.any, gathered(made)))


def test_under_autocast(device: str) -> None:
    made = dt.Linear(WIDTH, WIDTH, device=device, accumulate=True, contract="mma16")
    dt.zero_main_grads(made)
    x = tensor("normal", F32, (TOKENS, WIDTH), 1, device, True)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        y = made(x).float().square().sum()
    torch.autograd.grad(y, x, retain_graph=True)
    assert not any(map(torch.any, gathered(made)))
    y.backward(retain_graph=True)
    first = gathered(made)
    assert made.weight.grad is None
    assert first[0].any()
    dt.zero_main_grads(made)
    y.backward(inputs=[made.weight])
    assert same_bits(made.weight.main_grad, first[0])


def test_a_computed_weight_gathers_nothing() -> None:
    weight = torch.ones(6, 8, requires_grad=True) * 2
    weight.main_grad = torch.zeros(6, 8)
    with pytest.raises(detkern.ArgumentError, match="weight is computed from others: leave accumulate out"):
        dt.linear(torch.ones(4, 8), weight, accumulate=True)


# One accumulator for each use.


class Twice(torch.nn.Module):
    """A layer that is called twice, and a tied one."""

    between = staticmethod(torch.tanh)

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = layer(device)
        self.tied = dt.Linear.from_torch(self.first, accumulate=True, contract="mma16")
        self.tied.bias = None
        dt.zero_main_grads(self)

    def forward(self, x: Any) -> Any:
        return self.tied(self.between(self.first(self.between(self.first(x)))))


@pytest.mark.parametrize("way", ["direct", "checkpoint"])
def test_each_use_is_one_chain_over_the_micro_batches(way: str, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    x = inputs(device)
    results = []
    for parts in (1, 2, 4):
        model = Twice(device)
        for rows in x.chunk(parts):
            y = model(rows) if way == "direct" else checkpoint(model, rows, use_reentrant=False)
            y.float().square().sum().backward()
        results.append(gathered(model))
        assert (len(model.first.weight.further_main_grads), len(model.first.bias.further_main_grads)) == (2, 1)
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
    # The last operation of the forward is the first use.
    model = Twice(device)
    hidden = torch.tanh(model.first(torch.tanh(model.first(x)))).detach()
    y = model.tied(hidden)
    y.float().square().sum().backward()
    assert same_bits(model.first.weight.main_grad, results[0][0])


def test_inductor_keeps_the_uses_apart_too(device: str) -> None:
    torch._dynamo.reset()
    eager, model = Twice(device), Twice(device)
    # Inductor's tanh has other bits than eager PyTorch's on CUDA.
    eager.between = model.between = torch.relu
    eager(inputs(device)).float().square().sum().backward()
    compiled = torch.compile(model, fullgraph=True)
    for rows in inputs(device).chunk(2):
        compiled(rows).float().square().sum().backward()
    assert equal(gathered(model), gathered(eager))


def test_forwards_may_run_ahead_of_backwards(device: str) -> None:
    """As in a pipeline: what counts is the backward."""
    whole, ahead = Twice(device), Twice(device)
    whole(inputs(device)).float().square().sum().backward()
    losses = [ahead(rows).float().square().sum() for rows in inputs(device).chunk(4)]
    for loss in losses:
        loss.backward()
    assert equal(gathered(whole), gathered(ahead))


def test_without_a_list_all_uses_add_to_main_grad(device: str) -> None:
    """Whoever sets main_grad, and knows nothing of further ones, loses no gradient."""
    model, other = Twice(device), Twice(device)
    for parameter in other.parameters():
        del parameter.further_main_grads
    for made in (model, other):
        made(inputs(device)).float().square().sum().backward()
    for parameter, alone in zip(model.parameters(), other.parameters(), strict=True):
        total = sum([x.double() for x in parameter.further_main_grads], parameter.main_grad.double())
        assert torch.allclose(alone.main_grad.double(), total, rtol=1e-5, atol=1e-4)
        assert not torch.allclose(alone.main_grad, parameter.main_grad, rtol=1e-2)


def test_dropping_further_uses_warns() -> None:
    model = Twice("cpu")
    model(inputs()).float().square().sum().backward()
    with pytest.warns(UserWarning, match="zero_main_grads drops further_main_grads") as caught:
        dt.zero_main_grads(model)
    assert caught[0].filename == __file__
    assert not any(map(torch.any, gathered(model)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs()).float().square().sum().backward()
        dt.main_grads_to_grad(model)
        dt.zero_main_grads(model)


# To the optimizer.


def test_the_order_of_the_sum_and_its_one_rounding(device: str) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1, 3, device=device, dtype=torch.bfloat16))
    weight = model.weight
    weight.grad = torch.tensor([[2.0**24, 1.0, 1.0]], device=device, dtype=torch.bfloat16)
    weight.main_grad = torch.tensor([[1.0, 2.0**-8, 2.0**-8]], device=device)
    weight.further_main_grads = [torch.tensor([[-(2.0**24), 2.0**-8, 2.0**-20]], device=device)]
    grad = weight.grad
    dt.main_grads_to_grad(model)
    # (2^24 + 1) - 2^24 = 0 in this order; two halves of an ulp of bfloat16 are rounded together; a tie is broken.
    assert weight.grad is grad
    assert weight.grad.tolist() == [[0.0, 1 + 2.0**-7, 1 + 2.0**-7]]
    assert not weight.main_grad.any()
    assert not weight.further_main_grads[0].any()
    dt.main_grads_to_grad(model)
    assert weight.grad.tolist() == [[0.0, 1 + 2.0**-7, 1 + 2.0**-7]]
    weight.grad = None
    weight.main_grad.fill_(1 + 2.0**-8)
    dt.main_grads_to_grad(model)
    assert (weight.grad.dtype, weight.grad.tolist()) == (torch.bfloat16, [[1.0, 1.0, 1.0]])


def test_a_float32_gradient_is_not_the_accumulator_itself() -> None:
    made = layer().float()
    made.weight.main_grad.fill_(3)
    dt.main_grads_to_grad(made)
    assert (made.weight.grad == 3).all()
    assert not made.weight.main_grad.any()


def test_a_wrong_main_grad_changes_nothing() -> None:
    made = layer()
    made.weight.main_grad.fill_(1)
    made.bias.main_grad = torch.zeros(3)
    with pytest.raises(detkern.ShapeError, match=r"bias\.main_grad has shape \[3\]"):
        dt.main_grads_to_grad(made)
    assert made.weight.grad is None
    assert (made.weight.main_grad == 1).all()


NO_PLACE = {
    "no tensor": (lambda: "zeros", detkern.ArgumentError, "is not a torch.Tensor but str"),
    "another type": (lambda: torch.zeros(WIDTH, WIDTH, dtype=torch.float64), detkern.DTypeError, "is torch.float64"),
    "another device": (lambda: torch.zeros(WIDTH, WIDTH, device="meta"), detkern.DeviceError, "is on meta"),
    "sparse": (lambda: torch.zeros(WIDTH, WIDTH).to_sparse(), detkern.ArgumentError, "torch.sparse_coo"),
    "recorded": (lambda: torch.zeros(WIDTH, WIDTH, requires_grad=True), detkern.ArgumentError, "requires grad"),
}


@pytest.mark.parametrize("name", NO_PLACE)
def test_what_cannot_be_a_main_grad_is_refused_and_made_anew(name: str) -> None:
    made = layer()
    make, kind, said = NO_PLACE[name]
    made.weight.main_grad = wrong = make()
    with pytest.raises(kind, match=rf"^weight\.main_grad .*{said}"):
        made(inputs())
    with pytest.raises(kind, match=rf"^weight\.main_grad .*{said}"):
        dt.main_grads_to_grad(made)
    assert made.weight.grad is None
    assert made.bias.grad is None
    dt.zero_main_grads(made)
    assert made.weight.main_grad is not wrong
    assert same_bits(made.weight.main_grad, torch.zeros(WIDTH, WIDTH))


class Tied(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
        self.body = layer(device)
        self.head = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        dt.convert(self, accumulate=True, contract="mma16")

    def forward(self, tokens: Any) -> Any:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_tied_to_the_head_adds_its_own_part_first(sparse: bool, device: str) -> None:
    model = Tied(device)
    model.embedding.sparse = sparse
    dt.zero_main_grads(model)
    tokens = torch.arange(16, device=device)
    model(tokens).float().square().sum().backward()
    weight = model.head.weight
    part = weight.grad.to_dense().clone()
    assert part.any()
    expected = (part.float() + weight.main_grad).bfloat16()
    dt.main_grads_to_grad(model)
    assert same_bits(weight.grad, expected)
    assert not same_bits(weight.grad, part)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_two_lines_train_with_an_optimizer_whatever_the_cut(optimizer: str, device: str) -> None:
    weights = []
    for parts in (1, 2, 4):
        model = torch.nn.Sequential(Twice(device), torch.nn.ReLU(), layer(device))
        start = copy.deepcopy(list(model.parameters()))
        stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, foreach=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                for rows in inputs(device, step).chunk(parts):
                    model(rows).float().square().sum().div(TOKENS).backward()
                dt.main_grads_to_grad(model)
                stepper.step()
                stepper.zero_grad()
        weights.append([parameter.detach() for parameter in model.parameters()])
        assert not any(map(same_bits, start, weights[-1]))
    assert equal(weights[0], weights[1])
    assert equal(weights[0], weights[2])


def test_the_gradient_that_an_optimizer_gets_is_main_grad_rounded(device: str) -> None:
    made = layer(device)
    made(inputs(device)).float().square().sum().backward()
    expected = [made.weight.detach() - 0.5 * made.weight.main_grad.bfloat16(), made.bias.main_grad.bfloat16()]
    dt.main_grads_to_grad(made)
    torch.optim.SGD([made.weight], lr=0.5, foreach=False).step()
    assert torch.allclose(made.weight.float(), expected[0].float(), rtol=2**-7)
    assert same_bits(made.bias.grad, expected[1])


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_step_that_would_be_silent_warns_once(optimizer: str) -> None:
    made = layer()
    stepper = getattr(torch.optim, optimizer)(made.parameters(), lr=1e-2)
    start = made.weight.detach().clone()
    for expected in (1, 0):
        made(inputs()).float().square().sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stepper.step()
        assert [str(x.message)[:41] for x in caught] == ["this step leaves 2 parameters as they are"] * expected
        assert all(x.filename == __file__ for x in caught)
    assert same_bits(made.weight, start)
    # Whoever steps other tensors by main_grad is not warned, nor is who asked for no gradient of them.
    other = torch.optim.SGD([made.weight.detach().float()], lr=1e-2)
    other.param_groups[0]["params"][0].grad = made.weight.main_grad
    quiet = layer()
    torch.autograd.grad(quiet(inputs(grad=True)).sum(), quiet.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.step()
        torch.optim.SGD(quiet.parameters(), lr=1e-2).step()


def test_data_parallel_is_refused_where_it_would_average_nothing(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this PyTorch has no gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        made = layer()
        model = torch.nn.parallel.DistributedDataParallel(made)
        with pytest.raises(detkern.ArgumentError, match=r"inside of DistributedDataParallel: it averages \.grad"):
            model(inputs())
        with model.no_sync():
            model(inputs()).float().square().sum().backward()
        assert equal(gathered(made), once("cpu"))
        for parameter in made.parameters():
            for accumulator in (parameter.main_grad, *parameter.further_main_grads):
                distributed.all_reduce(accumulator)
        dt.main_grads_to_grad(made)
        assert same_bits(made.weight.grad, once("cpu")[0].bfloat16())
    finally:
        distributed.destroy_process_group()


@pytest.mark.gpu
def test_a_captured_step_hands_over_what_it_gathers() -> None:
    """Two uses of one weight; the second replay starts from zeros again."""
    model, x = Twice("cuda"), inputs("cuda")

    def step() -> None:
        model(x).float().square().sum().backward()
        dt.main_grads_to_grad(model)

    step()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        for parameter in model.parameters():
            parameter.grad.zero_()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad.zero_()
        graph.replay()
        assert equal([parameter.grad for parameter in model.parameters()], expected)


@pytest.mark.parametrize("function", [dt.main_grads_to_grad, dt.zero_main_grads])
def test_what_is_not_a_module_is_refused(function: Callable[[Any], None]) -> None:
    made = layer()
    for wrong in (made.weight, made.parameters(), None):
        with pytest.raises(ArgumentError, match=r"is not a torch\.nn\.Module but \w+; give the one that holds"):
            function(wrong)
