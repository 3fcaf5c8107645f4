"""linear_logp on a GPU against the replay's bits: the cases of its records, scaled logits, blocks of every size,
neighbours, shards, gradients through PyTorch, and graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cu_device import DEVICE

import detkern
from detkern.cu import implementation, linear_logp
from detkern.cu.device import describe
from detkern.dispatch import registry, selfcheck
from detkern.operations.linear_logp.backward import gradients
from detkern.operations.linear_logp.operation import DELTA, FOLD, MERGE
from detkern.operations.linear_logp.problem import part_edges
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu

SCALED: dict[str, Any] = {"temperature": 0.7, "softcap": 20.0}
VARIANTS = [(operation, variant) for operation in (FOLD, MERGE, DELTA) for variant in operation.variants]


def case(m: int, vocabulary: int, depth: int, dtype: DType, kind: str, seed: int, targets: int = 1) -> list[Any]:
    """hidden, weight, target, bias on the host; some targets are ignored."""
    hidden = operands.generate(kind, dtype, (m, depth), seed)
    weight = operands.generate(kind, dtype, (vocabulary, depth), seed + 1)
    target = np.random.default_rng(seed).integers(0, vocabulary, (m, targets))
    target[::7] = -100
    return [hidden, weight, target, operands.generate("normal", F32, (vocabulary,), seed + 2)]


def on_gpu(array: np.ndarray) -> Any:
    """A PyTorch tensor: it has every type."""
    torch = pytest.importorskip("torch")
    if array.dtype.kind in "iu" or array.dtype.itemsize == 4:
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).cuda().view(getattr(torch, array.dtype.name))


def bits(result: Any) -> np.ndarray:
    """Of a tensor or an array."""
    if isinstance(result, np.ndarray):
        return result.view(f"u{result.itemsize}")
    torch = pytest.importorskip("torch")
    integers = {2: torch.int16, 4: torch.int32}[result.element_size()]
    found: np.ndarray = result.detach().contiguous().view(integers).cpu().numpy()
    return found.view(f"u{found.itemsize}")


def equal(left: Any, right: Any) -> bool:
    return left.shape == right.shape and bool((bits(left) == bits(right)).all())


@pytest.mark.parametrize(("operation", "variant"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_cases_of_the_self_check(operation: Any, variant: str) -> None:
    """Hostile operands of every kind, of every type."""
    backend = registry.load("cuda")
    for dtype in operation.variants[variant]:
        found = selfcheck.check(
            operation, variant, dtype,
            lambda sample: implementation.computed(
                describe(DEVICE.index), operation, backend.implementations[operation.problem], sample
            ),
        )  # fmt: skip
        assert not found.differing, (variant, dtype.short, str(found))


@pytest.mark.parametrize("settings", [{}, SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize(("dtype", "contract"), [(BF16, "mma16"), (F16, "mma16"), (BF16, "fma"), (F32, "fma")])
def test_results_and_gradients(dtype: DType, contract: str, settings: dict[str, Any]) -> None:
    """Sizes that tiles of every kernel take; all results; blocks as they come and smaller."""
    for number, (m, vocabulary, depth, targets) in enumerate(((1, 1000, 64, 1), (33, 2500, 40, 2), (200, 700, 128, 1))):
        host = case(m, vocabulary, depth, dtype, ("normal", "wide", "cancel")[number], number, targets)
        asked: dict[str, Any] = {"return_lse": True, "return_entropy": True, "contract": contract, **settings}
        expected = detkern.linear_logp(*host, **asked)
        device = [on_gpu(x) for x in host]
        for got, want in zip(detkern.linear_logp(*device, **asked), expected, strict=True):
            assert equal(got, want)
        state = detkern.linear_logp_partial(*host, contract=contract, **settings)
        grads = operands.generate("normal", F32, (targets + 2, m), 9)
        found = gradients(*device, on_gpu(state), on_gpu(grads), contract=contract, **settings)
        for got, want in zip(found, gradients(*host, state, grads, contract=contract, **settings), strict=True):
            assert equal(got, want)


def test_blocks_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    host = case(300, 5000, 64, BF16, "normal", 1)
    device = [on_gpu(x) for x in host]
    expected = detkern.linear_logp_partial(*host)
    grads = operands.generate("normal", F32, (3, 300), 9)
    whole = gradients(*host, expected, grads)
    for logits, nodes in ((32 << 20, 24 << 20), (1 << 20, 1 << 16), (1, 1)):
        monkeypatch.setattr(linear_logp, "_LOGITS_BYTES", logits)
        monkeypatch.setattr(linear_logp, "_NODES_BYTES", nodes)
        assert equal(detkern.linear_logp_partial(*device), expected), (logits, nodes)
        for got, want in zip(gradients(*device, on_gpu(expected), on_gpu(grads)), whole, strict=True):
            assert equal(got, want), (logits, nodes)


def test_a_row_knows_nothing_of_the_others() -> None:
    """Any number of rows, NaN and infinities in the others, and whoever comes first."""
    hidden, weight, target, bias = (on_gpu(x) for x in case(130, 3000, 64, BF16, "normal", 3))
    whole = detkern.linear_logp(hidden, weight, target, bias, return_lse=True)
    for rows in (1, 2, 15, 64, 129):
        for got, want in zip(
            detkern.linear_logp(hidden[:rows], weight, target[:rows], bias, return_lse=True), whole, strict=True
        ):
            assert equal(got, want[:rows])
    spoiled = hidden.clone()
    spoiled[::2] = float("nan")
    spoiled[1::4] = float("inf")
    for got, want in zip(detkern.linear_logp(spoiled, weight, target, bias, return_lse=True), whole, strict=True):
        assert equal(got[3::4], want[3::4])


def test_shards() -> None:
    for vocabulary in (5, 3000, 4097):
        hidden, weight, target, bias = (on_gpu(x) for x in case(40, vocabulary, 64, BF16, "normal", vocabulary))
        whole = detkern.linear_logp(hidden, weight, target, bias, return_lse=True, return_entropy=True)
        edges = part_edges(vocabulary)
        import torch

        for shards in (1, 2, 4, 8):
            cuts = [slice(edges[i * 8 // shards], edges[(i + 1) * 8 // shards]) for i in range(shards)]
            states = torch.stack([
                detkern.linear_logp_partial(hidden, weight[c], target, bias[c], vocab_start=c.start,
                vocab_size=vocabulary)
                for c in cuts
            ])  # fmt: skip
            merged = detkern.linear_logp_merge(
                states, target, vocab_size=vocabulary, return_lse=True, return_entropy=True
            )
            assert equal(merged[0], whole[0]), (vocabulary, shards)
            assert all(equal(x[:, 0], y) for x, y in zip(merged[1:], whole[1:], strict=True)), (vocabulary, shards)


def test_a_training_step_of_torch() -> None:
    """Autograd, micro-batches into main_grad and a compiled step give the bits of the CPU."""
    torch = pytest.importorskip("torch")
    import detkern.torch as dt

    hidden, weight, target, bias = case(64, 1000, 64, BF16, "normal", 5)

    def step(device: str, compiled: bool) -> list[Any]:
        given = [on_gpu(x).to(device) for x in (hidden, weight, target[:, 0], bias)]
        holder = torch.nn.Module()
        holder.weight, holder.bias = torch.nn.Parameter(given[1]), torch.nn.Parameter(given[3])
        for parameter in holder.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        leaf = given[0].requires_grad_()

        def loss(rows: Any, columns: Any) -> Any:
            logp, entropy = dt.linear_logp(
                rows, holder.weight, columns, holder.bias, return_entropy=True, accumulate=True, contract="mma16"
            )
            return logp.sum() + entropy.sum()

        run = torch.compile(loss, backend="aot_eager") if compiled else loss
        for piece in (slice(0, 32), slice(32, 64)):
            run(leaf[piece], given[2][piece]).backward()
        return [leaf.grad, holder.weight.main_grad, holder.bias.main_grad]

    expected = step("cpu", False)
    for compiled in (False, True):
        assert all(map(equal, step("cuda", compiled), expected)), compiled


def test_a_captured_graph_gives_the_bits_again() -> None:
    torch = pytest.importorskip("torch")
    hidden, weight, target, bias = (on_gpu(x) for x in case(64, 3000, 64, BF16, "normal", 6))
    want = detkern.linear_logp(hidden, weight, target, bias)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        detkern.linear_logp(hidden, weight, target, bias)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = detkern.linear_logp(hidden, weight, target, bias)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert equal(out, want)


def test_what_would_run_and_what_is_refused() -> None:
    hidden, weight, target, bias = (on_gpu(x) for x in case(4, 100, 64, BF16, "normal", 7))
    said = detkern.explain(detkern.linear_logp, hidden, weight, target, bias)
    assert (said.backend, said.contract) == ("cuda", "linear_logp-mma16")
    with pytest.raises(detkern.ContractUnsupported, match="has no linear_logp"):
        detkern.linear_logp(hidden, weight, target, bias, backend="triton")
