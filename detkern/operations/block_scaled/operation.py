"""The record of FP8 products with scales: their variant is the contract `fp8-block128`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...abi import mirror
from ...abi.descriptors import block_scaled_descriptors
from ...tensors.types import OUTPUTS
from ...tensors.view import TensorView
from ...vocabulary import operands as generator
from ...vocabulary.contracts import CONTRACTS, FP8_BLOCK128
from ...vocabulary.dtypes import BF16, E4M3, E5M2, F16, F32, DType
from ..memory import matrix_array
from ..operation import Descriptor, Operation, PublicCall, Sample
from ..problem import Operands
from .problem import BlockScaledProblem, block_scaled_problem
from .replay import block_scaled_gemm

__all__ = ["BLOCK_SCALED"]

_BLOCK = FP8_BLOCK128.k_multiple
_M, _N = 24, 20
_DEPTHS = (128, 384)
_SHAPES = ((2, 3, 0), (1, 24, 128), (17, 9, 256), (5, 7, 1024))


def _bind(variant: str, operands: Operands, out: TensorView, accumulate: bool) -> BlockScaledProblem:
    a, scale_a, b, scale_b = operands
    assert a is not None
    assert scale_a is not None
    assert b is not None
    assert scale_b is not None
    return block_scaled_problem(CONTRACTS[variant], a, scale_a, b, scale_b, out, accumulate)


def _misfit(problem: BlockScaledProblem) -> str | None:
    contract = problem.contract
    if contract != FP8_BLOCK128:
        return f"block_scaled_gemm computes {FP8_BLOCK128}, not {contract}"
    for dtype in (problem.a.dtype, problem.b.dtype):
        if dtype not in contract.operands:
            takes = ", ".join(d.name for d in contract.operands)
            gives = ", ".join(c.name for c in CONTRACTS.values() if dtype in c.operands)
            return f"{contract} takes {takes}, not {dtype}; {dtype} operands have {gives}"
    if problem.k % _BLOCK:
        return f"{contract} needs K to be a multiple of {_BLOCK}, not {problem.k}"
    if problem.out.dtype not in OUTPUTS:
        return f"out may be float32, float16 or bfloat16, not {problem.out.dtype}"
    return None


def _replay(problem: BlockScaledProblem, operands: Operands, out: TensorView) -> None:
    m, n, k = problem.m, problem.n, problem.k
    if 0 in (m, n):
        return
    blocks = k // _BLOCK
    shapes = ((m, k), (m, blocks), (k, n), (blocks, n))
    matrices = (problem.a, problem.scale_a, problem.b, problem.scale_b)
    arrays = [
        matrix_array(view.pointer, shape, matrix)
        for view, shape, matrix in zip(operands, shapes, matrices, strict=True)
        if view is not None
    ]
    target = matrix_array(out.pointer, (m, n), problem.out)
    target[...] = block_scaled_gemm(
        *arrays, initial=target if problem.accumulate else None, out_dtype=problem.out.dtype
    )


def _operands(kind: str, dtype: DType, other: DType, m: int, n: int, k: int, seed: int) -> tuple[generator.Array, ...]:
    scales = kind if kind in ("special", "bits") else "normal"
    return (
        generator.generate(kind, dtype, (m, k), 4 * seed),
        generator.generate(scales, F32, (m, k // _BLOCK), 4 * seed + 2),
        generator.generate(kind, other, (k, n), 4 * seed + 1),
        generator.generate(scales, F32, (k // _BLOCK, n), 4 * seed + 3),
    )


def _pairs(dtype: DType) -> tuple[DType, DType]:
    """The types of b that go with an a of `dtype`."""
    return dtype, E5M2 if dtype == E4M3 else E4M3


def _cases(variant: str, dtype: DType) -> Iterator[Sample]:
    for number, kind in enumerate(generator.KINDS):
        for k in _DEPTHS:
            for other in _pairs(dtype):
                arrays = _operands(kind, dtype, other, _M, _N, k, number)
                for initial in (None, generator.generate(kind, F32, (_M, _N), number)):
                    start = "zero" if initial is None else "an accumulator"
                    about = f"{kind} operands, b {other.short}, k={k}, from {start}"
                    yield Sample(variant, arrays, (_M, _N), F32, initial, about=about)


def _samples(variant: str, dtype: DType, kind: str, seed: int) -> Iterator[Sample]:
    for m, n, k in _SHAPES:
        for other in _pairs(dtype):
            arrays = _operands(kind, dtype, other, m, n, k, seed)
            about = f"{m} x {n} x {k}, b {other.short}"
            for out_dtype in (F32, F16, BF16):
                yield Sample(variant, arrays, (m, n), out_dtype, about=f"{about} > {out_dtype.short}")
            yield Sample(
                variant, arrays, (m, n), F32, generator.generate(kind, F32, (m, n), 5), about=f"{about}, onto out"
            )


def _addresses(operands: Operands, out: TensorView) -> tuple[int, ...]:
    return (*(0 if view is None else view.pointer for view in operands), out.pointer)


def _tile(problem: BlockScaledProblem, tiles: Sequence[str]) -> str:
    return next(tile.partition("=")[2] for tile in tiles if tile.startswith("mma"))


BLOCK_SCALED: Operation[BlockScaledProblem] = Operation(
    name="block_scaled_gemm",
    problem=BlockScaledProblem,
    variants={FP8_BLOCK128.name: FP8_BLOCK128.operands},
    variant_of=lambda problem: (problem.contract.name, problem.a.dtype),
    bind=_bind,
    misfit=_misfit,
    replay=_replay,
    piece="8192 outputs at a time",
    cases=_cases,
    samples=_samples,
    independent=lambda variant: (0, 0, None, None),
    call=lambda variant: PublicCall("detkern.api", "block_scaled_gemm", ("a", "scale_a", "b", "scale_b")),
    descriptor=Descriptor(
        2, {FP8_BLOCK128.name: FP8_BLOCK128.code},
        mirror.BlockScaledDescriptor, ("a", "scale_a", "b", "scale_b", "out"), _addresses, block_scaled_descriptors,
        _tile,
    ),
)  # fmt: skip
