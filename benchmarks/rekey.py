"""Records whose kernels were moved and not changed: `python -m benchmarks.rekey FILE`, of
`benchmarks.machine_code --output`.

A record names its sources by path and SHA-256. Where every build has the machine code that it had at the file's commit,
a record that was made with the kernel sources of that commit holds for those of the working tree: it gets their paths
and digests, and keeps the rest. A source that had changed before stays as it was recorded, and the record out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from detkern.cu import loader
from detkern.measure import records

__all__ = ["rekeyed"]

_KERNELS = "detkern/cu/"
_SUFFIXES = (".cu", ".cuh")


def _kernel_sources(paths: list[str]) -> list[str]:
    return [path for path in paths if path.startswith(_KERNELS) and path.endswith(_SUFFIXES)]


def rekeyed(sources: dict[str, str], before: dict[str, str]) -> dict[str, str] | None:
    """A record's sources with the working tree's of the same kernels, or None where it was made with others than
    `before`'s.

    before: path -> SHA-256 of the kernel sources at the commit.
    """
    own = _kernel_sources(list(sources))
    if not own or any(before.get(path) != sources[path] for path in own):
        return None
    kernels = [Path(path).name for path in own if path.endswith(".cu")]
    names = {name for kernel in kernels for name, _ in loader.read_sources(kernel)}
    paths = sorted(loader.FOLDER / name for name in names)
    now = {str(path.relative_to(records.ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return now | {path: digest for path, digest in sources.items() if path not in own}


def _at(commit: str) -> dict[str, str]:
    """path -> SHA-256 of a commit's kernel sources."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit, _KERNELS],
        cwd=records.ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    return {
        path: hashlib.sha256(
            subprocess.run(
                ["git", "show", f"{commit}:{path}"], cwd=records.ROOT, check=True, capture_output=True
            ).stdout
        ).hexdigest()
        for path in _kernel_sources(listed)
    }


def main() -> int:
    """Rewrite the records; status 1 where the file says that a build has changed."""
    parser = argparse.ArgumentParser(description="Give records the names of kernel sources that moved.")
    parser.add_argument("proof", type=Path, help="what benchmarks.machine_code --output wrote")
    arguments = parser.parse_args()
    proof = json.loads(arguments.proof.read_text())
    if proof["changed"] or proof["only_old"] or proof["only_new"]:
        print("the kernels are not the same: run the benchmarks again")
        return 1
    before = _at(proof["commit"])
    for path in sorted(records.RESULTS.glob("*/*.json")):
        made = json.loads(path.read_text())
        found = rekeyed(made["sources"], before)
        print(f"{path.relative_to(records.RESULTS)}  {'has the new names' if found else 'left as it is'}")
        if found:
            made["sources"] = found
            path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
