"""Products and row operations of plain tensors, with the least work between the call and the kernel.

`detkern.gemm` reads any framework's arrays, finds their adapters and orders their streams; on a small product that
costs more than torch.nn.functional.linear as a whole. Here tensors become views at once, which find the same plans;
what is unusual goes through `detkern.gemm`, which also says what is wrong with it, and serves `detkern.explain`.

Only for tensors of which `route.direct` is true, and that autograd does not record here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ... import api, rows
from ...dispatch.backend import Execution
from ...dispatch.call import rehearsals
from ...dispatch.plan import Planned
from ...errors import DetkernError
from ...operations.bias_gradient.checks import plan_column_sum
from ...operations.gemm.checks import GEMM, LINEAR, Names, plan_product
from ...operations.rows.checks import plan_rows
from ...operations.rows.problem import RowKind
from ...tensors import Device, TensorView, contiguous_strides
from ...tensors.torch import torch_adapter
from ...tensors.types import OUTPUTS, dtype_argument
from ...vocabulary.dtypes import E4M3, DType
from .route import TYPES

__all__ = ["bias_gradient", "linear", "matmul", "row_operation"]

_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_TORCH_TYPES = {dtype.code: name for name, dtype in TYPES.items()}
_RESULTS = {name: dtype for name, dtype in TYPES.items() if dtype in OUTPUTS}
_places: dict[Any, Device] = {}
_executions: dict[tuple[int, int], Execution] = {}


def matmul(a: Any, b: Any, contract: str | None, out_dtype: Any, backend: str | None) -> Any:
    """`detkern.gemm(a, b, ...)`."""
    return _product(GEMM, a, b, None, contract, out_dtype, backend)


def bias_gradient(dc: Any, out_dtype: Any, backend: str | None) -> Any:
    """`detkern.bias_gradient(dc, ...)`."""
    view = _view(dc)
    if view is None:
        return api.bias_gradient(dc, out_dtype=out_dtype, backend=backend)
    planned = plan_column_sum(view, None, None if out_dtype is None else _named(out_dtype), False, backend)
    return _complete(planned, (view,), view.device, dc)


def row_operation(name: str, kind: RowKind, operands: tuple[Any, ...], out_dtype: Any, backend: str | None) -> Any:
    """`detkern.rows.<name>(*operands, ...)`, of a kind whose operands are all tensors."""
    first = operands[0]
    a, b = _view(first), None if len(operands) == 1 else _view(operands[1])
    if backend is not None or a is None or (len(operands) > 1 and (b is None or b.device is not a.device)):
        return getattr(rows, name)(*operands, out_dtype=out_dtype, backend=backend)
    planned = plan_rows(kind, a, b, None, None, None if out_dtype is None else _named(out_dtype), backend)
    return _complete(planned, (a,) if b is None else (a, b), a.device, first)


def _product(
    names: Names, left: Any, right: Any, bias: Any, contract: str | None, out_dtype: Any, backend: str | None
) -> Any:
    a, b = _view(left), _view(right)
    column = None if bias is None else _view(bias)
    if (
        a is None
        or b is None
        or a.device is not b.device
        or (bias is not None and (column is None or column.device is not a.device))
    ):
        if names is LINEAR:
            return api.linear(left, right, bias, contract=contract, out_dtype=out_dtype, backend=backend)
        return api.gemm(left, right, contract=contract, out_dtype=out_dtype, backend=backend)
    wanted = None if out_dtype is None else _named(out_dtype)
    planned = plan_product(names, a, b, False, names is LINEAR, column, None, wanted, False, contract, backend)
    return _complete(planned, (a, b, column), a.device, left)


# (x, weight, bias, contract, out_dtype, backend): `detkern.linear(x, weight, bias, ...)`. No function, which takes
# longer to call.
linear = functools.partial(_product, LINEAR)


def _view(tensor: Any) -> TensorView | None:
    """A tensor's memory; None where that is not simply what PyTorch says it is, or empty, and where calls are only
    rehearsed."""
    if rehearsals:
        return None
    try:
        pointer = tensor.data_ptr()
        dtype = TYPES.get(tensor.dtype)
        # A null pointer is a tensor whose storage was freed, or an empty one.
        if not pointer or dtype is None or tensor.is_neg():
            return None
        device = _places.get(tensor.device)
        if device is None:
            device = _places[tensor.device] = torch_adapter().view(tensor, "").device
        shape, strides = tensor.shape, tensor.stride()
        rank = len(shape)
        if rank == 2:
            last = (shape[0] - 1) * strides[0] + (shape[1] - 1) * strides[1]
        elif rank == 1:
            last = (shape[0] - 1) * strides[0]
        else:
            last = 0
            for size, stride in zip(shape, strides):  # noqa: B905 - strict, and a sum of a generator, take twice the time
                last += (size - 1) * stride
        # A storage that resize_ has cut short, as FSDP does, leaves shape and strides as they were.
        if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + last + 1) * dtype.itemsize:
            return None
        return TensorView(pointer, shape, strides, dtype, device)
    except (RuntimeError, DetkernError):  # a layout without memory of its own, a device without a name here
        return None


def _complete(planned: Planned, views: tuple[TensorView | None, ...], device: Device, like: Any) -> Any:
    """Run a plan into a new tensor on the device of `like`."""
    plan, m, shape = planned
    strides = (shape[1] or 1, 1) if len(shape) == 2 else contiguous_strides(shape)
    dtype = plan.dtype
    wanted = _TORCH_TYPES[dtype.code]
    # torch.empty, which has more signatures to tell apart, takes twice the time; a type and a device to read a fifth
    # more.
    if like.dtype is wanted:
        result = like.new_empty_strided(shape, strides)
    else:
        result = torch.empty_strided(shape, strides, dtype=wanted, device=like.device)
    if 0 not in shape:
        execution = _on_host if device.kind == "cpu" else _execution(device)
        plan.run(m, views, TensorView(result.data_ptr(), shape, strides, dtype, device), execution)
    return result


def _execution(device: Device) -> Execution:
    """On PyTorch's current stream. That of a CUDA device is known without asking the adapter."""
    if _raw_stream is None or device.kind not in ("cuda", "rocm"):
        return torch_adapter().execution(device)
    key = device.index, _raw_stream(device.index)
    execution = _executions.get(key)
    if execution is None:
        if len(_executions) >= 64:
            _executions.clear()
        execution = _executions[key] = torch_adapter().execution(device)
    return execution


def _allocate(size: int) -> TensorView:
    memory = torch.empty(size, dtype=torch.uint8)
    return TensorView(memory.data_ptr(), (size,), (1,), E4M3, _HOST, False, memory)


_HOST = Device("cpu")
_on_host = Execution(_HOST, 0, _allocate)


def _named(out_dtype: Any) -> DType:
    return _RESULTS.get(out_dtype) or dtype_argument(out_dtype)
