"""Any array in, a `TensorView` out; new arrays in the caller's framework, on the caller's stream, from its allocator.

What the adapters hold to:
- a framework is touched only where the caller has imported it (sys.modules); CuPy alone is imported by us, and only
  when a CUDA array of a framework without an allocator of its own has to be served;
- memory is read where it lies. A copy is made only where no element stride describes the array, and `explain` says so;
- an array whose memory is not what the caller sees (lazy, traced, quantized, sparse, byte-swapped, masked) is refused
  with what would work, never read wrongly;
- work is ordered after the producers of all operands and before the next reader of the result, on streams, without
  synchronising a device.
"""

from .adapter import Adapter
from .lookup import adapter_for
from .types import dtype_argument
from .view import Device, TensorView, contiguous_strides, describe, device_of

__all__ = [
    "Adapter", "Device", "TensorView", "adapter_for", "contiguous_strides", "describe", "device_of", "dtype_argument",
]  # fmt: skip
