"""Shared libraries that tests compile against abi.h."""

from __future__ import annotations

import subprocess
from pathlib import Path

from detkern import abi
from detkern.abi.build import find_compiler

HEADER = Path(abi.__file__).with_name("abi.h")

# Answers every entry. FAULT: the status of what it offers.
STUB = """
#ifndef FAULT
#define FAULT 0
#endif
static const char* said = "";
int32_t detkern_abi_version() { return DETKERN_ABI_VERSION; }
const char* detkern_last_error() { return said; }
int32_t detkern_get_capabilities(detkern_capabilities* c) {
  if (c->size != sizeof *c) return DETKERN_INVALID;
  c->host_memory = 0;
  __builtin_strcpy(c->name, "stub");
  return DETKERN_OK;
}
int32_t detkern_offers(detkern_offer* offers, uint64_t capacity, uint64_t* n) {
  if (capacity) *offers = {DETKERN_OPERATION_GEMM, DETKERN_FMA, 1u << DETKERN_BF16};
  *n = 1;
  said = "none";
  return FAULT;
}
int32_t detkern_run(uint32_t operation, const void* d) {
  said = operation == 1 ? "told so" : 0;
  return ((const detkern_gemm_descriptor*)d)->contract;
}
int32_t detkern_scratch(uint32_t operation, const void* d, uint64_t* n) {
  *n = 96 * operation;
  said = "how";
  return ((const detkern_gemm_descriptor*)d)->contract;
}
int32_t detkern_device_count(int32_t* n) { *n = 3; return 0; }
int32_t detkern_get_device(detkern_device* d) { d->units = 7; said = "no such"; return d->index; }
int32_t detkern_allocate(int32_t device, uint64_t, void** p) {
  static char at[8]; *p = at; said = "full"; return device;
}
int32_t detkern_free(int32_t, void*) { return 0; }
int32_t detkern_copy(int32_t, void*, const void*, uint64_t n, int32_t) { said = "lost"; return (int32_t)n; }
"""


def compile_library(folder: Path, source: str, name: str = "made") -> Path:
    path = folder / f"{name}.cpp"
    path.write_text(f'#include "{HEADER}"\n{source}')
    library = folder / f"{name}.so"
    command = [*find_compiler().command, "-O1", "-std=c++17", "-shared", "-fPIC", str(path), "-o", str(library)]
    subprocess.run(command, check=True)
    return library
