"""`detkern build musa` and `ascend`, with a stand-in compiler that records its arguments; the predicate of FORCE_*."""

from __future__ import annotations

import json
import os
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

import detkern
from detkern import config
from detkern.cli.main import main
from detkern.files import sealed
from detkern.npu import toolchain as module
from detkern.npu.libraries import built_library
from detkern.npu.toolchain import ASCEND, MUSA, Compiler, Toolchain, build_library, find_compiler, refusal

TOOLCHAINS = pytest.mark.parametrize("toolchain", [MUSA, ASCEND], ids=lambda toolchain: toolchain.platform.name)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No SDK, no device and no FORCE_*, whatever this machine has."""
    for toolchain in (MUSA, ASCEND):
        for variable in (*toolchain.homes, toolchain.force, toolchain.platform.variable):
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(module, "device_nodes", lambda toolchain: [])
    monkeypatch.setattr(config, "cache_dir", tmp_path / "cache")


def stand_in(folder: Path, name: str, body: str = "") -> Path:
    """A compiler that writes its arguments beside itself and an empty library where it is told to."""
    program = folder / "bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n{body}\n"
        f"json.dump(sys.argv[1:], open({str(folder / 'arguments.json')!r}, 'w'))\n"
        "open(sys.argv[sys.argv.index('-o') + 1], 'w').write('a library')\n"
    )
    program.chmod(0o755)
    return program


def command_line(*arguments: str, **environment: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["build", *arguments], env=environment)
    return result.exit_code, result.output


@TOOLCHAINS
@pytest.mark.parametrize(("has_compiler", "has_device", "forced"), list(product([False, True], repeat=3)))
def test_the_predicate(
    toolchain: Toolchain, has_compiler: bool, has_device: bool, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler always; a device, or FORCE_*=1."""
    if forced:
        monkeypatch.setenv(toolchain.force, "1")
    compiler = Compiler(Path("/sdk/bin/x"), Path("/sdk")) if has_compiler else None
    reason = refusal(toolchain, compiler, ["/dev/one"] if has_device else [])
    assert (reason is None) == (has_compiler and (has_device or forced))
    if not has_compiler:
        assert toolchain.compiler in (reason or "")
        assert os.environ["PATH"] not in (reason or "")
        assert all(
            place in (reason or "") for place in ("folders of PATH", toolchain.homes[0], toolchain.usual_homes[0])
        )
    elif reason is not None:
        assert f"{toolchain.force}=1" in reason


@TOOLCHAINS
def test_only_1_forces(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "", "yes"):
        monkeypatch.setenv(toolchain.force, value)
        assert refusal(toolchain, Compiler(Path("x"), Path("y")), []) is not None


@TOOLCHAINS
def test_the_command_line_builds_where_the_backend_looks(
    toolchain: Toolchain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = toolchain.platform.name
    status, output = command_line(name)
    assert status == 2
    assert f"no {toolchain.compiler}: looked in" in output
    sdk = tmp_path / "sdk"
    stand_in(sdk, toolchain.compiler)
    status, output = command_line(name, **{toolchain.homes[0]: str(sdk)})
    assert status == 2
    assert "device is visible" in output
    assert not (sdk / "arguments.json").exists()
    status, output = command_line(name, **{toolchain.homes[0]: str(sdk), toolchain.force: "1"})
    assert status == 0, output
    library = built_library(toolchain.platform)
    assert sealed.opened(library.read_bytes()) == b"a library"
    assert caplog.messages == [
        f"detkern compiles {library} with {sdk / 'bin' / toolchain.compiler}, which may take minutes"
    ]
    assert str(library) in output
    assert [path for path in library.parent.iterdir() if path != library] == []
    arguments = json.loads((sdk / "arguments.json").read_text())
    assert str(toolchain.platform.source) in arguments
    assert toolchain.platform.source.exists()
    assert {"-shared", "-fPIC", "-std=c++17", "-ffp-contract=off", "-fno-fast-math"} <= set(arguments)
    assert not [
        option for option in arguments if ("fast" in option and option != "-fno-fast-math") or "flush" in option
    ]
    assert arguments.index(str(toolchain.platform.source)) < arguments.index(arguments[-1])
    assert arguments[-1].startswith("-l")


def test_architectures_and_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_nodes", lambda toolchain: ["/dev/device0"])
    for toolchain, option, language in ((MUSA, "--offload-arch=", "musa"), (ASCEND, "--npu-arch=", "asc")):
        sdk = tmp_path / language
        stand_in(sdk, toolchain.compiler)
        monkeypatch.setenv(toolchain.homes[0], str(sdk))
        for asked in ((), toolchain.architectures[-1:]):
            library = build_library(toolchain, asked, tmp_path / "out" / "library.so")
            assert library == tmp_path / "out" / "library.so"
            arguments = json.loads((sdk / "arguments.json").read_text())
            built = [text.removeprefix(option) for text in arguments if text.startswith(option)]
            assert tuple(built) == (asked or toolchain.defaults)
            assert arguments[arguments.index("-x") + 1] == language
            assert f"-I{sdk / 'include'}" in arguments
        with pytest.raises(detkern.ArgumentError, match=r"sm_90 is not known; the kernels are written for"):
            build_library(toolchain, ("sm_90",))


def test_an_output_elsewhere_says_how_to_use_it(tmp_path: Path) -> None:
    stand_in(tmp_path / "sdk", "mcc")
    target = tmp_path / "elsewhere.so"
    status, output = command_line(
        "musa", "--arch", "mp_31", "--output", str(target), MUSA_HOME=str(tmp_path / "sdk"), FORCE_MUSA="1"
    )
    assert status == 0, output
    assert target.exists()
    assert f"DETKERN_MUSA_LIBRARY={target}" in output


@TOOLCHAINS
def test_where_the_compiler_is_looked_for(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_compiler(toolchain) is None
    on_path = stand_in(tmp_path / "path", toolchain.compiler)
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_compiler(toolchain) == Compiler(on_path, tmp_path / "path")
    for variable in reversed(toolchain.homes):  # the first one wins over all
        home = tmp_path / variable
        program = stand_in(home, toolchain.compiler)
        monkeypatch.setenv(variable, str(home))
        assert find_compiler(toolchain) == Compiler(program, home)


def test_what_the_compiler_says_comes_with_its_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_MUSA", "1")
    for body, expected in (
        ("print('no such builtin'); sys.exit(3)", r"status 3: .*det_gemm\.mu(.|\n)*no such builtin"),
        ("sys.exit(0)", "made no library"),
        ("import os; os.mkdir(sys.argv[sys.argv.index('-o') + 1]); sys.exit(0)", "made no library"),
    ):
        stand_in(tmp_path / "sdk", "mcc", body)
        monkeypatch.setenv("MUSA_HOME", str(tmp_path / "sdk"))
        with pytest.raises(detkern.BuildError, match=expected):
            build_library(MUSA, (), tmp_path / "library.so")
        assert not (tmp_path / "library.so").exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    stand_in(tmp_path / "sdk", "mcc")
    with pytest.raises(detkern.BuildError, match="cannot be written"):
        build_library(MUSA, (), blocked / "library.so")


def test_devices_are_seen_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from dataclasses import replace

    (tmp_path / "davinci0").touch()
    seen = replace(ASCEND, device_files=(str(tmp_path / "davinci[0-9]*"),))
    assert module.device_nodes(seen) == [str(tmp_path / "davinci0")]
    assert module.device_nodes(replace(ASCEND, device_files=(str(tmp_path / "mtgpu*"),))) == []


@TOOLCHAINS
def test_another_state_of_the_sources_is_another_file(toolchain: Toolchain, tmp_path: Path) -> None:
    """A library of older kernels is not taken for one of these."""
    from dataclasses import replace

    sources = tmp_path / "sources"
    shutil.copytree(toolchain.platform.source.parent, sources)
    platform = replace(toolchain.platform, source=sources / toolchain.platform.source.name)
    assert built_library(platform) == built_library(toolchain.platform)
    changed = tmp_path / "changed"
    shutil.copytree(sources, changed)
    header = next(path for path in sorted(changed.iterdir()) if path.suffix in (".h", ".muh"))
    header.write_text(header.read_text() + "// changed\n")
    assert built_library(replace(platform, source=changed / platform.source.name)) != built_library(platform)
