"""torch.einsum by products of stacks, under batch_invariant_mode."""

from __future__ import annotations

import functools
import string
from typing import Any

import torch

from . import ops
from .products import product
from .reductions import sum_over

__all__ = ["einsum"]


def einsum(mode: Any, equation: Any, *operands: Any) -> Any:
    """torch.einsum, pair by pair from left to right (the cheapest order depends on sizes): a label in two operands and not in the result is contracted,
    several of them flattened in the order in which the first operand has them."""
    if len(operands) == 1 and not isinstance(operands[0], torch.Tensor):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        equation, operands = _equation((equation, *operands))
    if not operands or not mode.covers("bmm", *operands):
        return NotImplemented
    parsed = _parse(equation, operands)
    if parsed is None:
        return NotImplemented
    terms, target = parsed
    pairs = [_diagonal(x, labels) for x, labels in zip(operands, terms, strict=True)]
    x, labels = pairs[0]
    for i, (y, others) in enumerate(pairs[1:], 2):
        needed = set(target).union(*(later for _, later in pairs[i:]))
        x, labels = _contract(mode, x, labels, y, others, needed)
    x, labels = _summed(mode, x, labels, set(target))
    return x.permute([labels.index(label) for label in target])


def _equation(arguments: Any) -> tuple[str, Any]:
    """The sublist format, (x, [0, 1], y, [1, 2], [0, 2]), as a string and its operands."""
    operands, terms = arguments[: len(arguments) // 2 * 2 : 2], list(arguments[1::2])
    letters = string.ascii_letters

    def written(term: Any) -> str:
        return "".join("..." if label is Ellipsis else letters[label] for label in term)

    result = "->" + written(arguments[-1]) if len(arguments) % 2 else ""
    return ",".join(written(term) for term in terms) + result, operands


def _parse(equation: str, operands: Any) -> tuple[list[str], str] | None:
    """Labels of each operand and of the result, an ellipsis written out; None for what PyTorch is to refuse."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return None
    spare = [c for c in string.printable if not c.isalnum() and not c.isspace() and c not in ".,->"]
    spare += [chr(c) for c in range(0x100, 0x140)]
    widths = [x.dim() - len(term.replace("...", "")) for x, term in zip(operands, terms, strict=True)]
    if any(w < 0 or (w and "..." not in term) for w, term in zip(widths, terms, strict=True)):
        return None
    widest = max([0, *(w for w, term in zip(widths, terms, strict=True) if "..." in term)])
    dots = "".join(spare[:widest])
    terms = [term.replace("...", dots[widest - w :]) for w, term in zip(widths, terms, strict=True)]
    if arrow:
        target = right.replace("...", dots)
    else:
        every = "".join(terms)
        target = dots + "".join(sorted(c for c in set(every) if every.count(c) == 1 and c not in dots))
    sizes: dict[str, Any] = {}
    for x, term in zip(operands, terms, strict=True):
        for n, label in zip(x.shape, term, strict=True):
            if sizes.get(label, 1) != 1 and n not in (1, sizes[label]):
                return None
            sizes[label] = n if sizes.get(label, 1) == 1 else sizes[label]
    if len(set(target)) != len(target) or not set(target) <= set(sizes):
        return None
    return terms, target


def _diagonal(x: Any, labels: str) -> tuple[Any, list[str]]:
    """x with a label that it has more than once made one dimension, the first of them."""
    found = labels
    for label in sorted(set(labels)):
        while found.count(label) > 1:
            i = found.index(label)
            j = found.index(label, i + 1)
            x = x.diagonal(dim1=i, dim2=j).movedim(-1, i)
            found = found[:j] + found[j + 1 :]
    return x, list(found)


def _summed(mode: Any, x: Any, labels: list[str], kept: set[str]) -> tuple[Any, list[str]]:
    """x summed over the labels that nobody needs."""
    dims = [i for i, label in enumerate(labels) if label not in kept]
    return (sum_over(x, dims), [label for label in labels if label in kept]) if dims else (x, labels)


def _contract(mode: Any, x: Any, xs: list[str], y: Any, ys: list[str], needed: set[str]) -> tuple[Any, list[str]]:
    x, xs = _summed(mode, x, xs, needed | set(ys))
    y, ys = _summed(mode, y, ys, needed | set(xs))
    both = [label for label in xs if label in ys]
    contracted = [label for label in both if label not in needed]
    batch = [label for label in both if label in needed]
    only_x = [label for label in xs if label not in ys]
    only_y = [label for label in ys if label not in xs]
    sizes = {label: n for labels, z in ((xs, x), (ys, y)) for label, n in zip(labels, z.shape, strict=True) if n != 1}

    def laid(z: Any, labels: list[str], order: list[str]) -> Any:
        z = z.permute([labels.index(label) for label in order])
        return z.expand([sizes.get(label, 1) if label in both else n for label, n in zip(order, z.shape, strict=True)])

    result = [*batch, *only_x, *only_y]
    left, right = laid(x, xs, [*batch, *only_x, *contracted]), laid(y, ys, [*batch, *contracted, *only_y])
    if not contracted:  # nothing is summed
        for _ in only_y:
            left = left.unsqueeze(-1)
        right = right.reshape(*right.shape[: len(batch)], *(1,) * len(only_x), *right.shape[len(batch) :])
        return left * right, result
    stack, n = left.shape[: len(batch)], len(contracted)
    rows, columns = left.shape[len(batch) : left.dim() - n], right.shape[len(batch) + n :]
    k = functools.reduce(lambda p, q: p * q, left.shape[left.dim() - n :], 1)
    m = functools.reduce(lambda p, q: p * q, rows, 1)
    c = functools.reduce(lambda p, q: p * q, columns, 1)
    left, right = ops.autocast(left.reshape(*stack, m, k), right.reshape(*stack, k, c))
    return product(mode, "bmm", left, right).reshape([*stack, *rows, *columns]), result
