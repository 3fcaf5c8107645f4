"""The drawn benchmark without a GPU: its rows, its records and seeds, the bits, its targets."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_products import small_drawn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timed_host import Host, peers_taking

from benchmarks import drawn_bits, drawn_record, drawn_report, drawn_run, gemm, tile_times
from benchmarks.forced import problem_of_sizes
from detkern.measure import drawn, peers, records
from detkern.measure.drawn import Drawn, draw
from detkern.measure.pool import Pool, sets
from detkern.measure.shapes import Layer, Product

FACTS = types.SimpleNamespace(name="NVIDIA H200", driver="580.1", capability=(9, 0), multiprocessors=132)


def _row(index: int, part: str, m: int, ratio: float, **more: Any) -> dict[str, Any]:
    op = {"near": "forward", "db_f32": "db"}.get(part, part)
    return {
        "index": index, "part": part, "name": "model.layer", "layer": "o", "op": op, "m": m, "n": 4096, "k": 4096,
        "type": "bfloat16", "contract": "mma16", "output": "bfloat16", "accumulate": False, "cublas_us": 100.0,
        "detkern_us": 100.0 * ratio, "ratio": ratio, **more,
    }  # fmt: skip


@pytest.mark.parametrize("index", range(16))
def test_problems_from_sizes_are_those_of_the_operands(index: int) -> None:
    """What is chosen and fitted without tensors is what runs with them."""
    from benchmarks import forced
    from detkern.operations.gemm.problem import gemm_problem

    one = small_drawn(1, index)
    each = Pool([one], 4096, "cpu").sets(one)[1]
    views = forced._views(one.product, each.a, each.b, each.out)
    made = problem_of_sizes(one.product, one.output_f32, one.accumulate)
    problem = gemm_problem(forced.contract_of(one.product), *views, None, one.accumulate)
    # The operands of these tests lie wherever the CPU's allocator put them.
    aligned = {name: dataclasses.replace(getattr(problem, name), alignment=16) for name in ("a", "b", "out")}
    assert dataclasses.replace(problem, **aligned) == made


@pytest.mark.parametrize("index", [0, 5, 6, 7, 15])
def test_a_row_has_times_and_is_right(index: int) -> None:
    """Index 7: into float32; 15: accumulated there."""
    one = small_drawn(1, index)
    pool = Pool([one], 4096, "cpu")
    host = Host()
    (cublas,) = peers_taking(host, cublas=1000.0)
    slower = peers.Peer("triton", peers_taking(host, cublas=2000.0)[0].bind)
    compared = [cublas, peers.Peer("detkern", _detkern(host, 800.0)), slower]
    row = drawn_run.measure(host, one, pool, compared, FACTS, with_regret=False)
    assert (row["cublas_us"], row["triton_us"], row["ratio"], row["triton_ratio"]) == (1000.0, 2000.0, 0.8, 0.4)
    assert row["output"] == ("float32" if one.output_f32 else "bfloat16")
    assert row["accumulate"] == (index == 15)
    assert row["sets"] == sets(one, 4096)


def _detkern(host: Host, us: float) -> Callable[..., Any]:
    def bind(product: Product, a: Any, b: Any, out: Any, **more: Any) -> Callable[[], Any]:
        return host.taking(us, peers.detkern_call(product, a, b, out, **more))

    return bind


def test_what_is_accumulated_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """detkern is given the float32 result and told to add; cuBLAS the 16-bit one in the same memory."""
    one = small_drawn(1, 15)
    each = Pool([one], 4096, "cpu").sets(one)[0]
    (ours,) = drawn_run._calls(Host(), peers._PEERS["detkern"], one, [each])
    each.out.fill_(1.0)
    ours()
    once = each.out.clone()
    ours()
    left, right = each.a.double(), each.b.double()
    exact = left.T @ right
    assert (once - 1 - exact).abs().max() < 1e-3
    assert (each.out - 1 - 2 * exact).abs().max() < 1e-3
    (theirs,) = drawn_run._calls(Host(), peers._PEERS["cublas"], one, [each])
    theirs()
    assert (each.peer_out.double() - exact).norm() < 0.01 * exact.norm()


def test_a_wrong_result_has_no_time() -> None:
    one = small_drawn(1, 0)
    pool = Pool([one], 4096, "cpu")
    host = Host()
    (cublas,) = peers_taking(host, cublas=1000.0)

    def wrong(product: Product, a: Any, b: Any, out: Any) -> Callable[[], Any]:
        return host.taking(900.0, lambda: out.copy_(torch.matmul(a, b.t()) * 1.05))

    def nothing(product: Product, a: Any, b: Any, out: Any) -> Callable[[], Any]:
        return host.taking(900.0, lambda: None)

    for bind, message in ((wrong, "0 elements not written, 0.0"), (nothing, f"{one.m * 24} elements not written")):
        row = drawn_run.measure(host, one, pool, [cublas, peers.Peer("detkern", bind)], FACTS, with_regret=False)
        assert row["error"].startswith(f"detkern: {message}")
        assert "ratio" not in row
        others = [cublas, peers.Peer("detkern", _detkern(host, 800.0)), peers.Peer("triton", bind)]
        row = drawn_run.measure(host, one, pool, others, FACTS, with_regret=False)
        assert row["refused"]["triton"].startswith(message)
        assert "triton_us" not in row
        assert row["ratio"] == 0.8


def _forced(host: Host, us: Callable[[Any], float], timed: list[str]) -> Callable[..., Any]:
    def forced_calls(problem: Any, tile: Any, views: Any) -> list[Callable[[], Any]]:
        timed.append(str(tile))
        return [host.taking(us(tile), lambda: None) for _ in views]

    return forced_calls


def test_the_regret_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(
        draw(1, 0), product=Product(Layer("a", "b", 4096, 4096), 100, "forward", "mma16", "bfloat16")
    )
    problem = problem_of_sizes(one.product)
    chosen, considered, count = tile_times.considered(problem, (9, 0), 132)
    assert chosen in considered
    assert tile_times.FEWEST <= len(considered) < count
    best = str(next(tile for tile in considered if tile != chosen))
    timed: list[str] = []
    host = Host()
    us = {str(chosen): 12.0, best: 10.0}
    monkeypatch.setattr(tile_times, "forced_calls", _forced(host, lambda tile: us.get(str(tile), 40.0), timed))
    pool = Pool([one], 4096, "cpu").sets(one)
    times, captured = tile_times.measure(host, one, pool, (9, 0), 132)
    assert timed == [str(tile) for tile in considered]
    assert times.rough[best] == 10.0
    # Not close to the fastest, so only timed roughly; the choice is timed again whatever it takes.
    assert times.us == {best: 10.0, str(chosen): 12.0}
    assert (times.chosen, times.considered) == (str(chosen), count)
    found, by = tile_times.regret(host, times, captured)
    assert (found, by) == (pytest.approx(1.2), best)
    # However many are faster, the choice is compared with the best.
    faster = [str(tile) for tile in considered if tile != chosen][:4]
    us = {label: 10.0 + place / 10 for place, label in enumerate(faster)} | {str(chosen): 11.0}
    times, captured = tile_times.measure(host, one, pool, (9, 0), 132)
    assert tile_times.regret(host, times, captured) == (pytest.approx(1.1), faster[0])
    us = {str(chosen): 10.0}
    times, captured = tile_times.measure(host, one, pool, (9, 0), 132)
    assert tile_times.regret(host, times, captured) == (1.0, str(chosen))


def _arguments(folder: Path, **options: Any) -> argparse.Namespace:
    defaults = {
        "output": folder, "drawn": "new", "again": False, "count": 24, "regret": 0, "peers": [], "seconds": 1000.0,
        "missing": False, "compare": None,
    }  # fmt: skip
    return argparse.Namespace(**(defaults | options))


def test_a_record_keeps_its_seed_until_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits on the CPU that are interrupted, continued, begun again, and made void by another kernel."""
    kernel = tmp_path / "kernel.cu"
    kernel.write_text("one")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(drawn_record, "sources", lambda: [kernel])
    monkeypatch.setattr(drawn_record, "draw", small_drawn)
    monkeypatch.setattr(drawn_record, "SAVE_EVERY", 4)
    seeds = iter(range(1, 100))
    monkeypatch.setattr(drawn_record.secrets, "randbelow", lambda limit: next(seeds))
    host = Host()
    ours = [peers_taking(host, cublas=1000.0)[0], peers.Peer("detkern", _detkern(host, 800.0))]
    monkeypatch.setattr(peers, "here", lambda names: (ours, {}))
    measured: list[int] = []
    measure, stop = drawn_run.measure, [10]

    def counting(device: Any, one: Drawn, *rest: Any) -> dict[str, Any]:
        if len(measured) >= stop[0]:
            raise KeyboardInterrupt
        measured.append(one.index)
        return measure(device, one, *rest)

    monkeypatch.setattr(drawn_run, "measure", counting)
    record = tmp_path / "gemm-drawn.json"

    def run(**options: Any) -> dict[str, Any]:
        measured.clear()
        drawn_run.run(_arguments(tmp_path, **options), host, FACTS, {"cuda of torch": "13.0"})
        found: dict[str, Any] = json.loads(record.read_text())
        return found

    first = drawn.FITTING_SEEDS[-1] + 1
    with pytest.raises(KeyboardInterrupt):
        run()
    made = json.loads(record.read_text())
    assert (made["seed"], made["count"], len(made["rows"])) == (first, 24, 10)
    assert made["done"] == {"products": 10, "detkern": 10, "cublas": 10}
    stop[0] = 100
    assert len(run(seconds=0.0, missing=True)["rows"]) == 10
    made = run(missing=True)
    assert (made["seed"], measured) == (first, list(range(10, 24)))
    assert [row["index"] for row in made["rows"]] == list(range(24))
    assert all(row["ratio"] == 0.8 and row["tile"] and row["date"] for row in made["rows"])
    assert run(missing=True)["seed"] == first
    assert measured == []
    # A row that went wrong is one that is missing, and so is one whose tiles were to be timed.
    made["rows"][5] = {"index": 5, "part": "da", "name": "x", "m": 1, "error": "wrong"}
    record.write_text(json.dumps(made))
    run(missing=True)
    assert measured == [5]
    # Complete and measured again: another set. More products than there are: the same set, and what it has not yet.
    made = run(count=25, missing=True)
    assert (made["seed"], made["count"], measured) == (first, 25, [24])
    made = run()
    assert (made["seed"], len(made["rows"]), measured) == (first + 1, 24, list(range(24)))
    # Other kernels: nothing of it stays.
    kernel.write_text("two")
    made = run(missing=True, count=8)
    assert (made["seed"], measured) == (first + 2, list(range(8)))


def test_which_seed_a_visit_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(1, 100))
    monkeypatch.setattr(drawn_record.secrets, "randbelow", lambda limit: next(seeds))
    plan, row = drawn_record.plan, functools.partial(_row, part="forward", m=1, ratio=1.0)
    made = {"seed": 77, "count": 3}
    some, whole = [row(0), row(2)], [row(0), row(1), row(2)]
    assert plan(None, []).seed == drawn.FITTING_SEEDS[-1] + 1
    assert len(plan(None, []).left) == drawn_record.COUNT == 4000
    assert plan(None, [], 50, 5).left == [0, 1, 2, 3, 4]
    for seed in drawn.FITTING_SEEDS:
        with pytest.raises(ValueError, match="fitted on"):
            plan(None, [], seed)
    found = plan(made, some, missing=True)
    assert (found.seed, found.left, set(found.rows)) == (77, [1], {0, 2})
    found = plan(made, some)
    assert (found.seed, found.left) == (77, [0, 1, 2])
    with pytest.raises(ValueError, match="seed 77 and not complete"):
        plan(made, some, 78)
    found = plan(made, whole, missing=True)
    assert (found.seed, found.left) == (77, [])
    found = plan(made, whole, missing=True, whole=lambda row: row["index"] > 1)
    assert (found.seed, found.left) == (77, [0, 1])
    found = plan(made, whole)
    assert (found.seed != 77, found.rows) == (True, {})
    assert plan(made, whole, 78).seed == 78
    assert plan(made, [], 78, missing=True).seed == 78  # the rows are of other kernels
    found = plan(made, whole, count=5, missing=True)
    assert (found.seed, found.left) == (77, [3, 4])


def test_which_rows_have_all_that_they_should_have() -> None:
    row = _row(5, "forward", 1, 1.0, cublaslt_us=3.0, refused={"vllm_triton": "no"})
    assert drawn_run._whole(row, 5, ["cublas", "detkern", "cublaslt", "vllm_triton"], None)
    assert not drawn_run._whole(row, 5, ["cublas", "detkern", "cublas_no_split"], None)
    assert not drawn_run._whole(row, 6, ["cublas", "detkern"], None)
    assert drawn_run._whole(row | {"regret": 1.0}, 6, ["cublas", "detkern"], None)
    all_peers = ["cublas", "detkern", "cublaslt", "cublas_no_split"]
    assert drawn_run._whole(row, 5, all_peers, 5)
    assert not drawn_run._whole(row, 5, all_peers, 6)


def test_a_device_that_fails_ends_the_visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_record, "draw", small_drawn)
    visit = drawn_record.Visit(_arguments(tmp_path, drawn="9", count=8), "gemm-drawn", FACTS, {}, {})

    def failing(one: Drawn, pool: Pool) -> dict[str, Any]:
        if one.index in (1, 3, 4, 5):
            raise RuntimeError("an illegal address\nand more")
        return _row(one.index, "forward", 1, 1.0)

    with pytest.raises(RuntimeError, match="illegal"):
        visit.run(Host(), failing, lambda row: None, 4096)
    rows = json.loads(visit.path.read_text())["rows"]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row.get("error") for row in rows[:2]] == [None, "RuntimeError: an illegal address"]
    assert visit.left == [5, 6, 7]


def _general(drawn: Drawn, one: Any, out: Any) -> str:
    """In place of the general kernel: the CPU's."""
    peers.detkern_call(drawn.product, one.a, one.b, out, accumulate=drawn.accumulate)()
    return "general"


@pytest.mark.parametrize("index", [0, 5, 6, 7, 15])
def test_bits_that_differ_are_counted(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one = small_drawn(1, index)
    pool = Pool([one], 1, "cpu")
    row = drawn_bits.compare(one, pool, _general)
    assert (row["differing_from_general"], row["differing_from_replay"], row["general"]) == (0, 0, "general")
    assert row["elements"] == row["replayed"] == math.prod(one.product.matrix("out"))
    assert not drawn_bits.differs(row)

    def wrong(drawn: Drawn, one: Any, out: Any) -> str:
        tile = _general(drawn, one, out)
        drawn_bits._bits(out)[0, -1] ^= 1
        return tile

    row = drawn_bits.compare(one, pool, wrong)
    assert (row["differing_from_general"], row["differing_from_replay"]) == (1, 0)
    assert drawn_bits.differs(row)
    # A kernel that leaves an element out: neither pattern is the other's, nor the replay's.
    monkeypatch.setattr(drawn_bits.peers, "detkern_call", lambda *arguments, **more: lambda: None)
    row = drawn_bits.compare(one, pool, lambda drawn, one, out: "nothing")
    assert row["differing_from_general"] == (0 if one.accumulate else row["elements"])
    assert row["differing_from_replay"] == row["elements"]


def test_the_replayed_part_has_the_last_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dataclasses.replace(
        draw(1, 0), product=Product(Layer("a", "b", 600, 16), 100, "forward", "mma16", "bfloat16")
    )
    places = drawn_bits._places(100, 64, 32, 1)
    assert len(places) == len(set(places.tolist())) == 64
    assert places.tolist() == sorted(places.tolist())
    assert places[-32:].tolist() == list(range(68, 100))
    assert drawn_bits._places(64, 64, 32, 1).tolist() == list(range(64))
    row = drawn_bits.compare(one, Pool([one], 1, "cpu"), _general)
    assert (row["replayed"], row["elements"]) == (64 * 512, 100 * 600)
    call = peers.detkern_call

    def last_wrong(*arguments: Any, **more: Any) -> Callable[[], Any]:
        def run() -> None:
            call(*arguments, **more)()
            arguments[3].view(torch.int16)[99, 599] ^= 1

        return run

    monkeypatch.setattr(drawn_bits.peers, "detkern_call", last_wrong)
    row = drawn_bits.compare(one, Pool([one], 1, "cpu"), _general)
    assert row["differing_from_replay"] == 1


def test_a_run_over_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(drawn_record, "draw", small_drawn)
    monkeypatch.setattr(drawn_bits.compare, "__defaults__", (_general,))
    arguments = _arguments(tmp_path, drawn="9", count=8)
    assert drawn_bits.run(arguments, Host(), FACTS, {}) == 0
    assert "8 products compared, 0 products differ, 0 are left" in capsys.readouterr().out
    made = json.loads((tmp_path / "gemm-drawn-bits.json").read_text())
    assert (made["seed"], len(made["rows"])) == (9, 8)
    made["rows"][3]["differing_from_replay"] = 1
    (tmp_path / "gemm-drawn-bits.json").write_text(json.dumps(made))
    assert drawn_bits.run(_arguments(tmp_path, count=8, missing=True), Host(), FACTS, {}) == 1
    assert drawn_bits.run(_arguments(tmp_path, drawn="1", count=8), Host(), FACTS, {}) == 1


def test_figures_of_ratios() -> None:
    of = drawn_report.figures([1.0] * 89 + [1.1] * 10 + [2.0])
    assert of is not None
    assert (of.count, of.p90, of.p99, of.worst) == (100, 1.1, 1.1, 2.0)
    assert of.mean == pytest.approx(math.exp((10 * math.log(1.1) + math.log(2)) / 100))
    one = drawn_report.figures([0.5])
    assert one is not None
    assert (one.mean, one.p90, one.p99, one.worst) == (0.5, 0.5, 0.5, 0.5)
    assert drawn_report.figures([]) is None


def test_a_chain_takes_what_was_measured() -> None:
    """docs/hopper.md: K = 7168 takes 4.2 µs."""
    assert drawn_report.chain_us(7168) == pytest.approx(4.2, abs=0.02)
    assert drawn_report.chain_us(17) == 2 * drawn_report.chain_us(16)


def test_long_chains_are_apart() -> None:
    chain = drawn_report.chain_us(4096)
    short, long = _row(0, "forward", 1, 0.7), _row(1, "forward", 1, 9.0)
    short["cublas_us"], long["cublas_us"] = chain / 0.79, chain / 0.81
    long["detkern_us"] = 2 * (chain + 2.0)
    assert [drawn_report.is_long(row) for row in (short, long)] == [False, True]
    (worst,) = [one for one in drawn_report.targets([short, long]) if one.what == "forward, M 1–64, over cuBLAS: worst"]
    assert worst.value == 0.7
    record = {"gpu": "g", "driver": "1", "versions": {}, "command": "c", "seed": 1, "count": 2, "rows": [short, long]}
    text = drawn_report.markdown(record)
    assert "| chain | 1 | 2.000 | 2.000 | 2.000 | 2.000 |" in text
    # Of a gradient it is N or M that is summed over.
    for part, m, n, expected in (
        ("da", 16, 65536, True),
        ("db", 65536, 16, True),
        ("da", 65536, 16, False),
        ("db", 16, 65536, False),
    ):
        row = _row(0, part, m, 1.0, n=n, k=8)
        row["cublas_us"] = drawn_report.chain_us(65536)
        assert drawn_report.is_long(row) == expected


def test_targets_are_those_of_the_ranges() -> None:
    rows = [
        *(_row(index, "forward", m, ratio) for index, (m, ratio) in enumerate(
            [(1, 0.7), (64, 0.7), (65, 0.9), (256, 0.9), (257, 0.9), (1023, 1.2), (1024, 0.9), (16384, 1.0)])),
        _row(8, "near", 120, 1.26), _row(9, "da", 128, 1.0), _row(10, "db", 1024, 1.2),
        _row(11, "db_f32", 200, 1.0), _row(12, "db_f32", 200, 1.2, accumulate=True),
        _row(13, "da", 2000, 0.9, regret=1.0), _row(14, "da", 2000, 0.9, regret=1.1),
    ]  # fmt: skip
    found = {one.what: one for one in drawn_report.targets(rows)}
    assert not any("cuBLASLt" in what for what in found)

    def value(what: str) -> tuple[float | None, float, bool]:
        one = found[what]
        return (None if one.value is None else round(one.value, 3)), one.limit, one.met

    assert value("forward, M 1–64, over cuBLAS: mean") == (0.7, 0.74, True)
    assert value("forward, M 65–256, over cuBLAS: mean") == (0.9, 0.88, False)
    assert value("forward, M 257–1023, over cuBLAS: p99") == (1.2, 1.12, False)
    assert value("forward, M 257–1023, over cuBLAS: worst") == (1.2, 1.25, True)
    assert value("forward, M ≥ 1024, over cuBLAS: mean") == (0.949, 0.97, True)
    assert value("forward near multiples of 64, M 65–256, over cuBLAS: worst") == (1.26, 1.25, False)
    assert value("forward near multiples of 64, M 1–64, over cuBLAS: worst") == (None, 1.25, False)
    assert "forward near multiples of 64, M 65–256, over cuBLAS: mean" not in found
    assert value("dX, M 128–1023: mean") == (1.0, 1.02, True)
    assert value("dX, M ≥ 1024: mean") == (0.9, 1.0, True)
    assert value("dW, M ≥ 1024: p99") == (1.2, 1.15, False)
    assert value("dW into float32, new: mean") == (1.0, 1.1, True)
    assert value("dW into float32, accumulated: mean") == (1.2, 1.1, False)
    assert value("regret: p99") == (1.1, 1.08, False)
    rows[0]["cublaslt_ratio"] = 0.76
    over_best = {one.what: one for one in drawn_report.targets(rows)}["forward, M 1–64, over cuBLASLt's best: mean"]
    assert (over_best.value, over_best.limit, over_best.met) == (0.76, 0.77, True)


def test_a_report_of_a_record_that_is_not_complete_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gemm-drawn.json"
    record = {
        "gpu": "g", "driver": "1", "versions": {"torch": "2"}, "command": "c", "seed": 7, "count": 3,
        "rows": [
            _row(0, "forward", 1, 0.7, regret=1.5, tile="t", best_tile="u"),
            {"index": 1, "name": "a.b", "part": "da", "m": 9, "error": "detkern: wrong"},
        ],
    }  # fmt: skip
    path.write_text(json.dumps(record))
    assert drawn_report.report(path) == 1
    said = capsys.readouterr().out
    assert "WRONG: 1 a.b da M 9: detkern: wrong" in said
    assert "1 of 3 products are not measured" in said
    assert "products 1, cublas 1, detkern 1, regret 1" in said
    text = path.with_suffix(".md").read_text()
    assert "Seed 7, 1 of 3 products" in text
    assert "| o | 1 | 0.700 | 0.700 | 0.700 | 0.700 |" in text
    assert "| model.layer | forward | 1 | 4096 | 4096 | 1.500 | 70.00 | 100.00 | t | u |" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--drawn", "x"], "no seed"),
        (["--drawn", "-1"], ""),
        (["--again"], "--drawn"),
        (["--count", "3"], "--drawn"),
        (["--drawn", "--m", "1"], "its own shapes"),
        (["--drawn", "--shapes", "odd.*"], "its own shapes"),
        (["--drawn", "--type", "float16"], "its own shapes"),
        (["--drawn", "--what", "forward"], "its own shapes"),
        (["--drawn", "--peers", "mkl"], "mkl"),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gemm", *options])
    with pytest.raises(SystemExit):
        gemm._arguments()
    assert said in capsys.readouterr().err


def test_peers_of_a_drawn_run_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gemm", "--drawn"])
    assert (gemm._arguments().drawn, gemm._arguments().peers) == ("new", [])
    monkeypatch.setattr(sys, "argv", ["gemm", "--drawn", "12", "--again", "--missing", "--peers", "cublas_no_split"])
    found = gemm._arguments()
    assert (found.drawn, found.again, found.missing, found.peers) == ("12", True, True, ["cublas_no_split"])
    monkeypatch.setattr(sys, "argv", ["gemm"])
    assert gemm._arguments().peers == list(gemm.DEFAULT_PEERS)
