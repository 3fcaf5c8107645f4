"""abi.h against its ctypes mirrors, the loader's refusals, and the build: its key, its cache, its errors."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from c_library import HEADER, STUB, compile_library

from detkern import config
from detkern.abi import build as build_module
from detkern.abi import mirror
from detkern.abi.build import Recipe, build, cache_folder, find_compiler
from detkern.abi.library import Library
from detkern.cpu import compiled
from detkern.errors import ArgumentError, BackendUnavailable, BuildError, ContractUnsupported, DeviceError
from detkern.files import sealed
from detkern.operations.rows.problem import RowKind
from detkern.operations.table import OPERATIONS
from detkern.vocabulary.contracts import CONTRACTS
from detkern.vocabulary.dtypes import DTYPES

STRUCTS = {
    "detkern_capabilities": mirror.Capabilities,
    "detkern_device": mirror.Device,
    "detkern_offer": mirror.Offer,
    "detkern_gemm_descriptor": mirror.GemmDescriptor,
    "detkern_block_scaled_descriptor": mirror.BlockScaledDescriptor,
    "detkern_column_sum_descriptor": mirror.ColumnSumDescriptor,
    "detkern_row_descriptor": mirror.RowDescriptor,
    "detkern_logp_descriptor": mirror.LogpDescriptor,
}


def small_recipe(folder: Path, body: str = "return 7;", flags: tuple[str, ...] = ("-O1", "-fPIC")) -> Recipe:
    source = folder / "small.cpp"
    source.write_text(f'extern "C" int seven() {{ {body} }}\n')
    return Recipe("small", (source,), (), flags, ("-shared",))


def logging_compiler(folder: Path, log: Path, extra: str = "") -> Path:
    """A compiler command that notes every call but `--version`, and takes a moment."""
    script = folder / "logging-c++"
    compiler = " ".join(find_compiler().command)
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo "$@" >> {log}; sleep 0.2; }}\nexec {compiler} "$@" {extra}\n'
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(config, "cache_dir", folder)
    return folder


def header_fields(struct: str) -> list[str]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    body = re.search(r"typedef struct \{([^}]*)\} " + struct + ";", text)
    assert body is not None
    names = []
    for statement in body[1].split(";")[:-1]:
        declarators = re.sub(r"^\s*(const\s+)?\w+\s", "", statement).split(",")
        names += [re.sub(r"[*\s]|\[.*\]", "", declarator) for declarator in declarators]
    return names


def test_mirrors_have_the_offsets_that_a_compiler_gives(tmp_path: Path) -> None:
    lines, expected = [], []
    for name, structure in STRUCTS.items():
        fields = [field[0] for field in structure._fields_]
        assert fields == header_fields(name)
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field in fields:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));'
            )
            described = getattr(structure, field)
            expected.append(f"{name}.{field} {described.offset} {described.size}")
    for value in ("DETKERN_ABI_VERSION", "DETKERN_MAX_BATCH_RANK", "DETKERN_MAX_SUM_RANK"):
        lines.append(f'printf("{value} %d\\n", {value});')
    expected += [f"DETKERN_ABI_VERSION {mirror.ABI_VERSION}", f"DETKERN_MAX_BATCH_RANK {mirror.MAX_BATCH_RANK}"]
    expected.append(f"DETKERN_MAX_SUM_RANK {mirror.MAX_SUM_RANK}")
    source = tmp_path / "offsets.c"
    body = "\n".join(lines)
    source.write_text(f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main() {{\n{body}\n}}\n')
    program = tmp_path / "offsets"
    # -xc: the header must be C as well.
    subprocess.run([*find_compiler().command, "-xc", "-std=c99", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == expected


def test_codes_are_the_headers() -> None:
    codes = {name: int(value) for name, value in re.findall(r"DETKERN_(\w+) = (\d+)", HEADER.read_text())}
    for dtype in DTYPES:
        assert codes.pop(dtype.short.upper()) == dtype.code
    for contract in CONTRACTS.values():
        assert codes.pop(contract.name.upper().replace("-", "_")) == contract.code
    for kind in RowKind:
        assert codes.pop(f"ROW_{kind.name}") == kind
    described = [operation for operation in OPERATIONS if operation.descriptor is not None]
    for operation in described:
        assert operation.descriptor is not None
        assert codes.pop(f"OPERATION_{operation.name.upper()}") == operation.descriptor.code
        assert operation.descriptor.structure in STRUCTS.values()
        assert set(operation.descriptor.variants) == set(operation.variants)
        assert len(set(operation.descriptor.variants.values())) == len(operation.variants)
    # What no library computes: the replay serves the CPU.
    absent = {operation.name for operation in OPERATIONS} - {operation.name for operation in described}
    assert absent == {"scatter_sum", "linear_logp_merge"}
    assert codes == {
        name: getattr(mirror, name)
        for name in ("OK", "INVALID", "UNSUPPORTED", "OUT_OF_MEMORY", "DEVICE_FAULT", "TO_DEVICE", "TO_HOST")
    }
    assert set(mirror.STATUS_NAMES) == {value for name, value in codes.items() if not name.startswith("TO_")}


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"nowhere\.so cannot be loaded"):
        Library(tmp_path / "nowhere.so")
    garbage = tmp_path / "garbage.so"
    garbage.write_bytes(b"no library")
    with pytest.raises(BackendUnavailable, match=r"garbage\.so cannot be loaded"):
        Library(garbage)
    with pytest.raises(BackendUnavailable, match="no function detkern_abi_version"):
        Library(compile_library(tmp_path, "int unrelated() { return 0; }"))


def test_missing_functions_and_other_versions_are_refused(tmp_path: Path) -> None:
    old = compile_library(tmp_path, "int32_t detkern_abi_version() { return 99; }", "old")
    with pytest.raises(
        BackendUnavailable, match=f"ABI version 99, this detkern needs {mirror.ABI_VERSION} or 2; rebuild"
    ):
        Library(old)
    partial = (
        "int32_t detkern_abi_version() { return DETKERN_ABI_VERSION; } const char* detkern_last_error() { return 0; }"
    )
    with pytest.raises(BackendUnavailable, match="no function detkern_device_count"):
        Library(compile_library(tmp_path, partial, "partial"))


def test_statuses_become_typed_errors_with_the_librarys_words(tmp_path: Path) -> None:
    library = Library(compile_library(tmp_path, STUB))
    assert (library.name, library.host_memory, library.offers) == ("stub", False, {(1, 1, 3)})
    descriptor = mirror.described(mirror.GemmDescriptor)
    library.run(1, descriptor)
    for status, error in (
        (mirror.INVALID, ArgumentError),
        (mirror.UNSUPPORTED, ContractUnsupported),
        (mirror.OUT_OF_MEMORY, DeviceError),
        (mirror.DEVICE_FAULT, DeviceError),
        (77, DeviceError),
    ):
        descriptor.contract = status
        with pytest.raises(error, match=rf"detkern_run of a GemmDescriptor: .*\({status}\): told so"):
            library.run(1, descriptor)
        with pytest.raises(error, match=r"detkern_run of a GemmDescriptor: .*: no message"):
            library.run(2, descriptor)
        with pytest.raises(error, match=rf"detkern_scratch of a GemmDescriptor: .*\({status}\): how"):
            library.scratch(1, descriptor)
        with pytest.raises(error, match=rf"detkern_get_device: .*\({status}\): no such"):
            library.device(status)
        with pytest.raises(error, match=rf"detkern_allocate: .*\({status}\): full"), library.memory(status, 8):
            pass
        with pytest.raises(error, match=rf"detkern_copy: .*\({status}\): lost"):
            library.copy(0, 1, 1, status, mirror.TO_DEVICE)
    descriptor.contract = 0
    assert (library.scratch(2, descriptor), library.device_count(), library.device(0).units) == (192, 3, 7)
    with pytest.raises(DeviceError, match=r"detkern_offers: device fault \(4\): none"):
        Library(compile_library(tmp_path, "#define FAULT 4\n" + STUB, "faulty"))


def test_the_key_covers_sources_flags_and_cpu_but_not_the_compiler(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(small_recipe(tmp_path))
    assert build(small_recipe(tmp_path)) == first
    assert first.parent == cache
    made = {first}
    made.add(build(small_recipe(tmp_path, "return 8;")))
    made.add(build(small_recipe(tmp_path, flags=("-O2", "-fPIC"))))
    command = find_compiler().command[0]
    monkeypatch.setenv("CXX", f"{command} -DUNUSED")
    made.add(build(small_recipe(tmp_path)))
    # Another compiler, one that launches it, none: what was built for these flags is found.
    for same in (str(logging_compiler(tmp_path, tmp_path / "log")), f"env {command}", "no-such-c++"):
        monkeypatch.setenv("CXX", f"{same} -DUNUSED")
        assert build(small_recipe(tmp_path)) in made
        monkeypatch.setenv("CXX", same)
        assert build(small_recipe(tmp_path)) == first
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(build_module, "cpu_features", lambda: "another machine")
    made.add(build(small_recipe(tmp_path)))
    monkeypatch.setattr(build_module, "ABI_VERSION", 99)
    made.add(build(small_recipe(tmp_path)))
    assert len(made) == 6
    assert not (tmp_path / "log").exists()
    assert not [path for path in cache.iterdir() if path.suffix not in (".so", ".lock")]


def test_compiler_errors_are_carried(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match="undeclared_thing"):
        build(small_recipe(tmp_path, "return undeclared_thing;"))
    assert not list(cache.glob("*.so"))
    for command, message in ((str(tmp_path / "no-such-c++"), "not found"), ("false", "exit status 1")):
        monkeypatch.setenv("CXX", command)
        with pytest.raises(BuildError, match=message) as raised:
            find_compiler()
        assert command in str(raised.value)
        assert "CXX" in str(raised.value)
        assert "PATH" in str(raised.value)
        assert os.environ["PATH"] not in str(raised.value)


def test_cxx_may_carry_arguments(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{find_compiler().command[0]} -DSEVEN=9")
    library = ctypes.CDLL(str(build(small_recipe(tmp_path, "return SEVEN;"))))
    assert library.seven() == 9


def test_threads_build_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "calls"
    monkeypatch.setenv("CXX", str(logging_compiler(tmp_path, log)))
    recipe = small_recipe(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: build(recipe), range(8)))) == 1
    assert len(log.read_text().splitlines()) == 2  # compile, link


def test_a_library_gets_its_name_when_it_is_whole(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that looks for the name takes no lock, so what it finds under it has to be complete."""
    seen = []
    rename = os.replace

    def replace(source: Path, target: Path) -> None:
        assert sealed.damage(Path(source)) is None
        seen.append((ctypes.CDLL(str(source)).seven(), Path(target).exists()))
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert build(small_recipe(tmp_path)).exists()
    assert seen == [(7, False)]


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "empty": lambda content: b"",
    "foreign": lambda content: b"somebody else's",
    "one bit": lambda content: content[:4000] + bytes([content[4000] ^ 1]) + content[4001:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_built_anew_which_is_said_once(
    damage: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = build(small_recipe(tmp_path))
    whole = library.read_bytes()
    library.write_bytes(DAMAGE[damage](whole))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "detkern"):
        for _ in range(2):
            assert build(small_recipe(tmp_path)) == library
    assert sealed.damage(library) is None
    assert ctypes.CDLL(str(library)).seven() == 7
    (message,) = caplog.messages
    assert re.search(
        rf"compiles its library small with .*, once, for up to half a minute: {library} is damaged: its ", message
    )


def test_processes_replace_a_damaged_library_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, shared = tmp_path / "calls", tmp_path / "shared"
    monkeypatch.setattr(config, "cache_dir", shared)
    library = build(small_recipe(tmp_path))
    library.write_bytes(library.read_bytes()[:5000])  # to load it would kill the process
    run_eight(tmp_path, logging_compiler(tmp_path, log), shared)
    assert len(log.read_text().splitlines()) == 2


def test_a_folder_that_cannot_be_written_serves_what_is_whole_in_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a compiler. A damaged file is named."""
    library = build(small_recipe(tmp_path))
    monkeypatch.setattr(build_module, "_unwritable", lambda folder, private=False: "Read-only file system")
    monkeypatch.setenv("CXX", "no-such-c++")
    assert build(small_recipe(tmp_path)) == library
    library.write_bytes(library.read_bytes()[:5000])
    with pytest.raises(
        BuildError, match=rf"^{library} is damaged: .*; cache_dir=.* cannot be written: Read-only file system"
    ):
        build(small_recipe(tmp_path))
    assert library.stat().st_size == 5000
    monkeypatch.setattr(build_module, "_unwritable", lambda folder, private=False: None)
    with pytest.raises(
        BuildError, match=rf"^{library} is damaged: .*; no C\+\+ compiler: tried CXX=no-such-c\+\+: not found"
    ):
        build(small_recipe(tmp_path))


def test_again_builds_what_is_whole(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "calls"
    library = build(small_recipe(tmp_path))
    monkeypatch.setenv("CXX", str(logging_compiler(tmp_path, log)))
    assert build(small_recipe(tmp_path)) == library
    assert not log.exists()
    assert build(small_recipe(tmp_path), again=True) == library
    assert len(log.read_text().splitlines()) == 2
    library.unlink()
    assert build(small_recipe(tmp_path), again=True) == library
    assert len(log.read_text().splitlines()) == 4


def test_the_compilation_is_said_once_and_so_is_the_wait(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(logging_compiler(tmp_path, tmp_path / "calls")))
    recipe = small_recipe(tmp_path)
    with caplog.at_level(logging.WARNING, "detkern"), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: build(recipe), range(2)))
        build(recipe)
    assert len([m for m in caplog.messages if m.startswith("detkern compiles its library small with CXX=")]) == 1
    assert len([m for m in caplog.messages if m.startswith("detkern waits for another process that compiles ")]) == 1
    assert len(caplog.messages) == 2


GARBAGE = {
    'g++ "': r"^CXX=g\+\+ \" is not a command: No closing quotation; write a compiler and its arguments",
    "   ": "tried CXX=   : not found",
    "/": "tried CXX=/: not found",
    "true": r"^CXX=true: .*true made no library and said nothing; is it a C\+\+ compiler\?",
    "cat": "^CXX=cat: the compiler failed with status 1",
    "sh -c 'printf \\377\\376'": "^CXX=sh -c .*made no library",
    "no\udcff++": "tried CXX=no\udcff\\+\\+: not found",
}


@pytest.mark.parametrize("value", GARBAGE)
def test_garbage_in_cxx_is_a_build_error_that_names_it(
    value: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", value)
    with pytest.raises(BuildError, match=GARBAGE[value]):
        build(small_recipe(tmp_path))
    assert not list(cache.glob("*.so"))


def test_other_variables_of_makefiles_are_not_read(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CC", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"):
        monkeypatch.setenv(variable, '-ffast-math "')
    assert ctypes.CDLL(str(build(small_recipe(tmp_path)))).seven() == 7


def test_a_compiler_of_a_relative_path(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler runs in a folder of its own."""
    monkeypatch.chdir(logging_compiler(tmp_path, tmp_path / "calls").parent)
    monkeypatch.setenv("CXX", "./logging-c++")
    assert build(small_recipe(tmp_path)).exists()


def test_a_cache_folder_that_is_a_file_is_a_build_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below", tmp_path / ("x" * 300)):
        monkeypatch.setattr(config, "cache_dir", folder)
        with pytest.raises(BuildError, match=r"cache_dir=.* \(DETKERN_CACHE_DIR\) cannot be written"):
            build(small_recipe(tmp_path))


def test_a_place_that_is_taken_is_a_build_error(tmp_path: Path, cache: Path) -> None:
    library = build(small_recipe(tmp_path))
    library.unlink()
    library.mkdir()
    with pytest.raises(BuildError, match=rf"^{library} cannot be read: Is a directory; .* cannot be written: "):
        build(small_recipe(tmp_path))


def test_without_a_home_the_private_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(config, "cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr(build_module.tempfile, "tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"detkern-{os.getuid()}"
    assert build(small_recipe(tmp_path)).parent == cache_folder()


def test_an_elf_file_that_was_cut_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    """Also one without a seal, which a user names."""
    library = compile_library(tmp_path, STUB)
    content = library.read_bytes()
    assert Library(library).name == "stub"
    for size in (len(content) - 1, len(content) // 2, 4096, 64):
        cut = tmp_path / f"cut{size}.so"
        cut.write_bytes(content[:size])
        with pytest.raises(BackendUnavailable, match=rf"cut{size}\.so cannot be loaded: it has been cut short"):
            Library(cut)


def test_processes_build_once_and_each_sees_a_whole_library(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    run_eight(tmp_path, logging_compiler(tmp_path, log), tmp_path / "shared")
    assert len(log.read_text().splitlines()) == 2


def run_eight(tmp_path: Path, compiler: Path, folder: Path) -> None:
    """Eight processes that build and load the small library at once."""
    small_recipe(tmp_path)
    script = (
        "import ctypes, sys; from pathlib import Path\n"
        "from detkern.abi.build import Recipe, build\n"
        f"recipe = Recipe('small', (Path({str(tmp_path / 'small.cpp')!r}),), (), ('-O1', '-fPIC'), ('-shared',))\n"
        "sys.exit(ctypes.CDLL(str(build(recipe))).seven())"
    )
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "DETKERN_CACHE_DIR": str(folder),
    }
    processes = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(8)]
    assert [process.wait() for process in processes] == [7] * 8


def test_cache_folder_is_the_configured_one_then_xdg_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "cache_dir", tmp_path / "asked")
    assert cache_folder() == tmp_path / "asked"
    monkeypatch.setattr(config, "cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "detkern"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "detkern"
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


def test_an_unwritable_home_falls_back_to_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(config, "cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(blocked))  # no folder can be made there, by root either
    monkeypatch.setattr(build_module.tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, "detkern"):
        folder = cache_folder()
    assert folder == tmp_path / f"detkern-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert str(blocked) in caplog.text
    assert str(folder) in caplog.text
    folder.chmod(0o777)  # anybody could put a library there
    with pytest.raises(BuildError, match="somebody else"):
        cache_folder()
    monkeypatch.setattr(config, "cache_dir", blocked)  # asked for by name: no fallback
    with pytest.raises(BuildError, match="cannot be written"):
        cache_folder()


def test_nothing_in_the_recipe_may_change_the_arithmetic() -> None:
    recipe = compiled.recipe()
    flags = [*recipe.flags, *recipe.link_flags]
    assert "-ffp-contract=off" in flags
    assert flags.index("-fno-fast-math") > flags.index("-O3")
    risky = re.compile(
        r"-Ofast|-f(fast-math|unsafe|associative|reciprocal|finite|no-signed-zeros|no-honor|fp-model|rounding)|-mdaz"
    )
    assert not [flag for flag in flags if risky.match(flag)]
    assert {path.name for path in recipe.sources} >= {"fma.cpp", "mma.cpp", "tree.cpp", "fp8.cpp", "library.cpp"}
    folder = HEADER.parent.parent / "cpu"
    assert set(recipe.headers) == {*folder.glob("*.h"), *HEADER.parent.glob("*.h")}
    text = "\n".join(path.read_text() for path in (*recipe.sources, *recipe.headers))
    assert not re.search(r"#pragma\s+(GCC|STDC|clang|omp)|__attribute__\(\(optimize", text)
