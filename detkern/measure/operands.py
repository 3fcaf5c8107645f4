"""Random operands on a device, made once for a layer and cut to the size of each product."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .shapes import ITEM_BYTES, Product

__all__ = ["POISON", "Operands"]

# A NaN with all bits set, as int16: no peer writes it, so an element that still holds it was not written.
POISON = -1

_ALIGNMENT = 256 // ITEM_BYTES  # elements: each matrix begins where an allocation could


def _stride(shape: tuple[int, int]) -> int:
    return -(-shape[0] * shape[1] // _ALIGNMENT) * _ALIGNMENT


class Operands:
    """x, w, dc (normal, standard deviation 1) and out of one layer's products.

    count: how many sets of them a product rotates through.
    """

    def __init__(self, products: Iterable[Product], count: dict[Product, int], device: str) -> None:
        import torch

        self._count = count
        sizes: dict[str, int] = {}
        dtype = None
        for product in products:
            dtype = getattr(torch, product.dtype)
            for name in (*product.operands, "out"):
                sizes[name] = max(sizes.get(name, 0), count[product] * _stride(product.matrix(name)))
        self._memory = {name: torch.empty(size, dtype=dtype, device=device) for name, size in sizes.items()}
        generator = torch.Generator(device).manual_seed(sum(sizes.values()))
        for name, memory in self._memory.items():
            if name != "out":
                memory.normal_(generator=generator)

    def rotating(self, product: Product, name: str) -> list[Any]:
        """The matrices called `name`, one a set."""
        rows, columns = product.matrix(name)
        stride = _stride((rows, columns))
        memory = self._memory[name]
        return [
            memory[start : start + rows * columns].view(rows, columns)
            for start in range(0, self._count[product] * stride, stride)
        ]

    def poison(self, product: Product) -> None:
        """Spoil the results."""
        self._out(product).fill_(POISON)

    def unwritten(self, product: Product) -> int:
        """Elements of the results that still hold the poison."""
        rows, columns = product.matrix("out")
        stride = _stride((rows, columns))
        results = self._out(product).view(self._count[product], stride)[:, : rows * columns]
        return int((results == POISON).sum())

    def _out(self, product: Product) -> Any:
        import torch

        size = self._count[product] * _stride(product.matrix("out"))
        return self._memory["out"][:size].view(torch.int16)
