"""Products of plain tensors, with the least work between the call and the kernel.

`detkern.gemm` reads any framework's arrays, checks them and looks its plan up anew each time; on a small product that costs
more than torch.nn.functional.linear as a whole. Here one dictionary maps what a plan depends on, as PyTorch says it, to
the plan and everything else about a call that does not change. The first call of a kind, and every one that is unusual,
goes through `detkern.gemm`, which also says what is wrong with it.

Only for tensors of which `route.direct` is true, and that autograd does not record here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import api, config
from ..backend import Execution
from ..dtypes import DType
from ..plan import Names, Plan, on_forget, plan_column_sum, plan_gemm
from ..tensors import Device, TensorView
from ..tensors.overlap import byte_range
from ..tensors.torch import torch_adapter
from ..tensors.types import dtype_argument

__all__ = ["bias_gradient", "linear", "matmul"]

_KEPT = 4096  # kinds of calls; when there are more, all are forgotten

_MATMUL = Names("gemm", "a", "b")
_LINEAR = Names("linear", "x", "weight")
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# Of a view, what does not change from call to call: shape, strides, type, device.
_Form = tuple[tuple[int, ...], tuple[int, ...], DType, Device]


class _Ready:
    """One kind of call, worked out."""

    __slots__ = (
        "device",
        "dtype",
        "executions",
        "forms",
        "index",
        "itemsize",
        "needs",
        "out",
        "place",
        "problem",
        "run",
        "shape",
        "strides",
    )

    def __init__(self, run: Callable[..., None], plan: Plan[Any], views: list[TensorView], result: Any) -> None:
        self.run, self.problem = run, plan.problem
        self.forms: list[_Form] = [(view.shape, view.strides, view.dtype, view.device) for view in views]
        # Bytes of storage that each tensor needs behind its offset. The operands are of one type; a bias has its own.
        self.needs = [byte_range(view.shape, view.strides, view.dtype.itemsize)[1] for view in views]
        self.itemsize = views[0].dtype.itemsize
        self.place = views[0].device
        self.out: _Form = (plan.shape, plan.strides, plan.dtype, self.place)
        self.shape, self.strides = plan.shape, plan.strides
        self.dtype, self.device = result.dtype, result.device
        # The stream of a CUDA device is known without asking the adapter; the CPU has none.
        known = self.place.kind == "cpu" or (_raw_stream is not None and self.place.kind in ("cuda", "rocm"))
        self.index = self.place.index if known else -1
        self.executions: dict[int, Execution] = {}

    def execution(self) -> Execution:
        if self.index < 0:
            return torch_adapter().execution(self.place)
        stream = 0 if self.place.kind == "cpu" or _raw_stream is None else _raw_stream(self.index)
        execution = self.executions.get(stream)
        if execution is None:
            if len(self.executions) >= 64:
                self.executions.clear()
            execution = self.executions[stream] = torch_adapter().execution(self.place)
        return execution


_ready: dict[Any, _Ready] = {}
on_forget(_ready.clear)


def matmul(a: Any, b: Any, contract: str | None, out_dtype: Any, backend: str | None) -> Any:
    """`detkern.gemm(a, b, ...)`."""
    return _product(_MATMUL, a, b, None, contract, out_dtype, backend)


def linear(x: Any, weight: Any, bias: Any, contract: str | None, out_dtype: Any, backend: str | None) -> Any:
    """`detkern.linear(x, weight, bias, ...)`."""
    return _product(_LINEAR, x, weight, bias, contract, out_dtype, backend)


def bias_gradient(dc: Any, out_dtype: Any, backend: str | None) -> Any:
    """`detkern.bias_gradient(dc, ...)`."""
    try:
        pointer = dc.data_ptr()
        key: Any = (out_dtype, backend, dc.shape, dc.stride(), dc.dtype, dc.device, pointer & 15)
    except RuntimeError:  # a layout without memory of its own
        pointer, key = 0, None
    ready = _ready.get(key)
    if (
        ready is not None
        and pointer
        and dc.untyped_storage().nbytes() >= ready.needs[0] + dc.storage_offset() * ready.itemsize
        and not dc.is_neg()
    ):
        result = torch.empty_strided(ready.shape, ready.strides, dtype=ready.dtype, device=ready.device)
        out = TensorView(result.data_ptr(), *ready.out)
        ready.run(ready.problem, TensorView(pointer, *ready.forms[0]), out, ready.execution())
        return result
    result = api.bias_gradient(dc, out_dtype=out_dtype, backend=backend)
    if pointer and not dc.is_neg():
        views = [torch_adapter().view(dc, "dc")]
        plan = plan_column_sum(views[0], None, _named(out_dtype), False, backend)
        _keep(key, plan.backend.column_sum, plan, views, result)
    return result


def _product(
    names: Names, left: Any, right: Any, bias: Any, contract: str | None, out_dtype: Any, backend: str | None
) -> Any:
    try:
        left_pointer, right_pointer = left.data_ptr(), right.data_ptr()
        key: Any = (
            names.function, contract, out_dtype, backend, config._stated,
            left.shape, left.stride(), left.dtype, left.device, left_pointer & 15,
            right.shape, right.stride(), right.dtype, right.device, right_pointer & 15,
        )  # fmt: skip
        if bias is not None:
            bias_pointer = bias.data_ptr()
            key += bias.shape, bias.stride(), bias.dtype, bias.device, bias_pointer & 15
    except RuntimeError:  # a layout without memory of its own
        key = None
    ready = _ready.get(key)
    if (
        ready is None
        or not left_pointer
        or not right_pointer
        # A storage that resize_ has cut short, as FSDP does, leaves shape and strides as they were: said by _first.
        or left.untyped_storage().nbytes() < ready.needs[0] + left.storage_offset() * ready.itemsize
        or right.untyped_storage().nbytes() < ready.needs[1] + right.storage_offset() * ready.itemsize
        or left.is_neg()
        or right.is_neg()
    ):
        return _first(key, names, left, right, bias, contract, out_dtype, backend)
    forms = ready.forms
    bias_view = None
    if bias is not None:
        if (
            not bias_pointer
            or bias.untyped_storage().nbytes() < ready.needs[2] + bias.storage_offset() * bias.itemsize
            or bias.is_neg()
        ):
            return _first(key, names, left, right, bias, contract, out_dtype, backend)
        bias_view = TensorView(bias_pointer, *forms[2])
    # torch.empty, which has more signatures to tell apart, takes twice the time.
    result = torch.empty_strided(ready.shape, ready.strides, dtype=ready.dtype, device=ready.device)
    ready.run(
        ready.problem,
        TensorView(left_pointer, *forms[0]),
        TensorView(right_pointer, *forms[1]),
        TensorView(result.data_ptr(), *ready.out),
        bias_view,
        ready.execution(),
    )
    return result


def _first(
    key: Any, names: Names, left: Any, right: Any, bias: Any, contract: str | None, out_dtype: Any, backend: str | None
) -> Any:
    """The call by way of `detkern.gemm`; the next one of its kind will be ready."""
    if names is _LINEAR:
        result = api.linear(left, right, bias, contract=contract, out_dtype=out_dtype, backend=backend)
    else:
        result = api.gemm(left, right, contract=contract, out_dtype=out_dtype, backend=backend)
    tensors = [x for x in (left, right, bias) if x is not None]
    if key is not None and not any(x.is_neg() for x in tensors):
        views = [torch_adapter().view(x, "") for x in tensors]
        plan = plan_gemm(
            names, views[0], views[1], False, names is _LINEAR, views[2] if bias is not None else None, None,
            _named(out_dtype), False, contract, backend,
        )  # fmt: skip
        _keep(key, plan.backend.gemm, plan, views, result)
    return result


def _named(out_dtype: Any) -> DType | None:
    return None if out_dtype is None else dtype_argument(out_dtype)


def _keep(key: Any, run: Callable[..., None], plan: Plan[Any], views: list[TensorView], result: Any) -> None:
    if not plan.empty:
        if len(_ready) >= _KEPT:
            _ready.clear()
        _ready[key] = _Ready(run, plan, views, result)
