"""batch_invariant_mode: what it covers, with which bits, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits

import detkern
from detkern import rows
from detkern.errors import ArgumentError, ContractUnsupported
from detkern.torch import batch_invariant_mode
from detkern.torch.mode import coverage, entered, mode

torch.manual_seed(0)
A, B, C = torch.randn(9, 70), torch.randn(70, 12), torch.randn(9, 12)
A3, B3 = torch.randn(3, 9, 70), torch.randn(3, 70, 12)
BIAS, V = torch.randn(12), torch.randn(70)
aten = torch.ops.aten

# What PyTorch calls, and the call of detkern whose bits it must have.
PRODUCTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mm": (lambda: torch.mm(A, B), lambda: detkern.gemm(A, B)),
    "mm method": (lambda: A.mm(B), lambda: detkern.gemm(A, B)),
    "mm.out": (lambda: torch.mm(A, B, out=torch.empty(9, 12)), lambda: detkern.gemm(A, B)),
    "aten.mm": (lambda: aten.mm(A, B), lambda: detkern.gemm(A, B)),
    "aten.mm.default": (lambda: aten.mm.default(A, B), lambda: detkern.gemm(A, B)),
    "aten.mm.out": (lambda: aten.mm.out(A, B, out=torch.empty(9, 12)), lambda: detkern.gemm(A, B)),
    "aten.mm.dtype": (
        lambda: aten.mm.dtype(A.bfloat16(), B.bfloat16(), torch.float32),
        lambda: detkern.gemm(A.bfloat16(), B.bfloat16(), out_dtype="float32"),
    ),
    "mm out_dtype": (
        lambda: torch.mm(A.half(), B.half(), out_dtype=torch.float32),
        lambda: detkern.gemm(A.half(), B.half(), out_dtype="float32"),
    ),
    "bmm": (lambda: torch.bmm(A3, B3), lambda: detkern.gemm(A3, B3)),
    "aten.bmm.dtype_out": (
        lambda: aten.bmm.dtype_out(A3.half(), B3.half(), torch.float32, out=torch.empty(3, 9, 12)),
        lambda: detkern.gemm(A3.half(), B3.half(), out_dtype="float32"),
    ),
    "matmul operator": (lambda: A3 @ B, lambda: detkern.gemm(A3, B)),
    "matmul of four": (lambda: A3[None] @ B3[:, None][:, 0], lambda: detkern.gemm(A3[None], B3)),
    "rmatmul": (lambda: B.__rmatmul__(A), lambda: detkern.gemm(A, B)),
    "linear": (lambda: F.linear(A3, B.t(), BIAS), lambda: detkern.linear(A3, B.t(), BIAS)),
    "linear of a slice": (lambda: F.linear(A3[:, 1:], B.t(), BIAS), lambda: detkern.linear(A3[:, 1:], B.t(), BIAS)),
    "linear to a number": (lambda: F.linear(A3, B[:, 0]), lambda: detkern.gemm(A3, B[:, 0])),
    "linear, one bias": (lambda: F.linear(A3, B.t(), BIAS[:1]), lambda: detkern.linear(A3, B.t()) + BIAS[0]),
    "linear, bias of rows": (lambda: F.linear(A, B.t(), C), lambda: detkern.linear(A, B.t()) + C),
    "addmm with a bias": (lambda: torch.addmm(BIAS, A, B), lambda: detkern.gemm(A, B, bias=BIAS)),
    "addmm of 1, 1": (lambda: torch.addmm(C, A, B), lambda: detkern.gemm(A, B) + C),
    "addmm, beta 0": (lambda: torch.addmm(C * float("nan"), A, B, beta=0), lambda: detkern.gemm(A, B)),
    "addmm, alpha 2": (lambda: torch.addmm(C, A, B, alpha=2), lambda: detkern.gemm(A, B) * 2 + C),
    "addmm, names": (lambda: torch.addmm(input=C, mat1=A, mat2=B), lambda: detkern.gemm(A, B) + C),
    "addmm_": (lambda: C.clone().addmm_(A, B), lambda: detkern.gemm(A, B) + C),
    "baddbmm": (lambda: torch.baddbmm(C, A3, B3, beta=0, alpha=0.5), lambda: detkern.gemm(A3, B3) * 0.5),
    "addbmm": (
        lambda: torch.addbmm(C, A3, B3),
        lambda: detkern.gemm(A3.permute(1, 0, 2).reshape(9, -1), B3.reshape(-1, 12)) + C,
    ),
    "mv": (lambda: torch.mv(A, V), lambda: detkern.gemm(A, V)),
    "addmv": (lambda: torch.addmv(C[:, 0], A, V), lambda: detkern.gemm(A, V) + C[:, 0]),
    "dot": (lambda: torch.dot(V, B[:, 0]), lambda: detkern.gemm(V, B[:, 0])),
    "vdot": (lambda: torch.vdot(V, B[:, 0]), lambda: detkern.gemm(V, B[:, 0])),
    "inner": (lambda: torch.inner(A3, B.t()), lambda: detkern.gemm(A3, B)),
    "tensordot": (
        lambda: torch.tensordot(A3, B3, dims=([0, 2], [0, 1])),
        lambda: detkern.gemm(A3.permute(1, 0, 2).reshape(9, -1), B3.reshape(-1, 12)),
    ),
    "multi_dot": (lambda: torch.linalg.multi_dot([A, B, C.t()]), lambda: detkern.gemm(detkern.gemm(A, B), C.t())),
    "vecdot": (lambda: torch.linalg.vecdot(A, V), lambda: detkern.gemm(A, V)),
    "einsum": (lambda: torch.einsum("bik,bkj->bij", A3, B3), lambda: detkern.gemm(A3, B3)),
    "einsum, implicit": (lambda: torch.einsum("ik,kj", A, B), lambda: detkern.gemm(A, B)),
    "einsum, ellipsis": (lambda: torch.einsum("...k,kj->...j", A3, B), lambda: detkern.gemm(A3, B)),
    "einsum, lists": (lambda: torch.einsum(A, [0, 1], B, [1, 2], [0, 2]), lambda: detkern.gemm(A, B)),
    "einsum of three": (
        lambda: torch.einsum("ik,kj,lj->il", A, B, C),
        lambda: detkern.gemm(detkern.gemm(A, B), C.t()),
    ),
}
X = torch.randn(4, 5, 33)
REDUCTIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sum": (lambda: X.sum(-1), lambda: rows.sum(X)),
    "sum, names": (lambda: torch.sum(X, dim=1, keepdim=True), lambda: rows.sum(X.transpose(1, 2)).reshape(4, 1, 33)),
    "sum of all": (lambda: X.sum(), lambda: rows.sum(X.reshape(-1))),
    "sum of two": (lambda: X.sum((0, 2)), lambda: rows.sum(X.transpose(0, 1).reshape(5, -1))),
    "sum, dtype": (lambda: X.half().sum(-1, dtype=torch.float32), lambda: rows.sum(X.half(), out_dtype="float32")),
    "sum.out": (lambda: torch.sum(X, -1, out=torch.empty(4, 5)), lambda: rows.sum(X)),
    "mean": (lambda: X.mean(-1, keepdim=True), lambda: rows.mean(X)[..., None]),
    "aten.mean.dim": (lambda: aten.mean.dim(X, [2]), lambda: rows.mean(X)),
    "mean of a first dimension": (lambda: X.mean(0), lambda: rows.mean(X.permute(1, 2, 0))),
    "mean, dimension of NumPy": (lambda: X.mean(np.int64(2)), lambda: rows.mean(X)),
    "softmax": (lambda: F.softmax(X, -1), lambda: rows.softmax(X)),
    "softmax, dtype": (lambda: X.half().softmax(-1, torch.float32),
        lambda: rows.softmax(X.half(), out_dtype="float32")),
    "softmax of a middle dimension": (lambda: X.softmax(1), lambda: rows.softmax(X.transpose(1, 2)).transpose(1, 2)),
    "softmax.out": (lambda: torch.softmax(X, -1, out=torch.empty(4, 5, 33)), lambda: rows.softmax(X)),
    "aten._softmax": (
        lambda: aten._softmax.default(X.half(), -1, True),
        lambda: rows.softmax(X.half(), out_dtype="float32"),
    ),
    "log_softmax": (lambda: torch.log_softmax(X, 2), lambda: rows.log_softmax(X)),
    "LogSoftmax": (lambda: torch.nn.LogSoftmax(-1)(X), lambda: rows.log_softmax(X)),
}  # fmt: skip
NEWER = [name for name in PRODUCTS if "dtype" in name]  # PyTorch has them since 2.8
EVERY = {
    name: both
    for name, both in {**PRODUCTS, **REDUCTIONS}.items()
    if name not in NEWER or "dtype" in aten.mm.overloads()
}


@pytest.mark.parametrize("name", EVERY)
def test_each_name_has_detkerns_bits_inside_and_pytorchs_outside(name: str) -> None:
    call, wanted = EVERY[name]
    # On the CPU PyTorch lacks some.
    before = None if name in NEWER or name.startswith("aten._softmax") else call()
    with batch_invariant_mode(strict=True):
        got = call()
    assert same_bits(got.contiguous(), wanted().contiguous())
    if before is not None:
        assert same_bits(call(), before)
        torch.testing.assert_close(got, before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["linear", "mm", "bmm", "addmm, alpha 2", "einsum of three", "mean", "softmax", "sum of two"]
)
def test_inference_mode_is_covered(name: str) -> None:
    call, wanted = EVERY[name]
    with torch.inference_mode(), batch_invariant_mode(strict=True):
        assert same_bits(call(), wanted().contiguous())


def test_einsum_gives_what_pytorch_gives() -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(4, 5, 6)
    for equation, operands in {
        "abc,bcd->ad": (a, b), "abc,bcd->bad": (a, b), "abc,bcd->d": (a, b), "abc->cab": (a,), "abc->b": (a,),
        "aab->b": (torch.randn(3, 3, 4),), "abc,abc->abc": (a, a), "abc,abc->": (a, a), "ab,cd->acbd": (a[0], b[0]),
        "...b,...b->...": (a, a), "a...,b...->...ab": (a, torch.randn(2, 4, 5)),
        "ab,bc,cd,da->": (*[torch.eye(4) * 2] * 4,),
        "abc,cd": (a, torch.randn(5, 1)), "abc,c->ab": (a, torch.randn(1)), "a,b->": (a[0, 0], b[0, 0]),
        ",->": (a[0, 0, 0], b[0, 0, 0]),
    }.items():  # fmt: skip
        wanted = torch.einsum(equation, *operands)
        with batch_invariant_mode(strict=True):
            torch.testing.assert_close(torch.einsum(equation, *operands), wanted)
    for equation in ("ab,bc->ad", "abc,bc", "ab,cb->aa"):
        with batch_invariant_mode(), pytest.raises(RuntimeError):
            torch.einsum(equation, a[0], b[0])


def test_pytorchs_own_python_is_entered() -> None:
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(5, 7, 16)
    with torch.no_grad(), batch_invariant_mode(strict=True, contract={"bmm": "fma"}):
        whole, weights = attention(x, x, x)
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        q, k, _ = qkv.view(5, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = detkern.gemm(q * 8**-0.5, k.transpose(-1, -2), contract="fma")
        assert same_bits(weights, rows.mean(rows.softmax(scores).permute(0, 2, 3, 1)))
        for i in range(5):
            assert same_bits(attention(x[i : i + 1], x[i : i + 1], x[i : i + 1])[0], whole[i : i + 1])
        assert same_bits(F.softmin(x, -1), rows.softmax(-x))


def test_cross_entropy_is_pytorchs_made_of_covered_parts() -> None:
    x, target = torch.randn(6, 9, 4), torch.randint(0, 9, (6, 4))
    target[0, 1] = -100
    weight, shares = torch.rand(9), torch.rand(6, 9, 4)
    for arguments in (
        (x, target), (x, target, weight), (x[..., 0], target[:, 0]), (x[0, :, 0], target[1, 0]), (x, shares),
        (x, shares, weight),
    ):  # fmt: skip
        for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}):
            given = arguments[0].clone().requires_grad_()
            wanted = F.cross_entropy(given, *arguments[1:], **options)
            (slope,) = torch.autograd.grad(wanted.sum(), given)
            with batch_invariant_mode(strict=True):
                got = F.cross_entropy(given, *arguments[1:], **options)
            torch.testing.assert_close(got, wanted)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), given)[0], slope)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_keeps_nan_of_ignored_rows_out(label_smoothing: float) -> None:
    x, target = torch.randn(4, 5), torch.tensor([-100, -100, 1, 2])
    x[0], x[1, 2] = torch.nan, -torch.inf
    for reduction in ("none", "sum", "mean"):
        wanted = F.cross_entropy(x, target, reduction=reduction, label_smoothing=label_smoothing)
        with batch_invariant_mode(strict=True):
            got = F.cross_entropy(x, target, reduction=reduction, label_smoothing=label_smoothing)
        torch.testing.assert_close(got, wanted)


def test_a_tensordot_of_numbers_is_their_product() -> None:
    with batch_invariant_mode(strict=True):
        assert torch.tensordot(torch.tensor(2.0), torch.tensor(3.0), dims=0) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_the_row_operation(dtype: Any) -> None:
    x = torch.randn(5, 7, 40).to(dtype).requires_grad_()
    norm = torch.nn.RMSNorm((7, 40), eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    for f in (norm, lambda x: F.rms_norm(x, (40,))):
        plain = f(x)
        with batch_invariant_mode(strict=True):
            ours = f(x)
        torch.testing.assert_close(ours, plain)
        dy = torch.randn(5, 7, 40).to(dtype)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        wanted = torch.autograd.grad(plain, x, dy)[0]
        torch.testing.assert_close(torch.autograd.grad(ours, x, dy)[0], wanted, **tolerance)
    scale = torch.rsqrt(rows.mean_square(x.detach().float()) + torch.finfo(torch.float32).eps)
    assert same_bits(ours.detach(), (x.detach().float() * scale[..., None]).to(dtype))


def _losses(x: Any, w: Any, c: Any) -> Any:
    h = torch.addmm(c, x, w, beta=0.5, alpha=2).softmax(-1)
    return F.linear(torch.einsum("ij,kj->ik", h, w), w.t()).log_softmax(-1).mean(0).sum() + (x * c[:1]).mean()


def test_the_backward_of_a_forward_inside_follows_it_anywhere() -> None:
    leaves = [
        torch.randn(8, 24).requires_grad_(),
        torch.randn(24, 24).requires_grad_(),
        torch.randn(8, 24).requires_grad_(),
    ]
    plain = torch.autograd.grad(_losses(*leaves), leaves)
    with batch_invariant_mode(strict=True):
        loss = _losses(*leaves)
        inside = torch.autograd.grad(loss, leaves, retain_graph=True)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, leaves, retain_graph=True)))
    thread.start()
    thread.join()
    for a, b, c, d in zip(torch.autograd.grad(loss, leaves), inside, found, plain, strict=True):
        assert same_bits(a, b)
        assert same_bits(a, c)
        torch.testing.assert_close(a, d, rtol=1e-3, atol=1e-4)
    for before, after in zip(plain, torch.autograd.grad(_losses(*leaves), leaves), strict=True):
        assert same_bits(before, after)


def test_gradients_are_those_of_detkern_torch() -> None:
    x, w = A.clone().requires_grad_(), B.clone().requires_grad_()
    with batch_invariant_mode():
        y = x @ w
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    assert same_bits(dx, detkern.gemm_da(dy, B))
    assert same_bits(dw, detkern.gemm_db(A, dy))


def test_the_gradient_of_a_broadcast_operand_is_summed_by_detkern() -> None:
    x, scale, weight = torch.randn(6, 40), torch.randn(6, 1).requires_grad_(), torch.randn(40).requires_grad_()
    dy = torch.randn(6, 40)
    with batch_invariant_mode():
        y = x * scale * weight
    by_scale, by_weight = torch.autograd.grad(y, (scale, weight), dy)
    assert same_bits(by_scale, rows.sum(dy * weight.detach() * x)[:, None])
    assert same_bits(by_weight, detkern.bias_gradient(dy * (x * scale.detach())))


def test_checkpointing_recomputes_under_the_mode() -> None:
    from torch.utils.checkpoint import checkpoint

    x, w = torch.randn(8, 24, requires_grad=True), torch.randn(24, 24, requires_grad=True)

    def block(x: Any) -> Any:
        return torch.exp(F.linear(x, w).softmax(-1))

    for reentrant in (False, True):
        with batch_invariant_mode(strict=True):
            wanted = torch.autograd.grad(block(x).sum(), (x, w))
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        assert same_bits(x.grad, wanted[0])
        assert same_bits(w.grad, wanted[1])
        x.grad = w.grad = None
    contexts = lambda: (batch_invariant_mode(), batch_invariant_mode())
    checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert same_bits(w.grad, wanted[1])


def test_contracts_are_chosen_by_op_and_bind_the_types_that_they_take() -> None:
    a, b, bias = A.bfloat16(), B.bfloat16(), BIAS.bfloat16()
    with batch_invariant_mode(contract={"mm": "tree", "addmm": "fma"}):
        assert same_bits(a @ b, detkern.gemm(a, b, contract="tree"))
        assert same_bits(F.linear(a, b.t()), detkern.gemm(a, b, contract="tree"))
        assert same_bits(F.linear(a, b.t(), bias), detkern.gemm(a, b, bias=bias, contract="fma"))
        assert same_bits(A3.bfloat16() @ B3.bfloat16(), detkern.gemm(A3.bfloat16(), B3.bfloat16()))
        assert same_bits(A @ B, detkern.gemm(A, B))  # float32, which tree does not take
    with batch_invariant_mode(contract="mma8"):
        assert same_bits(a @ b, detkern.gemm(a, b, contract="mma8"))
        y = torch.mm(a.requires_grad_(), b)
    dy = torch.randn(9, 12).bfloat16()
    assert same_bits(torch.autograd.grad(y, a, dy)[0], detkern.gemm_da(dy, b, contract="mma8"))


def test_arguments_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"device_types: 'cud' is none of cpu, cuda"):
        batch_invariant_mode(device_types="cud")
    with pytest.raises(ArgumentError, match=r"'linear' is none of the ops mm, addmm"):
        batch_invariant_mode(contract={"linear": "fma"})
    with pytest.raises(ContractUnsupported, match="mma32"):
        batch_invariant_mode(contract="mma32")


Q = torch.randn(1, 2, 5, 8)
REFUSED: dict[str, Callable[[], Any]] = {
    "float64": lambda: A.double() @ B.double(),
    "complex": lambda: torch.mm(A.to(torch.complex64), B.to(torch.complex64)),
    "float64 softmax": lambda: X.double().softmax(-1),
    "sum to float64": lambda: X.sum(-1, dtype=torch.float64),
    "attention with dropout": lambda: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.1),
    "attention's kernel": lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q),
    "conv1d": lambda: F.conv1d(Q[0], torch.randn(3, 5, 2)),
    "Conv2d": lambda: torch.nn.Conv2d(2, 3, 2)(Q),
    "LSTM": lambda: torch.nn.LSTM(8, 4)(Q[0]),
    "MultiheadAttention's dropout": lambda: torch.nn.MultiheadAttention(8, 2, 0.1)(Q[0], Q[0], Q[0],
        need_weights=False),
    "bilinear": lambda: F.bilinear(Q, Q, torch.randn(3, 8, 8)),
    "sparse": lambda: torch.sparse.mm(torch.eye(9).to_sparse(), A),
    "a graph's product": lambda: torch.linalg.matrix_power(A[:, :9].clone().requires_grad_(), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_strict_raises_where_nothing_is_covered_and_else_it_is_said_once(name: str) -> None:
    call = REFUSED[name]
    with batch_invariant_mode(strict=True), pytest.raises(ContractUnsupported, match="batch_invariant_mode"):
        call()
    mode._said.clear()
    with batch_invariant_mode(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        call()
        call()
    said = [x for x in said if "batch_invariant_mode" in str(x.message)]
    assert len(said) == len({str(x.message) for x in said}) >= 1
    call()


def test_strict_refuses_fp8_and_grouped_products_before_they_run() -> None:
    a, scale = torch.zeros(16, 16), torch.ones(1)
    operands = {"_scaled_mm": (a, a, scale, scale), "_grouped_mm": (a, a), "_scaled_grouped_mm": (a, a, scale, scale)}
    here = {name: given for name, given in operands.items() if hasattr(torch, name)}
    assert "_scaled_mm" in here
    for name, arguments in here.items():
        with batch_invariant_mode(strict=True), pytest.raises(ContractUnsupported, match=name):
            getattr(torch, name)(*arguments)


def test_whole_numbers_are_exact_and_pass() -> None:
    a = torch.arange(12).reshape(3, 4)
    with batch_invariant_mode(strict=True):
        assert torch.equal(a @ a.t(), a @ a.t())
        assert a.sum() == 66
        assert (a > 3).sum() == 8
        assert same_bits(a.mean(-1, dtype=torch.float32), rows.mean(a.float()))


def test_what_is_composed_below_python_is_watched() -> None:
    a = torch.randn(6, 6)
    with batch_invariant_mode(strict=True):
        assert same_bits(torch.linalg.matrix_power(a, 2), detkern.gemm(a, a))
        with torch.inference_mode():
            assert same_bits(torch.linalg.matrix_power(a, 2), detkern.gemm(a, a))


def test_a_call_that_no_handler_takes_is_not_let_pass_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for func in (torch.mm, torch.Tensor.mm, aten.mm.default):
        monkeypatch.setitem(coverage.HANDLERS, func, lambda *_, **__: NotImplemented)
    with batch_invariant_mode(strict=True):
        with pytest.raises(ContractUnsupported, match=r"mm \(called in this way\) is not covered"):
            torch.mm(A, B)
        assert torch.equal(torch.mm(A.int(), B.int()), A.int() @ B.int())
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(A, A)


def test_a_device_without_row_operations_keeps_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """MUSA, Ascend and ROCm have products alone."""
    monkeypatch.setattr("detkern.dispatch.registry.kinds_of", lambda operation: frozenset())
    monkeypatch.setattr("detkern.torch.mode.mode._said", set())
    weight = torch.ones(9, 1, requires_grad=True)
    calls = (
        X.sum, lambda: X.mean(-1), lambda: X.softmax(-1), lambda: F.cross_entropy(C, torch.zeros(9, dtype=torch.long)),
        lambda: torch.einsum("ab,bc->c", A, B), lambda: F.rms_norm(X, X.shape[-1:]),
    )  # fmt: skip
    for call in calls:
        with batch_invariant_mode(strict=True), pytest.raises(ContractUnsupported, match=r"\(cpu\) is not covered"):
            call()
        with batch_invariant_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(call(), call())
    with batch_invariant_mode(strict=True):
        assert same_bits(torch.mm(A, B), detkern.gemm(A, B))
        scaled = C * weight
    torch.testing.assert_close(torch.autograd.grad(scaled, weight, C)[0], (C * C).sum(1, keepdim=True))
    plain = X.softmax(-1)
    monkeypatch.setattr("detkern.torch.mode.mode._said", set())
    with batch_invariant_mode(), pytest.warns(UserWarning, match=r"softmax \(cpu\) is not covered"):
        assert torch.equal(X.softmax(-1), plain)


def test_errors_of_bad_calls_are_pytorchs() -> None:
    for call in (
        lambda: torch.mm(A, A), lambda: torch.bmm(A, B), A3.mv, lambda: A @ A, lambda: torch.addmm(C[:3], A, B),
        lambda: F.linear(A, B), lambda: torch.dot(A, A), lambda: A.half() @ B, lambda: X.sum(7), lambda: X.softmax(5),
        lambda: X.mean((0, 0)), lambda: torch.mm(A, B, out=torch.empty(9, 12, dtype=torch.half)),
        lambda: torch.mm(A.clone().requires_grad_(), B, out=torch.empty(9, 12)),
        lambda: torch.linalg.multi_dot([A3, A3, A3]), lambda: torch.chain_matmul(A[0], B),
        lambda: F.rms_norm(A, A.shape[-1]),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, TypeError, IndexError)) as outside:
            call()
        with batch_invariant_mode(strict=True), pytest.raises(outside.type):
            call()


def test_modes_nest_and_each_exit_restores_what_was() -> None:
    a, b = A.bfloat16(), B.bfloat16()
    plain = a @ b
    by = {name: detkern.gemm(a, b, contract=name) for name in ("fma", "tree")}
    assert not same_bits(by["fma"], by["tree"])
    with batch_invariant_mode(contract="fma"):
        with batch_invariant_mode(contract="tree"):
            assert same_bits(a @ b, by["tree"])
            with batch_invariant_mode(contract="tree", device_types="cuda"):  # not at work here: the one around it is
                assert same_bits(a @ b, by["tree"])
        assert same_bits(a @ b, by["fma"])
        with pytest.raises(KeyError), batch_invariant_mode(contract="tree"):
            raise KeyError
        with pytest.raises(RuntimeError):
            torch.mm(a, a)
        assert same_bits(a @ b, by["fma"])
    assert same_bits(a @ b, plain)
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_one_mode_may_be_entered_twice_and_again() -> None:
    one = batch_invariant_mode()
    for _ in range(2):
        with one, one:
            assert same_bits(A @ B, detkern.gemm(A, B))
        assert torch._C._len_torch_function_stack() == 0


def test_the_switch_turns_it_on_and_off_under_other_modes_too() -> None:
    plain, wanted = A @ B, detkern.gemm(A, B)
    switch = batch_invariant_mode()
    switch.enable()
    try:
        assert same_bits(A @ B, wanted)
        with torch.device("cpu"):
            switch.disable()
            assert same_bits(A @ B, plain)
            assert torch._C._len_torch_function_stack() == 1
            with pytest.raises(ArgumentError, match="not enabled"):
                switch.disable()
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
    assert same_bits(A @ B, plain)


def test_disable_in_its_own_block_takes_no_other_mode_away() -> None:
    plain, wanted = A @ B, detkern.gemm(A, B)
    one, other = batch_invariant_mode(), batch_invariant_mode(device_types="cuda")
    with other:
        with one:
            assert same_bits(A @ B, wanted)
            one.disable()
            assert same_bits(A @ B, plain)
            with pytest.raises(ArgumentError, match="not enabled"):
                one.disable()
        assert entered.modes() == (other,)
    with one:
        with one, other:
            one.disable()
            assert entered.modes() == (other, one)
        assert same_bits(A @ B, wanted)
        one.enable()
        one.disable()
        assert same_bits(A @ B, wanted)
        one.disable()
        one.enable()
        assert same_bits(A @ B, wanted)
    assert entered.modes() == (one,)
    one.disable()
    assert entered.current() is None

    @one
    def halfway() -> Any:
        one.disable()
        return A @ B

    with other:
        assert same_bits(halfway(), plain)
        assert entered.modes() == (other,)
    assert entered.current() is None


def test_another_thread_is_untouched() -> None:
    plain, ours = A @ B, detkern.gemm(A, B)
    ready, done = threading.Event(), threading.Event()
    seen: list[Any] = []

    def other() -> None:
        ready.wait()
        seen.append(A @ B)
        with batch_invariant_mode(contract={"mm": "fma"}):
            seen.append(A @ B)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with batch_invariant_mode():
        ready.set()
        done.wait()
        assert same_bits(A @ B, ours)
    thread.join()
    assert same_bits(seen[0], plain)
    assert same_bits(seen[1], ours)


def test_a_mode_for_another_device_touches_nothing_and_refuses_nothing() -> None:
    with batch_invariant_mode(device_types=["cuda"], strict=True):
        inside = [A @ B, X.softmax(-1), F.silu(X), X.double() @ X.double().mT, F.scaled_dot_product_attention(Q, Q, Q)]
    outside = [A @ B, X.softmax(-1), F.silu(X), X.double() @ X.double().mT, F.scaled_dot_product_attention(Q, Q, Q)]
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_autocast_chooses_the_types() -> None:
    with torch.autocast("cpu", torch.bfloat16), batch_invariant_mode(contract="fma"):
        got = [A @ B, F.linear(A, B.t(), BIAS), torch.addmm(C, A, B, alpha=2)]
    a, b = A.bfloat16(), B.bfloat16()
    acc = detkern.gemm(a, b, contract="fma", out_dtype="float32")
    assert same_bits(got[0], detkern.gemm(a, b, contract="fma"))
    assert same_bits(got[1], detkern.gemm(a, b, bias=BIAS.bfloat16(), contract="fma"))
    assert same_bits(got[2], (acc * 2 + C.bfloat16().float()).bfloat16())


def test_transforms_go_through() -> None:
    def loss(w: Any) -> Any:
        return (torch.addmm(C, A, w, beta=0.5).softmax(-1).mean(0) ** 2).sum()

    wanted = torch.func.grad(loss)(B)
    tangent = torch.func.jvp(loss, (B,), (torch.ones_like(B),))[1]
    stack = torch.func.vmap(loss)(torch.stack([B, B * 2]))
    with batch_invariant_mode(strict=True):
        torch.testing.assert_close(torch.func.grad(loss)(B), wanted, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(torch.func.jvp(loss, (B,), (torch.ones_like(B),))[1], tangent, rtol=1e-3, atol=1e-6)
        got = torch.func.vmap(loss)(torch.stack([B, B * 2]))
        assert same_bits(got[0], loss(B))
    torch.testing.assert_close(got, stack, rtol=1e-3, atol=1e-6)
