"""`detkern replay` on files of every format: equal, different, and each expected error in one line with exit code 2."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import detkern
from detkern.api import block_scaled_gemm
from detkern.cli.main import main
from detkern.operations.table import OPERATIONS
from detkern.vocabulary.contracts import CONTRACTS
from detkern.vocabulary.dtypes import BF16, E4M3, E5M2, F32
from detkern.vocabulary.operands import generate

pytestmark = pytest.mark.filterwarnings("error")


def run(*arguments: Any) -> Result:
    result = CliRunner().invoke(main, ["replay", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def product(**arguments: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, b = generate("normal", BF16, (3, 40), 1), generate("normal", BF16, (40, 5), 2)
    return a, b, detkern.gemm(a, b, contract="mma16", **arguments)


def save_safetensors(path: str, **arrays: np.ndarray) -> None:
    """By hand, from the format's description: safetensors.numpy does not write every type."""
    names = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float32": "F32", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    data = b""
    for key, array in arrays.items():
        content = array.tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[key] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_raw_bfloat16_of_npy(folder: Path) -> None:
    a, b, c = product()
    for name, array in (("a", a), ("b", b), ("c", c)):
        np.save(f"{name}.npy", array)
    result = run("a.npy", "b.npy", "--contract", "mma16", "--expect", "c.npy", "--dtype", "bf16")
    assert result.exit_code == 0
    assert result.stdout == "equal: c.npy: 3 x 5 bfloat16, contract mma16: all 15 elements have the same bits\n"
    result = run("a.npy", "b.npy", "--contract", "mma16", "--expect", "c.npy")
    assert result.exit_code == 2
    assert "a.npy: holds raw elements of 2 bytes" in result.stderr
    assert "--dtype bf16 or --dtype f16" in result.stderr
    result = run("a.npy", "b.npy", "--contract", "mma16", "--expect", "c.npy", "--dtype", "e4m3")
    assert result.exit_code == 2
    assert "which e4m3 (1 bytes) does not fit" in result.stderr


def test_unsigned_patterns_fortran_order_and_big_endian(folder: Path) -> None:
    a, b, c = product(out_dtype="float32")
    np.save("a.npy", np.asfortranarray(a.view(np.uint16)))
    np.save("b.npy", b.view(np.uint16).astype(">u2"))
    np.save("c.npy", c.astype(">f4"))
    assert run("a.npy", "b.npy", "--contract", "mma16", "--expect", "c.npy", "--dtype", "bf16").exit_code == 0


def test_a_difference_is_counted_and_located(folder: Path) -> None:
    a, b, c = product(out_dtype="float32")
    wrong = c.copy()
    wrong.view(np.uint32)[1, 2] += 3
    wrong.view(np.uint32)[2, 4] += 1
    np.savez("run.npz", a=a, b=b, c=wrong)
    arguments = ["run.npz:a", "run.npz:b", "--contract", "mma16", "--expect", "run.npz:c", "--dtype", "bf16"]
    result = run(*arguments)
    assert result.exit_code == 1
    assert "differing elements     2 of 15" in result.stdout
    assert "largest ULP distance   3" in result.stdout
    apart = abs(wrong[1, 2].astype(np.float64) - c[1, 2].astype(np.float64))
    assert f"largest absolute error {apart:.6g}" in result.stdout
    assert "NaN" not in result.stdout
    assert "first at               [1, 2]" in result.stdout
    assert f"recomputed           0x{c.view(np.uint32)[1, 2]:08x}" in result.stdout
    assert f"in the file          0x{wrong.view(np.uint32)[1, 2]:08x}" in result.stdout
    result = run(*arguments, "--json")
    record = json.loads(result.stdout)
    assert result.exit_code == 1
    (found,) = record["contracts"]
    assert (record["equal"], found["equal"], found["differing"], found["largest_ulp"]) == (False, False, 2, 3)
    assert found["largest_error"] == apart
    assert found["first"]["index"] == [1, 2]
    # Another contract is a difference too, or this test's operands could not tell contracts apart.
    np.savez("run.npz", a=a, b=b, c=c)
    assert run(*arguments).exit_code == 0
    arguments[3] = "fma"
    assert run(*arguments).exit_code == 1


def test_weights_bias_and_stacks_from_safetensors(folder: Path) -> None:
    x, w = generate("normal", BF16, (2, 3, 16), 1), generate("normal", BF16, (5, 16), 2)
    bias = generate("normal", F32, (5,), 3)
    c = detkern.linear(x, w, bias, contract="tree")
    save_safetensors("all.safetensors", x=x, w=w, bias=bias, c=c)
    save_file({"x": x}, "x.safetensors")  # what the safetensors package itself writes
    tail = ["all.safetensors:w", "--trans-b", "--bias", "all.safetensors:bias", "--contract", "tree"]
    assert run("x.safetensors", *tail, "--expect", "all.safetensors:c").exit_code == 0
    assert run("all.safetensors:x", *tail, "--expect", "all.safetensors:x").exit_code == 2
    result = run(
        "all.safetensors:x", "all.safetensors:w", "--trans-b", "--contract", "tree", "--expect", "all.safetensors:c"
    )
    assert result.exit_code == 1, "the bias was left away"


def test_transposed_a_and_accumulation(folder: Path) -> None:
    a, b, _ = product()
    start = generate("normal", F32, (3, 5), 4)
    c = detkern.gemm(a, b, out=start.copy(), accumulate=True, contract="fma")
    np.savez("run.npz", at=np.ascontiguousarray(a.T), b=b, start=start, c=c)
    tail = ["run.npz:b", "--trans-a", "--contract", "fma", "--expect", "run.npz:c", "--dtype", "bf16"]
    assert run("run.npz:at", *tail, "--initial", "run.npz:start").exit_code == 0
    assert run("run.npz:at", *tail).exit_code == 1
    result = run("run.npz:at", *tail, "--initial", "run.npz:b")
    assert result.exit_code == 2
    assert "run.npz:b: holds raw elements" in result.stderr


@pytest.mark.parametrize("b_dtype", [E4M3, E5M2], ids=str)
def test_block_scaled(folder: Path, b_dtype: Any) -> None:
    a, b = generate("normal", E4M3, (3, 256), 1), generate("normal", b_dtype, (256, 4), 2)
    sa, sb = generate("normal", F32, (3, 2), 3), generate("normal", F32, (2, 4), 4)
    c = block_scaled_gemm(a, sa, b, sb)
    save_safetensors("all.safetensors", a=a, b=b, sa=sa, sb=sb, c=c)
    np.save("b.npy", b)
    scales = ["--scale-a", "all.safetensors:sa", "--scale-b", "all.safetensors:sb"]
    tail = ["--contract", "fp8-block128", "--expect", "all.safetensors:c"]
    assert run("all.safetensors:a", "all.safetensors:b", *scales, *tail).exit_code == 0
    assert run("all.safetensors:a", "b.npy", "--dtype", b_dtype.short, *scales, *tail).exit_code == 0
    result = run("all.safetensors:a", "all.safetensors:b", *tail)
    assert result.exit_code == 2
    assert "--scale-a" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.txt", "a.npy"], "'a.txt' is not an array file"),
        (["a.npy:x", "a.npy"], "a .npy file holds one array"),
        (["none.npy", "a.npy"], "none.npy: No such file"),
        (["two.npz", "a.npy"], "two.npz holds 2 arrays; choose one as two.npz:KEY from x, y"),
        (["two.npz:z", "a.npy"], "two.npz has no array 'z'; it has x, y"),
        (["broken.npz:x", "a.npy"], "broken.npz is not a readable .npz file"),
        (["torn.npz", "a.npy"], "torn.npz is not a readable .np"),
        (["record.npy", "a.npy"], "record.npy: holds [("),
        (["list.safetensors", "a.npy"], "list.safetensors is not a readable"),
        (["broken.npy", "a.npy"], "broken.npy is not a readable .npy file"),
        (["short.npy", "a.npy"], "ends 4 bytes early"),
        (["objects.npy", "a.npy"], "it holds Python objects"),
        (["broken.safetensors", "a.npy"], "broken.safetensors is not a readable .safetensors file"),
        (["whole.safetensors:i", "a.npy"], "holds int64"),
        (["whole.safetensors", "a.npy"], "choose one as whole.safetensors:KEY from x, i"),
        (["double.npy", "a.npy"], "double.npy: holds float64"),
        (["a.npy", "a.npy"], "K is 3 in a and 2 in b"),
        (["a.npy", "a.npy", "--trans-b", "--bias", "a.npy"], "bias"),
        (["a.npy", "a.npy", "--trans-b", "--scale-a", "a.npy"], "belong to fp8-block128"),
        (["a.npy", "a.npy", "--trans-b", "--out-dtype", "f16"], "--out-dtype f16: a.npy holds float32"),
        (["a.npy", "a.npy", "--trans-b", "--dtype", "f8"], "'f8' is not an element type"),
        (["a.npy", "a.npy", "--trans-b"], "the shapes differ: (2, 2) was computed, (2, 3) expected"),
    ],
)
def test_expected_errors(folder: Path, arguments: list[str], said: str) -> None:
    x = np.ones((2, 3), np.float32)
    np.save("a.npy", x)
    np.savez("two.npz", x=x, y=x)
    np.save("double.npy", x.astype(np.float64))
    np.save("objects.npy", np.array([None, {}]), allow_pickle=True)
    save_safetensors("whole.safetensors", x=x, i=np.ones(2, np.int64))
    Path("broken.npz").write_bytes(b"PK no archive")
    np.savez_compressed("whole.npz", x=np.arange(4096, dtype=np.float32))
    torn = bytearray(Path("whole.npz").read_bytes())
    torn[1000:1200] = bytes(200)
    Path("torn.npz").write_bytes(torn)
    np.save("record.npy", np.zeros((2, 3), [("re", "f2"), ("im", "f2")]))
    Path("list.safetensors").write_bytes(struct.pack("<Q", 5) + b'["x"]')
    Path("broken.npy").write_bytes(b"no array")
    Path("short.npy").write_bytes(Path("a.npy").read_bytes()[:-4])
    Path("broken.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    result = run(*arguments, "--contract", "fma", "--expect", "a.npy")
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output


def header(text: str, major: int = 1) -> bytes:
    """The start of a .npy file."""
    length = struct.pack("<H" if major == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([major, 0]) + length + text.encode()


def described(shape: str) -> bytes:
    return header("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + "}") + bytes(32)


def tensor(**entry: Any) -> bytes:
    text = json.dumps({"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **entry}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(24)


@pytest.mark.parametrize(
    ("suffix", "content", "said"),
    [
        (".npy", described(f"({1 << 70},)"), "bytes, more than memory holds"),
        (".npy", described(f"({1 << 60},)"), "bytes, more than memory holds"),
        (".npy", described(f"({1 << 32}, {1 << 32})"), "more than memory holds"),  # 2^64 elements are not 0
        (".npy", described("(-1,)"), "its shape is (-1,)"),
        (".npy", described("(True, 3)"), "its shape is (True, 3)"),
        (".npy", described("6"), "its shape is 6"),
        (
            ".npy",
            header("{'descr': '<f4', 'fortran_order': 'no', 'shape': (2, 3)}") + bytes(24),
            "fortran_order is 'no'",
        ),
        (".npy", header("-" * 60_000), "is not a readable .npy file"),
        (".npy", header("{}", 9), "version 9"),
        (".safetensors", tensor(data_offsets=[-8, 16]), "x would begin 8 bytes before the data"),
        (".safetensors", tensor(shape=[-2, -3]), "its shape is (-2, -3)"),
        (".safetensors", tensor(shape=[2.0, 3]), "its shape is (2.0, 3)"),
        (".safetensors", struct.pack("<Q", 100_000) + b"[" * 100_000, "is not a readable .safetensors file"),
    ],
)
def test_files_that_claim_what_cannot_be(folder: Path, suffix: str, content: bytes, said: str) -> None:
    np.save("b.npy", np.ones((3, 2), np.float32))
    Path(f"a{suffix}").write_bytes(content)
    result = run(f"a{suffix}", "b.npy", "--contract", "fma", "--expect", "b.npy")
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr) < 400


def test_archives_that_zipfile_cannot_read(folder: Path) -> None:
    np.savez("whole.npz", x=np.ones((2, 3), np.float32))
    whole = Path("whole.npz").read_bytes()
    entry = whole.index(b"PK\1\2")
    for offset, value, said in (
        (6, 249, "version"),  # needed to extract
        (8, 0x40, "encryption"),  # flags
        (8, 0x01, "encrypted"),
        (10, 97, "compression"),  # method
    ):
        torn = bytearray(whole)
        torn[entry + offset] = value
        torn[offset - 2] = value  # the same in the member's own header
        Path("torn.npz").write_bytes(torn)
        result = run("torn.npz:x", "torn.npz:x", "--contract", "fma", "--expect", "torn.npz:x")
        assert result.exit_code == 2
        assert "torn.npz is not a readable .npz file" in result.stderr
        assert said in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_full_disk_is_an_error(folder: Path, json_flag: list[str]) -> None:
    np.save("one.npy", np.ones((1, 1), np.float32))
    command = [
        sys.executable,
        "-m",
        "detkern",
        "replay",
        "one.npy",
        "one.npy",
        "--contract",
        "fma",
        "--expect",
        "one.npy",
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, *json_flag], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def replayed(*arguments: str) -> tuple[int, dict[str, str], list[str]]:
    """Exit code, the first word of each contract's line, and the lines after those."""
    result = run(*arguments)
    lines = result.stdout.splitlines()
    found = [re.match(r"(equal|DIFFERENT): .*?, contract ([\w-]+): ", line) for line in lines]
    return (
        result.exit_code,
        {m[2]: m[1] for m in found if m},
        [line for line, m in zip(lines, found, strict=True) if not m],
    )


def test_any_contract_of_float32_results(folder: Path) -> None:
    """Only the contract that computed them gives them, and every contract that takes the type has a line."""
    a, b = generate("cancel", BF16, (60, 300), 1), generate("cancel", BF16, (300, 50), 2)
    for contract in ("fma", "mma16", "mma8", "tree", "tree-mma16"):
        np.savez("run.npz", a=a, b=b, c=detkern.gemm(a, b, contract=contract, out_dtype="float32"))
        status, found, rest = replayed(*ANY, "--contract", "any")
        assert (status, rest) == (0, [])
        assert found == {name: "equal" if name == contract else "DIFFERENT" for name in BF16_CONTRACTS}


ANY = ["run.npz:a", "run.npz:b", "--dtype", "bf16", "--expect", "run.npz:c"]
BF16_CONTRACTS = [contract.name for contract in CONTRACTS.values() if BF16 in contract.operands]


def test_elements_that_cannot_tell_contracts_apart(folder: Path) -> None:
    a, b = generate("normal", BF16, (3, 40), 1), generate("normal", BF16, (40, 5), 2)
    wide = {name: detkern.gemm(a, b, contract=name, out_dtype="float32").tobytes() for name in ("fma", "mma16", "mma8")}
    assert wide["fma"] != wide["mma16"] == wide["mma8"], "the operands are chosen so"
    np.savez("run.npz", a=a, b=b, c=detkern.gemm(a, b, contract="fma"))
    status, found, (said,) = replayed(*ANY, "--contract", "any")
    assert status == 0
    assert [name for name, word in found.items() if word == "equal"] == ["fma", "mma16", "mma8"]
    assert said.startswith(
        "fma, mma16 and mma8 give the same elements here, which cannot tell them apart; float32 results"
    )
    assert '(out_dtype="float32") can, but for mma16 and mma8: larger operands' in said
    # A second --contract is added to the first. These two are told apart by float32 results.
    status, found, (said,) = replayed(*ANY, "--contract", "mma8", "--contract", "fma", "--contract", "mma8")
    assert (status, found) == (0, {"mma8": "equal", "fma": "equal"})
    assert said.endswith('float32 results of the same operands (out_dtype="float32") can')
    # Sums that are exact in every order.
    np.savez("run.npz", a=np.ones_like(a), b=np.ones_like(b), c=np.full((3, 5), 40, BF16.numpy))
    status, found, (said,) = replayed(*ANY, "--contract", "any")
    assert (status, found) == (0, dict.fromkeys(BF16_CONTRACTS, "equal"))
    assert "nor can float32 results; larger operands" in said
    record = json.loads(run(*ANY, "--contract", "any", "--json").stdout)
    assert record["same_in_float32"] == [BF16_CONTRACTS]
    assert [entry["contract"] for entry in record["contracts"]] == BF16_CONTRACTS


def test_several_contracts_that_all_differ(folder: Path) -> None:
    a, b = generate("normal", BF16, (3, 40), 1), generate("normal", BF16, (40, 5), 2)
    c = np.array(detkern.gemm(a, b, contract="fma"))
    c[0, 0] += np.asarray(1, c.dtype)
    np.savez("run.npz", a=a, b=b, c=c)
    result = run(*ANY, "--contract", "fma", "--contract", "mma16")
    assert result.exit_code == 1
    assert re.search(r"contract fma: 1 of 15 \(6.67%\) differ by up to [\d,]+ ULP, 1 absolute\n", result.stdout)
    record = json.loads(run(*ANY, "--contract", "fma", "--contract", "mma16", "--json").stdout)
    assert (record["equal"], record["same_in_float32"]) == (False, None)


def test_any_contract_goes_by_the_type_of_a(folder: Path) -> None:
    x, y = generate("normal", F32, (3, 8), 1), generate("normal", F32, (8, 2), 2)
    np.savez("run.npz", a=x, b=y, c=detkern.gemm(x, y))
    start = generate("normal", F32, (3, 2), 3)
    np.savez("onto.npz", c=detkern.gemm(x, y, out=start.copy(), accumulate=True), start=start)
    assert run("run.npz:a", "run.npz:b", "--contract", "any", "--expect", "run.npz:c").stdout.count("\n") == 1
    onto = ["--initial", "onto.npz:start", "--expect", "onto.npz:c"]
    assert run("run.npz:a", "run.npz:b", "--contract", "any", *onto).exit_code == 0
    eights = generate("normal", E4M3, (3, 128), 1)
    save_safetensors("e.safetensors", a=eights, b=np.ascontiguousarray(eights.T), c=x)
    scaled = run("e.safetensors:a", "e.safetensors:b", "--contract", "any", "--expect", "e.safetensors:c")
    assert scaled.exit_code == 2
    assert "fp8-block128 needs the scales too" in scaled.stderr


def test_nans_of_another_payload(folder: Path) -> None:
    x = np.array([[np.nan, 1.0]], np.float32)
    y = np.eye(2, dtype=np.float32)
    c = np.array(detkern.gemm(x, y))
    c.view(np.uint32)[0, 1] = 0xFFC00000
    np.savez("run.npz", a=x, b=y, c=c)
    result = run("run.npz:a", "run.npz:b", "--contract", "fma", "--expect", "run.npz:c")
    assert result.exit_code == 1
    assert "NaN against NaN        1 (another sign or payload)" in result.stdout
    assert "largest ULP distance   none between numbers" in result.stdout
    assert "largest absolute error" not in result.stdout


def test_vectors(folder: Path) -> None:
    a, b = generate("normal", F32, (9,), 1), generate("normal", F32, (9,), 2)
    c = np.asarray(detkern.gemm(a, b, contract="fma"))
    np.savez("run.npz", a=a, b=b, c=c, wrong=-c)
    result = run("run.npz:a", "run.npz:b", "--contract", "fma", "--expect", "run.npz:c")
    assert (result.exit_code, result.stdout.split(",")[0]) == (0, "equal: run.npz:c: scalar float32")
    result = run("run.npz:a", "run.npz:b", "--contract", "fma", "--expect", "run.npz:wrong")
    assert result.exit_code == 1
    assert "first at               []" in result.stdout


def test_e5m2_that_numpy_writes_and_cannot_read(folder: Path) -> None:
    from detkern.cli.files import load, parse_location

    array = generate("bits", E5M2, (4, 3), 1)
    np.save("x.npy", array)
    with pytest.raises(ValueError, match="f1"):
        np.load("x.npy")
    loaded = load(parse_location("x.npy"))
    assert loaded.dtype == ml_dtypes.float8_e5m2
    assert np.array_equal(loaded.view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("variant", [v for o in OPERATIONS for v in o.variants if v not in CONTRACTS])
def test_every_other_operation(variant: str, tmp_path: Path) -> None:
    """By the names of its record: equal, one bit off, and with as many files as it takes."""
    operation = next(o for o in OPERATIONS if variant in o.variants)
    dtype = operation.variants[variant][0]
    sample = max(operation.samples(variant, dtype, "normal", 1), key=lambda s: len(s.shape) + (s.dtype == F32))
    operands = [array for array in sample.operands if array is not None]
    paths = []
    for index, array in enumerate(operands):
        paths.append(str(tmp_path / f"{index}.npy"))
        np.save(paths[-1], array)
    result = operation.call(variant)(sample.operands, sample.shape, out_dtype="f32")
    for flip in (0, 1):
        if result.size:
            result.view(np.uint32).flat[0] ^= flip
        np.save(tmp_path / "c.npy", result)
        run = CliRunner().invoke(main, ["replay", *paths, "--operation", variant, "--expect", str(tmp_path / "c.npy")])
        assert run.exit_code == flip * bool(result.size), run.output
        assert f"operation {variant}" in run.output
    more = CliRunner().invoke(
        main, ["replay", *paths[:1] * (2 if len(paths) == 1 else 1), "--operation", variant, "--expect", paths[0]]
    )
    assert more.exit_code == 2
    assert f"--operation {variant} takes" in more.output


def test_an_operation_takes_no_option_of_products(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((3, 4), np.float32))
    x = str(tmp_path / "x.npy")
    for options, words in (
        (["--operation", "softmax", "--trans-b"], "--trans-b: of products alone, not of softmax"),
        (["--operation", "softmax", "--initial", x], "softmax does not accumulate"),
        ([], "one of the two: --contract NAME for a product, --operation NAME"),
        (
            ["--operation", "softmax", "--contract", "fma"],
            "one of the two: --contract NAME for a product, --operation NAME",
        ),
        (["--contract", "fma"], "a product takes two files"),
        ([x, "--operation", "softmax"], "--operation softmax takes a file each of x; given are 2"),
    ):
        run = CliRunner().invoke(main, ["replay", x, "--expect", x, *options])
        assert run.exit_code == 2, run.output
        assert words in run.output
    np.save(tmp_path / "start.npy", np.full(4, 2, np.float32))
    np.save(tmp_path / "sum.npy", np.full(4, 5, np.float32))
    given = [
        "--operation",
        "bias_gradient",
        "--initial",
        str(tmp_path / "start.npy"),
        "--expect",
        str(tmp_path / "sum.npy"),
    ]
    assert CliRunner().invoke(main, ["replay", x, *given]).exit_code == 0


def test_an_operation_by_an_index(tmp_path: Path) -> None:
    """Whole numbers of both widths, as .npy and as .safetensors; nothing else takes them."""
    source, tokens = np.array([[2.0**24], [1], [5], [1]], np.float32), np.array([2, 2, 0, 2])
    paths = {name: str(tmp_path / name) for name in ("dy.npy", "tokens.npy", "dw.npy", "start.npy", "t.safetensors")}
    np.save(paths["dy.npy"], source)
    np.save(paths["tokens.npy"], tokens.astype(np.int32))
    save_safetensors(paths["t.safetensors"], tokens=tokens)
    np.save(paths["dw.npy"], np.array([[5], [0], [2.0**24]], np.float32))
    for index in ("tokens.npy", "t.safetensors"):
        given = [paths["dy.npy"], paths[index], "--operation", "scatter_sum", "--expect", paths["dw.npy"]]
        assert CliRunner().invoke(main, ["replay", *given]).exit_code == 0
    np.save(paths["start.npy"], np.array([[0], [0], [2]], np.float32))
    changed = CliRunner().invoke(main, ["replay", *given, "--initial", paths["start.npy"]])
    assert changed.exit_code == 1, changed.output
    product = CliRunner().invoke(main, ["replay", *given[:2], "--contract", "fma", "--expect", paths["dw.npy"]])
    assert product.exit_code == 2
    assert "t.safetensors: holds int64, which an index may be" in product.output


def test_a_safetensors_header_that_is_no_object_is_named(folder: Path) -> None:
    header = b"[1, 2]"
    Path("list.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    done = run("list.safetensors", "list.safetensors", "--contract", "fma", "--expect", "list.safetensors")
    assert done.exit_code == 2
    assert "list.safetensors is not a readable .safetensors file: its header is a JSON list" in " ".join(
        done.output.split()
    )


def test_a_safetensors_entry_that_is_no_object_is_named(folder: Path) -> None:
    header = b'{"w": [1]}'
    Path("entry.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    done = run("entry.safetensors", "entry.safetensors", "--contract", "fma", "--expect", "entry.safetensors")
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "entry.safetensors is not a readable .safetensors file: the entry of w is a JSON list, not an object" in said
