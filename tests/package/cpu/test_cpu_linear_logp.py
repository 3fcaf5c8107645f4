"""The C++ of linear_logp against its replay, bit for bit: every sample of the records, scaled logits, shards, strides,
blocks of rows and columns, and the form without intrinsics."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import same

import detkern
from detkern.abi import mirror
from detkern.abi.build import find_compiler
from detkern.abi.descriptors import logp_descriptors
from detkern.abi.library import Library
from detkern.cpu import backend, compiled
from detkern.dispatch.backend import Execution
from detkern.errors import ArgumentError, ContractUnsupported
from detkern.operations.linear_logp.operation import DELTA, FOLD
from detkern.operations.linear_logp.problem import (
    PARTS,
    DeltaProblem,
    FoldProblem,
    Scaling,
    delta_problem,
    fold_problem,
    part_edges,
)
from detkern.operations.linear_logp.replay import delta, fold
from detkern.operations.operation import Sample, replayed
from detkern.tensors import Device, TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import FMA, MMA16, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType, from_numpy

CPU = Device("cpu")
CODES = {"linear_logp": 5, "linear_logp_delta": 6}
SCALINGS = [
    Scaling(),
    Scaling(tau=float(np.float32(1 / 0.7))),
    Scaling(cap=15.0, inverse=float(np.float32(1 / 15))),
    Scaling(tau=float(np.float32(1 / 1.3)), cap=30.0, inverse=float(np.float32(1 / 30))),
]


@pytest.fixture(scope="module")
def native() -> Library:
    library = backend.library()
    assert isinstance(library, Library)
    return library


def view(array: np.ndarray) -> TensorView:
    dtype = from_numpy(array.dtype)
    assert dtype is not None
    strides = tuple(step // array.itemsize for step in array.strides)
    return TensorView(array.ctypes.data, array.shape, strides, dtype, CPU, array=array)


def run(library: Library, problem: FoldProblem | DeltaProblem, given: tuple[Any, ...], out: np.ndarray) -> np.ndarray:
    """By the library itself, with three threads."""
    operation = FOLD if isinstance(problem, FoldProblem) else DELTA
    assert operation.descriptor is not None
    views = tuple(None if x is None else view(x) for x in given)
    (launch,) = operation.descriptor.launches(problem)(problem.m, views, view(out))  # type: ignore[arg-type]
    launch.threads = 3
    library.run(operation.descriptor.code, launch)
    return out


def case(m: int, vocabulary: int, depth: int, dtype: DType, seed: int, targets: int = 2, kind: str = "normal") -> Any:
    """hidden, weight, target, bias: bases of larger arrays, backwards, in columns; some targets ignored or outside."""
    hidden = operands.generate(kind, dtype, (2 * m, depth), seed)[::-2]
    weight = np.asfortranarray(operands.generate(kind, dtype, (vocabulary, depth), seed + 1))
    target = np.random.default_rng(seed).integers(-1, vocabulary + 1, (targets, m)).T
    target[::5] = -100
    bias = operands.generate("normal", (F32, BF16, F16)[seed % 3], (vocabulary, 2), seed + 2)[:, 1]
    return hidden, weight, target.astype((np.int64, np.int32)[seed % 2]), bias


def compared(
    library: Library, contract: Contract, given: Any, scaling: Scaling, entropy: bool, out_dtype: DType
) -> None:
    """The fold and the gradient by the library and by the replay."""
    hidden, weight, target, bias = given
    vocabulary, (m, targets) = weight.shape[0], target.shape
    state = fold(contract, *given, vocabulary=vocabulary, scaling=scaling, entropy=entropy)
    out = np.full((2 * m, STATES + targets), np.nan, np.float32)[::2].T
    problem = fold_problem(
        contract, *map(view, given), view(out),
        vocabulary=vocabulary, start=0, first=0, count=PARTS, scaling=scaling, entropy=entropy,
    )  # fmt: skip
    assert same(run(library, problem, given, out), state)
    grads = operands.generate("normal", F32, (targets + 1 + entropy, 2 * m), 7)[:, ::2]
    columns = slice(vocabulary // 3, vocabulary)
    part = hidden, weight[columns], target, state, grads, bias[columns]
    settings: Any = {"vocabulary": vocabulary, "start": columns.start, "ignore_index": -100, "scaling": scaling}
    expected = delta(
        contract, hidden, weight[columns], target, state, grads, bias[columns], entropy=entropy, out_dtype=out_dtype,
        **settings,
    )  # fmt: skip
    block = np.full(expected.shape[::-1], 7, out_dtype.numpy).T
    found = run(library, delta_problem(contract, *map(view, part), view(block), **settings), part, block)
    assert same(found, expected)


STATES = 3


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("scaling", SCALINGS, ids=["plain", "tau", "cap", "both"])
def test_scaled_logits(native: Library, scaling: Scaling, entropy: bool) -> None:
    for number, vocabulary in enumerate((1, 7, 63, 64, 65, 511, 512, 513, 1023, 1025, 2300)):
        contract, dtype = ((MMA16, BF16), (FMA, F32), (MMA16, F16), (FMA, BF16))[number % 4]
        kind = ("normal", "wide", "cancel")[number % 3]
        given = case(9, vocabulary, 5 + number, dtype, number, kind=kind)
        compared(native, contract, given, scaling, entropy, (F32, F16, BF16)[number % 3])


def samples() -> Iterator[tuple[Any, Sample]]:
    for operation in (FOLD, DELTA):
        for variant, dtypes in operation.variants.items():
            for dtype in dtypes:
                yield from ((operation, sample) for sample in list(operation.cases(variant, dtype))[::2])


def test_the_cases_of_the_self_check() -> None:
    """By the backend as calls reach it; hostile operands of all kinds."""
    for operation, sample in samples():
        got = operation.call(sample.variant)(sample.operands, sample.shape, backend="cpu", out_dtype=sample.dtype.name)
        assert same(np.asarray(got), replayed(operation, sample)), (sample.variant, sample.about)


def test_rows_and_columns_in_blocks(native: Library) -> None:
    """More rows than a block has, and a part that is wider than one, in three threads."""
    vocabulary = 70_000
    edges = part_edges(vocabulary)
    hidden, weight, target, bias = case(270, edges[1], 1, F32, 3)
    given = hidden, weight, target, bias
    state = fold(FMA, *given, vocabulary=vocabulary, first=0, count=1)
    out = np.full(state.shape, np.nan, np.float32)
    problem = fold_problem(
        FMA, *map(view, given), view(out),
        vocabulary=vocabulary, start=0, first=0, count=1, scaling=Scaling(), entropy=True,
    )  # fmt: skip
    assert same(run(native, problem, given, out), state)
    grads = operands.generate("normal", F32, (4, 270), 7)
    settings: Any = {"vocabulary": vocabulary, "start": 0, "ignore_index": -100, "scaling": Scaling()}
    expected = delta(FMA, hidden, weight, target, state, grads, bias, out_dtype=F16, **settings)
    block = np.full(expected.shape, 7, np.float16)
    part = hidden, weight, target, state, grads, bias
    assert same(run(native, delta_problem(FMA, *map(view, part), view(block), **settings), part, block), expected)


def test_shards_of_parts(native: Library) -> None:
    for vocabulary in (5, 600, 1100):
        hidden, weight, target, bias = case(7, vocabulary, 8, F16, vocabulary)
        edges = part_edges(vocabulary)
        for first, count in ((0, 4), (4, 4), (2, 2), (7, 1), (0, 8)):
            columns = slice(edges[first], edges[first + count])
            given = hidden, weight[columns], target, bias[columns]
            out = np.full((5, 7), np.nan, np.float32)
            problem = fold_problem(
                MMA16, *map(view, given), view(out),
                vocabulary=vocabulary, start=columns.start, first=first, count=count, scaling=Scaling(), entropy=True,
            )  # fmt: skip
            expected = fold(MMA16, *given, vocabulary=vocabulary, first=first, count=count)
            assert same(run(native, problem, given, out), expected), (vocabulary, first, count)


def test_one_plan_serves_any_number_of_rows() -> None:
    """Lines of a number for each row lie as far apart as there are rows."""
    hidden, weight, target, bias = case(30, 200, 8, BF16, 1)
    hidden, target = np.ascontiguousarray(hidden), np.ascontiguousarray(target)
    whole = detkern.linear_logp_partial(hidden, weight, target, bias)
    for rows in (30, 2, 29, 1, 0):
        some = detkern.linear_logp_partial(hidden[:rows], weight, target[:rows], bias)
        assert same(some, np.ascontiguousarray(whole[:, :rows]))


def test_the_form_without_intrinsics(tmp_path: Path) -> None:
    """Compiled from the same text, with the products that it needs and none of the others."""
    folder = Path(compiled.__file__).parent
    others = ["run_mma16", "run_mma8", "run_tree", "run_tree_mma16", "run_fp8_block128"]
    stubs = tmp_path / "stubs.cpp"
    stubs.write_text(
        f'#include "{folder}/job.h"\nnamespace detkern {{\nconst int MMA_ROWS = 0;\n'
        + "".join(f"void {name}(const Job&) {{}}\n" for name in others)
        + "void run_column_sum(const SumJob&) {}\nvoid run_rows(const RowJob&) {}\n"
        + "void run_prefix_sums(const RowJob&) {}\n}\n"
    )
    sources = [folder / name for name in ("library.cpp", "linear_logp.cpp", "fma.cpp", "packing.cpp", "epilogue.cpp")]
    path = tmp_path / "portable.so"
    flags = [flag for flag in compiled.recipe().flags if flag != "-O3"]
    command = [*find_compiler().command, *flags, "-O1", "-DDETKERN_PORTABLE", "-shared", *map(str, sources), str(stubs)]
    subprocess.run([*command, "-o", str(path)], check=True)
    portable = Library(path)
    assert " portable " in portable.name
    for number, (vocabulary, scaling) in enumerate(((65, SCALINGS[0]), (700, SCALINGS[3]), (1100, SCALINGS[2]))):
        given = case(5, vocabulary, 6, F32, number, kind=("wide", "normal", "bits")[number])
        compared(portable, FMA, given, scaling, True, (F16, BF16, F32)[number])


def test_the_library_checks_descriptors_itself(native: Library) -> None:
    hidden, weight, target, bias = case(4, 100, 3, F32, 0)
    state = detkern.linear_logp_partial(hidden, weight, target, bias)
    grads, out = np.ones((4, 4), np.float32), np.zeros((4, 100), np.float32)
    given = hidden, weight, target, state, grads, bias
    views = tuple(map(view, given))
    settings: Any = {"vocabulary": 100, "start": 0, "ignore_index": -100, "scaling": Scaling()}
    problem = delta_problem(FMA, *views, view(out), **settings)
    assert DELTA.descriptor is not None
    (good,) = DELTA.descriptor.launches(problem)(4, views, view(out))
    native.run(6, good)
    assert out.any()
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (ArgumentError, {"size": 8}),
        (ContractUnsupported, {"contract": 3}),
        (ContractUnsupported, {"contract": 2}),
        (ContractUnsupported, {"operand_dtype": 4}),
        (ContractUnsupported, {"bias_dtype": 4}),
        (ContractUnsupported, {"out_dtype": 5}),
        (ContractUnsupported, {"target_size": 2}),
        (ArgumentError, {"m": -1}),
        (ArgumentError, {"n": -1}),
        (ArgumentError, {"targets": -1}),
        (ArgumentError, {"start": 1}),
        (ArgumentError, {"start": -1}),
        (ArgumentError, {"vocabulary": 99}),
        *((ArgumentError, {name: None}) for name in ("hidden", "weight", "target", "bias", "grads", "state", "out")),
    ]
    for error, fields in wrong:
        bad = mirror.LogpDescriptor.from_buffer_copy(good)
        out[...] = 7
        for name, value in fields.items():
            setattr(bad, name, value)
        with pytest.raises(error, match="detkern_run of a LogpDescriptor"):
            native.run(6, bad)
        assert (out == 7).all(), fields
    assert logp_descriptors(problem)[0][1] == (0,) * 7
    assert mirror.LogpDescriptor.from_buffer_copy(logp_descriptors(problem)[0][0]).dense == 3


def test_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target, bias = case(4, 100, 3, F32, 0)
    assert detkern.explain(detkern.linear_logp, hidden, weight, target, bias).kernel.startswith("c++ linear_logp-fma (")
    monkeypatch.setattr(backend, "library", lambda: None)
    problem = fold_problem(
        FMA, *map(view, (hidden, weight, target, bias)), view(np.zeros((5, 4), np.float32)),
        vocabulary=100, start=0, first=0, count=8, scaling=Scaling(), entropy=True,
    )  # fmt: skip
    implementation = backend.BACKEND.implementations[FoldProblem]
    assert implementation.explain(problem).name == "numpy linear_logp-fma"
    out = np.zeros((5, 4), np.float32)
    views = tuple(map(view, (hidden, weight, target, bias)))
    implementation.prepare(problem, Execution(CPU, 0, lambda size: view(out)))(4, views, view(out), None)  # type: ignore[arg-type]
    assert same(out, fold(FMA, hidden, weight, target, bias, vocabulary=100))
