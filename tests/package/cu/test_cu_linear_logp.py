"""linear_logp.cu compiled for the host, behind the launches that would start it, bit for bit against the replay:
indices, how blocks divide the vocabulary and the rows, barriers and shuffles. Products are the replay's."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detkern.cu import linear_logp, linear_logp_launch, linear_logp_wgmma, loader
from detkern.dispatch.backend import Execution
from detkern.operations.gemm.operation import GEMM
from detkern.operations.linear_logp.operation import DELTA, FOLD, MERGE
from detkern.operations.linear_logp.problem import (
    PARTS,
    Scaling,
    delta_problem,
    fold_problem,
    merge_problem,
    part_edges,
)
from detkern.operations.linear_logp.replay import delta, fold, part_state, results, tree
from detkern.operations.operation import replayed
from detkern.tensors import Device, TensorView
from detkern.vocabulary import operands
from detkern.vocabulary.arithmetic.binary32 import canonical
from detkern.vocabulary.contracts import FMA, MMA16
from detkern.vocabulary.dtypes import BF16, F16, F32, I64, DType, from_numpy

pytest.importorskip("cupy", reason="CuPy is not installed")
if shutil.which("g++") is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

EMULATION = Path(__file__).parents[2] / "emulation"
DEVICE = Device("cuda", 0)
SCALED = Scaling(float(np.float32(1 / 0.7)), 20.0, float(np.float32(1 / 20)))


class Products:
    """The replay in place of kernels."""

    def prepare(self, problem: Any, execution: Any) -> Any:
        return lambda m, given, out, execution: GEMM.replay(problem.with_rows(m), given, out)

    def refuses(self, problem: Any) -> None:
        return None


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], ctypes.CDLL]:
    """By phase, and of merges behind tiles units and rows: the kernel's own files, with the host's PTX."""
    folder = tmp_path_factory.mktemp("linear_logp")
    shutil.copytree(loader.FOLDER, folder, dirs_exist_ok=True)
    for source in (EMULATION / "cuda" / "ptx.cuh", EMULATION / "cuda" / "blocks.cpp", EMULATION / "fibers.h"):
        shutil.copy(source, folder)
    for header in (folder / "ptx").glob("*.cuh"):
        lines = header.read_text().splitlines(True) if header.name == "types.cuh" else []
        kept = [line for line in lines if not line.startswith(("typedef", "#define DETKERN_INLINE"))]
        header.write_text("".join(["#include <cstdint>\n", *kept, '#include "ptx.cuh"\n']))
    found = {}
    merges = [linear_logp_launch.merge_build(units, rows) for units in (2, 3, 4) for rows in (1, 8)]
    for build in linear_logp_launch.builds() + merges:
        library = folder / f"{build.entry}.so"
        command = [
            "g++", "-std=c++17", "-O1", "-mfma", "-shared", "-fPIC", "-ffp-contract=off", "-fpermissive", "-w",
            f'-DKERNEL="{build.source}"', "-DPARAMS=LogpParams", "-D__shared__=static",
            *(f"-D{name}={value}" for name, value in build.macros),
            f"-I{folder}", str(folder / "blocks.cpp"), "-o", str(library),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        macros = dict(build.macros)
        found[macros["PHASE"], macros.get("TILE_UNITS", 0), macros.get("MERGE_ROWS", 0)] = ctypes.CDLL(str(library))
    return found


@pytest.fixture
def execution(libraries: dict[tuple[int, ...], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> Execution:
    """Where launches run on the host; scratch memory holds NaN."""

    def launch(phase: int, device: Device, grid: tuple[int, int], params: bytes, stream: int) -> None:
        libraries[phase, 0, 0].emulation_launch(params, *grid)

    def allocate(size: int) -> TensorView:
        memory = np.full(size, 0xFF, np.uint8)
        return TensorView(memory.ctypes.data, (size,), (1,), F32, DEVICE, array=memory)

    monkeypatch.setattr(linear_logp, "launch_phase", launch)
    monkeypatch.setattr(linear_logp_wgmma, "takes", lambda problem: False)
    monkeypatch.setattr("detkern.cu.current.on_device", lambda problem, function, *arguments: function(*arguments))
    return Execution(DEVICE, 0, allocate)


def view(array: np.ndarray) -> TensorView:
    dtype = from_numpy(array.dtype)
    assert dtype is not None
    strides = tuple(step // array.itemsize for step in array.strides)
    return TensorView(array.ctypes.data, array.shape, strides, dtype, DEVICE, array=array)


def run(implementation: Any, problem: Any, given: tuple[Any, ...], out: np.ndarray, execution: Execution) -> np.ndarray:
    views = tuple(None if x is None else view(x) for x in given)
    implementation.prepare(problem, execution)(problem.m, views, view(out), execution)
    return out


def same(left: np.ndarray, right: np.ndarray) -> bool:
    bits = f"u{left.dtype.itemsize}"
    return left.shape == right.shape and bool((left.view(bits) == right.view(bits)).all())


def case(m: int, vocabulary: int, k: int, targets: int, dtype: DType, kind: str, seed: int) -> Any:
    hidden = operands.generate(kind, dtype, (m, k), seed)
    weight = operands.generate(kind, dtype, (vocabulary, k), seed + 1)
    target = np.random.default_rng(seed).integers(-1, vocabulary + 1, (m, targets)).astype(I64.numpy)
    target[::5] = -100
    return hidden, weight, target, operands.generate("normal", (F32, BF16)[seed % 2], (vocabulary,), seed + 2)


@pytest.mark.parametrize("contract", [FMA, MMA16], ids=str)
def test_every_case_of_the_records(contract: Any, execution: Execution) -> None:
    """Those of the self-check, all kinds of operands among them."""
    every = [
        (operation, variant, dtype, build)
        for operation, build in (
            (FOLD, linear_logp.Folds(Products())), (DELTA, linear_logp.Deltas(Products())), (MERGE,
             linear_logp.Merges())
        )
        for variant, dtypes in operation.variants.items()
        for dtype in dtypes
        if variant.endswith(str(contract)) or (operation is MERGE and contract is FMA)
    ]  # fmt: skip
    for operation, variant, dtype, implementation in every:
        for number, sample in enumerate(operation.cases(variant, dtype)):
            if number % (1 if operation is MERGE else 3):
                continue
            out = np.full(sample.shape, 7, sample.dtype.numpy)
            problem = operation.problem_of(
                sample, tuple(None if x is None else view(x) for x in sample.operands), view(out)
            )
            run(implementation, problem, sample.operands, out, execution)
            assert same(out, replayed(operation, sample)), (variant, dtype.short, sample.about)


@pytest.mark.parametrize("scaling", [Scaling(), SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize(
    ("logits_bytes", "nodes_bytes"),
    [(32 << 20, 24 << 20), (4 * 21 * 512, 1), (1, 1)],
    ids=["whole", "blocks", "smallest"],
)
def test_rows_and_vocabulary_in_blocks(
    scaling: Scaling, logits_bytes: int, nodes_bytes: int, execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes around units, groups and parts; few of scratch memory, so that both are cut."""
    monkeypatch.setattr(linear_logp, "_LOGITS_BYTES", logits_bytes)
    monkeypatch.setattr(linear_logp, "_NODES_BYTES", nodes_bytes)
    for number, vocabulary in enumerate((1, 7, 64, 65, 520, 2300)):
        hidden, weight, target, bias = case(21, vocabulary, 9, 2, F32, "normal", number)
        state = fold(FMA, hidden, weight, target, bias, vocabulary=vocabulary, scaling=scaling, entropy=number % 2 == 0)
        out = np.full(state.shape, np.nan, np.float32)
        problem = fold_problem(
            FMA, view(hidden), view(weight), view(target), view(bias), view(out),
            vocabulary=vocabulary, start=0, first=0, count=PARTS, scaling=scaling, entropy=number % 2 == 0,
        )  # fmt: skip
        folds = linear_logp.Folds(Products())
        assert same(run(folds, problem, (hidden, weight, target, bias), out, execution), state), vocabulary
        grads = operands.generate("normal", F32, (4 if number % 2 == 0 else 3, 21), number)
        settings: Any = {"vocabulary": vocabulary, "start": 0, "ignore_index": -100, "scaling": scaling}
        expected = delta(
            FMA, hidden, weight, target, state, grads, bias, entropy=number % 2 == 0, out_dtype=BF16, **settings
        )
        block = np.full(expected.shape, 7, BF16.numpy)
        views = [view(x) for x in (hidden, weight, target, state, grads, bias, block)]
        deltas = linear_logp.Deltas(Products())
        found = run(
            deltas,
            delta_problem(FMA, *views, **settings),
            (hidden, weight, target, state, grads, bias),
            block,
            execution,
        )
        assert same(found, expected), vocabulary


def test_shards_make_the_whole(execution: Execution) -> None:
    """Also those of no columns, and a stack of lines whose rows are apart."""
    for vocabulary in (5, 600, 1100):
        hidden, weight, target, bias = case(33, vocabulary, 8, 1, F16, "normal", vocabulary)
        whole = fold(MMA16, hidden, weight, target, bias, vocabulary=vocabulary)
        expected = results(whole[None], target, vocabulary=vocabulary, ignore_index=-100)
        edges = part_edges(vocabulary)
        for shards in (1, 2, 4, 8):
            wide = np.full((shards, 4, 2 * 33), np.nan, np.float32)
            states = wide[:, :, ::2]
            count = PARTS // shards
            for shard in range(shards):
                columns = slice(edges[shard * count], edges[(shard + 1) * count])
                given = hidden, weight[columns], target, bias[columns]
                views = [view(x) for x in given]
                problem = fold_problem(
                    MMA16, *views, view(states[shard]), vocabulary=vocabulary, start=columns.start, first=shard * count,
                    count=count, scaling=Scaling(), entropy=True,
                )  # fmt: skip
                run(linear_logp.Folds(Products()), problem, given, states[shard], execution)
            out = np.full(expected.shape, 7, np.float32)
            merge = merge_problem(
                view(states), view(target), view(out), vocabulary=vocabulary, ignore_index=-100, entropy=True
            )
            assert same(run(linear_logp.Merges(), merge, (states, target), out, execution), expected), (
                vocabulary,
                shards,
            )


@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("units", [2, 3, 4])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_states_of_tiles_are_merged(
    units: int, rows: int, entropy: bool, libraries: dict[tuple[int, ...], ctypes.CDLL]
) -> None:
    """What Hopper's tiles leave of 2, 3 and 4 units: one state, of three that of a pair and that of the other unit."""
    m, lines, nodes_of_tile = 11, 3 if entropy else 2, 2 if units == 3 else 1
    for vocabulary in (5, 520, 4100, 12_300, 22_000):
        y = operands.generate("normal", F32, (m, vocabulary), vocabulary)
        y[3] = np.float32(np.nan)
        edges = part_edges(vocabulary)
        length = PARTS * -(-vocabulary // 64)
        part_nodes = nodes_of_tile * -(-length // (64 * units))
        nodes = np.full((PARTS * part_nodes, lines, m), np.nan, np.float32)
        parts = []
        for part, (low, high) in enumerate(itertools.pairwise(edges)):
            parts.append(part_state(y[:, low:high], entropy))
            for place, first in enumerate(range(low, high, 64 * units)):
                odd = units == 3 and place % 2
                cuts = [0, 64 * units] if units != 3 else [0, 64, 192] if odd else [0, 128, 192]
                for node, (begin, end) in enumerate(itertools.pairwise(cuts)):
                    if first + begin < high:
                        state = part_state(y[:, first + begin : min(first + end, high)], entropy)
                        nodes[part * part_nodes + nodes_of_tile * place + node] = state[:lines]
        out = np.full((4, m), np.nan, np.float32)
        given = [np.zeros((m, 1), F32.numpy), np.zeros((vocabulary, 1), F32.numpy), np.zeros((m, 1), I64.numpy)]
        views = [view(x) for x in given]
        problem = fold_problem(
            FMA, *views, None, view(out), vocabulary=vocabulary, start=0, first=0, count=PARTS, scaling=Scaling(),
            entropy=entropy,
        )  # fmt: skip
        params = linear_logp_launch.packed(
            problem, views[2], (0, m), nodes=nodes.ctypes.data, state=(out.ctypes.data, problem.out),
            columns=vocabulary, part_nodes=part_nodes,
        )  # fmt: skip
        libraries[linear_logp_launch.MERGES, units, rows].emulation_launch(params, -(-m // rows), 1)
        expected = np.stack(tree(parts))
        if not entropy:
            expected[2] = 0
        assert same(out[:3], canonical(expected + np.float32(0))), vocabulary


def test_scratch_memory_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_logp_wgmma, "takes", lambda problem: False)
    for m, vocabulary in (
        (1, 128_256),
        (64, 151_936),
        (4096, 128_256),
        (8192, 151_936),
        (16_384, 262_144),
        (100_000, 32_000),
    ):
        hidden, weight = (
            TensorView(4096, (m, 64), (64, 1), BF16, DEVICE),
            TensorView(4096, (vocabulary, 64), (64, 1), BF16, DEVICE),
        )
        target, out = TensorView(4096, (m,), (1,), I64, DEVICE), TensorView(4096, (4, m), (m, 1), F32, DEVICE)
        problem = fold_problem(
            MMA16, hidden, weight, target, None, out,
            vocabulary=vocabulary, start=0, first=0, count=PARTS, scaling=Scaling(), entropy=True,
        )  # fmt: skip
        assert 0 < linear_logp.Folds(Products()).explain(problem).scratch_bytes <= linear_logp.SCRATCH_BYTES
        rows = next(linear_logp.row_pieces(m, PARTS * 63))[1]
        every = list(linear_logp.blocks(problem, rows))
        assert sum(block.columns for block in every) == vocabulary
        assert all(block.groups <= 65535 for block in every)
