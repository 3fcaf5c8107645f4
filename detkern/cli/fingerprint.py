"""`detkern fingerprint`: one digest a contract and type, the same on every machine that keeps the contracts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import click

from ..dispatch.registry import backend_names
from ..errors import ArgumentError
from ..tensors import Device
from ..vocabulary.dtypes import BF16, F16, F32, DType
from ..vocabulary.operands import VERSION, digest, generate
from .calls import CallSubject
from .options import contracts_option, json_option
from .options import device as parse_device
from .output import print_json
from .subject import Array, Subject, sample
from .subjects import find_all

__all__ = ["fingerprint", "fingerprint_of"]

# What is digested. A change to any of it is another version, so that no two texts differ without saying why.
FINGERPRINT_VERSION = 2
KINDS = (
    "normal", "integers", "wide", "cancel", "sparse", "subnormal", "large", "signed-zero", "tiny", "special", "bits",
)  # fmt: skip
SHAPES = ((2, 3, 0), (1, 1, 1), (1, 24, 65), (5, 3, 31), (17, 9, 130), (33, 20, 257), (4, 7, 1000))


@click.command()
@click.option(
    "--device",
    type=parse_device,
    metavar="DEVICE",
    help="Where the products are computed. Default: cpu; with --backend, the first device on which that runs.",
)
@click.option(
    "--backend", metavar="NAME", help=f"By this backend: {', '.join(backend_names())}; else dispatch's first."
)
@contracts_option()
@json_option
def fingerprint(device: Device | None, backend: str | None, contracts: tuple[str, ...], as_json: bool) -> None:
    """Print a SHA-256 for each contract, or other operation, and type over results on fixed operands.

    Two machines, or a CPU and a GPU, that print the same line compute the same bits. The operands come from detkern's
    own versioned generator: normal, cancelling, subnormal, special, raw bit patterns and more, in odd shapes, plain and
    with accumulation and bias. Nothing in the text names the machine.

    \b
    Examples:
      detkern fingerprint > here.txt            then, on another machine: detkern fingerprint | diff here.txt -
      diff <(detkern fingerprint --contract mma16) <(detkern fingerprint --contract mma16 --device cuda:0)

    \b
    Exit codes: 0 printed, 2 nothing to print.
    """
    wanted = () if device is None and backend else (device or Device("cpu"),)
    subjects = find_all((backend,) if backend else (), wanted, contracts, ())
    subjects = [subject for subject in subjects if subject.device == subjects[0].device]
    if not all(subject.follows for subject in subjects):
        raise ArgumentError(f"--backend {backend} follows no contract, so it has no fingerprint")
    if not as_json:
        click.echo(
            f"# detkern fingerprint {FINGERPRINT_VERSION}, operands {VERSION}: contract or operation, type, SHA-256 of "
            f"the results"
        )
    digests = {}
    for subject in subjects:
        if (subject.name, subject.dtype) not in digests:
            found = digests[subject.name, subject.dtype] = fingerprint_of(subject)
            if not as_json:
                click.echo(f"{subject.name:<20} {subject.dtype.short:<4} {found}")
    if as_json:
        results = [{"contract": name, "dtype": d.name, "sha256": found} for (name, d), found in digests.items()]
        print_json({"fingerprint": FINGERPRINT_VERSION, "operands": VERSION, "results": results})


def fingerprint_of(subject: Subject | CallSubject) -> str:
    """The SHA-256 over the digests of all results, in hexadecimal."""
    total = hashlib.sha256()
    for result in _results(subject) if isinstance(subject, Subject) else _call_results(subject):
        total.update(bytes.fromhex(digest(result)))
    return total.hexdigest()


def _call_results(subject: CallSubject) -> Iterator[Array]:
    """Of an operation other than a product: its samples of every kind of operands."""
    for kind in KINDS:
        for one in subject.samples(kind, 0):
            yield subject.result(one)


def _results(subject: Subject) -> Iterator[Array]:
    for kind in KINDS:
        for seed, (m, n, k) in enumerate(SHAPES):
            for b_dtype in subject.b_dtypes:
                operands = sample(subject, kind, m, n, k, seed, b_dtype)
                outputs: tuple[DType, ...] = (F32, F16, BF16)
                for out_dtype in outputs:
                    yield subject.product(operands, out_dtype=out_dtype)
                yield subject.product(operands, initial=generate(kind, F32, (m, n), 5))
                if subject.scaled:
                    continue
                for bias_dtype in outputs:
                    arguments: dict[str, Any] = {
                        "bias": generate(kind, bias_dtype, (n,), 6),
                        "out_dtype": subject.dtype,
                    }
                    yield subject.product(operands, **arguments)
