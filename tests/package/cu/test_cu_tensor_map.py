"""What TMA is told of operands and outputs, and what it cannot be told; the maps themselves on a driver that only takes
notes."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace

import cu_driver
import pytest

from detkern.cu import tensor_map
from detkern.cu.tensor_map import MapShape, folded, map_shapes, output_map_shape
from detkern.errors import DeviceError
from detkern.operations.gemm.problem import GemmProblem, gemm_problem
from detkern.tensors import Device, TensorView
from detkern.vocabulary.contracts import FMA, MMA16
from detkern.vocabulary.dtypes import BF16, F16, F32, DType

DEVICE = Device("cuda", 0)
ROWS = (True, False)  # a's lines along k, b's along n: both row-major


def _view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType = BF16, pointer: int = 4096) -> TensorView:
    return TensorView(pointer, shape, strides, dtype, DEVICE)


def _problem(a: TensorView, b: TensorView, out: TensorView | None = None) -> GemmProblem:
    """out: row-major, of bf16, where none is given."""
    m, n = a.shape[-2], b.shape[-1]
    if out is None:
        batch = a.shape[:-2]
        strides = (*(m * n * 1000**axis for axis in reversed(range(len(batch)))), n, 1)
        out = _view((*batch, m, n), strides)
    return gemm_problem(MMA16, a, b, out, None, False)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_map_is_along_lines_across_them_and_the_batch(dtype: DType) -> None:
    a, b = _view((100, 72), (80, 1), dtype), _view((72, 56), (64, 1), dtype)
    assert map_shapes(_problem(a, b), ROWS) == (
        MapShape(dtype, (72, 100, 1), (160, 144), 0),
        MapShape(dtype, (56, 72, 1), (128, 112), 0),
    )
    # The same memory the other way round: lines along m, along k.
    a, b = _view((72, 104), (1, 112), dtype), _view((104, 56), (1, 104), dtype)
    assert map_shapes(_problem(a, b), (False, True)) == (
        MapShape(dtype, (72, 104, 1), (224, 144), 0),
        MapShape(dtype, (104, 56, 1), (208, 208), 0),
    )


def test_strides_of_a_batch_are_bytes_and_a_broadcast_one_is_a_batch_of_one() -> None:
    a = _view((5, 100, 72), (9000, 80, 1))
    b = _view((5, 72, 56), (0, 64, 1))
    # b's batch would be merged into m, were the rows of a and out in line.
    assert map_shapes(_problem(a, b), ROWS) == (
        MapShape(BF16, (72, 100, 5), (160, 18000), 0),
        MapShape(BF16, (56, 72, 1), (128, 112), 0),
    )
    # Between the rows: the batch's stride is less than a line's.
    a = _view((5, 100, 72), (80, 400, 1))
    b = _view((5, 72, 56), (64, 320, 1))
    out = _view((5, 100, 56), (64, 320, 1))
    problem = _problem(a, b, out)
    assert map_shapes(problem, ROWS) == (
        MapShape(BF16, (72, 100, 5), (800, 160), 0),
        MapShape(BF16, (56, 72, 5), (640, 128), 0),
    )
    assert output_map_shape(problem) == MapShape(BF16, (56, 100, 5), (640, 128), 0)


@pytest.mark.parametrize(
    ("a", "said"),
    [
        (_view((100, 72), (64, 1)), "lines that overlap"),
        (_view((100, 72), (-80, 1)), "lines that run backwards"),
        (_view((100, 72), (0, 1)), "the same line again and again"),
        (_view((2**31, 72), (80, 1)), "more lines than a coordinate counts"),
        (_view((100, 72), (2**39, 1)), "lines too far apart"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lines_that_tma_cannot_describe(a: TensorView, said: str) -> None:
    b = _view((72, 56), (64, 1))
    assert map_shapes(_problem(a, b), ROWS) is None, said
    # The same of b: the problem's mirror image.
    turned = _view((72, a.shape[0]), (1, a.strides[0]))
    assert map_shapes(_problem(_view((56, 72), (80, 1)), turned), (True, True)) is None, said


def test_what_is_just_within_its_limits() -> None:
    b = _view((72, 56), (64, 1))
    for a in (_view((2**31 - 1, 72), (80, 1)), _view((100, 72), (2**39 - 8, 1)), _view((100, 72), (72, 1))):
        assert map_shapes(_problem(a, b), ROWS) is not None
    wide = _view((8, 2**31), (2**31, 1)), _view((2**31, 8), (8, 1))
    assert map_shapes(_problem(*wide), ROWS) is None, "k is a coordinate as well"


def test_batches_of_two_dimensions_at_most_have_maps() -> None:
    backwards = _view((5, 100, 72), (-9000, 80, 1)), _view((5, 72, 56), (8000, 64, 1))
    assert map_shapes(_problem(*backwards), ROWS) is None
    a = _view((3, 5, 100, 72), (2**20, 9000, 80, 1))
    b = _view((3, 5, 72, 56), (2**20, 8000, 64, 1))
    problem = _problem(a, b)
    assert len(problem.batch) == 2
    assert map_shapes(problem, ROWS) == (
        MapShape(BF16, (72, 100, 3), (160, 2**21), 0, inner=(5, 18000)),
        MapShape(BF16, (56, 72, 3), (128, 2**21), 0, inner=(5, 16000)),
    )
    one_weight = _problem(a, _view((3, 5, 72, 56), (2**20, 0, 64, 1)))  # broadcast over the inner dimension
    shapes = map_shapes(one_weight, ROWS)
    assert shapes is not None
    assert (shapes[1].sizes, shapes[1].inner) == ((56, 72, 3), (1, 112))
    a = _view((2, 3, 5, 100, 72), (2**23, 2**20, 9000, 80, 1))
    b = _view((2, 3, 5, 72, 56), (2**24, 2**20, 8000, 64, 1))
    problem = _problem(a, b)
    assert len(problem.batch) == 3
    assert map_shapes(problem, ROWS) is None, "one dimension more than a map has"
    four = (7, 2, 3, 5), (2**24, 2**22, 2**20)
    a, b = (
        _view((*four[0], *size), (*four[1], 9000, *strides))
        for size, strides in (((100, 72), (80, 1)), ((72, 56), (64, 1)))
    )
    assert folded(_problem(a, b)) is None
    many = _view((2**31, 1, 72), (80, 80, 1)), _view((2**31, 72, 8), (1024, 8, 1))
    out = _view((2**31, 1, 8), (16, 8, 1))
    assert map_shapes(_problem(*many, out), ROWS) is None, "more batches than a coordinate counts"


def _heads(rows: int, depth: int, sharing: int, groups: int = 3) -> TensorView:
    """[B, Hkv, G, rows, depth] read from [B, rows, H, depth], of `groups` heads times `sharing`, or of heads that G
    share."""
    heads = groups * max(sharing, 1)
    strides = (rows * heads * depth, max(sharing, 1) * depth, depth if sharing else 0, heads * depth, 1)
    return _view((2, groups, sharing or 4, rows, depth), strides)


def _turned(view: TensorView) -> TensorView:
    return _view((*view.shape[:-2], *view.shape[:-3:-1]), (*view.strides[:-2], *view.strides[:-3:-1]), view.dtype)


def test_heads_that_share_a_matrix_are_one_dimension_with_those_that_do_not() -> None:
    """q of [B, L, Hkv * G, D] and k of [B, L, Hkv, D]."""
    q, k = _heads(100, 64, 4), _turned(_heads(200, 64, 0))
    problem = _problem(q, k, _view((2, 3, 4, 100, 200), (240000, 80000, 20000, 200, 1)))
    assert problem.batch == (2, 3, 4)
    mapped = folded(problem)
    assert mapped is not None
    assert (mapped.problem.batch, mapped.shared, mapped.batches) == ((2, 12), (1, 4), ((2, 12), (2, 3)))
    assert map_shapes(problem, (True, True)) == (
        MapShape(BF16, (64, 100, 2), (2 * 768, 2 * 76800), 0, inner=(12, 128)),
        MapShape(BF16, (64, 200, 2), (2 * 192, 2 * 38400), 0, inner=(3, 128)),
    )
    assert output_map_shape(problem) == MapShape(BF16, (200, 100, 2), (400, 480000), 0, inner=(12, 40000))
    # k.T @ q, as the gradient of v has it: a is shared.
    turned = _problem(_turned(k), _turned(q), _view((2, 3, 4, 200, 100), (240000, 80000, 20000, 100, 1)))
    mapped = folded(turned)
    assert mapped is not None
    assert (mapped.shared, mapped.batches) == ((4, 1), ((2, 3), (2, 12)))
    # One matrix for all heads is a batch of one.
    alone = _view((2, 3, 4, 64, 200), (12800, 0, 0, 1, 64))
    mapped = folded(_problem(q, alone, _view((2, 3, 4, 100, 200), (240000, 80000, 20000, 200, 1))))
    assert mapped is not None
    assert (mapped.problem.b.batch_strides, mapped.shared) == ((12800, 0), (1, 1))


def test_three_dimensions_that_are_none_are_not_for_tma() -> None:
    q, k = _heads(100, 64, 4), _turned(_heads(200, 64, 0))
    apart = _view((2, 3, 4, 100, 200), (2**22, 2**20, 2**17, 200, 1))  # the outputs of a group's heads
    problem = _problem(q, k, apart)
    assert problem.batch == (2, 3, 4)
    assert folded(problem) is None
    assert map_shapes(problem, (True, True)) is None
    assert output_map_shape(problem) is None
    of_groups = _view((2, 3, 4, 64, 200), (12800, 0, 64, 1, 64))  # k is shared by heads that are not neighbours
    assert folded(_problem(q, of_groups, _view((2, 3, 4, 100, 200), (240000, 80000, 20000, 200, 1)))) is None


def test_no_k_and_other_types_are_not_for_tma() -> None:
    assert map_shapes(_problem(_view((100, 0), (8, 1)), _view((0, 56), (64, 1))), ROWS) is None
    single = _view((100, 72), (80, 1), F32), _view((72, 56), (64, 1), F32)
    assert map_shapes(gemm_problem(FMA, *single, _view((100, 56), (56, 1), F32), None, False), ROWS) is None


def test_single_rows_columns_and_k_have_lines_of_whole_16_bytes() -> None:
    """Strides along a size of one are zero in a problem; a map needs some multiple of 16 bytes."""
    problem = _problem(_view((1, 63), (63, 1)), _view((63, 1), (1, 1)))
    assert map_shapes(problem, (True, True)) == (
        MapShape(BF16, (63, 1, 1), (128, 128), 0),
        MapShape(BF16, (63, 1, 1), (128, 128), 0),
    )
    problem = _problem(_view((63, 1), (1, 1)), _view((1, 9), (9, 1)))
    assert map_shapes(problem, (False, False)) == (
        MapShape(BF16, (63, 1, 1), (128, 128), 0),
        MapShape(BF16, (9, 1, 1), (32, 32), 0),
    )


@pytest.mark.parametrize(
    "out",
    [
        _view((100, 56), (56, 1), F32),
        _view((100, 56), (60, 1)),
        _view((100, 56), (56, 1), BF16, 4104),
        _view((100, 55), (56, 1)),
        _view((100, 56), (1, 104)),
        _view((100, 56), (-56, 1)),
        _view((100, 56), (128, 2)),
        _view((100, 1), (8, 1)),
    ],
    ids=["f32", "odd line", "odd address", "odd width", "columns", "reversed", "spread", "a column"],
)
def test_outputs_that_tma_does_not_write(out: TensorView) -> None:
    problem = _problem(_view((100, 72), (80, 1)), _view((72, out.shape[1]), (64, 1)), out)
    assert output_map_shape(problem) is None


def test_outputs_that_tma_writes() -> None:
    a, b = _view((100, 72), (80, 1)), _view((72, 56), (64, 1))
    for dtype in (F16, BF16):
        problem = _problem(a, b, _view((100, 56), (64, 1), dtype))
        assert output_map_shape(problem) == MapShape(dtype, (56, 100, 1), (128, 112), 0)
    row = _problem(_view((1, 72), (80, 1)), b, _view((1, 56), (57, 1)))
    assert output_map_shape(row) == MapShape(BF16, (56, 1, 1), (112, 112), 0)
    # Of a batch, the start of each must be at 16 bytes as well.
    left, right = _view((3, 100, 72), (9000, 80, 1)), _view((3, 72, 56), (8000, 64, 1))
    assert output_map_shape(_problem(left, right, _view((3, 100, 56), (6008, 56, 1)))) is not None
    assert output_map_shape(_problem(left, right, _view((3, 100, 56), (6004, 56, 1)))) is None
    left, right = _view((2, 3, 100, 72), (2**20, 9000, 80, 1)), _view((2, 3, 72, 56), (2**20, 8000, 64, 1))
    two = output_map_shape(_problem(left, right, _view((2, 3, 100, 56), (2**20, 6000, 56, 1))))
    assert two == MapShape(BF16, (56, 100, 2), (112, 2**21), 0, inner=(3, 12000))


SHAPE = MapShape(F16, (72, 100, 5), (160, 18000), 128)


def test_a_map_is_made_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = cu_driver.install(monkeypatch)
    shape = replace(SHAPE)
    first = shape.at(4096)
    assert shape.at(4096) is first
    assert shape.at(8192) is not first
    (kind, rank, pointer, sizes, strides, box, steps, *rest), other = driver.maps
    assert (kind, rank, pointer, other[2]) == ("CU_TENSOR_MAP_DATA_TYPE_FLOAT16", 4, 4096, 8192)
    assert (sizes, strides, box, steps) == ([72, 100, 1, 5], [160, 160, 18000], [64, 128, 1, 1], [1] * 4)
    # 64 elements of 16 bits are the 128 bytes of the swizzle; zeros stand for what is outside.
    assert rest == [
        "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "CU_TENSOR_MAP_SWIZZLE_128B",
        "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ]
    assert replace(SHAPE, dtype=BF16).at(4096) is not first
    assert driver.maps[-1][0] == "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"


def test_an_inner_batch_is_the_third_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    """And lines of whole boxes are not cut then: there are four dimensions."""
    driver = cu_driver.install(monkeypatch)
    shape = MapShape(BF16, (128, 100, 5), (800, 96000), 64, inner=(7, 4000))
    assert not shape.whole
    shape.at(4096)
    assert driver.maps[-1][3:6] == ([128, 100, 7, 5], [800, 4000, 96000], [64, 64, 1, 1])


def test_lines_of_whole_boxes_are_cut_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one copy takes several beside one another."""
    driver = cu_driver.install(monkeypatch)
    shape = MapShape(BF16, (320, 100, 5), (800, 96000), 128, 4)
    assert shape.whole
    shape.at(4096)
    sizes, strides, box = driver.maps[-1][3:6]
    assert (sizes, strides, box) == ([64, 100, 5, 5], [800, 128, 96000], [64, 128, 4, 1])
    # Every element is where it was: x along a line, y across, z of the batch.
    for x, y, z in ((0, 0, 0), (63, 1, 0), (64, 0, 0), (319, 99, 4), (200, 7, 3)):
        cut = 2 * (x % 64) + strides[0] * y + strides[1] * (x // 64) + strides[2] * z
        assert cut == 2 * x + shape.strides[0] * y + shape.strides[1] * z
    assert not SHAPE.whole


def test_no_more_maps_are_kept_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that never gives an address twice must not fill the host's memory."""
    driver = cu_driver.install(monkeypatch)
    monkeypatch.setattr(tensor_map, "_MAPS", 4)
    shape = replace(SHAPE)
    for pointer in range(16, 16 * 100, 16):
        shape.at(pointer)
        assert len(shape._maps) <= 4
        made = len(driver.maps)
        shape.at(pointer)
        assert len(driver.maps) == made


def test_what_the_driver_refuses_is_a_device_error_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = cu_driver.install(monkeypatch)
    driver.failure = cu_driver.CUresult.CUDA_ERROR_INVALID_VALUE
    shape = replace(SHAPE)
    with pytest.raises(
        DeviceError, match=r"no tensor map \(CUDA_ERROR_INVALID_VALUE\) of .*\(72, 100, 5\).*at address 0x1000"
    ):
        shape.at(4096)
    driver.failure = cu_driver.CUresult.CUDA_SUCCESS
    assert shape.at(4096) is shape.at(4096)


def test_missing_bindings_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_map.available.cache_clear()
    try:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with pytest.warns(UserWarning, match="cuda-bindings is not installed: .* same bits; pip install"):
            assert not tensor_map.available()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not tensor_map.available()
        tensor_map.available.cache_clear()
        cu_driver.install(monkeypatch)
        assert tensor_map.available()
    finally:
        tensor_map.available.cache_clear()


def test_no_package_called_cuda_is_missing_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    tensor_map.available.cache_clear()
    monkeypatch.setattr(tensor_map.importlib.util, "find_spec", find_spec)
    try:
        with pytest.warns(UserWarning, match="cuda-bindings is not installed"):
            assert not tensor_map.available()
    finally:
        tensor_map.available.cache_clear()


def test_the_real_bindings_have_what_is_used() -> None:
    """Without a driver they still have the names, types and enumerations."""
    from cuda.bindings import driver

    assert driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 != 0
    assert driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B.name.endswith("128B")
    assert not driver.CUresult.CUDA_SUCCESS
    assert driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert int(driver.cuuint64_t(2**40)) == 2**40
    assert driver.CUtensorMap().getPtr() != 0
