"""The CUDA kernels against the CPU replay, bit for bit: contract × type × layout × odd sizes × epilogue, and many
elements."""

from __future__ import annotations

import itertools

import cu_device
import numpy as np
import pytest
from cu_device import DEVICE, MODES, PAIR_IDS, PAIRS, Placed, differing, output, replay, run, vector

import detkern
from detkern.cu.device import describe
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import MMA8, Contract
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

pytestmark = pytest.mark.gpu

SIZES = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 100, 257, 4100)
WIDEST = 257  # M and N of the operands whose corners the smaller problems are
DEEPEST = 4100


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cu_device.compile_all()


# What the epilogue does: the output type (None: the operands'), a bias of this type, a starting accumulator.
EPILOGUES: tuple[tuple[DType | None, DType | None, bool], ...] = (
    (None, None, False),
    (F32, None, True),
    (F32, F32, False),
    (BF16, F16, False),
    (F16, BF16, False),
    (F32, None, False),
)


def _corners(count: int, shift: int) -> list[tuple[int, int]]:
    """Pairs (M, N) of SIZES up to WIDEST; over the shifts, each size meets each."""
    sizes = [size for size in SIZES if size <= WIDEST]
    return [(size, sizes[(i * 7 + shift) % len(sizes)]) for i, size in enumerate(sizes)][:count]


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_odd_sizes_in_every_layout(contract: Contract, dtype: DType, k: int) -> None:
    """Every pair of modes of A and B (all nine pairs of load paths among them), every mode of the output, every
    epilogue and every kind of operands come round for each K; M and N run over the corners."""
    shift = SIZES.index(k)
    modes = itertools.cycle(itertools.product(MODES, MODES))
    out_modes = itertools.cycle(MODES)
    for turn, (out_dtype, bias_dtype, accumulate) in enumerate(EPILOGUES):
        kind = operands.KINDS[(turn + shift) % len(operands.KINDS)]
        a = operands.generate(kind, dtype, (WIDEST, k), 2 * shift)
        b = operands.generate(kind, dtype, (k, WIDEST), 2 * shift + 1)
        bias = None if bias_dtype is None else operands.generate(kind, bias_dtype, (WIDEST,), 3)
        initial = operands.generate(kind, F32, (WIDEST, WIDEST), 4) if accumulate else None
        expected = replay(contract, a, b, out_dtype=out_dtype, bias=bias, initial=initial)
        for m, n in [*_corners(9, shift + 5 * turn), (WIDEST, WIDEST)]:
            a_mode, b_mode = next(modes)
            out_mode = next(out_modes)
            placed_a, placed_b = Placed(a[:m], a_mode), Placed(b[:, :n], b_mode)
            out = output((m, n), out_dtype or dtype, out_mode, None if initial is None else initial[:m, :n])
            launched = run(
                contract, placed_a.view, placed_b.view, out.view,
                bias=None if bias is None else vector(bias[:n]), accumulate=accumulate,
            )  # fmt: skip
            wrong = differing(expected[:m, :n], out.bits())
            assert wrong == 0, f"{wrong} of {m * n}: {kind} {m}x{n}x{k} {a_mode} {b_mode} {out_mode} {launched}"


@pytest.mark.parametrize("kind", operands.KINDS)
@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_every_kind_of_operands(contract: Contract, dtype: DType, kind: str) -> None:
    """Each kind from +0 and from a starting accumulator of its kind, at a K with a ragged end and at K = 4100."""
    for m, n, k in ((130, 257, 143), (70, 64, DEEPEST)):
        a = operands.generate(kind, dtype, (m, k), 11)
        b = operands.generate(kind, dtype, (k, n), 12)
        for initial in (None, operands.generate(kind, F32, (m, n), 13)):
            expected = replay(contract, a, b, out_dtype=F32, initial=initial)
            out = output((m, n), F32, "rows", initial)
            run(contract, Placed(a, "rows").view, Placed(b, "columns").view, out.view, accumulate=initial is not None)
            assert differing(expected, out.bits()) == 0


# Together more than 10^8 elements; the sizes are not multiples of a tile.
_VOLUMES = [(4099, 4001, 40), (517, 1031, 2050), (77, 143, 14336)]


@pytest.mark.parametrize(("m", "n", "k"), _VOLUMES, ids=lambda size: str(size))
@pytest.mark.parametrize(("contract", "dtype"), PAIRS, ids=PAIR_IDS)
def test_many_elements(contract: Contract, dtype: DType, m: int, n: int, k: int) -> None:
    kind = "normal" if k > 40 else ("wide", "cancel", "special", "bits")[PAIRS.index((contract, dtype)) % 4]
    a = operands.generate(kind, dtype, (m, k), 21)
    b = operands.generate(kind, dtype, (k, n), 22)
    expected = replay(contract, a, b)
    out = output((m, n), dtype, "rows")
    run(contract, Placed(a, "rows").view, Placed(b, "rows").view, out.view)
    assert differing(expected, out.bits()) == 0


def test_many_elements_are_many() -> None:
    assert len(PAIRS) * sum(m * n for m, n, _ in _VOLUMES) > 10**8


def test_mma8_is_refused_where_the_tensor_core_has_another_step() -> None:
    import cupy

    if describe(DEVICE.index).capability < (9, 0):
        pytest.skip("gpu: a device of compute capability 9.0 or newer is needed to refuse mma8")
    a = cupy.zeros((16, 16), np.float16)
    with pytest.raises(detkern.ContractUnsupported, match=r"mma8 needs compute capability 8\.0 to 8\.9 .* it has fma"):
        detkern.gemm(a, a, contract="mma8")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda dtype: dtype.short)
def test_mma8_indexes_right(dtype: DType) -> None:
    """The kernel of mma8 is launched past the refusal on small whole numbers, whose sums are exact in any order."""
    m, n = 131, 75
    modes = itertools.product(MODES[:3], MODES[:3])
    for turn, (a_mode, b_mode) in enumerate(modes):
        k = (1, 8, 9, 31, 40, 64, 100, 257, 300)[turn]
        a = operands.generate("integers", dtype, (m, k), 31)
        b = operands.generate("integers", dtype, (k, n), 32)
        initial = operands.generate("integers", F32, (m, n), 33) if turn % 2 else None
        exact = a.astype(np.int64) @ b.astype(np.int64) + (0 if initial is None else initial.astype(np.int64))
        out = output((m, n), F32, MODES[turn % len(MODES)], initial)
        run(MMA8, Placed(a, a_mode).view, Placed(b, b_mode).view, out.view, accumulate=initial is not None)
        assert differing(exact.astype(np.float32).view(np.uint32), out.bits()) == 0
