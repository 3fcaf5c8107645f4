"""The ops that a mode sees: the others call no Python, and PyTorch's own calls inside of an op are its own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F
from frameworks import same_bits

import detkern
from detkern.errors import ContractUnsupported
from detkern.torch import batch_invariant_mode
from detkern.torch.mode import coverage, kernels

A, B = torch.randn(9, 70), torch.randn(70, 12)


def calls_of_python(run: Callable[[], Any]) -> int:
    """How many functions of Python run calls."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    run()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count - 1  # run itself


PLAIN = {
    "shape": lambda: (A.shape, A.dtype, A.device, A.requires_grad),
    "views": lambda: A.view(3, 3, 70).transpose(0, 1)[1:, :, None].expand(2, 3, 4, 70),
    "arithmetic": lambda: A * A[0] + 1.5 - A / 2,
    "copies": lambda: torch.cat((A, A)).to(torch.bfloat16).contiguous(),
    "functions": lambda: (A.exp(), torch.cos(A), A.abs(), A.argmax(-1), A.amax(0)),
    "reading": lambda: (A[[0, 2]], torch.index_select(A, 0, torch.tensor([1])), A.gather(0, torch.tensor([[1]]))),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_covered_calls_no_python(name: str) -> None:
    run = PLAIN[name]
    with torch.no_grad():
        outside = calls_of_python(run)
        with batch_invariant_mode(strict=True):
            if name != "reading":
                assert calls_of_python(run) == outside
            assert calls_of_python(lambda: A @ B) > 5  # what is covered does


def test_reading_calls_no_python_where_nothing_is_recorded() -> None:
    with batch_invariant_mode(strict=True), torch.no_grad():
        assert calls_of_python(PLAIN["reading"]) == 0
        assert calls_of_python(PLAIN["arithmetic"]) == 0


def test_the_formulas_of_a_backward_pass_are_pytorchs_and_what_python_calls_there_is_seen() -> None:
    x, scale = A.double().requires_grad_(), torch.randn(70).double().requires_grad_()
    y = (x @ B.double()).logsumexp(-1).sum() + (x * scale).sum()
    wanted = torch.autograd.grad(y, (x, scale), retain_graph=True)
    with batch_invariant_mode(strict=True):  # which would refuse float64
        assert all(map(torch.equal, torch.autograd.grad(y, (x, scale), retain_graph=True), wanted))
        again = torch.autograd.grad(y, x, create_graph=True)[0]
        assert torch.equal(again, wanted[0])

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            return a.clone()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return dy @ B @ B.t()

    leaf = A.clone().requires_grad_()
    y = Function.apply(leaf)
    with batch_invariant_mode():
        (got,) = torch.autograd.grad(y, leaf, A)
    assert same_bits(got, detkern.gemm(detkern.gemm(A, B), B.t()))


def test_functions_of_a_module_imported_before_and_torchscript_are_seen() -> None:
    from torch import matmul

    scripted = torch.jit.trace(lambda a, b: a @ b, (A, B))
    with batch_invariant_mode():
        assert same_bits(matmul(A, B), detkern.gemm(A, B))
        assert same_bits(scripted(A, B), detkern.gemm(A, B))


def test_every_handler_and_every_refusal_of_aten_has_a_kernel() -> None:
    here = {overload for overload, _ in (*kernels._at_work(), *kernels._recording())}
    named = [f for f in (*coverage.HANDLERS, *coverage.ELEMENTWISE) if isinstance(f, torch._ops.OpOverload)]
    for name in coverage.UNCOVERED:
        packet = getattr(torch.ops.aten, name, None)
        named += [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    missing = [f for f in named if f not in here and torch._C._dispatch_has_kernel(f.name())]
    # Into a tensor that is given, what is read by an index has no gradient; what makes an index of numbers takes none.
    assert all("out" in f._overloadname or f.name() == "aten::repeat_interleave.Tensor" for f in missing), missing
    assert {coverage.name_of(f) for f in missing} <= kernels._READING


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_native_cross_entropy_and_einsum_are_those_of_the_functions(reduction: str) -> None:
    target = torch.arange(9) % 5
    native = {"none": 0, "mean": 1, "sum": 2}[reduction]
    with batch_invariant_mode(strict=True):
        wanted = F.cross_entropy(A, target, reduction=reduction, ignore_index=3)
        got = torch.ops.aten.cross_entropy_loss(A, target, None, native, 3)
        assert same_bits(got, wanted)
        assert same_bits(torch.ops.aten.einsum("ik,kj->ij", [A, B]), detkern.gemm(A, B))
        path = torch.ops.aten.einsum("ik,kj,lj->il", [A, B, B.t()[:, :12] @ B[:12]], path=[1, 2, 0, 1])
        left = torch.einsum("ik,kj->ij", A, B)
        assert same_bits(path, torch.einsum("ij,lj->il", left, B.t()[:, :12] @ B[:12]))


def test_an_operator_that_takes_functions_is_refused_by_its_name_and_others_are_passed_by() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    q, score = torch.randn(1, 2, 8, 16), lambda score, *_: score
    operator = torch.ops.higher_order.flex_attention
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 8, 8, device="cpu")
    call = lambda: operator(q, q, q, score, mask.as_tuple(), 0.25, {})
    plain = call()
    with batch_invariant_mode(strict=True), pytest.raises(ContractUnsupported, match="flex_attention"):
        call()
    with batch_invariant_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(call()[0], plain[0])
