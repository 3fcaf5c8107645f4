"""PyTorch tensors: pointer and strides read directly, results and scratch from PyTorch's allocator (graph pools too).

CUDA and ROCm tensors both say "cuda" (torch.version.hip tells them apart); torch_musa and torch_npu add "musa" and
"npu".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from ..errors import ArgumentError, DeviceError, DTypeError
from ..vocabulary.dtypes import DTYPES, E4M3, INDICES, DType
from .adapter import Adapter
from .execution import Execution
from .overlap import byte_range
from .types import refuse_type
from .view import Device, TensorView, contiguous_strides

__all__ = ["torch_adapter"]


@cache
def torch_adapter() -> Adapter:
    """The adapter over the PyTorch that the caller has imported."""
    return _Torch(sys.modules["torch"])


class _Torch(Adapter):
    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._types = {getattr(torch, dtype.name): dtype for dtype in (*DTYPES, *INDICES)}
        self._torch_types = {dtype: torch_type for torch_type, dtype in self._types.items()}
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._strided_layout = torch.strided
        self._forward_ad = torch.autograd.forward_ad
        self._grad_enabled: Callable[[], bool] = torch.is_grad_enabled
        self._kinds = {"cpu": "cpu", "cuda": "rocm" if torch.version.hip else "cuda", "musa": "musa", "npu": "ascend"}
        self._devices: dict[Any, Device] = {}
        self._torch_devices: dict[Device, Any] = {}
        self._executions: dict[tuple[Device, int], Execution] = {}
        # The public current_stream() makes a Stream object each time; this gives its handle alone.
        self._raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def view(
        self, array: Any, argument: str, stream: int | None = None, planned_copies: list[str] | None = None
    ) -> TensorView:
        if array.is_neg():
            lazy = self._strided(array, argument)
            if planned_copies is not None:
                planned_copies.append(f"{argument}: its sign is flipped lazily (torch's negative bit)")
                return TensorView(0, lazy.shape, contiguous_strides(lazy.shape), lazy.dtype, lazy.device)
            array = array.resolve_neg()
        return self._strided(array, argument)

    def out_view(self, array: Any, argument: str, stream: int | None = None) -> TensorView:
        if array.is_neg():
            raise ArgumentError(
                f"{argument} has torch's lazy negative bit set and cannot be written; give {argument}.resolve_neg()"
            )
        return self._strided(array, argument)

    def _strided(self, array: Any, argument: str) -> TensorView:
        dtype = self._types.get(array.dtype)
        if (
            dtype is None
            or type(array) not in self._plain
            or (array.requires_grad and self._grad_enabled())
            or self._forward_ad._current_level >= 0
        ):
            dtype = self._checked(array, argument)
        device = self._devices.get(array.device) or self._device(array, argument)
        try:
            pointer = array.data_ptr()
            shape, strides = tuple(array.shape), array.stride()
            # resize_ of a storage, by which FSDP frees parameters, leaves the tensors over it as they were.
            held, offset = array.untyped_storage().nbytes(), array.storage_offset()
        except RuntimeError as error:
            self._checked(array, argument)
            if array.is_nested:
                raise DTypeError(
                    f"{argument} is a nested tensor, which has no one shape; give a dense one, as in "
                    f"{argument}.to_padded_tensor(0)"
                ) from None
            raise DTypeError(
                f"{argument} has no memory of its own (a tensor inside torch.func, torch.compile or a tracer): {error}"
                "; call detkern outside of the transform"
            ) from None
        needs = byte_range(shape, strides, dtype.itemsize)[1] + offset * dtype.itemsize
        if (held < needs or not pointer) and 0 not in shape:
            self._checked(array, argument)
            raise ArgumentError(
                f"{argument} has had its storage {'cut short' if held else 'freed'}: the storage holds {held} bytes "
                f"and the "
                f"tensor needs {needs}; give the storage its size back (FSDP: unshard the module) before the call"
            )
        return TensorView(pointer, shape, strides, dtype, device, False, array)

    def _checked(self, array: Any, argument: str) -> DType:
        """The type of a tensor that is not plainly a dense one, or why it is refused."""
        torch = self._torch
        kind = type(array)
        if kind not in self._plain and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            raise DTypeError(
                f"{argument} is a {kind.__module__}.{kind.__qualname__}, which holds no plain memory of its own; give "
                "the plain (or local) tensor"
            )
        if array.layout is not self._strided_layout:
            raise DTypeError(f"{argument} has layout {array.layout}; make it dense, as in {argument}.to_dense()")
        if array.is_quantized:
            raise DTypeError(f"{argument} is quantized ({array.dtype}); dequantize it, as in {argument}.dequantize()")
        dtype = self._types.get(array.dtype)
        if dtype is None:
            raise refuse_type(argument, str(array.dtype).removeprefix("torch."), f"{argument}.to(torch.float32)")
        if array._is_zerotensor():
            raise DTypeError(f"{argument} is a lazy zero tensor; give {argument}.clone()")
        if array.requires_grad and self._grad_enabled():
            raise ArgumentError(
                f"{argument} requires grad, and this call would record no gradient: use detkern.torch for one, or give "
                f"{argument}.detach(), or call under torch.no_grad()"
            )
        if self._forward_level() >= 0 and self._forward_ad.unpack_dual(array).tangent is not None:
            raise ArgumentError(
                f"{argument} carries a forward-mode tangent, which this call would drop: use detkern.torch, or give "
                f"the primal, torch.autograd.forward_ad.unpack_dual({argument}).primal"
            )
        return dtype

    def _forward_level(self) -> int:
        """The level of forward-mode differentiation that is entered, or -1; -1 too where this thread records no
        tangents, as below autograd, where nothing can be asked for one."""
        level: int = self._forward_ad._current_level
        return level if level < 0 or self._torch._C._is_fwd_grad_enabled() else -1

    def _device(self, array: Any, argument: str) -> Device:
        kind = self._kinds.get(array.device.type)
        if array.device.type == "meta":
            raise DeviceError(f"{argument} is on the meta device and has no data; give a tensor on cpu or cuda")
        if kind is None:
            raise DeviceError(f"{argument} is on {array.device}; detkern serves tensors on {', '.join(self._kinds)}")
        device = Device(kind, array.device.index or 0)
        self._devices[array.device] = device
        self._torch_devices[device] = array.device
        return device

    def _refuse_tracers(self) -> None:
        """Raise where PyTorch records or replaces operations: work on raw pointers would be missing from the record,
        and new tensors have no memory."""
        torch = self._torch
        tracer = "torch.jit.trace" if torch._C._get_tracing_state() is not None else None
        if torch._C._len_torch_dispatch_stack():
            for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
                if getattr(mode, "_mode_key", None) is not None:  # PyTorch's own: fake tensors, make_fx, functionalize
                    tracer = type(mode).__qualname__
        if tracer is not None:
            raise DTypeError(f"detkern's work cannot be traced, and {tracer} is tracing; call detkern outside of it")

    def execution(self, device: Device) -> Execution:
        self._refuse_tracers()
        kind, index = device.kind, device.index
        if kind == "cpu":
            stream = 0
        elif kind in ("cuda", "rocm"):
            raw = self._raw_stream
            stream = raw(index) if raw is not None else self._torch.cuda.current_stream(index).cuda_stream
        elif kind == "musa":
            stream = self._torch.musa.current_stream(index).musa_stream
        else:
            stream = self._torch.npu.current_stream(index).npu_stream
        execution = self._executions.get((device, stream))
        if execution is None:
            place = self._torch_devices[device]

            def allocate(size: int) -> TensorView:
                memory = self._torch.empty(size, dtype=self._torch.uint8, device=place)
                return TensorView(memory.data_ptr(), (size,), (1,), E4M3, device, False, memory)

            execution = Execution(device, stream, allocate)
            if len(self._executions) > 256:
                self._executions.clear()
            self._executions[device, stream] = execution
        return execution

    def empty(
        self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, execution: Execution
    ) -> TensorView:
        array = self._torch.empty(shape, dtype=self._torch_types[dtype], device=self._torch_devices[execution.device])
        try:
            pointer = array.data_ptr()
        except RuntimeError as error:  # torch.func wraps even tensors that are new
            raise DTypeError(
                f"the result would have no memory of its own inside torch.func: {error}; call detkern outside of the "
                "transform"
            ) from None
        return TensorView(pointer, shape, strides, dtype, execution.device, False, array)

    def wrote(self, array: Any) -> None:
        # Autograd must learn that a tensor which it may have saved has changed. Inference tensors have no version.
        if not array.is_inference():
            self._torch.autograd.graph.increment_version(array)

    def join(self, array: Any, execution: Execution) -> None:
        from .streams import order

        own = self.execution(execution.device).stream
        order(execution.device, own, execution.stream)

    def release(self, array: Any, view: TensorView, execution: Execution, written: bool) -> None:
        from .streams import order

        own = self.execution(execution.device).stream
        order(execution.device, execution.stream, own)

    def cast(self, argument: str, dtype: DType) -> str:
        return f"{argument}.to(torch.{dtype.name})"
