"""Whether the kernel that a shape gets has the bits of the general one: `python -m benchmarks.gemm --check-bits`.

For every layer of shapes.toml and every M, forward under `mma16` and `tree-mma16` and both gradients: the result of
`detkern.gemm` against that of a tile of the general kernel, forced; and against the first rows of the product of the
largest M, which they must be; and 64 random rows (of that product; for the gradient of w, of each) against the CPU
replay. Compared on the device as integers; both results are spoilt beforehand with different patterns, so that an
element which neither kernel writes differs too. The record is gemm-bits.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from detkern.measure import peers, records, shapes
from detkern.measure.operands import POISON, Operands
from detkern.measure.shapes import Product

from .forced import contract_of, forced_call, tiles_of
from .gemm_record import key, merged, sources

__all__ = ["OTHER_POISON", "compare", "run", "run_general"]

OTHER_POISON = -2  # another NaN that is not written
REPLAYED_ROWS = 64


def run_general(product: Product, a: Any, b: Any, out: Any) -> str:
    """The product by the general kernel, on PyTorch's current stream; returns its tile. a, b: as `Product` has them."""
    from detkern.cu import gemm_tile

    general = gemm_tile.source_of(contract_of(product)).removesuffix(".cu")
    tile = max(
        (tile for tile in tiles_of(product, a, b, out) if tile.table == general),
        key=lambda tile: tile["TILE_M"] * tile["TILE_N"],
    )
    forced_call(product, tile, a, b, out)()
    return f"{general}.cu {tile}"


def differing_from_replay(product: Product, a: Any, b: Any, bits: Any) -> int:
    """Elements of 64 random rows of the result (all rows of fewer) whose bits are not the CPU replay's.
    bits: as int16."""
    import torch

    import detkern

    left, right = (x.t() if transposed else x for x, transposed in ((a, product.trans_a), (b, product.trans_b)))
    chosen = torch.randperm(left.shape[0], generator=torch.Generator().manual_seed(product.m))[:REPLAYED_ROWS]
    rows = left[chosen.to(left.device)].cpu()
    replayed = detkern.gemm(rows, right.cpu(), contract=product.contract, backend="cpu")
    return int((replayed.view(torch.int16) != bits[chosen.to(bits.device)].cpu()).sum())


def compare(
    products: Iterable[Product], operands: Operands, general: Callable[[Product, Any, Any, Any], str]
) -> list[dict[str, Any]]:
    """A row for each of a layer's products of one op and contract.

    general: computes a product of a and b into out, and says by which tile.
    """
    import torch

    import detkern

    def computed(product: Product) -> Any:
        a, b, out = (operands.rotating(product, name)[0] for name in (*product.operands, "out"))
        bits = out.view(torch.int16)
        bits.fill_(POISON)
        peers.detkern_call(product, a, b, out)()
        return bits

    ordered = sorted(products, key=lambda product: product.m)
    # x and dc of a smaller M are the first rows of those of the largest. For the gradient of w, M is what is summed
    # over.
    by_rows = ordered[-1].op != "db"
    largest = computed(ordered[-1]).clone() if by_rows else None
    rows = []
    for product in ordered:
        bits = computed(product)
        a, b, out = (operands.rotating(product, name)[0] for name in (*product.operands, "out"))
        other = torch.full_like(out.view(torch.int16), OTHER_POISON)
        tile = general(product, a, b, other.view(out.dtype))
        explained = detkern.explain(
            a, b, trans_a=product.trans_a, trans_b=product.trans_b, out=out, contract=product.contract
        )  # fmt: skip
        row = {
            "name": product.layer.name, "op": product.op, "m": product.m, "n": product.layer.n, "k": product.layer.k,
            "type": product.dtype, "contract": product.contract, "elements": bits.numel(),
            "differing_from_general": int((bits != other).sum()),
        }  # fmt: skip
        if largest is not None:
            row["differing_from_largest_m"] = int((bits != largest[: product.m]).sum())
        if largest is None or product is ordered[-1]:
            row["differing_from_replay"] = differing_from_replay(product, a, b, bits)
        rows.append(row | {"kernel": explained.kernel, "tile": explained.tile, "general": tile})
    return rows


def differs(row: dict[str, Any]) -> bool:
    """Whether any bit does."""
    return any(value for name, value in row.items() if name.startswith("differing_from_"))


def run(arguments: argparse.Namespace, gpu: str, driver: str, more: dict[str, str]) -> int:
    """Compare and record. Returns 1 where a bit differs, or the time ran out."""
    begin = time.monotonic()
    all_shapes = shapes.load()
    folder: Path = arguments.output or records.RESULTS / records.slug(gpu)
    places = (folder / "gemm-bits.json", records.RESULTS / records.slug(gpu) / "gemm-bits.json")
    before = next((path for path in places if path.exists()), None)
    rows = [] if before is None else records.kept(before, gpu=gpu, driver=driver, sources=sources(), more=more)
    left = compared = 0
    for layer in arguments.layers:
        for what in arguments.what:
            op, contract = ("forward", "tree-mma16") if what == "tree" else (what, arguments.contract)
            products = [
                Product(layer, m, op, contract, arguments.type)
                for m in all_shapes.m
                if m in (arguments.m or all_shapes.m)
            ]
            if time.monotonic() - begin >= arguments.seconds:
                left += len(products)
                continue
            found = compare(products, Operands(products, dict.fromkeys(products, 1), "cuda"), run_general)
            rows = merged(rows, found, all_shapes.layers)
            compared += sum(row["elements"] for row in found)
            for row in found:
                if differs(row):
                    print("DIFFERENT", records.shown(row), flush=True)
        path = records.write(
            "gemm-bits", rows, gpu=gpu, driver=driver, sources=sources(), folder=folder, more=more
        )  # fmt: skip
        print(f"{layer.name}: compared", flush=True)
    different = [key(row) for row in rows if differs(row)]
    seconds = time.monotonic() - begin
    print(f"{compared:,} elements compared in {seconds:.0f} s, {left} products left; "
          f"{len(different)} of {len(rows)} rows differ")  # fmt: skip
    print(path)
    return int(bool(different or left))
