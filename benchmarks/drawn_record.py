"""Records of drawn products: the seed that a visit measures, what is left of it, and the visit itself.

A record draws a seed of its own and keeps it until all its products are there: a set cannot be left for a kinder one. A
record of other kernels, tables, drivers or packages is no longer continued: the next visit draws a new seed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detkern.measure import records
from detkern.measure.drawn import FITTING_SEEDS, Drawn, draw
from detkern.measure.pool import Pool

from .gemm_record import sources as product_sources

__all__ = ["COUNT", "Plan", "Visit", "description", "done", "plan", "sources"]

COUNT = 4000  # products: 2,000 of them forward with a log-uniform M
SAVE_EVERY = 50  # rows
ERRORS_IN_A_ROW = 3  # after which a visit ends: the device is not what it should be

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a visit measures. seed, count: of the record. rows: of earlier visits, by index.
    left: what is measured now."""

    seed: int
    count: int
    rows: dict[int, Row]
    left: list[int]


def plan(
    made: dict[str, Any] | None,
    rows: list[Row],
    requested: int | None = None,
    count: int | None = None,
    missing: bool = False,
    whole: Callable[[Row], bool] = lambda row: True,
) -> Plan:
    """What a visit measures, where the record is `made` and `rows` are those of its rows that still hold.

    requested, count: the seed and the number of products asked for, or None. whole: whether a row has all that it
    should have; one with an error never has. Raises ValueError for a seed that tables were fitted on, and for another
    one than that of a record that is not complete.
    """
    if requested in FITTING_SEEDS:
        raise ValueError(f"seed {requested} is one that tables are fitted on (benchmarks/fit.py): choose another one")
    if made is not None and rows:
        by_index = {row["index"]: row for row in rows}
        wanted = count or made["count"]
        complete = {index for index, row in by_index.items() if "error" not in row and whole(row)}
        left = [index for index in range(wanted) if index not in complete]
        if left and requested not in (None, made["seed"]):
            raise ValueError(f"the record is of seed {made['seed']} and not complete: --missing continues that one")
        if left or missing:
            return Plan(made["seed"], wanted, by_index, left if missing else list(range(wanted)))
    seed = requested
    while seed is None or seed in FITTING_SEEDS:
        seed = secrets.randbelow(2**32)
    return Plan(seed, count or COUNT, {}, list(range(count or COUNT)))


def sources() -> list[Path]:
    """What a row depends on here: the kernels and the choice of a tile, and what is drawn."""
    folder = records.ROOT / "detkern" / "measure"
    return [*product_sources(), folder / "drawn.py", folder / "models.py", folder / "models.toml"]


def description(drawn: Drawn) -> dict[str, Any]:
    """What a row says of its product."""
    product, layer = drawn.product, drawn.product.layer
    return {
        "index": drawn.index, "part": drawn.part, "name": layer.name, "layer": drawn.kind, "op": product.op,
        "m": product.m,
        "n": layer.n, "k": layer.k, "type": product.dtype, "contract": product.contract,
        "output": "float32" if drawn.output_f32 else product.dtype, "accumulate": drawn.accumulate,
    }  # fmt: skip


def done(rows: Iterable[Row]) -> dict[str, int]:
    """How many products there are figures of: all in all, and of each peer's time and of the regret."""
    counts = {"products": 0}
    for row in rows:
        if "error" in row:
            continue
        counts["products"] += 1
        for name in row:
            if name == "regret" or name.endswith("_us"):
                peer = name.removesuffix("_us")
                counts[peer] = counts.get(peer, 0) + 1
    return counts


class Visit:
    """One run that adds to a record.

    arguments: `output`, `drawn`, `count`, `missing` and `seconds` of the command line. what: the record's name. facts:
    `name` and `driver` of the device. about: what else the record says. whole: as in `plan`. Raises ValueError as
    `plan` does.
    """

    def __init__(
        self, arguments: argparse.Namespace, what: str, facts: Any, more: dict[str, str], about: dict[str, Any],
        whole: Callable[[Row], bool] = lambda row: True,
    ) -> None:  # fmt: skip
        self._what, self._facts, self._more, self._about = what, facts, more, about
        self._deadline = time.monotonic() + arguments.seconds
        usual = records.RESULTS / records.slug(facts.name)
        self._folder: Path = arguments.output or usual
        before = next((path for folder in (self._folder, usual) if (path := folder / f"{what}.json").exists()), None)
        made, kept = None, []
        if before is not None:
            made = json.loads(before.read_text())
            kept = records.kept(before, gpu=facts.name, driver=facts.driver, sources=sources(), more=more)
        requested = None if arguments.drawn == "new" else int(arguments.drawn)
        wanted = plan(made, kept, requested, arguments.count, arguments.missing, whole)
        self.seed, self.count, self.rows, self.left = wanted.seed, wanted.count, wanted.rows, wanted.left
        print(f"seed {self.seed}, {self.count} products, {len(self.left)} to measure", flush=True)

    @property
    def path(self) -> Path:
        """Where the record is written."""
        return self._folder / f"{self._what}.json"

    def run(
        self, device: Any, measure: Callable[[Drawn, Pool], Row], show: Callable[[Row], None], cache_bytes: int
    ) -> None:
        """Measure what is left until the time is over; `left` is then what still is.

        measure: the row of a product, whose operands come from the pool. show: is given each row. cache_bytes: of the
        cache that operands rotate past.
        """
        begin = time.monotonic()
        todo = [draw(self.seed, index) for index in self.left]
        try:
            if todo and begin < self._deadline:
                with device.active():
                    self._sweep(todo, Pool(todo, cache_bytes, device.name), measure, show)
        finally:
            if self.rows:
                self._save()
        more = ": --missing continues" if self.left else ""
        print(f"{time.monotonic() - begin:.0f} s; {len(self.left)} products left{more}", flush=True)

    def _sweep(
        self, todo: list[Drawn], pool: Pool, measure: Callable[[Drawn, Pool], Row], show: Callable[[Row], None]
    ) -> None:
        failed = 0
        for done, drawn in enumerate(todo, 1):
            if time.monotonic() >= self._deadline:
                return
            try:
                row = measure(drawn, pool)
                failed = 0
            except Exception as error:
                failed += 1
                if failed == ERRORS_IN_A_ROW:
                    raise
                row = description(drawn) | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
            self.rows[drawn.index] = row | {"date": records.now()}
            self.left.remove(drawn.index)
            show(row)
            if done % SAVE_EVERY == 0:
                self._save()

    def _save(self) -> None:
        rows = [self.rows[index] for index in sorted(self.rows)]
        records.write(
            self._what, rows, gpu=self._facts.name, driver=self._facts.driver, sources=sources(), folder=self._folder,
            more=self._more, about={"seed": self.seed, "count": self.count, "done": done(rows)} | self._about,
        )  # fmt: skip
