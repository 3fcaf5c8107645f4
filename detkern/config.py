"""Process defaults and their environment variables. Shown by `detkern info`.

contract (DETKERN_CONTRACT): the contract of calls that name none. A contract's name (it binds the operand types that it
    lists), a mapping from type names to contract names ("f32=fma,bf16=tree" in the environment), or None for the
    default of type and device.
num_threads (DETKERN_NUM_THREADS): threads that one call of the CPU backend may use, or None for as many as the process
    may run on.
cache_dir (DETKERN_CACHE_DIR): where compiled kernels are kept, or None for the user's cache folder.
dependent_launch (DETKERN_DEPENDENT_LAUNCH): whether CUDA kernels that can may start while the kernel before them in the
    stream still ends (programmatic dependent launch); True unless set to False ("0").

Set them as module attributes (`detkern.config.contract = "mma16"`); a wrong value raises ArgumentError (an unknown
contract ContractUnsupported) at once and changes nothing. They are read at each call, and hold for all threads of the
process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from .errors import ArgumentError, DetkernError
from .vocabulary.contracts import Contract, get_contract
from .vocabulary.dtypes import DTYPES, DType, by_name

__all__ = ["cache_dir", "check_environment", "configured_contract", "contract", "dependent_launch", "num_threads"]

contract: str | Mapping[str, str] | None
num_threads: int | None
cache_dir: Path | None
dependent_launch: bool


def _parse_contract(value: Any) -> dict[DType, Contract]:
    if value is None:
        return {}
    if isinstance(value, str) and "=" in value:
        pairs = [part.partition("=") for part in value.split(",")]
        value = {name.strip(): wanted.strip() for name, _, wanted in pairs}
    if isinstance(value, str):
        chosen = get_contract(value)
        return dict.fromkeys(chosen.operands, chosen)
    if not isinstance(value, Mapping):
        raise ArgumentError(
            f"contract must be a contract's name, a mapping of type names to names, or None, not {value!r}"
        )
    result = {}
    for type_name, contract_name in value.items():
        dtype = by_name(type_name)
        if dtype is None:
            known = ", ".join(d.short for d in DTYPES)
            raise ArgumentError(f"contract: {type_name!r} is not an operand type; the types are {known}")
        chosen = get_contract(contract_name)
        if dtype not in chosen.operands:
            takes = ", ".join(d.short for d in chosen.operands)
            raise ArgumentError(f"contract: {chosen.name} does not take {dtype.short}; it takes {takes}")
        result[dtype] = chosen
    return result


def _parse_threads(value: Any) -> int | None:
    if value is None:
        return None
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        count = 0
    # The upper end is that of the C ABI's field.
    if not 1 <= count < 1 << 31 or isinstance(value, bool) or (not isinstance(value, str) and count != value):
        raise ArgumentError(f"num_threads must be a whole number from 1 to 2^31 - 1, or None, not {value!r}")
    return count


def _parse_path(value: Any) -> Path | None:
    if value is None:
        return None
    try:
        return Path(value).expanduser().absolute()  # of the folder that the process was in when it was set
    except TypeError:
        raise ArgumentError(f"cache_dir must be a path or None, not {value!r}") from None
    except RuntimeError as error:  # ~ of a user who is not known here
        raise ArgumentError(f"cache_dir={value!r}: {error}") from None


def _parse_switch(value: Any) -> bool:
    if value is None or value is True or value == "1":
        return True
    if value is False or value == "0":
        return False
    raise ArgumentError(f"dependent_launch must be True or False (1 or 0 in the environment), not {value!r}")


def configured_contract(dtype: DType) -> Contract | None:
    """The process default for operands of `dtype`, or None where none is set.

    Raises what DETKERN_CONTRACT deserved, where it was wrong.
    """
    if "contract" in _refused:
        raise _refused["contract"]
    return _bound.get(dtype)


def check_environment() -> None:
    """Raise what the first wrong environment variable deserved, before anything reads the setting."""
    for error in _refused.values():
        raise error


_bound: dict[DType, Contract] = {}
# The same in one string: what caches of calls and torch.compile's guards compare.
_stated: str = ""
# Settings whose environment variable is wrong. Raised where they are read, not when detkern is imported, where no
# caller could catch it and the command line could not say it in a line.
_refused: dict[str, DetkernError] = {}


# Of the module and not of its type, whose own would make each reading of a setting three times as slow.
def __getattr__(name: str) -> Any:
    if name in _refused:
        raise _refused[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Config(ModuleType):
    """The module's own type: assignments are checked before they take effect."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "contract":
            global _bound, _stated
            _bound = _parse_contract(value)
            _stated = ",".join(f"{dtype.short}={chosen.name}" for dtype, chosen in _bound.items())
            # Later changes of the caller's have no effect, and changes in place are refused rather than ignored.
            value = MappingProxyType(dict(value)) if isinstance(value, Mapping) else value
        elif name == "num_threads":
            value = _parse_threads(value)
        elif name == "cache_dir":
            value = _parse_path(value)
        elif name == "dependent_launch":
            value = _parse_switch(value)
        elif not name.startswith("_"):
            raise ArgumentError(
                f"detkern.config has no setting {name!r}; it has contract, num_threads, cache_dir and dependent_launch"
            )
        _refused.pop(name, None)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise ArgumentError(f"detkern.config.{name} cannot be deleted; set it to None for the default")


def _from_environment() -> None:
    module = sys.modules[__name__]
    module.__class__ = _Config
    for name, variable in (
        ("contract", "DETKERN_CONTRACT"),
        ("num_threads", "DETKERN_NUM_THREADS"),
        ("cache_dir", "DETKERN_CACHE_DIR"),
        ("dependent_launch", "DETKERN_DEPENDENT_LAUNCH"),
    ):
        try:
            setattr(module, name, os.environ.get(variable) or None)
        except DetkernError as error:
            _refused[name] = type(error)(f"{variable}: {error}")


_from_environment()
