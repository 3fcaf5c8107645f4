"""detkern.torch.linear, matmul and bmm: forward and gradients against the NumPy replay bit for bit, and against float64
autograd within the rounding of the type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import from_torch, same, same_bits, tensor

import detkern
from detkern import config
from detkern.operations.bias_gradient.replay import column_sum as replayed_column_sum
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary.contracts import CONTRACTS, FMA, MMA16, TREE, TREE_MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

torch = pytest.importorskip("torch", reason="torch is not installed")
import detkern.torch as dt
from detkern.torch.functions import eager

PAIRS = [(FMA, F32), (FMA, BF16), (MMA16, BF16), (MMA16, F16), (TREE, BF16), (TREE_MMA16, F16)]
TYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


def replay(contract: Contract, a: Any, b: Any, out_dtype: DType | None = None, bias: Any = None) -> np.ndarray:
    """a [M, K] @ b [K, N] by the executable definition of the contract."""
    column = None if bias is None else from_torch(bias)
    return numpy_replay.gemm(contract, from_torch(a), from_torch(b), bias=column, out_dtype=out_dtype)


@pytest.mark.parametrize("bias_dtype", [None, F32, BF16], ids=["no bias", "f32 bias", "bf16 bias"])
@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=str)
def test_linear_and_its_gradients_are_the_replay(
    contract: Contract, dtype: DType, bias_dtype: DType | None, device: str
) -> None:
    x = tensor("normal", dtype, (2, 9, 70), 1, device, grad=True)
    weight = tensor("normal", dtype, (33, 70), 2, device, grad=True)
    bias = None if bias_dtype is None else tensor("normal", bias_dtype, (33,), 3, device, grad=True)
    dy = tensor("normal", dtype, (2, 9, 33), 4, device)
    y = dt.linear(x, weight, bias, contract=contract.name)
    y.backward(dy)
    rows, drows = x.detach().reshape(18, 70), dy.reshape(18, 33)
    detached = weight.detach()
    assert same(from_torch(y).reshape(18, 33), replay(contract, rows, detached.T, bias=bias))
    assert same(from_torch(x.grad).reshape(18, 70), replay(contract, drows, detached))
    assert same(from_torch(weight.grad), replay(contract, drows.T, rows))
    assert weight.grad.is_contiguous()
    if bias is not None:
        assert same(from_torch(bias.grad), replayed_column_sum(from_torch(dy), out_dtype=bias_dtype))


@pytest.mark.parametrize(("contract", "dtype"), [(FMA, BF16), (MMA16, BF16), (MMA16, F16), (TREE, BF16)], ids=str)
def test_a_float32_result_rounds_the_incoming_gradient_before_both_products(
    contract: Contract, dtype: DType, device: str
) -> None:
    x = tensor("normal", dtype, (18, 70), 1, device, grad=True)
    weight = tensor("normal", dtype, (33, 70), 2, device, grad=True)
    bias = tensor("normal", F32, (33,), 3, device, grad=True)
    dy = tensor("normal", F32, (18, 33), 4, device)
    rounded = dy.to(TYPES[dtype])
    assert not torch.equal(rounded.float(), dy)
    y = dt.linear(x, weight, bias, contract=contract.name, out_dtype=torch.float32)
    assert same(from_torch(y), replay(contract, x, weight.detach().T, F32, bias))
    y.backward(dy)
    assert x.grad.dtype == weight.grad.dtype == TYPES[dtype]
    assert same(from_torch(x.grad), replay(contract, rounded, weight))
    assert same(from_torch(weight.grad), replay(contract, rounded.T, x))
    # The bias's sum is no product: it takes the gradient as it comes.
    assert same(from_torch(bias.grad), replayed_column_sum(from_torch(dy)))

    a, b = x.detach().clone().requires_grad_(), weight.detach().T.clone().requires_grad_()
    dt.matmul(a, b, contract=contract.name, out_dtype="float32").backward(dy)
    assert same_bits(a.grad, x.grad)
    assert same(from_torch(b.grad), replay(contract, x.T, rounded))


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=str)
def test_a_row_and_its_gradient_do_not_depend_on_the_batch(contract: Contract, dtype: DType, device: str) -> None:
    x = tensor("normal", dtype, (37, 70), 1, device, grad=True)
    weight = tensor("normal", dtype, (33, 70), 2, device)
    dy = tensor("normal", dtype, (37, 33), 4, device)
    y = dt.linear(x, weight, contract=contract.name)
    y.backward(dy)
    for first, last in ((0, 1), (36, 37), (5, 22)):
        alone = x.detach()[first:last].clone().requires_grad_()
        part = dt.linear(alone, weight, contract=contract.name)
        part.backward(dy[first:last])
        assert same_bits(part, y[first:last])
        assert same_bits(alone.grad, x.grad[first:last])
    with torch.no_grad():
        assert same_bits(torch.cat([dt.linear(part, weight, contract=contract.name) for part in x.split(5)]), y)
        padded = torch.nn.functional.pad(x, (0, 0, 3, 60))
        assert same_bits(dt.linear(padded, weight, contract=contract.name)[3:40], y)
    # Neighbours of NaN and infinity change nothing.
    hostile = x.detach().clone()
    hostile[1:] = float("nan")
    hostile[2:] = float("inf")
    hostile.requires_grad_()
    y_hostile = dt.linear(hostile, weight, contract=contract.name)
    y_hostile.backward(dy * torch.where(torch.arange(37, device=device) == 0, 1.0, float("nan"))[:, None].to(dy.dtype))
    assert same_bits(y_hostile[:1], y[:1])
    assert same_bits(hostile.grad[:1], x.grad[:1])


def _float64(function: Any, *inputs: Any) -> tuple[Any, list[Any]]:
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    result = function(*doubles)
    return result, list(torch.autograd.grad(result, doubles, torch.ones_like(result)))


SHAPES = [
    ((4, 50), (50, 6)), ((3, 4, 50), (50, 6)), ((4, 50), (3, 50, 6)), ((2, 1, 4, 50), (3, 50, 6)), ((50,), (50,)),
    ((50,), (50, 6)), ((4, 50), (50,)), ((3, 4, 50), (50,)), ((50,), (3, 50, 6)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES, ids=str)
def test_matmul_and_its_gradients_against_float64(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], dtype: DType, device: str
) -> None:
    """Each error is a few units in the last place of the largest magnitude that the sum could reach."""
    a, b = (
        tensor("normal", dtype, a_shape, 1, device, grad=True),
        tensor("normal", dtype, b_shape, 2, device, grad=True),
    )
    c = dt.matmul(a, b)
    grads = torch.autograd.grad(c, (a, b), torch.ones_like(c))
    expected, expected_grads = _float64(torch.matmul, a, b)
    bound, bound_grads = _float64(torch.matmul, a.abs(), b.abs())
    ulp = torch.finfo(TYPES[dtype]).eps
    chain = 50 * torch.finfo(torch.float32).eps
    for got, wanted, reach in zip((c, *grads), (expected, *expected_grads), (bound, *bound_grads), strict=True):
        assert got.shape == wanted.shape
        assert got.dtype == TYPES[dtype]
        assert got.is_contiguous()
        assert ((got.double() - wanted).abs() <= wanted.abs() * ulp + reach * chain).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_linear_and_its_gradients_against_float64(dtype: DType, device: str) -> None:
    leaves = [tensor("normal", dtype, shape, 1, device, grad=True) for shape in ((3, 4, 50), (6, 50), (6,))]
    y = dt.linear(*leaves)
    grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
    expected, expected_grads = _float64(torch.nn.functional.linear, *leaves)
    bound, bound_grads = _float64(torch.nn.functional.linear, *(leaf.abs() for leaf in leaves))
    ulp, chain = torch.finfo(TYPES[dtype]).eps, 50 * torch.finfo(torch.float32).eps
    for got, wanted, reach in zip((y, *grads), (expected, *expected_grads), (bound, *bound_grads), strict=True):
        assert got.shape == wanted.shape
        assert ((got.double() - wanted).abs() <= wanted.abs() * ulp + reach * chain).all()


def test_a_broadcast_operand_gets_one_chain_over_batch_and_row(device: str) -> None:
    """The gradient of a matrix that a batch shares is one chain, not a sum of rounded parts."""
    a = tensor("normal", BF16, (3, 5, 40), 1, device)
    b = tensor("normal", BF16, (40, 7), 2, device, grad=True)
    dc = tensor("normal", BF16, (3, 5, 7), 3, device)
    dt.matmul(a, b, contract="fma").backward(dc)
    assert same(from_torch(b.grad), replay(FMA, a.reshape(15, 40).T, dc.reshape(15, 7)))
    parts = sum(dt.matmul(a[i].T, dc[i], contract="fma") for i in range(3))
    assert not same_bits(b.grad, parts)

    left = tensor("normal", BF16, (5, 40), 4, device, grad=True)
    right = tensor("normal", BF16, (3, 40, 7), 5, device)
    dt.matmul(left, right, contract="mma16").backward(dc)
    chain = dc.permute(1, 0, 2).reshape(5, 21), right.permute(0, 2, 1).reshape(21, 40)
    assert same(from_torch(left.grad), replay(MMA16, *chain))


def test_layouts_do_not_change_a_bit(device: str) -> None:
    """Transposed, strided, expanded, unaligned: of operands, of parameters and of incoming gradients."""
    x = tensor("normal", BF16, (6, 9, 70), 1, device)
    weight = tensor("normal", BF16, (34, 70), 2, device)
    bias = tensor("normal", F32, (34,), 3, device)
    dy = tensor("normal", BF16, (6, 9, 34), 4, device)

    def laid(kind: str, source: Any) -> Any:
        if kind == "transposed":
            return source.mT.contiguous().mT if source.dim() > 1 else source
        if kind == "strided":
            return torch.stack([source, source], -1)[..., 0]
        if kind == "unaligned":
            padded = torch.zeros(source.numel() + 1, dtype=source.dtype, device=device)
            padded[1:] = source.flatten()
            return padded[1:].view(source.shape)
        return source

    results = []
    for kind in ("plain", "transposed", "strided", "unaligned"):
        leaves = [laid(kind, source).detach().requires_grad_() for source in (x, weight, bias)]
        y = dt.linear(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, laid(kind, dy))])
    for others in results[1:]:
        assert all(same_bits(left, right) for left, right in zip(results[0], others, strict=True))

    wide = x[:1].expand(6, 9, 70).detach().requires_grad_()
    copied = wide.detach().clone().requires_grad_()
    ones = torch.ones((), dtype=torch.bfloat16, device=device).expand(6, 9, 34)
    for leaf in (wide, copied):
        dt.linear(leaf, weight, bias).backward(ones)
    assert same_bits(wide.grad, copied.grad)
    total = dt.linear(copied, weight)
    (summed,) = torch.autograd.grad(total.sum(), copied)
    assert same_bits(summed, torch.autograd.grad(dt.linear(copied, weight), copied, torch.ones_like(total))[0])


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_the_gradients_asked_for_are_computed(
    wanted: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from detkern.torch.functions import gradients as binding

    done = []
    product, column = binding.matmul, binding.bias_gradient
    monkeypatch.setattr(binding, "matmul", lambda *args: done.append("product") or product(*args))
    monkeypatch.setattr(binding, "bias_gradient", lambda *args: done.append("column") or column(*args))
    leaves = [tensor("normal", F32, shape, 1, device, grad=True) for shape in ((4, 8), (6, 8), (6,))]
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in wanted)
    dt.linear(*leaves).sum().backward()
    assert sorted(done) == sorted("column" if index == 2 else "product" for index in wanted)
    assert [leaf.grad is not None for leaf in leaves] == [index in wanted for index in range(3)]


def test_nothing_is_recorded_without_need(device: str) -> None:
    x, weight = tensor("normal", F32, (4, 8), 1, device), tensor("normal", F32, (6, 8), 2, device, grad=True)
    assert dt.linear(x, weight).grad_fn is not None
    assert dt.linear(x, weight.detach()).grad_fn is None
    with torch.no_grad():
        assert not dt.linear(x, weight).requires_grad
    with torch.inference_mode():
        y = dt.linear(x, weight)
    assert y.is_inference()


def test_double_backward_against_float64(device: str) -> None:
    leaves = [
        tensor("normal", F32, shape, seed, device, grad=True) for seed, shape in enumerate([(5, 6), (3, 6), (3,)])
    ]

    def second(linear: Any, inputs: list[Any]) -> list[Any]:
        first = torch.autograd.grad(linear(*inputs).pow(3).sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))

    got = second(dt.linear, leaves)
    expected = second(torch.nn.functional.linear, [leaf.detach().double().requires_grad_() for leaf in leaves])
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=1e-4, atol=1e-3 * float(theirs.abs().max()))


def test_double_backward_follows_the_contract(device: str) -> None:
    """d(dx)/d(weight) is a product by the contract too: dx = dy @ weight, so its gradient is dy.T @ v."""
    x = tensor("normal", BF16, (20, 48), 1, device, grad=True)
    weight = tensor("normal", BF16, (24, 48), 2, device, grad=True)
    dy, v = tensor("normal", BF16, (20, 24), 3, device), tensor("normal", BF16, (20, 48), 4, device)
    (dx,) = torch.autograd.grad(dt.linear(x, weight, contract="tree"), x, dy, create_graph=True)
    (second,) = torch.autograd.grad(dx, weight, v)
    assert same(from_torch(second), replay(TREE, dy.T, v))


@pytest.mark.parametrize("way", ["config", "argument"])
def test_the_contract_is_frozen_at_the_forward(way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensor("normal", BF16, (18, 70), 1, device, grad=True)
    weight = tensor("normal", BF16, (33, 70), 2, device, grad=True)
    dy = tensor("normal", BF16, (18, 33), 4, device)
    if way == "config":
        monkeypatch.setattr(config, "contract", "tree")
        y = dt.linear(x, weight)
    else:
        y = dt.linear(x, weight, contract="tree")
    monkeypatch.setattr(config, "contract", "fma")
    y.backward(dy)
    assert same(from_torch(y), replay(TREE, x, weight.detach().T))
    assert same(from_torch(x.grad), replay(TREE, dy, weight))
    assert same(from_torch(weight.grad), replay(TREE, dy.T, x))
    assert not same(from_torch(x.grad), replay(FMA, dy, weight))
    # The next forward reads the default anew, on tensors of which a call is ready.
    assert same(from_torch(dt.linear(x, weight)), replay(FMA, x, weight.detach().T))


def test_empty_and_single_rows(device: str) -> None:
    weight = tensor("normal", F32, (6, 8), 2, device, grad=True)
    bias = tensor("normal", F32, (6,), 3, device, grad=True)
    x = torch.zeros(0, 8, device=device, requires_grad=True)
    y = dt.linear(x, weight, bias)
    assert y.shape == (0, 6)
    y.sum().backward()
    assert x.grad.shape == (0, 8)
    assert (from_torch(weight.grad).view(np.uint32) == 0).all()
    assert (from_torch(bias.grad).view(np.uint32) == 0).all()
    vector = tensor("normal", F32, (8,), 1, device, grad=True)
    dt.linear(vector, weight, bias).sum().backward()
    assert vector.grad.shape == (8,)
    assert dt.linear(vector, weight, bias).shape == (6,)


def test_bmm_is_matmul_of_stacks(device: str) -> None:
    a = tensor("normal", F32, (3, 4, 8), 1, device, grad=True)
    b = tensor("normal", F32, (3, 8, 5), 2, device, grad=True)
    c = dt.bmm(a, b)
    assert same_bits(c, dt.matmul(a, b))
    for i in range(3):
        assert same(from_torch(c[i]), replay(FMA, a[i], b[i]))
    for wrong in (b[0], b[:1], b[:2]):
        with pytest.raises(detkern.ShapeError, match="bmm takes"):
            dt.bmm(a, wrong)


def test_memory_is_reused_by_calls_that_look_alike(device: str) -> None:
    """A call that is ready reads the pointers of now, not those of the call that made it ready."""
    weight, bias = tensor("normal", F32, (6, 8), 2, device), tensor("normal", F32, (6,), 3, device)
    for seed in range(4):
        x = tensor("normal", F32, (4, 8), seed, device)
        assert same(from_torch(dt.linear(x, weight, bias)), replay(FMA, x, weight.T, bias=bias))
        assert same(from_torch(dt.linear(x, -weight, -bias)), replay(FMA, x, -weight.T, bias=-bias))


def test_calls_that_look_alike_are_told_apart(device: str) -> None:
    """Square operands fit both functions; the same sizes lie in other strides; a bias, a type or a result differs."""
    x, weight = tensor("normal", BF16, (8, 8), 1, device), tensor("normal", BF16, (8, 8), 2, device)
    bias = tensor("normal", F32, (16,), 3, device)
    for _ in range(2):
        assert same(from_torch(dt.matmul(x, weight, contract="mma16")), replay(MMA16, x, weight))
        assert same(from_torch(dt.linear(x, weight, contract="mma16")), replay(MMA16, x, weight.T))
        assert same(from_torch(dt.matmul(x.T, weight)), replay(MMA16, x.T, weight))
        assert same(from_torch(dt.matmul(x, weight.T)), replay(MMA16, x, weight.T))
        for column in (bias[:8], bias[::2], bias[:8].bfloat16()):
            assert same(from_torch(dt.linear(x, weight, column)), replay(MMA16, x, weight.T, bias=column))
        for dtype, name in ((F32, "float32"), (F16, "float16")):
            assert same(from_torch(dt.matmul(x, weight, out_dtype=name)), replay(MMA16, x, weight, dtype))
        assert same(from_torch(dt.matmul(x, weight, contract="tree")), replay(TREE, x, weight))
    for dtype in (F32, BF16, F32):
        for dy in (x, x.T):
            column = eager.bias_gradient(dy, TYPES[dtype], None)
            assert same(from_torch(column), replayed_column_sum(from_torch(dy), out_dtype=dtype))


def test_a_lazy_sign_is_not_lost(device: str) -> None:
    """The imaginary part of a conjugate has the negative bit set and the memory of the positive numbers. Each call
    comes after the plain one, which has made it ready."""
    z = torch.complex(torch.zeros(8, 8), tensor("normal", F32, (8, 8), 1)).to(device)
    weight = tensor("normal", F32, (8, 8), 2, device)
    bias = torch.zeros(8, device=device, requires_grad=True)
    plain, negative = z.imag, z.conj().imag
    assert negative.is_neg()
    assert negative.data_ptr() == plain.data_ptr()
    for _ in range(2):
        assert torch.equal(dt.linear(plain, weight), -dt.linear(negative, weight))
        assert torch.equal(dt.matmul(weight, plain), -dt.matmul(weight, negative))
        with torch.no_grad():
            column = dt.linear(torch.zeros_like(weight), weight, plain[0])
            assert torch.equal(column, -dt.linear(torch.zeros_like(weight), weight, negative[0]))
        y = dt.linear(weight, weight, bias)
        (first,), (second,) = (torch.autograd.grad(y, bias, dy, retain_graph=True) for dy in (plain, negative))
        assert torch.equal(first, -second)


BAD = [
    (lambda: dt.linear(torch.ones(4, 8), torch.ones(6, 7)), detkern.ShapeError, "do not fit"),
    (lambda: dt.linear(torch.ones(4, 8), torch.ones(6, 8), torch.ones(5)), detkern.ShapeError, "bias has shape"),
    (lambda: dt.linear(torch.ones(4, 8), torch.ones(6, 8).half()), detkern.DTypeError, "cast weight"),
    (lambda: dt.linear(torch.ones(4, 8).double(), torch.ones(6, 8).double()), detkern.DTypeError, "x is float64"),
    (lambda: dt.matmul(torch.ones(4, 8), torch.ones(7, 6)), detkern.ShapeError, "K is 8 in a"),
    (lambda: dt.matmul(torch.ones(4, 8), torch.ones(8, 6), contract="mma16"), NotImplementedError,
        "takes bf16 and f16|f16"),
    (lambda: dt.matmul(torch.ones(4, 8), torch.ones(8, 6), contract="mma"), NotImplementedError, "does not exist"),
    (lambda: dt.matmul(torch.ones(4, 8), np.ones((8, 6))), detkern.DTypeError, "b is not a torch.Tensor but ndarray"),
    (lambda: dt.linear(torch.ones(4, 8), torch.ones(6, 8), out_dtype=torch.int8), detkern.DTypeError, "out_dtype=int8"),
    (lambda: dt.linear(torch.ones(4, 8), torch.ones(6, 8), backend="native"), detkern.ArgumentError, "no contract"),
    (lambda: dt.linear(torch.ones(4, 8).to_sparse(), torch.ones(6, 8)), detkern.DTypeError, "to_dense"),
    (lambda: dt.bmm(torch.ones(4, 8), torch.ones(8, 6)), detkern.ShapeError, "bmm takes"),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize(("call", "error", "words"), BAD, ids=[words for _, _, words in BAD])
def test_errors_say_what_is_wrong(call: Any, error: type[Exception], words: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad), pytest.raises(error, match=words):
        call()


def test_errors_are_the_same_where_autograd_records() -> None:
    weight = torch.ones(6, 7, requires_grad=True)
    with pytest.raises(detkern.ShapeError, match="do not fit"):
        dt.linear(torch.ones(4, 8), weight)
    with pytest.raises(NotImplementedError, match="does not exist"):
        dt.linear(torch.ones(4, 7), weight, contract="mma")


def test_every_contract_for_products_has_gradients() -> None:
    for name, contract in CONTRACTS.items():
        for dtype in contract.operands:
            if dtype not in TYPES:
                continue
            x = tensor("normal", dtype, (4, 70), 1, grad=True)
            dt.linear(x, tensor("normal", dtype, (6, 70), 2), contract=name).sum().backward()
            assert x.grad.abs().sum() > 0


def _cut(shape: tuple[int, ...], size: int, device: str, offset: int = 0) -> Any:
    """A tensor over a storage that was cut to `size` bytes, as FSDP frees parameters."""
    count = int(np.prod(shape))
    whole = torch.ones(offset + count, device=device)[offset:].view(shape)
    whole.untyped_storage().resize_(size)
    return whole


SHORT_CALLS = {
    "matmul a": ((9, 8), lambda t, o: dt.matmul(t, o(8, 5))),
    "matmul b": ((8, 5), lambda t, o: dt.matmul(o(9, 8), t)),
    "bmm": ((2, 9, 8), lambda t, o: dt.bmm(t, o(2, 8, 5))),
    "linear x": ((9, 8), lambda t, o: dt.linear(t, o(5, 8), o(5))),
    "linear weight": ((5, 8), lambda t, o: dt.linear(o(9, 8), t, o(5))),
    "linear bias": ((5,), lambda t, o: dt.linear(o(9, 8), o(5, 8), t)),
    "recorded weight": ((5, 8), lambda t, o: dt.linear(o(9, 8).requires_grad_(), t)),
    "bias gradient": ((9, 8), lambda t, o: eager.bias_gradient(t, None, None)),
    "registered op": ((9, 8), lambda t, o: torch.ops.detkern.matmul(t, o(8, 5))),
    "softmax": ((9, 8), lambda t, o: dt.softmax(t)),
}


@pytest.mark.parametrize("name", SHORT_CALLS)
def test_a_storage_that_was_cut_short_is_refused_on_the_warm_path_too(name: str, device: str) -> None:
    """The same call with whole tensors came before, so shapes and strides have a plan."""
    shape, call = SHORT_CALLS[name]

    def ones(*shape: int) -> Any:
        return torch.ones(shape, device=device)

    for offset in (0, 4):
        full = 4 * (int(np.prod(shape)) + offset)
        for _ in range(2):
            before = call(_cut(shape, full, device, offset), ones)
        for size in (0, full - 4):
            said = rf"storage (freed|cut short): the storage holds {size} bytes and the tensor needs {full}; "
            with pytest.raises(detkern.ArgumentError, match=said):
                call(_cut(shape, size, device, offset), ones)
        assert same(from_torch(call(_cut(shape, full, device, offset), ones).detach()), from_torch(before.detach()))


MODE_CALLS = {
    "mm": ("a", lambda t, o: torch.mm(t, o)),
    "mm out": ("out", lambda t, o: torch.mm(o, o, out=t)),
    "addmm input": ("input", lambda t, o: torch.addmm(t, o, o)),
    "addmm input, beta": ("input", lambda t, o: torch.addmm(t, o, o, beta=2)),
    "addmm input with a gradient": ("input", lambda t, o: torch.addmm(t.requires_grad_(), o, o)),
    "sum": ("x", lambda t, o: t.sum(-1)),
    "sum out": ("out", lambda t, o: torch.sum(o.expand(8, 8, 8), -1, out=t)),
}


@pytest.mark.parametrize("name", MODE_CALLS)
def test_under_the_mode_too(name: str, device: str) -> None:
    """Also what PyTorch itself would read or write in a covered operation."""
    argument, call = MODE_CALLS[name]
    ones = torch.ones(8, 8, device=device)
    with dt.batch_invariant_mode():
        assert call(_cut((8, 8), 256, device), ones).shape[0] == 8
        with pytest.raises(detkern.ArgumentError, match=f"^{argument} has .* holds 8 bytes and the tensor needs 256"):
            call(_cut((8, 8), 8, device), ones)


def test_a_weight_freed_before_the_backward_leaves_the_gradients_alone(device: str) -> None:
    """As FSDP does where a module is not unsharded again."""
    x = torch.ones(9, 8, device=device, requires_grad=True)
    weight = torch.ones(5, 8, device=device, requires_grad=True)
    dt.linear(x, weight).sum().backward()
    grads = x.grad.clone(), weight.grad.clone()
    y = dt.linear(x, weight).sum()
    weight.untyped_storage().resize_(0)
    with pytest.raises(detkern.ArgumentError, match="holds 0 bytes and the tensor needs 160"):
        y.backward()
    assert torch.equal(x.grad, grads[0])
    assert torch.equal(weight.grad, grads[1])
    weight.untyped_storage().resize_(160)
    with torch.no_grad():
        weight.fill_(1)
    assert torch.equal(dt.linear(x, weight), torch.full((9, 5), 8.0, device=device))


def test_explain_says_what_functions_on_tensors_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And runs none of it: a rehearsal does not go straight to the kernel."""
    x, w, b = torch.randn(3, 16), torch.randn(4, 16), torch.randn(4)
    dt.linear(x, w, b)  # its plan is known

    def complete(*arguments: Any) -> None:
        raise AssertionError("something ran")

    monkeypatch.setattr(eager, "_complete", complete)
    for function, operands in (
        (dt.linear, (x, w, b)),
        (dt.matmul, (x, w.T)),
        (dt.softmax, (x,)),
        (dt.sum, (x,)),
    ):
        with torch.no_grad():
            assert detkern.explain(function, *operands).backend == "cpu"
