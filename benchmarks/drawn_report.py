"""Targets and tables of a record of drawn products: `python -m benchmarks.drawn_report [RECORD]`. Needs no GPU.

Reads gemm-drawn.json (or gemm-drawn-again.json) and writes a .md beside it. A ratio is a row's median over the turns of
detkern's time over the peer's; means are geometric, percentiles are the nearest rank. Products whose chain alone takes
more than LONG_CHAIN of cuBLAS's time are apart, against the chain and CHAIN_ALLOWANCE_US. Ends with status 1 unless
every target is met over all that was drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .drawn_record import done

__all__ = [
    "RANGES",
    "Figures",
    "Target",
    "chain_us",
    "figures",
    "is_long",
    "markdown",
    "percentile",
    "report",
    "targets",
]

Row = dict[str, Any]

# (first M, last M, what the geometric mean over cuBLAS may be) of forward products, and of each of dX and dW with the
# p99
RANGES = ((1, 64, 0.74), (65, 256, 0.88), (257, 1023, 0.95), (1024, 1 << 31, 0.97))
FORWARD_P99, FORWARD_WORST = 1.12, 1.25
GRADIENT_RANGES = ((128, 1023, 1.02, 1.25), (1024, 1 << 31, 1.00, 1.15))
F32_MEAN = 1.10
BEST_OF_LIST = 0.03  # more, over the best of cuBLASLt's list
REGRET_MEAN, REGRET_P99 = 1.01, 1.08

LONG_CHAIN = 0.8
CHAIN_ALLOWANCE_US = 2.0

# docs/hopper.md, "A chain": a step of 16 k takes 16.6 + n / 4 cycles, n the columns of a wgmma, of which there are at
# least 8. 7168 k took 4.2 µs so: at the 1.98 GHz that an H200 goes to where it may.
_CYCLES, _CYCLES_A_COLUMN, _LEAST_COLUMNS = 16.6, 1 / 4, 8
_CYCLES_A_US = 1980.0


def chain_us(k: int) -> float:
    """The least time of a chain of k summands, which nothing can divide, without the start of a grid."""
    return math.ceil(k / 16) * (_CYCLES + _CYCLES_A_COLUMN * _LEAST_COLUMNS) / _CYCLES_A_US


def _summands(row: Row) -> int:
    return int({"forward": row["k"], "da": row["n"], "db": row["m"]}[row["op"]])


def is_long(row: Row) -> bool:
    """Whether the chain alone takes more than LONG_CHAIN of cuBLAS's time."""
    return bool(chain_us(_summands(row)) > LONG_CHAIN * row["cublas_us"])


@dataclass(frozen=True)
class Figures:
    """Of some ratios."""

    count: int
    mean: float
    p90: float
    p99: float
    worst: float


def figures(ratios: Iterable[float]) -> Figures | None:
    """None of none."""
    ordered = sorted(ratios)
    if not ordered:
        return None

    mean = statistics.geometric_mean(ordered)
    return Figures(len(ordered), mean, percentile(ordered, 0.9), percentile(ordered, 0.99), ordered[-1])


def percentile(ordered: Sequence[float], part: float) -> float:
    """Of numbers in ascending order the nearest rank."""
    return ordered[math.ceil(part * len(ordered)) - 1]


@dataclass(frozen=True)
class Target:
    """What a figure may be at most. value: None where nothing of it was measured."""

    what: str
    limit: float
    value: float | None

    @property
    def met(self) -> bool:
        """Within the limit."""
        return self.value is not None and self.value <= self.limit


def _timed(rows: Iterable[Row], part: str) -> list[Row]:
    return [row for row in rows if row["part"] == part and "ratio" in row]


def _inside(rows: Iterable[Row], first: int, last: int) -> list[Row]:
    return [row for row in rows if first <= row["m"] <= last]


def _range(first: int, last: int) -> str:
    return f"M ≥ {first}" if last == 1 << 31 else f"M {first}–{last}"


# The ratio of a row over each peer that targets are about, by what reports call the peer, with what limits are more
# over it.
_OVER = (("cuBLAS", "ratio", 0.0), ("cuBLASLt's best", "cublaslt_ratio", BEST_OF_LIST))


def targets(rows: Sequence[Row]) -> list[Target]:
    """Every target. Those over the best of cuBLASLt's list are there where that was measured."""
    found: list[Target] = []

    def add(what: str, limit: float, of: Figures | None, name: str) -> None:
        found.append(Target(f"{what}: {name}", limit, None if of is None else getattr(of, name)))

    for peer, name, more in _OVER:
        if not any(name in row for row in rows):
            continue
        for part, title in (("forward", "forward"), ("near", "forward near multiples of 64")):
            short = [row for row in _timed(rows, part) if not is_long(row) and name in row]
            for first, last, mean in RANGES:
                of = figures(row[name] for row in _inside(short, first, last))
                what = f"{title}, {_range(first, last)}, over {peer}"
                if part == "forward":
                    add(what, mean + more, of, "mean")
                add(what, FORWARD_P99 + more, of, "p99")
                add(what, FORWARD_WORST + more, of, "worst")
    for part, title in (("da", "dX"), ("db", "dW")):
        short = [row for row in _timed(rows, part) if not is_long(row)]
        for first, last, mean, p99 in GRADIENT_RANGES:
            of = figures(row["ratio"] for row in _inside(short, first, last))
            add(f"{title}, {_range(first, last)}", mean, of, "mean")
            add(f"{title}, {_range(first, last)}", p99, of, "p99")
    for accumulate, title in ((False, "new"), (True, "accumulated")):
        short = [row for row in _timed(rows, "db_f32") if row["accumulate"] == accumulate and not is_long(row)]
        add(f"dW into float32, {title}", F32_MEAN, figures(row["ratio"] for row in short), "mean")
    of = figures(row["regret"] for row in rows if "regret" in row)
    # The mean of what a choice costs; of ratios that are 1 or a little more the two means are the same to three digits.
    add("regret", REGRET_MEAN, of, "mean")
    add("regret", REGRET_P99, of, "p99")
    return found


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    heads = list(head)
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]


def _cells(of: Figures | None) -> list[str]:
    if of is None:
        return ["0", "–", "–", "–", "–"]
    return [str(of.count), *(f"{value:.3f}" for value in (of.mean, of.p90, of.p99, of.worst))]


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """What is reported apart, by range of M, without long chains."""
    kinds: list[tuple[str, Callable[[Row], bool]]] = [
        ("forward", lambda row: row["part"] == "forward"),
        ("forward, M near multiples of 64", lambda row: row["part"] == "near"),
        ("dX", lambda row: row["part"] == "da"),
        ("dW", lambda row: row["part"] == "db"),
        ("dW into float32", lambda row: row["part"] == "db_f32" and not row["accumulate"]),
        ("dW accumulated in float32", lambda row: row["part"] == "db_f32" and row["accumulate"]),
    ]
    short = [row for row in rows if "ratio" in row and not is_long(row)]
    return [
        (f"{title}, {_range(first, last)}", inside)
        for title, of_kind in kinds
        for first, last, _ in RANGES
        if (inside := [row for row in _inside(short, first, last) if of_kind(row)])
    ]


def _lines(rows: Iterable[Row], name: str) -> list[list[str]]:
    return [
        [row["name"], row["part"], str(row["m"]), str(row["n"]), str(row["k"]), f"{row[name]:.3f}",
         f"{row['detkern_us']:.2f}", f"{row['cublas_us']:.2f}", row.get("tile", ""), row.get("best_tile", "")]
        for row in rows
    ]  # fmt: skip


_HEAD = ("layer", "part", "M", "N", "K", "ratio", "detkern µs", "cuBLAS µs", "tile", "best tile")
_PEERS = {"ratio": "cuBLAS", "cublaslt_ratio": "cuBLASLt's best", "cublas_no_split_ratio": "cuBLAS without split-K",
          "vllm_triton_ratio": "vLLM's Triton kernel"}  # fmt: skip


def markdown(record: dict[str, Any]) -> str:
    """The record as tables."""
    rows: list[Row] = record["rows"]
    timed = [row for row in rows if "ratio" in row]
    long = [row for row in timed if is_long(row)]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        f"# Drawn products on {record['gpu']}",
        "",
        (f"Seed {record['seed']}, {len(timed)} of {record['count']} products. Driver {record['driver']}; {versions}. "
        f"`{record['command']}`."),
        ("Written by `python -m benchmarks.drawn_report`. Layers of models.toml, M log-uniform from 1 to 16,384 "
        "(gradients: from 128)."),
        "A ratio is detkern's time over the peer's, the median over turns in one process; means are geometric.",
        "",
        *_table(("target", "at most", "value", ""), (
            [one.what, f"{one.limit:.2f}", "–" if one.value is None else f"{one.value:.3f}",
                "met" if one.met else "missed"]
            for one in targets(rows)
        )),
    ]  # fmt: skip
    for name, peer in _PEERS.items():
        if any(name in row for row in timed):
            lines += [f"## Over {peer}", ""]
            if name != "ratio" and record.get("compare") is not None:
                lines += [f"Of the first {record['compare']} products drawn.", ""]
            lines += _table(
                ("products", "count", "mean", "p90", "p99", "worst"),
                (
                    [title, *_cells(figures(row[name] for row in inside if name in row))]
                    for title, inside in _groups(rows)
                ),
            )
    kinds = sorted({row["layer"] for row in timed})
    lines += ["## By layer, over cuBLAS", ""]
    lines += _table(
        ("forward", "count", "mean", "p90", "p99", "worst"),
        (
            [kind, *_cells(figures(row["ratio"] for row in timed if row["layer"] == kind and _is_forward(row)))]
            for kind in kinds
        ),
    )
    over_chain = [row | {"over": row["detkern_us"] / _allowed(row)} for row in long]
    lines += [f"## Chains that take more than {LONG_CHAIN} of cuBLAS's time", "",
              f"detkern's time over that of the chain and {CHAIN_ALLOWANCE_US:g} µs, and over cuBLAS's.",
              ""]  # fmt: skip
    lines += _table(
        ("over", "count", "mean", "p90", "p99", "worst"),
        [
            ["chain", *_cells(figures(row["over"] for row in over_chain))],
            ["cuBLAS", *_cells(figures(row["ratio"] for row in long))],
        ],
    )
    worst = sorted(over_chain, key=lambda row: -row["over"])[:10]
    lines += _table((*_HEAD[:5], "over the chain", *_HEAD[6:]), _lines(worst, "over"))
    short = sorted((row for row in timed if not is_long(row)), key=lambda row: -row["ratio"])
    lines += ["## The slowest, over cuBLAS", "", *_table(_HEAD, _lines(short[:60], "ratio"))]
    chosen = sorted((row for row in timed if row.get("regret", 1.0) > 1.02), key=lambda row: -row["regret"])
    lines += ["## Regret above 1.02", "", *_table(_HEAD, _lines(chosen, "regret"))]
    if refused := {(name, reason) for row in rows for name, reason in row.get("refused", {}).items()}:
        lines += ["## Not served", "", *(f"- {name}: {reason}" for name, reason in sorted(refused)), ""]
    return "\n".join(lines)


def _is_forward(row: Row) -> bool:
    """Whether it is a forward product without a long chain."""
    return row["op"] == "forward" and not is_long(row)


def _allowed(row: Row) -> float:
    return chain_us(_summands(row)) + CHAIN_ALLOWANCE_US


def report(path: Path) -> int:
    """Write the tables beside a record and print the targets. Returns 1 unless all are met over all that was drawn."""
    record = json.loads(path.read_text())
    rows: list[Row] = record["rows"]
    path.with_suffix(".md").write_text(markdown(record))
    found = targets(rows)
    for title, inside in _groups(rows):
        of = figures(row["ratio"] for row in inside)
        assert of is not None
        print(f"{title:44} {of.count:5}  mean {of.mean:.3f}  p90 {of.p90:.3f}  p99 {of.p99:.3f}  worst {of.worst:.3f}")
    for one in found:
        value = "–" if one.value is None else f"{one.value:.3f}"
        print(f"{one.what:64} {value:>6}  at most {one.limit:.2f}  {'met' if one.met else 'missed'}")
    wrong = [row for row in rows if "error" in row]
    for row in wrong:
        print(f"WRONG: {row['index']} {row['name']} {row['part']} M {row['m']}: {row['error']}")
    left = record["count"] - len(rows)
    counted = ", ".join(f"{name} {count}" for name, count in done(rows).items())
    print(f"{path}: {counted}" + (f"; {left} of {record['count']} products are not measured" if left else ""))
    return int(bool(left or wrong) or not all(one.met for one in found))


def main() -> int:
    """Report on a record."""
    parser = argparse.ArgumentParser(description="Targets and tables of a record of drawn products.")
    default = Path(__file__).parent / "results" / "h200" / "gemm-drawn.json"
    parser.add_argument("record", nargs="?", type=Path, default=default, help=f"default: {default.name} of the H200")
    arguments = parser.parse_args()
    if not arguments.record.exists():
        print(f"there is no record {arguments.record}")
        return 1
    return report(arguments.record)


if __name__ == "__main__":
    sys.exit(main())
