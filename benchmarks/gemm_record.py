"""What a record of products holds: the sources that it depends on, how its rows are told apart and merged, and how far
a result may be off."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detkern.measure import records, shapes

__all__ = ["LARGEST_ERROR", "key", "merged", "sources"]

LARGEST_ERROR = 0.03


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """`Product.key` of a row."""
    return row["name"], row["m"], row["op"], row["contract"], row["type"]


def merged(
    kept: list[dict[str, Any]], new: list[dict[str, Any]], layers: Iterable[shapes.Layer]
) -> list[dict[str, Any]]:
    """Rows kept and rows new, which replace them, in the order of the shapes file."""
    rows = {key(row): row for row in (*kept, *new)}
    place = {layer.name: index for index, layer in enumerate(layers)}
    ops = {"forward": 0, "da": 1, "db": 2}
    return sorted(
        rows.values(),
        key=lambda row: (row["type"], row["contract"], ops[row["op"]], place.get(row["name"], len(place)), row["m"]),
    )


def sources() -> list[Path]:
    """What a row's time depends on here: the kernels, the tile tables and what reads them."""
    folder = records.ROOT / "detkern" / "cu"
    names = ("gemm_kernels", "gemm_tile", "geometry", "tile_choice", "time_model")
    return [*records.product_sources(), *(folder / f"{name}.py" for name in names)]
