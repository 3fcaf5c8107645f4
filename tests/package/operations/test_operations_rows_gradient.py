"""The gradient rules of row operations, on frameworks of a few lines: what NumPy and JAX need is all that the rules
use."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from detkern import rows
from detkern.operations.rows.gradient import RULES, Recorded

F64 = Callable[..., np.ndarray]


class Arrays:
    """A Framework of arrays that follow NumPy's names."""

    def __init__(self, module: str) -> None:
        self.xp: Any = pytest.importorskip(module, reason=f"{module} is not installed")
        self.float32 = self.xp.float32

    def call(self, variant: str, out_dtype: Any, *operands: Any) -> Any:
        return getattr(rows, variant)(*operands, out_dtype=out_dtype)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype)

    def exp(self, x: Any) -> Any:
        return self.xp.exp(x)

    def column(self, x: Any) -> Any:
        return x[..., None]

    def spread(self, x: Any, width: Any) -> Any:
        return self.xp.broadcast_to(x[..., None], (*x.shape, width))


def _softmax_backward(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    return y * (dy - (y * dy).sum(-1, keepdims=True))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# Each operation in float64, of its arrays and its width.
EXACT: dict[str, F64] = {
    "sum": lambda x, n: x.sum(-1),
    "mean": lambda x, n: x.mean(-1),
    "mean_square": lambda x, n: (x * x).mean(-1),
    "softmax": lambda x, n: np.exp(_log_softmax(x)),
    "log_softmax": lambda x, n: _log_softmax(x),
    "cumsum": lambda x, n: x.cumsum(-1),
    "mean_backward": lambda dy, n: np.repeat(dy[..., None] / n, n, -1),
    "mean_square_backward": lambda dy, x, n: dy[..., None] * 2 * x / n,
    "softmax_backward": lambda dy, y, n: _softmax_backward(dy, y),
    "log_softmax_backward": lambda dy, y, n: dy - np.exp(y) * dy.sum(-1, keepdims=True),
    "cumsum_backward": lambda dy, n: dy[..., ::-1].cumsum(-1)[..., ::-1],
}
M, N = 3, 11


def _operands(name: str) -> list[np.ndarray]:
    generator = np.random.default_rng(len(name))
    wide, narrow = generator.normal(size=(2, M, N)), generator.normal(size=M)
    if not name.endswith("_backward") or name == "cumsum_backward":
        return [wide[0]]
    first = narrow if name.startswith("mean") else wide[0]
    if name == "mean_backward":
        return [first]
    second = {"softmax_backward": np.exp(_log_softmax(wide[1])), "log_softmax_backward": _log_softmax(wide[1])}
    return [first, second.get(name, wide[1])]


def _directional(name: str, operands: list[np.ndarray], directions: list[np.ndarray]) -> np.ndarray:
    """The derivative along directions, in float64, by a central difference."""
    step = 1e-5
    ahead, behind = (
        EXACT[name](*(x + sign * step * d for x, d in zip(operands, directions, strict=True)), N) for sign in (1, -1)
    )
    return (ahead - behind) / (2 * step)


def test_every_public_row_operation_has_a_rule() -> None:
    assert set(EXACT) == set(RULES)
    assert set(rows.__all__) - set(RULES) == {
        "sum_backward"
    }  # whose gradient nobody has: a spread, which rules make themselves


@pytest.mark.parametrize("module", ["numpy", "jax.numpy"])
@pytest.mark.parametrize("name", EXACT)
def test_backward_and_forward_mode_against_float64(name: str, module: str) -> None:
    framework = Arrays(module)
    exact = [x.astype(np.float32).astype(np.float64) for x in _operands(name)]
    arrays = [framework.xp.asarray(x, dtype=framework.float32) for x in exact]
    given = [*arrays, N] if name == "mean_backward" else arrays
    y = getattr(rows, name)(*given)
    generator = np.random.default_rng(7)
    incoming = generator.normal(size=y.shape)
    directions = [generator.normal(size=x.shape) for x in exact]
    expected = _directional(name, exact, directions)

    rule, types = RULES[name], [framework.float32] * len(arrays)
    saved = {"in": arrays, "out": [y], "none": []}[rule.saves]
    gradients = rule.backward(
        framework, Recorded(saved, types, N), framework.xp.asarray(incoming, dtype=framework.float32)
    )
    assert [g.shape for g in gradients] == [x.shape for x in exact]
    along = sum(float((np.asarray(g, np.float64) * d).sum()) for g, d in zip(gradients, directions, strict=True))
    assert math.isclose(along, float((expected * incoming).sum()), rel_tol=1e-4, abs_tol=1e-5)

    tangents = [framework.xp.asarray(d, dtype=framework.float32) for d in directions]
    tangent = rule.forward(framework, arrays, y, framework.float32, tangents, N)
    assert np.allclose(np.asarray(tangent, np.float64), expected, rtol=1e-4, atol=1e-5)


def test_the_rules_import_no_framework() -> None:
    module = importlib.import_module("detkern.operations.rows.gradient")
    assert not {"np", "numpy", "torch", "jax"} & set(vars(module))
