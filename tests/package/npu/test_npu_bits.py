"""The emulated MUSA and Ascend libraries against the CPU backend, bit for bit: sizes, operands, entry points, layouts,
types."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import emulated
import numpy as np
import pytest
from frameworks import same
from oracles.cases import cases

import detkern
from detkern import npu
from detkern.dispatch import registry
from detkern.npu import ascend, musa
from detkern.operations.gemm.operation import GEMM
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

FMA, TREE = "fma", "tree"
SUBJECTS = [
    ("musa", FMA, F32), ("musa", FMA, F16), ("musa", FMA, BF16), ("musa", TREE, F16), ("musa", TREE, BF16),
    ("ascend", FMA, F16), ("ascend", FMA, BF16), ("ascend", TREE, F16), ("ascend", TREE, BF16),
]  # fmt: skip
NAMES = [f"{backend}-{contract}-{dtype.short}" for backend, contract, dtype in SUBJECTS]
every_subject = pytest.mark.parametrize(("backend", "contract", "dtype"), SUBJECTS, ids=NAMES)


@pytest.fixture(autouse=True, scope="module")
def libraries() -> Iterator[None]:
    with emulated.named():
        yield


def generate(kind: str, dtype: DType, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return operands.generate(kind, dtype, shape, seed)


def both(backend: str, call: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the backend gives and what the CPU does; `out` is copied for each."""
    results = []
    for name in (backend, "cpu"):
        mine = options | ({"out": options["out"].copy()} if "out" in options else {})
        results.append(call(backend=name, **mine))
    return results[0], results[1]


def gemm(backend: str, a: np.ndarray, b: np.ndarray, **options: Any) -> bool:
    return same(*both(backend, lambda **o: detkern.gemm(a, b, **o), **options))


def test_the_libraries_offer_these_pairs_and_say_that_they_take_host_memory() -> None:
    for backend in (musa.BACKEND, ascend.BACKEND):
        assert set(registry.computed(backend, GEMM, detkern.tensors.Device("cpu"))) == {
            (contract, dtype) for name, contract, dtype in SUBJECTS if name == backend.name
        }
        library = npu.libraries.find_library(backend.platform, on_host=True)
        assert library.host_memory
        assert library.name == f"{backend.name}, emulated"


@every_subject
def test_every_k_and_every_kind_of_operands(backend: str, contract: str, dtype: DType) -> None:
    for k, kind in [*product((0, 1, 31, 33, 100), operands.KINDS), (257, "wide"), (1000, "normal"), (4100, "cancel")]:
        a, b = generate(kind, dtype, (3, k), 1), generate(kind, dtype, (k, 17), 2)
        assert gemm(backend, a, b, contract=contract, out_dtype="float32"), (k, kind)


@every_subject
def test_the_corners_of_a_chain(backend: str, contract: str, dtype: DType) -> None:
    for case in cases(dtype, dtype, 4, 21, 48) if dtype != F32 else ():
        start = {} if case.initial is None else {"out": case.initial, "accumulate": True}
        assert gemm(backend, case.a, case.b, contract=contract, **start), case.name
    for kind, start in product(("wide", "subnormal", "large", "bits"), ("normal", "signed-zero", "special", "bits")):
        a, b = generate(kind, dtype, (3, 40), 3), generate(kind, dtype, (40, 9), 4)
        initial = generate(start, F32, (3, 9), 5)
        assert gemm(backend, a, b, contract=contract, out=initial, accumulate=True), (kind, start)


@every_subject
def test_every_m_and_n_and_the_invariances(backend: str, contract: str, dtype: DType) -> None:
    """The largest product against the CPU; every smaller one, chunk, padding and shuffle against the largest."""
    m, k, n = 139, 70, 265
    a, b = generate("wide", dtype, (m, k), 6), generate("wide", dtype, (k, n), 7)
    options = {"contract": contract, "backend": backend, "out_dtype": "float32"}
    whole = detkern.gemm(a, b, **options)
    assert same(whole, detkern.gemm(a, b, contract=contract, backend="cpu", out_dtype="float32"))
    for rows, columns in ((1, 1), (7, 255), (8, 256), (9, 257), (63, 15), (65, 64), (128, 16), (129, 130), (2, 265)):
        assert same(detkern.gemm(a[:rows], b[:, :columns], **options), whole[:rows, :columns]), (rows, columns)
    pieces = [detkern.gemm(a[start : start + 50], b, **options) for start in range(0, m, 50)]
    assert same(np.concatenate(pieces), whole)
    order = np.argsort(generate("bits", F32, (m,), 8).view(np.uint32))
    hostile = a.copy()
    hostile[1::2] = np.nan
    assert same(detkern.gemm(hostile, b, **options)[::2], whole[::2])
    assert same(detkern.gemm(a[order], b, **options), whole[order])
    assert same(detkern.gemm(np.pad(a, ((0, 9), (0, 0))), np.pad(b, ((0, 0), (0, 13))), **options)[:m, :n], whole)
    if contract == FMA:
        padded = np.pad(a, ((0, 0), (3, 7))), np.pad(b, ((3, 7), (0, 0)))
        assert same(detkern.gemm(*padded, **options), whole)
        out = np.zeros((m, n), np.float32)
        for start in range(0, k, 23):
            detkern.gemm(a[:, start : start + 23], b[start : start + 23], contract=contract, backend=backend, out=out,
                         accumulate=True)  # fmt: skip
        assert same(out, whole)


@every_subject
def test_all_entry_points_in_both_outputs(backend: str, contract: str, dtype: DType) -> None:
    m, k, n = 37, 45, 70
    x, weight = generate("normal", dtype, (2, m, k), 9), generate("normal", dtype, (n, k), 10)
    a, b, dc = (
        generate("special", dtype, (m, k), 11),
        generate("normal", dtype, (k, n), 12),
        generate("normal", dtype, (m, n), 13),
    )
    for out_dtype in ("float32", dtype.name):
        calls = (
            lambda **o: detkern.gemm(a, b, **o),
            lambda **o: detkern.gemm(a, b.T.copy(), trans_b=True, **o),
            lambda **o: detkern.linear(x, weight, **o),
            lambda **o: detkern.gemm_da(dc, b, **o),
            lambda **o: detkern.gemm_db(a, dc, **o),
            lambda **o: detkern.gemm_db(a, dc, transposed=True, **o),
        )
        for number, call in enumerate(calls):
            assert same(*both(backend, call, contract=contract, out_dtype=out_dtype)), (number, out_dtype)
    start = generate("normal", F32, (n, k), 14)
    assert same(
        *both(
            backend,
            lambda **o: detkern.gemm_db(a, dc, transposed=True, **o),
            contract=contract,
            out=start,
            accumulate=True,
        )
    )


@every_subject
def test_bias_and_output_types(backend: str, contract: str, dtype: DType) -> None:
    for out_dtype, bias_dtype, kind in product((F32, F16, BF16), (F32, F16, BF16), ("normal", "bits", "signed-zero")):
        a, b = generate(kind, dtype, (3, 33), 15), generate(kind, dtype, (33, 20), 16)
        bias = generate(kind, bias_dtype, (20,), 17)
        strided = np.empty((20, 3), bias.dtype)[:, 1][::-1]
        strided[...] = bias
        for vector in (bias, strided):
            assert gemm(backend, a, b, bias=vector, contract=contract, out_dtype=out_dtype.name), (
                out_dtype,
                bias_dtype,
                kind,
            )
        assert gemm(backend, a[:, :0], b[:0], bias=bias, contract=contract, out_dtype=out_dtype.name)


def layouts(array: np.ndarray) -> list[np.ndarray]:
    """The values of a matrix at other strides: transposed, spaced, reversed either way, at an odd address."""
    rows, cols = array.shape
    transposed = np.empty((cols, rows), array.dtype).T
    spaced = np.empty((rows * 2, cols * 3), array.dtype)[::2, ::3]
    upside_down = np.empty((rows, cols), array.dtype)[::-1]
    backwards = np.empty((cols, rows), array.dtype).T[:, ::-1]
    odd = np.ndarray(array.shape, array.dtype, np.empty(array.nbytes + 1, np.uint8)[1:])
    made = [transposed, spaced, upside_down, backwards, odd]
    for copy in made:
        copy[...] = array
    return made


@every_subject
def test_strides_and_alignment_change_nothing(backend: str, contract: str, dtype: DType) -> None:
    a, b = generate("wide", dtype, (11, 35), 18), generate("wide", dtype, (35, 21), 19)
    want = detkern.gemm(a, b, contract=contract, out_dtype="float32", backend="cpu")
    start = generate("normal", F32, want.shape, 20)
    accumulated = detkern.gemm(a, b, contract=contract, out=start.copy(), accumulate=True, backend="cpu")
    for left, right in zip([a, *layouts(a)], [*layouts(b), b], strict=True):
        assert same(detkern.gemm(left, right, contract=contract, out_dtype="float32", backend=backend), want)
    for out in layouts(want):
        out[...] = start
        detkern.gemm(a, b, contract=contract, out=out, accumulate=True, backend=backend)
        assert same(np.ascontiguousarray(out), accumulated)
    for narrow in layouts(want.astype(dtype.numpy)) if dtype != F32 else ():
        detkern.gemm(a, b, contract=contract, out=narrow, backend=backend)
        assert same(np.ascontiguousarray(narrow), detkern.gemm(a, b, contract=contract, backend="cpu"))
    row, column = np.broadcast_to(a[:1], a.shape), np.broadcast_to(b[:, :1], b.shape)
    assert gemm(backend, row, column, contract=contract, out_dtype="float32")


@every_subject
def test_batches_of_any_rank_and_stride(backend: str, contract: str, dtype: DType) -> None:
    a, b = generate("normal", dtype, (2, 1, 3, 4, 20), 21), generate("normal", dtype, (5, 1, 20, 6), 22)
    assert gemm(backend, a, b, contract=contract)
    deep = generate("normal", dtype, (*(2,) * 9, 2, 3), 23)
    assert gemm(backend, deep.transpose(8, 7, 6, 5, 4, 3, 2, 1, 0, 9, 10), deep.swapaxes(-1, -2), contract=contract)
    assert detkern.gemm(a[:0], b, contract=contract, backend=backend).shape == (0, 5, 3, 4, 6)


@pytest.mark.parametrize("backend", ["musa", "ascend"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda dtype: dtype.short)
def test_the_bias_gradient(backend: str, dtype: DType) -> None:
    def sums(dc: np.ndarray, **options: Any) -> bool:
        return same(*both(backend, lambda **mine: detkern.bias_gradient(dc, **mine), **options))

    for shape, kind in [*product(((1, 1), (33, 20)), operands.KINDS), ((0, 5), "wide"), ((515, 300), "wide")]:
        dc = generate(kind, dtype, shape, 24)
        start = generate(kind, F32, shape[-1:], 25)
        assert sums(dc, out_dtype="float32"), (shape, kind)
        assert sums(dc), (shape, kind)
        assert sums(dc, out=start, accumulate=True), (shape, kind)
    dc = generate("normal", dtype, (3, 5, 40, 9), 26)
    for view in (dc.transpose(2, 0, 1, 3), dc.transpose(0, 1, 3, 2), dc[::-1, :, ::3, ::2], *layouts(dc[0, 0])):
        assert sums(view), view.strides
        out = np.zeros((view.shape[-1], 2), np.float32)[:, 0]
        detkern.bias_gradient(view, out=out, backend=backend)
        assert same(out.copy(), detkern.bias_gradient(view, out_dtype="float32", backend="cpu"))


@pytest.mark.parametrize(
    ("backend", "contract", "dtype"), [("musa", FMA, F32), ("musa", TREE, F16), ("ascend", FMA, BF16)]
)
def test_strides_beyond_32_bits(backend: str, contract: str, dtype: DType) -> None:
    far = (
        1 << 31
    ) + 43  # elements between rows of a, columns of b, and rows of out; in bytes, with a row taken off, too
    no_reserve = 0x4000  # Linux's MAP_NORESERVE: only the pages that are touched exist
    memory = np.frombuffer(
        mmap.mmap(-1, 8 * (far + 64), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), np.uint8
    )

    def spread(strides: tuple[int, int], shape: tuple[int, int], element: DType, first: int) -> np.ndarray:
        size = element.itemsize
        return np.ndarray(shape, element.numpy, memory, first * size, [stride * size for stride in strides])

    a, b = generate("normal", dtype, (2, 20), 33), generate("normal", dtype, (20, 2), 34)
    far_a, far_b = spread((far, 1), (2, 20), dtype, 0), spread((1, -far), (20, 2), dtype, far + 32)
    far_a[...], far_b[...] = a, b
    out = spread((far, 1), (2, 2), F16, far * 2 - 32)
    detkern.gemm(far_a, far_b, contract=contract, backend=backend, out=out)
    assert same(out.copy(), detkern.gemm(a, b, contract=contract, backend="cpu", out_dtype="float16"))


@every_subject
def test_calls_from_several_threads(backend: str, contract: str, dtype: DType) -> None:
    a, b = generate("normal", dtype, (9, 70), 35), generate("normal", dtype, (70, 40), 36)
    want = detkern.gemm(a, b, contract=contract, backend="cpu")
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: detkern.gemm(a, b, contract=contract, backend=backend), range(24)))
    assert all(same(result, want) for result in results)


def powers(fields: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """bfloat16 numbers of these exponent fields and stored significands, [fields, stored]."""
    bits = (fields[:, None].astype(np.uint16) << 7) | stored.astype(np.uint16)
    return bits.view(BF16.numpy)


@pytest.mark.parametrize("backend", ["musa", "ascend"])
@pytest.mark.parametrize("contract", [FMA, TREE])
def test_bfloat16_products_about_the_ends_of_the_exact_range(backend: str, contract: str) -> None:
    """Products of odd significands on both sides of 2^-134 and of 2^128, beside accumulators of an odd last place: one
    that is rounded on its own shows in a tie."""
    odd = np.array([1, 3, 31, 65, 97, 127])
    lasts = np.array([0, 1, 2, 3, 0x7FFFFF, 0x800001], np.uint32).view(np.float32)  # in units of 2^-149
    for field in (0, 1, 2, 60, 110, 113, 117, 118, 119, 125, 130, 190, 250, 254):
        b = np.concatenate([powers(np.array([field]), odd).reshape(1, -1)] * len(lasts), 1)
        start = np.repeat(lasts, len(odd))
        sums = np.r_[112:128, 376:386]
        fields = sums[(sums >= field) & (sums - field < 255)] - field
        if not fields.size:
            continue
        a = powers(fields, odd).reshape(-1, 1)
        for sign in (1, -1):
            initial = np.broadcast_to(start * np.float32(sign), (len(a), len(start))).copy()
            assert gemm(backend, a, b, contract=contract, out=initial, accumulate=True), (field, sign)
            pair = (
                np.concatenate([np.full_like(a, sign * 2.0**-70), a], 1),
                np.concatenate([np.full_like(b, 2.0**-79), b]),
            )
            assert gemm(backend, *pair, contract=contract, out_dtype="float32"), (field, sign)


def test_deep_trees_have_fewer_rows_to_a_tile_and_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a few waiting nodes alone, Ascend's tiles go down to one row, as K = 2^30 makes them with the real
    size."""
    monkeypatch.setenv("DETKERN_EMULATE_LEVEL_BYTES", "4096")
    for k in (40, 100, 250, 500, 2000):
        a, b = generate("wide", BF16, (9, k), 27), generate("wide", BF16, (k, 20), 28)
        assert gemm("ascend", a, b, contract=TREE), k


def test_a_contract_that_is_not_offered_is_refused_by_name() -> None:
    a = np.ones((2, 2), np.float32)
    with pytest.raises(
        detkern.ContractUnsupported, match=r"fma for f32 has no kernel here; ascend on cpu has fma \(f16, bf16\), tree"
    ):
        detkern.gemm(a, a, contract=FMA, backend="ascend")
    half = a.astype(np.float16)
    for name in set(CONTRACTS) - {FMA, TREE, "fp8-block128"}:
        with pytest.raises(detkern.ContractUnsupported, match=f"{name} has no kernel here; musa on cpu has fma "):
            detkern.gemm(half, half, contract=name, backend="musa")
    with pytest.raises(detkern.ContractUnsupported, match="mma16 has no kernel here"):
        detkern.gemm(half, half, backend="musa")  # the default of the CPU's arrays
    assert "det_gemm.mu, musa, emulated" in str(detkern.explain(a, a, contract=FMA, backend="musa"))
