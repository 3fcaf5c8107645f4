"""scaled_dot_product_attention under batch_invariant_mode: the formula bit for bit, what it takes,
and its gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits

import detkern
from detkern import rows
from detkern.errors import ContractUnsupported
from detkern.torch import batch_invariant_mode
from detkern.torch.mode import mode

torch.manual_seed(0)
sdpa = F.scaled_dot_product_attention
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(
    dtype: Any = torch.float32, heads: int = 4, shared: int = 2, length: int = 21, keys: int = 35
) -> list[Any]:
    """q, k, v, dout; q and k as views of [B, L, H, E], as models have them."""
    q, k = torch.randn(2, length, heads, 8), torch.randn(2, keys, shared, 8)
    v, dout = torch.randn(2, shared, keys, 12), torch.randn(2, heads, length, 12)
    return [x.to(dtype) for x in (q.transpose(1, 2), k.transpose(1, 2), v, dout)]


def with_gradients(call: Callable[..., Any], inputs: list[Any], dout: Any, **settings: Any) -> list[Any]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    with batch_invariant_mode(strict=True, **settings):
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def replayed(q: Any, k: Any, v: Any, dout: Any, mask: Any, scale: float, contract: str) -> list[Any]:
    """The documented order in detkern's own functions, one head and sequence at a time: out, dq, dk, dv and the
    gradient of the scores."""
    group, found = q.shape[1] // k.shape[1], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            qh, kh, vh, dh = q[b, h], k[b, h // group], v[b, h // group], dout[b, h]
            scores = detkern.gemm(qh, kh.T, contract=contract) * scale
            scores = scores.masked_fill(~mask[b, h], -math.inf) if mask.dtype is torch.bool else scores + mask[b, h]
            weights = rows.softmax(scores, out_dtype="float32")
            dead = (scores == -math.inf).all(-1, keepdim=True)
            weights = torch.where(dead, 0.0, weights)
            rounded = weights.to(q.dtype)
            dweights = detkern.gemm(dh, vh.T, contract=contract).float()
            dscores = rows.softmax_backward(dweights, weights, out_dtype=str(scores.dtype).removeprefix("torch."))
            scaled = dscores.to(q.dtype) * scale
            found.append(
                [
                    detkern.gemm(rounded, vh, contract=contract),
                    detkern.gemm(scaled, kh, contract=contract),
                    detkern.gemm_db(scaled, qh, contract=contract),
                    detkern.gemm_db(rounded, dh, contract=contract),
                    dscores,
                ]
            )
    out, dq, dk, dv, dscores = (torch.stack(x).unflatten(0, q.shape[:2]) for x in zip(*found, strict=True))
    if group > 1:
        dk, dv = (rows.sum(x.unflatten(1, (-1, group)).movedim(2, -1)) for x in (dk, dv))
    return [out, dq, dk, dv, dscores]


@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("masked", ["no", "causal", "bool", "added", "binary32 added"])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_formula_and_its_gradients_bit_for_bit(dtype: Any, masked: str, shared: int, device: str) -> None:
    q, k, v, dout = operands(dtype, shared=shared)
    shape = 2, 4, 21, 35
    mask = {
        "no": None,
        "causal": None,
        "bool": torch.rand(2, 1, *shape[2:]) < 0.6,
        "added": torch.randn(shape[1:]).to(dtype),
        "binary32 added": torch.randn(shape),
    }[masked]
    if masked == "bool":
        mask[1, 0, 3] = False
    whole = {"no": torch.ones(shape, dtype=torch.bool), "causal": torch.ones(shape, dtype=torch.bool).tril()}.get(
        masked
    )
    wanted = replayed(q, k, v, dout, mask.expand(shape) if whole is None else whole, 0.3, "fma")
    inputs, there = [x.to(device) for x in (q, k, v)], None if mask is None else mask.to(device)
    options = {"is_causal": masked == "causal", "scale": 0.3, "enable_gqa": shared != 4}
    got = with_gradients(lambda *x: sdpa(*x, there, **options), inputs, dout.to(device), contract="fma")
    for here, right in zip(got, wanted[:4], strict=True):
        assert same_bits(here, right)
    if masked == "binary32 added":
        leaf = there.requires_grad_()
        with batch_invariant_mode(strict=True, contract="fma"):
            assert same_bits(torch.autograd.grad(sdpa(*inputs, leaf, **options), leaf, dout.to(device))[0], wanted[4])


@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("masked", ["no", "bool"])
@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_the_eager_attention_of_a_model_that_runs_under_the_mode(dtype: Any, masked: str, shared: int) -> None:
    """Hugging Face's, whose mask is added; no row is hidden as a whole."""
    q, k, v, dout = operands(dtype, shared=shared)
    seen = None if masked == "no" else torch.rand(2, 1, 21, 35) < 0.6
    if seen is not None:
        seen[..., 2] = True

    def eager(q: Any, k: Any, v: Any) -> Any:
        k, v = (x[:, :, None].expand(2, shared, 4 // shared, 35, -1).reshape(2, 4, 35, -1) for x in (k, v))
        weights = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5
        if seen is not None:
            weights = weights + torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return torch.matmul(F.softmax(weights, dim=-1, dtype=torch.float32).to(dtype), v)

    wanted = with_gradients(eager, [q, k, v], dout)
    got = with_gradients(lambda *x: sdpa(*x, seen, enable_gqa=shared != 4), [q, k, v], dout)
    for here, there in zip(got, wanted, strict=True):
        assert same_bits(here, there)


def test_accuracy_against_float64() -> None:
    q, k, v, dout = operands(length=64, keys=96)
    mask = torch.randn(64, 96)
    call = lambda q, k, v, mask: sdpa(q, k, v, mask, enable_gqa=True)
    got = with_gradients(call, [q, k, v, mask], dout)
    leaves = [x.double().requires_grad_() for x in (q, k, v, mask)]
    wanted = call(*leaves)
    for here, there in zip(got, [wanted, *torch.autograd.grad(wanted, leaves, dout.double())], strict=True):
        torch.testing.assert_close(here.double(), there, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("hidden", ["bool", "added"])
def test_a_row_without_a_key_is_zero_and_so_are_its_gradients(hidden: str) -> None:
    q, k, v, dout = operands()
    mask = torch.ones(21, 35, dtype=torch.bool)
    mask[4] = False
    mask = mask if hidden == "bool" else torch.zeros(21, 35).masked_fill(~mask, -math.inf)
    out, dq, dk, _ = with_gradients(lambda *x: sdpa(*x, mask, enable_gqa=True), [q, k, v], dout)
    assert same_bits(out[:, :, 4], torch.zeros(2, 4, 12))
    assert not dq[:, :, 4].any()
    dout[:, :, 4] = math.nan
    again = with_gradients(lambda *x: sdpa(*x, mask, enable_gqa=True), [q, k, v], dout)
    assert same_bits(again[1], dq)
    assert same_bits(again[2], dk)


def test_a_gradient_that_is_nan_stays_in_its_row_and_reaches_no_hidden_key() -> None:
    q, k, v, dout = operands(keys=21, shared=4)
    clean = with_gradients(lambda *x: sdpa(*x, is_causal=True), [q, k, v], dout)
    dout[:, :, 5] = math.nan
    _, dq, dk, _ = with_gradients(lambda *x: sdpa(*x, is_causal=True), [q, k, v], dout)
    kept = [i for i in range(21) if i != 5]
    assert same_bits(dq[:, :, kept], clean[1][:, :, kept])
    assert bool(dq[:, :, 5].isnan().all() and dk[:, :, :6].isnan().all())
    assert same_bits(dk[:, :, 6:], clean[2][:, :, 6:])


@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 1), (torch.bfloat16, 16)])
def test_gradients_keep_their_bits_when_a_sequence_is_padded(dtype: Any, group: int) -> None:
    """Rows and keys after it, and whole groups of the contract before it; whatever they hold."""
    q, k, v, dout = operands(dtype, length=19, keys=23)
    alone = with_gradients(lambda *x: sdpa(*x, enable_gqa=True), [q, k, v], dout)
    padded = [F.pad(x, (0, 0, before, 5), value=7.0) for x, before in ((q, group), (k, 2 * group), (v, 2 * group))]
    mask = torch.zeros(19 + group + 5, 23 + 2 * group + 5, dtype=torch.bool)
    mask[group : group + 19, 2 * group : 2 * group + 23] = True
    got = with_gradients(lambda *x: sdpa(*x, mask, enable_gqa=True), padded, F.pad(dout, (0, 0, group, 5), value=3.0))
    for here, there, before in zip(got, alone, (group, group, 2 * group, 2 * group), strict=True):
        assert same_bits(here[..., before : before + there.shape[-2], :], there)


# Shapes of q, k and v, and what else is given.
SHAPES: dict[str, tuple[Any, ...]] = {
    "matrices": ((4, 8), (5, 8), (5, 3), {}),
    "three dimensions": ((4, 6, 8), (2, 5, 8), (2, 5, 8), {"enable_gqa": True, "scale": 2}),
    "five dimensions": (*[(2, 3, 4, 5, 8)] * 3, {"attn_mask": torch.rand(2, 1, 4, 5, 5) < 0.7}),
    "batches that broadcast": ((1, 4, 6, 8), (3, 1, 5, 8), (3, 1, 5, 8), {}),
    "shared keys that broadcast": ((3, 4, 6, 8), (1, 2, 5, 8), (1, 2, 5, 8), {"enable_gqa": True}),
    "other heads of values": ((2, 4, 6, 8), (2, 2, 5, 8), (2, 1, 5, 8), {"enable_gqa": True}),
    "no keys": ((2, 3, 4, 8), (2, 3, 0, 8), (2, 3, 0, 8), {}),
    "no rows": ((2, 3, 0, 8), (2, 3, 4, 8), (2, 3, 4, 8), {}),
    "no sequences": (*[(0, 3, 4, 8)] * 3, {"is_causal": True}),
    "no heads": (*[(2, 0, 4, 8)] * 3, {}),
    "no heads that are shared": (*[(2, 0, 4, 8)] * 3, {"enable_gqa": True, "is_causal": True}),
    "a mask for all": (*[(3, 4, 8)] * 3, {"attn_mask": torch.tensor(True)}),
    "a mask of keys": ((3, 6, 8), (1, 4, 8), (1, 4, 8), {"attn_mask": torch.tensor([0.5, -1.0, -torch.inf, 2.0])}),
    "a boolean mask of keys": ((6, 8), (4, 8), (4, 8), {"attn_mask": torch.tensor([True, False, True, False])}),
    "no features": ((2, 3, 4, 0), (2, 3, 4, 0), (2, 3, 4, 8), {}),
    "no features of values": ((2, 3, 4, 8), (2, 3, 4, 8), (2, 3, 4, 0), {}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_takes_the_shapes_that_pytorch_takes(name: str) -> None:
    *shapes, options = SHAPES[name]
    q, k, v = (torch.randn(shape) for shape in shapes)
    with batch_invariant_mode(strict=True):
        got = sdpa(q, k, v, **options)
    torch.testing.assert_close(got, sdpa(q, k, v, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "heads", "length", "keys"), [(2, 3, 0, 4), (2, 3, 4, 0), (0, 3, 4, 4), (2, 0, 4, 4)])
def test_gradients_of_nothing_are_zeros(batch: int, heads: int, length: int, keys: int) -> None:
    inputs = [torch.randn(batch, heads, length, 8), *(torch.randn(batch, heads, keys, 8) for _ in range(2))]
    mask = torch.randn(length, keys)
    got = with_gradients(sdpa, [*inputs, mask], torch.ones(batch, heads, length, 8))
    for x, dx in zip([*inputs, mask], got[1:], strict=True):
        assert same_bits(dx, torch.zeros_like(x))


def test_a_causal_mask_and_another_hide_together() -> None:
    q, k, v, _ = operands(shared=4)
    mask = torch.rand(21, 35) < 0.7
    with batch_invariant_mode(strict=True):
        assert same_bits(sdpa(q, k, v, mask, is_causal=True), sdpa(q, k, v, mask.tril()))


@pytest.mark.parametrize("shape", [(21, 35), (4, 1, 35), (2, 1, 21, 35), (1, 1, 1, 35)])
def test_the_gradient_of_a_broadcast_mask_is_one_row_sum(shape: tuple[int, ...]) -> None:
    q, k, v, dout = operands()
    mask = torch.randn(shape)
    dmask = with_gradients(lambda q, k, v, m: sdpa(q, k, v, m, scale=0.3, enable_gqa=True), [q, k, v, mask], dout)[4]
    dscores = replayed(q, k, v, dout, mask.expand(2, 4, 21, 35), 0.3, "fma")[4]
    assert same_bits(dmask, _summed_to(dscores, shape))


def _summed_to(x: Any, shape: tuple[int, ...]) -> Any:
    sizes = (1,) * (x.dim() - len(shape)) + shape
    kept = [i for i, n in enumerate(sizes) if n == x.shape[i]]
    lost = [i for i in range(x.dim()) if i not in kept]
    return rows.sum(x.permute(*kept, *lost).flatten(len(kept))).reshape(shape)


def test_dropout_is_refused_or_said_once() -> None:
    q = torch.randn(1, 2, 5, 8)
    with (
        batch_invariant_mode(strict=True),
        pytest.raises(ContractUnsupported, match=r"dropout_p > 0.*set dropout_p to 0"),
    ):
        sdpa(q, q, q, dropout_p=0.1)
    mode._said.clear()
    with batch_invariant_mode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        got = [sdpa(q, q, q, dropout_p=0.5) for _ in range(2)]
    assert [str(x.message).split(":")[0] for x in said] == [
        "scaled_dot_product_attention (dropout_p > 0) is not covered by batch_invariant_mode"
    ]
    torch.manual_seed(1)
    assert torch.equal(got[0], sdpa(q, q, q, dropout_p=0.5))


def test_other_types_are_pytorchs_and_strict_refuses_them() -> None:
    q = torch.randn(1, 2, 5, 8).double()
    with batch_invariant_mode(strict=True), pytest.raises(ContractUnsupported, match=r"float64.*cast the operands"):
        sdpa(q, q, q)
    with batch_invariant_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(sdpa(q, q, q), F.scaled_dot_product_attention(q, q, q))


def test_a_kernel_of_attention_that_is_called_itself_is_refused_with_advice_that_works() -> None:
    q = torch.randn(1, 2, 5, 8)
    with (
        batch_invariant_mode(strict=True),
        pytest.raises(ContractUnsupported, match=r"use torch\.nn\.functional\.scaled_dot"),
    ):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    with batch_invariant_mode(strict=True):
        assert same_bits(torch.ops.aten.scaled_dot_product_attention(q, q, q), sdpa(q, q, q))


def test_what_pytorch_does_not_take_has_pytorchs_message() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 3, 5, 8)
    calls: list[Callable[[], Any]] = [
        lambda: sdpa(q[0, 0, 0], q, q),
        lambda: sdpa(q, k, k),
        lambda: sdpa(q, k, k, enable_gqa=True),
        lambda: sdpa(q, q.bfloat16(), q),
        lambda: sdpa(q, q[..., :4], q),
        lambda: sdpa(q, q, q, torch.zeros(5, 5).half()),
        lambda: sdpa(q, q, q, torch.zeros(4, 5)),
        lambda: sdpa(q[0], q[0], q[0], torch.zeros(2, 4, 5, 5)),
        lambda: sdpa(q, q, q, dropout_p=-1.0),
        lambda: sdpa(q, q, None),
    ]
    for call in calls:
        with pytest.raises(Exception) as wanted:  # noqa: PT011
            call()
        with batch_invariant_mode(), pytest.raises(wanted.type) as got:
            call()
        assert str(got.value).splitlines()[0] == str(wanted.value).splitlines()[0]


@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_that_is_differentiated_has_the_same_bits_and_a_right_derivative(causal: bool) -> None:
    q, k, _, _ = operands(keys=21)

    def gradient(q: Any, k: Any, graph: bool) -> tuple[Any, ...]:
        out = sdpa(q, k, k.cos(), is_causal=causal, enable_gqa=True)
        return torch.autograd.grad(out.square().sum(), (q, k), create_graph=graph)

    leaves = [x.detach().requires_grad_() for x in (q, k)]
    with batch_invariant_mode(strict=True):
        plain, kept = gradient(*leaves, False), gradient(*leaves, True)
        second = torch.autograd.grad(sum(x.square().sum() for x in kept), leaves)
    for here, there in zip(plain, kept, strict=True):
        assert same_bits(here, there)
    leaves = [x.detach().double().requires_grad_() for x in (q, k)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = torch.autograd.grad(sum(x.square().sum() for x in gradient(*leaves, True)), leaves)
    for here, there in zip(second, wanted, strict=True):
        torch.testing.assert_close(here.double(), there, rtol=1e-4, atol=1e-3)


def test_transforms_of_torch_func() -> None:
    q, k, v, _ = operands(keys=21, shared=4)
    attend = lambda q, k=k[0], v=v[0]: sdpa(q, k, v, is_causal=True)
    with batch_invariant_mode(strict=True):
        assert same_bits(torch.func.vmap(attend)(q), torch.stack([attend(x) for x in q]))
        assert same_bits(torch.func.vmap(attend, in_dims=(0, 0, 0))(q, k, v), sdpa(q, k, v, is_causal=True))
        gradient = torch.func.grad(lambda q: attend(q).sum())
        leaf = q[0].clone().requires_grad_()
        assert same_bits(gradient(q[0]), torch.autograd.grad(attend(leaf).sum(), leaf)[0])
        assert same_bits(torch.func.vmap(gradient)(q), torch.stack([gradient(x) for x in q]))
        tangent = torch.func.jvp(attend, (q[0],), (q[1],))[1]
    x, dx = q[0].double(), q[1].double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = torch.func.jvp(lambda q: attend(q, k[0].double(), v[0].double()), (x,), (dx,))[1]
    torch.testing.assert_close(tangent.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_it_has_the_eager_bits(backend: str) -> None:
    torch._dynamo.reset()
    q, k, v, dout = operands(torch.bfloat16)
    mask = torch.rand(2, 1, 21, 35) < 0.8
    call = lambda *x: sdpa(*x, mask, enable_gqa=True)
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for wanted, got in zip(*(with_gradients(f, [q, k, v], dout) for f in (call, compiled)), strict=True):
        assert same_bits(got, wanted)


def test_the_registered_ops_keep_pytorchs_rules() -> None:
    q, k, v, dout = operands()
    leaves = [x.detach().requires_grad_() for x in (q, k, v, torch.randn(21, 35))]
    torch.library.opcheck(torch.ops.detkern.attention, (*leaves, 0.3, True, "fma"))
    for needs in ([True] * 4, [False, True, False, False]):
        backward = (dout, q, k, v, leaves[3].detach(), needs, 0.3, True, "fma")
        torch.library.opcheck(torch.ops.detkern.attention_backward, backward)


def test_vmap_over_the_registered_ops_has_the_bits_of_a_loop() -> None:
    q, k, v, dout = operands()
    masks, needs = torch.randn(3, 4, 21, 35), [True] * 4
    ops, settings = torch.ops.detkern, (0.3, True, "fma")
    forward = torch.func.vmap(lambda m: ops.attention(q, k, v, m, *settings), out_dims=1)(masks)
    backward = torch.func.vmap(lambda m: ops.attention_backward(dout, q, k, v, m, needs, *settings))(masks)
    for i, mask in enumerate(masks):
        assert same_bits(forward[:, i], ops.attention(q, k, v, mask, *settings))
        alone = ops.attention_backward(dout, q, k, v, mask, needs, *settings)
        assert all(same_bits(here[i], there) for here, there in zip(backward, alone, strict=True))


def test_autocast_chooses_the_type() -> None:
    q, k, v, _ = operands(shared=4)
    mask = torch.randn(21, 35)
    with batch_invariant_mode(strict=True):
        wanted = sdpa(*(x.bfloat16() for x in (q, k, v, mask)))
        with torch.autocast("cpu", torch.bfloat16):
            assert same_bits(sdpa(q, k, v, mask), wanted)


@pytest.mark.parametrize("padded", [False, True])
def test_pytorchs_own_layers_of_attention_are_covered(padded: bool) -> None:
    """MultiheadAttention without weights, and an encoder layer; a sequence alone has its bits of the batch."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(3, 7, 16)
    hidden = torch.zeros(3, 7, dtype=torch.bool)
    hidden[1, 4:] = padded
    with batch_invariant_mode(strict=True):
        whole = layer(x, src_key_padding_mask=hidden if padded else None)
        direct = layer.self_attn(x, x, x, key_padding_mask=hidden if padded else None, need_weights=False)[0]
        for i in range(3):
            kept = x[i : i + 1, : 4 if padded and i == 1 else 7]
            assert same_bits(layer(kept), whole[i : i + 1, : kept.shape[1]])
            alone = layer.self_attn(kept, kept, kept, need_weights=False)[0]
            assert same_bits(alone, direct[i : i + 1, : kept.shape[1]])
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, layer(x))
