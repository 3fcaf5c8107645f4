"""The problems of linear_logp: the fold of logits into states, the merge of states into results, and the gradient of
logits.

What both kernels and replays need to know of the vocabulary's division is here too: docs/contracts.md, "linear_logp".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...tensors.view import Device, TensorView
from ...vocabulary.contracts import Contract
from ..matrix import Matrix, Vector, alignment_of, matrix_of, plain_matrix

__all__ = [
    "PARTS", "PLAIN", "STATE", "UNIT", "DeltaProblem", "FoldProblem", "MergeProblem", "Scaling", "delta_problem",
    "fold_problem",
    "merge_problem", "part_edges", "shard_parts",
]  # fmt: skip

PARTS = 8
UNIT = 64  # columns
STATE = 3  # numbers of a row's state before its targets' logits: m, s, w


def part_edges(vocabulary: int) -> tuple[int, ...]:
    """The nine edges of the eight parts: multiples of 8 ceil(V / 64), none above V. Later parts may be short or
    empty."""
    length = PARTS * -(-vocabulary // UNIT)
    return tuple(min(i * length, vocabulary) for i in range(PARTS + 1))


def shard_parts(vocabulary: int, start: int, columns: int) -> tuple[int, int] | None:
    """The first part and the number of parts of the columns [start, start + columns), where these are one of 1, 2, 4 or
    8 equal groups of parts; else None. Of several that fit, because parts are empty, the largest group, then the
    first."""
    edges = part_edges(vocabulary)
    for count in (8, 4, 2, 1):
        for first in range(0, PARTS, count):
            if edges[first] == start and edges[first + count] == start + columns:
                return first, count
    return None


@dataclass(frozen=True, slots=True)
class Scaling:
    """What is done to a logit before it is folded; all are binary32 numbers, None where there is no such step.

    tau: 1 / temperature. cap, inverse: the softcap and 1 / the softcap, both or neither.
    """

    tau: float | None = None
    cap: float | None = None
    inverse: float | None = None


PLAIN = Scaling()


def _columns(target: TensorView) -> Matrix:
    """Targets [M] or [M, K] as a matrix of a column for each."""
    if len(target.shape) == 2:
        return plain_matrix(target)
    one = TensorView(target.pointer, (*target.shape, 1), (*target.strides, 0), target.dtype, target.device)
    return plain_matrix(one)


def _lines(view: TensorView) -> Matrix:
    """A stack of lines [.., lines, M] with a number for each row in every line."""
    return matrix_of(view, view.strides[:-2], view.shape[-2], view.strides[-2])


def _bias(bias: TensorView | None) -> Vector | None:
    return None if bias is None else Vector(bias.dtype, bias.strides[0], alignment_of(bias.pointer))


def _wider(lines: Matrix, m: int, more: int) -> Matrix:
    """Lines of `m` numbers for rows, or a stack of them, one behind the other: the same of `more`. Others stay as they
    are."""
    if lines.row_stride != m or lines.col_stride != 1:
        return lines
    return replace(lines, row_stride=more, batch_strides=tuple(stride // m * more for stride in lines.batch_strides))


@dataclass(frozen=True, slots=True)
class FoldProblem:
    """out[0:3, m] = (m, s, w) of the row's logits over the columns [start, start + n) of a vocabulary, out[3 + j, m] =
    the logit of its target j, -inf where that column is not among these.

    logits: contract(hidden[m, :], weight[column, :]) + bias[column], then `scaling`.
    first, count: the vocabulary's parts that the columns are. entropy: whether w is computed; else it is +0.
    out: float32 [3 + targets, m].
    """

    operation: ClassVar[str] = "linear_logp"

    contract: Contract
    device: Device
    m: int
    n: int
    k: int
    targets: int
    vocabulary: int
    start: int
    first: int
    count: int
    entropy: bool
    scaling: Scaling
    hidden: Matrix
    weight: Matrix
    target: Matrix
    bias: Vector | None
    out: Matrix

    def __hash__(self) -> int:
        return hash((self.contract.code, self.m, self.n, self.k, self.targets, self.start, self.hidden.dtype.code))

    @property
    def about(self) -> str:
        """What it is and its sizes, for messages."""
        return f"{self.contract} linear_logp of m={self.m}, n={self.n}, k={self.k}"

    def with_rows(self, m: int) -> FoldProblem:
        """The same layout with another number of rows, neither number being 1."""
        return self if m == self.m else replace(self, m=m, out=_wider(self.out, self.m, m))


@dataclass(frozen=True, slots=True)
class MergeProblem:
    """out[j, m] = logp of target j, out[targets, m] = lse, out[targets + 1, m] = entropy where it is asked for, from
    the states [shards, 3 + targets, m] of a vocabulary. All are float32."""

    operation: ClassVar[str] = "linear_logp_merge"

    device: Device
    shards: int
    m: int
    targets: int
    vocabulary: int
    ignore_index: int
    entropy: bool
    states: Matrix
    target: Matrix
    out: Matrix

    def __hash__(self) -> int:
        return hash((self.shards, self.m, self.targets, self.vocabulary, self.entropy))

    @property
    def rows(self) -> int:
        """Those of the result."""
        return self.targets + 1 + self.entropy

    @property
    def about(self) -> str:
        """What it is and its sizes, for messages."""
        return f"the merge of {self.shards} states of linear_logp, m={self.m}"

    def with_rows(self, m: int) -> MergeProblem:
        """The same layout with another number of rows, neither number being 1."""
        if m == self.m:
            return self
        states, out = (_wider(lines, self.m, m) for lines in (self.states, self.out))
        return replace(self, m=m, states=states, out=out)


@dataclass(frozen=True, slots=True)
class DeltaProblem:
    """out[m, n] = the gradient of the product's elements, which are the logits before scaling, of the columns [start,
    start + n).

    state: float32 [at least 3, m], as the whole vocabulary's fold gave it. grads: float32 [targets + 1, or targets + 2
    with entropy, m], the gradients of what MergeProblem gives.
    """

    operation: ClassVar[str] = "linear_logp_delta"

    contract: Contract
    device: Device
    m: int
    n: int
    k: int
    targets: int
    vocabulary: int
    start: int
    ignore_index: int
    entropy: bool
    scaling: Scaling
    hidden: Matrix
    weight: Matrix
    target: Matrix
    state: Matrix
    grads: Matrix
    bias: Vector | None
    out: Matrix

    def __hash__(self) -> int:
        return hash((self.contract.code, self.m, self.n, self.k, self.targets, self.start, self.hidden.dtype.code))

    @property
    def about(self) -> str:
        """What it is and its sizes, for messages."""
        return f"{self.contract} gradient of linear_logp's logits, m={self.m}, n={self.n}, k={self.k}"

    def with_rows(self, m: int) -> DeltaProblem:
        """The same layout with another number of rows, neither number being 1."""
        if m == self.m:
            return self
        state, grads = (_wider(lines, self.m, m) for lines in (self.state, self.grads))
        return replace(self, m=m, state=state, grads=grads)


def _sizes(hidden: TensorView, weight: TensorView, target: TensorView) -> dict[str, int]:
    return {
        "m": hidden.shape[0],
        "n": weight.shape[0],
        "k": hidden.shape[1],
        "targets": target.shape[1] if len(target.shape) == 2 else 1,
    }


def fold_problem(
    contract: Contract,
    hidden: TensorView,
    weight: TensorView,
    target: TensorView,
    bias: TensorView | None,
    out: TensorView,
    *,
    vocabulary: int,
    start: int,
    first: int,
    count: int,
    scaling: Scaling,
    entropy: bool,
) -> FoldProblem:
    """The problem of views that already fit: hidden [M, D], weight [N, D], target [M] or [M, K], bias [N], out [3 + K,
    M]."""
    return FoldProblem(
        contract=contract,
        device=out.device,
        **_sizes(hidden, weight, target),
        vocabulary=vocabulary,
        start=start,
        first=first,
        count=count,
        entropy=entropy,
        scaling=scaling,
        hidden=plain_matrix(hidden),
        weight=plain_matrix(weight),
        target=_columns(target),
        bias=_bias(bias),
        out=_lines(out),
    )


def merge_problem(
    states: TensorView, target: TensorView, out: TensorView, *, vocabulary: int, ignore_index: int, entropy: bool
) -> MergeProblem:
    """The problem of views that already fit: states [P, 3 + K, M], target [M] or [M, K], out [K + 1 or K + 2, M]."""
    return MergeProblem(
        device=out.device,
        shards=states.shape[0],
        m=states.shape[2],
        targets=states.shape[1] - STATE,
        vocabulary=vocabulary,
        ignore_index=ignore_index,
        entropy=entropy,
        states=_lines(states),
        target=_columns(target),
        out=_lines(out),
    )


def delta_problem(
    contract: Contract,
    hidden: TensorView,
    weight: TensorView,
    target: TensorView,
    state: TensorView,
    grads: TensorView,
    bias: TensorView | None,
    out: TensorView,
    *,
    vocabulary: int,
    start: int,
    ignore_index: int,
    scaling: Scaling,
) -> DeltaProblem:
    """The problem of views that already fit: as `fold_problem`, state [3 or more, M], grads [K + 1 or K + 2, M], out
    [M, N]."""
    sizes = _sizes(hidden, weight, target)
    return DeltaProblem(
        contract=contract,
        device=out.device,
        **sizes,
        vocabulary=vocabulary,
        start=start,
        ignore_index=ignore_index,
        entropy=grads.shape[0] > sizes["targets"] + 1,
        scaling=scaling,
        hidden=plain_matrix(hidden),
        weight=plain_matrix(weight),
        target=_columns(target),
        state=_lines(state),
        grads=_lines(grads),
        bias=_bias(bias),
        out=plain_matrix(out),
    )
