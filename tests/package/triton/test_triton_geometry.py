"""Which tile and load paths the Triton backend takes, and what a launch is given: on problems without memory."""

from __future__ import annotations

import pytest

from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView
from detkern.triton.geometry import Load, choose, load_paths, tiles_for
from detkern.vocabulary.contracts import CONTRACTS
from detkern.vocabulary.dtypes import BF16, F32, DType

CUDA = Device("cuda")


def problem(
    m: int, n: int, k: int, *, a: str = "rows", b: str = "columns", contract: str = "mma16", dtype: DType = BF16,
    address: int = 1 << 20, pad: int = 0,
) -> GemmProblem:  # fmt: skip
    def view(rows: int, columns: int, mode: str, at: int) -> TensorView:
        strides = {"rows": (columns + pad, 1), "columns": (1, rows + pad), "spread": (2 * columns, 2)}[mode]
        return TensorView(at, (rows, columns), strides, dtype, CUDA)

    out = view(m, n, "rows", 1 << 20)
    return gemm_problem(CONTRACTS[contract], view(m, k, a, address), view(k, n, b, 1 << 20), out, None, False)


@pytest.mark.parametrize(("changes", "paths"), [
    ({}, (Load.K_MAJOR, Load.K_MAJOR)),
    ({"b": "rows"}, (Load.K_MAJOR, Load.MN_MAJOR)),
    ({"a": "columns", "b": "rows"}, (Load.MN_MAJOR, Load.MN_MAJOR)),
    ({"a": "spread"}, (Load.STRIDED, Load.STRIDED)),
    ({"b": "spread"}, (Load.STRIDED, Load.STRIDED)),
    ({"address": (1 << 20) + 2}, (Load.STRIDED, Load.STRIDED)),
    ({"pad": 1}, (Load.STRIDED, Load.STRIDED)),
    ({"pad": 8}, (Load.K_MAJOR, Load.K_MAJOR)),
    ({"k": 65}, (Load.STRIDED, Load.STRIDED)),
    ({"k": 4104}, (Load.K_MAJOR, Load.K_MAJOR)),
    ({"n": 100, "b": "rows"}, (Load.STRIDED, Load.STRIDED)),
    ({"n": 100}, (Load.K_MAJOR, Load.K_MAJOR)),
    ({"dtype": F32, "contract": "fma", "pad": 4}, (Load.STRIDED, Load.STRIDED)),
])  # fmt: skip
def test_load_paths(changes: dict[str, object], paths: tuple[Load, Load]) -> None:
    sizes = {name: changes.pop(name, 128) for name in ("m", "n", "k")}
    assert load_paths(problem(*sizes.values(), **changes)) == paths  # type: ignore[arg-type]


def test_the_tile_follows_the_size_and_nothing_else() -> None:
    large, middle, small = tiles_for(problem(1, 1, 8))
    assert choose(problem(4096, 4096, 64), 132).tile == large
    assert choose(problem(2048, 2048, 64), 132).tile == middle
    assert choose(problem(8, 4096, 64), 132).tile == small
    assert choose(problem(4096, 4096, 64, a="spread"), 132).tile == small
    assert choose(problem(4096, 4096, 64), 132, small).tile == small


def test_what_a_launch_takes() -> None:
    found = choose(problem(130, 264, 64), 132)
    assert found.tiles == found.programs == 3 * 5
    assert found.scratch_bytes == 0
    assert found.rows_out
    assert not choose(problem(130, 263, 64), 132).rows_out
    for k, levels in ((0, 1), (1, 1), (32, 1), (33, 1), (65, 2), (96, 2), (97, 2), (129, 3), (4096, 7), (14336, 9)):
        tree = choose(problem(4096, 4096, k, contract="tree"), 132)
        assert tree.levels == levels, k
        assert tree.programs == 4 * 132
        assert tree.scratch_bytes == 4 * 132 * levels * 64 * 64 * 2
