"""`detkern replay`: recompute a result from files on the CPU and compare it bit for bit with what a machine gave."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import detkern

from ..api import block_scaled_gemm
from ..errors import ArgumentError, DetkernError, DTypeError
from ..operations.operation import Operation
from ..operations.table import OPERATIONS
from ..vocabulary.contracts import CONTRACTS, FP8_BLOCK128
from ..vocabulary.dtypes import BF16, F16, F32, INDICES, DType, from_numpy
from .compare import Comparison, bits, compare
from .files import Location, load
from .options import NAMES, array_file, element_type, json_option
from .output import print_json
from .subjects import OPERATION

__all__ = ["replay"]

Array = npt.NDArray[Any]
ANY = "any"


@dataclass(frozen=True)
class _Product:
    """What the files hold, and how it was multiplied.
    `bias`, `initial` and the scales are None where there are none."""

    a: Array
    b: Array
    trans_a: bool
    trans_b: bool
    bias: Array | None
    initial: Array | None
    scale_a: Array | None
    scale_b: Array | None

    def contracts(self) -> list[str]:
        """Those that take the type of A. Raises DTypeError where none does."""
        taken = [contract.name for contract in CONTRACTS.values() if from_numpy(self.a.dtype) in contract.operands]
        if not taken:
            raise DTypeError(f"--contract any: no contract takes {self.a.dtype}")
        return taken

    def compute(self, contract: str, out_dtype: DType) -> Array:
        """The result by one contract, on the CPU. An initial array is not changed."""
        out = None if self.initial is None else self.initial.copy()
        arguments: dict[str, Any] = {
            "out": out, "out_dtype": None if out is not None else out_dtype.name, "accumulate": out is not None,
            "backend": "cpu",
        }  # fmt: skip
        if contract != FP8_BLOCK128.name:
            if self.scale_a is not None or self.scale_b is not None:
                raise ArgumentError(f"--scale-a and --scale-b belong to fp8-block128, not to {contract}")
            arguments |= {"trans_a": self.trans_a, "trans_b": self.trans_b, "bias": self.bias, "contract": contract}
            return np.asarray(detkern.gemm(self.a, self.b, **arguments))
        if self.scale_a is None or self.scale_b is None:
            raise ArgumentError("fp8-block128 needs the scales too: --scale-a FILE and --scale-b FILE")
        if self.bias is not None:
            raise ArgumentError("fp8-block128 takes no --bias")
        a, b = self.a.T if self.trans_a else self.a, self.b.T if self.trans_b else self.b
        return np.asarray(block_scaled_gemm(a, self.scale_a, b, self.scale_b, **arguments))


@dataclass(frozen=True)
class _Call:
    """An operation other than a product, and its operands in the order of its public function."""

    operation: Operation[Any]
    variant: str
    operands: tuple[Array, ...]
    initial: Array | None
    shape: tuple[int, ...]

    def compute(self, variant: str, out_dtype: DType) -> Array:
        """The result on the CPU. An initial array is not changed."""
        call = self.operation.call(variant)
        optional = call.operands[-1] == "bias"
        left_out = len(call.operands) - len(self.operands)
        if left_out != 0 and not (left_out == 1 and optional):
            *names, last = call.operands
            listed = ", ".join(names) + f" and {last}" if names else last
            raise ArgumentError(
                f"--operation {variant} takes a file each of {listed}"
                f"{', which may be left out' if optional else ''}; given are {len(self.operands)}"
            )
        operands = (*self.operands, *(None,) * left_out)
        arguments: dict[str, Any] = {"out_dtype": out_dtype.name}
        if self.initial is not None:
            arguments = {"out": self.initial.copy(), "accumulate": True}
        try:
            return np.asarray(call(operands, self.shape, backend="cpu", **arguments))
        except TypeError as error:
            if self.initial is None or isinstance(error, DetkernError):
                raise
            raise ArgumentError(f"--initial: {variant} does not accumulate") from None


@click.command()
@click.argument("a", type=array_file)
@click.argument("b", type=array_file, required=False)
@click.argument("more", type=array_file, nargs=-1)
@click.option(
    "--operation",
    type=OPERATION,
    metavar="NAME",
    help=f"What C is of the files, where it is not a product: {', '.join(OPERATION.choices)}.",
)
@click.option(
    "--contract",
    "names",
    type=click.Choice([*CONTRACTS, ANY]),
    metavar="NAME",
    multiple=True,
    help=f"What C was computed with: {NAMES}; any tries all that take the type of A. May be repeated.",
)
@click.option("--expect", "c", type=array_file, required=True, metavar="C", help="The result to check.")
@click.option("--trans-a", is_flag=True, help="A is stored as [.., K, M].")
@click.option("--trans-b", is_flag=True, help="B is stored as [.., N, K], as the weight of a linear layer is.")
@click.option("--bias", type=array_file, metavar="FILE[:KEY]", help="A vector [N] that was added.")
@click.option(
    "--initial",
    type=array_file,
    metavar="FILE[:KEY]",
    help="The float32 array that was accumulated into, as it was before.",
)
@click.option("--scale-a", type=array_file, metavar="FILE[:KEY]", help="fp8-block128: float32 scales of A, [M, K/128].")
@click.option("--scale-b", type=array_file, metavar="FILE[:KEY]", help="fp8-block128: float32 scales of B, [K/128, N].")
@click.option(
    "--out-dtype", type=element_type, metavar="TYPE", help="What the raw elements of C are: f32, f16 or bf16."
)
@click.option(
    "--dtype",
    type=element_type,
    metavar="TYPE",
    help="What raw elements of A and B (and of C and the bias, of that size) are: f16, bf16, e4m3, e5m2 or f32. NumPy "
    "saves "
    "bfloat16 as raw bytes.",
)
@json_option
def replay(
    a: Location,
    b: Location | None,
    more: tuple[Location, ...],
    operation: str | None,
    names: tuple[str, ...],
    c: Location,
    trans_a: bool,
    trans_b: bool,
    bias: Location | None,
    initial: Location | None,
    scale_a: Location | None,
    scale_b: Location | None,
    out_dtype: DType | None,
    dtype: DType | None,
    as_json: bool,
) -> None:
    """Recompute A @ B, or another operation of A and B, on the CPU and compare it with C, bit for bit.

    The files are .npy, .npz and .safetensors; FILE:KEY names one array of several. Stacks of matrices broadcast as in
    numpy.matmul. Several contracts get a line each; where more than one gives the bits of C, a last line says whether
    float32 results would tell them apart.

    \b
    Examples:
      detkern replay x.npy w.npy --contract mma16 --expect y.npy
      detkern replay run.npz:x model.safetensors:fc.weight --trans-b --bias model.safetensors:fc.bias \\
          --contract mma16 --expect run.npz:y
      detkern replay x.npy w.npy --contract any --expect y.npy
      detkern replay x.npy w.npy --dtype bf16 --contract tree --expect y.npy    (bf16 saved by NumPy as raw bytes)
      detkern replay logits.npy --operation log_softmax --expect logprobs.npy
      detkern replay dy.npy --operation bias_gradient --expect db.npy
      detkern replay dy.npy tokens.npy --operation scatter_sum --expect dw.npy

    \b
    Exit codes: 0 equal, by at least one of several contracts, 1 different, 2 the comparison could not be made.
    """
    if (operation is None) == (not names):
        raise ArgumentError(
            "give one of the two: --contract NAME for a product, --operation NAME for another operation"
        )
    arrays = [load(location, dtype) for location in (a, b, *more) if location is not None]
    expected = _expected(c, out_dtype, dtype)
    wanted = from_numpy(expected.dtype)
    if wanted not in (F32, F16, BF16):
        raise DTypeError(f"--expect {c}: holds {expected.dtype}; results are float32, float16 or bfloat16")
    start = None if initial is None else _start(load(initial), initial, expected)
    product: _Product | _Call
    if operation is not None:
        others = {
            "--trans-a": trans_a,
            "--trans-b": trans_b,
            "--bias": bias,
            "--scale-a": scale_a,
            "--scale-b": scale_b,
        }
        if given := [name for name, value in others.items() if value]:
            raise ArgumentError(f"{', '.join(given)}: of products alone, not of {operation}")
        record = next(one for one in OPERATIONS if operation in one.variants)
        product, contracts = _Call(record, operation, tuple(arrays), start, expected.shape), [operation]
    else:
        if len(arrays) != 2:
            raise ArgumentError("a product takes two files, A and B")
        for array, location in zip(arrays, (a, b), strict=True):
            if from_numpy(array.dtype) in INDICES:
                raise DTypeError(
                    f"{location}: holds {array.dtype}, which an index may be; a product takes floating-point numbers"
                )
        product = _Product(
            a=arrays[0],
            b=arrays[1],
            trans_a=trans_a,
            trans_b=trans_b,
            bias=None if bias is None else load(bias, dtype),
            initial=start,
            scale_a=None if scale_a is None else load(scale_a),
            scale_b=None if scale_b is None else load(scale_b),
        )
        contracts = list(
            dict.fromkeys(one for name in names for one in (product.contracts() if name == ANY else [name]))
        )
    outcomes = {contract: compare(product.compute(contract, wanted), expected) for contract in contracts}
    equal = [contract for contract, outcome in outcomes.items() if not outcome.differing]
    groups = _groups(product, equal) if len(equal) > 1 else None
    what = f"{c}: {' x '.join(map(str, expected.shape)) or 'scalar'} {expected.dtype}"
    if as_json:
        print_json(
            {
                "expect": str(c),
                "shape": expected.shape,
                "dtype": str(expected.dtype),
                "equal": bool(equal),
                "contracts": [
                    {"contract": name, "equal": name in equal, **asdict(outcomes[name])} for name in contracts
                ],
                "same_in_float32": groups,
            }
        )
    elif len(contracts) == 1:
        _report(outcomes[contracts[0]], f"{what}, {'contract' if operation is None else 'operation'} {contracts[0]}")
    else:
        for contract in contracts:
            click.echo(_line(outcomes[contract], f"{what}, contract {contract}"))
        if groups is not None:
            click.echo(_tie(groups, wanted))
    sys.exit(0 if equal else 1)


def _groups(product: _Product | _Call, equal: list[str]) -> list[list[str]]:
    """These contracts in groups of those whose float32 results of the same operands have the same bits."""
    found: dict[bytes, list[str]] = {}
    for contract in equal:
        found.setdefault(bits(product.compute(contract, F32)).tobytes(), []).append(contract)
    return list(found.values())


def _tie(groups: list[list[str]], stored: DType) -> str:
    """That these elements cannot tell contracts apart, and which could."""
    names = _and([name for group in groups for name in group])
    said = f"{names} give the same elements here, which cannot tell them apart"
    left = [_and(group) for group in groups if len(group) > 1]
    float32 = 'float32 results of the same operands (out_dtype="float32")'
    if not left:
        return f"{said}; {float32} can"
    others = "larger operands, or ones whose sums cancel and are not exact, can"
    if len(groups) > 1:
        return f"{said}; {float32} can, but for {'; '.join(left)}: {others}"
    return f"{said}{'' if stored == F32 else ', nor can float32 results'}; {others}"


def _and(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _expected(c: Location, out_dtype: DType | None, dtype: DType | None) -> Array:
    expected = load(c, out_dtype or dtype)
    if out_dtype is not None and from_numpy(expected.dtype) != out_dtype:
        raise ArgumentError(f"--out-dtype {out_dtype.short}: {c} holds {expected.dtype}; leave the option out")
    return expected


def _start(start: Array, initial: Location, expected: Array) -> Array:
    """The array that was accumulated into. Raises DTypeError where it or the result is not float32."""
    for name, array in (("--initial", start), ("--expect", expected)):
        if array.dtype != np.float32:
            raise DTypeError(f"{name}: holds {array.dtype}; accumulation (--initial {initial}) is in float32")
    return np.ascontiguousarray(start)


def _share(outcome: Comparison) -> str:
    share = 100 * outcome.differing / outcome.elements
    return f"{outcome.differing:,} of {outcome.elements:,} ({share:.3g}%)"


def _equal(outcome: Comparison, what: str) -> str:
    return f"equal: {what}: all {outcome.elements:,} elements have the same bits"


def _line(outcome: Comparison, what: str) -> str:
    """One contract of several."""
    if not outcome.differing:
        return _equal(outcome, what)
    apart = [] if outcome.largest_ulp is None else [f"by up to {outcome.largest_ulp:,} ULP"]
    apart += [] if outcome.largest_error is None else [f"{outcome.largest_error:.3g} absolute"]
    return f"DIFFERENT: {what}: {_share(outcome)} differ{' ' if apart else ''}{', '.join(apart)}"


def _report(outcome: Comparison, what: str) -> None:
    """The only contract."""
    if not outcome.differing:
        click.echo(_equal(outcome, what))
        return
    click.echo(f"DIFFERENT: {what}")
    click.echo(f"  differing elements     {_share(outcome)}")
    largest = "none between numbers" if outcome.largest_ulp is None else f"{outcome.largest_ulp:,}"
    click.echo(f"  largest ULP distance   {largest}")
    if outcome.largest_error is not None:
        click.echo(f"  largest absolute error {outcome.largest_error:.6g}")
    if outcome.nan_against_number:
        click.echo(f"  NaN against a number   {outcome.nan_against_number:,}")
    if outcome.nan_patterns:
        click.echo(f"  NaN against NaN        {outcome.nan_patterns:,} (another sign or payload)")
    if outcome.first is not None:
        first = outcome.first
        click.echo(f"  first at               [{', '.join(map(str, first.index))}]")
        click.echo(f"    recomputed           {first.got_bits}  {first.got}")
        click.echo(f"    in the file          {first.want_bits}  {first.want}")
