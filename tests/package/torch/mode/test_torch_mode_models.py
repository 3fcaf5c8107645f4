"""Whole models of Hugging Face under batch_invariant_mode: a prompt's logits keep their bits in any batch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits
from language_models import MODELS, Decoder, logits, make_model, prompts

from detkern.torch import batch_invariant_mode


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_prompt_alone_are_its_logits_in_every_batch(name: str, dtype: Any, attention: str) -> None:
    model = make_model(name, "cpu", dtype, attention)
    tokens = prompts(7, 128, "cpu")
    with batch_invariant_mode(strict=True):
        alone = [logits(model, [x], [0])[0] for x in tokens]
        right = logits(model, tokens, [0] * 7, length=45)
        left = logits(model, tokens, [16 * (i % 3) for i in range(7)])
    with batch_invariant_mode(strict=True, contract={"bmm": "fma"}):
        by_fma = [logits(model, [x], [0])[0] for x in tokens]
        anywhere = logits(model, tokens, [3, 7, 1, 9, 22, 5, 2])
    for i in range(7):
        assert same_bits(right[i], alone[i])
        assert same_bits(left[i], alone[i])
        assert same_bits(anywhere[i], by_fma[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_both_attentions_of_a_model_have_the_same_bits_and_the_same_gradients(name: str, dtype: Any) -> None:
    """Alone, where the mask is is_causal with shared keys, and padded, where it is a tensor with repeated ones."""
    tokens, found = prompts(4, 128, "cpu"), []
    for attention in ("eager", "sdpa"):
        model = make_model(name, "cpu", dtype, attention)
        with batch_invariant_mode(strict=True):
            rows = [logits(model, [x], [0])[0] for x in tokens] + logits(model, tokens, [0, 16, 32, 0])
            ids = torch.stack([x[:3] for x in tokens])
            for mask in (torch.ones(4, 3), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])):
                labels = ids.masked_fill(mask == 0, -100)
                model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        found.append(rows + [p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_the_readmes_lines_hold_for_a_model_as_it_comes(name: str) -> None:
    """Log-probabilities of a prompt alone and in batches padded on either side, with the attention that the model
    chose."""
    import detkern.torch

    model = make_model(name, "cpu", torch.bfloat16, attention=None)
    assert model.config._attn_implementation == "sdpa"
    prompt, longer = torch.arange(3, 24), torch.arange(2, 39)
    pad = len(longer) - len(prompt)  # a multiple of 16
    right, left = (torch.stack([F.pad(prompt, sides), longer]) for sides in ((0, pad), (pad, 0)))
    found = []
    for tokens, sides in ((prompt[None], None), (right, (0, pad)), (left, (pad, 0))):
        mask = torch.ones_like(tokens)
        if sides is not None:
            mask[0] = F.pad(torch.ones_like(prompt), sides)
        with torch.no_grad(), detkern.torch.batch_invariant_mode(strict=True):
            scores = model(tokens, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
            found.append(torch.log_softmax(scores[0, mask[0] == 1], -1))
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])


def test_a_models_gradients_do_not_depend_on_what_shares_the_batch() -> None:
    """Those that a sequence gives to its own inputs."""
    model = make_model("llama", "cpu", torch.float32, hidden_size=40, intermediate_size=52)
    inputs = torch.randn(3, 16, 40)
    found = []
    for batch in (inputs, inputs[:1]):
        leaf = batch.clone().requires_grad_()
        with batch_invariant_mode(strict=True):
            scores = model(inputs_embeds=leaf, attention_mask=torch.ones(batch.shape[:2]), use_cache=False).logits
            loss = torch.log_softmax(scores, -1)[..., 3].sum()
        found.append(torch.autograd.grad(loss, leaf)[0][0])
    assert same_bits(*found)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generation_gives_each_prompt_what_it_gives_it_alone(attention: str) -> None:
    model = make_model("qwen3", "cpu", torch.float32, attention)
    tokens = prompts(3, 128, "cpu")
    longest = max(len(x) for x in tokens)
    ids = torch.stack([torch.cat([x.new_zeros(longest - len(x)), x]) for x in tokens])
    mask = torch.stack([torch.arange(longest) >= longest - len(x) for x in tokens]).long()

    def generate(ids: Any, mask: Any) -> Any:
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip

    with batch_invariant_mode(strict=True, contract={"bmm": "fma"}):
        together = generate(ids, mask)
        for i, x in enumerate(tokens):
            alone = generate(x[None], torch.ones(1, len(x), dtype=torch.long))
            assert torch.equal(alone.sequences[0, len(x) :], together.sequences[i, longest:])
            for one, all_of_them in zip(alone.logits, together.logits, strict=True):
                assert same_bits(one[0], all_of_them[i])


def test_a_training_step_with_gradient_checkpointing_has_the_bits_of_one_without() -> None:
    model = make_model("llama", "cpu", torch.float32).train()
    ids = torch.randint(0, 128, (2, 19), generator=torch.Generator().manual_seed(5))
    found = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            # Renamed in the course of transformers 5.
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with batch_invariant_mode(strict=True):
            model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for without, with_it in zip(*found, strict=True):
        assert same_bits(without, with_it)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_that_a_graph_can_hold_has_the_bits_of_one_forward(name: str, attention: str) -> None:
    """A static cache with a mask over its empty places, written in place: what a CUDA graph captures
    (test_torch_mode_gpu.py)."""
    model = make_model(name, "cpu", torch.bfloat16, attention)
    prompt = torch.randint(0, 128, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad(), batch_invariant_mode(strict=True):
        decoder = Decoder(model, prompt)
        places = {x.data_ptr() for x in (decoder.token, decoder.position, decoder.logits)}
        tokens = [prompt]
        for _ in range(4):
            tokens.append(decoder.token.clone())
            decoder.rehearse()
            found = decoder.step()
            whole = model(torch.cat(tokens, 1), use_cache=False).logits[:, -1]
            assert same_bits(found, whole)
        assert places == {x.data_ptr() for x in (decoder.token, decoder.position, decoder.logits)}
