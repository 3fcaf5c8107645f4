"""The CPU backend: the C++ library where it builds, else the NumPy version with the same bits, which it says once.

DETKERN_CPU chooses: "auto" (the default), "numpy" (never the library), "native" (the library or an error).
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

from .. import config
from ..abi.library import Library
from ..dispatch.backend import Execution, Kernel, Run
from ..errors import ArgumentError, BackendUnavailable, BuildError
from ..operations.operation import Descriptor, Operation
from ..operations.problem import Operands, Problem
from ..operations.table import OPERATIONS
from ..tensors.view import Device, TensorView
from ..vocabulary.arithmetic.float_environment import default_float_environment
from . import compiled, threads

__all__ = ["BACKEND", "CpuBackend", "library"]


@functools.cache
def library() -> Library | None:
    """The C++ library, or None where the NumPy version serves. Decided once per process."""
    choice = os.environ.get("DETKERN_CPU") or "auto"
    if choice not in ("auto", "numpy", "native"):
        raise ArgumentError(f"DETKERN_CPU={choice!r} must be auto, numpy or native")
    if choice == "numpy":
        return None
    try:
        return compiled.load()
    except (BuildError, BackendUnavailable) as error:
        if choice == "native":
            raise
        warnings.warn(
            f"detkern's C++ kernels are not available, its NumPy version serves: slower, the same bits. {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


class _Computed:
    """detkern.dispatch.backend.Implementation of any operation: by the library where it has a kernel, else by the
    replay."""

    def __init__(self, operation: Operation[Any]) -> None:
        self.operation = operation

    def refuses(self, problem: Problem) -> str | None:
        return self.operation.misfit(problem)

    def explain(self, problem: Problem) -> Kernel:
        operation = self.operation
        variant, dtype = operation.variant_of(problem)
        native, descriptor = library(), operation.descriptor
        if native is None or descriptor is None or descriptor.offer(variant, dtype) not in native.offers:
            return Kernel(f"numpy {variant}", operation.piece, "1 thread")
        _, instructions, *tiles = native.name.split()
        count = _threads()
        geometry = f"at most {count} thread{'s' if count > 1 else ''}"
        return Kernel(f"c++ {variant} ({instructions})", descriptor.tile(problem, tiles), geometry)

    def prepare(self, problem: Problem, execution: Execution) -> Run:
        operation = self.operation
        replay, descriptor = operation.replay, operation.descriptor

        def replayed(m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
            with default_float_environment():
                replay(problem.with_rows(m), operands, out)

        if descriptor is None:
            return replayed
        native = library()
        if native is not None and descriptor.offer(*operation.variant_of(problem)) not in native.offers:
            return replayed
        return _through_the_abi(descriptor, problem, replayed)


def _through_the_abi(descriptor: Descriptor[Any], problem: Problem, replayed: Run) -> Run:
    """The library's kernel, or `replayed` where there is no library."""
    launches, code = descriptor.launches(problem), descriptor.code
    # What most problems are, with nothing done twice: one launch.
    templates = descriptor.templates(problem)
    only = templates[0][0] if len(templates) == 1 else None
    copy, addresses = descriptor.structure.from_buffer_copy, descriptor.addresses
    pack, place = descriptor.packing()

    def run(m: int, operands: Operands, out: TensorView, execution: Execution) -> None:
        native = library()
        if native is None:
            replayed(m, operands, out, execution)
            return
        count = config.num_threads or threads.available()
        if only is not None:
            launch = copy(only)
            launch.m = m
            launch.threads = count
            pack(launch, place, *addresses(operands, out))
            native.run(code, launch)
            return
        for launch in launches(m, operands, out):
            launch.threads = count
            native.run(code, launch)

    return run


class CpuBackend:
    """detkern.dispatch.backend.Backend on host memory. It implements every operation, since every operation has a
    replay."""

    name = "cpu"
    deterministic = True

    def __init__(self) -> None:
        self.implementations = {operation.problem: _Computed(operation) for operation in OPERATIONS}

    def unavailable(self, device: Device) -> str | None:
        return None if device.kind == "cpu" else f"it works on host memory, not on {device}"

    def preload(self, device: Device, pairs: object, along_k: object) -> int:
        """Build and load the library, which has all kernels: 1, or 0 where the NumPy version serves."""
        return int(library() is not None)

    def capability(self, device: Device) -> tuple[int, int] | None:
        return None


BACKEND = CpuBackend()


def _threads() -> int:
    return config.num_threads or threads.available()
