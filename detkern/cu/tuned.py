"""The tiles that measured fastest on whole shapes: tiles/tuned.json, which `python -m benchmarks.tune` writes.

A row of the file is a contract, the load paths of A and B, n and k, and for each m that was measured the label of the
fastest tile. The file also names the GPU, its multiprocessors, the date and the command. mma16 on Hopper does not look
here: time_model.py chooses its tiles.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

__all__ = ["labels"]

_FILE = Path(__file__).parent / "tiles" / "tuned.json"


@functools.cache
def _rows() -> tuple[int, dict[tuple[str, str, int, int], tuple[tuple[int, str], ...]]]:
    """(multiprocessors, {(contract, loads, n, k): ((m, label), ...) with m ascending})."""
    content = json.loads(_FILE.read_text())
    rows = {
        (row["contract"], row["loads"], row["n"], row["k"]): tuple((m, label) for m, label in row["tiles"])
        for row in content["rows"]
    }
    return content["multiprocessors"], rows


def labels(contract: str, loads: str, m: int, n: int, k: int, multiprocessors: int) -> tuple[str, ...]:
    """The tiles to choose from: the fastest at this m, or those at the measured m on either side of it; none where this
    (n, k) was not measured, or not on a GPU of as many multiprocessors, or where m is less than half of what was
    (gradients are measured at one large m; its tile leaves most of the GPU idle at a small one).

    loads: a letter each for A and B, K (K_MAJOR) or M (MN_MAJOR).
    """
    measured_on, rows = _rows()
    found = rows.get((contract, loads, n, k)) if multiprocessors == measured_on else None
    if not found or 2 * m < found[0][0]:
        return ()
    below = [label for size, label in found if size <= m][-1:]
    above = [label for size, label in found if size >= m][:1]
    return tuple(dict.fromkeys(below + above))
