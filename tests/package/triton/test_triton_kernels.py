"""The Triton kernels without a GPU: their bits and indexing under Triton's interpreter, what Triton compiles them for,
and that they compile for the GPUs that they are meant for.

The interpreter's fused multiply-add rounds once from Triton 3.9 on, so `fma` and `tree` have every bit there (before,
those of f16); its tl.dot is NumPy's product, so `mma16` and `tree-mma16` are run on whole numbers, whose sums are exact
in any order.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

KERNELS = [("mma", "mma_gemm"), ("fma", "fma_gemm"), ("tree", "tree_gemm"), ("column_sum", "column_sum")]
INTERPRETED = Path(__file__).parents[2] / "triton_interpreted.py"


@pytest.mark.parametrize("part", ["chains", "trees", "dots", "batches", "sums", "selfcheck"])
def test_under_the_interpreter(part: str) -> None:
    """TRITON_INTERPRET has to be set before Triton is imported, so each part runs in a process of its own."""
    version = tuple(int(number) for number in importlib.metadata.version("triton").split(".")[:2])
    if version < (3, 9):
        pytest.skip("the interpreter of Triton before 3.9 does not run under NumPy 2.4 and newer")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(INTERPRETED), part], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("compared ")


def _kernel(module: str, name: str) -> Any:
    from detkern.triton import launch

    return launch._kernel(module, name)


@pytest.mark.parametrize(("module", "name"), KERNELS)
def test_triton_specialises_on_no_value(module: str, name: str) -> None:
    """Each class that Triton tells apart: 0, 1, multiples of 16 and others, 32 and 64 bits, negative. For each argument
    on its own, and for all at once, what Triton would compile is the same."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = _kernel(module, name)
    constants = {p.name: 1 for p in kernel.params if p.is_constexpr}
    names = [p.name for p in kernel.params if not p.is_constexpr]
    classes = (0, 1, 2, 16, 17, 2**31 - 1, 2**31, 2**32, 2**40 + 16, 2**62 + 1, -1, -16, -(2**31) - 1)
    for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        classify = create_function_from_signature(kernel.signature, kernel.params, make_backend(target))

        def kind(classify: Any = classify, **values: int) -> list[Any]:
            _, specialization, _ = classify(**dict.fromkeys(names, 3) | values, **constants)
            return [str(found) for found in specialization]

        expected = kind()
        for value in classes:
            assert kind(**dict.fromkeys(names, value)) == expected
            for one in names:
                assert kind(**{one: value}) == expected, (one, value)


def test_a_kernel_that_may_be_specialised_would_be_seen() -> None:
    """The test above can fail: without the list of arguments, Triton tells the classes apart."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    plain = JITFunction(_plain)
    classify = create_function_from_signature(plain.signature, plain.params, make_backend(GPUTarget("cuda", 90, 32)))
    kinds = {str(classify(value)[1]) for value in (1, 16, 17, 2**40)}
    assert len(kinds) > 2


def _plain(value) -> None:  # type: ignore[no-untyped-def]  # an annotation would fix the type
    pass


def test_kernels_are_plain_and_pinned() -> None:
    """No autotuning, no heuristics: a kernel is compiled for the constants that geometry.py gives, and for nothing
    else."""
    for module, name in KERNELS:
        kernel = _kernel(module, name)
        assert type(kernel).__name__ == "JITFunction"
        assert "fp_fusion" not in inspect.getsource(kernel.fn), "fusion is switched off at the launch, for all"


def _compiled(contract: Any, target: Any, **options: Any) -> Any:
    import triton
    import triton.language as tl

    from detkern.operations.gemm.problem import gemm_problem
    from detkern.tensors import Device, TensorView
    from detkern.triton import geometry, launch
    from detkern.vocabulary.dtypes import BF16

    device = Device("cuda", 0)
    a, b, out = (
        TensorView(1 << 20, shape, strides, BF16, device)
        for shape, strides in (((4096, 4096), (4096, 1)), ((4096, 4096), (1, 4096)), ((4096, 4096), (4096, 1)))
    )
    plan = launch.plan_for(gemm_problem(contract, a, b, out, None, False), 132)
    assert (plan.launch.load_a, plan.launch.load_b) == (geometry.Load.K_MAJOR, geometry.Load.K_MAJOR)
    kernel = _kernel(plan.launch.kernel, f"{plan.launch.kernel}_gemm")
    signature = {p.name: "constexpr" if p.is_constexpr else "i64" for p in kernel.params}
    _, settings = launch._call(plan, (0,) * 5)
    chosen = {name: settings.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    assert chosen["enable_fp_fusion"] is False
    assert settings["OPERAND"] is tl.bfloat16
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=settings)
    return triton.compile(source, target=target, options=chosen)


def test_mma16_on_hopper_is_wgmma_fed_by_asynchronous_copies_of_16_bytes() -> None:
    """As the CUDA backend's: one accumulator through all steps of 16 k, nothing contracted. Compiled without a GPU."""
    from triton.backends.compiler import GPUTarget

    from detkern.vocabulary.contracts import MMA16

    compiled = _compiled(MMA16, GPUTarget("cuda", 90, 32))
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16" in ptx
    assert "cp.async.cg.shared.global" in ptx
    assert "st.global.v4.b32" in ptx
    assert "fma.rn.f32" not in ptx
    assert ".ftz" not in ptx
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_fma_is_the_fused_instruction_and_keeps_subnormals(target: str) -> None:
    from triton.backends.compiler import GPUTarget

    from detkern.vocabulary.contracts import FMA

    if target == "cuda":
        ptx = _compiled(FMA, GPUTarget("cuda", 80, 32)).asm["ptx"]
        assert "fma.rn.f32" in ptx
        assert ".ftz" not in ptx
        return
    assembly = _compiled(FMA, GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]
    assert "v_fmac_f32" in assembly or "v_fma_f32" in assembly or "v_pk_fma_f32" in assembly
    assert ".amdhsa_float_denorm_mode_32 3" in assembly
