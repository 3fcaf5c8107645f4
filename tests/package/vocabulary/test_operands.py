"""The operand generator: its streams are fixed, random access, and of the kind that their names say."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from detkern.errors import ArgumentError
from detkern.vocabulary import operands
from detkern.vocabulary.dtypes import BF16, DTYPES, E4M3, E5M2, F16, F32
from detkern.vocabulary.operands import KINDS, digest, generate

# SHA-256 over the digests of all types, shape (37, 29), seed 20251. They never change under VERSION = 1.
STREAMS = {
    "normal": "cd5831248ac524a72d2851c395b9fe26e7170cceb328e5413f755b5f0c88b2e5",
    "integers": "c60b91af843f594d9961516bb2dab60ef1b323203cc5dd1db144af355ba87461",
    "wide": "6b5727ebe05cacb6500f0270140d7943cb416a9d3d55cdaa680daa1fa52019ad",
    "cancel": "b68a648a580d258a872c43044b9c8b793719a72be830796d981ac3f945d8639b",
    "sparse": "58c4b82a556843c3e9332aaceb2b69162ff91c28ba5c69c70ebd863471c28699",
    "subnormal": "b57e826087db38fd47678d98ab73737cb98af59d949e60642103b76020efbfd2",
    "large": "e437982e6ecdc3e8fa145f95adc2cd0ea4e06740a5e374b03307d6bb2dd4d4ba",
    "signed-zero": "d07a2b9b0299189bc4c82044de01d7d0f700819de201ae851cc085ee47189d50",
    "tiny": "8bdf6aa857d9ab9b9758f41083beaeb9a303845bc44d0f7e297cac41729ade23",
    "special": "f1064204ae2c910e5c62ff317adeea96b59cce9147116fead8ff6209e2b66a87",
    "bits": "dbadeb8f18b1b155aad869e91147dbf0f85a0cc7ab26c762504bac9770f5bf43",
}


@pytest.mark.parametrize("kind", KINDS)
def test_streams_never_change(kind):
    assert operands.VERSION == 1
    parts = "".join(digest(generate(kind, dtype, (37, 29), 20251)) for dtype in DTYPES)
    assert hashlib.sha256(parts.encode()).hexdigest() == STREAMS[kind]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_element_depends_on_its_index_alone(kind, dtype, monkeypatch):
    whole = generate(kind, dtype, (12, 50), 3)
    assert whole.dtype == dtype.numpy
    assert whole.flags.c_contiguous
    assert digest(generate(kind, dtype, (600,), 3)) == digest(whole)
    assert digest(generate(kind, dtype, (7, 5), 3)) == digest(whole.ravel()[:35])
    monkeypatch.setattr(operands, "_CHUNK", 37)
    assert digest(generate(kind, dtype, (12, 50), 3)) == digest(whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_types_and_seeds_have_streams_of_their_own(dtype):
    digests = [digest(generate(kind, dtype, (200,), seed)) for kind in KINDS for seed in (0, 1, 2**64 - 1)]
    assert len(set(digests)) == len(digests)
    if dtype.itemsize == 1:
        assert digest(generate("bits", E4M3, (200,), 0)) != digest(generate("bits", E5M2, (200,), 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_finite_where_promised(kind, dtype):
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(generate(kind, dtype, (50_000,), 4))
    assert finite.all() == (kind not in ("special", "bits"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_kinds_hold(dtype):
    def values(kind: str) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return generate(kind, dtype, (50_000,), 5).astype(np.float64)

    normal = values("normal")
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert np.abs(normal).max() <= 6
    assert abs((np.abs(normal) < 1).mean() - 0.683) < 0.05  # a Gaussian's share within one deviation
    assert set(values("integers")) == set(range(-8, 9))
    smallest = float(np.abs(generate("wide", dtype, (50_000,), 5).astype(np.float64)).min())
    assert np.abs(values("wide")).max() / smallest > 2**12
    assert abs((values("sparse") == 0).mean() - 0.75) < 0.01
    zeros = values("signed-zero") == 0
    assert 0.2 < (zeros & np.signbit(values("signed-zero"))).mean() < 0.3
    limits = {F32: 2.0**-126, BF16: 2.0**-126, F16: 2.0**-14, E4M3: 2.0**-6, E5M2: 2.0**-14}
    subnormal = np.abs(values("subnormal"))
    assert (subnormal < limits[dtype]).mean() > 0.4
    assert (subnormal > 0.5).mean() > 0.002
    large = np.abs(values("large"))
    top = {F32: 2.0**124, BF16: 2.0**124, F16: 2.0**12, E4M3: 2.0**5, E5M2: 2.0**12}[dtype]
    assert abs((large >= top).mean() - 0.5) < 0.02
    assert abs((large == 0).mean() - 0.25) < 0.1
    tiny = np.abs(values("tiny"))
    assert (tiny == 0).mean() > 0.2
    assert 0.005 < (tiny >= top).mean() < 0.02
    special = values("special")
    assert 0.0005 < np.isnan(special).mean() < 0.01
    assert (np.isposinf(special).any() and np.isneginf(special).any()) == (dtype != E4M3)
    patterns = generate("bits", dtype, (50_000,), 5).view(dtype.bits)
    for bit in range(8 * dtype.itemsize):
        assert abs((patterns >> bit & 1).mean() - 0.5) < 0.02


def test_cancelling_operands_cancel():
    a, b = (generate("cancel", F32, (2000, 64), seed).astype(np.float64) for seed in (1, 2))
    sums, sizes = np.abs((a * b).sum(axis=1)), np.abs(a * b).sum(axis=1)
    assert (sums < sizes / 1000).sum() > 20


def test_neighbouring_words_are_unrelated():
    """One bit of the index or the seed changes half the bits of a word."""
    first = generate("bits", F32, (20_000,), 8).view(np.uint32)
    for other in (np.roll(first, 1), generate("bits", F32, (20_000,), 9).view(np.uint32)):
        changed = np.bitwise_count(first ^ other).mean()
        assert abs(changed - 16) < 0.1


def test_empty_and_wrong_calls():
    assert generate("normal", F32, (0, 5), 0).shape == (0, 5)
    assert generate("normal", F32, (), 0).shape == ()
    with pytest.raises(ArgumentError, match=r"kind='gaussian'.*normal"):
        generate("gaussian", F32, (1,), 0)
    for seed in (-1, 2**64):
        with pytest.raises(ArgumentError, match="seed"):
            generate("normal", F32, (1,), seed)
    with pytest.raises(ArgumentError, match="negative"):
        generate("normal", F32, (2, -1), 0)


def test_digest_is_of_little_endian_row_major_bytes():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert digest(values[:0]) == hashlib.sha256(b"").hexdigest()
    raw = bytes.fromhex("000000000000803f0000004000004040000080400000a040")
    for same in (values, np.asfortranarray(values), values.astype(">f4"), values[::-1][::-1]):
        assert digest(same) == hashlib.sha256(raw).hexdigest()
    assert digest(np.array([1.0], BF16.numpy)) == hashlib.sha256(bytes.fromhex("803f")).hexdigest()
    assert digest(np.array([1.0], np.float16)) == hashlib.sha256(bytes.fromhex("003c")).hexdigest()
    assert digest(np.array([1.0], E4M3.numpy)) == hashlib.sha256(bytes.fromhex("38")).hexdigest()
    assert digest(np.array([-2.0], F16.numpy)) != digest(np.array([2.0], F16.numpy))
