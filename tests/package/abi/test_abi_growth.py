"""Libraries of another age than this detkern: they load and serve what both have, through checks.h as libraries include
it."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c_library import HEADER
from frameworks import same

import detkern
from detkern.abi import mirror
from detkern.abi.build import find_compiler
from detkern.abi.library import Library
from detkern.dispatch import plan
from detkern.errors import ArgumentError, ContractUnsupported
from detkern.npu import musa
from detkern.operations.bias_gradient.operation import BIAS_GRADIENT
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import F16, F32

BIAS, ROWS = 3, 4
DC = operands.generate("normal", F32, (33, 7), 1)

DEVICE = """
#include <cmath>
#include <cstdlib>
#include <cstring>
int32_t detkern_device_count(int32_t* n) { *n = 1; return 0; }
int32_t detkern_allocate(int32_t, uint64_t n, void** p) { *p = calloc(n + 1, 1); return 0; }
int32_t detkern_free(int32_t, void* p) { free(p); return 0; }
int32_t detkern_copy(int32_t, void* to, const void* from, uint64_t n, int32_t) { memcpy(to, from, n); return 0; }
static int32_t sum(const detkern_column_sum_descriptor* d) {
  int64_t rows;
  if (const int32_t status = detkern::check_column_sum(d, rows)) return status;
  for (int64_t j = 0; j < d->n; ++j) {
    float chain = 0;
    for (int64_t i = 0; i < rows; ++i) chain += ((const float*)d->dc)[i * d->row_stride + j * d->col_stride];
    ((float*)d->out)[j * d->out_stride] = chain FACTOR;
  }
  return DETKERN_OK;
}
const char* detkern_last_error() { return detkern::last_error; }
"""

# Float32 bias gradients, and whatever LATER adds to the offers.
SOURCE = (
    DEVICE
    + """
int32_t detkern_abi_version() { return DETKERN_ABI_VERSION; }
int32_t detkern_get_capabilities(detkern_capabilities* given) {
  detkern_capabilities made{};
  made.host_memory = 1;
  strcpy(made.name, "musa, tiny");
  LATER_CAPABILITY
  return detkern::answer(made, given);
}
int32_t detkern_get_device(detkern_device* given) {
  detkern_device made{};
  made.units = 5;
  strcpy(made.name, "tiny card");
  return detkern::answer(made, given);
}
int32_t detkern_offers(detkern_offer* offers, uint64_t capacity, uint64_t* count) {
  static const detkern_offer all[] = {LATER_OFFERS {DETKERN_OPERATION_BIAS_GRADIENT, 0, detkern::types(DETKERN_F32)}};
  return detkern::list_offers(all, sizeof all / sizeof *all, offers, capacity, count);
}
int32_t detkern_run(uint32_t operation, const void* descriptor) {
  if (operation != DETKERN_OPERATION_BIAS_GRADIENT) return detkern::unknown_operation(operation);
  return detkern::with_descriptor(sum, descriptor);
}
int32_t detkern_scratch(uint32_t, const void*, uint64_t* bytes) { *bytes = 0; return 0; }
"""
)

# What other versions of abi.h and checks.h have in place of these lines.
OLDER = {
    "  void *stream;\n} detkern_column_sum_descriptor;": "} detkern_column_sum_descriptor;",
    "FIRST_SIZE(detkern_column_sum_descriptor, stream);": "FIRST_SIZE(detkern_column_sum_descriptor, out);",
    "  char driver[64]; /* versions of driver and runtime; a self-check holds for one device and driver */\n": "",
    "DETKERN_FIRST_SIZE(detkern_device, driver);": "DETKERN_FIRST_SIZE(detkern_device, name);",
}
NEWER = {
    "} detkern_column_sum_descriptor;": "  int64_t factor; /* 0: one */\n} detkern_column_sum_descriptor;",
    "} detkern_capabilities;": "  int64_t later;\n} detkern_capabilities;",
    "} detkern_device;": "  int64_t later;\n} detkern_device;",
}


class NewerDescriptor(ctypes.Structure):
    """The descriptor of the newer library."""

    _fields_ = (*mirror.ColumnSumDescriptor._fields_, ("factor", ctypes.c_int64))


class NewestDescriptor(ctypes.Structure):
    """A descriptor that both libraries are too old for, unless the last field is zero."""

    _fields_ = (*NewerDescriptor._fields_, ("newest", ctypes.c_int32 * 2))


def compiled(folder: Path, name: str, source: str, changes: dict[str, str] | None = None, **defines: str) -> Path:
    """A library with headers of its own, in which `changes` are made."""
    text = {header: (HEADER.parent / header).read_text() for header in ("abi.h", "checks.h")}
    for before, after in (changes or {}).items():
        assert sum(content.count(before) for content in text.values()) == 1, before
        text = {header: content.replace(before, after) for header, content in text.items()}
    home = folder / name
    home.mkdir()
    for header, content in text.items():
        (home / header).write_text(content)
    path, library = home / "library.cpp", home / "library.so"
    lines = source.splitlines()
    includes = "\n".join(line for line in lines if line.startswith("#include"))
    body = "\n".join(line for line in lines if not line.startswith("#include"))
    path.write_text(f'#include "checks.h"\n{includes}\nextern "C" {{\n{body}\n}}\n')
    given = {"FACTOR": "", "LATER_CAPABILITY": "", "LATER_OFFERS": "", **defines}
    flags = ["-O1", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", *(f"-D{k}={v}" for k, v in given.items())]
    subprocess.run([*find_compiler().command, *flags, str(path), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("libraries")
    return {
        "today's": compiled(folder, "today", SOURCE),
        "older": compiled(folder, "older", SOURCE, OLDER),
        "newer": compiled(
            folder, "newer", SOURCE, NEWER,
            FACTOR="* (d->factor ? d->factor : 1)", LATER_CAPABILITY="made.later = -1;",
            LATER_OFFERS="{99, 7, ~uint64_t(0)}, {DETKERN_OPERATION_ROWS, 77, 2},",
        ),
        "version 2": compiled(folder, "two", VERSION2, HEADER2),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def no_plans() -> Any:
    plan.forget_plans()
    yield
    plan.forget_plans()


def described(structure: Any, out: Any, **fields: Any) -> Any:
    """DC's column sums into `out`, as a caller with this structure asks for them."""
    d = mirror.described(structure)
    d.operand_dtype = d.out_dtype = F32.code
    (d.m, d.n), d.row_stride, d.col_stride, d.out_stride = DC.shape, DC.shape[1], 1, 1
    d.dc, d.out = DC.ctypes.data, out.ctypes.data
    for name, value in fields.items():
        setattr(d, name, value)
    return d


@pytest.mark.parametrize("age", ["today's", "older", "newer", "version 2"])
def test_a_library_of_any_age_serves_what_it_has(
    age: str, libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(musa.PLATFORM.variable, str(libraries[age]))
    got = detkern.bias_gradient(DC, backend="musa")
    assert same(got, detkern.bias_gradient(DC, backend="cpu"))
    library = Library(libraries[age])
    assert (library.name, library.host_memory) == ("musa, tiny", True)
    device = library.device(0)
    assert (device.units, device.name, device.driver) == (5, b"tiny card", b"")


@pytest.mark.parametrize("age", ["today's", "older", "newer"])
def test_what_a_library_lacks_is_refused_with_what_it_has(
    age: str, libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(musa.PLATFORM.variable, str(libraries[age]))
    has = rf"{libraries[age]} has no %s; it has bias_gradient \(f32\)"
    with pytest.raises(ContractUnsupported, match=has % "bias_gradient for f16"):
        detkern.bias_gradient(DC.astype(F16.numpy), backend="musa")
    with pytest.raises(ContractUnsupported, match=has % "fma for f32"):
        detkern.gemm(DC, DC.T, contract="fma", backend="musa")
    with pytest.raises(ContractUnsupported, match="there is no kernel for operation 4"):
        Library(libraries[age]).run(ROWS, mirror.described(mirror.RowDescriptor))


def test_codes_of_a_newer_library_are_listed_and_not_used(libraries: dict[str, Path]) -> None:
    assert Library(libraries["older"]).offers == {(BIAS, 0, 1)}
    assert Library(libraries["newer"]).offers == {(BIAS, 0, 1), (ROWS, 77, 1), *((99, 7, dtype) for dtype in range(64))}


def test_a_newer_library_writes_no_further_than_the_callers_struct(libraries: dict[str, Path]) -> None:
    loaded = ctypes.CDLL(str(libraries["newer"]))
    for function, structure in (("get_capabilities", mirror.Capabilities), ("get_device", mirror.Device)):
        size = ctypes.sizeof(structure)
        for given in (size, size + 4, size + 8):
            memory = (ctypes.c_uint8 * (size + 16))(*[7] * (size + 16))
            structure.from_buffer(memory).size = given
            assert loaded[f"detkern_{function}"](memory) == mirror.OK
            assert structure.from_buffer(memory).size == given
            assert bytes(memory)[given:] == b"\7" * (size + 16 - given)
            assert b"\7" not in bytes(memory)[:given]


def test_descriptors_of_any_size_are_read_as_far_as_both_know_them(libraries: dict[str, Path]) -> None:
    once = detkern.bias_gradient(DC)
    out = np.zeros_like(once)
    callers = {"today's": mirror.ColumnSumDescriptor, "newer": NewerDescriptor, "newest": NewestDescriptor}
    for age in ("today's", "older", "newer"):
        library = Library(libraries[age])
        for structure in callers.values():
            out[...] = 7
            library.run(BIAS, described(structure, out))
            assert same(out, once), (age, structure)
    # What a caller asks for beyond the library's fields is refused, and out untouched.
    newer, older, today = (Library(libraries[age]) for age in ("newer", "older", "today's"))
    newer.run(BIAS, described(NewestDescriptor, out, factor=3))
    assert same(out, 3 * once)
    out[...] = 7
    for library, known, structure, fields in (
        (older, 1080, mirror.ColumnSumDescriptor, {"stream": 1 << 56}),
        (today, 1088, NewerDescriptor, {"factor": 1}),
        (newer, 1096, NewestDescriptor, {"newest": (ctypes.c_int32 * 2)(0, 1)}),
    ):
        with pytest.raises(ContractUnsupported, match=rf"descriptor has {known} bytes, .* rebuild the library"):
            library.run(BIAS, described(structure, out, **fields))
    # No size that any version has had, and none at all.
    for size in (0, 8, 1079, 1 << 40):
        with pytest.raises(ArgumentError, match=f"a struct of {size} bytes; it has at least 1088"):
            today.run(BIAS, described(NewestDescriptor, out, size=size))
    assert (out == 7).all()


# As libraries of version 2 were: a function for each operation, descriptors of one size.
_HOST = "  int32_t host_memory; /* 1 where the pointers are host pointers */\n"
HEADER2 = {_HOST: _HOST + "  uint64_t gemm_offers;\n"}
VERSION2 = (
    DEVICE
    + """
int32_t detkern_abi_version() { return 2; }
int32_t detkern_get_capabilities(detkern_capabilities* c) {
  if (c->size != 88) return detkern::fail(DETKERN_INVALID, "capabilities");
  c->host_memory = 1;
  c->gemm_offers = 1ull << (DETKERN_FMA * 8 + DETKERN_F32);
  strcpy(c->name, "musa, tiny");
  return DETKERN_OK;
}
int32_t detkern_gemm(const detkern_gemm_descriptor* d) {
  if (d->size != 432) return detkern::fail(DETKERN_INVALID, "%d bytes", (int)d->size);
  if (!d->scratch || d->scratch_bytes != 64) return detkern::fail(DETKERN_INVALID, "no scratch");
  for (int64_t i = 0; i < d->m; ++i)
    for (int64_t j = 0; j < d->n; ++j) {
      float chain = 0;
      for (int64_t k = 0; k < d->k; ++k)
        chain = fmaf(((const float*)d->a)[i * d->a_row_stride + k * d->a_col_stride],
                     ((const float*)d->b)[k * d->b_row_stride + j * d->b_col_stride], chain);
      ((float*)d->out)[i * d->out_row_stride + j * d->out_col_stride] = chain;
    }
  return DETKERN_OK;
}
int32_t detkern_gemm_scratch(const detkern_gemm_descriptor* d, uint64_t* bytes) {
  if (d->size != 432) return detkern::fail(DETKERN_INVALID, "%d bytes", (int)d->size);
  *bytes = 64;
  return DETKERN_OK;
}
int32_t detkern_block_scaled_gemm(const void*) { return detkern::fail(DETKERN_UNSUPPORTED,
    "no kernel for fp8-block128"); }
int32_t detkern_column_sum(const detkern_column_sum_descriptor* d) {
  if (d->size != 1088) return detkern::fail(DETKERN_INVALID, "%d bytes", (int)d->size);
  return sum(d);
}
int32_t detkern_rows(const void*) { return detkern::fail(DETKERN_UNSUPPORTED, "no kernel for row operations"); }
int32_t detkern_get_device(detkern_device* d) {
  if (d->size != 208) return detkern::fail(DETKERN_INVALID, "device");
  d->units = 5;
  strcpy(d->name, "tiny card");
  d->driver[0] = 0;
  return DETKERN_OK;
}
"""
)


def test_a_library_of_version_2_is_called_as_it_was(
    libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(libraries["version 2"])
    assert library.offers == {(1, 1, 1), *((BIAS, 0, dtype) for dtype in (1, 2, 3))}
    monkeypatch.setenv(musa.PLATFORM.variable, str(library.path))
    a, b = operands.generate("normal", F32, (5, 70), 1), operands.generate("normal", F32, (70, 6), 2)
    got = detkern.gemm(a, b, contract="fma", backend="musa")
    assert same(got, detkern.gemm(a, b, contract="fma", backend="cpu"))
    with pytest.raises(
        ContractUnsupported, match=r"has no tree for f16; it has fma \(f32\), bias_gradient \(f32, f16, "
    ):
        detkern.gemm(a.astype(F16.numpy), b.astype(F16.numpy), contract="tree", backend="musa")
    with pytest.raises(ContractUnsupported, match=r"detkern_run of a RowDescriptor: .*no kernel for row operations"):
        library.run(ROWS, mirror.described(mirror.RowDescriptor))
    for code in (0, 99):
        with pytest.raises(ContractUnsupported, match=f"version 2 has no operation {code}; rebuild it"):
            library.run(code, mirror.described(mirror.RowDescriptor))
    # A detkern whose descriptor has grown.
    out = np.full(7, 7, np.float32)
    with pytest.raises(ContractUnsupported, match="does not know a field of this call; rebuild it"):
        library.run(BIAS, described(NewerDescriptor, out, factor=1))
    assert (out == 7).all()
    library.run(BIAS, described(NewerDescriptor, out))
    assert same(out, detkern.bias_gradient(DC))
    assert library.scratch(BIAS, described(NewerDescriptor, out)) == 0


def test_the_sizes_of_version_2_are_those_that_it_had() -> None:
    """Descriptors have grown only behind them."""
    from detkern.abi import version2
    from detkern.operations.table import OPERATIONS

    for operation in OPERATIONS:
        if operation.descriptor is not None and operation.descriptor.code in version2._FUNCTIONS:
            size = version2._FUNCTIONS[operation.descriptor.code][1]
            fields = operation.descriptor.structure._fields_
            offsets = {getattr(operation.descriptor.structure, name).offset for name, *_ in fields}
            assert size in offsets | {ctypes.sizeof(operation.descriptor.structure)}
    assert BIAS_GRADIENT.descriptor is not None
    assert BIAS_GRADIENT.descriptor.code == BIAS
