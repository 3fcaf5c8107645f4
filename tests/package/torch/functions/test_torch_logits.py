"""`Logits`: what is noted on the way to a loss, that the results are linear_logp's, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits

import detkern.torch as dt
from detkern import ArgumentError, ShapeError
from detkern.torch.functions.logits import Logits

F = torch.nn.functional


def operands(*lead: int, dtype: Any = torch.bfloat16) -> tuple[Any, ...]:
    """hidden, weight, target, bias."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*lead, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(90, 16, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, 90, lead, generator=generator)
    target[..., ::5] = -100
    return hidden, weight, target, torch.randn(90, generator=generator).to(dtype)


def test_log_probabilities_and_losses_are_those_of_linear_logp() -> None:
    hidden, weight, target, bias = operands(3, 8)
    logits = Logits(hidden, weight, bias, contract="fma")
    assert (logits.shape, logits.size(-1), logits.ndim, len(logits)) == ((3, 8, 90), 90, 3, 3)
    assert logits.dtype is torch.bfloat16
    assert logits.float().dtype is torch.float32
    assert logits.requires_grad
    assert logits.device == hidden.device
    settings: Any = {"contract": "fma", "return_entropy": True, "return_lse": True}
    for got, want in zip(
        logits.logp(target, return_entropy=True, return_lse=True),
        dt.linear_logp(hidden, weight, target, bias, **settings),
        strict=True,
    ):
        assert same_bits(got, want)
    for reduction in ("none", "sum", "mean"):
        loss = F.cross_entropy(
            logits.float()[..., :-1, :].contiguous().view(-1, 90), target[..., 1:].reshape(-1), reduction=reduction
        )
        want = dt.linear_cross_entropy(hidden[:, :-1], weight, target[:, 1:], bias, reduction=reduction, contract="fma")
        assert same_bits(loss, want.reshape(loss.shape))
    grads = [torch.autograd.grad(one, (hidden, weight)) for one in (loss, want)]
    assert all(map(same_bits, *grads))
    one = F.log_softmax(logits[1], -1)
    assert same_bits(one.gather(-1, target[1].clamp(min=0)[:, None])[:, 0], logits[1].logp(target[1].clamp(min=0)))
    assert same_bits(torch.gather(logits.log_softmax(-1), -1, target[..., None]), logits.logp(target[..., None]))
    made = logits.made()
    assert same_bits(made, dt.linear(hidden, weight, bias, out_dtype=torch.float32, contract="fma"))


SCALED: list[tuple[Callable[[Any], Any], dict[str, float]]] = [
    (lambda x: x / 2.5, {"temperature": 2.5}),
    (lambda x: x * 0.25, {"temperature": 4.0}),
    (lambda x: 0.25 * x, {"temperature": 4.0}),
    (lambda x: x.div(2.0).mul(4.0), {"temperature": 0.5}),
    (lambda x: x.to(torch.float32).div_(2.0), {"temperature": 2.0}),
    (lambda x: torch.tanh(x / 30.0) * 30.0, {"softcap": 30.0}),
    (lambda x: 30.0 * (x / 30.0).tanh() / 0.7, {"softcap": 30.0, "temperature": 0.7}),
    (lambda x: torch.tanh(x), {"softcap": 1.0}),
]


@pytest.mark.parametrize(("scale", "settings"), SCALED)
def test_scaling_is_noted(scale: Callable[[Any], Any], settings: dict[str, float]) -> None:
    hidden, weight, target, _ = operands(8)
    logits = Logits(hidden, weight)
    found = scale(logits)
    if settings == {"softcap": 1.0}:
        with pytest.raises(ArgumentError, match="logits end with tanh"):
            found.logp(target)
        found = found * 1.0
    assert same_bits(found.logp(target), dt.linear_logp(hidden, weight, target, **settings))
    exact = scale((hidden.double() @ weight.double().t()).detach()).double()
    assert torch.allclose(found.made().double(), exact, rtol=1e-5, atol=1e-5)
    assert same_bits(logits.logp(target), dt.linear_logp(hidden, weight, target))  # as it was
    by_two = dt.linear_logp(hidden, weight, target, **{**settings, "temperature": 2 * settings.get("temperature", 1.0)})
    assert same_bits(found.logp(target, temperature=2.0), by_two)


INDICES: list[Any] = [
    1, slice(0, 2), (slice(None), slice(None, -1)), (slice(None), slice(None, -1), slice(None)),
    (Ellipsis, slice(None, -1), slice(None)), (Ellipsis, -1, slice(None)), (0, Ellipsis), (slice(None), -1),
    (None, Ellipsis), (slice(None), None, 2), torch.tensor([2, 0]), torch.ones(3, 8, dtype=torch.bool).tril(),
    (torch.ones(3, 8, dtype=torch.bool).tril(), slice(0, 90)), (slice(None), slice(-3, None), slice(None)),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_are_indexed_as_those_of_logits(index: Any) -> None:
    hidden, weight, *_ = operands(3, 8)
    assert same_bits(Logits(hidden, weight)[index].made(), Logits(hidden, weight).made()[index])


def test_views() -> None:
    hidden, weight, *_ = operands(3, 8)
    logits, made = Logits(hidden, weight), Logits(hidden, weight).made()
    for view in (
        lambda x: x.view(-1, 90), lambda x: x.reshape(24, -1), lambda x: x.view((4, 6, 90)), lambda x: x.flatten(0, 1),
        lambda x: x[:1].squeeze(0), lambda x: x.unsqueeze(1), lambda x: x.to(torch.float32, copy=True),
        lambda x: x.to("cpu"), lambda x: x.to(device=x.device), lambda x: x.to(torch.ones(1)),
    ):  # fmt: skip
        view: Any
        assert same_bits(view(logits).made(), view(made))
    assert [row.shape for row in logits] == [(8, 90)] * 3


REFUSED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("argmax", lambda x, t: x.argmax(-1)),
    ("softmax", lambda x, t: torch.softmax(x, -1)),
    ("an index of the vocabulary", lambda x, t: x[..., 0]),
    ("an index of the vocabulary", lambda x, t: x[:, :, :50]),
    ("scaling by a tensor", lambda x, t: x / torch.ones(3, 8, 1)),
    ("a second softcap", lambda x, t: (torch.tanh(x / 3) * 3).tanh()),
    ("flatten with the vocabulary", lambda x, t: x.flatten()),
    ("unsqueeze behind the vocabulary", lambda x, t: x.unsqueeze(-1)),
    ("another dimension", lambda x, t: x.log_softmax(1)),
    ("another dimension", lambda x, t: x.log_softmax(-1).gather(1, t[..., None])),
    ("cross_entropy with label_smoothing", lambda x, t: F.cross_entropy(x[0], t[0], label_smoothing=0.1)),
    ("cross_entropy with weight", lambda x, t: F.cross_entropy(x[0], t[0], torch.ones(90))),
    ("cross_entropy with probabilities", lambda x, t: F.cross_entropy(x[0], torch.ones(8, 90))),
    ("classes in another dimension", lambda x, t: F.cross_entropy(x, t)),
    (r"to\(torch.float64\)", lambda x, t: x.to(torch.float64)),
    (r"to\('meta'\)", lambda x, t: x.to("meta")),
    ("sum", lambda x, t: torch.sum(x.log_softmax(-1))),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_needs_logits_is_refused(words: str, call: Callable[[Any, Any], Any]) -> None:
    hidden, weight, target, _ = operands(3, 8)
    with pytest.raises(ArgumentError, match=f"{words}.* needs logits, and a head with logits='fused' makes none"):
        call(Logits(hidden, weight), target)


def test_other_errors() -> None:
    hidden, weight, *_ = operands(3, 8)
    logits = Logits(hidden, weight)
    assert not hasattr(logits, "argmax")
    assert not hasattr(logits, "__array__")
    for shape in ((-1, 45), (-1, -1), (7, -1)):
        with pytest.raises(ShapeError):
            logits.view(shape)
    with pytest.raises(ArgumentError, match=r"divided by 3.0 before tanh"):
        torch.tanh(logits / 3.0) * 4.0
    with pytest.raises(ArgumentError, match=r"divided by 3.0 before tanh"):
        torch.tanh(logits / 3.0) / 3.0
