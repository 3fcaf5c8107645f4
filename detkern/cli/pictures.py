"""The small pictures of the HTML page, as inline SVG."""

from __future__ import annotations

from html import escape

from .results import SHADES, Cell, Grid, Histogram

__all__ = ["svg"]

_LABEL, _CELL, _ROW, _TOP = 112, 8, 11, 4
# Light to dark, one hue; a mismatch differs in hue, lightness and by its cross.
_BLUES = ("#d3e4f3", "#b5d1ea", "#90badd", "#6a9fcd", "#4a83ba", "#2f68a3")


def svg(picture: Grid | Histogram) -> str:
    """The picture as one <svg> element."""
    return _grid(picture) if isinstance(picture, Grid) else _histogram(picture)


def _open(width: int, height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' xmlns="http://www.w3.org/2000/svg" font-size="8" font-family="sans-serif"><title>{escape(title)}</title>'
    )


def _squares(places: list[tuple[int, int]], fill: str) -> str:
    """One path for all cells of a colour: a page holds a hundred pictures."""
    if not places:
        return ""
    side = _CELL - 1
    steps = "".join(f"M{x} {y}h{side}v{side}h-{side}z" for x, y in places)
    return f'<path fill="{fill}" d="{steps}"/>'


def _grid(grid: Grid) -> str:
    columns = max((len(cells) for _, cells in grid.rows), default=1)
    # A gap of two pixels opens a chunk; leave room for as many as any row has.
    gaps = max((sum(cell.opens for cell in cells) for _, cells in grid.rows), default=0)
    width, height = _LABEL + columns * _CELL + 2 * gaps + 4, _TOP + len(grid.rows) * _ROW + 12
    shades: list[list[tuple[int, int]]] = [[] for _ in range(SHADES)]
    wrong: list[tuple[int, int]] = []
    foreign: list[tuple[int, int]] = []
    texts = []
    for index, (label, cells) in enumerate(grid.rows):
        x, y = _LABEL, _TOP + index * _ROW
        texts.append(f'<text x="{_LABEL - 4}" y="{y + 7}" text-anchor="end">{escape(_short(label))}</text>')
        for cell in cells:
            x += 2 if cell.opens else 0
            _choose(cell, shades, wrong, foreign).append((x, y))
            x += _CELL
    crosses = "".join(f"M{x + 1} {y + 1}l5 5m0-5l-5 5" for x, y in wrong)
    return "".join(
        [
            _open(width, height, f"one row a trial, across: {grid.across}"),
            *(_squares(places, fill) for places, fill in zip(shades, _BLUES, strict=True)),
            _squares(foreign, "#8d8478"),
            _squares(wrong, "#c8102e"),
            f'<path stroke="#fff" stroke-width="1.4" d="{crosses}"/>' if crosses else "",
            f'<g fill="currentColor">{"".join(texts)}',
            f'<text x="{_LABEL}" y="{height - 3}">{escape(grid.across)} →</text></g></svg>',
        ]
    )


def _choose(
    cell: Cell, shades: list[list[tuple[int, int]]], wrong: list[tuple[int, int]], foreign: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    if cell.wrong:
        return wrong
    return foreign if cell.shade is None else shades[cell.shade]


def _short(label: str) -> str:
    return label if len(label) <= 26 else label[:25] + "…"


def _histogram(histogram: Histogram) -> str:
    bars = [histogram.exact, histogram.below, *histogram.counts, histogram.above]
    names = ["0", "…", *(f"{i - len(histogram.counts) + 1}" for i in range(len(histogram.counts))), ">"]
    step, tall, left = 14, 70, 8
    width, height = left + step * len(bars) + 8, tall + 34
    top = max(max(bars), 1)
    parts = [_open(width, height, "elements by error, as a power of two of the bound")]
    for index, (count, name) in enumerate(zip(bars, names, strict=True)):
        x = left + index * step
        # A bar of at least one pixel where there is anything at all.
        size = max(1, round(tall * count / top)) if count else 0
        fill = "#c8102e" if index == len(bars) - 1 else _BLUES[4]
        if size:
            parts.append(f'<rect x="{x}" y="{8 + tall - size}" width="{step - 2}" height="{size}" fill="{fill}"/>')
        parts.append(
            f'<text x="{x + step / 2 - 1}" y="{tall + 18}" text-anchor="middle" fill="currentColor">'
            f"{escape(name)}</text>"
        )
    bound = left + (len(bars) - 1) * step - 1
    parts.append(f'<path stroke="#c8102e" stroke-dasharray="3 2" d="M{bound} 4V{tall + 8}"/>')
    parts.append(
        f'<text x="{left}" y="{height - 4}" fill="currentColor">'
        "error as 2^x of the bound (dashed); 0: exact</text></svg>"
    )
    return "".join(parts)
