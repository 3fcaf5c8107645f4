"""The C++ kernels against the NumPy definition, bit for bit; and that a broken rule of the tensor-core step shows."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import detkern
from detkern import config
from detkern.abi import mirror
from detkern.abi.build import find_compiler
from detkern.abi.descriptors import gemm_descriptors
from detkern.abi.library import Library
from detkern.cpu import backend, compiled
from detkern.dispatch import plan
from detkern.dispatch.backend import Execution
from detkern.errors import ArgumentError, ContractUnsupported, DeviceError
from detkern.operations.block_scaled.problem import BlockScaledProblem, block_scaled_problem
from detkern.operations.block_scaled.replay import block_scaled_gemm as replayed_block_scaled
from detkern.operations.gemm import replay as numpy_replay
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.operations.table import OPERATIONS
from detkern.tensors import Device, TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.arithmetic.tensor_core import tensor_core_step
from detkern.vocabulary.contracts import (
    CONTRACTS,
    FMA,
    FP8_BLOCK128,
    MMA8,
    MMA16,
    TREE,
    TREE_MMA16,
    Contract,
    TensorCoreStep,
)
from detkern.vocabulary.dtypes import BF16, E4M3, E5M2, F16, F32, DType, from_numpy

CPU = Device("cpu")
SIZES = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 100, 257, 4100)
PAIRS = [
    (contract, dtype) for contract in CONTRACTS.values() for dtype in contract.operands if contract != FP8_BLOCK128
]
PAIR_NAMES = [f"{contract}-{dtype.short}" for contract, dtype in PAIRS]


def view(array: np.ndarray) -> TensorView:
    dtype = from_numpy(array.dtype)
    assert dtype is not None
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return TensorView(array.ctypes.data, array.shape, strides, dtype, CPU, array=array)


def no_scratch(size: int) -> TensorView:
    raise AssertionError("the CPU backend asks for no scratch memory of the caller's")


EXECUTION = Execution(CPU, 0, no_scratch)


def gemm(
    contract: Contract,
    a: np.ndarray,
    b: np.ndarray,
    *,
    out: np.ndarray | None = None,
    initial: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    out_dtype: DType = F32,
) -> np.ndarray:
    """The backend itself, without the public functions' checks; `initial` is copied into `out`."""
    if out is None:
        out = np.empty((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), out_dtype.numpy)
    if initial is not None:
        out[...] = initial
    a, b = (np.broadcast_to(x, (*out.shape[:-2], *x.shape[-2:])) for x in (a, b))
    views = (view(a), view(b), view(out), None if bias is None else view(bias))
    problem = gemm_problem(contract, *views, initial is not None)
    products = backend.BACKEND.implementations[GemmProblem]
    assert products.refuses(problem) is None
    a_view, b_view, out_view, bias_view = views
    products.prepare(problem, EXECUTION)(problem.m, (a_view, b_view, bias_view), out_view, EXECUTION)
    return out


def block_scaled(
    a: np.ndarray, scale_a: np.ndarray, b: np.ndarray, scale_b: np.ndarray, out: np.ndarray, accumulate: bool = False
) -> np.ndarray:
    views = tuple(view(array) for array in (a, scale_a, b, scale_b, out))
    problem = block_scaled_problem(FP8_BLOCK128, *views, accumulate)
    products = backend.BACKEND.implementations[BlockScaledProblem]
    assert products.refuses(problem) is None
    products.prepare(problem, EXECUTION)(problem.m, views[:4], views[4], EXECUTION)
    return out


def differing(got: np.ndarray, want: np.ndarray) -> int:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    bits = f"u{got.itemsize}"
    return int((np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(want).view(bits)).sum())


@pytest.fixture(autouse=True, scope="module")
def native_library() -> Library:
    """The library must be there: otherwise these tests would hold NumPy to itself."""
    library = backend.library()
    assert library is not None
    return library


def test_the_library_offers_every_pair(native_library: Library) -> None:
    assert {tuple(pair) for code, *pair in native_library.offers if code == 1} == {
        (contract.code, dtype.code) for contract, dtype in PAIRS
    }
    assert native_library.offers == {
        operation.descriptor.offer(variant, dtype)
        for operation in OPERATIONS
        if operation.descriptor is not None
        for variant, dtypes in operation.variants.items()
        for dtype in dtypes
    }
    assert native_library.host_memory


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_NAMES)
def test_every_k_and_every_kind_of_operands(contract: Contract, dtype: DType) -> None:
    for k in SIZES:
        kinds = operands.KINDS if k < 1000 else ("wide",)
        for kind in kinds:
            a = operands.generate(kind, dtype, (5 if k < 1000 else 2, k), 1)
            b = operands.generate(kind, dtype, (k, 19), 2)
            assert differing(gemm(contract, a, b), numpy_replay.gemm(contract, a, b, out_dtype=F32)) == 0, (k, kind)


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_NAMES)
def test_every_kind_of_starting_accumulator(contract: Contract, dtype: DType) -> None:
    for kind, start in product(("normal", "wide", "subnormal", "large", "signed-zero", "bits"), operands.KINDS):
        a = operands.generate(kind, dtype, (3, 49), 3)
        b = operands.generate(kind, dtype, (49, 37), 4)
        initial = operands.generate(start, F32, (3, 37), 5)
        got = gemm(contract, a, b, initial=initial)
        assert differing(got, numpy_replay.gemm(contract, a, b, initial=initial)) == 0, (kind, start)


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_NAMES)
def test_every_m_and_n_is_a_slice_of_the_largest(
    contract: Contract, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, k = max(SIZES), 34
    a = operands.generate("wide", dtype, (most, k), 6)
    b = operands.generate("wide", dtype, (k, most), 7)
    largest = gemm(contract, a, b)
    for number, (m, n) in enumerate(product(SIZES, SIZES)):
        monkeypatch.setattr(config, "num_threads", 1 + number % 3)
        if m * n < most * most:
            assert differing(gemm(contract, a[:m], b[:, :n]), largest[:m, :n]) == 0, (m, n)
    # NumPy at both extremes, and on rows and columns from all over the largest.
    rows, cols = np.r_[0:3, 1023:1026, most - 3 : most], np.r_[0:2, 2047:2050, most - 2 : most]
    for some_rows, some_cols in ((np.arange(most), cols[-1:]), (rows[-1:], np.arange(most)), (rows, cols)):
        want = numpy_replay.gemm(contract, a[some_rows], b[:, some_cols], out_dtype=F32)
        assert differing(largest[np.ix_(some_rows, some_cols)], want) == 0


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_NAMES)
def test_bias_and_output_types(contract: Contract, dtype: DType) -> None:
    # 3 x 40 and 40 x 3: the second is computed as its transpose, bias along the rows.
    for (m, n), out_dtype, bias_dtype in product(((3, 40), (40, 3)), (F32, F16, BF16), (None, F32, F16, BF16)):
        for kind in ("normal", "bits", "signed-zero"):
            a, b = operands.generate(kind, dtype, (m, 33), 8), operands.generate(kind, dtype, (33, n), 9)
            bias = None if bias_dtype is None else operands.generate(kind, bias_dtype, (n,), 10)
            got = gemm(contract, a, b, bias=bias, out_dtype=out_dtype)
            want = numpy_replay.gemm(contract, a, b, bias=bias, out_dtype=out_dtype)
            assert differing(got, want) == 0, (m, n, out_dtype, bias_dtype, kind)
            if bias is not None:
                strided = np.empty((n, 3), bias.dtype)[:, 1][::-1]
                strided[...] = bias
                assert differing(gemm(contract, a, b, bias=strided, out_dtype=out_dtype), want) == 0


def layouts(array: np.ndarray) -> list[np.ndarray]:
    """The values of a matrix at other strides: transposed, spaced, reversed either way, at an odd address."""
    rows, cols = array.shape
    transposed = np.empty((cols, rows), array.dtype).T
    spaced = np.empty((rows * 2, cols * 3), array.dtype)[::2, ::3]
    upside_down = np.empty((rows, cols), array.dtype)[::-1]
    backwards = np.empty((cols, rows), array.dtype).T[:, ::-1]
    raw = np.empty(array.nbytes + 1, np.uint8)[1:]
    odd = np.ndarray(array.shape, array.dtype, raw)
    made = [transposed, spaced, upside_down, backwards, odd]
    for copy in made:
        copy[...] = array
    return made


@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_NAMES)
def test_strides_and_alignment_change_nothing(contract: Contract, dtype: DType) -> None:
    for m, k, n in ((21, 70, 37), (70, 67, 5)):
        a, b = operands.generate("wide", dtype, (m, k), 11), operands.generate("wide", dtype, (k, n), 12)
        want = numpy_replay.gemm(contract, a, b, out_dtype=F32)
        initial = operands.generate("normal", F32, (m, n), 13)
        accumulated = numpy_replay.gemm(contract, a, b, initial=initial)
        for a_layout, b_layout in product([a, *layouts(a)], [b, *layouts(b)]):
            assert differing(gemm(contract, a_layout, b_layout), want) == 0
        for out in layouts(want):
            out[...] = -1
            assert differing(gemm(contract, a, b, out=out), want) == 0
            assert differing(gemm(contract, a, b, out=out, initial=initial), accumulated) == 0
        row, column = np.broadcast_to(a[:1], a.shape), np.broadcast_to(b[:, :1], b.shape)
        assert differing(gemm(contract, row, column), np.broadcast_to(want[:1, :1], want.shape)) == 0


@pytest.mark.parametrize(("contract", "dtype"), [(FMA, F32), (MMA16, BF16), (TREE, F16)], ids=str)
def test_strides_beyond_32_bits(contract: Contract, dtype: DType) -> None:
    far = (1 << 31) + 3  # elements between rows of a, columns of b, and rows of out
    no_reserve = 0x4000  # Linux's MAP_NORESERVE: only the pages that are touched exist
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = np.frombuffer(mmap.mmap(-1, 8 * (far + 64), flags=flags), np.uint8)

    def spread(shape: tuple[int, int], strides: tuple[int, int], element: DType, first: int) -> np.ndarray:
        size = element.itemsize
        return np.ndarray(shape, element.numpy, memory, first * size, [stride * size for stride in strides])

    a, b = operands.generate("normal", dtype, (2, 20), 33), operands.generate("normal", dtype, (20, 2), 34)
    far_a, far_b = spread((2, 20), (far, 1), dtype, 0), spread((20, 2), (1, -far), dtype, far + 32)
    far_a[...], far_b[...] = a, b
    want = numpy_replay.gemm(contract, a, b, out_dtype=F16)
    assert differing(gemm(contract, far_a, far_b, out=spread((2, 2), (far, 1), F16, far * 2 - 32)), want) == 0


def test_batches_of_any_rank_and_stride() -> None:
    a = operands.generate("normal", BF16, (2, 1, 3, 4, 20), 14)
    b = operands.generate("normal", BF16, (5, 1, 20, 6), 15)
    got = gemm(MMA16, a, b)
    assert got.shape == (2, 5, 3, 4, 6)
    for i, j, l in product(range(2), range(5), range(3)):
        assert differing(got[i, j, l], numpy_replay.gemm(MMA16, a[i, 0, l], b[j, 0], out_dtype=F32)) == 0
    # Ten batch dimensions that no merging removes, more than the ABI has.
    shape = (2,) * 10
    a = operands.generate("normal", F32, (*shape, 2, 3), 16).transpose(9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10, 11)
    b = operands.generate("normal", F32, (*shape, 3, 2), 17)
    got = gemm(FMA, a, b)
    for index in np.ndindex(*shape):
        assert differing(got[index], numpy_replay.gemm(FMA, a[index], b[index])) == 0
    assert gemm(FMA, a[:0], b[:0]).shape == (0, *shape[1:], 2, 2)


@pytest.mark.parametrize("types", list(product((E4M3, E5M2), repeat=2)), ids=lambda t: f"{t[0].short}-{t[1].short}")
def test_fp8_blocks(types: tuple[DType, DType]) -> None:
    for blocks, kind in [(0, "normal"), (33, "normal"), *((2, kind) for kind in operands.KINDS)]:
        for m, n in ((3, 37), (37, 3)):
            a = operands.generate(kind, types[0], (m, blocks * 128), 18)
            b = operands.generate(kind, types[1], (blocks * 128, n), 19)
            scale_a = operands.generate("wide", F32, (m, blocks), 20)
            scale_b = operands.generate(kind, F32, (blocks, n), 21)
            initial = operands.generate("wide", F32, (m, n), 22)
            for out_dtype in (F32, F16, BF16):
                got = block_scaled(a, scale_a, b, scale_b, np.empty((m, n), out_dtype.numpy))
                want = replayed_block_scaled(a, scale_a, b, scale_b, out_dtype=out_dtype)
                assert differing(got, want) == 0, (blocks, kind, m, out_dtype)
            want = replayed_block_scaled(a, scale_a, b, scale_b, initial=initial)
            for a_layout, b_layout in zip([a, *layouts(a)], [b, *layouts(b)], strict=True):
                got = block_scaled(a_layout, scale_a.T.copy().T, b_layout, scale_b, initial.copy(), accumulate=True)
                assert differing(got, want) == 0, (blocks, kind, m)
    # One scale for 128 x 128: strides of zero, as DeepSeek's weights have it.
    one = np.full((1, 1), 1.5, np.float32)
    a, b = operands.generate("normal", types[0], (4, 256), 23), operands.generate("normal", types[1], (256, 5), 24)
    scales = np.broadcast_to(one, (4, 2)), np.broadcast_to(one, (2, 5))
    got = block_scaled(a, scales[0], b, scales[1], np.empty((4, 5), np.float32))
    assert differing(got, replayed_block_scaled(a, scales[0], b, scales[1])) == 0


def test_numpy_serves_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    a = operands.generate("wide", BF16, (2, 3, 4, 40), 25)[..., ::-1]
    b = operands.generate("wide", BF16, (3, 5, 40), 26).transpose(0, 2, 1)
    bias = operands.generate("normal", F16, (10,), 27)[::2]
    initial = operands.generate("normal", F32, (2, 3, 4, 5), 28)
    calls = [
        lambda: gemm(TREE_MMA16, a, b, bias=bias, out_dtype=F16),
        lambda: gemm(MMA8, a, b, initial=initial),
        lambda: gemm(FMA, a[..., :0], b[:, :0, :], bias=bias),
    ]
    eights = operands.generate("normal", E4M3, (3, 128), 29), operands.generate("normal", E5M2, (128, 4), 30)
    scales = operands.generate("normal", F32, (3, 1), 31), operands.generate("normal", F32, (1, 4), 32)
    calls.append(
        lambda: block_scaled(eights[0], scales[0], eights[1], scales[1], np.ones((3, 4), np.float32), accumulate=True)
    )
    native = [call() for call in calls]
    monkeypatch.setattr(backend, "library", lambda: None)
    for call, want in zip(calls, native, strict=True):
        assert differing(call(), want) == 0


def problem_of(contract: Contract, a: DType, b: DType, out: DType = F32, k: int = 128) -> GemmProblem:
    arrays = (np.empty((2, k), a.numpy), np.empty((k, 2), b.numpy), np.empty((2, 2), out.numpy))
    return gemm_problem(contract, *map(view, arrays), None, False)


def test_what_the_backend_refuses_and_says() -> None:
    assert backend.BACKEND.unavailable(CPU) is None
    assert "cuda:1" in (backend.BACKEND.unavailable(Device("cuda", 1)) or "")
    assert backend.BACKEND.capability(CPU) is None
    for problem, words in (
        (problem_of(MMA16, F32, F32), ("mma16 takes float16, bfloat16", "float32 operands have fma")),
        (problem_of(TREE, BF16, F16), ("one type", "bfloat16", "float16")),
        (problem_of(FP8_BLOCK128, E4M3, E4M3), ("block_scaled_gemm",)),
        (problem_of(FMA, F32, F32, E4M3), ("float32, float16 or bfloat16",)),
    ):
        reason = backend.BACKEND.implementations[GemmProblem].refuses(problem)
        assert reason is not None
        assert all(word in reason for word in words), reason
    arrays = [
        np.empty(s, t) for s, t in (((2, 130), E4M3.numpy), ((2, 1), "f4"), ((130, 2), E4M3.numpy), ((1, 2), "f4"))
    ]
    scaled = block_scaled_problem(FP8_BLOCK128, *map(view, arrays), view(np.empty((2, 2), "f4")), False)
    assert "multiple of 128, not 130" in (backend.BACKEND.implementations[BlockScaledProblem].refuses(scaled) or "")


def test_what_would_run_names_the_kernel_and_the_tile(native_library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "num_threads", 3)
    kernel = backend.BACKEND.implementations[GemmProblem].explain(problem_of(MMA16, BF16, BF16))
    assert kernel.name.startswith("c++ mma16 (")
    assert "mma=" + kernel.tile in native_library.name
    assert kernel.geometry == "at most 3 threads"
    assert kernel.scratch_bytes == 0
    assert (
        "fma=" + backend.BACKEND.implementations[GemmProblem].explain(problem_of(TREE, BF16, BF16)).tile
        in native_library.name
    )
    monkeypatch.setattr(backend, "library", lambda: None)
    assert backend.BACKEND.implementations[GemmProblem].explain(problem_of(FMA, F32, F32)).name == "numpy fma"


def test_the_replay_serves_what_the_library_lacks(native_library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands.generate("normal", BF16, (5, 40), 1), operands.generate("normal", BF16, (40, 6), 2)
    ran: list[int] = []
    monkeypatch.setattr(Library, "run", lambda library, operation, launch: ran.append(operation))
    monkeypatch.setattr(native_library, "offers", native_library.offers - {(1, MMA16.code, BF16.code)})
    plan.forget_plans()
    want = numpy_replay.gemm(MMA16, a, b, out_dtype=BF16)
    assert differing(detkern.gemm(a, b, contract="mma16"), want) == 0
    assert not ran
    assert detkern.explain(a, b, contract="mma16").kernel == "numpy mma16"
    detkern.gemm(a, b, contract="tree")
    assert ran == [1]
    plan.forget_plans()


def test_the_library_is_one_device_whose_memory_is_the_hosts(native_library: Library) -> None:
    assert native_library.device_count() == 1
    assert native_library.device(0).name.decode().startswith("CPU, ")
    assert native_library.device(0).units >= 1
    with pytest.raises(ArgumentError, match="there is one CPU, not a number 1"):
        native_library.device(1)
    data, back = np.arange(5), np.zeros(5, int)
    with native_library.memory(0, data.nbytes) as pointer:
        native_library.copy(0, pointer, data.ctypes.data, data.nbytes, mirror.TO_DEVICE)
        native_library.copy(0, back.ctypes.data, pointer, data.nbytes, mirror.TO_HOST)
    assert (back == data).all()
    template = gemm_descriptors(problem_of(TREE, BF16, BF16))[0][0]
    assert native_library.scratch(1, mirror.GemmDescriptor.from_buffer_copy(template)) == 0
    with pytest.raises(DeviceError, match="no memory for"), native_library.memory(0, 1 << 62):
        pass


def test_the_library_checks_descriptors_itself(native_library: Library) -> None:
    a = np.ones((2, 2), np.float32)
    good = mirror.GemmDescriptor.from_buffer_copy(gemm_descriptors(problem_of(FMA, F32, F32, k=2))[0][0])
    good.a = good.b = a.ctypes.data
    out = np.zeros((2, 2), np.float32)
    good.out = out.ctypes.data
    native_library.run(1, good)
    assert (out == 2).all()
    for error, fields in (
        (ArgumentError, {"size": 8}),
        (ContractUnsupported, {"contract": 0}),
        (ContractUnsupported, {"contract": FP8_BLOCK128.code}),
        (ContractUnsupported, {"contract": MMA16.code}),
        (ContractUnsupported, {"operand_dtype": 4}),
        (ContractUnsupported, {"operand_dtype": 99}),
        (ContractUnsupported, {"out_dtype": 5}),
        (ContractUnsupported, {"bias_dtype": 4}),
        (ArgumentError, {"accumulate": 1, "out_dtype": 2}),
        (ArgumentError, {"accumulate": 1, "bias_dtype": 1}),
        (ArgumentError, {"m": -1}),
        (ArgumentError, {"batch_rank": 9}),
        (ArgumentError, {"a": None}),
        (ArgumentError, {"bias_dtype": 1}),
    ):
        bad = mirror.GemmDescriptor.from_buffer_copy(good)
        out[...] = 7
        for name, value in fields.items():
            setattr(bad, name, value)
        with pytest.raises(error):
            native_library.run(1, bad)
        assert (out == 7).all()


# --- the step by itself: both C++ forms against NumPy, and every rule broken in turn ---

PROBE = """
#include "fma_kernel.h"
#include "tensor_core.h"
using namespace detkern;
template <class Rules>
static void probe(int a_type, int b_type, const char* a, const char* b, const float* start, float* fast, float* exact) {
  constexpr int GROUP = Rules::GROUP;
  using Block = Panels<32, true>;
  alignas(64) static char memory[1 << 16];
  Block block;
  block.place(memory, 1, COLUMNS);
  pack_rows({a, a_type, 1, GROUP * itemsize(a_type), itemsize(a_type), {}, 0, 0, 0}, a, 1, GROUP, 32, block.a,
      Block::PITCH);
  pack_panels({b, b_type, COLUMNS, itemsize(b_type), COLUMNS * itemsize(b_type), {}, 0, 0, 0}, b, COLUMNS, GROUP, 32,
              block.b, 0);
  row_exponents(block.a, a_type, block.a_exponents, 1, 32, Block::PITCH);
  panel_exponents(block.b, b_type, block.b_exponents, COLUMNS, 32, 0);
  const int a_least = smallest_exponent(a_type), b_least = smallest_exponent(b_type);
  alignas(64) float memory_acc[COLUMNS];
  std::memcpy(memory_acc, start, sizeof memory_acc);
  Float acc[1][2];
  load_accumulators(false, memory_acc, acc);
  step_chain<Rules, 1>(block, 0, 0, 0, 1, a_least, b_least, acc);
  store_accumulators(memory_acc, acc);
  std::memcpy(fast, memory_acc, sizeof memory_acc);
  for (int c = 0; c < COLUMNS; ++c)
    exact[c] = exact_step<Rules>(block.a, a_least, block.b + c, COLUMNS, b_least, start[c]);
}
extern "C" DETKERN_EXPORT int columns() { return COLUMNS; }
extern "C" DETKERN_EXPORT void step(int group, int count, int a_type, int b_type, const char* a, const char* b,
                                    const float* start, float* fast, float* exact) {
  for (; count > 0; --count) {
    if (group == 16) probe<HopperStep>(a_type, b_type, a, b, start, fast, exact);
    if (group == 8) probe<AmpereStep>(a_type, b_type, a, b, start, fast, exact);
    if (group == 32) probe<HopperFp8Step>(a_type, b_type, a, b, start, fast, exact);
    a += group * itemsize(a_type);
    b += group * COLUMNS * itemsize(b_type);
    start += COLUMNS, fast += COLUMNS, exact += COLUMNS;
  }
}
"""
SOURCES = Path(compiled.__file__).parent


PORTABLE = ("-O0", "-DDETKERN_PORTABLE")  # the same text of the step, in the least compile time
NATIVE = ("-O1",)


def compile_probe(folder: Path, options: tuple[str, ...], *mutation: str, packing: Path | None = None) -> Path:
    """PROBE on the step's headers, after the one replacement (file, old text, new text) of `mutation`; packing.cpp
    compiled too unless its object is given."""
    (folder / "cpu").mkdir(parents=True)
    (folder / "abi").mkdir()
    shutil.copy(SOURCES.parent / "abi" / "abi.h", folder / "abi")
    for path in (*SOURCES.glob("*.h"), SOURCES / "packing.cpp"):
        text = path.read_text()
        if mutation and path.name == mutation[0]:
            assert text.count(mutation[1]) == 1, mutation
            text = text.replace(*mutation[1:])
        (folder / "cpu" / path.name).write_text(text)
    (folder / "cpu" / "probe.cpp").write_text(PROBE)
    command = [*find_compiler().command, *(flag for flag in compiled.recipe().flags if flag != "-O3"), *options]
    if packing is None:
        packing = folder / "packing.o"
        subprocess.run([*command, "-c", str(folder / "cpu" / "packing.cpp"), "-o", str(packing)], check=True)
    library = folder / "probe.so"
    subprocess.run(
        [*command, "-shared", str(folder / "cpu" / "probe.cpp"), str(packing), "-o", str(library)], check=True
    )
    return library


@pytest.fixture(scope="module")
def portable_probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the probe without intrinsics and without a mutation."""
    return compile_probe(tmp_path_factory.mktemp("portable") / "probe", PORTABLE).parent


def step_cases(group: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows a [cases, group], panels b [cases, group, columns], accumulators [cases, columns], that reach every rule."""
    pairs = {16: [(F16, F16), (BF16, BF16)], 8: [(F16, F16), (BF16, BF16)], 32: list(product((E4M3, E5M2), repeat=2))}
    made = []
    for number, (a_type, b_type) in enumerate(pairs[group]):
        for kind, start in product(operands.KINDS, ("normal", "wide", "subnormal", "signed-zero", "bits")):
            a = operands.generate(kind, a_type, (8, group), 100 + number)
            b = operands.generate(kind, b_type, (8, group, 16), 200 + number)
            made.append((a, b, operands.generate(start, F32, (8, 16), 300 + number)))
        # Sums that need all 33 bits, and results next to 2^128 and 2^-149.
        ones = np.ones((1, group, 16))
        top = float(ml_dtypes.finfo(a_type.numpy).max)
        top = min(top, 2.0**63 * 1.9921875) if a_type == BF16 else top
        full_a, full_b = (np.full((1, group), top).astype(a_type.numpy), (ones * top).astype(b_type.numpy))
        product_top = float(full_a[0, 0]) * float(full_b[0, 0, 0])
        starts = np.nextafter(np.float32(product_top), np.float32(0)) * np.linspace(0.5, 1, 16, dtype=np.float32)
        made.append((full_a, full_b, starts[None]))
        made.append((full_a, -full_b, -starts[None]))
        made.append(lone_terms(group, a_type, b_type))
        if a_type == BF16:
            made += [small_case(group, exponent, start) for exponent in range(-152, -92, 2) for start in (-30, 0, None)]
    return made


def lone_terms(group: int, a_type: DType, b_type: DType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zeros beside the largest numbers among small terms, and infinities of one or of both signs without a NaN."""
    a = operands.generate("normal", a_type, (4, group), 400).astype(np.float32)
    b = operands.generate("normal", b_type, (4, group, 16), 401).astype(np.float32)
    acc = operands.generate("normal", F32, (4, 16), 402)
    a[0] *= 2.0**-3
    a[0, 1], b[0, 1] = 0, float(ml_dtypes.finfo(b_type.numpy).max)
    if a_type != E4M3:
        a[1:, 2], a[2:, 5] = np.inf, -np.inf
        b[1:, 2], b[1:, 5] = 1, 2
        a[3, 5], acc[3, ::2] = np.inf, -np.inf
    return a.astype(a_type.numpy), b.astype(b_type.numpy), acc


def small_case(group: int, exponent: int, start: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """bf16 products around 2^exponent beside accumulators around 2^(exponent + start), or zeros: at the floor."""
    left, right = np.float32(2.0) ** (exponent // 2), np.float32(2.0) ** (exponent - exponent // 2)
    a = operands.generate("normal", F32, (8, group), exponent + 1000) * left
    b = operands.generate("normal", F32, (8, group, 16), exponent + 2000) * right
    acc = np.zeros((8, 16), np.float32)
    if start is not None:
        acc = operands.generate("normal", F32, (8, 16), exponent + 3000) * np.float32(
            2.0 ** max(exponent + start, -149)
        )
    return a.astype(BF16.numpy), b.astype(BF16.numpy), acc.astype(np.float32)


def expected_step(step: TensorCoreStep, a: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.concatenate([tensor_core_step(step, start[i : i + 1], a[i : i + 1], b[i]) for i in range(len(a))])


@pytest.fixture(scope="module")
def expected() -> dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]]:
    steps = {16: MMA16.step, 8: MMA8.step, 32: FP8_BLOCK128.step}
    made = {}
    for group, step in steps.items():
        assert step is not None
        made[group] = [(*case, expected_step(step, *case)) for case in step_cases(group)]
    return made


def probe_differences(library: ctypes.CDLL, group: int, expected: dict) -> tuple[int, int]:
    """Outputs of the vector form and of the exact form that differ from NumPy's."""
    assert library.columns() == 16 or library.columns() == 32
    fast_bad = exact_bad = 0
    for a, b, start, want in expected[group]:
        types = [from_numpy(array.dtype).code for array in (a, b)]
        repeat = library.columns() // 16
        wide_b, wide_start = np.tile(b, repeat), np.tile(start, repeat)
        fast, exact = np.empty_like(wide_start), np.empty_like(wide_start)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (a, wide_b, wide_start, fast, exact)]
        library.step(group, len(a), *types, *pointers)
        fast_bad += differing(fast, np.tile(want, repeat))
        exact_bad += differing(exact, np.tile(want, repeat))
    return fast_bad, exact_bad


@pytest.mark.parametrize("options", [NATIVE, PORTABLE], ids=["native", "portable"])
def test_both_forms_of_the_step_are_numpys(
    tmp_path: Path, expected: dict, portable_probe: Path, options: tuple[str, ...]
) -> None:
    path = portable_probe / "probe.so" if options == PORTABLE else compile_probe(tmp_path / "probe", options)
    library = ctypes.CDLL(str(path))
    for group in (16, 8, 32):
        assert probe_differences(library, group, expected) == (0, 0), group


# What is broken, where, and in which form of which step it must show: (name, group, form, file, old, new).
MUTATIONS = [
    ("fraction bits of mma16", 16, "both", "tensor_core.h", "StepRules<16, 25, ", "StepRules<16, 24, "),
    ("fraction bits of mma8", 8, "both", "tensor_core.h", "StepRules<8, 24, ", "StepRules<8, 23, "),
    ("fraction bits of fp8", 32, "both", "tensor_core.h", "StepRules<32, 13, ", "StepRules<32, 12, "),
    ("floor too high", 16, "exact", "tensor_core.h", "StepRules<16, 25, -133", "StepRules<16, 25, -132"),
    ("floor too low", 16, "exact", "tensor_core.h", "StepRules<16, 25, -133", "StepRules<16, 25, -134"),
    ("floor of mma8", 8, "exact", "tensor_core.h", "StepRules<8, 24, -132", "StepRules<8, 24, -133"),
    ("significant bits of fp8", 32, "both", "tensor_core.h", "13, -133, 14>", "13, -133, 13>"),
    ("significant bits", 16, "exact", "tensor_core.h", "length - Rules::SIGNIFICANT_BITS", "length - 23"),
    ("sum rounded, not truncated", 16, "fast", "tensor_core.h", "size & ~(size >> 24)", "size"),
    ("terms rounded down, not toward zero", 16, "exact", "tensor_core.h", "sum += minus ? -magnitude : magnitude;",
     "sum += minus ? -magnitude - (shift < 0) : magnitude;"),
    ("subnormal significands normalised", 16, "exact", "tensor_core.h", "if (exponent < smallest) {",
     "if (false) {"),
    ("subnormal exponents in packing", 16, "fast", "packing.cpp",
     "(own & (own > smallest)) | (smallest & (own <= smallest))", "own"),
    ("zero products have an exponent", 16, "fast", "packing.cpp", "(EXPONENT_ZERO & zero)", "(-126 & zero)"),
    ("zero products have an exponent, exactly", 16, "exact", "tensor_core.h", "} else if (x != 0 && y != 0) {",
     "} else if (x != 0 || y != 0) {"),
    ("accumulator left out of E", 16, "fast", "tensor_core.h", "((bits == 0) & EXPONENT_ZERO)", "EXPONENT_ZERO"),
    ("accumulator left out of E, exactly", 16, "exact", "tensor_core.h", "if (acc != 0) largest =",
     "if (false) largest ="),
    ("subnormal results dropped", 16, "exact", "tensor_core.h", "std::max(drop, -149 - scale)",
     "std::max(drop, -126 - scale)"),
    ("overflow saturates", 16, "exact", "tensor_core.h", "sign | 0x7f800000u", "sign | 0x7f7fffffu"),
    ("the vector form below its range", 16, "fast", "tensor_core.h", "LOWEST = F - 126", "LOWEST = F - 133"),
    ("the vector form above its range", 16, "fast", "tensor_core.h", "HIGHEST = 125", "HIGHEST = 500"),
    ("33-bit sums wrap", 16, "fast", "tensor_core.h", "> INT32_MAX - (1 << (F + 1))", "> INT32_MAX - 1"),
    ("zero times infinity", 16, "fast", "packing.h", "EXPONENT_NONFINITE = 12000", "EXPONENT_NONFINITE = 4000"),
    ("mixed infinities", 16, "exact", "tensor_core.h", "invalid || (positive && negative)", "invalid"),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation[0] for mutation in MUTATIONS])
def test_a_broken_rule_shows(
    tmp_path: Path, expected: dict, portable_probe: Path, mutation: tuple[str, int, str, str, str, str]
) -> None:
    _, group, form, *replacement = mutation
    packing = portable_probe / "packing.o" if replacement[0] == "tensor_core.h" else None
    path = compile_probe(tmp_path / "probe", PORTABLE, *replacement, packing=packing)
    fast, exact = probe_differences(ctypes.CDLL(str(path)), group, expected)
    assert fast > 0 or form == "exact"
    assert exact > 0 or form == "fast"
