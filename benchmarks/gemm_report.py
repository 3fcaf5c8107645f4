"""Targets, tables and plots of a recorded GEMM run: `python -m benchmarks.gemm_report [RECORD]`. Needs no GPU.

Reads gemm.json and writes gemm.md and gemm-*.png beside it. Means are geometric, of each row's `ratio`: the median over
turns of detkern's time over that of cuBLAS. A target is met only if every row of shapes.toml that it is about is there.
Ends with status 1 unless all are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detkern.measure import shapes

__all__ = ["LIMIT_OF_ONE", "RANGES", "Result", "evaluate", "exceptions", "markdown", "plots", "report"]

Row = dict[str, Any]

# (first M, last M, at most, aim) of the forward products' mean
RANGES = ((1, 64, 0.80, 0.75), (65, 256, 0.90, 0.90), (257, 1023, 1.02, 1.00), (1024, 1 << 31, 1.00, 0.97))
GRADIENTS, TREE = 1.02, 1.40
LIMIT_OF_ONE = 1.05  # of any forward product or gradient

PEERS = {
    "cublas": "cuBLAS",
    "cublas_no_split": "cuBLAS, no split-K",
    "cublaslt": "cuBLASLt's best",
    "detkern_independent": "detkern, no dependent launch",
    "triton": "detkern, Triton",
    "vllm_triton": "vLLM's Triton kernel",
    "deep_gemm": "DeepGEMM",
    "sgemm_bi": "sgemm-bi",
}


@dataclass(frozen=True)
class Result:
    """How a target came out. value: a mean, or the number of rows above LIMIT_OF_ONE; None without rows."""

    what: str
    limit: float
    aim: float | None
    value: float | None
    rows: int
    wanted: int

    @property
    def met(self) -> bool:
        """Within the limit, and over all of the shapes."""
        return self.value is not None and self.value <= self.limit and self.rows == self.wanted

    @property
    def verdict(self) -> str:
        """For people."""
        if self.value is not None and self.value > self.limit:
            return "missed"
        return "met" if self.met else f"incomplete: {self.rows} of {self.wanted} rows"


def _mean(ratios: Iterable[float]) -> float | None:
    found = list(ratios)
    return statistics.geometric_mean(found) if found else None


def _timed(rows: Iterable[Row], dtype: str = "bfloat16") -> dict[tuple[Any, ...], Row]:
    """The rows that have times, by `Product.key`."""
    return {
        (row["name"], row["m"], row["op"], row["contract"], row["type"]): row
        for row in rows
        if "ratio" in row and row["type"] == dtype
    }


def _found(rows: Iterable[Row], all_shapes: shapes.Shapes, what: Iterable[str]) -> tuple[list[Row], int]:
    """The rows of those parts of shapes.toml, and how many there should be."""
    wanted = [product.key for layer in all_shapes.layers for product in shapes.products(layer, all_shapes, what)]
    timed = _timed(rows)
    return [timed[key] for key in wanted if key in timed], len(wanted)


def exceptions(rows: Iterable[Row], all_shapes: shapes.Shapes) -> list[Row]:
    """Forward products and gradients above LIMIT_OF_ONE, the worst first."""
    found, _ = _found(rows, all_shapes, shapes.OPS)
    return sorted((row for row in found if row["ratio"] > LIMIT_OF_ONE), key=lambda row: -row["ratio"])


def evaluate(rows: list[Row], all_shapes: shapes.Shapes) -> list[Result]:
    """Every target."""
    results = []
    forward, _ = _found(rows, all_shapes, ("forward",))
    for first, last, limit, aim in RANGES:
        inside = [row["ratio"] for row in forward if first <= row["m"] <= last]
        wanted = len(all_shapes.layers) * sum(first <= m <= last for m in all_shapes.m)
        results.append(Result(f"forward, {_range(first, last)}", limit, aim, _mean(inside), len(inside), wanted))
    gradients, wanted = _found(rows, all_shapes, ("da", "db"))
    value = _mean(row["ratio"] for row in gradients)
    results.append(Result(f"gradients, M = {all_shapes.training_m}", GRADIENTS, None, value, len(gradients), wanted))
    tree, wanted = _found(rows, all_shapes, ("tree",))
    value = _mean(row["ratio"] for row in tree)
    results.append(Result(f"tree-mma16, M = {all_shapes.training_m}", TREE, None, value, len(tree), wanted))
    every, wanted = _found(rows, all_shapes, shapes.OPS)
    above = len(exceptions(rows, all_shapes)) if every else None
    results.append(Result(f"rows above {LIMIT_OF_ONE}", 0, None, above, len(every), wanted))
    return results


def _range(first: int, last: int) -> str:
    if first == 1:
        return f"M ≤ {last}"
    return f"M ≥ {first}" if last == 1 << 31 else f"M {first}–{last}"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    heads = list(head)
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(line) + " |" for line in lines),
        "",
    ]


def _targets(results: Iterable[Result]) -> list[str]:
    lines = []
    for result in results:
        whole = isinstance(result.value, int)
        value = str(result.value) if whole else _number(result.value)
        aim = "" if result.aim is None else f"{result.aim:.2f}"
        lines.append(
            [result.what, value, str(int(result.limit)) if whole else f"{result.limit:.2f}", aim, result.verdict]
        )
    return _table(("time over cuBLAS", "geometric mean", "at most", "aim", ""), lines)


def _over(rows: Iterable[Row], above: str, below: str) -> float | None:
    """The geometric mean of one time over another, over the rows that have both."""
    return _mean(row[above] / row[below] for row in rows if above in row and below in row)


def _means(rows: list[Row], all_shapes: shapes.Shapes) -> list[str]:
    """Every peer over cuBLAS, and the reference line, in each range of M."""
    forward, _ = _found(rows, all_shapes, ("forward",))
    names = ["detkern", *(name for name in PEERS if name != "cublas" and any(f"{name}_us" in row for row in forward))]
    lines = []
    for first, last, _, _ in RANGES:
        inside = [row for row in forward if first <= row["m"] <= last]
        peers = [_number(_over(inside, f"{name}_us", "cublas_us"), 2) for name in names]
        reference = [_number(_over(inside, f"{name}_us", "reference_us"), 2) for name in ("detkern", "cublas")]
        lines.append([_range(first, last), *peers, *reference])
    heads = [PEERS.get(name, name) for name in names]
    return _table(["forward", *heads, "detkern over the reference line", "cuBLAS over it"], lines)


def _rows(rows: list[Row]) -> list[str]:
    peers = [name for name in PEERS if any(f"{name}_us" in row for row in rows)]
    head = ["op", "M", "detkern µs", *(f"{PEERS[name]} µs" for name in peers), "ratio", "turns from–to", "reference µs",
            "TFLOP/s", "GB/s", "tile"]  # fmt: skip
    lines = []
    for row in rows:
        op = row["op"] if row["contract"] == "mma16" else f"{row['op']}, {row['contract']}"
        if "ratio" not in row:
            lines.append([op, str(row["m"]), row.get("error", "–"), *("" for _ in head[3:])])
            continue
        lines.append(
            [
                op, str(row["m"]), _number(row["detkern_us"], 2),
                *(_number(row.get(f"{name}_us"), 2) for name in peers),
                _number(row["ratio"]), f"{row['ratio_low']:.3f}–{row['ratio_high']:.3f}",
                _number(row["reference_us"], 2), _number(row["tflops"], 1), _number(row["gb_per_s"], 0), row["tile"],
            ]
        )  # fmt: skip
    return _table(head, lines)


def markdown(record: dict[str, Any], all_shapes: shapes.Shapes) -> str:
    """The record as tables."""
    rows: list[Row] = record["rows"]
    dates = sorted({row["date"][:10] for row in rows if "date" in row})
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        f"# GEMM on {record['gpu']}",
        "",
        (f"Driver {record['driver']}; {versions}. Measured {' and '.join(dict.fromkeys(dates[:1] + dates[-1:]))}; "
        f"`{record['command']}`."),
        ("Written by `python -m benchmarks.gemm_report` from gemm.json. x[M, K] @ w[N, K].T (forward), dc @ w (da) and "
        "dc.T @ x (db),"),
        ("inside CUDA graphs, random operands rotating past twice the L2, peers in turn. Times are medians in µs; a "
        "ratio is the median"),
        ("over turns of detkern's time over cuBLAS's in the same turn. Reference line: the larger of bytes at 4.3 TB/s "
        "and operations at"),
        "790 TFLOP/s. Means of the first table are of ratios, those of the second of quotients of medians.",
        "",
        *_targets(evaluate(rows, all_shapes)),
        *_means(rows, all_shapes),
    ]  # fmt: skip
    above = exceptions(rows, all_shapes)
    if above:
        lines += [f"## Above {LIMIT_OF_ONE}", ""]
        lines += _table(
            ("shape", "op", "M", "N", "K", "ratio", "turns from–to", "detkern µs", "cuBLAS µs", "tile"),
            (
                [
                    row["name"], row["op"], str(row["m"]), str(row["n"]), str(row["k"]), _number(row["ratio"]),
                    f"{row['ratio_low']:.3f}–{row['ratio_high']:.3f}", _number(row["detkern_us"], 2),
                    _number(row["cublas_us"], 2), row["tile"],
                ]
                for row in above
            ),
        )  # fmt: skip
    refused = {(name, reason) for row in rows for name, reason in row.get("refused", {}).items()}
    if refused:
        lines += [
            "## Not served",
            "",
            *(f"- {PEERS.get(name, name)}: {reason}" for name, reason in sorted(refused)),
            "",
        ]
    for layer in all_shapes.layers:
        if own := [row for row in rows if row["name"] == layer.name and row["type"] == "bfloat16"]:
            lines += [f"## {layer.name}: N = {layer.n}, K = {layer.k}", "", *_rows(own)]
    if other := [row for row in rows if row["type"] != "bfloat16"]:
        for layer in all_shapes.layers:
            if own := [row for row in other if row["name"] == layer.name]:
                lines += [f"## {layer.name}, {own[0]['type']}: N = {layer.n}, K = {layer.k}", "", *_rows(own)]
    return "\n".join(lines)


def plots(record: dict[str, Any], all_shapes: shapes.Shapes, folder: Path) -> list[Path]:
    """Time over cuBLAS against M, a line a shape (gemm-forward.png); means of the peers (gemm-peers.png); gradients and
    tree by shape (gemm-training.png). Those without rows are left out."""
    from matplotlib.figure import Figure

    rows: list[Row] = record["rows"]
    forward, _ = _found(rows, all_shapes, ("forward",))
    result: list[Path] = []

    def save(figure: Any, name: str) -> None:
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
        result.append(folder / name)

    def over_m(axes: Any, title: str) -> None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(all_shapes.m, [str(m) for m in all_shapes.m], fontsize=6)
        axes.set_xlabel("M")
        axes.set_title(title, fontsize=9)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)

    if forward:
        models = list(dict.fromkeys(layer.model for layer in all_shapes.layers))
        panels = [[model] for model in models if sum(layer.model == model for layer in all_shapes.layers) > 1]
        if rest := [model for model in models if [model] not in panels]:
            panels.append(rest)
        columns = min(len(panels), 3)
        lines = -(-len(panels) // columns)
        figure = Figure(figsize=(5 * columns, 4.2 * lines), layout="constrained")
        places = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        for axes, members in zip(places, panels, strict=False):
            for layer in (layer for layer in all_shapes.layers if layer.model in members):
                points = [(row["m"], row["ratio"]) for row in forward if row["name"] == layer.name]
                axes.plot(
                    *zip(*points, strict=True) if points else ([], []),
                    marker=".",
                    label=f"{layer.name} {layer.n}×{layer.k}",
                )
            over_m(axes, ", ".join(members))
        figure.supylabel("detkern's time over that of cuBLAS", fontsize=8)
        save(figure, "gemm-forward.png")
        save(_peer_means(forward, all_shapes, over_m), "gemm-peers.png")
    training, _ = _found(rows, all_shapes, ("da", "db", "tree"))
    if training:
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        axes = figure.subplots()
        kinds = [("da", "mma16"), ("db", "mma16"), ("forward", "tree-mma16")]
        for index, (op, contract) in enumerate(kinds):
            ratios = {row["name"]: row["ratio"] for row in training if (row["op"], row["contract"]) == (op, contract)}
            places = [
                place + 0.27 * (index - 1) for place, layer in enumerate(all_shapes.layers) if layer.name in ratios
            ]
            axes.bar(places, [ratios[layer.name] for layer in all_shapes.layers if layer.name in ratios], 0.25,
                     label=op if contract == "mma16" else contract)  # fmt: skip
        names = [layer.name for layer in all_shapes.layers]
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=7)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"detkern's time over that of cuBLAS, M = {all_shapes.training_m}", fontsize=9)
        axes.legend(fontsize=7)
        save(figure, "gemm-training.png")
    return result


def _peer_means(forward: list[Row], all_shapes: shapes.Shapes, over_m: Callable[[Any, str], None]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in ("detkern", *PEERS, "reference"):
        points = [
            (m, mean)
            for m in all_shapes.m
            if (mean := _over((row for row in forward if row["m"] == m), f"{name}_us", "cublas_us")) is not None
        ]
        if points and name != "cublas":
            style: dict[str, Any] = {"linestyle": ":", "color": "black"} if name == "reference" else {"marker": "."}
            axes.plot(*zip(*points, strict=True), label=PEERS.get(name, name), **style)
    ticks = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3, 4]
    axes.set_yscale("log")
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
    axes.set_yticks([], minor=True)
    axes.set_ylabel("time over that of cuBLAS (1 = cuBLAS, lower is faster)", fontsize=8)
    over_m(axes, "geometric means over the shapes, forward")
    return figure


def report(path: Path, all_shapes: shapes.Shapes | None = None) -> int:
    """Write gemm.md and the plots beside a record, print the targets. Returns 1 unless all are met.

    Without matplotlib there are no plots, and that is said.
    """
    all_shapes = all_shapes or shapes.load()
    record = json.loads(path.read_text())
    (path.parent / "gemm.md").write_text(markdown(record, all_shapes))
    try:
        plots(record, all_shapes, path.parent)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("no plots: matplotlib is not installed; run python -m benchmarks.gemm_report where it is")
    results = evaluate(record["rows"], all_shapes)
    for result in results:
        value = str(result.value) if isinstance(result.value, int) else _number(result.value)
        print(f"{result.what:26} {value:>6}  at most {result.limit:<5g} {result.verdict}")
    for row in exceptions(record["rows"], all_shapes):
        print(f"above {LIMIT_OF_ONE}: {row['name']} {row['op']} M {row['m']}: {row['ratio']:.3f}  {row['tile']}")
    for row in record["rows"]:
        if "error" in row:
            print(f"WRONG: {row['name']} {row['op']} M {row['m']}: {row['error']}")
    print(path)
    return int(not all(result.met for result in results) or any("error" in row for row in record["rows"]))


def main() -> int:
    """Report on a record."""
    parser = argparse.ArgumentParser(description="Tables and plots of a recorded GEMM run.")
    default = Path(__file__).parent / "results" / "h200" / "gemm.json"
    parser.add_argument(
        "record", nargs="?", type=Path, default=default, help="default: benchmarks/results/h200/gemm.json"
    )
    arguments = parser.parse_args()
    if not arguments.record.exists():
        print(f"there is no record {arguments.record}")
        return 1
    return report(arguments.record)


if __name__ == "__main__":
    sys.exit(main())
