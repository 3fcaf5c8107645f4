"""linear_logp: the replay against exact rational arithmetic, every rule of it broken on purpose, and what may not
change a bit."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from frameworks import FRAMEWORKS, bits, framework, same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import logp as oracle
from oracles import rational

import detkern
from detkern import ArgumentError, ContractUnsupported, DTypeError, ShapeError
from detkern.operations.linear_logp import replay
from detkern.operations.linear_logp.backward import gradients
from detkern.operations.linear_logp.problem import Scaling, part_edges, shard_parts
from detkern.vocabulary.contracts import FMA
from detkern.vocabulary.dtypes import BF16, F16, F32
from detkern.vocabulary.operands import generate

IGNORED = -100
SCALINGS = [
    Scaling(),
    Scaling(tau=float(np.float32(1 / 0.7))),
    Scaling(cap=15.0, inverse=float(np.float32(1 / 15))),
    Scaling(tau=float(np.float32(1 / 1.3)), cap=30.0, inverse=float(np.float32(1 / 30))),
]


def logits() -> Iterator[tuple[str, np.ndarray]]:
    """Rows [rows, V] that reach every rule."""
    rng = np.random.default_rng(0)
    for vocabulary in (1, 9, 65, 150, 1100):
        y = (4 * rng.standard_normal((3, vocabulary))).astype(np.float32)
        y[2] += 300
        yield f"normal {vocabulary}", y if vocabulary < 1000 else y[:1]
        if vocabulary > 1000:
            break
        masked = y.copy()
        masked[:, ::3] = -np.inf
        masked[1, 1:] = -np.inf
        masked[2] = -np.inf
        yield f"masked {vocabulary}", masked
    special = (2 * rng.standard_normal((6, 150))).astype(np.float32)
    special[0, 70] = np.nan
    special[1, 140] = np.inf
    special[2, 3], special[2, 100] = np.nan, -np.inf
    special[3] = -0.0
    special[4, :] = np.nan
    special[5, 7], special[5, 77] = np.inf, -np.inf
    yield "special", special
    far = np.full((5, 192), -np.inf, np.float32)
    far[0, [0, 9, 17]] = 0, -16.65, -16.65  # the order in a unit
    far[1, [0, 5]] = 0, -102  # subnormal terms of w
    far[2, [0, 30, 60, 100]] = 0, 20, 60, 150  # far states
    far[3, [0, 24, 48, 191]] = -2.5, -2.5, -2.5, -2.5  # equal ones
    far[4, [1, 3, 70]] = 1e30, -1e30, 9.9e29
    yield "far", far
    many = np.full((1, 2100), -np.inf, np.float32)  # five units of a part
    many[0, [0, 128, 256]] = -16.65, -16.65, 0
    yield "many", many
    yield "tiny", np.array([[-(2.0**-149)], [-1e-38]], np.float32)
    units = np.full((3, 1100), -np.inf, np.float32)
    units[2, [0, 1, 33]] = 0, -16.65, -16.65  # the order of bits 5 and 0
    units[0, [0, 63, 64, 127, 128, 143]] = 1, 2, -15.5, 1.75, 3, 2.5  # three units of one part
    units[1, :144] = rng.standard_normal(144) * 3
    yield "units", units


def of_row(
    module: Any, row: np.ndarray, targets: np.ndarray, scaling: Scaling, grads: np.ndarray
) -> dict[str, np.ndarray]:
    """What a version of the replay makes of a row of logits, which are the products of a weight [V, 1] and 1: the
    state, the results and the gradient of the logits with entropy, and the state and the gradient without."""
    one, weight, vocabulary = np.ones((1, 1), np.float32), row[:, None], len(row)
    found = {}
    for entropy in (True, False):
        state = module.fold(FMA, one, weight, targets[None], vocabulary=vocabulary, scaling=scaling, entropy=entropy)
        lines = module.results(state[None], targets[None], vocabulary=vocabulary, ignore_index=IGNORED, entropy=entropy)
        given = grads if entropy else grads[:-1]
        gradient = module.delta(
            FMA,
            one,
            weight,
            targets[None],
            state,
            given[:, None],
            vocabulary=vocabulary,
            scaling=scaling,
            entropy=entropy,
        )
        found |= {f"state {entropy}": state[:, 0], f"results {entropy}": lines[:, 0], f"delta {entropy}": gradient[0]}
    return found


def exact(row: np.ndarray, targets: np.ndarray, scaling: Scaling, grads: np.ndarray) -> dict[str, np.ndarray]:
    """The same in rational arithmetic."""
    z, scales = rational.floats(row), oracle.Scales(scaling.tau, scaling.cap, scaling.inverse)
    y = [oracle.scaled(value, scales)[0] for value in z]
    state = oracle.shard_state(y, len(y))
    columns = [int(target) for target in targets]
    picked = [rational.add(y[t], 0.0) if 0 <= t < len(y) else -math.inf for t in columns]
    results = oracle.results(state, y, columns, IGNORED)
    given = rational.floats(grads)
    with_entropy = oracle.delta(state, z, scales, columns, IGNORED, given, True)
    without = oracle.delta(state, z, scales, columns, IGNORED, given, False)
    found = {
        "state True": [*state, *picked], "state False": [*state[:2], 0.0, *picked],
        "results True": results, "results False": results[:-1], "delta True": with_entropy, "delta False": without,
    }  # fmt: skip
    return {name: rational.encode(values, F32) for name, values in found.items()}


def cases() -> Iterator[tuple[str, np.ndarray, np.ndarray, Scaling, np.ndarray]]:
    """(name, logits, targets, scaling, gradients) of rows."""
    rng = np.random.default_rng(1)
    for number, (name, rows) in enumerate(logits()):
        for index, row in enumerate(rows):
            targets = rng.integers(0, len(row), 4)
            targets[1] = IGNORED if index % 2 else targets[0]  # two of one row's targets may be one column
            targets[3] = (len(row), -1, targets[3])[index] if index < 2 and name.startswith("special") else targets[3]
            grads = rng.standard_normal(6).astype(np.float32)
            turn = 2 if name == "tiny" else (number + index) % 4 if number % 2 and name != "many" else 0
            if name == "units" and index == 2:
                turn = 0  # its logits were chosen as they are
            yield f"{name}, row {index}", row, targets, SCALINGS[turn], grads


@pytest.fixture(scope="module")
def every() -> list[tuple[Any, ...]]:
    """The cases with their exact results."""
    return [(*case, exact(*case[1:])) for case in cases()]


def noticed(module: Any, every: list[tuple[Any, ...]], enough: bool = True) -> list[str]:
    """Where a version of the replay differs from the exact results; the first place is enough."""
    places = []
    for name, row, targets, scaling, grads, wanted in every:
        try:
            found = of_row(module, row, targets, scaling, grads)
        except (TypeError, ValueError, IndexError, NameError) as error:  # a broken version may not even run
            return [f"{name}: {error!r}"]
        for what, values in wanted.items():
            if not same(found[what], values):
                places.append(f"{name}: {what}")
                if enough:
                    return places
    return places


def test_the_replay_is_what_the_page_says(every: list[tuple[Any, ...]]) -> None:
    assert noticed(replay, every, enough=False) == []


BROKEN = [
    ("ORDER = (3, 4, 5, 0, 1, 2)", "ORDER = (4, 3, 5, 0, 1, 2)"),
    ("ORDER = (3, 4, 5, 0, 1, 2)", "ORDER = (0, 1, 2, 3, 4, 5)"),
    ("ORDER = (3, 4, 5, 0, 1, 2)", "ORDER = (3, 4, 5, 1, 0, 2)"),
    ("ORDER = (3, 4, 5, 0, 1, 2)", "ORDER = (3, 4, 0, 5, 1, 2)"),
    ("ORDER = (3, 4, 5, 0, 1, 2)", "ORDER = (3, 4, 5, 0, 2, 1)"),
    ("LOWEST = np.float32(-104)", "LOWEST = np.float32(-100)"),
    ("LOWEST = np.float32(-104)", "LOWEST = np.float32(-np.inf)"),
    ("(edges := part_edges(vocabulary))", "(edges := [min(i * -(-vocabulary // 8), vocabulary) for i in range(9)])"),
    ("(edges := part_edges(vocabulary))",
     "(edges := [min(i * 64 * -(-vocabulary // 512), vocabulary) for i in range(9)])"),
    ("np.fmax.reduce(y, axis=-1, initial=np.float32(-np.inf))", "np.max(y, axis=-1)"),
    ("np.where(np.isneginf(m)[..., None], y, y - m[..., None])", "y - m[..., None]"),
    ("_sum(e * np.maximum(d, LOWEST))", "_sum(e * d)"),
    ("states = pairs + states[len(pairs) * 2 :]", "states = states[len(pairs) * 2 :] + pairs"),
    ("swap = right[0] > left[0]", "swap = right[0] < left[0]"),
    ("np.where(low[0] == high[0], np.float32(0), np.maximum(low[0] - high[0], LOWEST))",
     "np.maximum(low[0] - high[0], LOWEST)"),
    ("s = fma(low[1], f, high[1])", "s = add(low[1] * f, high[1])"),
    ("fma(f, fma(distance, low[1], low[2]), high[2])", "add(f * fma(distance, low[1], low[2]), high[2])"),
    ("fma(f, fma(distance, low[1], low[2]), high[2])", "fma(f, add(distance * low[1], low[2]), high[2])"),
    ("fma(f, fma(distance, low[1], low[2]), high[2])", "fma(f, low[2], high[2])"),
    ("q = exponential(np.float32(-2) * np.abs(u))", "q = exponential(np.float32(-1) * np.abs(u))"),
    ("np.copysign((np.float32(1) - q) / (np.float32(1) + q), u)", "np.tanh(u)"),
    ("np.copysign((np.float32(1) - q) / (np.float32(1) + q), u)", "(np.float32(1) - q) / (np.float32(1) + q)"),
    ("u = y * np.float32(scaling.inverse)", "u = y / np.float32(scaling.cap)"),
    ("y = np.float32(scaling.cap) * tangent", "y = tangent"),
    ("y = y * np.float32(scaling.tau)", "y = y / np.float32(1 / scaling.tau)"),
    ("y = y * np.float32(scaling.tau)", "y = y"),
    ("_logp((y - m) - log_s,", "_logp(y - (m + log_s),"),
    ("np.where(valid, m + log_s, np.float32(np.nan))", "m + log_s"),
    ("np.where(valid, log_s - w / s, np.float32(np.nan))",
     "np.where(valid, log_s - w * (np.float32(1) / s), np.float32(np.nan))"),
    ("valid = np.isfinite(m) & ~np.isnan(s)", "valid = ~np.isnan(s)"),
    ("np.where(target == ignore_index, np.float32(0), values)",
     "np.where((target == ignore_index) & valid, np.float32(0), values)"),
    ("np.where(valid & ~outside, values, np.float32(np.nan))", "np.where(valid, values, np.float32(np.nan))"),
    ("given = np.where(ignored, np.float32(0), grads[:targets].T)", "given = grads[:targets].T"),
    ("total = total + given[:, j]", "total = given[:, j] + total * 0"),
    ("factor = grads[targets] - total", "factor = -total"),
    ("p = exponential(d) * (np.float32(1) / s)[:, None]", "p = exponential(d) / s[:, None]"),
    ("back = -grads[targets + 1]", "back = grads[targets + 1]"),
    ("factor = fma(back, log_s - w / s, factor)", "factor = add(back * (log_s - w / s), factor)"),
    ("distance = np.maximum(d, LOWEST) - log_s[:, None]", "distance = d - log_s[:, None]"),
    ("x = fma(np.broadcast_to(back[:, None], y.shape), distance,",
     "x = add(np.broadcast_to(back[:, None], y.shape) * distance,"),
    ("value[line, target[line, j] - start] += given[line, j]", "value[line, target[line, j] - start] = given[line, j]"),
    ("value = value * np.float32(scaling.tau)", "value = value"),
    ("value = value * fma(-tangent, tangent, np.ones_like(tangent))", "value = value * (1 - tangent * tangent)"),
    ("value = value * fma(-tangent, tangent, np.ones_like(tangent))", "value = value"),
    ("np.where(valid[:, None], value, np.float32(np.nan))", "value"),
    ("valid &= ~(~ignored & ((target < 0) | (target >= vocabulary))).any(axis=1)", "pass"),
    ("round_to(add(value, np.zeros_like(value)), dtype)", "round_to(value, dtype)"),
    ("return canonical(out + np.float32(0))", "return canonical(out)"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "other"), BROKEN, ids=lambda text: text[:40])
def test_a_rule_broken_on_purpose_is_noticed(rule: str, other: str, every: list[tuple[Any, ...]]) -> None:
    text = Path(replay.__file__).read_text()
    assert rule in text
    broken = types.ModuleType(replay.__name__)
    broken.__package__ = replay.__package__
    exec(compile(text.replace(rule, other), replay.__file__, "exec"), broken.__dict__)  # noqa: S102
    with np.errstate(all="ignore"):
        assert noticed(broken, every)


# ---- products, shards and what calls give
# ------------------------------------------------------------------------------


def drawn(m: int, vocabulary: int, depth: int, dtype: Any = np.float32, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    hidden, weight = (rng.standard_normal(shape).astype(dtype) for shape in ((m, depth), (vocabulary, depth)))
    target = rng.integers(0, vocabulary, m)
    target[::5] = IGNORED
    return hidden, weight, target, rng.standard_normal(vocabulary).astype(np.float32)


@pytest.mark.parametrize(("dtype", "contract"), [(BF16, "mma16"), (F16, "mma16"), (F16, "fma"), (F32, "fma")])
def test_logits_are_those_of_the_product(dtype: Any, contract: str) -> None:
    """The float32 product with its bias, as a weight of one column for each row."""
    hidden, weight, target, bias = drawn(4, 150, 20, dtype.numpy)
    z = detkern.linear(hidden, weight, bias, out_dtype="float32", contract=contract)
    got = detkern.linear_logp(hidden, weight, target, bias, contract=contract, return_lse=True, return_entropy=True)
    one = np.ones((1, 1), np.float32)
    for row in range(4):
        alone = detkern.linear_logp(one, z[row][:, None], target[row : row + 1], return_lse=True, return_entropy=True)
        for whole, part in zip(got, alone, strict=True):
            assert same(whole[row : row + 1], part)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("vocabulary", [1, 5, 63, 64, 65, 511, 512, 513, 1023, 1025, 3000])
def test_shards_have_the_bits_of_the_whole(vocabulary: int, entropy: bool) -> None:
    hidden, weight, target, bias = drawn(6, vocabulary, 8, seed=vocabulary)
    weight[vocabulary // 3] = np.inf
    whole = detkern.linear_logp(hidden, weight, target, bias, return_lse=True, return_entropy=True)
    edges = part_edges(vocabulary)
    assert edges == tuple(oracle.edges(vocabulary))
    for shards in (1, 2, 4, 8):
        cuts = [slice(edges[i * 8 // shards], edges[(i + 1) * 8 // shards]) for i in range(shards)]
        states = np.stack([
            detkern.linear_logp_partial(
                hidden, weight[cut], target, bias[cut], vocab_start=cut.start, vocab_size=vocabulary,
                return_entropy=entropy
            )
            for cut in cuts
        ])  # fmt: skip
        merged = detkern.linear_logp_merge(
            states, target, vocab_size=vocabulary, return_lse=True, return_entropy=entropy
        )
        assert all(map(same, merged, whole))


def test_a_merge_gives_the_shapes_of_its_target() -> None:
    hidden, weight, target, _ = drawn(6, 90, 8)
    several = np.stack([target, target], -1)
    one, two = (detkern.linear_logp_partial(hidden, weight, x)[None] for x in (target, several))
    whole = detkern.linear_logp(hidden, weight, several, return_lse=True)
    for states, columns, lead in (
        (one, target, (6,)), (one, target.reshape(2, 3), (2, 3)), (one, target[:, None], (6, 1)),
        (two, several, (6,)), (two, several.reshape(3, 2, 2), (3, 2)),
    ):  # fmt: skip
        logp, lse = detkern.linear_logp_merge(states, columns, vocab_size=90, return_lse=True)
        assert (logp.shape, lse.shape) == (columns.shape, lead)
        assert same(lse.reshape(-1), whole[1])
        assert same(logp.reshape(6, -1)[:, 0], np.ascontiguousarray(whole[0][:, 0]))


def test_columns_that_are_no_shard_are_refused() -> None:
    hidden, weight, target, _ = drawn(2, 1000, 4)
    with pytest.raises(
        ShapeError, match=r"columns 0 to 500 of a vocabulary of 1000, which are no shard.* 2: 0, 512, 1000;"
    ):
        detkern.linear_logp_partial(hidden, weight[:500], target, vocab_size=1000)
    with pytest.raises(ShapeError, match="no shard"):
        detkern.linear_logp_partial(hidden, weight[128:512], target, vocab_start=128, vocab_size=1000)
    assert shard_parts(1000, 512, 488) == (4, 4)
    assert shard_parts(5, 5, 0) == (1, 1) or shard_parts(5, 5, 0) == (4, 4)
    state = detkern.linear_logp_partial(hidden, weight, target)
    for states in (np.stack([state] * 3), state, np.stack([state[:3]])):
        with pytest.raises(ShapeError):
            detkern.linear_logp_merge(states, target, vocab_size=1000)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_row_knows_nothing_of_the_others(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(1, 700))
    hidden, weight, target, bias = drawn(12, vocabulary, 6, ml_dtypes.bfloat16, data.draw(st.integers(0, 99)))
    arguments = {"return_lse": True, "return_entropy": True, "softcap": data.draw(st.sampled_from([None, 5.0]))}
    whole = detkern.linear_logp(hidden, weight, target, bias, **arguments)
    chosen = np.array(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=12)))
    for got, want in zip(
        detkern.linear_logp(hidden[chosen], weight, target[chosen], bias, **arguments), whole, strict=True
    ):
        assert same(got, want[chosen])
    spoiled = hidden.copy()
    spoiled[::2] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    for got, want in zip(detkern.linear_logp(spoiled, weight, target, bias, **arguments), whole, strict=True):
        assert same(got[1::2], want[1::2])


def test_gradients_go_on_over_micro_batches() -> None:
    """At multiples of 16 rows, also of a block of few columns; the parts of hidden's gradient are products of their
    own."""
    hidden, weight, target, bias = drawn(48, 600, 8, ml_dtypes.bfloat16)
    state = detkern.linear_logp_partial(hidden, weight, target, bias)
    grads = generate("normal", F32, (3, 48), 1)
    dhidden, dweight, dbias = gradients(hidden, weight, target, bias, state, grads)
    outs = np.zeros(weight.shape, np.float32), np.zeros(bias.shape, np.float32)
    for rows in (slice(0, 16), slice(16, 48)):
        part, *_ = gradients(
            hidden[rows],
            weight,
            target[rows],
            bias,
            state[:, rows],
            grads[:, rows],
            weight_out=outs[0],
            bias_out=outs[1],
        )
        assert same(part, dhidden[rows])
    assert same(outs[0].astype(weight.dtype), dweight)
    assert same(outs[1], dbias)
    delta = replay.delta(
        detkern.operations.linear_logp.operation.CONTRACTS["mma16"], hidden, weight, target[:, None], state, grads,
        bias,
        vocabulary=600,
    )  # fmt: skip
    assert same(dweight, detkern.gemm_db(delta, hidden))
    assert same(dbias, detkern.bias_gradient(delta, out_dtype="float32"))
    edges = part_edges(600)
    parts = [detkern.gemm(delta[:, a:b], weight[a:b], out_dtype="float32") for a, b in itertools.pairwise(edges)]
    for _ in range(3):
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    assert same(dhidden, parts[0].astype(hidden.dtype))


def test_blocks_of_the_gradient_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from detkern.operations.linear_logp import backward

    hidden, weight, target, bias = drawn(5, 1500, 8, ml_dtypes.bfloat16)
    state = detkern.linear_logp_partial(hidden, weight, target, bias)
    grads = generate("normal", F32, (2, 5), 1)
    whole = gradients(hidden, weight, target, bias, state, grads)
    for name in ("ROWS_BYTES", "BLOCK_BYTES"):  # parts by rows; then parts of several blocks
        monkeypatch.setattr(backward, name, 1)
        assert all(map(same, gradients(hidden, weight, target, bias, state, grads), whole)), name


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_arrays_of_every_framework(name: str) -> None:
    tools = framework(name)
    given = drawn(6, 90, 8)
    hidden, weight, target, bias = given[0], given[1], given[2].astype(np.int32), given[3]
    expected = detkern.linear_logp(hidden, weight, target, bias, return_entropy=True)
    arrays = [tools.make(x) for x in (hidden, weight, target, bias)]
    for got, want in zip(detkern.linear_logp(*arrays, return_entropy=True), expected, strict=True):
        assert same(tools.read(got), want)


def test_shapes_and_strides() -> None:
    hidden, weight, target, bias = drawn(12, 90, 8)
    flat = detkern.linear_logp(hidden, weight, target, bias)
    cube = hidden.reshape(3, 4, 8)
    assert same(detkern.linear_logp(cube, weight, target.reshape(3, 4), bias), flat.reshape(3, 4))
    for array in (np.asfortranarray(hidden), np.repeat(hidden, 2, 1)[:, ::2], hidden[::-1][::-1]):
        assert same(detkern.linear_logp(array, np.asfortranarray(weight), target, bias), flat)
    spread = np.broadcast_to(target[1], (12,))
    assert same(
        detkern.linear_logp(hidden, weight, spread, bias), detkern.linear_logp(hidden, weight, spread.copy(), bias)
    )
    several = np.broadcast_to(target[:, None], (12, 3))
    assert same(detkern.linear_logp(hidden, weight, several, bias), np.repeat(flat[:, None], 3, 1))
    assert detkern.linear_logp(hidden[0], weight, target[0], bias).shape == ()
    logp, lse = detkern.linear_logp(hidden[:0], weight, target[:0], bias, return_lse=True)
    assert logp.shape == lse.shape == (0,)
    assert np.isnan(detkern.linear_logp(hidden, weight[:0], target * 0)).all()


def test_targets() -> None:
    hidden, weight, target, bias = drawn(6, 90, 8)
    hidden[2] = np.nan
    target[:] = IGNORED, 3, IGNORED, 90, -1, 7
    got = detkern.linear_logp(hidden, weight, target, bias)
    assert np.isnan(got).tolist() == [False, False, False, True, True, False]
    assert bits(got[[0, 2]]).tolist() == [0, 0]
    others = detkern.linear_logp(hidden, weight, target, bias, ignore_index=7)
    assert np.isnan(others).tolist() == [True, False, True, True, True, False]
    assert bits(others[5:]).tolist() == [0]
    with pytest.raises(ArgumentError, match=r"target has columns outside of \[0, 90\)"):
        detkern.linear_logp(hidden, weight, target, bias, check=True)
    target[3:5] = 0
    assert same(detkern.linear_logp(hidden, weight, target, bias, check=True)[5], got[5])


def test_get_op() -> None:
    hidden, weight, target, bias = drawn(6, 90, 8)
    for name in ("linear_logp", "batch_invariant_linear_logp"):
        op = detkern.get_op(name)
        assert op.name == name
        assert name in detkern.list_ops()
        assert same(op(hidden, weight, target, bias), detkern.linear_logp(hidden, weight, target, bias))
        half = [x.astype(ml_dtypes.bfloat16) for x in (hidden, weight)]
        fma = detkern.get_op(name, contract="fma")(*half, target)
        assert same(fma, detkern.linear_logp(*half, target, contract="fma"))
        with pytest.raises(ContractUnsupported, match="linear_logp"):
            detkern.get_op(name, contract="tree")(*half, target)


def test_bad_calls() -> None:
    hidden, weight, target, bias = drawn(6, 90, 8)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (DTypeError, "target is float32", (hidden, weight, target.astype(np.float32)), {}),
        (DTypeError, "hidden is float32 and weight is float16", (hidden, weight.astype(np.float16), target), {}),
        (ShapeError, r"target has shape \[5\]; hidden \[6, 8\] needs \[6\]", (hidden, weight, target[:5]), {}),
        (ShapeError, r"hidden \[6, 8\] and weight \[90, 7\] do not fit", (hidden, weight[:, :7], target), {}),
        (ShapeError, r"bias has shape \[89\]", (hidden, weight, target, bias[:89]), {}),
        (ArgumentError, "temperature=0: 1 / temperature", (hidden, weight, target), {"temperature": 0}),
        (ArgumentError, "temperature=-1: 1 / temperature must be a positive", (hidden, weight, target),
         {"temperature": -1}),
        (ArgumentError, "temperature=1e-39: 1 / temperature", (hidden, weight, target), {"temperature": 1e-39}),
        (ArgumentError, "softcap='x' must be a number", (hidden, weight, target), {"softcap": "x"}),
        (ArgumentError, "softcap=1e-39: softcap must be", (hidden, weight, target), {"softcap": 1e-39}),
        (ArgumentError, "ignore_index=0.5 must be a whole number", (hidden, weight, target), {"ignore_index": 0.5}),
        (ContractUnsupported, "float32 takes contract='fma'; contract='mma16'", (hidden, weight, target),
         {"contract": "mma16"}),
        (ContractUnsupported, "has no linear_logp", (hidden, weight, target), {"backend": "native"}),
    ]  # fmt: skip
    for error, words, arguments, options in wrong:
        with pytest.raises(error, match=words):
            detkern.linear_logp(*arguments, **options)


@pytest.mark.parametrize("offset", [0, 300])
@pytest.mark.parametrize(("spread", "peak"), [(1, 0), (4, 0), (15, 0), (1, 20), (1, 40)])
def test_errors_are_no_larger_than_those_of_a_float32_log_softmax(spread: int, peak: int, offset: int) -> None:
    """Of logits that are exact, against float64; and the signs that log-probabilities and entropies have."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(spread + peak + offset)
    y = (spread * rng.standard_normal(20_000)).astype(np.float32) + np.float32(offset)
    y[77] += peak
    logp, lse, entropy = detkern.linear_logp(
        np.ones((1, 1), np.float32), y[:, None], np.arange(20_000)[None], return_lse=True, return_entropy=True
    )
    precise = torch.log_softmax(torch.from_numpy(y).double(), -1).numpy()
    theirs = torch.log_softmax(torch.from_numpy(y), -1).numpy()
    bound = np.abs(theirs - precise).max() + np.spacing(np.abs(precise).astype(np.float32))
    assert (np.abs(logp[0] - precise) <= bound).all()
    assert (logp <= 0).all()
    assert entropy[0] >= 0
    assert abs(entropy[0] + (np.exp(precise) * precise).sum()) < 2e-6 * max(1, entropy[0])
    assert abs(lse[0] - torch.logsumexp(torch.from_numpy(y).double(), -1).item()) <= 1.5 * np.spacing(lse[0])
