"""What a compiler made of a kernel: its log, and its machine code as nvdisasm shows it. Needs no GPU."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from detkern.cu import loader
from detkern.errors import BuildError

ARITHMETIC = ("FADD", "FMUL", "FFMA", "FSET", "HADD", "HMUL", "HFMA", "HMMA", "F2F")


def _nvrtc() -> str | None:
    try:
        loader.supported_architectures()
    except BuildError as error:
        return str(error)
    return None


def _disassembler() -> Path | None:
    """nvdisasm of the package nvidia-cuda-nvdisasm."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


NEEDS_A_COMPILER = [
    pytest.mark.skipif(_nvrtc() is not None, reason=f"NVRTC is not installed: {_nvrtc()}"),
    pytest.mark.skipif(_disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed"),
]


def compile_build(build: loader.KernelBuild, architecture: str) -> tuple[str, str]:
    """(log, machine code); runs in a process of its own."""
    image, log = loader.compile_kernel(build, architecture, ("--ptxas-options=-v",))
    return log, disassemble(image)


def disassemble(image: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run(
            [str(_disassembler()), file.name], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def registers_of(log: str) -> int:
    """The registers of a thread, from a log with no warning in it and no byte of stack or spill."""
    assert "warning" not in log
    assert not (said := re.search(r"\bC75\d\d\b", log)), f"ptxas says {said and said[0]}"
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log) == [
        ("0", "0", "0")
    ]
    (registers,) = map(int, re.findall(r"Used (\d+) registers", log))
    return registers


def instructions_of(code: str) -> list[str]:
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", code, re.MULTILINE)


def check_instruction(name: str) -> None:
    assert not name.startswith(("RED.", "ATOM", "LDL", "STL")), name  # atomics; local memory
    # Subnormals are kept. (Divisions of 64-bit integers go through floats that flush, to no harm.)
    assert ".FTZ" not in name or not name.startswith(ARITHMETIC), name


def main_loops(code: str) -> Iterator[tuple[list[str], list[str]]]:
    """The instructions of each loop over stages, which always has one in flight, and those behind it up to the next
    one."""
    waits = [match.start() for match in re.finditer(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", code)]
    jump = re.compile(r"BRA `\((\.L_x_\d+)\)")
    for wait, next_wait in zip(waits, [*waits[1:], len(code)], strict=True):
        back = jump.search(code, wait)
        assert back
        start = code.index(f"\n{back[1]}:")
        assert start < wait
        yield instructions_of(code[start : back.end()]), instructions_of(code[back.end() : next_wait])


def check_exponentials_and_divisions(instructions: list[str]) -> None:
    # The divisions and reciprocals that round correctly have subroutines for operands far out, which flush where they
    # ask for infinities and where they negate a significand: no result.
    flushing = [name for name in instructions if ".FTZ" in name and name.startswith(ARITHMETIC)]
    assert set(flushing) <= {"FSETP.GTU.FTZ.AND", "FSETP.NEU.FTZ.AND", "FADD.FTZ"}
    assert flushing or "FCHK" not in instructions
    assert not flushing or "MUFU.RCP" in instructions
    assert not {"MUFU.EX2", "MUFU.LG2"} & set(instructions)
    for name in instructions:
        if name not in flushing:
            check_instruction(name)
