"""docs/migrating.md names what there is: entry points, arguments, contracts and backends."""

from __future__ import annotations

import re
from pathlib import Path

import detkern
import detkern.torch
from detkern.dispatch import registry
from detkern.errors import DetkernError
from detkern.vocabulary import contracts

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()


def test_every_name_of_detkern_exists() -> None:
    names = set(re.findall(r"(?<![/\w])detkern\.((?:torch\.)?[A-Za-z_]+)", PAGE))
    assert len(names) >= 7
    for name in names - {"config", "torch"}:
        owner = detkern
        for part in name.split("."):
            assert hasattr(owner, part), name
            owner = getattr(owner, part)


def test_every_entry_point_of_the_op_and_the_engine_exists() -> None:
    op = detkern.get_op("det_gemm")
    for name in (
        "fwd", "fwd_rhs_transposed", "fwd_fp32", "da", "db", "db_transposed", "linear", "forward_fp32",
        "forward_accum_fp32",
    ):  # fmt: skip
        assert f"{name}`" in PAGE or f"op.{name}" in PAGE or f"`{name}" in PAGE, name
        assert callable(getattr(op, name))
    for name in ("forward", "backward_dw", "backward_dx", "presize_upcast_scratch", "synchronize"):
        assert f"`{name}(" in PAGE
        assert callable(getattr(detkern.Engine, name))


def test_contracts_backends_and_errors_exist() -> None:
    for name in re.findall(r'contract="([^"]+)"', PAGE):
        assert name in contracts.CONTRACTS
    for name in ("cpu", "cuda", "triton", "native"):
        assert f"`{name}`" in PAGE
        assert name in registry.backend_names()
    for name in re.findall(r"`([A-Z][A-Za-z]+(?:Error|Unsupported))`", PAGE):
        assert issubclass(getattr(detkern, name), DetkernError)
