"""batch_invariant_mode on a GPU: whole models whose logits keep their bits in any batch, graphs, and no trace."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits
from language_models import MODELS, Decoder, logits, make_model, prompts
from training_layouts import differing, layouts, main_gradients, sequences, trained

import detkern
import detkern.torch as dt
from detkern.torch import batch_invariant_mode

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_prompt_alone_are_its_logits_in_every_batch(name: str, dtype: str, attention: str) -> None:
    model = make_model(name, "cuda", getattr(torch, dtype), attention, **SIZES)
    tokens = prompts(32, SIZES["vocab_size"], "cuda")
    with batch_invariant_mode(strict=True):
        alone = [logits(model, [x], [0])[0] for x in tokens[:7]]
        for batch in (2, 7, 32):
            right = logits(model, tokens[:batch], [0] * batch)
            left = logits(model, tokens[:batch], [16 * (i % 4) for i in range(batch)])
            longer = logits(model, tokens[:batch], [0] * batch, length=117)
            for i in range(min(batch, 7)):
                for there in (right, left, longer):
                    assert same_bits(there[i], alone[i])


@pytest.mark.parametrize("name", MODELS)
def test_attention_by_fma_keeps_logits_at_any_offset(name: str) -> None:
    model = make_model(name, "cuda", torch.bfloat16, **SIZES)
    tokens = prompts(7, SIZES["vocab_size"], "cuda")
    with batch_invariant_mode(strict=True, contract={"bmm": "fma"}):
        alone = [logits(model, [x], [0])[0] for x in tokens]
        for i, there in enumerate(logits(model, tokens, [3, 7, 1, 9, 22, 5, 2])):
            assert same_bits(there, alone[i])


@pytest.mark.parametrize("name", MODELS)
def test_gpu_and_cpu_ops_of_one_contract_agree(name: str) -> None:
    """Not a whole model, whose elementwise functions are PyTorch's: the covered ops on a model's own tensors."""
    model = make_model(name, "cuda", torch.bfloat16, **SIZES)
    weight = model.lm_head.weight.detach()[:300]
    x = torch.randn(5, 9, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with batch_invariant_mode(strict=True, contract="mma16"):
        there, here = F.linear(x.cuda(), weight), F.linear(x, weight.cpu())
        assert same_bits(there.cpu(), here)
        assert same_bits(there.softmax(-1).cpu(), here.softmax(-1))
        assert same_bits(there.float().mean((0, 2)).cpu(), here.float().mean((0, 2)))
        bias, beta, alpha = torch.randn(9, 300).to(torch.bfloat16), 0.3, -1.7
        cpu = torch.addmm(bias, x[0], weight.cpu().t(), beta=beta, alpha=alpha)
        gpu = torch.addmm(bias.cuda(), x[0].cuda(), weight.t(), beta=beta, alpha=alpha)
        assert same_bits(gpu.cpu(), cpu)


STATISTICS: dict[str, Any] = {
    "logsumexp": lambda x: x.logsumexp(-1),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(-1, correction=0),
    "norm": lambda x: x.norm(dim=-1),
    "norm of all": lambda x: torch.linalg.vector_norm(x, ord=1),
    "cumsum": lambda x: x.cumsum(0),
    "mse": lambda x: F.mse_loss(x, x.detach() * 0.5 + 1),
    "l1": lambda x: F.l1_loss(x, x.detach() * 0.5 + 1, reduction="sum"),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x.detach() * 0.5 + 1, beta=0.3),
    "huber": lambda x: F.huber_loss(x, x.detach() * 0.5 + 1, delta=0.7),
    "nll": lambda x: F.nll_loss(x, torch.arange(len(x), device=x.device) % 7),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_and_losses_have_the_cpus_bits(name: str, dtype: Any) -> None:
    found = []
    for device in ("cpu", "cuda"):
        x = (torch.randn(300, 257, generator=torch.Generator().manual_seed(0)) * 3).to(device, dtype).requires_grad_()
        with batch_invariant_mode(strict=True):
            y = STATISTICS[name](x)
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            found.append((y.detach().cpu(), torch.autograd.grad(y, x, dy)[0].cpu()))
    assert all(same_bits(there, here) for here, there in zip(*found, strict=True))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, t: F.binary_cross_entropy_with_logits(x, t),
        lambda x, t: F.kl_div(x, t, reduction="sum"),
        lambda x, t: F.kl_div(x, t.log(), reduction="batchmean", log_target=True),
    ],
)
def test_losses_of_elements_in_any_order_are_one_number(loss: Any) -> None:
    x, t = (torch.rand(70_000, device="cuda", generator=torch.Generator("cuda").manual_seed(i)) for i in (0, 1))
    order = torch.randperm(70_000, device="cuda")
    with batch_invariant_mode(strict=True):
        leaf = x.clone().requires_grad_()
        first = loss(leaf, t)
        (dx,) = torch.autograd.grad(first, leaf)
        turned = x[order].requires_grad_()
        second = loss(turned, t[order])
        assert same_bits(first.detach().reshape(1), second.detach().reshape(1))
        assert same_bits(dx[order], torch.autograd.grad(second, turned)[0])
    torch.testing.assert_close(first, loss(x, t), rtol=1e-4, atol=1e-6)


def test_a_captured_graph_replays_the_modes_bits() -> None:
    model = make_model("llama", "cuda", torch.bfloat16, **SIZES)
    first, second = (torch.randint(0, 8192, (3, 20), device="cuda") for _ in range(2))
    mask = torch.full((1, 1, 20, 20), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16, device="cuda").triu(1)
    positions = torch.arange(20, device="cuda")[None]

    def run(ids: Any) -> Any:
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

    with torch.no_grad(), batch_invariant_mode(strict=True):
        expected = [run(ids) for ids in (first, second)]
        ids = first.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(ids)
    for given, wanted in zip(
        (first, second), expected, strict=True
    ):  # outside of the mode: the graph holds its kernels
        ids.copy_(given)
        graph.replay()
        assert same_bits(captured, wanted)


def test_the_mode_leaves_no_trace_and_the_backward_follows_the_forward() -> None:
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run() -> tuple[Any, Any]:
        y = F.linear(x, w).softmax(-1).float().mean(-1)
        return y, lambda: torch.autograd.grad(y, (x, w), torch.ones_like(y) / 3, retain_graph=True)

    plain, plain_gradients = run()
    before = [plain, *plain_gradients()]
    with batch_invariant_mode(strict=True):
        ours, gradients = run()
        inside = gradients()
    outside = gradients()  # on autograd's own thread for the device
    with pytest.raises(RuntimeError, match="on purpose"), batch_invariant_mode():
        raise RuntimeError("on purpose")
    after, after_gradients = run()
    for left, right in zip(before, [after, *after_gradients()], strict=True):
        assert same_bits(left, right)
    for left, right in zip(inside, outside, strict=True):
        assert same_bits(left, right)
    product = detkern.gemm(x.detach(), w.detach(), trans_b=True)
    assert same_bits(ours, detkern.rows.mean(detkern.rows.softmax(product).float()))


def test_cpu_tensors_are_untouched_by_a_mode_for_cuda() -> None:
    x = torch.randn(33, 129)
    plain = x @ x.t()
    with batch_invariant_mode(device_types="cuda", strict=True):
        assert same_bits(x @ x.t(), plain)
        x.double() @ x.double().t()
        y = x.cuda()
        assert same_bits(y @ y.t(), detkern.gemm(y, y, trans_b=True))


@pytest.mark.parametrize("op", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_float32_result_of_16_bit_operands_is_the_accumulator(op: str) -> None:
    a = torch.randn(2, 17, 96, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2, 96, 24, device="cuda", dtype=torch.bfloat16)
    c = torch.randn(2, 17, 24, device="cuda")
    wanted = detkern.gemm(a, b, out_dtype="float32")
    with batch_invariant_mode(strict=True):
        if op == "mm":
            assert same_bits(torch.mm(a[0], b[0], out_dtype=torch.float32), wanted[0])
        elif op == "bmm":
            assert same_bits(torch.bmm(a, b, out_dtype=torch.float32), wanted)
        elif op == "addmm":
            assert same_bits(torch.addmm(c[0], a[0], b[0], out_dtype=torch.float32), wanted[0] + c[0])
        else:
            assert same_bits(torch.baddbmm(c, a, b, out_dtype=torch.float32), wanted + c)


LENGTHS = [1024, 16, 528, 1008, 496, 1024]  # 4,096 tokens


@pytest.mark.parametrize("name", MODELS)
def test_strict_training_is_the_same_in_every_cut_and_layout(name: str) -> None:
    """Gradients of all parameters of one step, and all weights after 20 steps of AdamW."""
    found, weights = {}, {}
    for layout, parts in layouts(sequences(LENGTHS, SIZES["vocab_size"], "cuda"), torch.bfloat16).items():
        model = dt.convert(make_model(name, "cuda", torch.bfloat16, **SIZES), accumulate=True)
        found[layout] = main_gradients(model, parts, batch_invariant_mode(strict=True))
        if layout in ("whole, packed", "cut, padded", "another cut, packed"):
            weights[layout] = trained(model, parts, batch_invariant_mode(strict=True), 20)
    for results in (found, weights):
        expected = results["whole, packed"]
        for layout, result in results.items():
            assert not differing(expected, result), layout


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_captured_decode_step_writes_what_an_eager_one_writes(name: str, attention: str) -> None:
    """With a static cache, under the mode; the graph replays outside of it."""
    model = make_model(name, "cuda", torch.bfloat16, attention, **SIZES)
    prompt = torch.randint(0, SIZES["vocab_size"], (3, 20), generator=torch.Generator().manual_seed(4)).cuda()
    with torch.no_grad(), batch_invariant_mode(strict=True):
        eager = Decoder(model, prompt)
        expected = [eager.step().clone() for _ in range(6)]
        captured = Decoder(model, prompt)
        graph = captured.capture()
    found = []
    for _ in range(6):
        graph.replay()
        found.append(captured.logits.clone())
        captured.written()
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)
