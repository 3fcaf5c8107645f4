"""JAX arrays. They are immutable: never an `out`. A result on the CPU is new host memory that JAX adopts without a
copy; on CUDA it is a new JAX array, written before JAX sees it again through DLPack.

On CUDA the work goes to one stream a device, of those that JAX keeps for external producers (asked again, JAX may name
another of them): `__dlpack__` makes it wait for the operands, and the stream on which JAX imports the result waits for
it, as every reader of the result then does. JAX's allocator does not know that stream, so the operands and the memory
of the result are held until the work has finished. Scratch memory comes from CuPy's pool.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any

import numpy as np

from ..errors import ArgumentError, DeviceError, DTypeError
from ..vocabulary.dtypes import DTYPES, INDICES, DType
from .adapter import Adapter
from .cupy import external_execution
from .dlpack import Exported, device_of, read
from .execution import Execution
from .numpy import CPU, host_memory, scratch
from .streams import keep, order
from .types import refuse_type
from .view import Device, TensorView

__all__ = ["jax_adapter"]

_TYPES = {dtype.numpy: dtype for dtype in (*DTYPES, *INDICES)}


class _After:
    """A JAX array to import: the importer's stream waits for the work on an execution's as well as for the array."""

    def __init__(self, array: Any, execution: Execution) -> None:
        self._array = array
        self._execution = execution

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        # DLPack's 1 (and None) is the legacy default stream, CUDA's 0.
        order(self._execution.device, self._execution.stream, 0 if stream in (None, 1) else stream)
        return self._array.__dlpack__(stream=stream, **options)


@cache
def jax_adapter() -> Adapter:
    """The adapter over the JAX that the caller has imported."""
    return _Jax(sys.modules["jax"])


class _Jax(Adapter):
    name = "jax"
    stream_ordered = False

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._from_dlpack = importlib.import_module("jax.dlpack").from_dlpack
        self._tracer = jax.core.Tracer
        self._cpu = Execution(CPU, 0, scratch)
        self._jax_devices: dict[Device, Any] = {}
        self._executions: dict[Device, Execution] = {}

    def view(
        self, array: Any, argument: str, stream: int | None = None, planned_copies: list[str] | None = None
    ) -> TensorView:
        if isinstance(array, self._tracer):
            raise DTypeError(
                f"{argument} is a JAX tracer, which has no data: call detkern outside of jax.jit, jax.grad and jax.vmap"
            )
        if array.dtype not in _TYPES:
            raise refuse_type(argument, str(array.dtype), f"{argument}.astype(jnp.float32)")
        if array.is_deleted():
            raise ArgumentError(f"{argument} has been deleted or donated; give an array that still has its buffer")
        holders = array.devices()
        if len(holders) != 1:
            raise DeviceError(
                f"{argument} is spread over {len(holders)} devices; give one shard, as in "
                f"{argument}.addressable_data(0)"
            )
        (holder,) = holders
        if holder.platform == "cpu":
            array.block_until_ready()
            imported = read(array, argument, f"{argument}.astype(jnp.float32)")
        else:
            device = device_of(array, argument)
            self._jax_devices.setdefault(device, holder)
            handle = self.execution(device).stream if stream is None else stream
            # 0 is ambiguous in DLPack; 1 is the legacy default stream that CUDA means by it.
            imported = read(array, argument, f"{argument}.astype(jnp.float32)", stream=handle or 1)
        pointer, shape, strides, dtype, device, _, _, owner = imported
        return TensorView(pointer, shape, strides, dtype, device, True, (array, owner))

    def out_view(self, array: Any, argument: str, stream: int | None = None) -> TensorView:
        raise ArgumentError(
            f"{argument} is a JAX array, which is immutable; leave {argument} away and take the result "
            "(accumulate=True needs an array that can be written, of NumPy, CuPy or PyTorch)"
        )

    def execution(self, device: Device) -> Execution:
        if device.kind == "cpu":
            return self._cpu
        execution = self._executions.get(device)
        if execution is None:
            stream = self._jax_devices[device].get_stream_for_external_ready_events()
            execution = self._executions.setdefault(device, external_execution(device, stream))
        return execution

    def empty(
        self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, execution: Execution
    ) -> TensorView:
        device = execution.device
        if device.kind == "cpu":
            # JAX adopts memory without a copy only where 64 divides the address.
            array = (
                host_memory(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 64).view(dtype.bits).reshape(shape)
            )
            return TensorView(array.ctypes.data, shape, strides, dtype, device, False, array)
        if 0 in shape:
            return TensorView(0, shape, strides, dtype, device)
        array = self._jax.numpy.empty(shape, dtype.numpy, device=self._jax_devices[device])
        imported = read(array, "the result", "", stream=execution.stream or 1)
        return TensorView(imported.pointer, shape, strides, dtype, device, False, (array, imported.owner))

    def result(self, like: Any, view: TensorView, execution: Execution) -> Any:
        (holder,) = like.devices()
        if 0 in view.shape:
            return self._jax.device_put(np.empty(view.shape, view.dtype.numpy), holder)
        if execution.device.kind == "cpu":
            array = self._from_dlpack(Exported(view.array, view.dtype, view.array.__dlpack__))
            # JAX may divide a host into several devices and takes DLPack memory as the first one's.
            return array if array.devices() == {holder} else self._jax.device_put(array, holder)
        # Imported anew, because only an array that comes from outside waits for the stream of the work.
        keep(execution.device, execution.stream, view.array)
        return self._from_dlpack(_After(view.array[0], execution))

    def release(self, array: Any, view: TensorView, execution: Execution, written: bool) -> None:
        keep(execution.device, execution.stream, view.array)

    def cast(self, argument: str, dtype: DType) -> str:
        return f"{argument}.astype(jnp.{dtype.name})"
