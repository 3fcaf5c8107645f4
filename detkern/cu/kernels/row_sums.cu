// Sums of rows (docs/contracts.md, aligned sum): sum, mean and mean of squares, of rows that are short, that lie side
// by side, or that are so few and so long that many CTAs work on each. rows.cu computes the same bits for all other
// rows.
//
// A thread has pieces of neighbouring elements: of one row (ALONG), or one element of each of neighbouring rows. R x C
// threads of a CTA have R pieces side by side and C pieces of each row at a time, and what they found is combined over
// C: the largest terms first, then the terms as integers. HELD: a row's elements stay in registers between the two.
// Many CTAs a row: a first launch (PHASE LARGEST) leaves the largest terms of each part of a row in scratch memory, a
// second one (TOTALS) the sums of the parts, a third one (FINISH) adds them. Largest numbers and integers are combined
// in any order, so no part, tile or grid changes a bit.
//
// Macros   SQUARES (0; 1: the terms are squares), OPERAND (F32 1, F16 2, BF16 3), ALONG (0, 1), PIECE (elements of a
//          load: 16 bytes, or 1), R, C (powers of two, R * C a multiple of 32), PIECES (loads in flight), HELD (0, 1),
//          PHASE (WHOLE 0, LARGEST 1, TOTALS 2, FINISH 3).
// Launch   R * C threads. Grid (tiles * parts, 1, 1): a tile is R pieces of rows, the parts of a tile lie side by side;
//          WHOLE has one part, and any grid up to the number of tiles. FINISH: a warp a row.
// Memory   static shared memory, 33 KiB at most. Scratch where parts > 1: 16 bytes for each part of a row.
// Loads    PIECE > 1: pieces begin at multiples of 16 bytes: the data, and all strides but the one along a piece, which
//          is 1. A piece that reaches beyond the rows or columns is read by elements.
// Columns  HELD: at most C * PIECES pieces of a row. A part of a row, and a row of WHOLE, has at most 2^18: the sum of
//          its terms stays within 64 bits.
#include "parts/aligned_sum.cuh"
#include "parts/elements.cuh"
#include "parts/team.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"

enum Phase { WHOLE = 0, LARGEST = 1, TOTALS = 2, FINISH = 3 };
constexpr int MAX_SUM_RANK = 62;  // as DETKERN_MAX_SUM_RANK in abi/abi.h

// cu/row_sums.py packs the same fields in the same order; strides are in elements, of any sign.
struct RowSumParams {
  const void* a;
  const void* unused;
  void* out;
  int64_t rows;  // of all batch indices together
  int64_t m, n;  // rows of one batch index; columns
  int64_t a_row_stride, a_col_stride, out_row_stride;
  int64_t parts, part_columns;  // of a row
  int32_t out_dtype;            // F32, F16 or BF16
  int32_t mean;                 // 1: the sum is divided by n
  int32_t batch_rank, padding;
  int64_t batch_shape[MAX_SUM_RANK];
  int64_t a_batch_strides[MAX_SUM_RANK];
  int64_t out_batch_strides[MAX_SUM_RANK];
  void* scratch;
};

constexpr int SIZE = OPERAND == F32 ? 4 : 2;
constexpr int WORDS = PIECE * SIZE > 4 ? PIECE * SIZE / 4 : 1;  // of a piece
constexpr int THREADS = R * C;
constexpr int ROWS_EACH = ALONG ? 1 : PIECE;     // rows of a thread
constexpr int COLUMNS_EACH = ALONG ? PIECE : 1;  // columns of a piece
constexpr int ROWS = R * ROWS_EACH;              // of a tile
constexpr int STEP = C * COLUMNS_EACH;           // columns from a thread's piece to its next
constexpr int SLAB = STEP * PIECES;              // columns of a tile at one time
constexpr int LANES = ALONG ? (C < 32 ? C : 32) : (R < 32 ? 32 / R : 1);  // of a warp, that have parts of one row
constexpr int CROSS = C / LANES;                                           // warps that have parts of one row
static_assert(PIECE == 1 || PIECE * SIZE == 16, "a load is 16 bytes or an element");
static_assert(THREADS % 32 == 0 && ROWS <= THREADS * ROWS_EACH && C % LANES == 0, "whole warps");

using Element = StorageOf<OPERAND>::type;

struct Shared {
  Extent extents[CROSS * ROWS > THREADS ? CROSS * ROWS : THREADS];
  Sum totals[CROSS > 1 ? CROSS * ROWS : 1];
};

// Where neighbouring rows begin, in elements, and how many of a piece's there are.
struct Place {
  int64_t a, out, row;
  int rows;

  // piece: of rows; no rows where it is beyond the last.
  DETKERN_INLINE Place(const RowSumParams& p, int64_t piece) {
    const int64_t in_one = (p.m + ROWS_EACH - 1) / ROWS_EACH;
    int64_t outer = p.batch_rank == 0 ? 0 : quotient(piece, in_one);
    const int64_t inner = (piece - outer * in_one) * ROWS_EACH;
    row = outer * p.m + inner;
    const int64_t left = row < p.rows ? p.m - inner : 0;
    rows = left > ROWS_EACH ? ROWS_EACH : left < 0 ? 0 : static_cast<int>(left);
    a = inner * p.a_row_stride;
    out = inner * p.out_row_stride;
#pragma unroll 1
    for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
      const int64_t next = quotient(outer, p.batch_shape[axis]);
      const int64_t index = outer - next * p.batch_shape[axis];
      a += index * p.a_batch_strides[axis];
      out += index * p.out_batch_strides[axis];
      outer = next;
    }
  }
};

// A thread's pieces as they lie in memory, zeros where there is nothing.
struct Pieces {
  uint32_t words[PIECES][WORDS];

  // first, end: columns of this thread's first piece and of the part's end.
  DETKERN_INLINE void load(const RowSumParams& p, const Place& place, int64_t first, int64_t end) {
    const Element* source = static_cast<const Element*>(p.a) + place.a + first * p.a_col_stride;
    const int64_t step = STEP * p.a_col_stride;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int64_t left = end - (first + i * STEP);
      const bool whole = place.rows == ROWS_EACH && left >= COLUMNS_EACH;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) words[i][w] = 0;
      load_piece(whole, source + i * step, words[i]);
      if (PIECE > 1 && !whole && place.rows > 0 && left > 0) {
        const int64_t apart = ALONG ? p.a_col_stride : p.a_row_stride;
#pragma unroll
        for (int j = 0; j < PIECE; ++j) {
          if (ALONG ? j < left : j < place.rows) {
            words[i][j * SIZE / 4] |= static_cast<uint32_t>(source[i * step + j * apart]) << j * SIZE % 4 * 8;
          }
        }
      }
    }
  }

  DETKERN_INLINE float term(int i, int j) const {
    float value;
    if constexpr (OPERAND == F32) {
      value = __uint_as_float(words[i][j]);
    } else {
      value = j % 2 == 0 ? upcast_low<OPERAND>(words[i][j / 2]) : upcast_high<OPERAND>(words[i][j / 2]);
    }
    return SQUARES ? __fmul_rn(value, value) : value;
  }

  // visit(row, term) for all of them.
  template <class Visit>
  DETKERN_INLINE void for_each(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
      for (int j = 0; j < PIECE; ++j) visit(ALONG ? 0 : j, term(i, j));
    }
  }
};

// What a row's largest terms say of the unit of its sum.
struct Unit {
  int exponent;
  bool finite;

  DETKERN_INLINE explicit Unit(const Extent& extent) {
    const float top = larger(extent.most, extent.least);
    finite = top < __int_as_float(0x7f800000);
    const int biased = finite ? __float_as_int(top) >> 23 : 0;
    exponent = (biased > 0 ? biased : 1) - 127;
  }

  // A term in this unit, truncated.
  DETKERN_INLINE int64_t of(float term) const {
    const int places = FRACTION_BITS - exponent, first = places < 127 ? places : 127;
    return __float2ll_rz(__fmul_rn(__fmul_rn(term, power(first)), power(places - first)));
  }

  template <class Total>
  DETKERN_INLINE float sum(const Total& total, const Extent& extent) const {
    return finite ? rounded(total, exponent) : __fadd_rn(extent.most, -extent.least);
  }
};

class Tile {
 public:
  DETKERN_INLINE Tile(const RowSumParams& p, Shared& shared, int64_t tile, int64_t part)
      : p_(p),
        shared_(shared),
        tile_(tile),
        along_(ALONG ? threadIdx.x % C : threadIdx.x / R),
        across_(ALONG ? threadIdx.x / C : threadIdx.x % R),
        place_(p, tile * R + across_),
        begin_(part * p.part_columns),
        end_(place_.rows == 0 ? begin_ : min(p.n, begin_ + p.part_columns)) {}

  DETKERN_INLINE void hold() {
    if constexpr (HELD) load(0);
  }

  // Of a thread's rows, in this tile's part.
  DETKERN_INLINE void find_extents() {
#pragma unroll
    for (int j = 0; j < ROWS_EACH; ++j) extents_[j] = {0.0f, 0.0f};
    for_each_slab([&] {
      pieces_.for_each([&](int row, float term) {
        extents_[row].most = larger(extents_[row].most, term);
        if constexpr (!SQUARES) extents_[row].least = larger(extents_[row].least, -term);
      });
    });
    combine_over_lanes(extents_);
    if constexpr (CROSS > 1) {
      combine_over_warps(extents_, shared_.extents);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < ROWS_EACH; ++j) extents_[j] = shared_.extents[across_ * ROWS_EACH + j];
    }
  }

  // Of a thread's rows; behind find_extents, or with the extents that all parts have left in scratch memory. CROSS > 1:
  // the first ROWS threads have that of a row each.
  DETKERN_INLINE void add() {
#pragma unroll
    for (int j = 0; j < ROWS_EACH; ++j) totals_[j] = {0};
    for_each_slab([&] {
      pieces_.for_each([&](int row, float term) { totals_[row].value += Unit(extents_[row]).of(term); });
    });
    combine_over_lanes(totals_);
    if constexpr (CROSS > 1) combine_over_warps(totals_, shared_.totals);
  }

  // Of all parts.
  DETKERN_INLINE void fetch_extents() {
    const Extent* const all = static_cast<const Extent*>(p_.scratch);
    constexpr int GROUPS = THREADS / ROWS < 1 ? 1 : THREADS / ROWS;
    if constexpr (ROWS <= THREADS) {
      const int own = threadIdx.x % ROWS;
      const Place place(p_, tile_ * R + own / ROWS_EACH);
      Extent extent{0.0f, 0.0f};
      if (own % ROWS_EACH < place.rows) {
        for (int64_t part = threadIdx.x / ROWS; part < p_.parts; part += GROUPS) {
          extent.combine(all[part * p_.rows + place.row + own % ROWS_EACH]);
        }
      }
      shared_.extents[threadIdx.x] = extent;
      __syncthreads();
#pragma unroll
      for (int j = 0; j < ROWS_EACH; ++j) {
        extents_[j] = {0.0f, 0.0f};
#pragma unroll 4
        for (int group = 0; group < GROUPS; ++group) {
          extents_[j].combine(shared_.extents[group * ROWS + across_ * ROWS_EACH + j]);
        }
      }
    }
  }

  DETKERN_INLINE void leave_extents() const {
    for_each_own([&](int row, const Place& place, int j) {
      static_cast<Extent*>(p_.scratch)[part() * p_.rows + place.row + j] =
          CROSS > 1 ? shared_.extents[row] : extents_[j];
    });
  }

  DETKERN_INLINE void leave_totals() const {
    Sum* const sums = static_cast<Sum*>(p_.scratch) + p_.parts * p_.rows;
    for_each_own([&](int row, const Place& place, int j) {
      sums[part() * p_.rows + place.row + j] = CROSS > 1 ? shared_.totals[row] : totals_[j];
    });
  }

  DETKERN_INLINE void finish() const {
    if (CROSS == 1 && ROWS_EACH > 1 && along_ == 0 && finish_together<ROWS_EACH < 2 ? 2 : ROWS_EACH>()) return;
    for_each_own([&](int row, const Place& place, int j) {
      const Extent extent = CROSS > 1 ? shared_.extents[row] : extents_[j];
      const Sum total = CROSS > 1 ? shared_.totals[row] : totals_[j];
      store_any(p_.out, place.out + j * p_.out_row_stride, p_.out_dtype, result(Unit(extent).sum(total, extent)));
    });
  }

 private:
  DETKERN_INLINE int64_t part() const { return begin_ / p_.part_columns; }

  DETKERN_INLINE float result(float sum) const { return p_.mean ? __fdiv_rn(sum, __ll2float_rn(p_.n)) : sum; }

  DETKERN_INLINE void load(int64_t slab) {
    pieces_.load(p_, place_, begin_ + slab * SLAB + along_ * COLUMNS_EACH, end_);
  }

  template <class Visit>
  DETKERN_INLINE void for_each_slab(const Visit& visit) {
    if constexpr (HELD) {
      visit();
    } else {
      const int64_t slabs = (end_ - begin_ + SLAB - 1) / SLAB;
#pragma unroll 1
      for (int64_t slab = 0; slab < slabs; ++slab) {
        load(slab);
        visit();
      }
    }
  }

  // visit(row of the tile, its place, row of the place) for the rows whose results this thread has.
  template <class Visit>
  DETKERN_INLINE void for_each_own(const Visit& visit) const {
    if constexpr (CROSS > 1) {
      for (int row = threadIdx.x; row < ROWS; row += THREADS) {
        const Place place(p_, tile_ * R + row / ROWS_EACH);
        if (row % ROWS_EACH < place.rows) visit(row, place, row % ROWS_EACH);
      }
    } else if (along_ == 0) {
#pragma unroll
      for (int j = 0; j < ROWS_EACH; ++j) {
        if (j < place_.rows) visit(0, place_, j);
      }
    }
  }

  // A piece of results by 16 or 32 bytes, where they lie so.
  template <int COUNT>
  DETKERN_INLINE bool finish_together() const {
    const int size = p_.out_dtype == F32 ? 4 : 2;
    const uint64_t address = reinterpret_cast<uint64_t>(p_.out) + place_.out * size;
    if (place_.rows < COUNT || p_.out_row_stride != 1 || address % 16 != 0 || COUNT * size < 16) return false;
    float values[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const Extent extent = extents_[j % ROWS_EACH];
      values[j] = __fadd_rn(result(Unit(extent).sum(totals_[j % ROWS_EACH], extent)), 0.0f);
    }
    if (p_.out_dtype == F32) {
#pragma unroll
      for (int j = 0; j < COUNT; j += 4) {
        reinterpret_cast<float4*>(address)[j / 4] = make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
      }
      return true;
    }
    uint32_t pairs[COUNT / 2];
#pragma unroll
    for (int j = 0; j < COUNT; j += 2) {
      pairs[j / 2] = p_.out_dtype == F16 ? round_pair<F16>(values[j], values[j + 1])
                                         : round_pair<BF16>(values[j], values[j + 1]);
    }
#pragma unroll
    for (int w = 0; w + 4 <= COUNT / 2; w += 4) {
      reinterpret_cast<uint4*>(address)[w / 4] = make_uint4(pairs[w], pairs[w + 1], pairs[w + 2], pairs[w + 3]);
    }
    return true;
  }

  template <class T>
  static DETKERN_INLINE void combine_over_lanes(T (&values)[ROWS_EACH]) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
#pragma unroll
      for (int j = 0; j < ROWS_EACH; ++j) values[j].combine(shuffled(values[j], ALONG ? mask : mask * R));
    }
  }

  // Leaves those of the tile's rows in the first ROWS of `room`. Threads that need others than they wrote wait first.
  template <class T>
  DETKERN_INLINE void combine_over_warps(const T (&values)[ROWS_EACH], T* room) {
    __syncthreads();  // of an earlier tile nobody reads any more
    if (along_ % LANES == 0) {
#pragma unroll
      for (int j = 0; j < ROWS_EACH; ++j) room[along_ / LANES * ROWS + across_ * ROWS_EACH + j] = values[j];
    }
    __syncthreads();
    for (int row = threadIdx.x; row < ROWS; row += THREADS) {
      T value = room[row];
#pragma unroll 4
      for (int warp = 1; warp < CROSS; ++warp) value.combine(room[warp * ROWS + row]);
      room[row] = value;
    }
  }

  const RowSumParams& p_;
  Shared& shared_;
  const int64_t tile_;
  const int along_, across_;
  const Place place_;
  const int64_t begin_, end_;
  Pieces pieces_;
  Extent extents_[ROWS_EACH];
  Sum totals_[ROWS_EACH];
};

// One row, by a warp: what its parts have left.
DETKERN_INLINE void finish_row(const RowSumParams& p, int64_t row) {
  const int lane = threadIdx.x % 32;
  const Extent* const extents = static_cast<const Extent*>(p.scratch);
  const Sum* const sums = static_cast<const Sum*>(p.scratch) + p.parts * p.rows;
  Extent extent{0.0f, 0.0f};
  WideSum total{0, 0};
  for (int64_t part = lane; part < p.parts; part += 32) {
    extent.combine(extents[part * p.rows + row]);
    total.add(sums[part * p.rows + row].value);
  }
  combine_lanes<32>(extent);
  combine_lanes<32>(total);
  if (lane != 0) return;
  int64_t outer = p.batch_rank == 0 ? 0 : quotient(row, p.m);
  int64_t out = (row - outer * p.m) * p.out_row_stride;
  for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
    const int64_t next = quotient(outer, p.batch_shape[axis]);
    out += (outer - next * p.batch_shape[axis]) * p.out_batch_strides[axis];
    outer = next;
  }
  const float sum = Unit(extent).sum(total, extent);
  store_any(p.out, out, p.out_dtype, p.mean ? __fdiv_rn(sum, __ll2float_rn(p.n)) : sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) detkern_kernel(const __grid_constant__ RowSumParams p) {
  if constexpr (PHASE == FINISH) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (row < p.rows) finish_row(p, row);
  } else {
    __shared__ __align__(16) Shared shared;
    if constexpr (PHASE == WHOLE) {
      const int64_t in_one = (p.m + ROWS_EACH - 1) / ROWS_EACH;
      const int64_t tiles = (p.rows / p.m * in_one + R - 1) / R;
      for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
        Tile tile(p, shared, number, 0);
        tile.hold();
        tile.find_extents();
        tile.add();
        if (CROSS > 1) __syncthreads();
        tile.finish();
      }
    } else {
      const uint32_t parts = static_cast<uint32_t>(p.parts);
      Tile tile(p, shared, blockIdx.x / parts, blockIdx.x % parts);
      if constexpr (PHASE == LARGEST) {
        tile.find_extents();
        tile.leave_extents();
      } else {
        tile.fetch_extents();
        tile.add();
        if (CROSS > 1) __syncthreads();
        tile.leave_totals();
      }
    }
  }
}
