"""The properties of `detkern verify` that compare with arithmetic done elsewhere: bias and accumulation with their
definition in NumPy, every bit with the CPU replay, and the size of the error with float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import detkern

from ..api import block_scaled_gemm
from ..cpu.backend import library
from ..dispatch import registry
from ..operations.bias_gradient.operation import BIAS_GRADIENT
from ..operations.bias_gradient.replay import column_sum as replayed_column_sum
from ..operations.block_scaled.replay import block_scaled_gemm as replayed_block_scaled
from ..operations.gemm import replay as numpy_replay
from ..vocabulary.contracts import FMA, Contract
from ..vocabulary.dtypes import BF16, F16, F32, DType
from ..vocabulary.operands import KINDS, generate
from .devices import fetch
from .properties import INVARIANCE, Effort, Property, sampled
from .results import Histogram, Tally, Trial
from .subject import BLOCK, Array, Operands, Subject, sample

__all__ = ["PROPERTIES", "error_bound", "finish"]

_NAN = {F32: 0x7FFFFFFF, F16: 0x7FFF, BF16: 0x7FFF}


def finish(value: Array, out_dtype: DType) -> Array:
    """The end of every contract after a binary32 addition: NaN made canonical, one rounding to `out_dtype`."""
    with np.errstate(all="ignore"):
        rounded = value.astype(np.float32).astype(out_dtype.numpy)
    patterns = rounded.view(out_dtype.bits).copy()
    patterns[np.isnan(rounded)] = _NAN[out_dtype]
    return patterns.view(out_dtype.numpy)


def bias(subject: Subject, effort: Effort, tally: Tally) -> None:
    """The float32 result plus bias in binary32, rounded once, for every type of bias and output."""
    if subject.scaled:
        tally.result.offered = False
        tally.note("fp8-block128 has no bias")
        return
    for kind, operands in sampled(subject, effort):
        accumulator = subject.product(operands, out_dtype=F32)
        for bias_dtype in (F32, F16, BF16):
            vector = generate(kind, bias_dtype, (operands.n,), 7)
            with np.errstate(all="ignore"):
                total = accumulator + vector.astype(np.float32)
            for out_dtype in (F32, F16, BF16):
                got = subject.product(operands, bias=vector, out_dtype=out_dtype)
                label = f"{kind} {bias_dtype.short}>{out_dtype.short}"
                tally.check(label, got, finish(total, out_dtype))


def _cuts(subject: Subject, k: int) -> list[list[int]]:
    """Ways to cut [0, k) where the contract allows it, each as ascending ends."""
    step = subject.contract.accumulates
    assert step is not None
    every = list(range(step, k, step))
    chosen = [
        every[len(every) // 2 : len(every) // 2 + 1],
        every[:1],
        every[-1:],
        every[:: max(1, len(every) // 7)],
        every[1::3][:9],
    ]
    return [[*cut, k] for cut in chosen if cut]


def accumulate(subject: Subject, effort: Effort, tally: Tally) -> None:
    """Pieces of K accumulated into float32 against the whole, from nothing and onto an array ("onto"); for a tree, the
    root added to what was there."""
    for kind, operands in sampled(subject, effort):
        start = generate(kind, F32, (operands.m, operands.n), 8)
        if subject.contract.accumulates is None:
            root = subject.product(operands, out_dtype=F32)
            with np.errstate(all="ignore"):
                want = finish(start + root, F32)
            tally.check(f"{kind} out + root", subject.product(operands, initial=start), want)
            tally.note("a tree's root is added to out in binary32; pieces of K do not make the whole")
            continue
        whole = subject.product(operands, out_dtype=F32)
        onto = subject.product(operands, initial=start)
        for cut in _cuts(subject, operands.k):
            fresh: Array | None = None
            running = start
            begin = 0
            for end in cut:
                piece = operands.depth(begin, end)
                fresh = subject.product(piece, initial=fresh, out_dtype=F32)
                running = subject.product(piece, initial=running)
                begin = end
            assert fresh is not None
            label = f"{kind} {len(cut)} from {cut[0]}"
            tally.check(label, fresh, whole)
            tally.check(f"{label} onto", running, onto)


def replay(
    subject: Subject,
    operands: Operands,
    *,
    bias: Array | None = None,
    initial: Array | None = None,
    out_dtype: DType | None = None,
) -> Array:
    """The same product elsewhere: the CPU backend's by the NumPy replay, any other's by the CPU backend."""
    if subject.backend == "cpu":
        if operands.scale_a is not None and operands.scale_b is not None:
            return replayed_block_scaled(
                operands.a, operands.scale_a, operands.b, operands.scale_b, initial=initial, out_dtype=out_dtype or F32
            )
        return numpy_replay.gemm(
            subject.contract, operands.a, operands.b, initial=initial, bias=bias, out_dtype=out_dtype
        )
    out = None if initial is None else initial.copy()
    wanted = None if out_dtype is None or out is not None else out_dtype.name
    if operands.scale_a is not None and operands.scale_b is not None:
        return np.asarray(
            block_scaled_gemm(
                operands.a, operands.scale_a, operands.b, operands.scale_b,
                out=out, out_dtype=wanted, accumulate=out is not None, backend="cpu",
            )
        )  # fmt: skip
    return np.asarray(
        detkern.gemm(
            operands.a, operands.b, bias=bias, out=out, out_dtype=wanted, accumulate=out is not None,
            contract=subject.contract.name, backend="cpu",
        )
    )  # fmt: skip


def agreement(subject: Subject, effort: Effort, tally: Tally) -> None:
    """Every kind of operands, in odd shapes: plain, with a starting accumulator, and with a bias,
    against the replay."""
    tally.note("against the NumPy replay" if subject.backend == "cpu" else "against the CPU backend")
    if subject.backend == "cpu" and library() is None:
        tally.note("the CPU backend runs its NumPy version here, so this compares the replay with itself")
    for seed in range(effort.replay_seeds):
        for kind in KINDS:
            for b_dtype in subject.b_dtypes:
                row = kind if b_dtype == subject.dtype else f"{kind} x {b_dtype.short}"
                for index, (m, n, k) in enumerate(effort.replay_shapes):
                    operands = sample(subject, kind, m, n, k, 10 * seed + index, b_dtype)
                    label = f"{m} x {n} x {operands.k}, seed {seed}"
                    start = generate(kind, F32, (m, n), 5)
                    out_dtype = (F32, F16, BF16)[index % 3]
                    extras: list[tuple[str, dict[str, Any]]] = [
                        ("", {"out_dtype": subject.out_dtype}),
                        (", onto out", {"initial": start}),
                    ]
                    if not subject.scaled:
                        vector = generate(kind, F32, (n,), 6)
                        extras.append((f", bias, {out_dtype.short}", {"bias": vector, "out_dtype": out_dtype}))
                    for said, extra in extras:
                        tally.tile(
                            row, label + said, subject.product(operands, **extra), replay(subject, operands, **extra)
                        )
            if _sums(subject):
                _bias_gradient(subject, effort, tally, kind, seed)


def _sums(subject: Subject) -> bool:
    """Whether the backend's bias gradient is looked at here: with `fma`, which takes every type, of whose product with
    a row of ones it has the bits."""
    implemented = BIAS_GRADIENT.problem in registry.load(subject.backend).implementations
    return subject.contract == FMA and subject.follows and implemented


def _bias_gradient(subject: Subject, effort: Effort, tally: Tally, kind: str, seed: int) -> None:
    """The bias gradient against its replay, plain and onto out."""
    for index, (_, n, m) in enumerate(effort.replay_shapes):
        dc = generate(kind, subject.dtype, (m, n), 10 * seed + index)
        start = generate(kind, F32, (n,), 9)
        out = subject.place(start)
        detkern.bias_gradient(subject.place(dc), out=out, accumulate=True, backend=subject.backend)
        plain = detkern.bias_gradient(subject.place(dc), backend=subject.backend)
        for said, got, initial in (("", plain, None), (", onto out", out, start)):
            if subject.backend == "cpu":
                want = replayed_column_sum(dc, initial=initial)
            else:
                onto = None if initial is None else initial.copy()
                want = np.asarray(detkern.bias_gradient(dc, out=onto, accumulate=onto is not None, backend="cpu"))
            tally.tile(kind, f"bias gradient of {m} x {n}, seed {seed}{said}", fetch(got), want)


def error_bound(contract: Contract, dtype: DType, k: int) -> float:
    """A bound on |result - exact| / sum |a b| for finite operands whose products and sums are normal numbers.

    One binary32 rounding is u = 2^-24. A chain of K roundings gives (1 + u)^K - 1 (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1). A tensor-core step cuts each of its G + 1 terms below 2^(E - F), where 2^E is at
    most the largest term, and the sum to its significant bits: (G + 1) 2^-F + 2^(1 - bits) relative. A tree rounds each
    leaf and each level of sums to the operand type as well.
    """
    single = 2.0**-24
    rounding = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}.get(dtype, 0.0)

    def chain(length: int) -> float:
        """The growth, as a logarithm, over `length` terms of one accumulation."""
        if contract.step is None:
            return length * math.log1p(single)
        step = contract.step
        one = (step.group + 1) * 2.0**-step.fraction_bits + 2.0 ** (1 - step.significant_bits)
        return -(-length // step.group) * math.log1p(one)

    if contract.leaf is not None:
        leaves = max(1, -(-k // contract.leaf))
        levels = (leaves - 1).bit_length()
        growth = chain(min(k, contract.leaf)) + math.log1p(rounding)
        growth += levels * (math.log1p(single) + math.log1p(rounding))
    elif contract.k_multiple > 1:
        # The scale's product is rounded once, then each block's fused multiply-add.
        growth = chain(BLOCK) + (1 + k // BLOCK) * math.log1p(single)
    else:
        growth = chain(k)
    return math.expm1(growth)


_BINS = 16  # powers of two below the bound that the histogram shows


def accuracy(subject: Subject, effort: Effort, tally: Tally) -> None:
    """|result - exact| against the contract's error bound, the exact result taken in float64."""
    histogram = Histogram([0] * _BINS)
    tally.result.picture = histogram
    worst = 0.0
    for kind in ("normal", "integers", "cancel", "sparse"):
        if kind == "cancel" and subject.contract.leaf is not None and subject.dtype == F16:
            tally.note("no cancelling operands: the f16 leaves of a tree overflow at 65,520")
            continue
        for index, (m, n, k) in enumerate(effort.accuracy):
            operands = sample(subject, kind, m, n, k, 200 + index)
            a, b = operands.exact()
            scale = np.abs(a) @ np.abs(b)
            got = subject.product(operands, out_dtype=F32)
            error = np.abs(got.astype(np.float64) - a @ b)
            # float64's own sum is off by at most K 2^-53 of the scale.
            bound = (error_bound(subject.contract, subject.dtype, operands.k) + operands.k * 2.0**-52) * scale
            wrong = ~(error <= bound)
            share = error[bound > 0] / bound[bound > 0]
            worst = max(worst, float(share.max(initial=0.0)))
            _count(histogram, share)
            trial = Trial(f"{kind} {m} x {n} x {operands.k}", error.size, int(np.count_nonzero(wrong)))
            tally.result.trials.append(trial)
            if trial.mismatches and tally.result.error is None:
                at = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
                tally.result.error = f"{trial.label}: the error at {at} is {error[at]:.3g}, the bound {bound[at]:.3g}"
    tally.note(f"the largest error is {worst:.2g} of the bound")


def _count(histogram: Histogram, share: Array) -> None:
    histogram.exact += int(np.count_nonzero(share == 0))
    histogram.above += int(np.count_nonzero(~(share <= 1)))
    inside = share[(share > 0) & (share <= 1)]
    places = np.ceil(np.log2(inside)).astype(int) + _BINS - 1
    histogram.below += int(np.count_nonzero(places < 0))
    for index in range(_BINS):
        histogram.counts[index] += int(np.count_nonzero(places == index))


PROPERTIES: tuple[Property, ...] = (
    *INVARIANCE,
    Property("bias", "bias", "Is bias one binary32 addition and one rounding?", "rows of the result", bias),
    Property("accumulate", "accum", "Do pieces of K, accumulated, equal the whole?", "rows of the result", accumulate),
    Property(
        "replay",
        "replay",
        "Does every bit agree with the CPU replay?",
        "shapes, each plain, onto out, with bias; with fma, the bias gradient",
        agreement,
    ),
    Property("accuracy", "error", "Is the error against float64 within the contract's bound?", "", accuracy),
)
