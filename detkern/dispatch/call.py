"""The arrays of one call: their views, the stream and allocator that serve it, and the result."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ..errors import ArgumentError, DeviceError, DTypeError
from ..tensors import Adapter, TensorView, adapter_for, contiguous_strides, describe
from ..tensors.overlap import overlapping
from ..tensors.types import refuse_type
from ..vocabulary.dtypes import F32, I32, I64
from .plan import Planned

__all__ = ["Call", "rehearsals", "rehearse"]


# How many rehearsals are at work in the process, so that a call that is none need not ask whether its own thread's is.
rehearsals: list[None] = []
_WHOLE = ("index", "target")
_copies: ContextVar[list[str] | None] = ContextVar("copies", default=None)


class Rehearsed(Exception):
    """A call that was rehearsed has its plan, and ends there."""

    def __init__(self, planned: Planned) -> None:
        super().__init__()
        self.planned = planned


def rehearse(function: Callable[..., Any], *operands: Any, **settings: Any) -> tuple[Planned, list[str]]:
    """The plan of a public call, and one sentence for each operand that it would copy: nothing is run, copied or
    written.

    Raises what the call would.
    """
    copies: list[str] = []
    token = _copies.set(copies)
    rehearsals.append(None)
    try:
        function(*operands, **settings)
    except Rehearsed as rehearsed:
        return rehearsed.planned, copies
    finally:
        rehearsals.pop()
        _copies.reset(token)
    raise ArgumentError(f"{function!r} is not a function of detkern's that computes on arrays")


class Call:
    """Reads the operands where they lie, and runs on the stream of the one that leads.

    views:     the operands' views, in the order given; None for an optional one that the caller left away.
    out:       the view of the caller's `out`, or None.
    execution: the leader's device, stream and allocator.
    """

    __slots__ = (
        "_adapters",
        "_array",
        "_lead",
        "_operands",
        "_out",
        "_out_adapter",
        "execution",
        "out",
        "views",
    )

    def __init__(
        self,
        operands: tuple[tuple[Any, str], ...],
        out: Any = None,
        leader: int = 0,
        planned_copies: list[str] | None = None,
    ) -> None:
        """operands: array and name of each; only one called "bias" may be None, only "index" and "target" hold whole
        numbers.
        planned_copies: a list makes this a rehearsal, in which nothing is copied (see Adapter.view)."""
        if rehearsals and planned_copies is None:
            planned_copies = _copies.get()
        array, argument = operands[leader]
        lead = adapter_for(array, argument)
        lead_view = lead.view(array, argument, None, planned_copies)
        if lead_view.dtype is I64 or lead_view.dtype is I32:
            raise _whole(argument, lead_view, lead)
        device = lead_view.device
        execution = lead.execution(device)
        adapters: list[Adapter | None] = []
        views: list[Any] = []
        for index, (other, name) in enumerate(operands):
            if index == leader:
                adapters.append(lead)
                views.append(lead_view)
            elif other is None and name == "bias":
                adapters.append(None)
                views.append(None)
            else:
                adapter = adapter_for(other, name)
                view = adapter.view(other, name, execution.stream, planned_copies)
                if (view.dtype is I64 or view.dtype is I32) and name not in _WHOLE:
                    raise _whole(name, view, adapter)
                if view.device is not device and view.device != device:
                    raise _elsewhere(name, view, argument, lead_view)
                adapters.append(adapter)
                views.append(view)
        self._operands = operands
        self._adapters = adapters
        self._lead = lead
        self._array = array
        self.execution = execution
        self.views: tuple[Any, ...] = tuple(views)
        self._out = out
        self.out: TensorView | None = None
        if out is not None:
            self._out_adapter = adapter_for(out, "out")
            self.out = self._out_adapter.out_view(out, "out", execution.stream)
            if self.out.dtype is I64 or self.out.dtype is I32:
                raise _whole("out", self.out, self._out_adapter)
            if self.out.device != device:
                raise _elsewhere("out", self.out, argument, lead_view)

    def complete(self, planned: Planned) -> Any:
        """Run a plan of this call into the caller's `out`, checked against the operands, or into new memory, and give
        what the caller gets."""
        if rehearsals and _copies.get() is not None:
            self.refuse_overlap()
            raise Rehearsed(planned)
        plan, m, shape = planned
        execution, out = self.execution, self.out
        if out is None:
            strides = contiguous_strides(shape)
            result = self._lead.empty(self._array, shape, strides, plan.dtype, execution)
        else:
            self.refuse_overlap()
            result = out
        if 0 in shape:
            pass
        elif execution.device.kind == "cpu":
            plan.run(m, self.views, result, execution)
        else:
            self._begin()
            plan.run(m, self.views, result, execution)
            self._end()
        if out is None:
            return self._lead.result(self._array, result, execution)
        self._out_adapter.wrote(self._out)
        return self._out

    def refuse_overlap(self) -> None:
        """ArgumentError where the caller's `out` shares memory with an operand."""
        if self.out is None:
            return
        for (_, name), view in zip(self._operands, self.views, strict=True):
            if view is not None and overlapping(self.out, view):
                raise ArgumentError(
                    f"out shares memory with {name}, which is read while out is written; give another out"
                )

    def _begin(self) -> None:
        """Order the stream after whoever produces the operands on another one."""
        for adapter, array, _, _ in self._elsewhere_ordered():
            adapter.join(array, self.execution)

    def _end(self) -> None:
        """Order later users of the operands and of `out` after the stream."""
        for adapter, array, view, written in self._elsewhere_ordered():
            adapter.release(array, view, self.execution, written)

    def _elsewhere_ordered(self) -> list[tuple[Adapter, Any, TensorView, bool]]:
        """The arrays that the execution's stream does not order by itself."""
        arrays = [
            (adapter, array, view, False)
            for adapter, (array, _), view in zip(self._adapters, self._operands, self.views, strict=True)
            if adapter is not None and not (adapter is self._lead and adapter.stream_ordered)
        ]
        if self.out is not None and not (self._out_adapter is self._lead and self._lead.stream_ordered):
            arrays.append((self._out_adapter, self._out, self.out, True))
        return arrays


def _whole(argument: str, view: TensorView, adapter: Adapter) -> DTypeError:
    """For whole numbers where a number is expected that something is computed of."""
    return refuse_type(argument, view.dtype.name, adapter.cast(argument, F32))


def _elsewhere(argument: str, view: TensorView, leader: str, leading: TensorView) -> DeviceError:
    return DeviceError(
        f"{argument} is {describe(view)} on {view.device}, {leader} is on {leading.device}; "
        "all arrays of a call must be on one device"
    )
