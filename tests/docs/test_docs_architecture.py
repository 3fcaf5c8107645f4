"""docs/architecture.md names what there is: paths, operations, parts of a record."""

from __future__ import annotations

import re
from pathlib import Path

from detkern.dispatch.backend import Implementation
from detkern.operations.table import OPERATIONS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FOLDERS = (
    ROOT,
    ROOT / "detkern",
    ROOT / "detkern" / "cu",
    ROOT / "detkern" / "cu" / "kernels",
    ROOT / "detkern" / "operations" / "gemm",
)


def test_every_path_exists() -> None:
    spans = set(re.findall(r"`([\w./*-]+)`", PAGE))
    paths = {span for span in spans if "/" in span or span.endswith((".py", ".cu", ".cfg"))}
    assert len(paths) > 40
    missing = [path for path in paths if not any(any(folder.glob(path.rstrip("/"))) for folder in FOLDERS)]
    assert sorted(missing) == []


def test_every_kernel_of_cuda_is_named() -> None:
    assert [path.name for path in (ROOT / "detkern" / "cu").rglob("*.cu") if f"`{path.name}`" not in PAGE] == []


def test_the_operations_are_those_of_the_table() -> None:
    (listed,) = re.findall(r"lists\s+the\s+operations:\s+(.*?)\.\s", PAGE, re.DOTALL)
    folders = {re.sub(r".*operations\.(\w+)\..*", r"\1", operation.problem.__module__) for operation in OPERATIONS}
    assert set(re.findall(r"`(\w+)`", listed)) == folders


def test_an_implementation_has_the_methods_that_the_page_names() -> None:
    (listed,) = re.findall(r"has\s+three\s+methods:(.*?)\.\s", PAGE, re.DOTALL)
    methods = {name for name in vars(Implementation) if not name.startswith("_")}
    assert set(re.findall(r"`(\w+)\(", listed)) == methods
