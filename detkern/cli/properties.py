"""What `detkern verify` checks: one function a property, each filling a tally of comparisons on the integer view.

Invariance stands here: the same product done another way through the public calls must have the same bits.
references.py holds the properties that compare with arithmetic done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import config
from ..tensors import Device
from ..vocabulary.dtypes import E4M3, F32, DType
from ..vocabulary.operands import generate
from .devices import array_module, bit_patterns, fetch, negative_strides
from .results import Tally
from .subject import Array, Operands, Subject, sample

__all__ = ["FULL", "INVARIANCE", "LAYOUTS", "QUICK", "Effort", "Property", "sampled", "threads"]


@dataclass(frozen=True)
class Effort:
    """How much is checked. m, n, k: the main product. kinds: of operands, in every property; replay_shapes: (M, N, K)
    of the comparison with the replay, over all kinds of operands and `replay_seeds` seeds."""

    name: str
    m: int
    n: int
    k: int
    kinds: tuple[str, ...]
    repetitions: int
    shuffles: int
    replay_shapes: tuple[tuple[int, int, int], ...]
    replay_seeds: int
    accuracy: tuple[tuple[int, int, int], ...]

    def on(self, device: Device) -> Effort:
        """The same for a device: an accelerator's tile depends on M,
        and its batch must be large enough to change it."""
        if device.kind == "cpu" or self.name == "quick":
            return self
        more = ((130, 264, 1032), (257, 72, 4100))
        return replace(self, m=288, n=264, k=1032, replay_shapes=(*self.replay_shapes, *more))


QUICK = Effort(
    name="quick",
    m=24,
    n=40,
    k=200,
    kinds=("normal", "special"),
    repetitions=4,
    shuffles=1,
    replay_shapes=((2, 3, 0), (1, 1, 1), (5, 3, 33), (17, 9, 130)),
    replay_seeds=1,
    accuracy=((32, 48, 300),),
)
FULL = Effort(
    name="full",
    m=96,
    n=136,
    k=600,
    kinds=("normal", "wide", "cancel", "subnormal", "special"),
    repetitions=20,
    shuffles=4,
    replay_shapes=((2, 3, 0), (1, 1, 1), (1, 40, 7), (5, 3, 33), (17, 9, 130), (33, 31, 257), (3, 70, 1000)),
    replay_seeds=2,
    accuracy=((64, 96, 300), (16, 24, 4096)),
)

Check = Callable[[Subject, Effort, Tally], None]


@dataclass(frozen=True)
class Property:
    """name: in reports and for --property; heading: of the table's column; asks: the question in one sentence; across:
    what the picture's cells are; check: the function."""

    name: str
    heading: str
    asks: str
    across: str
    check: Check


def sampled(subject: Subject, effort: Effort) -> Iterator[tuple[str, Operands]]:
    """The main product's operands, of every kind."""
    for seed, kind in enumerate(effort.kinds):
        yield kind, sample(subject, kind, effort.m, effort.n, effort.k, 100 + seed)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    before = config.num_threads
    config.num_threads = count
    try:
        yield
    finally:
        config.num_threads = before


def _poison(shape: tuple[int, ...], dtype: DType) -> Array:
    """An array of NaN, which shows in a result that reads what it should only write."""
    return np.full(shape, np.nan, dtype.numpy)


def repeatability(subject: Subject, effort: Effort, tally: Tally) -> None:
    """One product over and over, into a poisoned output, on the CPU with another number of threads each time."""
    on_cpu = subject.device.kind == "cpu"
    for kind, operands in sampled(subject, effort):
        scales = [None if s is None else subject.place(s) for s in (operands.scale_a, operands.scale_b)]
        placed = [subject.place(operands.a), subject.place(operands.b), *scales]
        first: Array | None = None
        for run in range(effort.repetitions):
            count = (config.num_threads, 1, 2, 3)[run % 4] if on_cpu else config.num_threads
            with threads(count):
                out = subject.place(_poison((operands.m, operands.n), subject.out_dtype))
                result = fetch(subject.call(*placed, out=out)).copy()
            first = result if first is None else first
            tally.check(f"{kind} {run + 1}" + (f", {count or 'all'} thr" if on_cpu else ""), result, first)


def batch_size(subject: Subject, effort: Effort, tally: Tally) -> None:
    """The first rows of a batch alone, in batches of many sizes."""
    for kind, operands in sampled(subject, effort):
        whole = subject.product(operands)
        sizes = [size for size in (1, 2, 3, 4, 8, 13, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257) if size < operands.m]
        for size in sizes:
            tally.check(f"{kind} M = {size}", subject.product(operands.rows(slice(0, size))), whole[:size])


def row_position(subject: Subject, effort: Effort, tally: Tally) -> None:
    """Rows, then columns, in another order."""
    for kind, operands in sampled(subject, effort):
        whole = subject.product(operands)
        down, across = np.arange(operands.m), np.arange(operands.n)
        orders = [
            ("in order", down),
            ("reversed", down[::-1]),
            ("rotated", np.roll(down, 1)),
            ("row 1 all over", down * 0 + 1),
        ]
        for seed in range(effort.shuffles):
            orders.append((f"shuffled {seed + 1}", np.argsort(generate("bits", F32, down.shape, seed).view(np.uint32))))
        for label, order in orders:
            tally.check(f"{kind} {label}", subject.product(operands.rows(order)), whole[order])
        for label, order in (("reversed", across[::-1]), ("rotated", np.roll(across, 3))):
            tally.check(f"{kind} cols {label}", subject.product(operands.columns(order)), whole[:, order], axis=1)


def neighbours(subject: Subject, effort: Effort, tally: Tally) -> None:
    """Every fifth row, then every fifth column, among others that hold NaN, infinities and the largest numbers."""
    largest = float(np.finfo(np.float16).max) if subject.dtype.name == "float16" else 3e38
    hostile = {"NaN": np.nan, "inf": np.inf, "-inf": -np.inf, "largest": largest}
    if subject.scaled:
        # Scales reach what the eight-bit types cannot; e4m3 has no infinity.
        hostile = {"NaN": np.nan, "largest": 448.0} | (
            {} if subject.dtype == E4M3 else {"inf": np.inf, "-inf": -np.inf}
        )
    for kind, operands in sampled(subject, effort):
        whole = subject.product(operands)
        rows, columns = np.arange(operands.m) % 5 == 2, np.arange(operands.n) % 5 == 2
        for label, value in hostile.items():
            a, b = operands.a.copy(), operands.b.copy()
            a[~rows] = value
            b[:, ~columns] = value
            got = subject.product(replace(operands, a=a))
            tally.check(f"{kind} rows {label}", got, whole, only=rows)
            got = subject.product(replace(operands, b=b))
            tally.check(f"{kind} cols {label}", got, whole, axis=1, only=columns)
        if operands.scale_a is not None:
            scale = operands.scale_a.copy()
            scale[~rows] = np.inf
            tally.check(f"{kind} scales inf", subject.product(replace(operands, scale_a=scale)), whole, only=rows)
        start = generate("normal", F32, whole.shape, 9)
        spoiled = start.copy()
        spoiled[~rows] = np.nan
        calm, disturbed = (subject.product(operands, initial=i) for i in (start, spoiled))
        tally.check(f"{kind} out NaN", disturbed, calm, only=rows)


def chunking(subject: Subject, effort: Effort, tally: Tally) -> None:
    """A prompt cut into chunks of rows, and a weight into chunks of columns: put together, the whole."""
    for kind, operands in sampled(subject, effort):
        whole = subject.product(operands)
        for size in (1, 5, 7, 16, operands.m // 2 + 1, operands.m - 1):
            starts = tuple(range(0, operands.m, size))
            pieces = [subject.product(operands.rows(slice(s, s + size))) for s in starts]
            tally.check(f"{kind} rows of {size}", np.concatenate(pieces), whole, opens=starts[1:])
        for size in (9, operands.n // 2 + 1):
            starts = tuple(range(0, operands.n, size))
            pieces = [subject.product(operands.columns(slice(s, s + size))) for s in starts]
            tally.check(f"{kind} cols of {size}", np.concatenate(pieces, 1), whole, axis=1, opens=starts[1:])


def padding(subject: Subject, effort: Effort, tally: Tally) -> None:
    """Rows of zeros below, columns of zeros beside, and zeros in K where the contract says that they change nothing."""
    contract = subject.contract
    for kind, operands in sampled(subject, effort):
        whole = subject.product(operands)
        for more in (1, 8, 41):
            rows = replace(operands, a=np.pad(operands.a, ((0, more), (0, 0))))
            columns = replace(operands, b=np.pad(operands.b, ((0, 0), (0, more))))
            if operands.scale_a is not None and operands.scale_b is not None:
                rows = replace(rows, scale_a=np.pad(operands.scale_a, ((0, more), (0, 0))))
                columns = replace(columns, scale_b=np.pad(operands.scale_b, ((0, 0), (0, more))))
            tally.check(f"{kind} {more} rows", subject.product(rows)[: operands.m], whole)
            tally.check(f"{kind} {more} cols", subject.product(columns)[:, : operands.n], whole)
        if contract.padding:
            for after, zero in ((1, 0.0), (7, -0.0), (16, 0.0), (64, -0.0)):
                more = subject.depth(after)
                got = subject.product(operands.padded(0, more, zero))
                tally.check(f"{kind} K + {more}{' -0' if np.signbit(zero) else ''}", got, whole)
        if contract.front is not None:
            for groups, zero in ((1, 0.0), (2, -0.0), (5, 0.0)):
                before = groups * contract.front
                got = subject.product(operands.padded(before, 0, zero))
                tally.check(f"{kind} {before}{' -0' if np.signbit(zero) else ''} + K", got, whole)
    if not contract.padding:
        tally.note("zeros in K move the split points of a tree, so only rows and columns are padded")


# Ways to store a matrix: each takes a NumPy matrix and a function that puts an array on the device, and returns a view
# there that reads as the matrix. What is not part of the view is NaN.
Layout = Callable[[Array, Callable[[Array], Any]], Any]


def _row_pitch(matrix: Array, place: Callable[[Array], Any]) -> Any:
    rows, columns = matrix.shape
    buffer = np.full((rows + 1, columns + 3), np.nan, matrix.dtype)
    buffer[:rows, :columns] = matrix
    return place(buffer)[:rows, :columns]


def _every_other(matrix: Array, place: Callable[[Array], Any]) -> Any:
    buffer = np.full((2 * matrix.shape[0], 3 * matrix.shape[1]), np.nan, matrix.dtype)
    buffer[::2, 1::3] = matrix
    return place(buffer)[::2, 1::3]


def _one_element_in(matrix: Array, place: Callable[[Array], Any]) -> Any:
    buffer = np.full(matrix.size + 1, np.nan, matrix.dtype)
    buffer[1:] = matrix.reshape(-1)
    return place(buffer)[1:].reshape(matrix.shape)


LAYOUTS: dict[str, Layout] = {
    "row-major": lambda matrix, place: place(matrix),
    "column-major": lambda matrix, place: place(np.ascontiguousarray(matrix.T)).T,
    "row pitch": _row_pitch,
    "every other": _every_other,
    "reversed": lambda matrix, place: place(np.ascontiguousarray(matrix[::-1, ::-1]))[::-1, ::-1],
    "off by one": _one_element_in,
}


def layouts(subject: Subject, effort: Effort, tally: Tally) -> None:
    """Operands and output in every layout, zero strides, transposed flags, and a batch against a loop."""
    for kind, operands in sampled(subject, effort):
        whole = subject.product(operands)
        scales = [None if s is None else subject.place(s) for s in (operands.scale_a, operands.scale_b)]
        a, b = subject.place(operands.a), subject.place(operands.b)
        for label, layout in LAYOUTS.items():
            if label == "reversed" and not negative_strides(subject.device):
                continue
            other = layout(operands.a, subject.place)
            tally.check(f"{kind} a {label}", fetch(subject.call(other, b, *scales)), whole)
            other = layout(operands.b, subject.place)
            tally.check(f"{kind} b {label}", fetch(subject.call(a, other, *scales)), whole)
            _strided_output(subject, kind, label, layout, [a, b, *scales], whole, tally)
        module = array_module(subject.device)
        same = operands.rows(np.zeros(operands.m, np.intp))
        broadcast = module.broadcast_to(subject.place(operands.a[:1]), same.a.shape)
        scale = None if same.scale_a is None else subject.place(same.scale_a)
        got = fetch(subject.call(broadcast, b, scale, scales[1]))
        tally.check(f"{kind} a stride 0", got, whole[np.zeros(operands.m, np.intp)])
        if subject.scaled:
            pitch = [
                LAYOUTS["every other"](s, subject.place) for s in (operands.scale_a, operands.scale_b) if s is not None
            ]
            tally.check(f"{kind} scales strided", fetch(subject.call(a, b, *pitch)), whole)
            continue
        for flags in ((True, False), (False, True), (True, True)):
            left = subject.place(operands.a.T) if flags[0] else a
            right = subject.place(operands.b.T) if flags[1] else b
            got = fetch(subject.call(left, right, trans_a=flags[0], trans_b=flags[1]))
            tally.check(f"{kind} trans {'NT'[flags[0]]}{'NT'[flags[1]]}", got, whole)
        stack = np.stack([operands.a, operands.a[::-1], operands.a])
        got = fetch(subject.call(subject.place(stack), b))
        for index, want in enumerate((whole, whole[::-1], whole)):
            tally.check(f"{kind} batch [{index}]", got[index], want)


def _strided_output(
    subject: Subject, kind: str, label: str, layout: Layout, operands: list[Any], whole: Array, tally: Tally
) -> None:
    """An output in `layout`: the result is right, and the memory around it untouched."""
    buffers: list[Any] = []

    def keep(array: Array) -> Any:
        buffers.append(subject.place(array))
        return buffers[0]

    marker = np.full(whole.shape, 2.0, whole.dtype)
    out = layout(marker, keep)
    subject.call(*operands, out=out)
    tally.check(f"{kind} out {label}", fetch(out), whole)
    # Put the marker back where the view is: then all of the buffer is as it was.
    before: list[Array] = []

    def remember(array: Array) -> Array:
        before.append(np.array(array))
        return before[0]

    layout(marker, remember)
    bit_patterns(out)[...] = bit_patterns(subject.place(marker))
    tally.check(f"{kind} around {label}", fetch(buffers[0]).reshape(before[0].shape), before[0], draw=False)


INVARIANCE: tuple[Property, ...] = (
    Property(
        "repeatability",
        "repeat",
        "Does the same call give the same bits every time?",
        "rows of the result",
        repeatability,
    ),
    Property("batch size", "batch", "Has a row the same bits in a batch of any size?", "rows of the batch", batch_size),
    Property("row position", "row", "Has a row the same bits wherever it stands?", "positions", row_position),
    Property(
        "neighbours",
        "nbr",
        "Do NaN and infinities in other rows stay there?",
        "rows; grey ones are hostile",
        neighbours,
    ),
    Property("chunking", "chunk", "Do chunks put together equal the whole?", "rows; a gap opens a chunk", chunking),
    Property("padding", "pad", "Does padding with zeros change nothing?", "rows of the result", padding),
    Property("layouts", "layout", "Is the result the same from and into any layout?", "rows of the result", layouts),
)
