"""The public calls against the NumPy replay of the contract, through every framework and layout."""

from __future__ import annotations

import importlib
import threading

import ml_dtypes
import numpy as np
import pytest
from frameworks import FRAMEWORKS, OnlyDLPack, bits, framework, same

import detkern
from detkern import config
from detkern.api import block_scaled_gemm
from detkern.dispatch.plan_cache import PlanCache
from detkern.operations.block_scaled.replay import block_scaled_gemm as replayed_block_scaled
from detkern.operations.gemm import replay as numpy_replay
from detkern.vocabulary import operands
from detkern.vocabulary.contracts import CONTRACTS, get_contract
from detkern.vocabulary.dtypes import BF16, E4M3, E5M2, F16, F32, DType, from_numpy

NAMES = tuple(FRAMEWORKS)
OPERANDS = (F32, F16, BF16)
DEFAULTS = {F32: "fma", F16: "mma16", BF16: "mma16"}


def normal(shape: tuple[int, ...], dtype: DType = F32, seed: int = 0) -> np.ndarray:
    return operands.generate("normal", dtype, shape, seed)


def replay(a: np.ndarray, b: np.ndarray, contract: str | None = None, **options: object) -> np.ndarray:
    """The contract on plain matrices."""
    name = contract or DEFAULTS[from_numpy(a.dtype)]
    return numpy_replay.gemm(get_contract(name), np.ascontiguousarray(a), np.ascontiguousarray(b), **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", OPERANDS, ids=str)
def test_every_framework_gives_the_contracts_bits_in_its_own_array(name: str, dtype: DType) -> None:
    f = framework(name)
    a, b, bias = normal((5, 37), dtype, 1), normal((37, 6), dtype, 2), normal((6,), F32, 3)
    x, y = f.make(a), f.make(b)
    c = detkern.gemm(x, y, bias=f.make(bias))
    assert type(c) is (np.ndarray if name == "dlpack" else type(x))
    assert same(f.read(c), replay(a, b, bias=bias))
    for out in OPERANDS:
        assert same(f.read(detkern.gemm(x, y, out_dtype=out.name)), replay(a, b, out_dtype=out))
    assert same(f.read(detkern.linear(x, f.make(np.ascontiguousarray(b.T)), f.make(bias))), replay(a, b, bias=bias))
    dc = normal((5, 6), dtype, 4)
    assert same(f.read(detkern.gemm_da(f.make(dc), y)), replay(dc, b.T))
    assert same(f.read(detkern.gemm_db(x, f.make(dc))), replay(a.T, dc))
    assert same(f.read(detkern.gemm_db(x, f.make(dc), transposed=True)), replay(dc.T, a))
    if f.writable:
        start = normal((5, 6), F32, 5)
        out = f.make(start.copy())
        assert detkern.gemm(x, y, out=out, accumulate=True) is out
        assert same(f.read(out), replay(a, b, initial=start, out_dtype=F32))


def layouts(array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Views with the values of a matrix in many layouts."""
    rows, columns = array.shape
    padded = np.zeros((2 * rows + 1, 3 * columns + 2), array.dtype)
    padded[1 : 2 * rows : 2, 2::3] = array
    reversed_ = np.ascontiguousarray(array[::-1, ::-1])
    memory = np.zeros(array.nbytes + 1, np.uint8)
    unaligned = memory[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    readonly = array.copy()
    readonly.flags.writeable = False
    field = np.zeros(array.shape, [("flag", "u1"), ("value", array.dtype)])
    field["value"] = array
    return [
        ("row-major", array.copy()),
        ("column-major", np.asfortranarray(array)),
        ("strided", padded[1 : 2 * rows : 2, 2::3]),
        ("reversed", reversed_[::-1, ::-1]),
        ("unaligned", unaligned),
        ("read-only", readonly),
        ("byte strides that no element stride describes", field["value"]),
    ]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_numpy_layouts(dtype: DType) -> None:
    a, b = normal((4, 19), dtype, 1), normal((19, 5), dtype, 2)
    expected = replay(a, b)
    for label, x in layouts(a):
        assert same(detkern.gemm(x, b), expected), label
    for label, y in layouts(b):
        assert same(detkern.gemm(a, y), expected), label
    for label, out in layouts(np.zeros((4, 5), dtype.numpy)):
        if label not in ("read-only", "byte strides that no element stride describes"):
            assert detkern.gemm(a, b, out=out) is out
            assert same(out, expected), label


def test_a_strided_out_leaves_its_gaps_alone() -> None:
    a, b = normal((4, 19)), normal((19, 5))
    memory = np.full((9, 11), 7, np.float32)
    detkern.gemm(a, b, out=memory[1::2, 1::2])
    assert same(np.ascontiguousarray(memory[1::2, 1::2]), replay(a, b))
    memory[1::2, 1::2] = 7
    assert (memory == 7).all()


def test_broadcast_operands_are_read_through_stride_zero() -> None:
    row, b = normal((1, 19)), normal((19, 5))
    wide = np.broadcast_to(row, (6, 19))
    assert same(detkern.gemm(wide, b), replay(wide, b))
    column = np.broadcast_to(normal((19, 1)), (19, 5))
    assert same(detkern.gemm(row, column), replay(row, column))
    bias = np.broadcast_to(np.float32(3), (5,))
    assert same(detkern.gemm(row, b, bias=bias), replay(row, b, bias=np.ascontiguousarray(bias)))


def test_torch_layouts() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    f = framework("torch")
    a, b = normal((4, 19), BF16, 1), normal((19, 5), BF16, 2)
    x, y = f.make(a), f.make(b)
    expected = replay(a, b)
    wide = torch.zeros(8, 40, dtype=torch.bfloat16)
    wide[::2, 1:39:2] = x
    assert same(f.read(detkern.gemm(wide[::2, 1:39:2], y)), expected)
    assert same(f.read(detkern.gemm(x.t().contiguous().t(), y.t().contiguous().t())), expected)
    assert same(f.read(detkern.gemm(x[:1].expand(3, 19), y)), np.repeat(expected[:1], 3, 0))
    odd = x[:1].as_strided((1, 19), (3, 1))
    assert same(f.read(detkern.gemm(odd, y)), expected[:1])
    real = normal((2, 3, 4), F32, 3)
    lazy = torch.complex(torch.zeros(3, 4), f.make(real[0])).conj().imag
    assert lazy.is_neg()
    assert same(f.read(detkern.gemm(lazy, f.make(np.ascontiguousarray(real[1].T)))), replay(-real[0], real[1].T))
    assert "negative bit" in detkern.explain(lazy, f.make(np.ascontiguousarray(real[1].T))).copies[0]


@pytest.mark.parametrize(
    ("left", "right"),
    [((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 4, 5), (5,)), ((5,), (2, 5, 3)), ((2, 4, 5), (5, 3)),
     ((4, 5), (2, 5, 3)), ((2, 1, 4, 5), (3, 5, 3)), ((2, 3, 4, 5), (2, 3, 5, 3)),
     ((1, 1, 1), (1, 1)), ((3, 1, 5), (3, 5, 1)),
     ((2, 1, 2, 1, 2, 1, 2, 1, 2, 2, 3), (1, 2, 1, 2, 1, 2, 1, 2, 2, 3, 2))],
    ids=str,
)  # fmt: skip
def test_shapes_follow_numpy_matmul(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a = operands.generate("integers", F32, left, 1)
    b = operands.generate("integers", F32, right, 2)
    expected = np.matmul(a, b)  # exact: the operands are small integers
    result = detkern.gemm(a, b)
    assert isinstance(result, np.ndarray)
    assert result.shape == expected.shape
    assert (result == expected).all()
    if len(left) > 1 and len(right) > 1:
        swapped = detkern.gemm(
            np.ascontiguousarray(a.swapaxes(-1, -2)), b.swapaxes(-1, -2).copy(), trans_a=True, trans_b=True
        )
        assert (swapped == expected).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 2), (2, 3, 0), (0, 0, 0), (2, 0, 3)])
def test_empty_sizes(name: str, m: int, k: int, n: int) -> None:
    f = framework(name)
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    bias = np.arange(n, dtype=np.float32) - 1
    result = f.read(detkern.gemm(f.make(a), f.make(b)))
    assert result.shape == (m, n)
    assert (bits(result) == 0).all()  # K = 0 gives +0
    assert (f.read(detkern.gemm(f.make(a), f.make(b), bias=f.make(bias))) == np.broadcast_to(bias, (m, n))).all()


def test_k_zero_accumulates_nothing() -> None:
    out = np.array([[-0.0, 2.5, np.nan]], np.float32)
    detkern.gemm(np.ones((1, 0), np.float32), np.ones((0, 3), np.float32), out=out, accumulate=True)
    assert bits(out).tolist() == [[0, 0x40200000, 0x7FFFFFFF]]


def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has everything that would prepare or run a product on the CPU fail."""
    from detkern.dispatch import plan, registry
    from detkern.operations.gemm.problem import GemmProblem

    def launched(*_: object) -> None:
        raise AssertionError("launched")

    plan.forget_plans()
    monkeypatch.setattr(registry.load("cpu").implementations[GemmProblem], "prepare", launched)


def test_empty_results_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_runs(monkeypatch)
    assert detkern.gemm(np.ones((0, 3), np.float32), np.ones((3, 2), np.float32)).shape == (0, 2)
    assert detkern.linear(np.ones((2, 0, 3), np.float32), np.ones((2, 3), np.float32)).shape == (2, 0, 2)
    with pytest.raises(AssertionError, match="launched"):
        detkern.gemm(np.ones((1, 0), np.float32), np.ones((0, 2), np.float32))


def test_out_of_one_framework_operands_of_another() -> None:
    f = framework("torch")
    a, b = normal((4, 19), BF16, 1), normal((19, 5), BF16, 2)
    expected = replay(a, b)
    assert isinstance(detkern.gemm(a, f.make(b)), np.ndarray)
    assert same(detkern.gemm(a, f.make(b)), expected)
    mixed = detkern.gemm(f.make(a), b, bias=normal((5,), F16, 3))
    assert type(mixed).__module__ == "torch"
    assert same(f.read(mixed), replay(a, b, bias=normal((5,), F16, 3)))
    out = np.zeros((4, 5), np.float16)
    assert detkern.gemm(f.make(a), f.make(b), out=out) is out
    assert same(out, replay(a, b, out_dtype=F16))
    # The gradient of a weight is of a's framework, transposed or not.
    for transposed in (False, True):
        assert isinstance(detkern.gemm_db(a, f.make(normal((4, 3), BF16)), transposed=transposed), np.ndarray)


def test_out_dtype_in_every_spelling() -> None:
    a, b = normal((3, 8), BF16), normal((8, 2), BF16)
    expected = replay(a, b, out_dtype=F32)
    spellings = ["float32", "f32", np.float32, np.dtype(np.float32), F32]
    if "torch" in {f for f in NAMES if not _missing(f)}:
        spellings.append(__import__("torch").float32)
    if not _missing("jax"):
        import jax.numpy as jnp

        spellings += [jnp.float32, jnp.dtype("float32")]
    for spelling in spellings:
        assert same(detkern.gemm(a, b, out_dtype=spelling), expected)
    assert detkern.gemm(a, b, out_dtype=ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


def _missing(name: str) -> bool:
    import importlib.util

    return name in ("torch", "jax") and importlib.util.find_spec(name) is None


@pytest.mark.parametrize("contract", [name for name, c in CONTRACTS.items() if BF16 in c.operands])
def test_a_named_contract_is_the_one_that_runs(contract: str) -> None:
    a, b = normal((6, 100), BF16, 1), normal((100, 5), BF16, 2)
    assert same(detkern.gemm(a, b, contract=contract), replay(a, b, contract))
    assert detkern.explain(a, b, contract=contract).contract == contract


def test_the_process_default_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal((6, 100), BF16, 1), normal((100, 5), BF16, 2)
    assert same(detkern.gemm(a, b), replay(a, b, "mma16"))
    monkeypatch.setattr(config, "contract", "tree")
    assert same(detkern.gemm(a, b), replay(a, b, "tree"))
    monkeypatch.setattr(config, "contract", {"bf16": "mma8"})
    assert same(detkern.gemm(a, b), replay(a, b, "mma8"))
    assert same(detkern.gemm(a, b, contract="fma"), replay(a, b, "fma"))
    monkeypatch.setattr(config, "contract", None)
    assert same(detkern.gemm(a, b), replay(a, b, "mma16"))


def test_vectors_and_gradients_of_batches() -> None:
    x, w = normal((2, 3, 17), F32, 1), normal((5, 17), F32, 2)
    y = detkern.linear(x, w)
    assert same(y.reshape(6, 5), replay(x.reshape(6, 17), w.T))
    assert same(detkern.linear(x[0, 0], w), replay(x[0, :1], w.T)[0])
    dc = normal((2, 3, 5), F32, 3)
    db = detkern.gemm_db(x, dc)
    assert db.shape == (2, 17, 5)
    for i in range(2):
        assert same(db[i], replay(x[i].T, dc[i]))
    da = detkern.gemm_da(dc, w.T)
    assert same(da.reshape(6, 17), replay(dc.reshape(6, 5), w))


@pytest.mark.parametrize("name", NAMES)
def test_block_scaled(name: str) -> None:
    f = framework(name)
    for left, right in ((E4M3, E4M3), (E5M2, E4M3)):
        a, b = normal((3, 256), left, 1), normal((256, 4), right, 2)
        scale_a, scale_b = normal((3, 2), F32, 3), normal((2, 4), F32, 4)
        c = block_scaled_gemm(f.make(a), f.make(scale_a), f.make(b), f.make(scale_b))
        assert same(f.read(c), replayed_block_scaled(a, scale_a, b, scale_b))
    out = np.ones((3, 4), np.float32)
    one = np.broadcast_to(np.float32(0.5), (3, 2))
    assert block_scaled_gemm(a, one, b, scale_b, out=out, accumulate=True) is out
    expected = replayed_block_scaled(a, np.ascontiguousarray(one), b, scale_b, initial=np.ones((3, 4), np.float32))
    assert same(out, expected)
    assert block_scaled_gemm(a[:0], one[:0], b, scale_b).shape == (0, 4)


def test_explain_says_what_would_run_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_runs(monkeypatch)
    field = np.zeros((4, 8), [("flag", "u1"), ("value", "f4")])["value"]
    out = np.ones((4, 3), np.float32)
    said = detkern.explain(field, np.ones((8, 3), np.float32), out=out)
    assert (said.backend, said.contract) == ("cpu", "fma")
    assert "a: strides of (40, 5) bytes" in said.copies[0]
    assert said.passed_over == tuple((name, "runs only when named") for name in ("musa", "ascend", "native"))
    assert (out == 1).all()
    for line in (
        "backend   cpu",
        "contract  fma",
        "kernel ",
        "tile ",
        "geometry ",
        "copy      a: strides",
        "not       native",
    ):
        assert line in str(said)
    assert detkern.explain(out, out.T, backend="native").contract == "none"
    passed_over = detkern.explain(out, out.T, backend="native").passed_over
    assert passed_over[0] == ("cpu", "native was named")
    assert dict(passed_over[1:]) == dict.fromkeys(("musa", "ascend"), "runs only when named")
    assert "nothing is launched" in detkern.explain(out[:0], out.T).geometry
    with pytest.raises(detkern.ShapeError, match="trans_b=True would fit"):
        detkern.explain(out, out)
    with pytest.raises(detkern.ArgumentError, match="out shares memory with a"):
        detkern.explain(out, out.T[:, :3], out=out)


def test_a_result_is_new_memory_that_outlives_its_operands() -> None:
    f = framework("jax")
    a, b = normal((4, 19), BF16, 1), normal((19, 5), BF16, 2)
    expected = replay(a, b)
    results = [detkern.gemm(f.make(a), f.make(b)) for _ in range(20)]
    more = [detkern.gemm(f.make(b.T.copy()), f.make(a.T.copy())) for _ in range(20)]
    assert all(same(f.read(c), expected) for c in results)
    assert all(same(f.read(c), replay(b.T, a.T)) for c in more)


def test_a_framework_with_from_dlpack_gets_its_own_array_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    class Tensor(OnlyDLPack):
        pass

    received = []

    def from_dlpack(exported: object) -> Tensor:
        received.append(exported)
        return Tensor(np.from_dlpack(exported))

    module = types.ModuleType("someframework")
    module.from_dlpack = from_dlpack
    monkeypatch.setitem(sys.modules, "someframework", module)
    Tensor.__module__ = "someframework.tensor"
    a, b = normal((3, 8)), normal((8, 2))
    c = detkern.gemm(Tensor(a), Tensor(b))
    assert type(c) is Tensor
    assert len(received) == 1
    assert same(np.ascontiguousarray(c.array), replay(a, b))
    # NumPy's reader knows no bfloat16, so this framework cannot take one: the result is NumPy's.
    low = detkern.gemm(Tensor(a), Tensor(b), out_dtype="bfloat16")
    assert isinstance(low, np.ndarray)
    assert same(low, replay(a, b, out_dtype=BF16))


def test_torch_parameters_and_subclasses() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    layer = torch.nn.Linear(8, 3)
    x = normal((4, 8))

    class Mine(torch.Tensor):
        pass

    expected = replay(x, layer.weight.detach().numpy().T, bias=layer.bias.detach().numpy())
    with torch.no_grad():
        result = detkern.linear(torch.from_numpy(x), layer.weight, layer.bias)
        assert type(result) is torch.Tensor
        assert same(result.numpy(), expected)
        mine = torch.from_numpy(x).as_subclass(Mine)
        assert same(detkern.linear(mine, layer.weight, layer.bias).numpy(), expected)
    assert same(detkern.linear(x, layer.weight.detach(), layer.bias.detach()), expected)


def test_torch_learns_that_out_has_changed() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.ones(2, 2, requires_grad=True)
    saved = torch.zeros(2, 2)
    y = (x * saved).sum()
    with torch.no_grad():
        detkern.gemm(torch.ones(2, 3), torch.ones(3, 2), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        assert (detkern.gemm(torch.ones(2, 3), torch.ones(3, 2), out=torch.empty(2, 2)) == 3).all()


def test_eight_threads_at_once() -> None:
    cases = [(normal((m, 40), BF16, m), normal((40, 7), BF16, m)) for m in range(1, 9)]
    expected = [replay(a, b) for a, b in cases]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not same(detkern.gemm(*cases[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_plans_are_kept_and_depend_on_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from detkern.dispatch import plan
    from detkern.operations.gemm import checks

    plan.forget_plans()
    made = []
    original = checks._make
    monkeypatch.setattr(checks, "_make", lambda *arguments: made.append(1) or original(*arguments))
    for seed in range(5):
        detkern.gemm(normal((3, 8), F32, seed), normal((8, 2), F32, seed))
    assert len(made) == 1
    # Another alignment, stride or flag is another plan.
    a, b = normal((3, 8)), normal((8, 2))
    memory = np.zeros(b.nbytes + 4, np.uint8)[4:].view(np.float32).reshape(8, 2)
    memory[...] = b
    assert memory.ctypes.data % 16 == 4
    assert detkern.gemm(a, memory).tobytes() == detkern.gemm(a, np.asfortranarray(b)).tobytes()
    detkern.gemm(a, a, trans_b=True)
    detkern.gemm(a, b, out_dtype="f16")
    assert len(made) == 5
    # The number of rows is an argument, but for one row, which has no stride.
    x, w = normal((3, 40, 8)), normal((8, 2))
    for m in range(1, 20):
        detkern.gemm(normal((m, 8)), w)
        assert detkern.gemm(x[:, :m].copy(), w).shape == (3, m, 2)
    assert len(made) == 6
    # The same layout said in another way.
    assert same(detkern.linear(normal((5, 8)), w.T), detkern.gemm(normal((5, 8)), w))
    assert len(made) == 6
    # Where no one stride leads through the rows, and in batches, it is a part of the layout.
    for m in range(2, 5):
        assert same(detkern.gemm(x[:, :m], w), detkern.gemm(x[:, :m].copy(), w))
        detkern.gemm(normal((2, m, 8)), normal((2, 8, 2)))
    assert len(made) == 12


def test_varying_sizes_drive_out_no_plan_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from detkern.dispatch import plan, registry
    from detkern.operations.gemm import checks

    monkeypatch.setattr(checks, "plans", PlanCache(8))
    monkeypatch.setattr(plan, "plans", checks.plans)
    a, b = normal((3, 8)), normal((8, 2))
    selected = []
    real = registry.select
    monkeypatch.setattr(registry, "select", lambda *given: selected.append(given[0].k) or real(*given))
    for k in range(9, 60):
        detkern.gemm(a, b)
        detkern.gemm(normal((3, k)), normal((k, 2)))  # the batch of a weight's gradient is its K
    assert selected == [8, *range(9, 60)]
    assert len(checks.plans) <= 8


def test_explain_of_every_operation_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from detkern.dispatch import plan, registry
    from detkern.operations.table import OPERATIONS

    def launched(*_: object) -> None:
        raise AssertionError("launched")

    plan.forget_plans()
    for operation in OPERATIONS:
        monkeypatch.setattr(registry.load("cpu").implementations[operation.problem], "prepare", launched)
        for variant, dtypes in operation.variants.items():
            call = operation.call(variant)
            sample = next(s for s in operation.samples(variant, dtypes[0], "normal", 1) if s.initial is None)
            named = [(x, name) for x, name in zip(sample.operands, call.operands, strict=True) if x is not None]
            settings = {**call.settings, **call.sized(sample.shape)}
            function = getattr(importlib.import_module(call.module), call.name)
            said = detkern.explain(function, *(x for x, _ in named), **settings)
            assert (said.backend, said.contract) == ("cpu", variant)
            assert variant in said.kernel
            with pytest.raises(detkern.DTypeError, match=named[0][1]):
                detkern.explain(function, *(x.astype(np.int64) for x, _ in named), **settings)
    plan.forget_plans()
    with pytest.raises(detkern.ArgumentError, match="is not a function of detkern's"):
        detkern.explain(len, np.ones(3))
    assert detkern.gemm(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), out=None, backend="native").sum() == 8
