"""The classic operator surface: `get_op("det_gemm")` gives an object with the entry points that users of det_gemm
libraries call. docs/migrating.md says what is the same there and which bits differ.

Every entry point takes the arrays that `detkern.gemm` takes; on PyTorch tensors it records gradients, by detkern.torch.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import api
from ..dispatch import registry
from ..dispatch.plan import on_forget
from ..errors import ContractUnsupported, DTypeError, ShapeError
from ..tensors import Device, adapter_for
from ..vocabulary.contracts import FMA, TREE, TREE_MMA16, Contract, get_contract
from ..vocabulary.dtypes import BF16, F32, DType

__all__ = ["DetGemm", "is_tensor"]


class DetGemm:
    """Deterministic, batch-invariant products of matrices in f16 or bf16.

    contract: of every call that names none. None: the arithmetic of the classic operator, `tree-mma16` on a device
        where it is offered, else `tree` (`forward_accum_fp32` is always `fma`). `detkern.config.contract` has no say
        here.
    backend: the name of the one backend to use. None: the first of the registry that takes the call.

    Operands are of one type, of one device, and may be strided; batch dimensions broadcast as in `detkern.gemm`.
    Results are new arrays of the first operand's framework. All methods raise as `detkern.gemm` does; where no
    deterministic backend serves the operands' device, the error says what each of them answered.
    """

    name = "det_gemm"

    def __init__(self, *, contract: str | None = None, backend: str | None = None) -> None:
        self.contract = None if contract is None else get_contract(contract).name
        self.backend = backend

    def __repr__(self) -> str:
        return f"DetGemm(contract={self.contract!r}, backend={self.backend!r})"

    def __call__(self, a: Any, b: Any, *, contract: str | None = None) -> Any:
        """a [.., M, K] @ b [.., K, N] -> [.., M, N] of the operands' type."""
        return self._product(a, b, False, False, contract)

    fwd = __call__

    def fwd_rhs_transposed(self, a: Any, bt: Any, *, contract: str | None = None) -> Any:
        """a [.., M, K] @ bt [.., N, K].T -> [.., M, N] of the operands' type."""
        return self._product(a, bt, False, True, contract, names=("a", "bt"), summed="K")

    def fwd_fp32(self, a: Any, b: Any, *, contract: str | None = None) -> Any:
        """a [.., M, K] @ b [.., K, N] -> [.., M, N] in float32: the accumulator, for a tree its rounded root.

        The gradients round the incoming float32 gradient to the operands' type, once, before their products.
        """
        return self._product(a, b, False, False, contract, out_dtype="float32")

    forward_fp32 = fwd_fp32

    def da(self, dc: Any, b: Any, *, contract: str | None = None) -> Any:
        """The gradient of a: dc [.., M, N] @ b [.., K, N].T -> [.., M, K]."""
        return self._product(dc, b, False, True, contract, names=("dc", "b"), summed="N")

    def db(self, a: Any, dc: Any, *, contract: str | None = None) -> Any:
        """The gradient of b: a [.., M, K].T @ dc [.., M, N] -> [.., K, N]."""
        return self._product(a, dc, True, False, contract, names=("a", "dc"), summed="M")

    def db_transposed(self, a: Any, dc: Any, *, contract: str | None = None) -> Any:
        """The gradient of a weight [N, K]: dc [.., M, N].T @ a [.., M, K] -> [.., N, K], row-major."""
        return self._product(dc, a, True, False, contract, names=("dc", "a"), summed="M")

    def linear(self, a: Any, weight: Any, *, out: Any = None, contract: str | None = None) -> Any:
        """a [.., K] @ weight [N, K].T -> [.., N] of the operands' type.

        out: where the result goes; no gradient is recorded then, and a PyTorch tensor that requires grad is refused.
        """
        chosen = self._contract(a, "a", contract)
        if is_tensor(a) and out is None:
            from .. import torch

            return torch.linear(a, weight, contract=chosen, backend=self.backend)
        return api.linear(a, weight, out=out, contract=chosen, backend=self.backend)

    def forward_accum_fp32(self, a: Any, b: Any) -> Any:
        """a [.., M, K] @ b [.., K, N] -> [.., M, N] of a's type, by the contract `fma`: one ascending float32 chain.

        Args:
            a, b: bfloat16 or float32, each; of different types, the bfloat16 one is widened first, exactly.

        The gradients are `fma` products of the incoming gradient, each rounded once to its operand's type.
        """
        types = [_seen(array, name)[0] for array, name in ((a, "a"), (b, "b"))]
        for dtype, name in zip(types, ("a", "b"), strict=True):
            if dtype not in (BF16, F32):
                raise DTypeError(f"{name} is {dtype}; forward_accum_fp32 takes bfloat16 and float32")
        result = types[0]
        if types[0] != types[1]:
            named = zip((a, b), types, ("a", "b"), strict=True)
            a, b = (x if dtype == F32 else _widened(x, name) for x, dtype, name in named)
        return self._run(a, b, False, False, FMA.name, None if types[0] == types[1] else result.name)

    def _product(
        self,
        left: Any,
        right: Any,
        trans_left: bool,
        trans_right: bool,
        contract: str | None,
        out_dtype: str | None = None,
        names: tuple[str, str] = ("a", "b"),
        summed: str = "K",
    ) -> Any:
        chosen = self._contract(left, names[0], contract)
        if (
            trans_left or trans_right
        ):  # what the call below says of these would speak of its arguments, not of this one's
            _need_fit((left, right), (trans_left, trans_right), names, summed)
        return self._run(left, right, trans_left, trans_right, chosen, out_dtype)

    def _run(
        self, left: Any, right: Any, trans_left: bool, trans_right: bool, contract: str, out_dtype: str | None
    ) -> Any:
        if is_tensor(left) and is_tensor(right):
            from .. import torch

            left = left.mT if trans_left else left
            right = right.mT if trans_right else right
            return torch.matmul(left, right, out_dtype=out_dtype, contract=contract, backend=self.backend)
        return api.gemm(
            left, right, trans_a=trans_left, trans_b=trans_right, out_dtype=out_dtype, contract=contract,
            backend=self.backend,
        )  # fmt: skip

    def _contract(self, array: Any, argument: str, asked: str | None) -> str:
        if asked is not None:
            return get_contract(asked).name
        if self.contract is not None:
            return self.contract
        dtype, device = _seen(array, argument)
        if dtype not in TREE.operands:
            takes = " and ".join(d.name for d in TREE.operands)
            raise ContractUnsupported(
                f"{argument} is {dtype}; det_gemm's own arithmetic ({TREE_MMA16}, {TREE}) takes {takes}: give contract="
                f"'{FMA}', or call forward_accum_fp32 for float32"
            )
        return _classic(dtype, device, self.backend).name


_classics: dict[tuple[DType, Device, str | None], Contract] = {}
on_forget(_classics.clear)


def _classic(dtype: DType, device: Device, backend: str | None) -> Contract:
    """The classic operator's contract on a device: by type, device and backend, never by shape or data."""
    key = (dtype, device, backend)
    contract = _classics.get(key)
    if contract is None:
        contract = TREE_MMA16 if registry.offered(TREE_MMA16, dtype, device, backend) else TREE
        _classics[key] = contract
    return contract


def is_tensor(array: Any) -> bool:
    """Whether it is a PyTorch tensor; imports nothing."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(kind, type) and isinstance(array, kind)


def _seen(array: Any, argument: str) -> tuple[DType, Device]:
    """The type and the device of an operand."""
    if is_tensor(array):
        from ..torch.functions.route import place

        found = place(array)
        if found is not None:
            return found
    view = adapter_for(array, argument).view(array, argument, planned_copies=[])  # what it is refused for, if it is
    return view.dtype, view.device


def _widened(array: Any, argument: str) -> Any:
    if is_tensor(array):
        return array.float()
    if not hasattr(array, "astype"):
        raise DTypeError(
            f"{argument} is bfloat16, the other operand float32, and {type(array).__name__} has no astype to widen it "
            f"by: "
            "give float32, or an array of NumPy, PyTorch, JAX or CuPy"
        )
    return array.astype("float32")


def _need_fit(arrays: tuple[Any, Any], transposed: tuple[bool, bool], names: tuple[str, str], summed: str) -> None:
    """ShapeError where two operands, of which one is transposed, do not have the dimension that is summed in common."""
    if not all(hasattr(array, "shape") for array in arrays):
        return  # an array that is known by its protocol alone: the product reads it
    shapes = [array.shape for array in arrays]
    sizes = []
    for index, (shape, swap, name) in enumerate(zip(shapes, transposed, names, strict=True)):
        if swap and len(shape) < 2:
            raise ShapeError(f"{name} has shape {list(shape)}; it is transposed and needs two dimensions or more")
        if not shape:
            return
        sizes.append(shape[-1] if (index == 0) != swap or len(shape) == 1 else shape[-2])
    if sizes[0] != sizes[1]:
        left, right = (f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
        raise ShapeError(
            f"{left} and {right} do not fit: {summed} is {sizes[0]} in {names[0]} and {sizes[1]} in {names[1]}"
        )
