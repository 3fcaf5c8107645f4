"""Types of option that several commands take."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from ..errors import DetkernError
from ..tensors import Device
from ..vocabulary.contracts import CONTRACTS
from ..vocabulary.dtypes import DTYPES, DType, by_name
from .files import Location, parse_location

__all__ = ["CONTRACT", "NAMES", "array_file", "contracts_option", "device", "element_type", "json_option"]

NAMES = ", ".join(CONTRACTS)
CONTRACT = click.Choice(list(CONTRACTS))


def contracts_option(default: str = "") -> Callable[[Any], Any]:
    """--contract, which may be repeated, as the parameter `contracts`. default: a sentence on what none means."""
    text = f"Only this one, may be repeated: {NAMES}.{default and ' ' + default}"
    return click.option("--contract", "contracts", multiple=True, type=CONTRACT, metavar="NAME", help=text)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead, and nothing else.")


def element_type(text: str) -> DType:
    """A type's name, short or long."""
    dtype = by_name(text)
    if dtype is None:
        raise click.BadParameter(f"{text!r} is not an element type; the types are {', '.join(d.short for d in DTYPES)}")
    return dtype


def device(text: str) -> Device:
    """cpu, cuda (the first) or cuda:1."""
    matched = re.fullmatch(r"([a-z]+)(?::(\d+))?", text)
    if matched is None:
        raise click.BadParameter(f"{text!r} is not a device; write cpu, cuda or cuda:1")
    return Device(matched[1], int(matched[2] or 0))


def array_file(text: str) -> Location:
    """FILE or FILE:KEY."""
    try:
        return parse_location(text)
    except DetkernError as error:
        raise click.BadParameter(str(error)) from None
