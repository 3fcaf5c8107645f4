"""How many threads this process may keep busy."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["available", "cgroup_cpus"]


def available() -> int:
    """The CPUs of the process's affinity mask, or its control group's quota if that is less."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    quota = cgroup_cpus()
    return max(allowed if quota is None else min(allowed, quota), 1)


@functools.cache
def cgroup_cpus(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The CPU quota of the process's control group and of those above it, rounded up to whole CPUs, or None for none.

    Read once: a container's quota rarely changes while it runs.
    """
    quotas = []
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            if controllers == "":
                base, read = root, _quota_v2
            elif "cpu" in names:
                base = next((root / name for name in (controllers, "cpu") if (root / name).is_dir()), root)
                read = _quota_v1
            else:
                continue
            folder = base / path.lstrip("/")
            # In a container the path may be the host's: then the root is the container's own group.
            for group in (folder, *folder.parents):
                with suppress(OSError, ValueError):
                    if (quota := read(group)) is not None:
                        quotas.append(quota)
                if group == base:
                    break
    return min(quotas, default=None)


def _quota_v2(group: Path) -> int | None:
    quota, period = (group / "cpu.max").read_text().split()
    return None if quota == "max" else _whole(int(quota), int(period))


def _quota_v1(group: Path) -> int | None:
    quota = int((group / "cpu.cfs_quota_us").read_text())
    return None if quota <= 0 else _whole(quota, int((group / "cpu.cfs_period_us").read_text()))


def _whole(quota: int, period: int) -> int:
    return max(-(-quota // period), 1)
