"""Training: micro-batches, checkpointing, several processes, an optimizer. What must be equal is equal bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks import from_torch, same, same_bits, tensor

import detkern
from detkern.operations.bias_gradient.replay import column_sum as replayed_column_sum
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary.contracts import FMA, MMA16
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

torch = pytest.importorskip("torch", reason="torch is not installed")
import detkern.torch as dt

TOKENS = 64


def stack(dtype: DType, device: str, **options: Any) -> Any:
    layers = torch.nn.Sequential(
        torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40, bias=False), torch.nn.ReLU(),
        torch.nn.Linear(40, 12),
    )  # fmt: skip
    with torch.no_grad():
        for seed, parameter in enumerate(layers.parameters()):
            parameter.copy_(tensor("normal", F32, tuple(parameter.shape), 70 + seed) / 6)
    return dt.convert(layers.to(device, getattr(torch, dtype.name)), **options)


def train(model: Any, dtype: DType, device: str, micro_batches: int, steps: int = 3) -> list[Any]:
    """AdamW on float32 master weights; the gradient of each step is what `main_grad` gathered over the micro-batches.
    The loss is a sum over rows, so that it is the same whatever the cut."""
    parameters = list(model.parameters())
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, foreach=False)
    for step in range(steps):
        x, target = (
            tensor("normal", dtype, (TOKENS, 24), step, device),
            tensor("normal", dtype, (TOKENS, 12), 9 + step, device),
        )
        dt.zero_main_grads(model)
        for part, wanted in zip(x.chunk(micro_batches), target.chunk(micro_batches), strict=True):
            (model(part).float() - wanted.float()).square().sum().backward()
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is None
            master.grad = parameter.main_grad
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
    return masters + [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize(("dtype", "contract"), [(BF16, "mma16"), (F16, "mma16"), (F32, "fma"), (BF16, "fma")], ids=str)
def test_every_weight_is_the_same_with_1_2_and_4_micro_batches(dtype: DType, contract: str, device: str) -> None:
    whole = train(stack(dtype, device, accumulate=True, contract=contract), dtype, device, 1)
    start = [parameter.detach() for parameter in stack(dtype, device).parameters()]
    assert not any(torch.equal(left.float(), right.float()) for left, right in zip(whole, start, strict=False))
    for micro_batches in (2, 4):
        cut = train(stack(dtype, device, accumulate=True, contract=contract), dtype, device, micro_batches)
        assert len(cut) == len(whole) == 10
        assert all(same_bits(left, right) for left, right in zip(whole, cut, strict=True))


def test_gradients_of_plain_micro_batches_do_depend_on_the_cut(device: str) -> None:
    """What `accumulate` is for: .grad adds parts that were rounded."""
    gradients = []
    for micro_batches in (1, 4):
        model = stack(BF16, device)
        for part in tensor("normal", BF16, (TOKENS, 24), 1, device).chunk(micro_batches):
            model(part).float().square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert not all(same_bits(left, right) for left, right in zip(*gradients, strict=True))


@pytest.mark.parametrize(("contract", "cut"), [(MMA16, 16), (FMA, 7)], ids=str)
def test_main_grad_is_one_chain_that_starts_at_its_value(contract: Any, cut: int, device: str) -> None:
    """Leading dimensions flattened, bias from the gradient as it came, .grad untouched."""
    x, dy = tensor("normal", BF16, (2, 24, 20), 1, device), tensor("normal", F32, (2, 24, 6), 2, device)
    weight, bias = tensor("normal", BF16, (6, 20), 3, device, True), tensor("normal", BF16, (6,), 4, device, True)
    start, bias_start = tensor("normal", F32, (6, 20), 5, device), tensor("normal", F32, (6,), 6, device)
    options = {"accumulate": True, "contract": contract.name, "out_dtype": torch.float32}

    def gathered(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        weight.main_grad, bias.main_grad = start.clone(), bias_start.clone()
        outputs = [dt.linear(part, weight, bias, **options) for part, _ in parts]  # all forwards before any backward
        for y, (_, dpart) in zip(outputs, parts, strict=True):
            y.backward(dpart)
        assert weight.grad is None
        assert bias.grad is None
        return weight.main_grad, bias.main_grad

    rows, drows = x.reshape(48, 20), dy.reshape(48, 6)
    whole = gathered([(x, dy)])
    parts = gathered([(rows[:cut], drows[:cut]), (rows[cut:], drows[cut:])])
    rounded = from_torch(drows.bfloat16())
    expected = numpy_replay.gemm(contract, rounded.T, from_torch(rows), initial=from_torch(start))
    expected_bias = replayed_column_sum(from_torch(drows), initial=from_torch(bias_start))
    for main_grad, bias_main_grad in (whole, parts):
        assert same(from_torch(main_grad), expected)
        assert same(from_torch(bias_main_grad), expected_bias)


def test_what_main_grad_may_be() -> None:
    x, weight, bias = torch.ones(4, 8), torch.ones(6, 8, requires_grad=True), torch.ones(6, requires_grad=True)
    with pytest.raises(detkern.ArgumentError, match=r"weight\.main_grad, a float32 tensor of shape \[6, 8\]"):
        dt.linear(x, weight, accumulate=True)
    weight.main_grad = torch.zeros(6, 8, dtype=torch.bfloat16)
    with pytest.raises(detkern.DTypeError, match="must be float32"):
        dt.linear(x, weight, accumulate=True)
    weight.main_grad = torch.zeros(8, 6)
    with pytest.raises(detkern.ShapeError, match="must be equal"):
        dt.linear(x, weight, accumulate=True)
    weight.main_grad = torch.zeros(6, 8)
    with pytest.raises(detkern.ArgumentError, match=r"bias\.main_grad"):
        dt.linear(x, weight, bias, accumulate=True)
    bias.main_grad = torch.zeros(6)
    y = dt.linear(x.requires_grad_(), weight, bias, accumulate=True)
    with pytest.raises(detkern.ArgumentError, match="cannot be differentiated"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not weight.main_grad.any()
    # Parameters that are frozen need none.
    frozen = dt.linear(x, torch.ones(6, 8), torch.ones(6), accumulate=True)
    assert torch.autograd.grad(frozen.sum(), x)[0].shape == (4, 8)
    with pytest.raises(detkern.ArgumentError, match=r"inside torch\.func\.vmap"):
        torch.func.vmap(lambda row: dt.linear(row, weight, accumulate=True))(torch.ones(2, 4, 8))


def test_zero_main_grads_makes_and_zeroes(device: str) -> None:
    model = stack(BF16, device, accumulate=True)
    model[2].weight.requires_grad_(False)
    dt.zero_main_grads(model)
    first = model[0].weight.main_grad
    assert (first.dtype, first.shape, first.device) == (torch.float32, (40, 24), model[0].weight.device)
    assert not hasattr(model[2].weight, "main_grad")
    first.fill_(3)
    dt.zero_main_grads(model)
    assert model[0].weight.main_grad is first
    assert not first.any()
    plain = stack(BF16, device)
    dt.zero_main_grads(plain)
    assert not hasattr(plain[0].weight, "main_grad")


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant: bool, device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    results = []
    for checkpointed in (False, True):
        model, x = stack(BF16, device), tensor("normal", BF16, (TOKENS, 24), 1, device, True)
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(same_bits(left, right) for left, right in zip(*results, strict=True))


def _one_process(rank: int, store: str, out: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    detkern.config.num_threads = 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        model = torch.nn.parallel.DistributedDataParallel(stack(F32, "cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(4):
            x, target = tensor("normal", F32, (TOKENS, 24), 1), tensor("normal", F32, (TOKENS, 12), 2)
            half = slice(rank * TOKENS // 2, (rank + 1) * TOKENS // 2)
            optimizer.zero_grad()
            loss = (model(x[half]) - target[half]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        out.put((rank, losses, [from_torch(parameter) for parameter in model.parameters()]))
    finally:
        dist.destroy_process_group()


def test_distributed_data_parallel_trains(tmp_path: Any) -> None:
    """Two processes over gloo: the loss falls in both, and both hold the same weights."""
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    out = context.SimpleQueue()
    processes.spawn(_one_process, (str(tmp_path / "store"), out), nprocs=2)
    (_, losses, weights), (_, other_losses, other_weights) = sorted(
        (out.get() for _ in range(2)), key=lambda got: got[0]
    )
    assert losses[-1] < losses[0]
    assert other_losses[-1] < other_losses[0]
    assert losses != other_losses
    assert all(same(left, right) for left, right in zip(weights, other_weights, strict=True))
    start = [from_torch(parameter) for parameter in stack(F32, "cpu").parameters()]
    assert not any(same(left, right) for left, right in zip(weights, start, strict=True))
