"""Whether drawn products have the bits of the general kernels and of the replay:
`python -m benchmarks.gemm --drawn --check-bits`.

Every element of each product is compared with that of a tile of the general kernel; and a part of it with the CPU
replay: up to 64 rows, the last 32 among them, by up to 512 columns, the last 256 among them, so that partial tiles are
in it. A row and a column are a product of their own under every contract, so the part is replayed alone. Compared on
the device as integers; both results are spoilt beforehand with different patterns, or hold the same values where a
product is accumulated. The record is gemm-drawn-bits.json, which keeps its seed until it is complete as the others do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from detkern.measure import peers, records
from detkern.measure.drawn import Drawn
from detkern.measure.pool import Pool, Set

from .drawn_record import Visit, description
from .forced import forced_calls, seen

__all__ = ["compare", "differs", "run"]

ROWS, LAST_ROWS = 64, 32
COLUMNS, LAST_COLUMNS = 512, 256
OTHER_POISON = 0xFE  # in every byte: another NaN that is not written

General = Callable[[Drawn, Set, Any], str]


def run_general(drawn: Drawn, one: Set, out: Any) -> str:
    """The product into `out` by the general kernel, on PyTorch's current stream; returns its tile."""
    from detkern.cu import gemm_tile, geometry, tile_choice
    from detkern.cu.device import describe

    problem, views = seen(drawn.product, [(one.a, one.b, out)], drawn.accumulate)
    general = gemm_tile.source_of(problem.contract).removesuffix(".cu")
    found = tile_choice.candidates(problem, describe(0).capability, geometry.load_paths(problem))
    tile = max((tile for tile in found if tile.table == general), key=lambda tile: tile["TILE_M"] * tile["TILE_N"])
    forced_calls(problem, tile, views)[0]()
    return str(tile)


def _places(size: int, most: int, last: int, seed: int) -> Any:
    """Up to `most` places of `size`, the last ones among them, in ascending order."""
    import torch

    if size <= most:
        return torch.arange(size)
    generator = torch.Generator().manual_seed(seed)
    some = torch.randperm(size - last, generator=generator)[: most - last]
    return torch.cat((some.sort().values, torch.arange(size - last, size)))


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def _differing_from_replay(drawn: Drawn, one: Set, before: Any, out: Any) -> tuple[int, int]:
    """(elements whose bits are not the replay's, elements compared). before: what `out` held, where it is added to."""
    import detkern

    product = drawn.product
    left = one.a.t() if product.trans_a else one.a
    right = one.b.t() if product.trans_b else one.b
    rows = _places(left.shape[0], ROWS, LAST_ROWS, drawn.index)
    columns = _places(right.shape[1], COLUMNS, LAST_COLUMNS, drawn.index + 1)
    there_rows, there_columns = rows.to(left.device), columns.to(left.device)

    def part(tensor: Any) -> Any:
        return tensor[there_rows][:, there_columns].cpu()

    replayed = part(out).clone() if before is None else part(before)
    detkern.gemm(
        left[there_rows].cpu(), right[:, there_columns].cpu(), out=replayed, accumulate=before is not None,
        contract=product.contract, backend="cpu",
    )  # fmt: skip
    return int((_bits(replayed) != _bits(part(out))).sum()), replayed.numel()


def compare(drawn: Drawn, pool: Pool, general: General = run_general) -> dict[str, Any]:
    """The row of a product.

    general: computes it into another result, and says by which tile.
    """
    import torch

    one = pool.sets(drawn)[0]
    before = None
    if drawn.accumulate:
        generator = torch.Generator(one.out.device).manual_seed(drawn.index)
        before = torch.randn(one.out.shape, generator=generator, device=one.out.device)
        one.out.copy_(before)
        other = before.clone()
    else:
        pool.spoil(one.out)
        other = torch.empty_like(one.out)
        other.view(torch.uint8).fill_(OTHER_POISON)
    peers.detkern_call(drawn.product, one.a, one.b, one.out, accumulate=drawn.accumulate)()
    tile = general(drawn, one, other)
    differing, compared = _differing_from_replay(drawn, one, before, one.out)
    return description(drawn) | {
        "elements": one.out.numel(), "differing_from_general": int((_bits(one.out) != _bits(other)).sum()),
        "replayed": compared, "differing_from_replay": differing, "general": tile,
    }  # fmt: skip


def differs(row: dict[str, Any]) -> bool:
    """Whether any bit does, or the product could not be computed."""
    return "error" in row or bool(row["differing_from_general"] or row["differing_from_replay"])


def run(arguments: argparse.Namespace, device: Any, facts: Any, more: dict[str, str]) -> int:
    """Compare and record. Returns 1 where a bit differs, or the time ran out.

    facts: `name`, `driver`, `capability` and `multiprocessors` of the device.
    """
    try:
        visit = Visit(arguments, "gemm-drawn-bits", facts, more, {})
    except ValueError as error:
        print(error)
        return 1

    def show(found: dict[str, Any]) -> None:
        if differs(found):
            print("DIFFERENT", records.shown(found), flush=True)

    # Each product needs one set of operands, wherever they lie.
    visit.run(device, compare, show, cache_bytes=1)
    rows = list(visit.rows.values())
    different = sum(map(differs, rows))
    elements = sum(found.get("elements", 0) for found in rows)
    print(
        f"{elements:,} elements of {len(rows)} products compared, {different} products differ, {len(visit.left)} are "
        f"left"
    )
    return int(bool(different or visit.left))
