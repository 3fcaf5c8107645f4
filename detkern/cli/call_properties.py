"""The properties of `detkern verify` for operations other than products, made of what their records say alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from .. import config
from ..cpu.backend import library
from ..operations.operation import Sample, replayed
from ..vocabulary.dtypes import F32
from ..vocabulary.operands import KINDS, generate
from .calls import CallSubject
from .devices import fetch, negative_strides
from .properties import LAYOUTS, Effort, threads
from .results import Tally
from .subject import Array

__all__ = ["CALL_CHECKS"]


def _sampled(subject: CallSubject, effort: Effort) -> Iterator[tuple[str, Sample, Array]]:
    """The main sample of every kind of operands, and its result."""
    for seed, kind in enumerate(effort.kinds):
        sample = subject.main(kind, 100 + seed)
        yield kind, sample, subject.result(sample)


def _repeatability(subject: CallSubject, effort: Effort, tally: Tally) -> None:
    """One call over and over, into a poisoned output, on the CPU with another number of threads each time."""
    for kind, sample, whole in _sampled(subject, effort):
        arrays = [None if x is None else subject.place(x) for x in sample.operands]
        for run in range(effort.repetitions):
            with threads(
                (config.num_threads, 1, 2, 3)[run % 4] if subject.device.kind == "cpu" else config.num_threads
            ):
                out = subject.place(np.full(sample.shape, np.nan, sample.dtype.numpy))
                tally.check(f"{kind} {run + 1}", fetch(subject.call(arrays, sample, out=out)), whole)


def _batch_size(subject: CallSubject, effort: Effort, tally: Tally) -> None:
    """The first alone, in batches of many sizes."""
    for kind, sample, whole in _sampled(subject, effort):
        for size in (1, 2, 3, 8, 17, 32):
            if size < subject.count(sample):
                got = subject.first(subject.result(subject.chosen(sample, slice(0, size))))
                tally.check(f"{kind} {size}", got, subject.first(whole)[:size])


def _position(subject: CallSubject, effort: Effort, tally: Tally) -> None:
    """In another order."""
    for kind, sample, whole in _sampled(subject, effort):
        order = np.arange(subject.count(sample))
        for label, other in (
            ("reversed", order[::-1]),
            ("rotated", np.roll(order, 1)),
            ("the first all over", 0 * order),
        ):
            got = subject.first(subject.result(subject.chosen(sample, other)))
            tally.check(f"{kind} {label}", got, subject.first(whole)[other])


def _neighbours(subject: CallSubject, effort: Effort, tally: Tally) -> None:
    """Every third among others that hold NaN and infinities."""
    for kind, sample, whole in _sampled(subject, effort):
        kept = np.arange(subject.count(sample)) % 3 == 1
        for label, value in (("NaN", np.nan), ("inf", np.inf), ("-inf", -np.inf)):
            operands = []
            for array, axis in zip(sample.operands, subject.operation.independent(subject.name), strict=True):
                spoiled = array
                if array is not None and axis is not None and array.dtype.kind != "i":
                    spoiled = array.copy()
                    np.moveaxis(spoiled, axis, 0)[~kept] = value
                operands.append(spoiled)
            got = subject.first(subject.result(replace(sample, operands=tuple(operands))))
            tally.check(f"{kind} {label}", got, subject.first(whole), only=kept)


def _chunking(subject: CallSubject, effort: Effort, tally: Tally) -> None:
    """In pieces: put together, the whole."""
    for kind, sample, whole in _sampled(subject, effort):
        count = subject.count(sample)
        for size in (1, 5, count // 2 + 1):
            starts = tuple(range(0, count, size))
            parts = [subject.chosen(sample, slice(s, min(s + size, count))) for s in starts]
            pieces = [subject.first(subject.result(part)) for part in parts]
            tally.check(f"{kind} {size}", np.concatenate(pieces), subject.first(whole), opens=starts[1:])


def _layouts(subject: CallSubject, effort: Effort, tally: Tally) -> None:
    """Matrices among the operands and the result in every layout."""
    for kind, sample, whole in _sampled(subject, effort):
        arrays = [None if x is None else subject.place(x) for x in sample.operands]
        for label, layout in LAYOUTS.items():
            if label == "reversed" and not negative_strides(subject.device):
                continue
            for index, array in enumerate(sample.operands):
                if array is not None and array.ndim == 2:
                    given = [*arrays[:index], layout(array, subject.place), *arrays[index + 1 :]]
                    tally.check(f"{kind} operand {index + 1} {label}", fetch(subject.call(given, sample)), whole)
            if len(sample.shape) == 2:
                out = layout(np.full(sample.shape, 2.0, sample.dtype.numpy), subject.place)
                tally.check(f"{kind} out {label}", fetch(subject.call(arrays, sample, out=out)), whole)


def _accumulation(subject: CallSubject, effort: Effort, tally: Tally) -> None:
    """Onto an array that holds NaN elsewhere: what is accumulated into is a start for its own element alone."""
    for seed, kind in enumerate(effort.kinds):
        for sample in subject.samples(kind, 200 + seed):
            if sample.initial is None or not sample.initial.size:
                continue
            start = generate("normal", F32, sample.shape, 3)
            kept = np.arange(sample.shape[0]) % 3 == 1
            spoiled = start.copy()
            spoiled[~kept] = np.nan
            calm, disturbed = (subject.result(replace(sample, initial=i)) for i in (start, spoiled))
            tally.check(f"{kind} {sample.about}", disturbed, calm, only=kept)
    if not tally.result.trials:
        tally.result.offered = False
        tally.note(f"{subject.name} does not accumulate")


def _agreement(subject: CallSubject, effort: Effort, tally: Tally) -> None:
    """Every kind of operands in odd shapes against the replay."""
    tally.note("against the NumPy replay" if subject.backend == "cpu" else "against the CPU backend")
    if subject.backend == "cpu" and library() is None:
        tally.note("the CPU backend runs its NumPy version here, so this compares the replay with itself")
    elsewhere = replace(subject, backend="cpu", device=type(subject.device)("cpu"))
    step = 5 if effort.name == "quick" else 1
    for seed in range(effort.replay_seeds):
        for number, kind in enumerate(KINDS):
            # Of a quick look every fifth, beginning elsewhere for each kind, so that all shapes and types come round.
            for sample in islice(subject.samples(kind, seed), number % step, None, step):
                want = replayed(subject.operation, sample) if subject.backend == "cpu" else elsewhere.result(sample)
                tally.tile(kind, f"{sample.about}, seed {seed}", subject.result(sample), want)


# By the property's name; one that is missing here is of products alone.
CALL_CHECKS: dict[str, Callable[[Any, Effort, Tally], None]] = {
    "repeatability": _repeatability,
    "batch size": _batch_size,
    "row position": _position,
    "neighbours": _neighbours,
    "chunking": _chunking,
    "layouts": _layouts,
    "accumulate": _accumulation,
    "replay": _agreement,
}
