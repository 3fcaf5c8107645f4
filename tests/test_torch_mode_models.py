"""Whole models of Hugging Face under batch_invariant_mode: a prompt's logits keep their bits in any batch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits
from language_models import MODELS, logits, make_model, prompts

from detkern.torch import batch_invariant_mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_prompt_alone_are_its_logits_in_every_batch(name: str, dtype: Any) -> None:
    model = make_model(name, "cpu", dtype)
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


def test_generation_gives_each_prompt_what_it_gives_it_alone() -> None:
    model = make_model("qwen3", "cpu", torch.float32)
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
