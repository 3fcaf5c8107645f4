"""convert(model, logits="fused"): models of Hugging Face whose losses and log-probabilities make no logits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from frameworks import same_bits

import detkern.torch as dt
from detkern import ArgumentError
from detkern.torch.functions.logits import Logits

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
# What each does to its logits; the temperature and the softcap that this is.
MODELS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "Llama": ({}, {}),
    "Qwen3": ({"tie_word_embeddings": True}, {}),
    "Gemma2": ({"final_logit_softcapping": 5.0}, {"softcap": 5.0}),
    "Granite": ({"logits_scaling": 4.0}, {"temperature": 4.0}),
    "Cohere": ({"logit_scale": 0.25}, {"temperature": 4.0}),
}


def made(name: str) -> tuple[Any, Any, Any]:
    """A model, tokens, and labels some of which are ignored."""
    torch.manual_seed(0)
    more, _ = MODELS[name]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **more))
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return model.float(), ids, labels


def hidden_of(model: Any, ids: Any) -> Any:
    """What the head is given."""
    found = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda layer, args: found.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    return found[0]


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_log_probabilities(name: str) -> None:
    model, ids, labels = made(name)
    before = model(input_ids=ids, labels=labels)
    before.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert dt.convert(model, logits="fused") is model
    assert "logits='fused'" in repr(model.get_output_embeddings())
    outputs = model(input_ids=ids, labels=labels)
    assert type(outputs.logits) is Logits
    hidden, weight, settings = hidden_of(model, ids), model.get_output_embeddings().weight, MODELS[name][1]
    want = dt.linear_cross_entropy(hidden[:, :-1], weight, labels[:, 1:], **settings)
    assert same_bits(outputs.loss, want)
    assert outputs.loss.item() == pytest.approx(before.loss.item(), rel=1e-5)
    logp, entropy = outputs.logits[:, :-1].logp(ids[:, 1:], return_entropy=True)
    expected = dt.linear_logp(hidden[:, :-1], weight, ids[:, 1:], return_entropy=True, **settings)
    assert all(map(same_bits, (logp, entropy), expected))
    outputs.loss.backward()
    for key, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[key], rtol=1e-3, atol=1e-6), key
    assert same_bits(model(input_ids=ids, labels=labels, num_items_in_batch=7).loss * 7, want_sum(outputs, labels))
    dt.revert(model)
    assert type(model(input_ids=ids).logits) is torch.Tensor
    assert "logits" not in vars(model.get_output_embeddings())


def want_sum(outputs: Any, labels: Any) -> Any:
    rows = outputs.logits[:, :-1]
    total = dt.linear_cross_entropy(
        rows.hidden, rows.weight, labels[:, 1:], reduction="sum", temperature=rows.temperature, softcap=rows.softcap
    )
    return total / 7 * 7


def test_compiled_and_under_the_mode() -> None:
    model, ids, labels = made("Gemma2")
    dt.convert(model, logits="fused")
    want = model(input_ids=ids, labels=labels).loss
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(input_ids=ids, labels=labels).loss, want)
    with dt.batch_invariant_mode():
        alone = [model(input_ids=ids[i : i + 1]).logits.logp(ids[i : i + 1]) for i in range(2)]
        both = model(input_ids=ids).logits.logp(ids)
    assert same_bits(torch.cat(alone), both)


@pytest.mark.parametrize("tied", [False, True])
def test_micro_batches_into_main_grad(tied: bool) -> None:
    model, ids, _ = made("Qwen3" if tied else "Llama")
    dt.convert(model, logits="fused", accumulate=True)
    head = model.get_output_embeddings()
    found = []
    with dt.batch_invariant_mode(strict=True):
        for pieces in ([slice(0, 4)], [slice(0, 2), slice(2, 4)]):
            dt.zero_main_grads(model)
            tokens = torch.cat([ids, ids.flip(0)]).repeat(1, 2)[:, :16]
            for piece in pieces:
                rows = model(input_ids=tokens[piece]).logits
                (-rows.logp(tokens[piece]).sum()).backward()
            dt.main_grads_to_grad(model)
            found.append(head.weight.grad.clone())
            model.zero_grad()
    assert same_bits(*found)
    assert found[0].any()


def test_what_cannot_be_fused() -> None:
    model, ids, _ = made("Llama")
    before = {name: type(part) for name, part in model.named_modules()}
    with pytest.raises(ArgumentError, match=r"logits='fused' needs the head, lm_head, which skip names"):
        dt.convert(model, logits="fused", skip="lm_head")
    with pytest.raises(ArgumentError, match="logits='other' must be 'fused' or None"):
        dt.convert(model, logits="other")  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match=r"causal model of transformers, and LlamaModel has no output embeddings"):
        dt.convert(model.model, logits="fused")
    with pytest.raises(ArgumentError, match=r"asks for the head .* and Linear has no output"):
        dt.convert(torch.nn.Linear(2, 2), logits="fused")
    model.lm_head.forward = lambda x: x
    with pytest.raises(
        ArgumentError, match=r"needs the head, lm_head, which cannot be converted: a forward was put on"
    ):
        dt.convert(model, logits="fused")
    del model.lm_head.forward
    assert {name: type(part) for name, part in model.named_modules()} == before
    dt.convert(model)
    dt.convert(model, logits="fused")  # the head of a model that was converted before
    with pytest.raises(ArgumentError, match="argmax needs logits"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    assert type(model(input_ids=ids).logits.made()) is torch.Tensor
