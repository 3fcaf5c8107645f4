"""The GEMM benchmark without a GPU: its rows, records, targets, tables and plots, and the bits that it compares."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_products import SHAPES, small_product

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from timed_host import Host, peers_taking

from benchmarks import gemm, gemm_bits, gemm_report
from detkern.measure import peers, records, shapes, timing
from detkern.measure.operands import Operands
from detkern.measure.shapes import Layer, Product, Shapes


def test_a_row_has_the_times_of_each_peer() -> None:
    host = Host()
    product = small_product()
    operands = Operands([product], {product: 2}, "cpu")
    row = gemm.measure(host, product, operands, peers_taking(host, cublas=10.0, detkern=8.0))
    assert (row["detkern_us"], row["cublas_us"], row["ratio"], row["turns"]) == (8.0, 10.0, 0.8, timing.TURNS)
    assert gemm.key(row) == product.key
    assert row["tflops"] == round(2 * 3 * 24 * 40 / 8.0 / 1e6, 2)
    assert row["gb_per_s"] == round(2 * (3 * 40 + 24 * 40 + 3 * 24) / 8.0 / 1e3, 1)
    assert row["kernel"]
    assert row["tile"]
    assert "refused" not in row


def test_the_ratio_is_of_times_in_the_same_turn() -> None:
    """The medians of drifting times may come from different turns."""
    figures = gemm._figures(small_product(), {"detkern": [1.0, 9.0, 4.0], "cublas": [2.0, 9.0, 2.0]})
    assert (figures["detkern_us"], figures["cublas_us"]) == (4.0, 2.0)
    assert (figures["ratio"], figures["ratio_low"], figures["ratio_high"]) == (1.0, 0.5, 2.0)


def test_a_wrong_result_has_no_time() -> None:
    host = Host()
    product = small_product()
    operands = Operands([product], {product: 2}, "cpu")

    def wrong(product: Product, a: Any, b: Any, out: Any) -> Callable[[], Any]:
        return host.taking(1.0, lambda: out.copy_(torch.matmul(a, b.t()) * 1.1))

    def partial(product: Product, a: Any, b: Any, out: Any) -> Callable[[], Any]:
        return host.taking(1.0, lambda: torch.matmul(a[:2], b.t(), out=out[:2]))

    def unserved(product: Product, a: Any, b: Any, out: Any) -> Callable[[], Any]:
        raise peers.Unserved("not this one")

    cublas, ours = peers_taking(host, cublas=10.0, detkern=8.0)
    others = [peers.Peer("triton", wrong), peers.Peer("deep_gemm", partial), peers.Peer("sgemm_bi", unserved)]
    row = gemm.measure(host, product, operands, [cublas, ours, *others])
    assert row["ratio"] == 0.8
    assert not any(f"{peer.name}_us" in row for peer in others)
    assert "0.1 from cuBLAS" in row["refused"]["triton"]
    assert row["refused"]["deep_gemm"].startswith("48 elements not written")
    assert row["refused"]["sgemm_bi"] == "Unserved: not this one"
    second = operands.rotating(product, "out")[1].data_ptr()

    def one_set(product: Product, a: Any, b: Any, out: Any) -> Callable[[], Any]:
        target = torch.empty_like(out) if out.data_ptr() == second else out
        return host.taking(1.0, lambda: torch.matmul(a, b.t(), out=target))

    for bind, message in (
        (wrong, "0 elements not written, 0.1"),
        (partial, "48 elements not written"),
        (one_set, "72 elements not written, 0 from cuBLAS"),
    ):
        row = gemm.measure(host, product, operands, [cublas, peers.Peer("detkern", bind)])
        assert message in row["error"]
        assert "ratio" not in row
    with pytest.raises(peers.Unserved):
        gemm.measure(host, product, operands, [cublas, peers.Peer("detkern", unserved)])


def _row(name: str, m: int, ratio: float, op: str = "forward", contract: str = "mma16", **more: Any) -> dict[str, Any]:
    n, k = next((layer.n, layer.k) for layer in SHAPES.layers if layer.name == name)
    return {
        "name": name, "op": op, "m": m, "n": n, "k": k, "type": "bfloat16", "contract": contract,
        "date": "2026-12-01T10:00:00",
        "detkern_us": 10 * ratio, "cublas_us": 10.0, "ratio": ratio, "ratio_low": ratio - 0.01,
        "ratio_high": ratio + 0.01,
        "reference_us": 5.0, "tflops": 1.0, "gb_per_s": 2.0, "tile": "64x64", **more,
    }  # fmt: skip


def _complete(**ratio: float) -> list[dict[str, Any]]:
    rows = []
    for layer in SHAPES.layers:
        rows += [_row(layer.name, m, ratio.get("forward", 0.7)) for m in SHAPES.m]
        rows += [_row(layer.name, 8, ratio.get("gradients", 1.0), op) for op in ("da", "db")]
        rows.append(_row(layer.name, 8, ratio.get("tree", 1.3), contract="tree-mma16"))
    return rows


def test_targets_are_geometric_means_over_all_shapes() -> None:
    all_shapes = Shapes((1, 64, 65, 256, 257, 1023, 1024, 8192), 8192, (SHAPES.layers[0],))
    ratios = {1: 0.5, 64: 1.0, 65: 0.8, 256: 0.9, 257: 0.95, 1023: 1.2, 1024: 0.9, 8192: 0.95}
    rows = [_row("small.a", m, ratio) for m, ratio in ratios.items()]
    rows += [_row("small.a", 8192, 1.01, "da"), _row("small.a", 8192, 1.04, "db")]
    rows += [_row("small.a", 8192, 1.5, contract="tree-mma16"), _row("small.a", 8192, 0.1, contract="fma")]
    results = gemm_report.evaluate(rows, all_shapes)
    values = [result.value for result in results]
    pairs = [(0.5, 1.0), (0.8, 0.9), (0.95, 1.2), (0.9, 0.95), (1.01, 1.04), (1.5, 1.5)]
    assert values[:6] == pytest.approx([math.sqrt(x * y) for x, y in pairs])
    assert values[6] == 1
    assert [result.met for result in results] == [True, True, False, True, False, False, False]
    assert [row["m"] for row in gemm_report.exceptions(rows, all_shapes)] == [1023]
    assert results[2].verdict == "missed"


def test_a_target_needs_every_row() -> None:
    rows = _complete()
    assert {result.verdict for result in gemm_report.evaluate(rows, SHAPES) if result.wanted} == {"met"}
    fewer = [row for row in rows if not (row["name"] == "small.b" and row["m"] == 3)]
    first = gemm_report.evaluate(fewer, SHAPES)[0]
    assert (first.met, first.verdict) == (False, "incomplete: 5 of 6 rows")
    untimed = [{**row, "type": "float16"} for row in rows]
    assert gemm_report.evaluate(untimed, SHAPES)[0].value is None


def _record(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "gemm.json"
    made = {
        "what": "gemm", "date": "2026-12-01T10:00:00", "gpu": "NVIDIA H200", "driver": "580.1",
        "versions": {"torch": "2.11"},
        "command": "python -m benchmarks.gemm", "sources": {}, "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(made))
    return path


def test_a_report_from_the_record_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    all_shapes = dataclasses.replace(SHAPES, m=(1, 128, 512, 1024))
    rows = [_row(layer.name, m, 0.7, cublas_no_split_us=20.0) for layer in all_shapes.layers for m in all_shapes.m]
    rows += [row for row in _complete() if row["op"] != "forward" or row["contract"] != "mma16"]
    record = _record(tmp_path, rows)
    assert gemm_report.report(record, all_shapes) == 0
    wrong = {**rows[0], "type": "float16", "error": "detkern: wrong"}
    assert gemm_report.report(_record(tmp_path, [*rows, wrong]), all_shapes) == 1
    assert gemm_report.report(_record(tmp_path, rows), all_shapes) == 0
    page = (tmp_path / "gemm.md").read_text()
    assert "| forward, M ≤ 64 | 0.700 | 0.80 | 0.75 | met |" in page
    assert "| M ≤ 64 | 0.70 | 2.00 | 1.40 | 2.00 |" in page
    assert "| forward | 512 | 7.00 | 10.00 | 20.00 | 0.700 | 0.690–0.710 | 5.00 | 1.0 | 2 | 64x64 |" in page
    assert "## Above" not in page
    for name in ("gemm-forward.png", "gemm-peers.png", "gemm-training.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

    rows[0] |= {"ratio": 1.2}
    del rows[1]["ratio"]
    rows[1]["error"] = "detkern: 3 elements not written"
    rows[2]["refused"] = {"sgemm_bi": "Unserved: not this one"}
    assert gemm_report.report(_record(tmp_path, rows), all_shapes) == 1
    page = (tmp_path / "gemm.md").read_text()
    assert "| small.a | forward | 1 | 24 | 40 | 1.200 |" in page
    assert "- sgemm-bi: Unserved: not this one" in page
    assert "incomplete: 1 of 2 rows" in page
    said = capsys.readouterr().out
    assert "above 1.05: small.a forward M 1: 1.200" in said
    assert "WRONG: small.a forward M 128: detkern: 3 elements not written" in said


def test_new_rows_replace_old_ones_in_the_order_of_the_shapes() -> None:
    kept = [_row("small.b", 1, 0.9), _row("small.a", 8, 0.8), _row("small.a", 8, 1.0, "da")]
    new = [_row("small.a", 8, 0.5), _row("small.a", 1, 0.6)]
    found = gemm.merged(kept, new, SHAPES.layers)
    assert [(row["name"], row["op"], row["m"], row["ratio"]) for row in found] == [
        ("small.a", "forward", 1, 0.6), ("small.a", "forward", 8, 0.5), ("small.b", "forward", 1, 0.9),
        ("small.a", "da", 8, 1.0),
    ]  # fmt: skip


def _run(folder: Path, **options: Any) -> argparse.Namespace:
    defaults = {
        "output": folder, "layers": list(SHAPES.layers), "m": None, "what": list(gemm.WHAT), "contract": "mma16",
        "type": "bfloat16", "peers": [], "seconds": 1000.0, "missing": False,
    }  # fmt: skip
    return argparse.Namespace(**(defaults | options))


def test_several_visits_fill_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole run on the CPU, slice by slice; then on other sources, where nothing of it may stay."""
    kernel = tmp_path / "kernel.cu"
    kernel.write_text("one")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(gemm, "sources", lambda: [kernel])
    monkeypatch.setattr(shapes, "load", lambda: SHAPES)
    monkeypatch.setattr(gemm_report, "plots", lambda *arguments: [])
    host = Host()
    monkeypatch.setattr(peers, "here", lambda names: (peers_taking(host, cublas=10.0, detkern=6.0), {}))
    measured: list[tuple[Any, ...]] = []
    measure = gemm.measure

    def counting(device: Any, product: Product, *rest: Any) -> dict[str, Any]:
        measured.append(product.key)
        return measure(device, product, *rest)

    monkeypatch.setattr(gemm, "measure", counting)

    def run(driver: str = "580.1", **options: Any) -> int:
        return gemm.run(_run(tmp_path, **options), host, "NVIDIA H200", driver, {"cuda of torch": "13.0"})

    assert run(seconds=0.0) == 1
    assert not (tmp_path / "gemm.json").exists()
    assert run(layers=[SHAPES.layers[1]], what=["forward"], m=[3, 8]) == 1
    assert len(measured) == 2
    assert run(missing=True) == 1  # every row is there; M above 64 has none in these shapes
    assert len(measured) == len(set(measured)) == 2 * (3 + 3)
    made = json.loads((tmp_path / "gemm.json").read_text())
    assert {gemm.key(row) for row in made["rows"]} == set(measured)
    assert all(row["ratio"] == 0.6 and row["date"] for row in made["rows"])
    assert run(missing=True) == 1
    assert len(measured) == 12
    run(layers=[SHAPES.layers[0]], what=["da"])
    assert len(measured) == 13
    assert len(json.loads((tmp_path / "gemm.json").read_text())["rows"]) == 12
    run(driver="590.1", layers=[SHAPES.layers[0]], what=["da"])
    assert len(json.loads((tmp_path / "gemm.json").read_text())["rows"]) == 1
    run(driver="590.1")
    kernel.write_text("two")
    run(driver="590.1", layers=[SHAPES.layers[0]], what=["db"])
    assert [row["op"] for row in json.loads((tmp_path / "gemm.json").read_text())["rows"]] == ["db"]


@pytest.mark.parametrize("what", [["--what", "backward"], ["--shapes", "gpt"], ["--m", "3"], ["--peers", "mkl"]])
def test_unknown_choices_are_refused(
    what: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gemm", *what])
    with pytest.raises(SystemExit):
        gemm.main()
    assert what[1] in capsys.readouterr().err


def test_what_a_measurement_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch before the device, and the run says it instead of failing at an import."""
    from detkern.cu import device

    monkeypatch.setattr(sys, "argv", ["gemm"])
    monkeypatch.setattr(device, "missing", lambda index: "there is no CUDA device")
    for said in ("there is no CUDA device", "PyTorch is not installed"):
        with pytest.raises(SystemExit) as ended:
            gemm.main()
        assert ended.value.code == 2
        assert f"cannot run here: {said}" in capsys.readouterr().err
        monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize("op", shapes.OPS)
def test_differing_bits_are_counted(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products = [small_product(op, m) for m in (1, 3, 8)]
    operands = Operands(products, dict.fromkeys(products, 1), "cpu")

    def general(product: Product, a: Any, b: Any, out: Any) -> str:
        peers.detkern_call(product, a, b, out)()
        return "general"

    rows = gemm_bits.compare(products, operands, general)
    assert [row["m"] for row in rows] == [1, 3, 8]
    assert not any(gemm_bits.differs(row) for row in rows)
    assert all(("differing_from_largest_m" in row) == (op != "db") for row in rows)
    assert ["differing_from_replay" in row for row in rows] == ([True] * 3 if op == "db" else [False, False, True])

    def differing(product: Product, a: Any, b: Any, out: Any) -> str:
        general(product, a, b, out)
        if product.m == 3:
            out.view(torch.int16)[0, :5] ^= 1
        return "general"

    rows = gemm_bits.compare(products, operands, differing)
    assert [row["differing_from_general"] for row in rows] == [0, 5, 0]
    assert [gemm_bits.differs(row) for row in rows] == [False, True, False]

    def unwritten(product: Product, a: Any, b: Any, out: Any) -> Callable[[], Any]:
        return lambda: None

    # Neither kernel writes anything: that is no agreement, whatever the memory held.
    for product in products:
        operands.rotating(product, "out")[0].view(torch.int16).fill_(gemm_bits.OTHER_POISON)
    with monkeypatch.context() as patch:
        patch.setattr(peers, "detkern_call", unwritten)
        rows = gemm_bits.compare(products, operands, lambda *arguments: "nothing")
    assert all(row["differing_from_general"] == row["elements"] for row in rows)


def test_rows_are_held_to_those_of_the_largest_m(monkeypatch: pytest.MonkeyPatch) -> None:
    products = [small_product("forward", m) for m in (3, 8)]
    operands = Operands(products, dict.fromkeys(products, 1), "cpu")
    call = peers.detkern_call

    def batched(product: Product, a: Any, b: Any, out: Any) -> Callable[[], Any]:
        """A kernel whose first row depends on M."""

        def run() -> None:
            call(product, a, b, out)()
            if product.m == 3:
                out.view(torch.int16)[0, 0] ^= 1

        return run

    monkeypatch.setattr(peers, "detkern_call", batched)
    rows = gemm_bits.compare(products, operands, lambda product, a, b, out: str(batched(product, a, b, out)()))
    assert [row["differing_from_largest_m"] for row in rows] == [1, 0]
    assert [row["differing_from_general"] for row in rows] == [0, 0]


@pytest.mark.parametrize("op", shapes.OPS)
def test_rows_are_held_to_the_replay(op: str) -> None:
    product = small_product(op, 8)
    operands = Operands([product], {product: 1}, "cpu")
    a, b, out = (operands.rotating(product, name)[0] for name in (*product.operands, "out"))
    peers.detkern_call(product, a, b, out)()
    bits = out.view(torch.int16)
    assert gemm_bits.differing_from_replay(product, a, b, bits) == 0
    bits[-1, 1] ^= 1
    assert gemm_bits.differing_from_replay(product, a, b, bits) == 1


@pytest.mark.parametrize("contract", ["mma16", "tree-mma16"])
@pytest.mark.parametrize("op", shapes.OPS)
@pytest.mark.parametrize("m", [1, 256])
def test_the_general_kernel_takes_every_product(
    contract: str, op: str, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be launched on an H200, and that a general tile for its load paths exists."""
    from detkern.cu import device, launch

    h200 = device.CudaDevice(0, "NVIDIA H200", "", (9, 0), 132, "580.1")
    monkeypatch.setattr(device, "describe", lambda index: h200)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    planned: list[Any] = []
    enqueued: list[Any] = []
    real = launch.plan_for

    def plan_for(problem: Any, facts: Any, stream: int, chosen: Any) -> Any:
        planned.append((problem, chosen))
        return real(problem, facts, stream, chosen)

    monkeypatch.setattr(launch, "load_function", lambda *arguments: types.SimpleNamespace(ptr=1))
    monkeypatch.setattr(launch, "plan_for", plan_for)
    monkeypatch.setattr(launch, "enqueue", lambda *arguments: enqueued.append(arguments))
    for n, k in ((256, 7168), (1000, 4104)):
        product = Product(Layer("a", "b", n, k), m, op, contract, "bfloat16")
        operands = Operands([product], {product: 1}, "cpu")
        a, b, out = (operands.rotating(product, name)[0] for name in (*product.operands, "out"))
        said = gemm_bits.run_general(product, a, b, out)
        problem, chosen = planned[-1]
        plan, left, right, result, bias, execution = enqueued[-1]
        rows, columns = product.matrix("out")
        inner = {"forward": k, "da": n, "db": m}[op]
        assert (problem.m, problem.n, problem.k, bias) == (rows, columns, inner, None)
        assert (left.pointer, right.pointer, result.pointer) == (a.data_ptr(), b.data_ptr(), out.data_ptr())
        assert (plan.launch, plan.function, execution.stream) == (chosen, 1, 0)
        assert said == f"{chosen.build.source} {chosen.tile}"
        assert chosen.build.source == {"mma16": "mma.cu", "tree-mma16": "tree_mma.cu"}[contract]
        assert (chosen.load_a, chosen.load_b) in chosen.tile.loads
