"""torch.einsum by products of stacks, under batch_invariant_mode."""

from __future__ import annotations

import functools
import string
from typing import Any

import torch

from ..functions import rows
from ..functions.casting import autocast
from .products import product

__all__ = ["einsum"]


def einsum(mode: Any, equation: Any, *operands: Any) -> Any:
    """torch.einsum, pair by pair from left to right: the cheapest order depends on sizes. A label in two operands that
    nobody needs any more is contracted, several of them flattened in the order in which the first operand has them."""
    if len(operands) == 1 and not isinstance(operands[0], torch.Tensor):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        equation, operands = _equation((equation, *operands))
    if not operands or not mode.covers("bmm", *operands):
        return NotImplemented
    parsed = _parse(equation, tuple([x.dim() for x in operands]))
    if parsed is None or not _fit(parsed[0], operands):
        return NotImplemented
    terms, target, needed = parsed
    x, labels = _diagonal(operands[0], terms[0])
    for i in range(1, len(operands)):
        y, others = _diagonal(operands[i], terms[i])
        x, labels = _contract(mode, x, labels, y, others, needed[i])
    x, labels = _summed(mode, x, labels, target)
    return x.permute([labels.index(label) for label in target])


def _equation(arguments: Any) -> tuple[str, Any]:
    """The sublist format, (x, [0, 1], y, [1, 2], [0, 2]), as a string and its operands."""
    operands, terms = arguments[: len(arguments) // 2 * 2 : 2], list(arguments[1::2])
    letters = string.ascii_letters

    def written(term: Any) -> str:
        return "".join("..." if label is Ellipsis else letters[label] for label in term)

    result = "->" + written(arguments[-1]) if len(arguments) % 2 else ""
    return ",".join(written(term) for term in terms) + result, operands


def _parse(equation: str, ranks: tuple[int, ...]) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """Labels of each operand and of the result, an ellipsis written out, and for each operand the labels that are
    needed after it; None for what PyTorch is to refuse."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        return None
    spare = [chr(c) for c in range(0x100, 0x140)]
    widths = [rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True)]
    if any(w < 0 or (w and "..." not in term) for w, term in zip(widths, terms, strict=True)):
        return None
    widest = max(w if "..." in term else 0 for w, term in zip(widths, terms, strict=True))
    dots = "".join(spare[:widest])
    terms = [term.replace("...", dots[widest - w :]) for w, term in zip(widths, terms, strict=True)]
    every = "".join(terms)
    if arrow:
        target = right.replace("...", dots)
    else:
        target = dots + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c not in dots))
    if len(set(target)) != len(target) or not set(target) <= set(every):
        return None
    return tuple(terms), target, tuple(target + "".join(terms[i + 1 :]) for i in range(len(terms)))


_parse._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fit(terms: tuple[str, ...], operands: Any) -> bool:
    """Whether a label has one size in all operands, apart from 1."""
    sizes: dict[str, Any] = {}
    for x, term in zip(operands, terms, strict=True):
        for n, label in zip(x.shape, term, strict=True):
            if n != 1 and sizes.setdefault(label, n) != n:
                return False
    return True


def _diagonal(x: Any, labels: str) -> tuple[Any, list[str]]:
    """x with a label that it has more than once made one dimension, the first of them."""
    found = labels
    for label in labels:
        while found.count(label) > 1:
            i = found.index(label)
            j = found.index(label, i + 1)
            x = x.diagonal(dim1=i, dim2=j).movedim(-1, i)
            found = found[:j] + found[j + 1 :]
    return x, list(found)


def _summed(mode: Any, x: Any, labels: list[str], kept: Any) -> tuple[Any, list[str]]:
    """x summed over the labels that nobody needs."""
    dims = [i for i, label in enumerate(labels) if label not in kept]
    if not dims:
        return x, labels
    summed = rows.sum(x, dims) if mode.covers("sum", x) else x.sum(dims)
    return summed, [label for label in labels if label in kept]


def _contract(mode: Any, x: Any, xs: list[str], y: Any, ys: list[str], needed: str) -> tuple[Any, list[str]]:
    x, xs = _summed(mode, x, xs, [*needed, *ys])
    y, ys = _summed(mode, y, ys, [*needed, *xs])
    both = [label for label in xs if label in ys]
    contracted = [label for label in both if label not in needed]
    batch = [label for label in both if label in needed]
    only_x = [label for label in xs if label not in ys]
    only_y = [label for label in ys if label not in xs]
    sizes: dict[str, Any] = {}
    for labels, z in ((xs, x), (ys, y)):
        for label, n in zip(labels, z.shape, strict=True):
            if n != 1:
                sizes[label] = n

    def laid(z: Any, labels: list[str], order: list[str]) -> Any:
        z = z.permute([labels.index(label) for label in order])
        return z.expand([sizes.get(label, 1) if label in both else n for label, n in zip(order, z.shape, strict=True)])

    result = [*batch, *only_x, *only_y]
    left, right = laid(x, xs, [*batch, *only_x, *contracted]), laid(y, ys, [*batch, *contracted, *only_y])
    if not contracted:  # nothing is summed
        for _ in only_y:
            left = left.unsqueeze(-1)
        right = right.reshape((*right.shape[: len(batch)], *(1,) * len(only_x), *right.shape[len(batch) :]))
        return left * right, result
    stack, n = left.shape[: len(batch)], len(contracted)
    lines, columns = left.shape[len(batch) : left.dim() - n], right.shape[len(batch) + n :]
    k = functools.reduce(lambda p, q: p * q, left.shape[left.dim() - n :], 1)
    m = functools.reduce(lambda p, q: p * q, lines, 1)
    c = functools.reduce(lambda p, q: p * q, columns, 1)
    left, right = autocast(left.reshape(*stack, m, k), right.reshape(*stack, k, c))
    return product(mode, "bmm", left, right).reshape([*stack, *lines, *columns]), result
