"""convert and revert on the layers that people have: what can be converted computes by the contract, what cannot is
named."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
from frameworks import from_torch, same, same_bits, tensor

import detkern
from detkern.errors import ArgumentError
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary.contracts import FMA, TREE
from detkern.vocabulary.dtypes import BF16, F32

torch = pytest.importorskip("torch", reason="torch is not installed")
from linear_layers import Doubles, converted, follows, linear, operands, plain

import detkern.torch as dt

parametrize = torch.nn.utils.parametrize


def test_the_layer_of_these_tests_tells_pytorch_from_the_contract() -> None:
    layer = linear()
    assert not follows(layer, FMA, operands(layer))
    assert follows(dt.convert(linear()), FMA, operands(layer))


# Subclasses.


class Inherits(torch.nn.Linear):
    note = "kept"

    def doubled(self, x: Any) -> Any:
        return super().forward(x) * 2


def test_a_subclass_that_inherits_forward_is_converted_and_stays_itself() -> None:
    layer = Inherits(200, 6)
    layer.load_state_dict(linear().state_dict())
    x = operands(layer)
    converted(layer, contract="fma")
    assert isinstance(layer, Inherits)
    assert isinstance(layer, dt.Linear)
    assert follows(layer, FMA, x)
    assert "contract=fma" in repr(layer)
    assert layer.note == "kept"
    assert same_bits(layer.doubled(x), layer(x) * 2)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert type(other) is type(layer)
        assert follows(other, FMA, x)
    assert type(dt.revert(layer)) is Inherits
    assert plain(layer, x)


def test_a_parametrized_layer_is_converted_with_its_parametrization() -> None:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", Doubles())
    x, kind = operands(layer), type(layer)
    converted(layer, contract="fma")
    assert follows(layer, FMA, x)
    assert "contract=fma" in repr(layer)
    assert follows(copy.deepcopy(layer), FMA, x)
    parametrize.register_parametrization(layer, "bias", Doubles())
    assert follows(layer, FMA, x)
    dt.revert(layer)
    assert type(layer).__bases__ == kind.__bases__
    assert plain(layer, x)
    converted(layer, contract="fma")
    parametrize.remove_parametrizations(layer, "weight")
    parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is dt.Linear
    assert follows(layer, FMA, x)
    assert type(dt.revert(layer)) is torch.nn.Linear


def test_a_layer_parametrized_after_convert_is_reverted() -> None:
    layer = converted(linear())
    parametrize.register_parametrization(layer, "weight", Doubles())
    x = operands(layer)
    dt.revert(layer)
    assert not isinstance(layer, dt.Linear)
    assert plain(layer, x)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is torch.nn.Linear


def test_a_lazy_layer_keeps_its_contract_when_it_learns_its_size() -> None:
    layer = converted(torch.nn.LazyLinear(6), contract="fma")
    x = tensor("normal", F32, (5, 200), 1)
    layer(x)
    assert type(layer) is dt.Linear
    assert follows(layer, FMA, x)
    unused = converted(torch.nn.LazyLinear(6))
    dt.revert(unused)
    unused(x)
    assert type(unused) is torch.nn.Linear


def test_fully_sharded_layers_are_converted_before_and_after(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this PyTorch has no gloo")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if torch.__version__ < "2.7":
        pytest.skip("fully_shard on the CPU came after PyTorch 2.6")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        results = []
        for first in (True, False):
            model = torch.nn.Sequential(linear(), torch.nn.ReLU(), linear(6, 6))
            if first:
                converted(model, contract="fma")
            fsdp.fully_shard(model[0], mesh=mesh)
            fsdp.fully_shard(model, mesh=mesh)
            kind = type(model[0])
            if not first:
                converted(model, contract="fma")
            assert "contract=fma" in repr(model[0])
            assert isinstance(model[0], fsdp.FSDPModule)
            y = model(operands(linear()))
            y.sum().backward()
            results.append([y, *(parameter.grad.full_tensor() for parameter in model.parameters())])
        whole = converted(torch.nn.Sequential(linear(), torch.nn.ReLU(), linear(6, 6)), contract="fma")
        y = whole(operands(linear()))
        y.sum().backward()
        for result in results:
            assert all(map(same_bits, result, [y, *(parameter.grad for parameter in whole.parameters())]))
        dt.revert(model)
        assert type(model[0]).__mro__[1:] == kind.__mro__[1:]
        with pytest.warns(UserWarning, match=r"0, 2: its weight is a DTensor, and accumulate=True needs parameters"):
            dt.convert(model, accumulate=True)
        parallel = linear()
        parallel.weight = torch.nn.Parameter(distributed.tensor.distribute_tensor(parallel.weight.detach(), mesh))
        with pytest.warns(UserWarning, match="its weight is a DTensor; a layer converted before fully_shard computes"):
            dt.convert(parallel)
        assert type(parallel) is torch.nn.Linear
        gathering = fsdp.fully_shard(dt.Linear(8, 6, accumulate=True), mesh=mesh)
        with pytest.raises(detkern.ArgumentError, match="sharded"):
            dt.zero_main_grads(gathering)
    finally:
        distributed.destroy_process_group()


# Layers that are read.


@pytest.mark.parametrize("padded", [False, True])
def test_the_fast_path_of_transformer_layers_is_off_where_it_reads_converted_layers(padded: bool, device: str) -> None:
    made = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(made, 2).eval().to(device)
    x = tensor("normal", F32, (2, 4, 16), 1, device)
    mask = torch.arange(4, device=device).expand(2, 4) >= torch.tensor([[4], [3]], device=device) if padded else None
    with torch.no_grad():
        before = model(x, src_key_padding_mask=mask)
        with pytest.warns(
            UserWarning, match=r"layers\.0\.self_attn, layers\.1\.self_attn: MultiheadAttention computes"
        ):
            dt.convert(model)
        seen = []
        for layer in model.modules():
            if isinstance(layer, dt.Linear):
                layer.register_forward_hook(lambda *_: seen.append("called"))
        # A hook switches the fast path off by itself, so what decides is looked at, and the result.
        assert not any(layer.activation_relu_or_gelu for layer in model.layers)
        assert not model.use_nested_tensor
        after = model(x, src_key_padding_mask=mask)
        assert len(seen) == 4
        valid = slice(None) if mask is None else ~mask
        assert torch.allclose(after[valid], before[valid], atol=1e-5)
        for layer in model.modules():
            layer._forward_hooks.clear()
        assert same_bits(model(x, src_key_padding_mask=mask), after)
        dt.revert(model)
        assert all(layer.activation_relu_or_gelu == 1 for layer in model.layers)
        assert model.use_nested_tensor
        assert same_bits(model(x, src_key_padding_mask=mask), before)


def test_what_attention_reads_is_named() -> None:
    attention = torch.nn.MultiheadAttention(8, 2)
    with pytest.warns(
        UserWarning, match=r"out_proj: torch\.nn\.MultiheadAttention reads its weight and does not call it"
    ):
        dt.convert(attention)
    assert not any(isinstance(layer, dt.Linear) for layer in attention.modules())
    converted(attention, skip=["", "out_proj"])


# GPT-2.


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0, n_inner=64,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def test_conv1d_of_gpt2_is_converted(device: str) -> None:
    model = gpt2().to(device, torch.bfloat16)
    before = repr(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, report = dt.convert(model, contract="tree", strict=True, report=True)
    assert len(report.converted) == 9
    layer = model.transformer.h[0].mlp.c_fc
    assert "Conv1D(nf=64, nx=32, contract=tree)" in repr(model)
    x, dy = tensor("normal", BF16, (2, 5, 32), 1, device, True), tensor("normal", BF16, (2, 5, 64), 2, device)
    with torch.no_grad():
        layer.bias.normal_()
    y = layer(x)
    weight, rows = from_torch(layer.weight), from_torch(x).reshape(10, 32)
    assert same(from_torch(y).reshape(10, 64), numpy_replay.gemm(TREE, rows, weight, bias=from_torch(layer.bias)))
    y.backward(dy)
    expected = numpy_replay.gemm(TREE, rows.T, from_torch(dy).reshape(10, 64))
    assert same(from_torch(layer.weight.grad.contiguous()), expected)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert same_bits(other(x), y)
    assert repr(dt.revert(model)) == before
    assert same_bits(layer(x), torch.addmm(layer.bias, x.reshape(10, 32), layer.weight).reshape(2, 5, 64))


def test_conv1d_gathers_gradients_over_micro_batches(device: str) -> None:
    """The weight is square, so its transposition does not show in its shape."""
    layer = gpt2().transformer.h[0].attn.c_proj.to(device, torch.bfloat16)
    converted(layer, accumulate=True, contract="mma16")
    x, dy = tensor("normal", BF16, (64, 32), 1, device), tensor("normal", BF16, (64, 32), 2, device)
    other = tensor("normal", BF16, (64, 32), 3, device)
    gathered = []
    for parts in (1, 4):
        dt.zero_main_grads(layer)
        for rows in torch.arange(64).chunk(parts):
            torch.autograd.backward([layer(other[rows]), layer(x[rows])], [dy[rows], dy[rows]])
        assert layer.weight.grad is None
        gathered.append([layer.weight.main_grad.clone(), layer.weight.further_main_grads[0].clone()])
    for results in gathered:
        for operand, result in zip((x, other), results, strict=True):
            assert same_bits(result, detkern.gemm(operand.T, dy, contract="mma16", out_dtype="f32"))
    dt.main_grads_to_grad(layer)
    assert same_bits(layer.weight.grad, sum(gathered[0]).bfloat16())


def test_a_compiled_layer_is_compiled_anew() -> None:
    layer = linear()
    layer.compile(backend="eager")
    x = operands(layer)
    assert plain(layer, x)
    converted(layer, contract="fma")
    assert follows(layer, FMA, x)
    dt.revert(layer)
    assert plain(layer, x)


def test_layers_that_keep_their_settings_get_no_accumulator() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    dt.convert(model)
    with pytest.warns(UserWarning, match="converted before, with accumulate=False"):
        dt.convert(model, accumulate=True)
    dt.zero_main_grads(model)
    assert [hasattr(parameter, "main_grad") for parameter in model.parameters()] == [False, False, True, True]


@pytest.mark.parametrize("name", ["accumulate", "strict", "report"])
def test_flags_are_true_or_false(name: str) -> None:
    layer = torch.nn.Linear(3, 3)
    with pytest.raises(ArgumentError, match=f"{name}='no' must be True or False"):
        dt.convert(layer, **{name: "no"})
    assert type(layer) is torch.nn.Linear
