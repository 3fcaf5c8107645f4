"""Products that are no linear layer's forward, against PyTorch's on this GPU: `python -m benchmarks.user_products`.

Attention written with matmul: scores q @ k.T and weights @ v, whose operands lie as models keep them ([B, H, L, D],
[B, L, H, D] read as that, a cache longer than what is in it, a projection of q, k and v in one), with heads that share
k and v, whole sequences and single rows; batches of float32; and the products that were above the aim once, by name.
All but those are drawn: sizes and layouts are a function of a seed and an index. Each call is `detkern.torch.matmul`
and `torch.matmul` of the same views, inside CUDA graphs, in turn, over sets of random operands that together pass twice
the L2 cache; times are medians over the turns.

The seed is new in each run unless it is given, and in the record. With --seconds no product is begun after that time,
of which the first part goes into kernels that are not in the cache; those of a seed come in order, and the record says
how many there are. Ends with status 2 where there is no CUDA device, PyTorch or CuPy, with 1 where a target is missed
or a product by name was not reached. Writes <DIR or benchmarks/results/<gpu>>/user-products.json.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detkern.measure import records, timing

from .drawn_report import percentile

__all__ = ["NAMED", "TARGET", "Case", "Lies", "attention", "draw", "main", "problem_of", "summary"]

TARGET = 1.10  # the most of PyTorch's time
FEW_ROWS_TARGET = 1.3  # of float32 products whose chain alone takes about PyTorch's time
LARGEST_BYTES, LARGEST_FLOPS = 3 * 10**9, 10**12  # of operands and result; a larger one is drawn again
LARGEST_F32_FLOPS = 4 * 10**10
MOST_SETS = 64  # of operands: as many calls as a graph holds

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Lies:
    """How an operand lies: its shape and its strides, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def dense(cls, *shape: int) -> Lies:
        """In rows."""
        return cls(shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))

    @property
    def transposed(self) -> Lies:
        """The last two dimensions, exchanged."""
        (*shape, rows, columns), (*strides, row, column) = self.shape, self.strides
        return Lies((*shape, columns, rows), (*strides, column, row))

    @property
    def elements(self) -> int:
        """From the first one to the last."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def read(self) -> int:
        """Elements that are there; a dimension that is broadcast has one."""
        return math.prod(size for size, stride in zip(self.shape, self.strides, strict=True) if stride)


@dataclass(frozen=True, slots=True)
class Case:
    """A product a @ b. what: "scores", "values" (weights @ v), "batch" or "product". name: of one that was not
    drawn."""

    what: str
    layout: str
    dtype: str
    a: Lies
    b: Lies
    name: str = ""
    target: float = TARGET

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of a @ b."""
        batch = tuple(max(sizes) for sizes in zip(self.a.shape[:-2], self.b.shape[:-2], strict=True))
        return (*batch, self.a.shape[-2], self.b.shape[-1])

    @property
    def bytes(self) -> int:
        """Of both operands and the result, once each."""
        return _ITEM_BYTES[self.dtype] * (self.a.read + self.b.read + math.prod(self.result))

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return 2 * math.prod(self.result) * self.a.shape[-1]


# How [B, H, L, D] lies in memory; of q, k and v alike. cache: with room for a third more rows than there are.
LAYOUTS = ("bhld", "blhd", "packed", "cache")


def _heads(layout: str, batch: int, heads: int, rows: int, depth: int) -> Lies:
    shape = batch, heads, rows, depth
    if layout == "bhld":
        return Lies.dense(*shape)
    if layout == "cache":
        room = rows + -(-rows // 3)
        return Lies(shape, Lies.dense(batch, heads, room, depth).strides)
    width = heads * depth * (3 if layout == "packed" else 1)
    return Lies(shape, (rows * width, depth, width, 1))


def attention(
    what: str, layout: str, dtype: str, batch: int, heads: int, sharing: int, rows: int, keys: int, depth: int,
    name: str = "",
) -> Case:  # fmt: skip
    """Scores or weights @ v. heads: of k and v; `sharing` query heads share each of them, which is broadcast then."""
    kept = _heads(layout, batch, heads, keys, depth)
    if what == "scores":
        first = _heads("blhd" if layout == "cache" else layout, batch, heads * sharing, rows, depth)
        second = kept.transposed
    else:
        first, second = Lies.dense(batch, heads * sharing, rows, keys), kept
    if sharing > 1:
        (b, h, *size), (outer, head, *strides) = first.shape, first.strides
        first = Lies((b, heads, sharing, *size), (outer, sharing * head, head, *strides))
        (b, h, *size), (outer, head, *strides) = second.shape, second.strides
        second = Lies((b, h, 1, *size), (outer, head, 0, *strides))
    return Case(what, layout, dtype, first, second, name)


def _batch(batch: int, m: int, n: int, k: int, turned: bool = False, name: str = "") -> Case:
    b = Lies.dense(batch, n, k).transposed if turned else Lies.dense(batch, k, n)
    return Case("batch", "nt" if turned else "nn", "float32", Lies.dense(batch, m, k), b, name)


def _product(name: str, dtype: str, m: int, n: int, k: int, turned: bool, target: float = TARGET) -> Case:
    b = Lies.dense(n, k).transposed if turned else Lies.dense(k, n)
    return Case("product", "nt" if turned else "nn", dtype, Lies.dense(m, k), b, name, target)


# Those that the aim was missed with, and their like.
NAMED = (
    attention("scores", "blhd", "bfloat16", 4, 32, 1, 1024, 1024, 128, "scores of [B, L, H, D]"),
    attention("values", "blhd", "bfloat16", 4, 32, 1, 1024, 1024, 128, "weights @ v of [B, L, H, D]"),
    attention("scores", "blhd", "bfloat16", 2, 8, 4, 1024, 1024, 128, "scores, 4 heads share k"),
    attention("values", "blhd", "bfloat16", 2, 8, 4, 1024, 1024, 128, "weights @ v, 4 heads share v"),
    attention("scores", "packed", "bfloat16", 8, 16, 1, 577, 577, 64, "scores of a packed projection"),
    attention("values", "packed", "bfloat16", 8, 16, 1, 577, 577, 64, "weights @ v of a packed projection"),
    attention("scores", "bhld", "bfloat16", 1, 128, 1, 1, 8192, 128, "decode scores, 128 heads"),
    attention("values", "bhld", "bfloat16", 1, 128, 1, 1, 8192, 128, "decode weights @ v, 128 heads"),
    attention("scores", "blhd", "bfloat16", 4, 32, 1, 1, 8192, 128, "decode scores of [B, L, H, D]"),
    attention("values", "blhd", "bfloat16", 4, 32, 1, 1, 8192, 128, "decode weights @ v of [B, L, H, D]"),
    attention("scores", "cache", "bfloat16", 16, 8, 4, 1, 4096, 128, "decode scores, 4 heads share k"),
    attention("values", "cache", "bfloat16", 16, 8, 4, 1, 4096, 128, "decode weights @ v, 4 heads share v"),
    _batch(8, 1024, 1024, 1024, name="f32 batch, 8 of 1024"),
    _batch(32, 512, 512, 512, name="f32 batch, 32 of 512"),
    _batch(64, 1024, 1024, 64, turned=True, name="f32 scores, 64 heads"),
    _batch(64, 1024, 64, 1024, name="f32 weights @ v, 64 heads"),
    _product("f32 of few rows", "float32", 64, 256, 4096, True, FEW_ROWS_TARGET),
    _product("vocabulary", "bfloat16", 4096, 128256, 4096, True),
    _product("dX of 6144 x 4096", "bfloat16", 4096, 4096, 6144, False),
    _product("dX of 4096 x 14336", "bfloat16", 4096, 14336, 4096, False),
)


def draw(seed: int, index: int) -> Case:
    """Case number `index` of a seed: of five, two are attention over whole sequences, two of single or few rows, one a
    batch of float32."""
    rng = random.Random(f"{seed}/{index}")

    def log(first: int, last: int) -> int:
        return min(int(first * math.exp(rng.random() * math.log((last + 1) / first))), last)

    kind = index % 5
    while True:
        if kind == 4:
            case = _batch(log(2, 256), log(16, 2048), log(16, 2048), log(16, 2048), rng.random() < 0.5)
            most = LARGEST_F32_FLOPS
        else:
            what, layout = ("scores", "values")[kind % 2], rng.choice(LAYOUTS)
            sharing = rng.choice((1, 1, 2, 4, 8))
            heads = log(1, 128 // sharing)
            keys = log(16, 8192) if kind < 2 else log(64, 32768)
            rows = keys if kind < 2 else rng.choice((1, 1, 1, 2, 4, 8))
            depth = rng.choice((64, 64, 80, 96, 128, 128, 128, 256))
            dtype = rng.choice(("bfloat16", "bfloat16", "bfloat16", "float16"))
            case = attention(what, layout, dtype, log(1, 64), heads, sharing, rows, keys, depth)
            most = LARGEST_FLOPS
        if case.bytes <= LARGEST_BYTES and case.flops <= most:
            return case


def problem_of(case: Case) -> Any:
    """The problem that detkern makes of a case whose operands begin where an allocation could."""
    from detkern.operations.gemm.problem import gemm_problem
    from detkern.tensors import Device, TensorView
    from detkern.vocabulary.contracts import FMA, MMA16
    from detkern.vocabulary.dtypes import F32, by_name

    dtype = by_name(case.dtype)
    assert dtype is not None
    batch = case.result[:-2]

    def view(one: Lies) -> TensorView:
        matched = zip(one.shape[:-2], one.strides[:-2], batch, strict=True)
        strides = (*(stride if size == wanted else 0 for size, stride, wanted in matched), *one.strides[-2:])
        return TensorView(1 << 20, (*batch, *one.shape[-2:]), strides, dtype, Device("cuda", 0))

    views = view(case.a), view(case.b), view(Lies.dense(*case.result))
    return gemm_problem(FMA if dtype == F32 else MMA16, *views, None, False)


def builds(cases: Sequence[Case]) -> list[Any]:
    """The kernels that the cases need, each once."""
    from detkern.cu import tile_choice
    from detkern.cu.device import describe

    facts = describe(0)
    launches = [tile_choice.choose(problem_of(case), facts.capability, facts.multiprocessors) for case in cases]
    return list(dict.fromkeys(launch.build for launch in launches))


def compile_all(wanted: Sequence[Any]) -> None:
    """Put kernels into the cache on disk, on all cores."""
    from detkern.cu import ahead, loader
    from detkern.cu.device import describe

    architecture = loader.loaded_architecture(describe(0).capability)
    for _ in ahead.compile_ahead(wanted, architecture, len(os.sched_getaffinity(0))):
        pass


def operands(case: Case, count: int) -> Iterator[tuple[Any, Any]]:
    """`count` sets of a and b, normal with standard deviation 1."""
    import torch

    for _ in range(count):
        found = []
        for one in (case.a, case.b):
            memory = torch.randn(one.elements, device="cuda", dtype=getattr(torch, case.dtype))
            found.append(memory.as_strided(one.shape, one.strides))
        yield found[0], found[1]


def measured(device: timing.Cuda, case: Case) -> dict[str, Any]:
    """A row of the record."""
    import torch

    import detkern.torch as dt

    count = min(MOST_SETS, timing.sets(case.bytes, device.cache_bytes))
    made = list(operands(case, count))
    with device.active():
        times = timing.medians(
            device,
            {
                "detkern": [functools.partial(dt.matmul, a, b) for a, b in made],
                "torch": [functools.partial(torch.matmul, a, b) for a, b in made],
            },
        )
    ratio = times["detkern"] / times["torch"]
    del made  # before the next one's
    torch.cuda.empty_cache()
    return {
        "name": case.name or "drawn", "what": case.what, "layout": case.layout, "type": case.dtype,
        "a": list(case.a.shape), "b": list(case.b.shape), "detkern_us": round(times["detkern"], 2),
        "torch_us": round(times["torch"], 2), "ratio": round(ratio, 3), "target": case.target,
        "met": ratio <= case.target,
    }  # fmt: skip


def _kind(row: dict[str, Any]) -> str:
    """What a drawn row is judged with."""
    return f"{row['what']}, {'whole sequences' if row['a'][-2] > 8 or row['what'] == 'batch' else 'few rows'}"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of the drawn rows, by kind: how many, the geometric mean of the ratios, their 90th and 99th percentile, the
    worst."""
    found = {}
    for kind in sorted({_kind(row) for row in rows if row["name"] == "drawn"}):
        ratios = sorted(row["ratio"] for row in rows if row["name"] == "drawn" and _kind(row) == kind)
        found[kind] = {
            "count": len(ratios), "mean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3),
            "p90": round(percentile(ratios, 0.9), 3), "p99": round(percentile(ratios, 0.99), 3), "worst": ratios[-1],
        }  # fmt: skip
    return found


def run(
    cases: Sequence[Case], measure: Callable[[Case], dict[str, Any]], until: float = math.inf
) -> list[dict[str, Any]]:
    """The rows of the cases, shown as they come. until: on time.monotonic's clock, when no other case is begun."""
    rows = []
    for case in cases:
        if time.monotonic() >= until:
            break
        rows.append(measure(case))
        print(records.shown(rows[-1]), flush=True)
    return rows


def sources() -> list[Path]:
    """What the kernels are made of, and what chooses a tile and its launch."""
    folder = records.ROOT / "detkern" / "cu"
    names = ("gemm_kernels", "gemm_tile", "geometry", "launch", "tensor_map", "tile_choice", "time_model", "tuned")
    return sorted([*records.product_sources(), *(folder / f"{name}.py" for name in names)])


def main() -> int:
    """Measure, print, record. Status 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="Time products that are no linear layer's forward against PyTorch's.")
    parser.add_argument("--count", type=int, default=100, help="drawn products (default: 100)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no product after this time")
    parser.add_argument("--seed", type=int, help="of the draw (default: a new one)")
    parser.add_argument("--output", type=Path, help="folder for the record, instead of benchmarks/results/<gpu>")
    arguments = parser.parse_args()
    timing.leave_if(timing.missing())
    until = time.monotonic() + arguments.seconds

    import torch

    seed = secrets.randbits(31) if arguments.seed is None else arguments.seed
    cases = [*NAMED, *(draw(seed, index) for index in range(arguments.count))]
    compile_all(builds(cases))
    device = timing.Cuda()
    with torch.no_grad():
        rows = run(cases, functools.partial(measured, device), until)
    found = summary(rows)
    for kind, numbers in found.items():
        print(kind, records.shown(numbers))
    records.write_here("user-products", rows, sources(), arguments.output, about={"seed": seed, "drawn": found})
    return int(len(rows) < len(NAMED) or not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
