"""shapes.toml as data, and the products that are measured on its layers."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OPS", "RATE", "Layer", "Product", "Shapes", "load", "products"]

PATH = Path(__file__).parent / "shapes.toml"

# The reference line: what a plain read reaches and what the tensor cores reach on dense 16-bit operands, both measured
# on an H200. It is a line to compare with, not a limit.
BANDWIDTH = 4.3e12  # bytes a second
RATE = 790e12  # operations a second

OPS = ("forward", "da", "db")
ITEM_BYTES = 2  # both 16-bit types


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer: weight [n, k]."""

    model: str
    layer: str
    n: int
    k: int

    @property
    def name(self) -> str:
        """ "llama3-8b.qkv" """
        return f"{self.model}.{self.layer}"


@dataclass(frozen=True, slots=True)
class Shapes:
    """m: of the forward products. training_m: of the gradients and of the tree."""

    m: tuple[int, ...]
    training_m: int
    layers: tuple[Layer, ...]

    def named(self, patterns: Iterable[str]) -> list[Layer]:
        """The layers whose names match one of the patterns (as in file names: "llama3-*"), in order.

        Raises ValueError for a pattern that matches none.
        """
        wanted: set[Layer] = set()
        for pattern in patterns:
            found = [layer for layer in self.layers if fnmatch.fnmatchcase(layer.name, pattern)]
            if not found:
                raise ValueError(f"no shape is called {pattern}; there are {', '.join(x.name for x in self.layers)}")
            wanted.update(found)
        return [layer for layer in self.layers if layer in wanted]


@dataclass(frozen=True, slots=True)
class Product:
    """One product that is measured, out = op(a) @ op(b), of operands called x [m, k], w [n, k] and dc [m, n]:
    forward x @ w.T, da = dc @ w (the gradient of x), db = dc.T @ x (the gradient of w)."""

    layer: Layer
    m: int
    op: str
    contract: str
    dtype: str

    @property
    def key(self) -> tuple[str, int, str, str, str]:
        """What tells rows apart."""
        return self.layer.name, self.m, self.op, self.contract, self.dtype

    @property
    def operands(self) -> tuple[str, str]:
        """The names of a and b."""
        return {"forward": ("x", "w"), "da": ("dc", "w"), "db": ("dc", "x")}[self.op]

    @property
    def trans_a(self) -> bool:
        """Whether a is transposed."""
        return self.op == "db"

    @property
    def trans_b(self) -> bool:
        """Whether b is transposed."""
        return self.op == "forward"

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of x, w, dc or out."""
        m, n, k = self.m, self.layer.n, self.layer.k
        out = {"forward": (m, n), "da": (m, k), "db": (n, k)}[self.op]
        return {"x": (m, k), "w": (n, k), "dc": (m, n), "out": out}[name]

    @property
    def bytes(self) -> int:
        """Of both operands and the result."""
        return ITEM_BYTES * sum(rows * columns for rows, columns in map(self.matrix, (*self.operands, "out")))

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.layer.n * self.layer.k

    @property
    def reference_us(self) -> float:
        """The reference line."""
        return 1e6 * max(self.bytes / BANDWIDTH, self.flops / RATE)


def load(path: Path = PATH) -> Shapes:
    """Read shapes.toml. Raises ValueError for two layers of one name."""
    found = tomllib.loads(path.read_text())
    layers = tuple(Layer(**layer) for layer in found["layer"])
    if len({layer.name for layer in layers}) != len(layers):
        raise ValueError(f"{path} has two layers of one name")
    return Shapes(tuple(found["m"]), found["training_m"], layers)


def products(
    layer: Layer,
    shapes: Shapes,
    what: Iterable[str],
    *,
    contract: str = "mma16",
    dtype: str = "bfloat16",
    m: Iterable[int] | None = None,
) -> list[Product]:
    """What is measured on a layer. what: of OPS and "tree", which is the forward product under `tree-mma16`.

    m: only those, instead of those of the shapes file.
    """
    chosen = None if m is None else set(m)
    result = []
    for part in what:
        op, arithmetic = ("forward", "tree-mma16") if part == "tree" else (part, contract)
        sizes = shapes.m if part == "forward" else (shapes.training_m,)
        result += [Product(layer, size, op, arithmetic, dtype) for size in sizes if chosen is None or size in chosen]
    return result
