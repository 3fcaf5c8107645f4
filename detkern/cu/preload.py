"""Kernels loaded on a device before a launch needs them. Imports CuPy, so it comes in once a device is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cupy import cuda

from .device import CudaDevice
from .loader import KernelBuild, compiled_image, load_function, loaded_architecture

__all__ = ["load_all"]


def load_all(device: CudaDevice, builds: Sequence[KernelBuild]) -> int:
    """Compile what the cache lacks, by threads (NVRTC lets go of the interpreter), and load all of it; returns the
    number.

    Raises BuildError where a kernel does not compile, DeviceError where the device does not load one.
    """
    architecture = loaded_architecture(device.capability)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(compiled_image, builds, [architecture] * len(builds)):
            pass
    with cuda.Device(device.index):
        stream = cuda.get_current_stream().ptr
        for build in builds:
            load_function(device.index, device.capability, build, stream)
    return len(builds)
