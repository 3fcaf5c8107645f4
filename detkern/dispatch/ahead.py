"""`preload`: what products will need is compiled and loaded before the first of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..config import configured_contract
from ..errors import ArgumentError, BackendUnavailable, ContractUnsupported
from ..tensors import device_of, dtype_argument
from ..vocabulary.contracts import Contract, get_contract
from ..vocabulary.dtypes import BF16, F16, F32, DType
from . import registry

__all__ = ["LAYOUTS", "preload"]

# How a [M, K] and b [K, N] lie, as BLAS names it: n in rows, t in columns (the transpose in rows). Whether the lines of
# each run along k.
LAYOUTS = {"nn": (True, False), "nt": (True, True), "tn": (False, False), "tt": (False, True)}


def preload(
    device: Any = "cuda",
    *,
    contracts: str | Iterable[str] | None = None,
    dtypes: Any = None,
    layouts: str | Iterable[str] = ("nt", "nn", "tn"),
) -> int:
    """Compile and load every kernel that products of these kinds may need, so that none of them does it later: a server
    calls it before it serves, and a graph may then capture products that were never called.

    Args:
        device: the ordinal of a CUDA device, or a name such as "cuda:0" or "cpu"; a torch.device.
        contracts: names of contracts. Default: for each type the one that a call gets that names none.
        dtypes: types of the operands, or one. Default: float32, float16 and bfloat16.
        layouts: how the operands lie: "nt" as in `linear` (weight [N, K]), "nn" as in `gemm` of arrays in rows and in
            the gradient of x, "tn" as in the gradient of a weight, "tt". Lines start at multiples of 16 bytes; operands
            that have to be gathered element by element are another kind, which loads when it is first used.

    Returns:
        The number of kernels that are loaded now, whether by this call or before. On the CPU 1, the library, or 0 where
        the NumPy version serves.

    Raises:
        ArgumentError: a device or a layout that there is not. DTypeError: a type that products do not take.
        ContractUnsupported: a contract that no backend has on the device for one of the types, or none for any.
        BackendUnavailable: no backend runs on the device, or what runs there has nothing that can be loaded ahead
            (Triton, NPUs).
        BuildError: a kernel does not compile.
    """
    where = device_of(device)
    wanted = [layouts] if isinstance(layouts, str) else list(layouts)
    for layout in wanted:
        if layout not in LAYOUTS:
            raise ArgumentError(f"layouts: {layout!r} is none of {', '.join(LAYOUTS)}")
    answers = []
    for row, backend, reason in registry.offers(where):
        if not row.dispatched:
            continue
        if reason is None and hasattr(backend, "preload"):
            pairs = _pairs(contracts, _types(dtypes), where)
            loaded: int = backend.preload(where, pairs, [LAYOUTS[layout] for layout in wanted])
            return loaded
        answers.append(f"{row.name}: {reason or 'has nothing that can be loaded ahead'}")
    raise BackendUnavailable(f"nothing can be preloaded on {where}: {'; '.join(answers) or 'no backend serves it'}")


def _types(dtypes: Any) -> list[DType]:
    if dtypes is None:
        return [F32, F16, BF16]
    return [dtype_argument(one, "dtypes") for one in (dtypes if isinstance(dtypes, (list, tuple, set)) else [dtypes])]


def _pairs(contracts: str | Iterable[str] | None, dtypes: list[DType], where: Any) -> list[tuple[Contract, DType]]:
    """Contracts with types of operands."""
    if contracts is None:
        return [(registry.contract_for(dtype, where, None, configured_contract(dtype)), dtype) for dtype in dtypes]
    asked = [get_contract(name) for name in ([contracts] if isinstance(contracts, str) else contracts)]
    found = [(contract, dtype) for contract in asked for dtype in dtypes if dtype in contract.operands]
    for contract in asked:
        if not any(contract == one for one, _ in found):
            raise ContractUnsupported(f"contract {contract} takes none of {', '.join(map(str, dtypes))}")
    for contract, dtype in found:
        if not registry.offered(contract, dtype, where, None):
            raise ContractUnsupported(f"no backend has contract {contract} for {dtype} on {where}")
    return found
