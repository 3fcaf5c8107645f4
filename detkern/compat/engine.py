"""Products on raw pointers with an explicit stream: the training triad of a linear layer y = x @ w + bias.

For callers that hold memory and streams themselves (a C++ runtime behind ctypes, another framework). No framework is
imported but the backend's own runtime. Where an array stands for a pointer, its memory is checked against the sizes.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Mapping
from typing import Any

from ..dispatch import registry
from ..dispatch.backend import Execution
from ..errors import ArgumentError, BackendUnavailable, ContractUnsupported, DeviceError, DTypeError, ShapeError
from ..operations.gemm.checks import GEMM, plan_product
from ..tensors import Device, TensorView, adapter_for, contiguous_strides, describe, device_of
from ..tensors.overlap import overlapping
from ..vocabulary.arguments import flag
from ..vocabulary.contracts import CONTRACTS, FMA, default_contract
from ..vocabulary.dtypes import BF16, F16, F32, DType

__all__ = ["Engine"]

_TYPES = {dtype.name: dtype for dtype in (F32, F16, BF16)}
_ADDRESSES = 1 << 64

Sizes = tuple[int, int, int]
Wanted = tuple[tuple[int, ...], DType]


class Engine:
    """A device's products on raw pointers.

    device: an ordinal of CUDA (0), or a name: "cuda:0", "rocm:0", "musa:0", "ascend:0", "cpu" (host pointers, stream
    0).
    backend: the name of the one backend to use; None: the first of the registry that takes a call.

    Every matrix is row-major and dense: x and a are [M, K], b and w are [K, N], out and dy are [M, N]; bias is [N],
    float32; dw is [K, N], float32. `dtype` is the type of all others: "float32", "bfloat16" or "float16".

    **Sizes are (M, K, N)**: rows of x, columns of x, columns of the result. BLAS says (M, N, K), and bare
    addresses cannot tell. An array (NumPy, PyTorch, CuPy …) may stand for any pointer, and is checked: its device and
    type, that it is row-major and dense, and its size. A matrix must have as many columns as the sizes say and may have
    more rows; an array of another number of dimensions is memory, and must have as many elements. Only its address is
    used.

    tensor_cores: False is the contract `fma`; True is the device's tensor-core contract (`mma16`; `mma8` on compute
    capability 8.x), whatever the sizes. Where there is none (float32, or a device without one) the call is refused.

    Lifetime and order. A call enqueues on the stream whose handle it is given and returns; on the CPU it has computed
    when it returns. The engine owns no memory and holds none of the caller's: each pointer must stay valid, and the
    operands unchanged, until that stream has reached the end of the call's work. Memory that work on another stream
    writes has to be ordered before the call by the caller. Pointers belong to the engine's device; nothing checks that,
    nor how much memory is behind them, where they are not given as arrays. No call allocates device memory, so all can
    be captured into CUDA graphs, once the same kind of call (sizes, type, alignment) has been made outside of a
    capture, which loads its kernel. An engine may be dropped while work is in flight. It can be used from any number of
    threads at a time; calls on one stream are ordered as they are made.

    Raises:
        ArgumentError, DeviceError: `device` or `backend` is none.
        BackendUnavailable: no backend can run there; the message says what each of them answered.
    """

    def __init__(self, device: Any, *, backend: str | None = None) -> None:
        self.device = device_of(device)
        self.backend = backend
        rows = [row for row in registry.TABLE if (row.name == backend if backend is not None else row.dispatched)]
        if not rows or not rows[0].dispatched:
            known = ", ".join(registry.dispatched_names())
            raise ArgumentError(f"backend={backend!r} is not a backend that follows contracts; those are {known}")
        kind = self.device.kind
        here = [row for row in rows if (row.chosen_on(kind) if backend is None else kind in row.devices)]
        if not here:
            raise DeviceError(f"no backend works on {self.device}; asked: {', '.join(row.name for row in rows)}")
        answers = [(row.name, registry.load(row.name).unavailable(self.device)) for row in here]
        if all(reason is not None for _, reason in answers):
            said = "; ".join(f"{name}: {reason}" for name, reason in answers)
            raise BackendUnavailable(f"no backend runs on {self.device}: {said}")
        self._executions: dict[int, Execution] = {}
        self._tensor_core_contracts: dict[DType, str] = {}

    def __repr__(self) -> str:
        return f"Engine({str(self.device)!r})"

    def forward(
        self,
        pointers: tuple[Any, Any, Any, Any],
        sizes: Sizes,
        dtype: str,
        stream: int,
        tensor_cores: bool = False,
    ) -> None:
        """out[M, N] = a[M, K] @ b[K, N] (+ bias[N]).

        Args:
            pointers: (out, a, b, bias), addresses or arrays; bias is float32 or None.
            sizes: **(M, K, N)**, in this order.
            dtype: of out, a and b: "float32", "bfloat16" or "float16".
            stream: the raw handle of the stream; 0 is the default stream.
            tensor_cores: as the class says.

        Raises:
            ArgumentError, ShapeError, DTypeError, ContractUnsupported: before anything is enqueued.
            DeviceError, BuildError: as `detkern.gemm`.
        """
        given, arrays = _addresses(pointers, ("out", "a", "b", "bias"))
        m, k, n = _sizes(sizes)
        element = _dtype(dtype)
        written = None
        if arrays:
            wanted = {"out": ((m, n), element), "a": ((m, k), element), "b": ((k, n), element), "bias": ((n,), F32)}
            given, written = self._memory(given, wanted, stream)
        out, a, b, bias = given
        self._run(
            (a, (m, k), (k, 1)), (b, (k, n), (n, 1)), (out, (m, n), element), written, bias, ("a", "b", "out"), element,
            stream,
            tensor_cores, False,
        )  # fmt: skip

    def backward_dw(
        self, pointers: tuple[Any, Any, Any], sizes: Sizes, dtype: str, stream: int, tensor_cores: bool = False
    ) -> None:
        """dw[K, N] += x[M, K].T @ dy[M, N]: each element's chain over M starts at dw's value.

        So the calls for micro-batches, in order, give the bits of the whole batch, where M is cut as the contract
        allows (docs/contracts.md, "Accumulate"). Zero dw before the first.

        Args:
            pointers: (dw, dy, x); dw is float32 whatever `dtype` is.
            sizes, dtype, stream, tensor_cores: as in `forward`.

        Raises:
            As `forward`.
        """
        given, arrays = _addresses(pointers, ("dw", "dy", "x"))
        m, k, n = _sizes(sizes)
        element = _dtype(dtype)
        written = None
        if arrays:
            wanted = {"dw": ((k, n), F32), "dy": ((m, n), element), "x": ((m, k), element)}
            given, written = self._memory(given, wanted, stream)
        dw, dy, x = given
        self._run(
            (x, (k, m), (1, k)), (dy, (m, n), (n, 1)), (dw, (k, n), F32), written, 0, ("x", "dy", "dw"), element,
            stream,
            tensor_cores, True,
        )  # fmt: skip

    def backward_dx(
        self, pointers: tuple[Any, Any, Any], sizes: Sizes, dtype: str, stream: int, tensor_cores: bool = False
    ) -> None:
        """dx[M, K] = dy[M, N] @ w[K, N].T.

        Args:
            pointers: (dx, dy, w).
            sizes, dtype, stream, tensor_cores: as in `forward`.

        Raises:
            As `forward`.
        """
        given, arrays = _addresses(pointers, ("dx", "dy", "w"))
        m, k, n = _sizes(sizes)
        element = _dtype(dtype)
        written = None
        if arrays:
            wanted = {"dx": ((m, k), element), "dy": ((m, n), element), "w": ((k, n), element)}
            given, written = self._memory(given, wanted, stream)
        dx, dy, w = given
        self._run(
            (dy, (m, n), (n, 1)), (w, (n, k), (1, n)), (dx, (m, k), element), written, 0, ("dy", "w", "dx"), element,
            stream,
            tensor_cores, False,
        )  # fmt: skip

    def presize_upcast_scratch(self, a_elements: int = 0, b_elements: int = 0, c_elements: int = 0) -> None:
        """Accepted, and nothing to do: 16-bit operands are widened in registers, no call takes scratch memory."""

    def synchronize(self) -> None:
        """Wait until all work on the device has finished. Raises DeviceError where the device reports a fault."""
        kind, index = self.device.kind, self.device.index
        if kind == "cpu":
            return
        framework = next((row.framework for row in registry.TABLE if row.name == kind), None)
        if framework is not None and (missing := framework.missing()):
            raise BackendUnavailable(f"nothing here can wait for {self.device}: {missing}")
        try:
            if kind == "cuda" and registry.load("cuda").unavailable(self.device) is None:
                cuda = importlib.import_module("cupy").cuda
                with cuda.Device(index):
                    cuda.runtime.deviceSynchronize()
            else:
                torch = importlib.import_module("torch")
                if framework is not None:
                    importlib.import_module(framework.module)  # it adds its runtime to PyTorch
                runtime = {"musa": "musa", "ascend": "npu"}.get(kind, "cuda")
                getattr(torch, runtime).synchronize(index)
        except (ImportError, AttributeError) as error:
            raise BackendUnavailable(f"nothing here can wait for {self.device}: {error}") from error
        except RuntimeError as error:
            raise DeviceError(f"{self.device} reported {error}") from error

    def _memory(self, given: tuple[Any, ...], wanted: Mapping[str, Wanted], stream: int) -> tuple[tuple[int, ...], Any]:
        """The addresses, those of arrays once they are checked, and the first, which is written,
        where it is an array."""
        addresses = []
        for index, ((name, (shape, dtype)), value) in enumerate(zip(wanted.items(), given, strict=True)):
            if isinstance(value, int):
                addresses.append(value)
            else:
                addresses.append(_checked(value, name, shape, dtype, self.device, stream, written=not index))
        return tuple(addresses), None if isinstance(given[0], int) else given[0]

    def _run(
        self,
        left: tuple[int, tuple[int, int], tuple[int, int]],
        right: tuple[int, tuple[int, int], tuple[int, int]],
        result: tuple[int, tuple[int, int], DType],
        written: Any,
        bias: int,
        names: tuple[str, str, str],
        dtype: DType,
        stream: int,
        tensor_cores: bool,
        accumulate: bool,
    ) -> None:
        device = self.device
        out_pointer, (m, n), out_dtype = result
        a = TensorView(left[0], left[1], left[2], dtype, device)
        b = TensorView(right[0], right[1], right[2], dtype, device)
        out = TensorView(out_pointer, (m, n), (n, 1), out_dtype, device)
        column = TensorView(bias, (n,), (1,), F32, device) if bias else None
        flag(tensor_cores, "tensor_cores")
        _check(zip((*names, "bias"), (a, b, out, column), strict=True), out, names[2])
        execution = self._execution(stream)
        plan, rows, _ = plan_product(
            GEMM, a, b, False, False, column, out, None, accumulate, self._contract(dtype, tensor_cores), self.backend
        )
        if 0 not in (m, n):
            plan.run(rows, (a, b, column), out, execution)
            if written is not None:
                adapter_for(written, names[2]).wrote(written)

    def _contract(self, dtype: DType, tensor_cores: bool) -> str:
        """The name of the contract: of tensor cores, what this device's have."""
        if not tensor_cores:
            return FMA.name
        name = self._tensor_core_contracts.get(dtype)
        if name is not None:
            return name
        capability = None
        for row in registry.TABLE:
            if row.chosen_on(self.device.kind) and capability is None:
                capability = registry.load(row.name).capability(self.device)
        # Another device has none of them for its default.
        contract = default_contract(dtype, self.device.kind, capability)
        if contract.step is None:
            elsewhere = ", ".join(c.name for c in CONTRACTS.values() if c.step is not None and dtype in c.operands)
            lacks = f"no tensor-core contract takes {dtype}"
            if elsewhere:
                lacks = f"{self.device} has no tensor-core contract for {dtype}, others have {elsewhere}"
            raise ContractUnsupported(f"tensor_cores=True: {lacks}; tensor_cores=False computes fma")
        self._tensor_core_contracts[dtype] = contract.name
        return contract.name

    def _execution(self, stream: int) -> Execution:
        handle = _integer(stream, "stream")
        if handle and self.device.kind == "cpu":
            raise ArgumentError(f"stream={stream!r}: the CPU has no streams; give 0")
        execution = self._executions.get(handle)
        if execution is None:
            if len(self._executions) >= 256:
                self._executions.clear()
            execution = self._executions[handle] = Execution(self.device, handle, _no_scratch)
        return execution


def _no_scratch(size: int) -> TensorView:
    raise AssertionError("the engine's contracts take no scratch memory")


def _integer(value: Any, argument: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < _ADDRESSES or isinstance(value, bool):  # ctypes would drop the bits beyond
        raise ArgumentError(f"{argument}={value!r} must be a whole number, zero or more and below 2^64")
    return number


def _addresses(pointers: Any, names: tuple[str, ...]) -> tuple[tuple[Any, ...], bool]:
    """The addresses, each an int or an array that stands for one, and whether there are arrays."""
    try:
        given = tuple(pointers)
    except TypeError:
        given = ()
    if len(given) != len(names):
        raise ArgumentError(f"pointers={pointers!r} must be the addresses ({', '.join(names)})")
    addresses: list[Any] = []
    arrays = False
    for value, name in zip(given, names, strict=True):
        if type(value) is not int and _is_array(value, name):
            arrays = True
            addresses.append(value)
        else:
            addresses.append(0 if value is None and name == "bias" else _integer(value, name))
    return tuple(addresses), arrays


def _is_array(value: Any, name: str) -> bool:
    if hasattr(value, "__index__") and not getattr(value, "ndim", None):
        return False  # a whole number, also one of NumPy's or a tensor's
    try:
        adapter_for(value, name)
    except DTypeError:
        return False
    return True


def _checked(
    array: Any, name: str, shape: tuple[int, ...], dtype: DType, device: Device, stream: int, *, written: bool
) -> int:
    """The address of an array that holds a row-major matrix or a vector of this shape and type on `device`; typed
    errors where it does not."""
    adapter = adapter_for(array, name)
    copies: list[str] = []
    found = adapter.out_view(array, name, stream) if written else adapter.view(array, name, stream, copies)
    if found.device != device:
        raise DeviceError(f"{name} is on {found.device}, the engine on {device}")
    if found.dtype != dtype:
        raise DTypeError(f"{name} is {describe(found)}, and must be {dtype}")
    if written and found.readonly:
        raise ArgumentError(f"{name} is read-only")
    steps = zip(found.shape, found.strides, contiguous_strides(found.shape), strict=True)
    if copies or (0 not in found.shape and any(size > 1 and step != dense for size, step, dense in steps)):
        raise ArgumentError(f"{name} is not row-major and dense; give a contiguous copy")
    matrix = len(found.shape) == len(shape) == 2
    if matrix and (found.shape[1] != shape[1] or found.shape[0] < shape[0]):
        raise ShapeError(f"{name} is {describe(found)}, and sizes (M, K, N) ask for {list(shape)}")
    if math.prod(found.shape) < math.prod(shape):
        raise ShapeError(f"{name} is {describe(found)}, fewer elements than sizes (M, K, N) ask for: {list(shape)}")
    return found.pointer


def _sizes(sizes: Any) -> Sizes:
    try:
        m, k, n = (operator.index(size) for size in sizes)
    except (TypeError, ValueError):
        raise ShapeError(f"sizes={sizes!r} must be three whole numbers (M, K, N)") from None
    if min(m, k, n) < 0:
        raise ShapeError(f"sizes={sizes!r}: none of (M, K, N) may be negative")
    if max(m * k, k * n, m * n) >= 1 << 60:
        raise ShapeError(f"sizes={sizes!r}: a matrix would go beyond the address space")
    return m, k, n


def _dtype(name: Any) -> DType:
    dtype = _TYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise DTypeError(f"dtype={name!r} is none of {', '.join(_TYPES)}")
    return dtype


def _check(views: Any, out: TensorView, out_name: str) -> None:
    """ArgumentError for a null pointer to elements, one that no element can be at, or an output that is read too.
    Nothing is read where the output is empty."""
    if 0 in out.shape:
        return
    for name, view in views:
        if view is None or 0 in view.shape:
            continue
        if view.pointer == 0:
            raise ArgumentError(f"{name} is a null pointer; it has shape {list(view.shape)}")
        if view.pointer % view.dtype.itemsize:
            raise ArgumentError(
                f"{name}={view.pointer:#x} is not an address of {view.dtype}; it must be a multiple of its size"
            )
        # No matrix takes more than 2^62 bytes, so most addresses need no product.
        if view.pointer >> 62 and view.pointer + math.prod(view.shape) * view.dtype.itemsize > _ADDRESSES:
            raise ArgumentError(
                f"{name}={view.pointer:#x}: {list(view.shape)} of {view.dtype} go beyond the address space"
            )
        if view is not out and overlapping(out, view):
            raise ArgumentError(f"{out_name} shares memory with {name}, which is read while {out_name} is written")
