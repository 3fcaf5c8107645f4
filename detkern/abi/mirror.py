"""abi.h in ctypes, field by field in the same order; test_abi.py holds every offset to what a C compiler says."""

from __future__ import annotations

from ctypes import Structure, c_char, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p, sizeof
from typing import TypeVar

__all__ = [
    "ABI_VERSION",
    "MAX_BATCH_RANK",
    "MAX_SUM_RANK",
    "STATUS_NAMES",
    "TO_DEVICE",
    "TO_HOST",
    "BlockScaledDescriptor",
    "Capabilities",
    "ColumnSumDescriptor",
    "Device",
    "GemmDescriptor",
    "LogpDescriptor",
    "Offer",
    "RowDescriptor",
    "described",
]

ABI_VERSION = 3
MAX_BATCH_RANK = 8
MAX_SUM_RANK = 62

OK = 0
INVALID = 1
UNSUPPORTED = 2
OUT_OF_MEMORY = 3
DEVICE_FAULT = 4
STATUS_NAMES = {
    OK: "ok",
    INVALID: "invalid descriptor",
    UNSUPPORTED: "unsupported",
    OUT_OF_MEMORY: "out of memory",
    DEVICE_FAULT: "device fault",
}

TO_DEVICE = 1
TO_HOST = 2

_Batch = c_int64 * MAX_BATCH_RANK
_SumBatch = c_int64 * MAX_SUM_RANK


class Capabilities(Structure):
    """detkern_capabilities."""

    _fields_ = (
        ("size", c_uint64),
        ("abi_version", c_int32),
        ("host_memory", c_int32),
        ("name", c_char * 64),
    )


class Offer(Structure):
    """detkern_offer."""

    _fields_ = (
        ("operation", c_uint32),
        ("variant", c_uint32),
        ("dtypes", c_uint64),
    )


class Device(Structure):
    """detkern_device."""

    _fields_ = (
        ("size", c_uint64),
        ("index", c_int32),
        ("units", c_int32),
        ("name", c_char * 128),
        ("driver", c_char * 64),
    )


class GemmDescriptor(Structure):
    """detkern_gemm_descriptor."""

    _fields_ = (
        ("size", c_uint64),
        ("contract", c_int32),
        ("operand_dtype", c_int32),
        ("out_dtype", c_int32),
        ("bias_dtype", c_int32),
        ("accumulate", c_int32),
        ("batch_rank", c_int32),
        ("device", c_int32),
        ("threads", c_int32),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("batch_shape", _Batch),
        ("a_batch_strides", _Batch),
        ("b_batch_strides", _Batch),
        ("out_batch_strides", _Batch),
        ("a_row_stride", c_int64),
        ("a_col_stride", c_int64),
        ("b_row_stride", c_int64),
        ("b_col_stride", c_int64),
        ("out_row_stride", c_int64),
        ("out_col_stride", c_int64),
        ("bias_stride", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("out", c_void_p),
        ("bias", c_void_p),
        ("stream", c_void_p),
        ("scratch", c_void_p),
        ("scratch_bytes", c_uint64),
    )


class BlockScaledDescriptor(Structure):
    """detkern_block_scaled_descriptor."""

    _fields_ = (
        ("size", c_uint64),
        ("a_dtype", c_int32),
        ("b_dtype", c_int32),
        ("out_dtype", c_int32),
        ("accumulate", c_int32),
        ("device", c_int32),
        ("threads", c_int32),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("a_row_stride", c_int64),
        ("a_col_stride", c_int64),
        ("scale_a_row_stride", c_int64),
        ("scale_a_col_stride", c_int64),
        ("b_row_stride", c_int64),
        ("b_col_stride", c_int64),
        ("scale_b_row_stride", c_int64),
        ("scale_b_col_stride", c_int64),
        ("out_row_stride", c_int64),
        ("out_col_stride", c_int64),
        ("a", c_void_p),
        ("scale_a", c_void_p),
        ("b", c_void_p),
        ("scale_b", c_void_p),
        ("out", c_void_p),
        ("stream", c_void_p),
    )


class ColumnSumDescriptor(Structure):
    """detkern_column_sum_descriptor."""

    _fields_ = (
        ("size", c_uint64),
        ("operand_dtype", c_int32),
        ("out_dtype", c_int32),
        ("accumulate", c_int32),
        ("batch_rank", c_int32),
        ("device", c_int32),
        ("threads", c_int32),
        ("m", c_int64),
        ("n", c_int64),
        ("batch_shape", _SumBatch),
        ("batch_strides", _SumBatch),
        ("row_stride", c_int64),
        ("col_stride", c_int64),
        ("out_stride", c_int64),
        ("dc", c_void_p),
        ("out", c_void_p),
        ("stream", c_void_p),
    )


class RowDescriptor(Structure):
    """detkern_row_descriptor."""

    _fields_ = (
        ("size", c_uint64),
        ("kind", c_int32),
        ("a_dtype", c_int32),
        ("b_dtype", c_int32),
        ("out_dtype", c_int32),
        ("batch_rank", c_int32),
        ("device", c_int32),
        ("threads", c_int32),
        ("unused", c_int32),
        ("m", c_int64),
        ("n", c_int64),
        ("batch_shape", _SumBatch),
        ("a_batch_strides", _SumBatch),
        ("b_batch_strides", _SumBatch),
        ("out_batch_strides", _SumBatch),
        ("a_row_stride", c_int64),
        ("a_col_stride", c_int64),
        ("b_row_stride", c_int64),
        ("b_col_stride", c_int64),
        ("out_row_stride", c_int64),
        ("out_col_stride", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("out", c_void_p),
        ("stream", c_void_p),
    )


class LogpDescriptor(Structure):
    """detkern_logp_descriptor."""

    _fields_ = (
        ("size", c_uint64),
        ("contract", c_int32),
        ("operand_dtype", c_int32),
        ("out_dtype", c_int32),
        ("bias_dtype", c_int32),
        ("target_size", c_int32),
        ("targets", c_int32),
        ("entropy", c_int32),
        ("dense", c_int32),
        ("device", c_int32),
        ("threads", c_int32),
        ("tau", c_float),
        ("cap", c_float),
        ("inverse", c_float),
        ("unused", c_int32),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("vocabulary", c_int64),
        ("start", c_int64),
        ("ignore_index", c_int64),
        ("hidden_row_stride", c_int64),
        ("hidden_col_stride", c_int64),
        ("weight_row_stride", c_int64),
        ("weight_col_stride", c_int64),
        ("target_row_stride", c_int64),
        ("target_col_stride", c_int64),
        ("state_line_stride", c_int64),
        ("state_row_stride", c_int64),
        ("grads_line_stride", c_int64),
        ("grads_row_stride", c_int64),
        ("out_row_stride", c_int64),
        ("out_col_stride", c_int64),
        ("bias_stride", c_int64),
        ("hidden", c_void_p),
        ("weight", c_void_p),
        ("target", c_void_p),
        ("bias", c_void_p),
        ("grads", c_void_p),
        ("state", c_void_p),
        ("out", c_void_p),
        ("stream", c_void_p),
    )


_S = TypeVar("_S", bound=Structure)


def described(structure: type[_S]) -> _S:
    """An empty `structure` with its own size in its first field, as every descriptor crosses the ABI."""
    made = structure()
    made.size = sizeof(structure)
    return made
