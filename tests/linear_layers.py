"""Linear layers on which PyTorch's bits and a contract's differ, and whose of them a layer has."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from frameworks import from_torch, same, same_bits, tensor

import detkern.torch as dt
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary.dtypes import F32


class Doubles(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


def operands(layer: Any, device: str = "cpu") -> Any:
    return tensor("normal", F32, (5, layer.weight.shape[-1]), 1, device)


def follows(layer: Any, contract: Any, x: Any) -> bool:
    """Whether the layer's result has the bits of the contract, and PyTorch's own would not have them."""
    expected = numpy_replay.gemm(contract, from_torch(x), from_torch(layer.weight.T), bias=from_torch(layer.bias))
    return same(from_torch(layer(x)), expected)


def plain(layer: Any, x: Any) -> bool:
    return same_bits(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def linear(k: int = 200, n: int = 6) -> Any:
    """A float32 layer on which PyTorch's bits and fma's differ."""
    layer = torch.nn.Linear(k, n)
    with torch.no_grad():
        layer.weight.copy_(tensor("normal", F32, (n, k), 7))
        layer.bias.copy_(tensor("normal", F32, (n,), 8))
    return layer


def converted(module: Any, **options: Any) -> Any:
    """`convert`, which must have nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return dt.convert(module, **options)
