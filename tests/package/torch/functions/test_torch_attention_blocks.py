"""Attention in blocks: no bit depends on where the blocks are cut, and what is held beside operands and results is
bounded."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from frameworks import same_bits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from detkern.torch.functions import attention_blocks
from detkern.torch.functions.attention_blocks import Formula, backward, forward

torch.manual_seed(0)


def operands(dtype: Any, heads: int, shared: int, length: int, keys: int, width: int = 8) -> list[Any]:
    """q, k, v, dout."""
    sizes = (heads, length, width), (shared, keys, width), (shared, keys, width + 4), (heads, length, width + 4)
    return [torch.randn(2, *size).to(dtype) for size in sizes]


def both(q: Any, k: Any, v: Any, dout: Any, mask: Any, formula: Formula, of_mask: bool) -> list[Any]:
    with torch.no_grad():
        gradients = backward(dout, q, k, v, mask, formula, (True, True, True, of_mask))
        return [x for x in (forward(q, k, v, mask, formula), *gradients) if x is not None]


# Bounds in scores of a head and in bytes: pieces of 16 rows, of 48, one head at a time, a few keys at a time.
CUTS = [(1, None), (None, None), (48, 3000)]


@pytest.mark.parametrize("masked", ["bool", "added"])
@pytest.mark.parametrize(
    ("dtype", "contract"),
    [("float32", "fma"), ("bfloat16", "mma16"), ("float16", "mma8"), ("bfloat16", "tree"), ("float16", "tree-mma16")],
)
def test_the_bits_do_not_depend_on_the_cuts(
    dtype: str, contract: str, masked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    length, keys = 101, 37
    q, k, v, dout = operands(getattr(torch, dtype), 6, 2, length, keys)
    mask = torch.rand(2, 1, length, keys) < 0.7 if masked == "bool" else torch.randn(6, length, keys).to(q.dtype)
    formula = Formula(0.3, masked == "bool", contract)
    whole = both(q, k, v, dout, mask, formula, masked == "added")
    pieces: list[int] = []
    cut = attention_blocks._pieces
    monkeypatch.setattr(attention_blocks, "_pieces", lambda *args: (found := cut(*args), pieces.append(len(found)))[0])
    for rows, held in CUTS:
        scores = keys * (length if rows is None else rows)
        monkeypatch.setattr(attention_blocks, "SCORES", scores * attention_blocks._PER_SCORE)
        monkeypatch.setattr(attention_blocks, "PIECES", held or 1 << 30)
        pieces.clear()
        for there, here in zip(both(q, k, v, dout, mask, formula, masked == "added"), whole, strict=True):
            assert same_bits(there, here)
        assert (min(pieces) > 2) == (rows is not None)


@pytest.mark.parametrize("shape", [(101, 37), (6, 101, 37), (2, 1, 101, 37), (6, 1, 37), (101, 1), (2, 6, 101, 37)])
def test_the_gradient_of_a_mask_does_not_depend_on_the_cuts(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a causal mask too, whose rows are counted from the first one of all."""
    q, k, v, dout = operands(torch.bfloat16, 6, 2, 101, 37)
    mask, needs = torch.randn(shape).bfloat16(), (False, False, False, True)
    whole = backward(dout, q, k, v, mask, Formula(0.3, True, "mma16"), needs)[3]
    calls: list[int] = []
    by_rows = attention_blocks._mask_by_rows
    monkeypatch.setattr(attention_blocks, "_mask_by_rows", lambda *args: (calls.append(1), by_rows(*args))[1])
    monkeypatch.setattr(attention_blocks, "MASKED", 2 * 6 * 37 * 2 * 5)
    assert same_bits(backward(dout, q, k, v, mask, Formula(0.3, True, "mma16"), needs)[3], whole)
    assert len(calls) == ((shape[-2] == 101 and len(shape) < 4) or shape[:2] == (2, 1))


@pytest.mark.parametrize(("dtype", "contract"), [("float32", "fma"), ("bfloat16", "mma16"), ("bfloat16", "tree")])
def test_cut_on_a_device_it_has_the_bits_of_the_whole_on_the_cpu(
    dtype: str, contract: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, formula = operands(getattr(torch, dtype), 6, 2, 101, 37), Formula(0.3, True, contract)
    whole = both(*tensors, None, formula, False)
    monkeypatch.setattr(attention_blocks, "SCORES", 37 * 48 * attention_blocks._PER_SCORE)
    monkeypatch.setattr(attention_blocks, "PIECES", 3000)
    for there, here in zip(both(*(x.to(device) for x in tensors), None, formula, False), whole, strict=True):
        assert same_bits(there, here)


def test_a_trees_pieces_are_its_subtrees() -> None:
    """Leaves of 32 rows: 5 of them are split after 2, and the last 3 after 1 more."""
    found = attention_blocks._pieces(149, 64, "tree")
    assert [(x.start, x.stop, merges) for x, merges in found] == [(0, 64, 0), (64, 96, 0), (96, 149, 2)]
    assert [len(attention_blocks._pieces(149, 48, name)) for name in ("tree", "mma16")] == [5, 4]


def test_nan_and_infinities_have_the_same_bits_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = operands(torch.bfloat16, 2, 2, 80, 40)
    dout[0, 0, 3, 2], dout[1, 1, 70, 0], q[0, 1, 20, 1] = torch.nan, torch.inf, -torch.nan
    formula = Formula(0.3, True, "mma16")
    whole = both(q, k, v, dout, None, formula, False)
    assert any(x.isnan().any() for x in whole)
    monkeypatch.setattr(attention_blocks, "SCORES", 1)
    for there, here in zip(both(q, k, v, dout, None, formula, False), whole, strict=True):
        assert same_bits(there, here)
        assert (there.view(torch.int16)[there.isnan()] == 0x7FFF).all()


def test_what_is_not_needed_is_not_computed_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = operands(torch.float32, 4, 2, 50, 30)
    mask, formula = torch.randn(50, 30), Formula(0.3, False, "fma")
    monkeypatch.setattr(attention_blocks, "SCORES", 1)
    monkeypatch.setattr(attention_blocks, "PIECES", 2000)
    every = backward(dout, q, k, v, mask, formula, (True,) * 4)
    for i in range(4):
        alone = backward(dout, q, k, v, mask, formula, tuple(j == i for j in range(4)))
        assert same_bits(alone[i], every[i])
        assert all(x is None for j, x in enumerate(alone) if j != i)


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive and were made under it, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.alive | given:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    ("dtype", "contract", "heads", "length", "keys", "scores", "pieces"),
    [
        ("float32", "fma", (1, 1), 1300, 12000, None, None),
        ("bfloat16", "mma16", (4, 1), 100, 300, 1 << 17, 1 << 17),
        ("float32", "fma", (4, 2), 100, 300, 1 << 17, 1 << 17),
        ("float16", "tree", (4, 1), 100, 150, 1 << 17, 1 << 17),
        ("bfloat16", "mma16", (256, 32), 2, 40, 1 << 17, 1 << 14),
    ],
)
def test_what_is_held_stays_within_the_bound(
    dtype: str,
    contract: str,
    heads: tuple[int, int],
    length: int,
    keys: int,
    scores: int | None,
    pieces: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the bounds as they are, then at one that is reached on a CPU in less time."""
    if scores and pieces:
        monkeypatch.setattr(attention_blocks, "SCORES", scores)
        monkeypatch.setattr(attention_blocks, "PIECES", pieces)
        monkeypatch.setattr(attention_blocks, "MASKED", pieces // 4)
        monkeypatch.setattr(attention_blocks, "_SUMMED", 1 << 10)
    q, k, v, dout = operands(getattr(torch, dtype), *heads, length, keys, 64 if keys > length > 99 else 8)
    mask = torch.randn(length, keys).to(q.dtype)
    bound = attention_blocks.SCORES + attention_blocks.PIECES + attention_blocks.MASKED
    assert scores or bound < 256 << 20
    formula = Formula(0.3, True, contract)
    for run in (
        lambda: (forward(q, k, v, mask, formula),),
        lambda: backward(dout, q, k, v, mask, formula, (True, True, True, True)),
    ):
        with torch.no_grad(), Held() as held:
            results = run()
        kept = sum(x.numel() * x.element_size() for x in results if x is not None)
        assert 0 < held.peak - kept <= bound
    # All scores at once would not, of the heads of both sequences: so many elements in binary32 and in the operands'
    # type.
    assert 2 * heads[0] * length * keys * (4 + q.element_size()) > bound
