"""The gradient rules without a framework: carried out in NumPy they are the gradients,
in the order that is promised."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from detkern.operations.gemm.gradient import GradientProduct, Layout, linear_gradient, matmul_gradient

# Operand shapes whose batches broadcast in every way: equal, missing, of size one, on both sides at once, empty.
BATCHES = [
    ((), ()),
    ((3,), (3,)),
    ((3,), ()),
    ((), (3,)),
    ((1,), (3,)),
    ((3,), (1,)),
    ((1,), (1,)),
    ((2, 3), (3,)),
    ((2, 1), (1, 3)),
    ((2, 1, 4), (3, 1)),
    ((1, 3), (2, 1)),
    ((2, 3, 4), (2, 1, 4)),
    ((0,), ()),
    ((2, 0), (2, 1)),
]
CASES = [((*x, 4, 5), (*y, 5, 6)) for x, y in BATCHES]
VECTORS = [((5,), (5,)), ((5,), (5, 6)), ((4, 5), (5,)), ((5,), (3, 5, 6)), ((2, 3, 4, 5), (5,)), ((5,), (2, 1, 5, 6))]


def _laid(array: np.ndarray, layout: Layout) -> np.ndarray:
    if layout.view is not None:
        array = array.reshape(layout.view)
    if layout.broadcast is not None:
        array = np.broadcast_to(array, layout.broadcast)
    if layout.order is not None:
        array = array.transpose(layout.order)
    return array if layout.merged is None else array.reshape(layout.merged)


def _carried_out(rule: GradientProduct, sources: dict[str, np.ndarray]) -> np.ndarray:
    result = _laid(sources[rule.left.source], rule.left) @ _laid(sources[rule.right.source], rule.right)
    return result if rule.shape is None else result.reshape(rule.shape)


def _summed_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    return array.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1 and array.shape[i] != 1), keepdims=True)


@pytest.mark.parametrize(("a_shape", "b_shape"), CASES + VECTORS, ids=str)
def test_matmul_gradients_are_the_derivatives(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    """In whole numbers, so that no order and no rounding matters; against the definition, one element of dc at a time
    through einsum on matrices."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-9, 9, shape).astype(np.int64) for shape in (a_shape, b_shape))
    dc = rng.integers(-9, 9, (a @ b).shape).astype(np.int64)
    left = a[None] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    incoming = dc.reshape((left @ right).shape)
    da = np.einsum("...mn,...kn->...mk", incoming, right)
    db = np.einsum("...mk,...mn->...kn", left, incoming)
    sources = {"a": a, "b": b, "dc": dc}
    for of, expected, operand, matrix in (("a", da, a, left), ("b", db, b, right)):
        got = _carried_out(matmul_gradient(of, a_shape, b_shape), sources)
        assert got.shape == operand.shape
        assert (got == _summed_to(expected, matrix.shape).reshape(operand.shape)).all()


@pytest.mark.parametrize("x_shape", [(5,), (4, 5), (2, 3, 5), (2, 0, 5), (1, 1, 1, 5)], ids=str)
def test_linear_gradients_are_the_derivatives(x_shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.integers(-9, 9, x_shape), rng.integers(-9, 9, (6, 5))
    dc = rng.integers(-9, 9, (*x_shape[:-1], 6))
    sources = {"x": x, "weight": weight, "dc": dc}
    assert (_carried_out(linear_gradient("x", x_shape, (6, 5)), sources) == dc @ weight).all()
    dweight = _carried_out(linear_gradient("weight", x_shape, (6, 5)), sources)
    assert dweight.shape == (6, 5)
    assert (dweight == dc.reshape(-1, 6).T @ x.reshape(-1, 5)).all()


@pytest.mark.parametrize(("a_shape", "b_shape"), CASES + VECTORS, ids=str)
def test_a_broadcast_operand_gets_one_chain_over_batch_and_row(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    """Position k of a gradient's chain holds, for b, row m of batch index i with k = i * M + m, and for a, column n
    with k = i * N + n, where i counts the broadcast dimensions in row-major order."""
    a, b = np.zeros(a_shape), np.zeros(b_shape)
    product = a @ b
    batch = product.shape[: product.ndim - (a.ndim > 1) - (b.ndim > 1)]
    m, n = (a_shape[-2] if a.ndim > 1 else 1), (b_shape[-1] if b.ndim > 1 else 1)
    for of, operand, size in (("a", a, n), ("b", b, m)):
        own = operand.shape[:-2] if operand.ndim > 1 else ()
        own = (1,) * (len(batch) - len(own)) + own
        summed = [i for i, (have, wide) in enumerate(zip(own, batch, strict=True)) if have != wide]
        rule = matmul_gradient(of, a_shape, b_shape)
        # Every element of dc says where it stands.
        dc = np.empty((*batch, m, n), np.int64)
        for index in itertools.product(*map(range, dc.shape)):
            place = 0
            for i in summed:
                place = place * batch[i] + index[i]
            dc[index] = place * size + index[-1 if of == "a" else -2]
        sources = {"a": a, "b": b, "dc": dc.reshape(product.shape)}
        laid = next(_laid(sources["dc"], layout) for layout in rule[:2] if layout.source == "dc")
        chain = laid if of == "a" else np.swapaxes(laid, -1, -2)
        assert chain.shape[-1] == size * int(np.prod([batch[i] for i in summed], dtype=int))
        assert (chain == np.arange(chain.shape[-1])).all()


def test_a_weight_gradient_is_born_in_the_layout_of_the_weight() -> None:
    """dc.T @ x, not (x.T @ dc).T: the product itself is [N, K], and row-major as every product is."""
    for x_shape in ((7, 5), (2, 7, 5)):
        rule = linear_gradient("weight", x_shape, (6, 5))
        assert (rule.left.source, rule.right.source, rule.shape) == ("dc", "x", None)
