"""Types of option that several commands take."""

from __future__ import annotations

import re
from typing import Any

import click

from ..contracts import CONTRACTS
from ..dtypes import DTYPES, DType, by_name
from ..tensors import Device

__all__ = ["CONTRACT", "DEVICE", "DTYPE"]

CONTRACT = click.Choice(list(CONTRACTS))


class _DType(click.ParamType):
    name = "|".join(d.short for d in DTYPES)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DType:
        dtype = value if isinstance(value, DType) else by_name(str(value))
        if dtype is None:
            self.fail(f"{value!r} is no element type; the types are {', '.join(d.short for d in DTYPES)}", param, ctx)
        return dtype


class _Device(click.ParamType):
    name = "cpu|cuda:N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Device:
        if isinstance(value, Device):
            return value
        matched = re.fullmatch(r"([a-z]+)(?::(\d+))?", str(value))
        if matched is None:
            self.fail(f"{value!r} is no device; write cpu, cuda or cuda:1", param, ctx)
        return Device(matched[1], int(matched[2] or 0))


DTYPE = _DType()
DEVICE = _Device()
