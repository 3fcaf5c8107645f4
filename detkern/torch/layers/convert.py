"""Every torch.nn.Linear of a model made a `detkern.torch.Linear`, in place, and back."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, overload

import torch

from ...errors import ArgumentError
from ...vocabulary.arguments import flag
from ..functions import main_grads
from ..functions.main_grads import need_module
from . import instance_forward, survey
from .classes import twin
from .linear import MARK, SETTINGS, Contracted, Linear

__all__ = ["ConversionReport", "convert", "revert"]

Skip = str | Iterable[str] | Callable[[str, Any], bool]


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did, by the names of layers; of several names of one layer, the first.

    converted: layers that compute by a contract now. already: those that did before, with the settings that they had.
    skipped: those that `skip` names. left: layers with products that have no contract, and for each the reason.
    """

    converted: tuple[str, ...] = ()
    already: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    left: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        lines = [
            (
                f"converted {len(self.converted)}, already {len(self.already)}, skipped {len(self.skipped)}, left "
                f"{len(self.left)}"
            )
        ]
        for what in ("converted", "already", "skipped"):
            names = getattr(self, what)
            lines += [f"{what}: {', '.join(_together([*map(_shown, names)]))}"] if names else []
        return "\n".join([*lines, *(f"left: {line}" for line in _by_reason(self.left))])


@overload
def convert(
    module: torch.nn.Module, *, skip: Skip = ..., out_dtype: torch.dtype | str | None = ..., accumulate: bool = ...,
    contract: str | None = ..., backend: str | None = ..., logits: Literal["fused"] | None = ..., strict: bool = ...,
    report: Literal[False] = ...,
) -> torch.nn.Module: ...  # fmt: skip
@overload
def convert(
    module: torch.nn.Module, *, skip: Skip = ..., out_dtype: torch.dtype | str | None = ..., accumulate: bool = ...,
    contract: str | None = ..., backend: str | None = ..., logits: Literal["fused"] | None = ..., strict: bool = ...,
    report: Literal[True],
) -> tuple[torch.nn.Module, ConversionReport]: ...  # fmt: skip


def convert(
    module: torch.nn.Module,
    *,
    skip: Skip = (),
    out_dtype: torch.dtype | str | None = None,
    accumulate: bool = False,
    contract: str | None = None,
    backend: str | None = None,
    logits: Literal["fused"] | None = None,
    strict: bool = False,
    report: bool = False,
) -> torch.nn.Module | tuple[torch.nn.Module, ConversionReport]:
    """Make every torch.nn.Linear in `module` a `detkern.torch.Linear`, in place, and transformers' Conv1D too.

    The objects stay the same, and with them parameters, hooks, tied layers and references held elsewhere; only their
    class changes. A subclass that inherits torch.nn.Linear's forward gets a class that is a subclass of both, and hooks
    of accelerate call detkern's forward. The fast path of torch.nn.TransformerEncoderLayer, which reads the layers
    instead of calling them, is switched off where they are converted.

    Layers of which it is not certain that detkern's forward would run are left alone, and one warning names them: among
    them subclasses with a forward of their own, quantised weights, torch.nn.MultiheadAttention, convolutions.

    Args:
        module: the model, or a torch.nn.Linear itself.
        skip: qualified names of layers to leave alone, patterns allowed ("lm_head", "*.router"), or a function (name,
            layer) -> bool, which is asked about linear layers only.
        out_dtype, accumulate, contract, backend: as `detkern.torch.Linear`. accumulate marks all parameters of `module`
            besides, but those of layers that `skip` names: under `batch_invariant_mode` whatever takes one (linear, an
            embedding, the weight of a norm, what arithmetic broadcasts) adds its gradient to `main_grad`, with the bits
            of the whole batch; without the mode autograd gets it.
        logits: "fused": the head of a causal model of transformers (`get_output_embeddings`) gives `Logits` instead of
            logits, which are never made: losses that call torch.nn.functional.cross_entropy on them, and their `logp`,
            are `linear_cross_entropy` and `linear_logp`. What needs the logits themselves, as `generate` does, is
            refused.
        strict: raise where a layer is left that `skip` does not name.
        report: return what was done, too.

    Returns:
        `module`; with report=True (module, ConversionReport).

    Raises:
        ArgumentError: a name in `skip` that no layer of `module` has, or an argument of another kind; with strict=True,
            layers that cannot be converted, all of them named. Nothing is changed.
        ContractUnsupported, DTypeError: as `detkern.torch.Linear`; nothing is changed.
    """
    wanted = Linear(1, 1, False, "meta", out_dtype=out_dtype, accumulate=accumulate, contract=contract, backend=backend)
    need_module(module)
    strict, report = flag(strict, "strict"), flag(report, "report")
    read = survey.read_not_called(module)
    reasons = {id(part): survey.why_left(part, read, wanted) for part in module.modules()}

    def considered(part: Any) -> bool:
        return reasons[id(part)] is not None or isinstance(part, Contracted) or survey.is_linear(part)

    names, skipped = _named(module, considered, skip)
    head = _head(module, logits, reasons, skipped)
    parts = {key: part for key, (_, part) in names.items() if key not in skipped}
    left = {names[key][0]: reason for key in parts if (reason := reasons[key]) is not None}
    chosen = {key: part for key, part in parts.items() if reasons[key] is None and not isinstance(part, Contracted)}
    done = ConversionReport(
        converted=tuple(names[key][0] for key in chosen),
        already=tuple(names[key][0] for key, part in parts.items() if reasons[key] is None and key not in chosen),
        skipped=tuple(name for key, (name, _) in names.items() if key in skipped),
        left=MappingProxyType(left),
    )
    if left and strict:
        raise ArgumentError(
            f"strict=True, and {_count(left)} cannot be converted; name in skip what may stay as it is: {_listed(left)}"
        )
    for layer in chosen.values():
        _exchange(layer)
        layer.configure(out_dtype=out_dtype, accumulate=accumulate, contract=contract, backend=backend)
    if head is not None:
        head.logits = logits
    if accumulate:
        # A layer of detkern's that keeps its settings gives its gradients to autograd.
        kept = {id(part) for key, part in parts.items() if reasons[key] is not None and isinstance(part, Contracted)}
        _mark(module, kept | {id(names[key][1]) for key in skipped})
    _set_fast_paths(module)
    if left:
        warnings.warn(
            f"convert left {_count(left)} without a contract; name them in skip if that is meant: {_listed(left)}",
            stacklevel=2,
        )
    return (module, done) if report else module


def revert(module: torch.nn.Module, *, skip: Skip = ()) -> torch.nn.Module:
    """Give every layer in `module` that `convert` has converted, and every `detkern.torch.Linear`, its original class.

    Subclasses of `detkern.torch.Linear` that convert did not make have no other class and stay.

    Args:
        module: the model, or a layer itself.
        skip: as `convert`.

    Returns:
        `module`.

    Raises:
        ArgumentError: as `convert`.
    """
    need_module(module)
    names, skipped = _named(module, lambda part: isinstance(part, Contracted), skip)
    for key, (_, layer) in names.items():
        if key in skipped or twin(type(layer)) is None:  # the second: a class of the user's own, made from Linear
            continue
        _exchange(layer)
        for setting in SETTINGS:
            layer.__dict__.pop(setting, None)
    _mark(module, {id(names[key][1]) for key in skipped}, on=False)
    _set_fast_paths(module)
    return module


def _mark(module: Any, skipped: Collection[int], on: bool = True) -> None:
    """Mark the parameters of all modules but those with these ids, or take the marks away."""
    for part in module.modules():
        if id(part) in skipped:
            continue
        part.__dict__.pop(MARK, None)
        own = list(part.parameters(recurse=False))
        if own and on:
            part.__dict__[MARK] = True
        for parameter in own:
            main_grads.mark(parameter, on)


def _head(module: Any, logits: str | None, reasons: Mapping[int, str | None], skipped: Collection[int]) -> Any:
    """The layer that makes a model's logits, if it is to give Logits and will be a `Linear`; else None."""
    if logits is None:
        return None
    if logits != "fused":
        raise ArgumentError(f"logits={logits!r} must be 'fused' or None")
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    if head is None:
        raise ArgumentError(
            f"logits='fused' asks for the head of a causal model of transformers, and {type(module).__name__} has no "
            "output embeddings: set logits = 'fused' on its last detkern.torch.Linear"
        )
    name = next((name for name, part in module.named_modules() if part is head), "the head")
    if id(head) in skipped:
        raise ArgumentError(f"logits='fused' needs the head, {name}, which skip names")
    if reasons.get(id(head)) is not None or not isinstance(head, torch.nn.Linear):
        why = reasons.get(id(head)) or f"{type(head).__name__} is not a torch.nn.Linear"
        raise ArgumentError(f"logits='fused' needs the head, {name}, which cannot be converted: {why}")
    return head


def _exchange(layer: Any) -> None:
    """Give the layer the other class, and what it carries of the old one's methods."""
    old, new = type(layer), twin(type(layer))
    layer.__class__ = new
    instance_forward.exchange(layer, old.forward, new.forward)


_FAST_PATH = "_detkern_fast_path"


def _set_fast_paths(module: torch.nn.Module) -> None:
    """Switch off the fast paths that read layers of detkern instead of calling them; on again where there are none."""
    for part in module.modules():
        if isinstance(part, torch.nn.TransformerEncoderLayer):
            reads, switch, off = [part.linear1, part.linear2], "activation_relu_or_gelu", 0
        elif isinstance(part, torch.nn.TransformerEncoder):
            # Its own makes nested tensors for the fast path of its layers.
            reads, switch, off = [x for layer in part.layers for x in layer.modules()], "use_nested_tensor", False
        else:
            continue
        if any(isinstance(layer, Contracted) for layer in reads):
            if getattr(part, switch, off) != off:
                part.__dict__[_FAST_PATH] = getattr(part, switch)
                setattr(part, switch, off)
        elif _FAST_PATH in part.__dict__:
            setattr(part, switch, part.__dict__.pop(_FAST_PATH))


def _named(
    module: torch.nn.Module, considered: Callable[[Any], bool], skip: Skip
) -> tuple[dict[int, tuple[str, Any]], set[int]]:
    """The layers considered with their first name, by id, and which of them are skipped: a layer with several names is
    skipped by any of them."""
    if not isinstance(skip, Iterable) and not callable(skip):
        raise ArgumentError(f"skip={skip!r} is not a name, names or a function (name, layer) -> bool")
    named = [(name, part) for name, part in module.named_modules(remove_duplicate=False) if considered(part)]
    first: dict[int, tuple[str, Any]] = {}
    for name, part in named:
        first.setdefault(id(part), (name, part))
    if callable(skip):
        return first, {
            id(part)
            for name, part in named
            if (survey.is_linear(part) or isinstance(part, Contracted)) and skip(name, part)
        }
    skipped: set[int] = set()
    for pattern in [skip] if isinstance(skip, str) else skip:
        found = {id(part) for name, part in named if fnmatchcase(name, pattern)}
        if not found:
            names = ", ".join(repr(name) for name, _ in named) or "none"
            raise ArgumentError(f"skip={pattern!r} is the name of no Linear here; there are {names}")
        skipped |= found
    return first, skipped


def _shown(name: str) -> str:
    return name or "the module itself"


def _count(left: Mapping[str, str]) -> str:
    return f"{len(left)} layer{'s' if len(left) > 1 else ''}"


def _by_reason(left: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(_shown(name))
    return [f"{', '.join(_together(names))}: {reason}" for reason, names in reasons.items()]


def _together(names: list[str]) -> list[str]:
    """Many names of one layer in each block as the pattern that skip would take."""
    if len(names) <= 8:
        return names
    patterns = Counter(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)
    return [f"{pattern} ({count} layers)" if count > 1 else pattern for pattern, count in patterns.items()]


def _listed(left: Mapping[str, str]) -> str:
    return "; ".join(_by_reason(left))
