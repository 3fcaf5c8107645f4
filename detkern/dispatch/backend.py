"""What a backend is. registry.py dispatches over those that requirements.py lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..operations.problem import Operands, Problem
from ..tensors.execution import Execution
from ..tensors.view import Device, TensorView

__all__ = ["Backend", "Execution", "Implementation", "Kernel", "Run"]


@dataclass(frozen=True)
class Kernel:
    """What would run, for `explain`: the kernel's name, its tile, its launch geometry and its scratch bytes."""

    name: str
    tile: str
    geometry: str
    scratch_bytes: int = 0


# (rows, operands in the problem's order, out, execution): enqueue the work on the execution's stream. The number of
# rows may differ from call to call, unless one of the two is 1; the views give the pointers of the first elements, all
# else is the problem's. There is at least one element to compute.
Run = Callable[[int, Operands, TensorView, Execution], None]

_P_contra = TypeVar("_P_contra", bound=Problem, contravariant=True)


class Implementation(Protocol[_P_contra]):
    """One operation on one backend. It gives every bit of what it does not refuse."""

    def refuses(self, problem: _P_contra) -> str | None:
        """Why the backend will not take `problem` though it runs on the device, naming what it can do; or None."""

    def explain(self, problem: _P_contra) -> Kernel:
        """What would be launched for it. Compiles nothing."""

    def prepare(self, problem: _P_contra, execution: Execution) -> Run:
        """What computes the problem, and the same layout with any number of rows. Kept by the caller for as long as
        calls of that layout come, so whatever can be worked out once is worked out here or at the first call of a
        number of rows.

        Raises DeviceError or BuildError."""


class Backend(Protocol):
    """A backend knows problems and views, never torch or jax. Dispatch refuses the operations that it does not name.

    One that has something to load ahead also has `preload`, as `CudaBackend` does; `detkern.preload` names those that
    lack it.
    """

    name: str
    deterministic: bool
    implementations: Mapping[type[Any], Implementation[Any]]

    def unavailable(self, device: Device) -> str | None:
        """Why this backend cannot run on `device` at all, or None where it can. Cheap after the first call."""

    def capability(self, device: Device) -> tuple[int, int] | None:
        """The compute capability of a CUDA device; None elsewhere."""
