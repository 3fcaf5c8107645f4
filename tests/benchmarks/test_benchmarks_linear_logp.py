"""benchmarks.linear_logp: what its peers compute, and how a row is judged."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import linear_logp


def test_the_peers_compute_the_same() -> None:
    given = linear_logp.operands((5, 300, 16), 1, "cpu")
    found = {}
    for name, function in linear_logp.peers("both", ("compiled",)).items():
        result = linear_logp.bound(function, given, False)()
        found[name] = [result, *linear_logp.bound(function, given, True)()]
    assert {"detkern", "torch"} <= set(found)
    for ours, theirs in zip(found["detkern"], found["torch"], strict=True):
        assert torch.allclose(ours.float(), theirs.float(), rtol=0.03, atol=0.03)
    assert "compiled" in linear_logp.peers("forward")
    assert list(linear_logp.peers("entropy")) == ["detkern"]
    (logits,) = (linear_logp.bound(one, given, False)() for one in linear_logp.peers("matmul").values())
    assert logits.shape == (5, 300)


def row(what: str, shape: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    return {"what": what, "rows": shape[0], "vocabulary": shape[1], "width": shape[2], **more}


@pytest.mark.parametrize(
    ("made", "met"),
    [
        (row("forward", (4096, 128_256, 4096), of_matmul=0.99, detkern_mb=60), True),
        (row("forward", (4096, 128_256, 4096), of_matmul=1.01, detkern_mb=60), False),
        (row("forward", (4096, 128_256, 4096), of_matmul=0.99, detkern_mb=65), False),
        (row("entropy", (8192, 151_936, 2048), of_matmul=1.01, detkern_mb=60), True),
        (row("both", (8192, 151_936, 2048), detkern_us=28_000, detkern_mb=900), True),
        (row("both", (8192, 151_936, 2048), detkern_us=28_400, detkern_mb=900), False),
        (row("both", (8192, 151_936, 2048), detkern_us=28_000, detkern_mb=1100), False),
        (row("forward", (8, 128_256, 4096), detkern_us=258, of_torch=0.89), True),
        (row("forward", (8, 128_256, 4096), detkern_us=260, of_torch=0.89), False),
        (row("forward", (8, 151_936, 2048), detkern_us=150, of_torch=0.91), False),
        (row("forward", (8, 151_936, 2048), model="qwen", detkern_us=500, of_torch=0.99), True),
        (row("both", (8, 151_936, 2048), model="qwen", of_torch=1.21), False),
    ],
)
def test_a_row_is_judged(made: dict[str, Any], met: bool) -> None:
    assert linear_logp.judge(made)["met"] is met


def test_drawn_rows_are_judged_by_their_mean_and_the_worst() -> None:
    rows = [{"what": "forward", "model": "m", "of_torch": ratio} for ratio in (0.5, 0.98)]
    (found,) = linear_logp.summary([*rows, {"what": "forward", "of_torch": 9.0}])
    assert found == {
        "what": "forward", "shapes": 2, "mean_of_torch": 0.7, "worst_of_torch": 0.98, "target": 0.75, "met": True,
    }  # fmt: skip
    rows.append({"what": "forward", "model": "m", "of_torch": 1.01})
    assert not linear_logp.summary(rows)[0]["met"]


def test_the_sources_are_the_kernels_and_what_divides_their_work() -> None:
    names = {path.name for path in linear_logp.sources()}
    assert {"linear_logp.cu", "linear_logp_wgmma.cu", "logit_tile.cuh", "logp_state.cuh", "mma_wgmma.cu"} <= names
    assert {"linear_logp.py", "linear_logp_launch.py", "linear_logp_wgmma.py"} <= names
