"""The command line on a CUDA device: arrays put there and brought back, verify, and fingerprints equal to the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import triton_device
from click.testing import CliRunner

from detkern.cli.devices import devices, fetch, place
from detkern.cli.main import main
from detkern.cli.properties import LAYOUTS
from detkern.tensors import Device
from detkern.vocabulary.dtypes import DTYPES, DType
from detkern.vocabulary.operands import generate

pytestmark = pytest.mark.gpu

CUDA = Device("cuda", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_go_there_and_back_in_every_layout(dtype: DType) -> None:
    import cupy

    assert CUDA in devices()
    matrix = generate("bits", dtype, (7, 5), 1)
    for label, layout in LAYOUTS.items():
        placed = layout(matrix, lambda array: place(array, CUDA))
        assert isinstance(placed, cupy.ndarray), label
        assert placed.dtype == dtype.numpy, label
        assert np.array_equal(fetch(placed).view(dtype.bits), matrix.view(dtype.bits)), label
    assert fetch(place(matrix[:0], CUDA)).shape == (0, 5)


def test_verify() -> None:
    result = CliRunner().invoke(main, ["verify", "--quick", "--device", "cuda:0", "--backend", "cuda"])
    assert result.exit_code == 0, result.output
    assert "cuda on cuda:0" in result.stdout
    assert "FAIL" not in result.stdout


def test_verify_of_the_triton_backend() -> None:
    """One contract: each kernel that Triton has not compiled before takes it some seconds."""
    triton_device.skip_if_missing()
    command = ["verify", "--quick", "--device", "cuda:0", "--backend", "triton", "--contract", "mma16"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "triton on cuda:0" in result.stdout
    assert "FAIL" not in result.stdout


def test_fingerprints_equal_the_cpus() -> None:
    here = CliRunner().invoke(main, ["fingerprint", "--device", "cuda:0"]).stdout.splitlines()
    there = CliRunner().invoke(main, ["fingerprint"]).stdout.splitlines()
    assert here[0] == there[0]
    assert len(here) > 5
    assert set(here) <= set(there)
    named = CliRunner().invoke(main, ["fingerprint", "--backend", "cuda"]).stdout.splitlines()
    assert named == here, "a named backend finds its device"
