"""The public calls: check arguments, plan, run, and hand back the caller's own array type.

All of them take arrays of NumPy (with ml_dtypes), PyTorch, JAX, CuPy, and anything with `__dlpack__` or
`__cuda_array_interface__`. The result is of the framework of the first operand, on its device, ordered on the caller's
current stream. docs/contracts.md says what each bit of it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .dispatch import registry
from .dispatch.call import Call, rehearse
from .dispatch.plan import Planned
from .errors import ArgumentError
from .operations.bias_gradient.checks import plan_column_sum
from .operations.block_scaled.checks import plan_block_scaled
from .operations.gemm.checks import GEMM, LINEAR, Names, plan_product
from .tensors import dtype_argument
from .vocabulary.arguments import flag
from .vocabulary.contracts import get_contract
from .vocabulary.dtypes import DType

__all__ = ["Explanation", "bias_gradient", "block_scaled_gemm", "explain", "gemm", "gemm_da", "gemm_db", "linear"]

_DA = Names("gemm_da", "dc", "b")
_DB = Names("gemm_db", "a", "dc")
_DB_TRANSPOSED = Names("gemm_db", "dc", "a")


@dataclass(frozen=True)
class Explanation:
    """What a call would run; `str()` of it is for people.

    backend:       the name of the backend.
    contract:      the name of the contract, of another operation than a product its own name, or "none" for
                   backend="native".
    kernel, tile, geometry: the kernel, the tile that it computes at once, and the grid and threads that it starts.
    scratch_bytes: scratch memory that it would take from the caller's allocator.
    copies:        one sentence for each operand that would be copied first.
    passed_over:   (name, reason) of every other backend for this kind of device.
    """

    backend: str
    contract: str
    kernel: str
    tile: str
    geometry: str
    scratch_bytes: int
    copies: tuple[str, ...]
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [
            f"backend   {self.backend}",
            f"contract  {self.contract}",
            f"kernel    {self.kernel}",
            f"tile      {self.tile}",
            f"geometry  {self.geometry}",
            f"scratch   {self.scratch_bytes} bytes",
            *(f"copy      {sentence}" for sentence in self.copies or ("none",)),
            *(f"not       {name}: {reason}" for name, reason in self.passed_over),
        ]
        return "\n".join(lines)


def gemm(
    a: Any,
    b: Any,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
) -> Any:
    """The matrix product a @ b, each element computed by a contract.

    Args:
        a: [.., M, K], or [K]. float32, float16 or bfloat16; any strides.
        b: [.., K, N], or [K]. Of a's type and on a's device; it may be of another framework. Batch dimensions
            broadcast, and one-dimensional operands are read, as in numpy.matmul; a product of two vectors has no
            dimensions.
        trans_a, trans_b: swap the last two dimensions of the operand first: a is [.., K, M], b is [.., N, K].
        bias: [N], float32, float16 or bfloat16, added in binary32 before the last rounding.
        out: where the result goes: an array of the result's shape and of any of the three types, on a's device. It may
            be strided; it may not be read-only, immutable (JAX), overlap itself, or share memory with an operand.
        out_dtype: the result's type where `out` is None, as a name ("float32", "f32") or a dtype of NumPy, ml_dtypes,
            PyTorch or JAX. Default: the operands' type.
        accumulate: start each element's chain at out's value (a tree adds its root to it). Needs a float32 `out`.
        contract: the name of the contract. Default: `detkern.config.contract`, else `mma16` or what the device has for
            16-bit operands and `fma` for float32.
        backend: the name of the one backend to use. "native" is the framework's own matmul, for comparison.

    Returns:
        `out`, or a new row-major array [.., M, N] of a's framework. Empty M or N gives an empty result; K = 0 gives +0
        (or out + 0), plus bias.

    Raises:
        ShapeError, DTypeError, ArgumentError, DeviceError: arguments that do not fit; `out` is untouched.
        ContractUnsupported: no backend computes this contract here, or it does not take the operands' type.
        BackendUnavailable: the backend named cannot run here.
        BuildError: a kernel could not be built.
    """
    return _product(GEMM, a, b, trans_a, trans_b, bias, out, out_dtype, accumulate, contract, backend)


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    out: Any = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
) -> Any:
    """The linear layer x @ weight.T + bias.

    Args:
        x: [.., K], or [K].
        weight: [N, K], of x's type.
        bias: [N].
        out, out_dtype, accumulate, contract, backend: as in `gemm`.

    Returns:
        [.., N], of x's framework.

    Raises:
        As `gemm`.
    """
    return _product(LINEAR, x, weight, False, True, bias, out, out_dtype, accumulate, contract, backend)


def gemm_da(
    dc: Any,
    b: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
) -> Any:
    """The gradient of a in c = a @ b: dc @ b.T, one chain over N for each element.

    Args:
        dc: [.., M, N].
        b: [.., K, N], of dc's type; batch dimensions broadcast.
        out, out_dtype, accumulate, contract, backend: as in `gemm`.

    Returns:
        [.., M, K], of dc's framework.

    Raises:
        As `gemm`.
    """
    return _product(_DA, dc, b, False, True, None, out, out_dtype, accumulate, contract, backend)


def gemm_db(
    a: Any,
    dc: Any,
    *,
    transposed: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
) -> Any:
    """The gradient of b in c = a @ b: a.T @ dc, one chain over M for each element.

    Accumulating pieces of M into one float32 `out` gives the bits of the whole, where the contract says so.

    Args:
        a: [.., M, K].
        dc: [.., M, N], of a's type; batch dimensions broadcast, and none is summed.
        transposed: give the gradient of b.T instead, row-major: that of a weight [N, K].
        out, out_dtype, accumulate, contract, backend: as in `gemm`.

    Returns:
        [.., K, N], or [.., N, K] where `transposed`, of a's framework.

    Raises:
        As `gemm`.
    """
    if flag(transposed, "transposed"):
        return _product(
            _DB_TRANSPOSED, dc, a, True, False, None, out, out_dtype, accumulate, contract, backend, leader=1
        )
    return _product(_DB, a, dc, True, False, None, out, out_dtype, accumulate, contract, backend)


def bias_gradient(
    dc: Any, *, out: Any = None, out_dtype: Any = None, accumulate: bool = False, backend: str | None = None
) -> Any:
    """The gradient of bias in c = a @ b + bias: the sum of dc's rows, for each column one ascending chain of binary32
    additions.

    Accumulating pieces of the rows into one float32 `out` gives the bits of the whole, wherever it is cut. The contract
    of a product has no part in it: the chain is the same whatever computes c.

    Args:
        dc: [.., M, N], or [N], which is one row. float32, float16 or bfloat16; any strides. The rows are those of all
            leading dimensions, in row-major order.
        out: [N], as in `gemm`.
        out_dtype: as in `gemm`; default dc's type.
        accumulate: start each column's chain at out's value instead of +0. Needs a float32 `out`.
        backend: as in `gemm`; "native" has no such op.

    Returns:
        `out`, or a new array [N] of dc's framework. No rows give +0 (or out + 0); no columns an empty result.

    Raises:
        As `gemm`.
    """
    call = Call(((dc, "dc"),), out)
    (view,) = call.views
    return call.complete(
        plan_column_sum(
            view, call.out, _result_dtype(out_dtype), flag(accumulate, "accumulate"), _backend_name(backend)
        )
    )


def explain(a: Any, b: Any, *operands: Any, **settings: Any) -> Explanation:
    """What `gemm` would do with the same arguments: it runs nothing, copies nothing and raises what `gemm` would
    raise.

    Where `a` is a function of detkern's, such as `detkern.rows.softmax`, what that would do with the arguments that
    follow.
    """
    from .operations.table import operation_of  # where it is asked: no call needs it

    function = a if callable(a) and not hasattr(a, "__dlpack__") else None
    given = (b, *operands) if function is not None else (a, b, *operands)
    (plan, m, shape), copies = rehearse(function or gemm, *given, **settings)
    problem = plan.problem.with_rows(m)
    kernel = plan.implementation.explain(problem)
    variant, _ = operation_of(problem.operation).variant_of(problem)
    named = settings.get("backend") is not None
    return Explanation(
        backend=plan.backend.name,
        contract=variant if plan.backend.deterministic else "none",
        kernel=kernel.name,
        tile=kernel.tile,
        geometry="nothing is launched: the result is empty" if 0 in shape else kernel.geometry,
        scratch_bytes=kernel.scratch_bytes,
        copies=tuple(copies),
        passed_over=tuple(registry.passed_over(problem, plan.backend.name, named=named)),
    )


def block_scaled_gemm(
    a: Any,
    scale_a: Any,
    b: Any,
    scale_b: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    accumulate: bool = False,
    backend: str | None = None,
) -> Any:
    """The product of FP8 operands with one scale per 128 k, by the contract `fp8-block128`.

    Args:
        a: [M, K], float8_e4m3fn or float8_e5m2, K a multiple of 128.
        scale_a: [M, K/128], float32.
        b: [K, N], float8_e4m3fn or float8_e5m2; it may differ from a's type.
        scale_b: [K/128, N], float32. Scales that are constant over rows or columns may be broadcast (stride 0).
        out: [M, N], as in `gemm`.
        out_dtype: as in `gemm`; default float32.
        accumulate: as in `gemm`: start at out's value (float32).
        backend: as in `gemm`.

    Returns:
        `out`, or a new row-major array [M, N] of a's framework.

    Raises:
        As `gemm`.
    """
    call = Call(((a, "a"), (scale_a, "scale_a"), (b, "b"), (scale_b, "scale_b")), out)
    left, left_scale, right, right_scale = call.views
    planned = plan_block_scaled(
        left,
        left_scale,
        right,
        right_scale,
        call.out,
        _result_dtype(out_dtype),
        flag(accumulate, "accumulate"),
        _backend_name(backend),
    )
    return call.complete(planned)


def _product(
    names: Names,
    left: Any,
    right: Any,
    trans_left: bool,
    trans_right: bool,
    bias: Any,
    out: Any,
    out_dtype: Any,
    accumulate: bool,
    contract: str | None,
    backend: str | None,
    leader: int = 0,
) -> Any:
    """Every call that is one GemmProblem. `leader` is the index of the operand whose framework the result has."""
    call = Call(((left, names.left), (right, names.right), (bias, "bias")), out, leader)
    return call.complete(_plan(names, call, trans_left, trans_right, out_dtype, accumulate, contract, backend))


def _plan(
    names: Names,
    call: Call,
    trans_left: bool,
    trans_right: bool,
    out_dtype: Any,
    accumulate: bool,
    contract: str | None,
    backend: str | None,
) -> Planned:
    left, right, bias = call.views
    if contract is not None and type(contract) is not str:
        get_contract(contract)
    return plan_product(
        names,
        left,
        right,
        flag(trans_left, "trans_" + names.left),
        flag(trans_right, "trans_" + names.right),
        bias,
        call.out,
        _result_dtype(out_dtype),
        flag(accumulate, "accumulate"),
        contract,
        _backend_name(backend),
    )


def _result_dtype(value: Any) -> DType | None:
    return None if value is None else dtype_argument(value)


def _backend_name(value: Any) -> str | None:
    if value is None or type(value) is str:
        return value
    raise ArgumentError(
        f"backend={value!r} must be a backend's name or None; the names are {', '.join(registry.backend_names())}"
    )
