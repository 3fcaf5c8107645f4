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
