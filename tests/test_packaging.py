"""What is installed is what lies in the tree: a kernel source that stays behind is missed only after `pip install .`;
and the source distribution has everything that its own tests read."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (".ci", "benchmarks", "detkern", "docs", "examples", "tests")


def configuration() -> configparser.ConfigParser:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def test_every_file_of_the_package_is_installed() -> None:
    """setup.cfg's patterns hold for one package's own folder, as setuptools reads them, not for folders below it."""
    setup = configuration()
    patterns = {package: value.split(", ") for package, value in setup["options.package_data"].items()}
    installed: set[Path] = set()
    for marker in ROOT.glob("detkern/**/__init__.py"):
        folder = marker.parent
        package = ".".join(folder.relative_to(ROOT).parts)
        for pattern in ["*.py", *patterns["*"], *patterns.get(package, [])]:
            installed.update(folder.glob(pattern))
    there = {path for path in ROOT.glob("detkern/**/*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.suffix for path in there} >= {".py", ".cpp", ".h", ".cu", ".cuh", ".json", ".j2", ".toml", ".typed"}
    assert sorted(str(path.relative_to(ROOT)) for path in there - installed) == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree as it is committed: no egg-info, whose list of files setuptools would take over."""
    copy = tmp_path_factory.mktemp("tree") / "detkern"
    copy.mkdir()
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
        )
    for path in ROOT.iterdir():
        if path.is_file() and path.name not in (
            "PKG-INFO",
            ".git",
        ):  # the one is of a distribution, the other of a worktree
            shutil.copy(path, copy)
    return copy


def test_the_source_distribution_is_the_whole_tree(tree: Path, tmp_path: Path) -> None:
    committed = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert {
        "README.md",
        "docs/contracts.md",
        "tests/golden/h200.json",
        "tests/emulation/fibers.h",
        ".ci/run",
    } <= committed
    code = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True, text=True)
    (archive,) = tmp_path.glob("detkern-*.tar.gz")
    with tarfile.open(archive) as file:
        packed = {member.name.partition("/")[2] for member in file if member.isfile()}
    assert sorted(committed - packed) == []
    made = {"PKG-INFO", *(name for name in packed if name.startswith("detkern.egg-info/"))}
    assert sorted(packed - committed - made) == []


def test_advice_on_installing_names_what_works_from_a_checkout() -> None:
    """An index may not have the package; every extra that is named exists."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", "")]
    texts = {
        path: path.read_text() for path in [*files, *ROOT.glob("*.md")] if path.is_file() and path != Path(__file__)
    }
    by_name = re.compile(r"pip install (?:-\S+ )*['\"]?detkern\b")
    assert [str(path) for path, text in texts.items() if by_name.search(text)] == []
    extras = set(configuration()["options.extras_require"])
    named = {
        extra
        for text in texts.values()
        for found in re.findall(r"\"\.\[([\w,]+)\]\"", text)
        for extra in found.split(",")
    }
    assert {"cuda13", "test", "examples"} <= named
    assert named <= extras
    calls = re.findall(
        r"\binstall\(([^)]*)\)",
        "\n".join(texts[path] for path in files if path.suffix == ".py" and "tests" not in path.parts),
    )
    asked = {extra for call in calls for extra in re.findall(r"[\"'](\w+)[\"']", call)}
    assert {"cuda13", "cuda12", "torch", "triton", "bench"} <= asked <= extras
