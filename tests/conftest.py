"""What all tests share: the `gpu` marker skips itself, saying so, where no CUDA device is."""

from __future__ import annotations

from functools import cache

import pytest


@cache
def missing_gpu() -> str | None:
    """Why no CUDA device can be used here, or None where one can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return None if count else "no device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := missing_gpu()):
            item.add_marker(pytest.mark.skip(reason=f"gpu: {reason}"))
