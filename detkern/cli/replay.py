"""`detkern replay`: recompute a product from files on the CPU and compare it bit for bit with what a machine gave."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import detkern

from ..api import block_scaled_gemm
from ..contracts import FP8_BLOCK128
from ..dtypes import BF16, F16, F32, DType, from_numpy
from ..errors import ArgumentError, DTypeError
from .compare import Comparison, compare
from .files import Location, load
from .options import CONTRACT, NAMES, array_file, element_type
from .output import is_stdout, write

__all__ = ["replay"]


@click.command()
@click.argument("a", type=array_file)
@click.argument("b", type=array_file)
@click.option("--contract", type=CONTRACT, metavar="NAME", required=True, help=f"What C was computed with: {NAMES}.")
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
    help="What raw elements of A and B (and of C and the bias, of that size) are: f16, bf16, e4m3, e5m2 or f32. NumPy saves "
    "bfloat16 as raw bytes.",
)
@click.option(
    "--json", "json_file", type=click.File("w", lazy=False), metavar="FILE", help="Write the outcome there (- : here)."
)
def replay(
    a: Location,
    b: Location,
    contract: str,
    c: Location,
    trans_a: bool,
    trans_b: bool,
    bias: Location | None,
    initial: Location | None,
    scale_a: Location | None,
    scale_b: Location | None,
    out_dtype: DType | None,
    dtype: DType | None,
    json_file: Any,
) -> None:
    """Recompute A @ B on the CPU and compare it with C, bit for bit.

    The files are .npy, .npz and .safetensors; FILE:KEY names one array of several. Stacks of matrices broadcast as in
    numpy.matmul.

    \b
    Examples:
      detkern replay x.npy w.npy --contract mma16 --expect y.npy
      detkern replay run.npz:x model.safetensors:fc.weight --trans-b --bias model.safetensors:fc.bias \\
          --contract mma16 --expect run.npz:y
      detkern replay x.npy w.npy --dtype bf16 --contract tree --expect y.npy    (bf16 saved by NumPy as raw bytes)

    \b
    Exit codes: 0 equal, 1 different, 2 the comparison could not be made.
    """
    left, right = load(a, dtype), load(b, dtype)
    expected = _expected(c, out_dtype, dtype)
    wanted = from_numpy(expected.dtype)
    if wanted not in (F32, F16, BF16):
        raise DTypeError(f"--expect {c}: holds {expected.dtype}; results are float32, float16 or bfloat16")
    start = None if initial is None else load(initial)
    if start is not None:
        start = _start(start, initial, expected)
    if contract == FP8_BLOCK128.name:
        if scale_a is None or scale_b is None:
            raise ArgumentError("fp8-block128 needs the scales too: --scale-a FILE and --scale-b FILE")
        if bias is not None:
            raise ArgumentError("fp8-block128 takes no --bias")
        result = block_scaled_gemm(
            left.T if trans_a else left,
            load(scale_a),
            right.T if trans_b else right,
            load(scale_b),
            out=start,
            out_dtype=None if start is not None else wanted.name,
            accumulate=start is not None,
            backend="cpu",
        )
    else:
        if scale_a is not None or scale_b is not None:
            raise ArgumentError(f"--scale-a and --scale-b belong to fp8-block128, not to {contract}")
        result = detkern.gemm(
            left,
            right,
            trans_a=trans_a,
            trans_b=trans_b,
            bias=None if bias is None else load(bias, dtype),
            out=start,
            out_dtype=None if start is not None else wanted.name,
            accumulate=start is not None,
            contract=contract,
            backend="cpu",
        )
    outcome = compare(np.asarray(result), expected)
    _report(outcome, c, contract, expected, json_file)
    sys.exit(1 if outcome.differing else 0)


def _expected(c: Location, out_dtype: DType | None, dtype: DType | None) -> npt.NDArray[Any]:
    expected = load(c, out_dtype or dtype)
    if out_dtype is not None and from_numpy(expected.dtype) != out_dtype:
        raise ArgumentError(f"--out-dtype {out_dtype.short}: {c} holds {expected.dtype}; leave the option out")
    return expected


def _start(start: npt.NDArray[Any], initial: Location | None, expected: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A copy of the start that the product may accumulate into."""
    for name, array in (("--initial", start), ("--expect", expected)):
        if array.dtype != np.float32:
            raise DTypeError(f"{name}: holds {array.dtype}; accumulation (--initial {initial}) is in float32")
    return np.array(start, np.float32, order="C")


def _report(outcome: Comparison, c: Location, contract: str, expected: npt.NDArray[Any], json_file: Any) -> None:
    shape = " x ".join(map(str, expected.shape)) or "scalar"
    what = f"{c}: {shape} {expected.dtype}, contract {contract}"
    if json_file is not None:
        record = {"expect": str(c), "contract": contract, "shape": expected.shape, "dtype": str(expected.dtype)}
        write(json_file, json.dumps({**record, "equal": not outcome.differing, **asdict(outcome)}, indent=2) + "\n")
        if is_stdout(json_file):
            return
    if not outcome.differing:
        click.echo(f"equal: {what}: all {outcome.elements:,} elements have the same bits")
        return
    share = 100 * outcome.differing / outcome.elements
    click.echo(f"DIFFERENT: {what}")
    click.echo(f"  differing elements   {outcome.differing:,} of {outcome.elements:,} ({share:.3g}%)")
    largest = "none between numbers" if outcome.largest_ulp is None else f"{outcome.largest_ulp:,}"
    click.echo(f"  largest ULP distance {largest}")
    if outcome.nan_against_number:
        click.echo(f"  NaN against a number {outcome.nan_against_number:,}")
    if outcome.first is not None:
        first = outcome.first
        click.echo(f"  first at             [{', '.join(map(str, first.index))}]")
        click.echo(f"    recomputed         {first.got_bits}  {first.got}")
        click.echo(f"    in the file        {first.want_bits}  {first.want}")
