"""How TMA sees an operand: the shape of its tensor map, and the maps themselves, which hold a pointer.

A map has four dimensions: along the operand's contiguous lines, across them, from box to box along the lines, and the
batch. Of a batch of two dimensions the inner one is the third, and lines are not cut; of three, two have to be one
(`folded`). Boxes are 64 elements wide, a row of the 128-byte swizzle (CUDA driver API, cuTensorMapEncodeTiled, gives
the limits). Lines of whole boxes are cut into these, so that one copy takes all the boxes of a stage; others are not,
their third dimension is 1, and what a box has beyond a line's end is zeros.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

from ..dispatch.requirements import install
from ..errors import DeviceError
from ..operations.gemm.problem import GemmProblem
from ..operations.matrix import Matrix
from ..vocabulary.dtypes import BF16, F16, F32, DType

__all__ = [
    "BOX_WIDTH",
    "SIZE_LIMIT",
    "Folded",
    "MapShape",
    "available",
    "bindings",
    "folded",
    "map_shapes",
    "out_quads",
    "output_map_shape",
]

BOX_WIDTH = 64
SIZE_LIMIT = 2**31 - 1  # of a dimension: coordinates are 32-bit integers
_STRIDE_LIMIT = 2**40  # bytes
_MAPS = 256  # kept of one shape at most, a map 128 bytes


@functools.cache
def available() -> bool:
    """Whether tensor maps can be made here: cuda-bindings makes and launches with them.
    Says once what it would bring."""
    try:
        found = importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # no package called cuda at all
        found = False
    if not found:
        warnings.warn(
            "cuda-bindings is not installed: mma16 and tree-mma16 run on general kernels, slower and with the same "
            "bits; "
            f"{install('cuda13', 'cuda12')}",
            stacklevel=2,
        )
    return found


# Not frozen: two are made for each number of rows. Nobody changes one.
@dataclass(slots=True)
class MapShape:
    """A tensor map but for its pointer. sizes: in elements, contiguous dimension first; strides: in bytes, of the other
    two; rows: of a box; boxes: how many beside one another one copy takes, where lines are cut into boxes (`whole`);
    inner: size and stride of a second batch dimension, inside of the one in `sizes`; width: of a box, along the lines.
    """

    dtype: DType
    sizes: tuple[int, int, int]
    strides: tuple[int, int]
    rows: int
    boxes: int | None = None
    inner: tuple[int, int] | None = None
    width: int = BOX_WIDTH
    _maps: dict[int, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def whole(self) -> bool:
        """Whether lines are of whole boxes, and may be cut into them."""
        return self.sizes[0] % BOX_WIDTH == 0 and self.inner is None

    def with_lines(self, across: int, rows: int | None = None) -> MapShape:
        """The map of another number of lines; with `rows`, of boxes of so many of them, one at a time."""
        (along, _, batch), boxes = self.sizes, self.boxes
        if rows is None:
            rows = self.rows
        else:
            boxes = None
        return MapShape(self.dtype, (along, across, batch), self.strides, rows, boxes, self.inner, self.width)

    def dimensions(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(sizes, strides but for the first, sizes of a box) of the map's four dimensions."""
        (along, across, batch), (stride, batch_stride) = self.sizes, self.strides
        if self.boxes is None:
            inner, inner_stride = self.inner or (1, stride)
            return (along, across, inner, batch), (stride, inner_stride, batch_stride), (self.width, self.rows, 1, 1)
        return (
            (BOX_WIDTH, across, along // BOX_WIDTH, batch),
            (stride, BOX_WIDTH * self.dtype.itemsize, batch_stride),
            (BOX_WIDTH, self.rows, self.boxes, 1),
        )

    def at(self, pointer: int) -> Any:
        """The map of an operand at that address, which must be a multiple of 16 (a cuda-bindings CUtensorMap)."""
        found = self._maps.get(pointer)
        if found is None:
            found = self._encode(pointer)
            if len(self._maps) >= _MAPS:
                self._maps.clear()
            self._maps[pointer] = found
        return found

    def _encode(self, pointer: int) -> Any:
        driver = bindings()
        sizes, strides, box = self.dimensions()
        kind, stride_words, box_words, steps, how = _constants(driver, self.dtype.code, strides, box)
        error, found = driver.cuTensorMapEncodeTiled(
            kind, len(sizes), pointer, [*map(driver.cuuint64_t, sizes)], stride_words, box_words, steps, *how
        )
        if error:
            raise DeviceError(f"the driver made no tensor map ({error.name}) of {self} at address {pointer:#x}")
        return found


@functools.cache
def bindings() -> Any:
    """cuda.bindings.driver, which is there where tensor maps are `available`."""
    from cuda.bindings import driver

    return driver


# What differs with the number of lines is in none of these.
@functools.lru_cache(maxsize=1024)
def _constants(driver: Any, code: int, strides: tuple[int, ...], box: tuple[int, ...]) -> tuple[Any, ...]:
    """The type, the strides, the sizes of a box, the steps, and the last arguments of cuTensorMapEncodeTiled, as the
    bindings want them. code: of the type."""
    kinds = driver.CUtensorMapDataType
    kind = {
        F16.code: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        BF16.code: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[code]
    how = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        # With 256 bytes weights that are read once came 4 to 7 % slower from memory.
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    words, short = [*map(driver.cuuint64_t, strides)], driver.cuuint32_t
    return kind, words, [*map(short, box)], [short(1)] * len(box), how


def _shape(
    matrix: Matrix, batch: tuple[int, ...], mn: int, mn_stride: int, k: int, k_stride: int, k_major: bool
) -> MapShape | None:
    """The map of an operand whose lines are along k (k_major) or along m or n; None where TMA cannot describe it. The
    strides are known to be of whole 16 bytes."""
    size = matrix.dtype.itemsize
    along, across, stride = (k, mn, mn_stride) if k_major else (mn, k, k_stride)
    whole = -(-along * size // 16) * 16
    if across == 1:
        stride = whole // size  # never used
    if stride * size < along * size or any(batch_stride < 0 for batch_stride in matrix.batch_strides):
        return None  # lines that overlap, run backwards or are all the same
    # Where it is broadcast the kernel stays at coordinate 0.
    outer, *rest = [
        (count, batch_stride * size) if batch_stride else (1, whole)
        for count, batch_stride in zip(batch, matrix.batch_strides, strict=True)
    ] or [(1, whole)]
    inner = rest[0] if rest else None
    strides = (stride * size, outer[1])
    sizes = (along, across, outer[0])
    if max(*sizes, rest[0][0] if rest else 1) > SIZE_LIMIT or max(*strides, rest[0][1] if rest else 0) >= _STRIDE_LIMIT:
        return None
    return MapShape(matrix.dtype, sizes, strides, 0, inner=inner)


@dataclass(frozen=True, slots=True)
class Folded:
    """A problem with a batch of at most two dimensions. shared: how many indices of the second one have one matrix of
    a, and of b, whose strides there are from one such matrix to the next."""

    problem: GemmProblem
    shared: tuple[int, int]

    @property
    def batches(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The batch of a and that of b, of as many matrices as there are."""
        a, b = (
            tuple(size // (shared if axis == 1 else 1) for axis, size in enumerate(self.problem.batch))
            for shared in self.shared
        )
        return a, b


# Of the problem in hand: the choice of a tile asks for every tile of the tables.
@functools.lru_cache(maxsize=8)
def folded(problem: GemmProblem) -> Folded | None:
    """The problem with its batch as maps have it; None where that has more than two dimensions.

    Of three the last two become one where each operand's matrices are at one distance from another, or one for all
    indices of the last: attention of [B, L, H, D] in which several heads of q share one of k.
    """
    if len(problem.batch) < 3:
        return Folded(problem, (1, 1))
    if len(problem.batch) > 3:
        return None
    outer, heads, group = problem.batch

    def fold(matrix: Matrix) -> tuple[Matrix, int] | None:
        first, second, third = matrix.batch_strides
        if second == group * third:
            return replace(matrix, batch_strides=(first, third)), 1
        return None if third else (replace(matrix, batch_strides=(first, second)), group)

    a, b, out = fold(problem.a), fold(problem.b), fold(problem.out)
    if a is None or b is None or out is None:
        return None
    whole = replace(problem, batch=(outer, heads * group), a=a[0], b=b[0], out=out[0])
    return Folded(whole, (a[1], b[1]))


@functools.lru_cache(maxsize=8)
def map_shapes(problem: GemmProblem, k_major: tuple[bool, bool]) -> tuple[MapShape, MapShape] | None:
    """The maps of a and b, boxes not chosen yet (0 rows), or None where TMA cannot describe one of them.

    k_major: whether a's and b's lines, which start at multiples of 16 bytes, are along k.
    """
    if problem.k == 0 or problem.a.dtype not in (F16, BF16) or max(problem.m, problem.n) > SIZE_LIMIT:
        return None
    mapped = folded(problem)
    if mapped is None:
        return None
    a, b, (of_a, of_b) = mapped.problem.a, mapped.problem.b, mapped.batches
    shapes = (
        _shape(a, of_a, problem.m, a.row_stride, problem.k, a.col_stride, k_major[0]),
        _shape(b, of_b, problem.n, b.col_stride, problem.k, b.row_stride, k_major[1]),
    )
    return None if shapes[0] is None or shapes[1] is None else (shapes[0], shapes[1])


@functools.lru_cache(maxsize=8)
def output_map_shape(problem: GemmProblem) -> MapShape | None:
    """The map of a 16-bit output with rows along n, box not chosen yet, or None where TMA cannot write it."""
    mapped = folded(problem)
    if mapped is None:
        return None
    problem = mapped.problem
    out = problem.out
    unit = 16 // out.dtype.itemsize
    lines = (problem.n, 0 if problem.m == 1 else out.row_stride, *out.batch_strides)
    if out.dtype not in (F16, BF16) or out.alignment < 16 or any(line % unit for line in lines):
        return None
    if out.col_stride != 1:
        return None
    return _shape(out, problem.batch, problem.n, 1, problem.m, out.row_stride, k_major=False)


def out_quads(problem: GemmProblem) -> bool:
    """Whether a binary32 output has rows that are written by 16 bytes, and only the product."""
    out = problem.out
    lines = (problem.n, 0 if problem.m == 1 else out.row_stride, *out.batch_strides)
    return (
        out.dtype == F32
        and problem.bias is None
        and out.col_stride == 1
        and out.alignment >= 16
        and not any(line % 4 for line in lines)
        and folded(problem) is not None
    )
