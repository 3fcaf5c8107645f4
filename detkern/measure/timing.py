"""Timing GPU work: calls captured in CUDA graphs, the graphs of several peers replayed in turn.

A graph holds enough calls, and a turn enough replays, that neither the gap between two graphs nor the events around a
turn weigh. Each call of a graph should have operands of its own, together past twice the L2 cache (`sets`): a weight
that the last call left in the cache is not what a model streams.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

__all__ = [
    "TURNS",
    "WARM",
    "Captured",
    "Cuda",
    "Device",
    "capture",
    "fastest",
    "interleave",
    "leave_if",
    "medians",
    "missing",
    "no_torch",
    "rough",
    "sets",
]

TURNS = 7
WARM = 2  # turns that are not counted

GRAPH_US = 1000.0  # what a graph should take, as far as MOST_CALLS allows
TURN_US = 2000.0  # what a turn of one peer should take
ROUGH_REPLAYS = 2
# Of alternatives: how many of the roughly fastest are timed in turn, and how.
CLOSEST, CLOSEST_TURNS, CLOSEST_WARM, CLOSEST_TURN_US = 3, 5, 1, 700.0
MOST_CALLS = 64  # in a graph; capturing one costs the host tens of µs
CACHE_BYTES = 60_000_000  # the L2 of an H200, where a device says less

Calls = Sequence[Callable[[], Any]]


def missing() -> str | None:
    """What a measurement needs and is not here: PyTorch, or a CUDA device that it and detkern's kernels run on; else
    None."""
    from ..cu import device

    if reason := no_torch() or device.missing(0):
        return reason
    import torch

    return None if torch.cuda.is_available() else f"PyTorch {torch.__version__} shows no CUDA device"


def no_torch() -> str | None:
    """That PyTorch is not installed, or None."""
    from ..dispatch.requirements import Package, install

    return Package("torch", "PyTorch", install("bench")).missing()


def leave_if(reason: str | None) -> None:
    """End with status 2 and one sentence on standard error where something that a benchmark needs is not here."""
    if reason is not None:
        print(f"cannot run here: {reason}", file=sys.stderr)
        raise SystemExit(2)


class Device(Protocol):
    """What the timing needs of a device; `Cuda` is the one there is."""

    def graph(self, calls: Calls) -> Any:
        """The calls, captured: an object with replay()."""

    def mark(self) -> Any:
        """A point in the work that was enqueued."""

    def between(self, first: Any, second: Any) -> float:
        """µs from one mark to another; waits for the second."""


class Cuda:
    """The current CUDA device of PyTorch."""

    name = "cuda"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()

    @property
    def cache_bytes(self) -> int:
        """The L2 cache, in bytes."""
        here: int = self._torch.cuda.get_device_properties(0).L2_cache_size
        return max(CACHE_BYTES, here)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Work inside goes to one stream that can be captured. cuBLAS keeps a workspace for each stream, so calls that
        were made here before a capture need no memory in it."""
        self._torch.cuda.synchronize()
        with self._torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()

    def graph(self, calls: Calls) -> Any:
        # Not torch.cuda.graph: it empties PyTorch's cache of memory each time, and a run captures a thousand graphs.
        self._torch.cuda.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            for call in calls:
                call()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture is spoilt: what spoilt it is the error to tell
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        second.synchronize()
        return 1000 * float(first.elapsed_time(second))


class Captured(NamedTuple):
    """A graph and the number of calls in it."""

    graph: Any
    calls: int


def sets(bytes_of_one: int, cache_bytes: int) -> int:
    """How many sets of operands pass twice the cache: at least 2."""
    return max(2, math.ceil(2 * cache_bytes / bytes_of_one))


def capture(device: Device, calls: Calls) -> Captured:
    """Run each call, then capture them in order, over and over, until the graph is long enough.

    Every call is in the graph equally often, whatever MOST_CALLS says, or the operands would not rotate.
    """
    calls[0]()  # compiles, and sets up what a library sets up once
    begin = device.mark()
    for call in calls:
        call()
    # Eager calls are bound by the host where they are short, so a graph may come out shorter than GRAPH_US.
    all_us = max(device.between(begin, device.mark()), 1.0)
    rounds = max(1, min(math.ceil(GRAPH_US / all_us), MOST_CALLS // len(calls)))
    return Captured(device.graph([*calls] * rounds), rounds * len(calls))


def interleave(
    device: Device,
    captured: Mapping[str, Captured],
    turns: int = TURNS,
    warm: int = WARM,
    turn_us: float = TURN_US,
) -> dict[str, list[float]]:
    """µs a call of each peer in each turn. A turn replays every peer's graph, each long enough to measure; each turn
    begins with another peer."""
    replays = {}
    for name, one in captured.items():
        begin = device.mark()
        one.graph.replay()
        replays[name] = max(1, math.ceil(turn_us / max(device.between(begin, device.mark()), 1.0)))
    times: dict[str, list[float]] = {name: [] for name in captured}
    for turn in range(warm + turns):
        names = list(
            itertools.islice(itertools.cycle(captured), turn % len(captured), turn % len(captured) + len(captured))
        )
        marks = {}
        for name in names:
            begin = device.mark()
            for _ in range(replays[name]):
                captured[name].graph.replay()
            marks[name] = begin, device.mark()
        if turn >= warm:
            for name, (begin, end) in marks.items():
                times[name].append(device.between(begin, end) / (replays[name] * captured[name].calls))
        else:
            device.between(*marks[names[-1]])
    return times


def medians(device: Device, peers: Mapping[str, Calls]) -> dict[str, float]:
    """Median µs a call of each peer, the peers in turn."""
    captured = {name: capture(device, calls) for name, calls in peers.items()}
    return {name: statistics.median(found) for name, found in interleave(device, captured).items()}


def rough(device: Device, captured: Captured) -> float:
    """µs a call, roughly: of a few replays on their own."""
    captured.graph.replay()  # the first one uploads the graph
    begin = device.mark()
    for _ in range(ROUGH_REPLAYS):
        captured.graph.replay()
    return device.between(begin, device.mark()) / (ROUGH_REPLAYS * captured.calls)


def fastest(device: Device, alternatives: Sequence[Calls]) -> int:
    """The place of the fastest of several ways to do the same. One that fails is passed over; raises the last error
    where all do, and ValueError where there is none."""
    found: dict[str, tuple[float, Captured]] = {}
    failed: RuntimeError | None = None
    for place, calls in enumerate(alternatives):
        try:
            captured = capture(device, calls)
            found[str(place)] = rough(device, captured), captured
        except RuntimeError as error:
            failed = error
    if not found:
        raise failed or ValueError("there is nothing to choose from")
    closest = sorted(found, key=lambda place: found[place][0])[:CLOSEST]
    if len(closest) > 1:
        kept = {place: found[place][1] for place in closest}
        times = interleave(device, kept, CLOSEST_TURNS, CLOSEST_WARM, CLOSEST_TURN_US)
        closest.sort(key=lambda place: statistics.median(times[place]))
    return int(closest[0])
