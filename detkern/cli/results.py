"""What a check found: counts, the first mismatch, and a picture of what was compared."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .calls import CallSubject
from .compare import Mismatch, bits, compare
from .subject import Array, Subject

__all__ = ["Cell", "Grid", "Histogram", "Result", "Tally", "Trial"]

BANDS = 24  # cells across a picture
ROWS = 12  # rows down a picture; rows with a mismatch are drawn beyond that too
SHADES = 6


@dataclass(frozen=True)
class Cell:
    """A band of rows of one result. shade: from a checksum of the bits of its first compared row, so equal bits look
    equal; None where nothing is compared (a hostile row, say). opens: a new chunk begins here."""

    shade: int | None
    wrong: bool = False
    opens: bool = False


@dataclass
class Grid:
    """One row of cells a trial."""

    across: str
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)

    def add(self, label: str, cells: list[Cell]) -> None:
        if len(self.rows) < ROWS or (any(cell.wrong for cell in cells) and len(self.rows) < 2 * ROWS):
            self.rows.append((label, cells))


@dataclass
class Histogram:
    """How large errors are: `counts[i]` of them in (2^(i - len), 2^(i - len + 1)] of the bound, with the rest in
    `exact` (no error at all), `below` and `above` the bound."""

    counts: list[int]
    exact: int = 0
    below: int = 0
    above: int = 0


@dataclass(frozen=True)
class Trial:
    """One comparison of a property: what was varied, and how many elements were compared and differ.

    nan_patterns: those of `mismatches` that are NaN on both sides, with another sign or payload.
    """

    label: str
    compared: int
    mismatches: int
    nan_patterns: int = 0


@dataclass
class Result:
    """The outcome of one property on one subject."""

    subject: Subject | CallSubject
    name: str
    trials: list[Trial]
    picture: Grid | Histogram
    first: Mismatch | None = None
    first_trial: str | None = None
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    offered: bool = True
    seconds: float = 0.0

    @property
    def compared(self) -> int:
        return sum(trial.compared for trial in self.trials)

    @property
    def mismatches(self) -> int:
        return sum(trial.mismatches for trial in self.trials)

    @property
    def nan_patterns(self) -> int:
        return sum(trial.nan_patterns for trial in self.trials)

    @property
    def only_nan_patterns(self) -> bool:
        """Whether it failed in nothing but the sign or payload of NaNs."""
        return self.error is None and 0 < self.mismatches == self.nan_patterns

    @property
    def status(self) -> str:
        """ "passed", "FAILED", or "not offered" where the contract has no such thing."""
        if self.error is not None or self.mismatches:
            return "FAILED"
        if not self.offered:
            return "not offered"
        # A check that compared nothing has shown nothing.
        return "passed" if self.compared else "FAILED"

    def reasons(self) -> list[str]:
        """Why it failed, in a few lines."""
        lines = [] if self.error is None else [self.error]
        if self.mismatches and self.first is not None:
            differ = f"{self.mismatches:,} of {self.compared:,} elements differ"
            if self.nan_patterns:
                which = "all" if self.only_nan_patterns else f"{self.nan_patterns:,}"
                differ += f", {which} of them NaN on both sides with another sign or payload"
            lines += [f"{differ}; the first, in '{self.first_trial}':", f"  {self.first}"]
        if not self.compared and self.error is None:
            lines.append("nothing was compared")
        return lines


class Tally:
    """Collects the comparisons of one property."""

    def __init__(self, subject: Subject | CallSubject, name: str, across: str, extent: int) -> None:
        """across, extent: what the cells of the picture stand for,
        and how many there are of them (rows of the result)."""
        self.result = Result(subject, name, [], Grid(across))
        self._band = max(1, -(-extent // BANDS))

    def note(self, text: str) -> None:
        if text not in self.result.notes:
            self.result.notes.append(text)

    def check(
        self,
        label: str,
        got: Array,
        want: Array,
        *,
        axis: int = 0,
        only: Array | None = None,
        opens: tuple[int, ...] = (),
        draw: bool = True,
    ) -> None:
        """Compare two results. axis: which one the picture's cells run along. only: a boolean mask over that axis of
        the lines that count. opens: where along that axis a new chunk begins. draw: whether it has a row in the picture
        even where all is right."""
        wrong, trial = self._compare(label, got, want, axis, only)
        lines, faults = np.moveaxis(bits(got), axis, 0), np.moveaxis(wrong, axis, 0)
        cells = []
        # One width of band for all batch sizes, so that a row keeps its place; a wider one where it would not fit.
        band = max(self._band, -(-lines.shape[0] // BANDS))
        for start in range(0, lines.shape[0], band):
            piece = slice(start, start + band)
            counts = only is None or bool(only[piece].any())
            first = start if only is None else start + int(np.argmax(only[piece]))
            shade = zlib.crc32(np.ascontiguousarray(lines[first]).tobytes()) % SHADES if counts else None
            cells.append(Cell(shade, bool(faults[piece].any()), any(piece.start <= o < piece.stop for o in opens)))
        if draw or wrong.any():
            self._grid.add(label, cells)
        self.result.trials.append(trial)

    def tile(self, row: str, label: str, got: Array, want: Array) -> None:
        """Compare two results and draw them as one cell of the picture's row `row`."""
        wrong, trial = self._compare(f"{row}, {label}", got, want, 0, None)
        cell = Cell(zlib.crc32(np.ascontiguousarray(bits(got)).tobytes()) % SHADES, bool(wrong.any()))
        for name, cells in self._grid.rows:
            if name == row:
                cells.append(cell)
                break
        else:
            self._grid.add(row, [cell])
        self.result.trials.append(trial)

    @property
    def _grid(self) -> Grid:
        assert isinstance(self.result.picture, Grid)
        return self.result.picture

    def _compare(self, label: str, got: Array, want: Array, axis: int, only: Array | None) -> tuple[Any, Trial]:
        """A mask of the wrong elements, and what the trial came to."""
        if got.shape == want.shape and got.dtype == want.dtype and only is not None:
            counted = np.expand_dims(only, tuple(i for i in range(got.ndim) if i != axis))
            got = np.where(counted, got, want)
            compared = int(np.count_nonzero(only)) * (got.size // max(1, got.shape[axis]))
        else:
            compared = got.size
        outcome = compare(got, want)
        if outcome.differing:
            # A difference in more than the sign or payload of NaNs is shown before those.
            more = outcome.differing > outcome.nan_patterns
            if self.result.first is None or (more and self.result.only_nan_patterns):
                self.result.first, self.result.first_trial = outcome.first, label
        return bits(got) != bits(want), Trial(label, compared, outcome.differing, outcome.nan_patterns)
