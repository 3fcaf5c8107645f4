"""What `import detkern` costs and touches, and the names that it gives."""

from __future__ import annotations

import importlib.resources
import subprocess
import sys

import pytest

import detkern

FRAMEWORKS = ("torch", "jax", "cupy", "triton")


def run(code: str, *flags: str) -> str:
    return subprocess.run([sys.executable, *flags, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_takes_less_than_300_ms() -> None:
    """Or, where NumPy alone takes long because the cores are shared, twice that."""

    def seconds(modules: str) -> float:
        code = f"import time; start = time.process_time(); import {modules}; print(time.process_time() - start)"
        run(code)  # fills the bytecode cache
        return min(float(run(code)) for _ in range(5))

    assert seconds("detkern") < max(0.3, 2 * seconds("numpy, ml_dtypes"))


def test_import_and_a_product_touch_no_framework() -> None:
    code = f"""
import sys, numpy as np
import detkern
detkern.gemm(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32))
print([name for name in {FRAMEWORKS!r} if name in sys.modules])
"""
    assert run(code).strip() == "[]"


def test_measuring_code_touches_no_framework_until_it_measures() -> None:
    """But for the peer that is a Triton kernel; and `import detkern` does not bring measuring code in."""
    code = f"""
import sys, detkern
print([name for name in sys.modules if name.startswith("detkern.measure")])
from detkern.measure import cublaslt, drawn, models, operands, peers, pool, records, shapes, timing
print([name for name in {FRAMEWORKS!r} if name in sys.modules], len(models.load()) > 60, len(shapes.load().layers))
"""
    assert run(code).splitlines() == ["[]", "[] True 18"]


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_one_framework_does_not_bring_in_another(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    make = {"torch": "torch.ones(2, 2)", "jax": "jax.numpy.ones((2, 2))"}[name]
    code = f"""
import sys
import {name}
before = set(sys.modules)
import detkern
detkern.gemm({make}, {make})
print([name for name in {FRAMEWORKS!r} if name in set(sys.modules) - before])
"""
    assert run(code).strip() == "[]"


def test_frameworks_may_be_absent() -> None:
    block = "import sys\nfor name in ('torch', 'jax', 'cupy', 'triton'): sys.modules[name] = None\n"
    code = block + (
        "import numpy as np, detkern\n"
        "print(detkern.gemm(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)).tolist())\n"
        "try: detkern.gemm([1.0], [1.0])\n"
        "except detkern.DTypeError as error: print(error)\n"
    )
    first, second = run(code).splitlines()
    assert first == "[[3.0, 3.0], [3.0, 3.0]]"
    assert second.startswith("a is not an array but list")


def test_backends_load_without_their_frameworks() -> None:
    """What they implement is asked on other machines too: by the mode, which without CuPy works on the CPU."""
    code = f"""
import sys
for name in {FRAMEWORKS!r}: sys.modules[name] = None
from detkern.dispatch import registry
print([row.name for row in registry.TABLE if not registry.load(row.name).implementations])
"""
    assert run(code).strip() == "[]"


def test_the_public_names() -> None:
    assert sorted(detkern.__all__) == [
        "ArgumentError", "BackendUnavailable", "BuildError", "ContractUnsupported", "DTypeError", "DetkernError",
        "DeviceError", "Engine", "Explanation", "ShapeError", "__version__", "bias_gradient", "config", "explain",
        "gemm", "gemm_da", "gemm_db", "get_op", "linear", "linear_logp", "linear_logp_merge", "linear_logp_partial",
        "list_ops", "preload", "rows", "scatter_sum",
    ]  # fmt: skip
    for name in detkern.__all__:
        assert getattr(detkern, name) is not None
    assert detkern.__version__.count(".") == 2


def test_every_public_function_is_documented() -> None:
    for name in ("gemm", "linear", "gemm_da", "gemm_db", "linear_logp", "linear_logp_partial", "linear_logp_merge"):
        text = getattr(detkern, name).__doc__
        assert "Args:" in text
        assert "Returns:" in text
        assert "Raises:" in text


def test_types_are_shipped() -> None:
    assert importlib.resources.files(detkern).joinpath("py.typed").is_file()


def test_the_mode_is_loaded_when_it_is_asked_for() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    code = """
import sys
import detkern.torch as dt
print([name for name in sys.modules if name.startswith("detkern.torch.mode")], "enable" in dir(dt), dt.is_enabled())
"""
    assert run(code).strip() == "[] True False"
