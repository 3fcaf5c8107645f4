"""The records of linear_logp: the fold of logits into states, the merge of states, the gradient of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ...abi import mirror
from ...abi.descriptors import logp_descriptors
from ...tensors.view import TensorView
from ...vocabulary import operands as generator
from ...vocabulary.contracts import CONTRACTS, FMA, MMA16, Contract
from ...vocabulary.dtypes import BF16, F16, F32, INDICES, DType
from ..memory import matrix_array, vector_array
from ..operation import Descriptor, Operation, PublicCall, Sample
from ..problem import Operands
from .problem import (
    PARTS,
    PLAIN,
    STATE,
    UNIT,
    DeltaProblem,
    FoldProblem,
    MergeProblem,
    delta_problem,
    fold_problem,
    merge_problem,
)
from .replay import delta, fold, results, unit_states

__all__ = ["BY_CONTRACT", "DELTA", "FOLD", "IGNORED", "MERGE"]

Array = npt.NDArray[Any]

IGNORED = -100  # what ignore_index is by default, as in PyTorch
BY_CONTRACT = (FMA, MMA16)
_MODULE = "detkern.operations.linear_logp.call"

# Rows, vocabulary, depth, targets: less than a unit, parts that are empty or short, an odd number of units, several
# parts.
_CASES = ((3, 1, 8, 1), (16, 9, 33, 2), (17, 130, 24, 1), (5, 700, 17, 3))
_SHAPES = (
    (1, 1, 1, 1),
    (2, 8, 0, 1),
    (5, 65, 16, 1),
    (3, 511, 31, 2),
    (33, 200, 40, 1),
    (4, 1100, 9, 1),
    (2, 513, 5, 0),
)


def _variants(operation: str) -> dict[str, tuple[DType, ...]]:
    return {f"{operation}-{contract}": contract.operands for contract in BY_CONTRACT}


def _contract(variant: str) -> Contract:
    return CONTRACTS[variant.rpartition("-")[2]]


def _misfit_of(problem: FoldProblem | DeltaProblem) -> str | None:
    if problem.contract not in BY_CONTRACT:
        known = " and ".join(str(contract) for contract in BY_CONTRACT)
        return f"linear_logp is defined by {known}, not by {problem.contract}"
    if problem.hidden.dtype not in problem.contract.operands:
        return f"{problem.contract} does not take {problem.hidden.dtype}"
    return None


def _columns(view: TensorView | None, problem: FoldProblem | MergeProblem | DeltaProblem) -> Array:
    assert view is not None
    return matrix_array(view.pointer, (problem.m, problem.targets), problem.target)


def _product(problem: FoldProblem | DeltaProblem, operands: Operands) -> tuple[Array, Array, Array]:
    """hidden, weight and target."""
    hidden, weight = operands[:2]
    assert hidden is not None
    assert weight is not None
    return (
        matrix_array(hidden.pointer, (problem.m, problem.k), problem.hidden),
        matrix_array(weight.pointer, (problem.n, problem.k), problem.weight),
        _columns(operands[2], problem),
    )


def _bias(problem: FoldProblem | DeltaProblem, bias: TensorView | None) -> Array | None:
    return None if bias is None or problem.bias is None else vector_array(bias.pointer, problem.n, problem.bias)


def _bind_fold(variant: str, operands: Operands, out: TensorView, accumulate: bool) -> FoldProblem:
    hidden, weight, target, bias = operands
    assert hidden is not None
    assert weight is not None
    assert target is not None
    return fold_problem(
        _contract(variant), hidden, weight, target, bias, out,
        vocabulary=weight.shape[0], start=0, first=0, count=PARTS, scaling=PLAIN, entropy=True,
    )  # fmt: skip


def _replay_fold(problem: FoldProblem, operands: Operands, out: TensorView) -> None:
    state = matrix_array(out.pointer, (STATE + problem.targets, problem.m), problem.out)
    state[...] = fold(
        problem.contract, *_product(problem, operands), _bias(problem, operands[3]),
        vocabulary=problem.vocabulary, first=problem.first, count=problem.count, scaling=problem.scaling,
        entropy=problem.entropy,
    )  # fmt: skip


def _bind_merge(variant: str, operands: Operands, out: TensorView, accumulate: bool) -> MergeProblem:
    states, target = operands
    assert states is not None
    assert target is not None
    entropy = out.shape[0] + STATE > states.shape[1] + 1
    return merge_problem(states, target, out, vocabulary=_VOCABULARY, ignore_index=IGNORED, entropy=entropy)


def _replay_merge(problem: MergeProblem, operands: Operands, out: TensorView) -> None:
    states = operands[0]
    assert states is not None
    given = matrix_array(states.pointer, (problem.shards, STATE + problem.targets, problem.m), problem.states)
    lines = matrix_array(out.pointer, (problem.rows, problem.m), problem.out)
    lines[...] = results(
        given, _columns(operands[1], problem),
        vocabulary=problem.vocabulary, ignore_index=problem.ignore_index, entropy=problem.entropy,
    )  # fmt: skip


def _bind_delta(variant: str, operands: Operands, out: TensorView, accumulate: bool) -> DeltaProblem:
    hidden, weight, target, state, grads, bias = operands
    assert hidden is not None
    assert weight is not None
    assert target is not None
    assert state is not None
    assert grads is not None
    return delta_problem(
        _contract(variant), hidden, weight, target, state, grads, bias, out,
        vocabulary=weight.shape[0], start=0, ignore_index=IGNORED, scaling=PLAIN,
    )  # fmt: skip


def _replay_delta(problem: DeltaProblem, operands: Operands, out: TensorView) -> None:
    state, grads, bias = operands[3:]
    assert state is not None
    assert grads is not None
    lines = problem.targets + 1 + problem.entropy
    result = matrix_array(out.pointer, (problem.m, problem.n), problem.out)
    result[...] = delta(
        problem.contract, *_product(problem, operands),
        matrix_array(state.pointer, (STATE, problem.m), problem.state),
        matrix_array(grads.pointer, (lines, problem.m), problem.grads),
        _bias(problem, bias),
        vocabulary=problem.vocabulary, start=problem.start, ignore_index=problem.ignore_index, scaling=problem.scaling,
        entropy=problem.entropy, out_dtype=problem.out.dtype,
    )  # fmt: skip


def _targets(m: int, count: int, vocabulary: int, seed: int) -> Array:
    """Mostly in the vocabulary, some ignored, some outside."""
    words = generator.generate("bits", F32, (m, count), seed + 50).view(np.uint32).astype(np.int64)
    target = words // 16 % max(vocabulary, 1)
    target = np.where(words % 16 == 0, IGNORED, np.where(words % 16 == 1, vocabulary, target))
    return target.astype(INDICES[seed % 2].numpy)


def _operands(
    kind: str, dtype: DType, sizes: tuple[int, int, int, int], seed: int, bias: DType | None
) -> tuple[Array, Array, Array, Array | None]:
    m, n, k, targets = sizes
    return (
        generator.generate(kind, dtype, (m, k), 4 * seed),
        generator.generate(kind, dtype, (n, k), 4 * seed + 1),
        _targets(m, targets, n, seed),
        None if bias is None else generator.generate(kind, bias, (n,), 4 * seed + 2),
    )


def _about(kind: str, sizes: tuple[int, int, int, int], bias: DType | None) -> str:
    m, n, k, targets = sizes
    said = "" if bias is None else f", bias {bias.short}"
    return f"{kind} operands, m={m}, vocabulary={n}, k={k}, targets={targets}{said}"


def _fold_sample(
    variant: str, kind: str, dtype: DType, sizes: tuple[int, int, int, int], seed: int, bias: DType | None
) -> Sample:
    given = _operands(kind, dtype, sizes, seed, bias)
    return Sample(variant, given, (STATE + sizes[3], sizes[0]), F32, about=_about(kind, sizes, bias))


def _delta_sample(
    variant: str,
    kind: str,
    dtype: DType,
    sizes: tuple[int, int, int, int],
    seed: int,
    bias: DType | None,
    results: Iterable[DType],
) -> Iterator[Sample]:
    """One of each type of the result, of the same operands."""
    hidden, weight, target, column = _operands(kind, dtype, sizes, seed, bias)
    state = fold(_contract(variant), hidden, weight, target, column, vocabulary=sizes[1])[:STATE]
    lines = sizes[3] + 1 + seed % 2
    grads = generator.generate("normal", F32, (lines, sizes[0]), 4 * seed + 3)
    for out in results:
        yield Sample(
            variant, (hidden, weight, target, state, grads, column), sizes[:2], out,
            about=f"{_about(kind, sizes, bias)} > {out.short}",
        )  # fmt: skip


_BIASES = (None, F32, BF16, F16)


def _fold_cases(variant: str, dtype: DType) -> Iterator[Sample]:
    for number, kind in enumerate(generator.KINDS):
        for turn, sizes in enumerate(_CASES):
            yield _fold_sample(variant, kind, dtype, sizes, number + turn, _BIASES[(number + turn) % 4])


def _fold_samples(variant: str, dtype: DType, kind: str, seed: int) -> Iterator[Sample]:
    for number, sizes in enumerate(_SHAPES):
        for turn in range(2):
            yield _fold_sample(variant, kind, dtype, sizes, seed + number, _BIASES[(number + 2 * turn + seed) % 4])


def _delta_cases(variant: str, dtype: DType) -> Iterator[Sample]:
    for number, kind in enumerate(generator.KINDS):
        for turn, sizes in enumerate(_CASES):
            yield from _delta_sample(variant, kind, dtype, sizes, number + turn, _BIASES[(number + turn) % 4], [dtype])


def _delta_samples(variant: str, dtype: DType, kind: str, seed: int) -> Iterator[Sample]:
    for number, sizes in enumerate(_SHAPES):
        bias = _BIASES[(number + seed) % 4]
        yield from _delta_sample(variant, kind, dtype, sizes, seed + number, bias, dict.fromkeys((dtype, F32)))


_VOCABULARY = 1 << 20  # of the samples of merges, whose states are of any


def _merge_sample(kind: str, shards: int, m: int, targets: int, seed: int, entropy: bool) -> Sample:
    """States of a unit each, with two of its logits, as a fold would hand them on."""
    y = generator.generate(kind, F32, (shards, m, UNIT), seed)
    with np.errstate(all="ignore"):
        state = [x[..., 0] + np.float32(0) for x in unit_states(y)]
    states = np.stack([*state, *(y[..., 7 * j % UNIT] for j in range(targets))], axis=1)
    target = _targets(m, targets, _VOCABULARY, seed)
    about = f"{kind} operands, {shards} shards, m={m}, targets={targets}{', entropy' if entropy else ''}"
    return Sample("linear_logp_merge", (states, target), (targets + 1 + entropy, m), F32, about=about)


def _merge_cases(variant: str, dtype: DType) -> Iterator[Sample]:
    for number, kind in enumerate(generator.KINDS):
        for shards in (1, 2, 4, 8):
            yield _merge_sample(kind, shards, 40 + shards, 1 + number % 2, number + shards, bool(number % 2))


def _merge_samples(variant: str, dtype: DType, kind: str, seed: int) -> Iterator[Sample]:
    for number, shards in enumerate((1, 2, 4, 8)):
        for m, targets in ((1, 1), (33, 1), (70, 3), (5, 0)):
            yield _merge_sample(kind, shards, m, targets, seed + number, (m + number) % 2 == 0)


_POINTERS = ("hidden", "weight", "target", "bias", "grads", "state", "out")


def _fold_addresses(operands: Operands, out: TensorView) -> tuple[int, ...]:
    hidden, weight, target, bias = (0 if view is None else view.pointer for view in operands)
    return hidden, weight, target, bias, 0, out.pointer, 0


def _delta_addresses(operands: Operands, out: TensorView) -> tuple[int, ...]:
    hidden, weight, target, state, grads, bias = (0 if view is None else view.pointer for view in operands)
    return hidden, weight, target, bias, grads, state, out.pointer


def _descriptor(
    code: int, operation: str, addresses: Callable[[Operands, TensorView], tuple[int, ...]]
) -> Descriptor[Any]:
    return Descriptor(
        code, {f"{operation}-{contract}": contract.code for contract in BY_CONTRACT}, mirror.LogpDescriptor, _POINTERS,
        addresses, logp_descriptors, lambda problem, tiles: "blocks of at most 256 rows and 8 MB of logits",
    )  # fmt: skip


FOLD: Operation[FoldProblem] = Operation(
    name="linear_logp",
    problem=FoldProblem,
    variants=_variants("linear_logp"),
    variant_of=lambda problem: (f"linear_logp-{problem.contract}", problem.hidden.dtype),
    bind=_bind_fold,
    misfit=_misfit_of,
    replay=_replay_fold,
    piece="a part of the vocabulary at a time",
    cases=_fold_cases,
    samples=_fold_samples,
    independent=lambda variant: (0, None, 0, None),
    along=1,
    call=lambda variant: PublicCall(
        _MODULE, "fold", ("hidden", "weight", "target", "bias"), {"contract": str(_contract(variant))}
    ),
    descriptor=_descriptor(5, "linear_logp", _fold_addresses),
)

MERGE: Operation[MergeProblem] = Operation(
    name="linear_logp_merge",
    problem=MergeProblem,
    variants={"linear_logp_merge": (F32,)},
    variant_of=lambda problem: ("linear_logp_merge", F32),
    bind=_bind_merge,
    misfit=lambda problem: None,
    replay=_replay_merge,
    piece="all rows at once",
    cases=_merge_cases,
    samples=_merge_samples,
    independent=lambda variant: (2, 0),
    along=1,
    call=lambda variant: PublicCall(
        _MODULE, "merge", ("states", "target"), {"vocab_size": _VOCABULARY}, sized=lambda shape: {"lines": shape[0]}
    ),
)

DELTA: Operation[DeltaProblem] = Operation(
    name="linear_logp_delta",
    problem=DeltaProblem,
    variants=_variants("linear_logp_delta"),
    variant_of=lambda problem: (f"linear_logp_delta-{problem.contract}", problem.hidden.dtype),
    bind=_bind_delta,
    misfit=_misfit_of,
    replay=_replay_delta,
    piece="2^18 logits at a time",
    cases=_delta_cases,
    samples=_delta_samples,
    independent=lambda variant: (0, None, 0, 1, 1, None),
    call=lambda variant: PublicCall(
        _MODULE,
        "delta",
        ("hidden", "weight", "target", "state", "grads", "bias"),
        {"contract": str(_contract(variant))},
    ),
    descriptor=_descriptor(6, "linear_logp_delta", _delta_addresses),
)
