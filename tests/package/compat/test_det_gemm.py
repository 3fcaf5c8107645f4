"""The classic operator surface: every entry point's bits, its gradients, its defaults,
and dispatch that fails closed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import detkern
from detkern import config
from detkern.dispatch import plan, registry
from detkern.errors import ArgumentError, BackendUnavailable, ContractUnsupported, DTypeError, ShapeError
from detkern.operations.gemm.problem import GemmProblem
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

M, K, N = 6, 70, 9


def made(dtype: DType = BF16, kind: str = "normal") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(  # type: ignore[return-value]
        operands.generate(kind, dtype, shape, seed) for seed, shape in enumerate(((M, K), (K, N), (M, N)))
    )


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def bits(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.detach()
        return (array.view(torch.int16) if array.element_size() == 2 else array.view(torch.int32)).numpy()
    return array.view(f"i{array.dtype.itemsize}")


def same(got: Any, want: Any) -> bool:
    return np.array_equal(bits(got), bits(want))


def test_the_names() -> None:
    assert detkern.list_ops() == ("det_gemm", "linear_logp", "batch_invariant_linear_logp")
    assert detkern.get_op("det_gemm").name == "det_gemm"
    for wrong in ("gemm", "", None, 3, ["det_gemm"]):
        with pytest.raises(ArgumentError, match=r"there is no op .*; the ops are det_gemm"):
            detkern.get_op(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match="backend='tpu' does not exist; the backends of det_gemm are cpu, cuda, triton"
    ):
        detkern.get_op("det_gemm", backend="tpu")
    with pytest.raises(ArgumentError, match="backend='native' follows no contract"):
        detkern.get_op("det_gemm", backend="native")
    with pytest.raises(ContractUnsupported, match="contract='mma17' does not exist"):
        detkern.get_op("det_gemm", contract="mma17")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_entry_point_by_the_classic_arithmetic(framework: str, dtype: DType) -> None:
    a, b, dc = made(dtype)
    op = detkern.get_op("det_gemm")
    put = tensor if framework == "torch" else np.asarray
    classic = {"contract": "tree-mma16"}
    want = detkern.gemm(a, b, **classic)
    weight = np.ascontiguousarray(b.T)
    cases = {
        "call": (op(put(a), put(b)), want),
        "fwd": (op.fwd(put(a), put(b)), want),
        "fwd_rhs_transposed": (op.fwd_rhs_transposed(put(a), put(weight)), want),
        "linear": (op.linear(put(a), put(weight)), want),
        "fwd_fp32": (op.fwd_fp32(put(a), put(b)), detkern.gemm(a, b, out_dtype="f32", **classic)),
        "forward_fp32": (op.forward_fp32(put(a), put(b)), detkern.gemm(a, b, out_dtype="f32", **classic)),
        "da": (op.da(put(dc), put(b)), detkern.gemm_da(dc, b, **classic)),
        "db": (op.db(put(a), put(dc)), detkern.gemm_db(a, dc, **classic)),
        "db_transposed": (op.db_transposed(put(a), put(dc)), detkern.gemm_db(a, dc, transposed=True, **classic)),
    }
    for name, (got, expected) in cases.items():
        assert isinstance(got, torch.Tensor if framework == "torch" else np.ndarray), name
        assert tuple(got.shape) == expected.shape, name
        assert same(got, expected), name
    other = {"fma": detkern.gemm(a, b, contract="fma"), "mma16": detkern.gemm(a, b, contract="mma16")}
    for contract, expected in other.items():
        assert same(op(put(a), put(b), contract=contract), expected)
        assert same(detkern.get_op("det_gemm", contract=contract)(put(a), put(b)), expected)
    assert not np.array_equal(bits(want), bits(other["fma"])), "the contracts must differ here for this to tell"


def test_the_process_default_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = made()
    monkeypatch.setattr(config, "contract", "fma")
    assert same(detkern.get_op("det_gemm")(a, b), detkern.gemm(a, b, contract="tree-mma16"))


def test_tree_where_tree_mma16_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tree-mma16 where it is: on these operands their bits differ."""
    a, b, _ = made(kind="large")
    assert not same(detkern.gemm(a, b, contract="tree"), detkern.gemm(a, b, contract="tree-mma16"))
    assert same(detkern.get_op("det_gemm")(a, b), detkern.gemm(a, b, contract="tree-mma16"))
    products = registry.load("cpu").implementations[GemmProblem]
    real = products.refuses
    monkeypatch.setattr(products, "refuses", lambda p: "not here" if p.contract.name == "tree-mma16" else real(p))
    plan.forget_plans()
    try:
        for left, right in ((a, b), (tensor(a), tensor(b))):
            assert same(detkern.get_op("det_gemm")(left, right), detkern.gemm(a, b, contract="tree"))
            with pytest.raises(ContractUnsupported, match="cpu: not here"):
                detkern.get_op("det_gemm", contract="tree-mma16")(left, right)
    finally:
        monkeypatch.undo()
        plan.forget_plans()
    assert same(detkern.get_op("det_gemm")(a, b), detkern.gemm(a, b, contract="tree-mma16"))


def test_no_backend_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is substituted: what each backend answered is in the error."""
    a, b, _ = made()
    monkeypatch.setattr(registry.load("cpu"), "unavailable", lambda device: "its library is lost")
    plan.forget_plans()
    try:
        for left, right in ((a, b), (tensor(a), tensor(b))):
            with pytest.raises(BackendUnavailable, match="no backend takes this gemm on cpu: cpu: its library is lost"):
                detkern.get_op("det_gemm")(left, right)
        with pytest.raises(BackendUnavailable, match="backend='cpu' cannot run here: its library is lost"):
            detkern.get_op("det_gemm", backend="cpu")(a, b)
    finally:
        monkeypatch.undo()
        plan.forget_plans()
    with pytest.raises(detkern.DeviceError, match="backend='triton' works on cuda and rocm arrays, these are on cpu"):
        detkern.get_op("det_gemm", backend="triton")(a, b)


@pytest.mark.parametrize("entry", ["__call__", "fwd_rhs_transposed", "linear", "fwd_fp32"])
def test_gradients_follow_the_same_contract(entry: str) -> None:
    a, b, dc = made()
    right = b if entry in ("__call__", "fwd_fp32") else np.ascontiguousarray(b.T)
    ta, tb = tensor(a).requires_grad_(), tensor(right).requires_grad_()
    out = getattr(detkern.get_op("det_gemm"), entry)(ta, tb)
    incoming = tensor(dc).to(out.dtype)
    if entry == "fwd_fp32":
        incoming = incoming * 1.0001  # not a bf16 number: it is rounded to one first
        dc = incoming.to(torch.bfloat16).view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    out.backward(incoming)
    assert same(ta.grad, detkern.gemm_da(dc, b, contract="tree-mma16"))
    transposed = right is not b
    assert same(tb.grad, detkern.gemm_db(a, dc, transposed=transposed, contract="tree-mma16"))
    assert tb.grad.shape == tb.shape


def test_linear_into_out_records_nothing() -> None:
    a, b, _ = made()
    weight = np.ascontiguousarray(b.T)
    op = detkern.get_op("det_gemm")
    out = torch.empty(M, N, dtype=torch.bfloat16)
    assert op.linear(tensor(a), tensor(weight), out=out) is out
    assert same(out, op.linear(a, weight))
    with pytest.raises(ArgumentError, match="requires grad"):
        op.linear(tensor(a).requires_grad_(), tensor(weight), out=out)


@pytest.mark.parametrize(("left", "right"), [(BF16, BF16), (F32, F32), (BF16, F32), (F32, BF16)], ids=str)
def test_forward_accum_fp32(left: DType, right: DType) -> None:
    """One float32 chain, rounded once to a's type; gradients are chains too, rounded once to their operand's."""
    a, b = operands.generate("wide", left, (M, K), 1), operands.generate("wide", right, (K, N), 2)
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    want = detkern.gemm(wide_a, wide_b, contract="fma", out_dtype=left.name)
    op = detkern.get_op("det_gemm")
    assert same(op.forward_accum_fp32(a, b), want)
    ta, tb = tensor(a).requires_grad_(), tensor(b).requires_grad_()
    out = op.forward_accum_fp32(ta, tb)
    assert same(out, want)
    dc = operands.generate("normal", left, (M, N), 3)
    out.backward(tensor(dc))
    wide_dc = dc.astype(np.float32)
    assert same(ta.grad, detkern.gemm_da(wide_dc, wide_b, contract="fma", out_dtype=left.name))
    assert same(tb.grad, detkern.gemm_db(wide_a, wide_dc, contract="fma", out_dtype=right.name))


def test_what_the_entry_points_refuse() -> None:
    a, b, _ = made()
    op = detkern.get_op("det_gemm")
    wide = a.astype(np.float32)
    for x in (wide, tensor(wide)):
        with pytest.raises(ContractUnsupported, match=r"a is float32; det_gemm's own arithmetic .*forward_accum_fp32"):
            op(x, x)
    assert same(op(wide, b.astype(np.float32), contract="fma"), detkern.gemm(wide, b.astype(np.float32)))
    with pytest.raises(DTypeError, match="b is float16; forward_accum_fp32 takes bfloat16 and float32"):
        op.forward_accum_fp32(a, b.astype(np.float16))
    with pytest.raises(ShapeError, match="do not fit"):
        op(a, a)
    with pytest.raises(DTypeError, match="a is not an array but list"):
        op([1.0], b)
    with pytest.raises(DTypeError, match="not mixed"):
        op(a, b.astype(np.float16))
    assert repr(op) == "DetGemm(contract=None, backend=None)"


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_refused_shapes_are_told_by_the_names_of_the_entry_point(framework: str) -> None:
    def zeros(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.bfloat16) if framework == "torch" else np.zeros(shape, ml_dtypes.bfloat16)

    op = detkern.get_op("det_gemm")
    for entry, left, right, reason in (
        (op.fwd_rhs_transposed, (3, 4), (4, 5), r"a \[3, 4\] and bt \[4, 5\] do not fit: K is 4 in a and 5 in bt"),
        (op.da, (3, 4), (5, 5), r"dc \[3, 4\] and b \[5, 5\] do not fit: N is 4 in dc and 5 in b"),
        (op.db, (3, 4), (5, 6), r"a \[3, 4\] and dc \[5, 6\] do not fit: M is 3 in a and 5 in dc"),
        (op.db_transposed, (3, 4), (5, 6), r"dc \[5, 6\] and a \[3, 4\] do not fit: M is 5 in dc and 3 in a"),
        (op.fwd_rhs_transposed, (3, 4), (4,), r"bt has shape \[4\]; it is transposed and needs two dimensions"),
        (op.db, (4,), (4, 5), r"a has shape \[4\]; it is transposed and needs two dimensions"),
    ):
        with pytest.raises(ShapeError, match=reason):
            entry(zeros(*left), zeros(*right))
    assert op.da(zeros(4), zeros(5, 4)).shape == (5,)
    assert op.db(zeros(2, 3, 4), zeros(3, 5)).shape == (2, 4, 5)


class ByProtocol:
    """An array that shows itself by DLPack alone."""

    def __init__(self, array: torch.Tensor) -> None:
        self.array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_an_array_without_methods_of_its_own_is_taken_or_refused_by_name() -> None:
    op = detkern.get_op("det_gemm")
    a, b, _ = made()
    assert same(op.fwd_rhs_transposed(ByProtocol(tensor(a)), ByProtocol(tensor(b.T))), op(a, b))
    with pytest.raises(DTypeError, match="a is bfloat16, the other operand float32, and ByProtocol has no astype"):
        op.forward_accum_fp32(ByProtocol(tensor(a)), b.astype(np.float32))


def test_it_compiles_under_fake_tensors() -> None:
    """The op picks its contract without looking at data, so tracers can pass through it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(64, 8, dtype=torch.bfloat16)
        assert detkern.get_op("det_gemm")(a, b).shape == (4, 8)
