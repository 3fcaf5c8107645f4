"""What is installed is what lies in the tree: a kernel source that stays behind is missed only after `pip install .`."""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_file_of_the_package_is_installed() -> None:
    """setup.cfg's patterns hold for one package's own folder, as setuptools reads them, not for folders below it."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = {package: value.split(", ") for package, value in setup["options.package_data"].items()}
    installed: set[Path] = set()
    for marker in ROOT.glob("detkern/**/__init__.py"):
        folder = marker.parent
        package = ".".join(folder.relative_to(ROOT).parts)
        for pattern in ["*.py", *patterns["*"], *patterns.get(package, [])]:
            installed.update(folder.glob(pattern))
    there = {path for path in ROOT.glob("detkern/**/*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path.suffix for path in there} >= {".py", ".cpp", ".h", ".cu", ".cuh", ".json", ".j2", ".typed"}
    assert sorted(str(path.relative_to(ROOT)) for path in there - installed) == []
