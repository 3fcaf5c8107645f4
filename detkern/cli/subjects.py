"""Everything that `verify` and `fingerprint` examine: products by contracts, and the other operations."""

from __future__ import annotations

import click

from ..tensors import Device
from .calls import CallSubject, names, offered
from .devices import devices
from .subject import Subject, find

__all__ = ["OPERATION", "find_all"]

OPERATION = click.Choice(names())


def find_all(
    backends: tuple[str, ...], wanted: tuple[Device, ...], contracts: tuple[str, ...], operations: tuple[str, ...]
) -> list[Subject | CallSubject]:
    """Every backend x device x contract or other operation x type that is available and that the filters let pass,
    products first. Empty filters let everything pass; contracts let no other operation pass, nor operations a product.

    Raises ArgumentError, saying what there is, where nothing is left.
    """
    products = [] if operations and not contracts else find(backends, wanted, contracts)
    if contracts and not operations:
        return list(products)
    calls = [
        subject
        for device in devices()
        if not wanted or device in wanted
        for subject in offered(device, backends)
        if (not backends or subject.backend in backends) and (not operations or subject.name in operations)
    ]
    if not calls and not products:
        find(backends, wanted, contracts)  # says what there is
    return [*products, *calls]
