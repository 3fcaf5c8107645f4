"""Reading and writing by an index in detkern.torch: PyTorch's results, and gradients by the scattered sum,
bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frameworks import same_bits, tensor

import detkern
from detkern.errors import ArgumentError, DTypeError, ShapeError
from detkern.vocabulary.dtypes import BF16, F16, F32

torch = pytest.importorskip("torch", reason="torch is not installed")
import detkern.torch as dt
from detkern.torch.functions.indexing import positions

X = (5, 7, 3)
I, J = torch.tensor([4, 0, -2, 4, 1, 4]), torch.tensor([[3], [-1]])
MASK = torch.arange(35).reshape(5, 7) % 3 == 1
KEYS: dict[str, Any] = {
    "a tensor": I, "a tuple": (I,), "a list": [0, 0, 2], "two dimensions": (I, I % 7), "broadcast": (I[:2], J),
    "a slice between": (I[:3] % 3, slice(None), torch.tensor([0, 0, 2])), "after a slice": (slice(1, 4), [1, 1, 2]),
    "the last": (slice(None), slice(None), [0, 0]), "after an ellipsis": (..., I % 3), "a mask": MASK,
    "a mask and a number": (MASK, 0), "a mask of a line": MASK[:, 0], "None": (None, I), "None behind": (I, None),
    "one number": torch.tensor(2), "a true": True,
    "a list of slices": [slice(0, 2), 1], "a list of a tensor": [I, 1], "a true tensor": torch.tensor(True),
    "no element": [],
}  # fmt: skip


def whole(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Numbers whose sums are exact, so that PyTorch's own have the same bits."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32))


def agrees(ours: Callable[..., Any], theirs: Callable[..., Any], *operands: Any) -> None:
    """Results and gradients, as bits."""
    results = []
    for function in (ours, theirs):
        given = [x.clone().requires_grad_() for x in operands]
        y = function(*given)
        results.append((y.detach(), *torch.autograd.grad(y, given, whole(tuple(y.shape), 9))))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)


@pytest.mark.parametrize("key", KEYS)
def test_brackets(key: str) -> None:
    agrees(lambda x: dt.take(x, KEYS[key]), lambda x: x[KEYS[key]], whole(X))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_along_every_dimension(dim: int) -> None:
    size = X[dim]
    index = torch.arange(11) * 5 % size
    added = whole(tuple(11 if d == dim % 3 else n for d, n in enumerate(X)), 1)
    agrees(lambda x: dt.index_select(x, dim, index), lambda x: torch.index_select(x, dim, index), whole(X))
    agrees(
        lambda x, s: dt.index_add(x, dim, index.int(), s, alpha=2),
        lambda x, s: torch.index_add(x, dim, index, s, alpha=2),
        whole(X), added,
    )  # fmt: skip
    shape = [9 if d == dim % 3 else n - 1 for d, n in enumerate(X)]
    each = torch.arange(int(np.prod(shape))).reshape(shape) * 5 % size
    agrees(lambda x: dt.gather(x, dim, each), lambda x: torch.gather(x, dim, each), whole(X))
    agrees(
        lambda x, s: dt.scatter_add(x, dim, each, s), lambda x, s: torch.scatter_add(x, dim, each, s),
        whole(X), whole(tuple(shape), 2),
    )  # fmt: skip


@pytest.mark.parametrize("key", ["a tuple", "two dimensions", "broadcast", "a mask", "a mask of a line"])
def test_index_put(key: str) -> None:
    indices = KEYS[key] if isinstance(KEYS[key], tuple) else (KEYS[key],)
    shape = whole(X)[indices].shape
    for values in (tuple(shape), (3,), (1,)):
        agrees(
            lambda x, v: dt.index_put(x, indices, v), lambda x, v: torch.index_put(x, indices, v, accumulate=True),
            whole(X), whole(values, 3),
        )  # fmt: skip


def test_a_larger_src_is_read_where_index_is() -> None:
    index = torch.zeros(2, 3, dtype=torch.int64)
    agrees(
        lambda x, s: dt.scatter_add(x, 0, index, s), lambda x, s: torch.scatter_add(x, 0, index, s[:2, :3]),
        whole((4, 5)), whole((3, 4), 1),
    )  # fmt: skip


def test_embedding() -> None:
    tokens = torch.tensor([[3, 0, 3], [19, 3, 7]])
    for padding in (None, 3, -1):
        agrees(
            lambda w, p=padding: dt.embedding(tokens, w, p),
            lambda w, p=padding: torch.nn.functional.embedding(tokens, w, p),
            whole((20, 6)),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_the_gradient_of_embedding_is_the_scattered_sum(dtype: Any) -> None:
    weight = tensor("normal", dtype, (9, 5), 1, grad=True)
    tokens = (torch.arange(200) ** 2 % 11).clamp(max=8).reshape(4, 50)
    dy = tensor("wide", dtype, (4, 50, 5), 2)
    dt.embedding(tokens, weight, padding_idx=4).backward(dy)
    index = tokens.reshape(-1).masked_fill(tokens.reshape(-1) == 4, -1)
    assert same_bits(weight.grad, detkern.scatter_sum(dy.reshape(-1, 5), index, 9))
    assert (weight.grad[4] == 0).all()
    if dtype == F32:  # rounding to 16 bits hides the order here
        assert not same_bits(weight.grad, detkern.scatter_sum(dy.reshape(-1, 5).flip(0), index.flip(0), 9))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_16_bit_sums_onto_a_tensor_are_rounded_once(dtype: Any) -> None:
    x, source = tensor("normal", dtype, (4, 5), 1), tensor("cancel", dtype, (90, 5), 2)
    index = torch.arange(90) % 3
    expected = x.clone()
    detkern.scatter_sum(source, index, out=expected, accumulate=True)
    assert same_bits(dt.index_add(x, 0, index, source), expected)
    assert same_bits(dt.scatter_add(x, 0, index[:, None].expand(90, 5), source), expected)
    assert same_bits(dt.index_put(x, (index,), source), expected)
    scaled = x.clone()
    detkern.scatter_sum(source.float() * 0.3, index, out=scaled, accumulate=True)
    assert same_bits(dt.index_add(x, 0, index, source, alpha=0.3), scaled)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_micro_batches_have_the_bits_of_the_whole_batch_wherever_they_are_cut(dtype: Any) -> None:
    tokens, dy = torch.arange(61) ** 2 % 7, tensor("cancel", dtype, (61, 5), 2)

    def gathered(cuts: list[int]) -> Any:
        weight = torch.nn.Parameter(tensor("normal", dtype, (8, 5), 1))
        weight.main_grad = torch.zeros(8, 5)
        for low, high in zip([0, *cuts], [*cuts, 61], strict=True):
            dt.embedding(tokens[low:high], weight, accumulate=True).backward(dy[low:high])
        assert weight.grad is None
        return weight.main_grad

    once = gathered([])
    assert same_bits(once, detkern.scatter_sum(dy, tokens, 8, out_dtype="float32"))
    for cuts in ([1], [30, 31], [16, 32, 48], [60]):
        assert same_bits(gathered(cuts), once)


def test_which_backward_adds_to_main_grad() -> None:
    def parameter() -> Any:
        made = torch.nn.Parameter(torch.ones(4, 2))
        made.main_grad, made.further_main_grads = torch.zeros(4, 2), []
        return made

    tokens, weight = torch.tensor([1, 1, 3]), parameter()
    x = torch.ones(3, 2, requires_grad=True)
    (dt.embedding(tokens, weight, accumulate=True) * x).sum().backward(inputs=[x])
    assert (weight.main_grad == 0).all()
    loss = dt.embedding(tokens, weight, accumulate=True).sum()
    assert torch.autograd.grad(loss, weight)[0].tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
    assert (weight.main_grad == 0).all()
    # Two uses: each has an accumulator of its own, the last of the forward the first.
    first, second = (dt.embedding(tokens, weight, accumulate=True) for _ in range(2))
    (first * 2 + second * dt.embedding(tokens * 0, weight.detach())).sum().backward()
    assert {float(weight.main_grad[1, 0]), float(weight.further_main_grads[0][1, 0])} == {2.0, 4.0}
    with pytest.raises(ArgumentError, match="cannot be differentiated"):
        dt.embedding(tokens, weight, accumulate=True).sum().backward(create_graph=True)
    with pytest.raises(ArgumentError, match=r"needs weight\.main_grad"):
        dt.embedding(tokens, torch.nn.Parameter(torch.ones(4, 2)), accumulate=True)


def test_compiled() -> None:
    tokens, source = torch.tensor([[3, 0, 3], [1, 3, 7]]), tensor("cancel", BF16, (6, 4), 2)

    def step(weight: Any) -> Any:
        y = dt.embedding(tokens, weight, 1)
        return (
            dt.index_add(weight, 0, tokens.reshape(-1), source).sum()
            + (y * y).sum()
            + dt.index_select(weight, 1, tokens[0]).sum()
        )

    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        weight = tensor("cancel", BF16, (9, 4), 1, grad=True)
        function(weight).backward()
        found.append(weight.grad)
    assert same_bits(*found)


def test_compiled_it_adds_to_main_grad() -> None:
    tokens = torch.tensor([3, 0, 3, 1])
    weight = torch.nn.Parameter(torch.ones(5, 2))
    weight.main_grad, weight.further_main_grads = torch.zeros(5, 2), []
    torch.compile(lambda: dt.embedding(tokens, weight, accumulate=True).sum(), backend="aot_eager")().backward()
    assert weight.main_grad[:, 0].tolist() == [1, 1, 0, 2, 0]
    assert weight.grad is None


def test_transforms() -> None:
    x, index = whole((4, 3)), torch.tensor([1, 1, 0])
    pairs: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda x: (dt.index_select(x, 0, index) ** 3).sum(), lambda x: (x.index_select(0, index) ** 3).sum()),
        (
            lambda x: (dt.index_add(x, 0, index, x[:3] ** 2) ** 2).sum(),
            lambda x: (torch.index_add(x, 0, index, x[:3] ** 2) ** 2).sum(),
        ),
    ]
    for ours, theirs in pairs:
        for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd, torch.func.jacrev):
            assert torch.equal(transform(ours)(x), transform(theirs)(x))
    batch, each = whole((2, 4, 3), 1), torch.tensor([[1, 1], [3, 0]])
    for dims in ((0, 0), (0, None), (None, 0)):
        given = [v if d == 0 else v[0] for v, d in zip((batch, each), dims, strict=True)]
        for order in (lambda f: f, torch.func.grad):
            ours, theirs = (
                torch.vmap(order(f), dims)(*given)
                for f in (
                    lambda x, i: (dt.index_select(x, 0, i) ** 2).sum(),
                    lambda x, i: (x.index_select(0, i) ** 2).sum(),
                )
            )
            assert torch.equal(ours, theirs), dims


def test_the_op_passes_pytorchs_own_check() -> None:
    source, index = torch.randn(6, 3, requires_grad=True), torch.tensor([2, 0, 2, 5, -1, 1])
    start = torch.randn(4, 3, requires_grad=True)
    for arguments in ((source, index, 4), (source, index, 4, 2), (source, index, 4, -1, start)):
        torch.library.opcheck(torch.ops.detkern.scatter_sum, arguments)
    torch.library.opcheck(torch.ops.detkern.rows_taken, (source, index.clamp(0)))
    torch.library.opcheck(torch.ops.detkern.scatter_sum_accumulate_, (torch.zeros(4, 3), source.detach(), index))


def test_errors() -> None:
    x, index = torch.ones(4, 3), torch.tensor([9])
    for call in (
        lambda: dt.embedding(index, x), lambda: dt.index_select(x, 0, index), lambda: dt.take(x, index),
        lambda: dt.index_add(x, 0, index, x[:1]), lambda: dt.index_put(x, (index,), x[:1]),
    ):  # fmt: skip
        with pytest.raises(IndexError):
            call()
    for gathers in (lambda: dt.gather(x, 0, index[:, None]), lambda: dt.scatter_add(x, 0, index[:, None], x)):
        with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
            gathers()
    with pytest.raises(ShapeError, match="do not fit along dim 0"):
        dt.index_add(x, 0, index, x)
    with pytest.raises(ShapeError, match="its sizes at least"):
        dt.scatter_add(x, 0, torch.zeros(5, 3, dtype=torch.int64), x)
    with pytest.raises(ArgumentError, match="padding_idx=4 names no row"):
        dt.embedding(index, x, 4)
    with pytest.raises(ShapeError, match=r"needs \[V, N\]"):
        dt.embedding(index, x[0])
    with pytest.raises(DTypeError, match="source is float64"):
        dt.scatter_sum(x.double(), torch.zeros(4, dtype=torch.int64), 2)


def test_positions_reach_no_further_than_the_key() -> None:
    """A row of a large weight is one position, not one for each of its elements."""
    for key, shape, indexed in ((I, (6,), 1), ((slice(None), J), (5, 2, 1), 2), (MASK, (int(MASK.sum()),), 2)):
        where, dimensions = positions(X, key, "cpu")
        assert (tuple(where.shape), dimensions) == (shape, indexed)


def test_a_vjp_that_is_called_after_its_transform_has_the_index_that_was_made_in_it() -> None:
    """Its saved index is a wrapper of torch.func's then, without memory of its own."""
    x = whole((5, 4)).bfloat16()
    for function in (
        lambda w: dt.embedding(torch.tensor([4, 0, 4]), w),
        lambda w: dt.index_select(w, 0, torch.tensor([1, 1, 2])),
        lambda w: dt.gather(w, 0, torch.tensor([[3, 3, 0, 1]])),
    ):
        y, vjp = torch.func.vjp(function, x)
        leaf = x.clone().requires_grad_()
        assert same_bits(vjp(torch.ones_like(y))[0], torch.autograd.grad(function(leaf).sum(), leaf)[0])


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "index_add of a matrix of places": (
        lambda: dt.index_add(whole((5, 3)), 0, I[None, :3], whole((3, 3))), ShapeError, r"index has shape \[1, 3\]"
    ),
    "index_add of another type": (
        lambda: dt.index_add(whole((5, 3)), 0, I[:3], whole((3, 3)).half()), DTypeError, "source is torch.float16 and x"
    ),
    "index_add of another type, scaled": (
        lambda: dt.index_add(whole((5, 3)), 0, I[:3], whole((3, 3)).long(), alpha=2), DTypeError, "source is torch.int"
    ),
    "index_add at places that are no whole numbers": (
        lambda: dt.index_add(whole((5, 3)), 0, I[:3].float(), whole((3, 3))), DTypeError, "index is torch.float32"
    ),
    "scatter_add of another type": (
        lambda: dt.scatter_add(whole((5,)), 0, I, whole((6,)).half()), DTypeError, "src is torch.float16 and x"
    ),
    "index_put of another type": (
        lambda: dt.index_put(whole((5,)), (I,), whole((6,)).half()), DTypeError, "values is torch.float16 and x"
    ),
    "scatter_sum of a number": (
        lambda: dt.scatter_sum(torch.tensor(1.0), torch.tensor(0), 5), ShapeError, r"source has shape \[\]"
    ),
    "scatter_sum from another shape": (
        lambda: dt.scatter_sum(whole((6, 3)), I % 5, 5, initial=whole((4, 3))), ShapeError, r"needs \[5, 3\]"
    ),
    "scatter_sum from another type": (
        lambda: dt.scatter_sum(whole((6, 3)), I % 5, 5, initial=whole((5, 3)).long()), DTypeError, "initial is torch"
    ),
    "embedding of a list": (
        lambda: dt.embedding([0, 1], whole((4, 3))), DTypeError, "tokens is not a torch.Tensor but list"
    ),
    "embedding of other numbers": (
        lambda: dt.embedding(I.float(), whole((5, 3))), DTypeError, "tokens is torch.float32"
    ),
    "embedding in a list": (lambda: dt.embedding(I, [[1.0]]), DTypeError, "weight is not a torch.Tensor but list"),
    "embedding that ignores half a row": (
        lambda: dt.embedding(I, whole((5, 3)), padding_idx=1.5), ArgumentError, "padding_idx=1.5 must be a whole number"
    ),
    "embedding that accumulates 'no'": (
        lambda: dt.embedding(I, whole((5, 3)), accumulate="no"), ArgumentError, "accumulate='no' must be True or False"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_do_not_fit_are_named(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
