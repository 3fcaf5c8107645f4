"""What an operation is to everything that walks over operations: one record. table.py holds them all."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..tensors.view import Device, TensorView
from ..vocabulary.arithmetic.float_environment import default_float_environment
from ..vocabulary.dtypes import DType
from .memory import host_view
from .problem import Operands, Problem

__all__ = ["Derivative", "Descriptor", "Operation", "PublicCall", "Sample", "replayed"]

Array = npt.NDArray[Any]
P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Descriptor(Generic[P]):
    """How the operation crosses the C ABI (abi/abi.h).

    code:      of enum detkern_operation. variants: the code of each of the operation's variants (detkern_offer).
    structure: in ctypes. pointers: its addresses of operands and out, adjacent and in its own order.
    addresses: (operands, out) -> these addresses, 0 for what is left out.
    templates: problem -> the structures of its launches, without addresses and threads, each with what is added to
               these addresses, in bytes.
    tile:      (problem, the tiles that the library's name lists) -> what its kernel computes at once.
    """

    code: int
    variants: Mapping[str, int]
    structure: Any
    pointers: tuple[str, ...]
    addresses: Callable[[Operands, TensorView], tuple[int, ...]]
    templates: Callable[[P], Sequence[tuple[bytes, tuple[int, ...]]]]
    tile: Callable[[P, Sequence[str]], str]

    def offer(self, variant: str, dtype: DType) -> tuple[int, int, int]:
        """A variant with an operand type, as `abi.library.Library.offers` has it."""
        return self.code, self.variants[variant], dtype.code

    def packing(self) -> tuple[Callable[..., None], int]:
        """What writes the addresses into a structure, pack(structure, place, *addresses), and the place."""
        place: int = getattr(self.structure, self.pointers[0]).offset
        return struct.Struct(f"<{len(self.pointers)}Q").pack_into, place

    def launches(self, problem: P) -> Callable[[int, Operands, TensorView], Sequence[Any]]:
        """(rows, operands, out) -> the structures of a problem's launches, with their addresses but without threads,
        stream and scratch memory."""
        templates = self.templates(problem)
        copy, addresses = self.structure.from_buffer_copy, self.addresses
        pack, place = self.packing()

        def made(m: int, operands: Operands, out: TensorView) -> Sequence[Any]:
            every = []
            for template, offsets in templates:
                launch = copy(template)
                launch.m = m
                pack(launch, place, *map(add, addresses(operands, out), offsets))
                every.append(launch)
            return every

        return made


@dataclass(frozen=True)
class PublicCall:
    """The function that users call for a variant.

    module, name: where it is. operands: their names, in the problem's order.
    settings:     what is given with them always.
    sized:        shape of the result -> what is given with them to get that shape.
    """

    module: str
    name: str
    operands: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    sized: Callable[[tuple[int, ...]], Mapping[str, Any]] = lambda shape: {}

    def __call__(self, arrays: Sequence[Any], shape: tuple[int, ...], **arguments: Any) -> Any:
        """Call it on arrays of any framework, None for an operand that is left out. shape: of the result."""
        function = getattr(importlib.import_module(self.module), self.name)
        given = {name: array for name, array in zip(self.operands, arrays, strict=True) if array is not None}
        return function(**given, **self.settings, **self.sized(shape), **arguments)


@dataclass(frozen=True)
class Derivative:
    """The gradient of an operand: a variant, and what that is called with.

    of:       the operand.
    variant:  of any operation that `gradients` lists.
    operands: "incoming" (the gradient of the result), operands of the forward by their names, or "out", its result.
    """

    of: str
    variant: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One call on NumPy arrays.

    variant:  which of the operation's.
    operands: as the public call takes them, in the problem's order.
    shape, dtype: of the result.
    initial:  float32, what is accumulated into; None where nothing is.
    about:    for people.
    """

    variant: str
    operands: tuple[Array | None, ...]
    shape: tuple[int, ...]
    dtype: DType
    initial: Array | None = None
    about: str = ""

    def result(self) -> Array:
        """Memory for the result: a copy of `initial`, or new."""
        return np.zeros(self.shape, self.dtype.numpy) if self.initial is None else self.initial.copy()


@dataclass(frozen=True, eq=False)
class Operation(Generic[P]):
    """An operation.

    name:       in messages and tables.
    problem:    the class of its problems.
    variants:   what a backend computes or does not, each with its operand types: contracts, kinds of rows.
    variant_of: problem -> its variant and operand type.
    bind:       (variant, operands as the public call takes them, out, accumulate) -> problem.
    misfit:     why a problem is outside of the operation's definition, or None.
    replay:     the definition, computed on host memory: (problem, operands, out). The thread must be in the default
                floating-point modes.
    piece:      what the replay computes at once, for `explain`.
    cases:      the self-check's operands for a variant and a type.
    samples:    (variant, type, kind of operands, seed) -> samples of odd sizes, for `verify`, `fingerprint` and the
                golden digests.
    independent: (variant) -> the axis of each operand along which results are independent, None where there is none.
    along:      that axis of the result.
    call:       variant -> the public call. It stands above dispatch, so the record only names it.
    gradients:  of each variant that adapters of frameworks offer to their users, which calls give the gradients of its
                operands; no Derivative for an operand, or none at all: it has no gradient. Adapters that have a module
                of their own for an operation find its rules in its home.
    shape_of:   (variant, shapes of the operands) -> that of the result, sizes symbolic or not; needed with `gradients`.
    descriptor: how it crosses the C ABI, or None where the library has no kernel of it.
    """

    name: str
    problem: type[P]
    variants: Mapping[str, tuple[DType, ...]]
    variant_of: Callable[[P], tuple[str, DType]]
    bind: Callable[[str, Operands, TensorView, bool], P]
    misfit: Callable[[P], str | None]
    replay: Callable[[P, Operands, TensorView], None]
    piece: str
    cases: Callable[[str, DType], Iterator[Sample]]
    samples: Callable[[str, DType, str, int], Iterator[Sample]]
    independent: Callable[[str], tuple[int | None, ...]]
    call: Callable[[str], PublicCall]
    descriptor: Descriptor[P] | None = None
    gradients: Mapping[str, tuple[Derivative, ...]] = field(default_factory=dict)
    shape_of: Callable[[str, Sequence[Sequence[Any]]], Sequence[Any]] | None = None
    along: int = 0

    def problem_of(self, sample: Sample, operands: Operands, out: TensorView) -> P:
        """The problem of a sample whose arrays lie at these views."""
        return self.bind(sample.variant, operands, out, sample.initial is not None)

    def example(self, variant: str, dtype: DType, device: Device) -> P:
        """A small problem of a variant, with which a backend is asked whether it computes that at all."""
        sample = next(self.cases(variant, dtype))

        def view(array: Array) -> TensorView:
            found = host_view(array)
            return TensorView(4096, found.shape, found.strides, found.dtype, device)

        return self.problem_of(
            sample, tuple(None if x is None else view(x) for x in sample.operands), view(sample.result())
        )


def replayed(operation: Operation[Any], sample: Sample) -> Array:
    """The replay's result."""
    out = sample.result()
    operands = tuple(None if array is None else host_view(array) for array in sample.operands)
    target = host_view(out)
    with default_float_environment():
        operation.replay(operation.problem_of(sample, operands, target), operands, target)
    return out
