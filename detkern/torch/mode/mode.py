"""`batch_invariant_mode`: every product and row reduction of a model by a contract, without a change to the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ...dispatch import registry
from ...errors import ArgumentError, ContractUnsupported
from ...operations.rows.operation import ROWS
from ...vocabulary.arguments import flag
from ...vocabulary.contracts import get_contract
from ...vocabulary.dtypes import DTYPES
from . import coverage, entered, hooks, indexing, kernels
from .decorating import decorated
from .watch import Watch

__all__ = ["DEVICE_TYPES", "batch_invariant_mode"]

P = ParamSpec("P")
R = TypeVar("R")

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")
DEVICE_TYPES = ("cpu", "cuda", "musa", "npu")
_TYPES = {dtype: getattr(torch, dtype.name) for dtype in DTYPES}
_OPERANDS = frozenset((torch.float32, torch.float16, torch.bfloat16))
_LOSSES = (
    "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits",
)  # fmt: skip
_ROW_OPS = frozenset(
    (
        "sum", "mean", "softmax", "log_softmax", "scaled_dot_product_attention", "logsumexp", "var", "std",
        "vector_norm", "cumsum",
        *_LOSSES, *indexing.NAMES,
    )
)  # fmt: skip
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_TRACED = ("FakeTensor", "FunctionalTensor", "Buffer")
# Bound once: they are asked in every call.
_PASSED, _UNRECORDED = coverage.PASSED, coverage.UNRECORDED
_compiling, _grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_said: set[tuple[str, str]] = set()


class batch_invariant_mode(TorchFunctionMode):  # type: ignore[misc]
    """Matrix products and row reductions of PyTorch computed by detkern, inside of a `with` block, of a function that
    it decorates, or between `enable()` and `disable()`.

    torch.mm, addmm, bmm, baddbmm, mv, addmv, dot, and what is made of them (linear, matmul, einsum, tensordot,
    torch.nn.MultiheadAttention, ...) follow a contract, and so do scaled_dot_product_attention, mean, sum, softmax,
    log_softmax and cross_entropy; docs/batch-invariant-mode.md has the whole list. Gradients are computed by the same
    contracts, wherever the backward runs. The mode belongs to the thread that enters it and to the backward passes
    started there. Modes nest; the innermost decides for its device types.

    Args:
        contract: one contract's name, or a mapping of "mm", "addmm", "bmm", "baddbmm", "mv", "addmv" or "dot" to one
            (linear is an mm, or with bias an addmm; matmul an mm for a matrix on the right, else a bmm). It holds for
            the operand types that it takes; the others, and ops that are not named, follow the default of
            `detkern.torch.matmul`.
        device_types: the types of device on which the mode is at work; tensors elsewhere are PyTorch's alone.
        strict: raise ContractUnsupported where a product that the mode does not cover (float64, attention with dropout,
            _scaled_mm, _grouped_mm, a convolution, ...) is about to run. Without it PyTorch computes it, and a warning
            says so once for each op and reason.

    Raises:
        ArgumentError: an op or a device type that there is not. ContractUnsupported: no such contract.
    """

    def __init__(
        self,
        *,
        contract: str | Mapping[str, str] | None = None,
        device_types: str | Iterable[str] = DEVICE_TYPES,
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.device_types = _device_types(device_types)
        named = _named(contract)
        for op in named:
            if op not in PRODUCTS:
                raise ArgumentError(f"contract: {op!r} is none of the ops {', '.join(PRODUCTS)}")
        self.contracts = {
            op: {_TYPES[dtype]: get_contract(name).name for dtype in get_contract(name).operands}
            for op, name in named.items()
        }
        self.strict = flag(strict, "strict")
        self.ended = False  # by disable() of a whole process, in another thread too
        kinds = registry.kinds_of(ROWS)
        self.row_devices = tuple(
            device
            for device in self.device_types
            if ("rocm" if device == "cuda" and torch.version.hip else device) in kinds
        )

    def __repr__(self) -> str:
        return (
            f"batch_invariant_mode(contract={self.contracts}, device_types={self.device_types}, strict={self.strict})"
        )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: the mode is on during each call of `function`, in the thread that makes it; in recursive and
        concurrent calls too. Of a generator and of a coroutine it is on while their code runs, not while they wait.

        Raises:
            ArgumentError: a class, an async generator, or nothing that can be called.
        """
        return decorated(self, function)

    def __enter__(self) -> Self:
        if torch.compiler.is_dynamo_compiling():  # a block in a function that torch.compile traces
            super().__enter__()
        else:
            self._enter()
        return self

    def __exit__(self, *error: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            super().__exit__(*error)
        else:
            entered.leave(self)

    def enable(self) -> None:
        """Enter the mode until `disable()`, in this thread."""
        self._enter(lasting=True)

    def disable(self) -> None:
        """Leave it again, also where other modes were entered since; in its own with block, for the rest of that.

        Raises:
            ArgumentError: it is not at work in this thread.
        """
        if not (entered.leave(self, lasting=True) or entered.switch_off(self)):
            raise ArgumentError("this batch_invariant_mode is not enabled in this thread")

    def enter_outermost(self) -> None:
        """`enable()` around the modes that this thread is in already."""
        self._enter(lasting=True, outermost=True)

    def _enter(self, *, lasting: bool = False, outermost: bool = False) -> None:
        kernels.register()
        hooks.install()
        entered.enter(self, lasting=lasting, outermost=outermost)

    @hooks.never_a_graph
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.ended:
            return func(*args, **(kwargs or {}))
        # PyTorch takes 2 µs to get here, for each call of a function and each reading of a shape: what is plain goes on
        # at once.
        if not _compiling() and (func in _PASSED or (func in _UNRECORDED and not _grad_enabled())):
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        handler = coverage.HANDLERS.get(func)
        if handler is not None:
            result = handler(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
            return self.left_to_pytorch(func, coverage.name_of(func), args, kwargs)
        # Elementwise arithmetic is the compiler's. What it holds for Tensor.__pow__ and its like while it traces is not
        # equal to the key here, and is when it checks its guards.
        handler = None if torch.compiler.is_compiling() else coverage.ELEMENTWISE.get(func)
        if handler is not None:
            result = handler(self, *args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        python = (coverage.TRACED_PYTHON if torch.compiler.is_compiling() else coverage.PYTHON).get(func)
        if python is not None:
            with self:
                return python(*args, **kwargs)
        name = coverage.name_of(func)
        if name in coverage.PLAIN:
            if torch.compiler.is_compiling():
                func = coverage.TRACED.get(name, func)
            return func(*args, **kwargs)
        if name in coverage.UNCOVERED:
            self.uncovered(name, "", *args, *kwargs.values())
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            if name in coverage.UNSEEN_WHEN_COMPILED:
                self.uncovered(name, "a compiled graph", *args, *kwargs.values())
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "detkern":
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):  # torch.cond and its like, which call functions of Python
            with entered.by_keys():
                return func(*args, **kwargs)
        return self.left_to_pytorch(func, name, args, kwargs)

    @hooks.never_a_graph
    def left_to_pytorch(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A call that may reach covered ops below Python: watched, where the mode is at work."""
        tensors = [] if torch.compiler.is_compiling() else _tensors((args, kwargs))
        if not any(x.device.type in self.device_types for x in tensors):
            return func(*args, **kwargs)
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        with Watch(self, name, recorded):
            return func(*args, **kwargs)

    # What the handlers ask.

    def contract_for(self, op: str, dtype: Any) -> str | None:
        """The contract's name for an op on operands of a type; None for the default."""
        named = self.contracts.get(op)
        return None if named is None else named.get(dtype)

    def covers(self, op: str, *operands: Any) -> bool:
        """Whether operands are of what the mode is at work on. If they are not for a reason that strict refuses, that
        is said, or raised, here."""
        devices = self.row_devices if op in _ROW_OPS else self.device_types
        for x in operands:  # what most are, with nothing asked twice
            if (
                type(x) not in _PLAIN
                or x.dtype not in _OPERANDS
                or x.layout is not _STRIDED
                or x.device.type not in devices
            ):
                return self._covers(op, operands)
        return True

    def _covers(self, op: str, operands: tuple[Any, ...]) -> bool:
        for x in operands:
            if not isinstance(x, torch.Tensor) or x.device.type not in self.device_types:
                return False
        for x in operands:
            if op in _ROW_OPS and x.device.type not in self.row_devices:
                self.uncovered(op, x.device.type, *operands)
                return False
            kind = type(x)
            if kind not in _PLAIN and not torch.compiler.is_compiling() and kind.__name__ not in _TRACED:
                self.uncovered(op, kind.__qualname__, *operands)
                return False
            if x.layout is not torch.strided:
                self.uncovered(op, str(x.layout), *operands)
                return False
            if x.dtype not in _OPERANDS:
                if x.is_floating_point() or x.is_complex():
                    self.uncovered(op, str(x.dtype), *operands)
                return False  # whole numbers are exact in any order
        return True

    def uncovered(self, name: str, why: str, *operands: Any, what: str = "is not covered") -> None:
        """Say that an op is PyTorch's own: in strict mode by an error, else by one warning. Elsewhere than on the
        mode's device types there is nothing to say."""
        if not any(x.device.type in self.device_types for x in _tensors(operands)):
            return
        if self.strict:
            raise ContractUnsupported(_refusal(name, why, what))
        _say_once(name, _subject(name, why, what))


def _device_types(given: Any) -> tuple[str, ...]:
    """Those that are named, each once, in one order."""
    wanted = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    for device in wanted:
        if device not in DEVICE_TYPES:
            raise ArgumentError(f"device_types: {device!r} is none of {', '.join(DEVICE_TYPES)}")
    return tuple(device for device in DEVICE_TYPES if device in wanted)


def _named(contract: Any) -> Mapping[str, str]:
    """Contracts by ops."""
    if contract is None or isinstance(contract, str):
        return {} if contract is None else dict.fromkeys(PRODUCTS, contract)
    if not isinstance(contract, Mapping):
        raise ArgumentError(f"contract={contract!r} must be a contract's name, a mapping of ops to names, or None")
    return contract


def _subject(name: str, why: str, what: str) -> str:
    if what == "is not covered":
        return f"{name}{f' ({why})' if why else ''} is not covered by batch_invariant_mode"
    return f"under batch_invariant_mode {why} {name} {what}"


def _refusal(name: str, why: str, what: str) -> str:
    if why in ("torch.float64", "torch.complex64", "torch.complex128"):
        advice = "cast the operands to float32, float16 or bfloat16"
    elif why.startswith("dropout"):
        advice = "set dropout_p to 0"
    elif "attention" in name:
        advice = "use torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa') or eager attention"
    else:
        advice = "docs/batch-invariant-mode.md lists what is"
    return f"{_subject(name, why, what)}; {advice}, or strict=False lets PyTorch compute it"


def _say_once(name: str, subject: str) -> None:
    if (name, subject) not in _said:
        _said.add((name, subject))
        warnings.warn(
            f"{subject}: its bits are PyTorch's own and may depend on the batch",
            stacklevel=4,
        )


# torch.compile calls them while it traces: what is not covered is said when a graph is made.
_say_once._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]
_subject._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _tensors(value: Any) -> list[Any]:
    """The tensors in arguments, lists and dictionaries among them too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in _tensors(item)]
    return []
