// The row operations of docs/contracts.md: each row's sum is one ascending binary32 chain from +0 over its columns, of x,
// fma(x, x, acc), exp(x - largest), fma(y, dy, acc) or dy; what follows is done to each element on its own; + 0 and one rounding
// at the end. f32, f16 and bf16. No row's chain is ever split, so no tile, grid or load changes a bit.
//
// A chain takes one addition's latency (4 cycles) a column whatever the device. So a warp of its own adds, one lane a row, out of
// shared memory, while the other warps load a chunk of columns ahead, coalesced, and do to each element what the chain wants of
// it. A softmax passes over its row three times: largest (columns descending), chain (ascending), results (descending), each
// beginning where the one before ended, with what is still in the cache.
//
// Macros   KIND (detkern_row_kind), OPERAND (F32 1, F16 2, BF16 3; of the operand with columns), LOAD (STRIDED 0; VECTOR 1:
//          adjacent columns in pieces of 16 bytes), ROWS.
// Tile     ROWS rows (1 to 32, a power of two); chunks of ELEMENTS / ROWS columns.
// Launch   THREADS threads, PRODUCERS of them loading. Grid (any, 1, 1): tiles are taken in turn. Where there is no chain a tile
//          is one chunk of the rows, else all of their columns.
// Memory   static shared memory, 36 KiB at most: two stages of binary32 and 60 bytes a row; no scratch.
// Loads    VECTOR wants pointers and row and batch strides at multiples of 16 bytes, column stride 1. A row may end anywhere.
#include "exponential.cuh"

enum Kind {
  SUM = 1,
  MEAN,
  MEAN_SQUARE,
  SOFTMAX,
  LOG_SOFTMAX,
  SUM_BACKWARD,
  MEAN_BACKWARD,
  MEAN_SQUARE_BACKWARD,
  SOFTMAX_BACKWARD,
  LOG_SOFTMAX_BACKWARD,
};
constexpr int VECTOR = 1;
constexpr int MAX_SUM_RANK = 62;  // as DETKERN_MAX_SUM_RANK in abi/abi.h

// cu/rows.py packs the same fields in the same order; strides are in elements, of any sign.
struct RowParams {
  const void* a;
  const void* b;
  void* out;
  int64_t rows;  // of all batch indices together
  int64_t m, n;  // rows of one batch index; columns
  int64_t a_row_stride, a_col_stride;
  int64_t b_row_stride, b_col_stride;
  int64_t out_row_stride, out_col_stride;
  int32_t a_dtype, out_dtype;  // F32, F16 or BF16
  int32_t out_vector;          // 1: out may be written in pieces, as VECTOR reads
  int32_t along_rows;          // 1: STRIDED threads run along the rows, whose stride is the smaller one
  int32_t batch_rank;
  int32_t unused;
  int64_t batch_shape[MAX_SUM_RANK];
  int64_t a_batch_strides[MAX_SUM_RANK];
  int64_t b_batch_strides[MAX_SUM_RANK];
  int64_t out_batch_strides[MAX_SUM_RANK];
};

constexpr bool REDUCES = KIND <= MEAN_SQUARE;
constexpr bool SPREADS = KIND >= SUM_BACKWARD && KIND <= MEAN_SQUARE_BACKWARD;
constexpr bool HAS_CHAIN = !SPREADS;
constexpr bool HAS_LARGEST = KIND == SOFTMAX || KIND == LOG_SOFTMAX;
constexpr bool LOADS_A = !SPREADS, LOADS_B = KIND >= MEAN_SQUARE_BACKWARD;
constexpr bool CHAINS_PRODUCTS = KIND == MEAN_SQUARE || KIND == SOFTMAX_BACKWARD;
constexpr int STAGE_ARRAYS = KIND == SOFTMAX_BACKWARD ? 2 : 1;

constexpr int PRODUCERS = 256, THREADS = PRODUCERS + 32;
// Of a chunk; fewer where a thread holds more of each, within its registers.
constexpr int ELEMENTS = (LOADS_A && LOADS_B) || LOAD != VECTOR ? 2048 : 4096;
constexpr int CHUNK = ELEMENTS / ROWS;
constexpr int SIZE = OPERAND == F32 ? 4 : 2;
constexpr int PIECE = LOAD == VECTOR ? 16 / SIZE : 1;  // adjacent columns that a thread has at once
constexpr int PIECES = ELEMENTS / PIECE / PRODUCERS;   // of a thread
constexpr int PITCH = CHUNK + 4;                       // eight lanes read 16 bytes each of neighbouring rows at once
static_assert(ROWS >= 1 && ROWS <= 32 && (ROWS & (ROWS - 1)) == 0 && CHUNK % PIECE == 0 && CHUNK % 4 == 0, "whole pieces");

constexpr int STAGE_BARRIER = 1;

template <int DTYPE>
struct Bits {
  using Type = uint16_t;
};
template <>
struct Bits<F32> {
  using Type = uint32_t;
};
using Element = Bits<OPERAND>::Type;

struct Shared {
  float stages[2][STAGE_ARRAYS][ROWS * PITCH];
  int64_t a[ROWS], b[ROWS], out[ROWS];  // offsets of the rows in elements
  float largest[ROWS], chain[ROWS], given[ROWS];
};
static_assert(sizeof(Shared::stages) >= sizeof(float) * PRODUCERS * (PIECES + 1), "partial maxima lie in the stages");

DETKERN_INLINE int64_t quotient(int64_t dividend, int64_t divisor) {
  if (((dividend | divisor) >> 32) == 0) return static_cast<uint32_t>(dividend) / static_cast<uint32_t>(divisor);
  return dividend / divisor;
}

DETKERN_INLINE float widened(uint32_t bits) {
  if constexpr (OPERAND == F32) {
    return __uint_as_float(bits);
  } else {
    return upcast<OPERAND>(bits);
  }
}

// One element of any type.
DETKERN_INLINE float load_any(const void* data, int64_t offset, int dtype) {
  if (dtype == F32) return static_cast<const float*>(data)[offset];
  const uint16_t bits = static_cast<const uint16_t*>(data)[offset];
  return dtype == F16 ? upcast<F16>(bits) : upcast<BF16>(bits);
}

// + 0, which also makes a NaN canonical, and one rounding.
DETKERN_INLINE void store_any(void* data, int64_t offset, int dtype, float value) {
  value = __fadd_rn(value, 0.0f);
  if (dtype == F32) {
    static_cast<float*>(data)[offset] = value;
  } else {
    static_cast<uint16_t*>(data)[offset] = dtype == F16 ? round_one<F16>(value) : round_one<BF16>(value);
  }
}

// The larger of two, or NaN where one is.
DETKERN_INLINE float larger(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}

// COUNT adjacent numbers, at an address that is aligned for as many at a time as there are of them.
template <int COUNT>
DETKERN_INLINE void put(const float (&values)[COUNT], float* target) {
  if constexpr (COUNT >= 4) {
#pragma unroll
    for (int j = 0; j < COUNT; j += 4)
      *reinterpret_cast<float4*>(target + j) = make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
  } else {
    *target = values[0];
  }
}

template <int DTYPE, int COUNT>
DETKERN_INLINE void put_rounded(const float (&values)[COUNT], uint16_t* target) {
  if constexpr (COUNT >= 4) {
    uint32_t pairs[COUNT / 2];
#pragma unroll
    for (int j = 0; j < COUNT; j += 2) pairs[j / 2] = round_pair<DTYPE>(values[j], values[j + 1]);
    if constexpr (COUNT == 8) {
      *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      *reinterpret_cast<uint2*>(target) = make_uint2(pairs[0], pairs[1]);
    }
  } else {
    *target = round_one<DTYPE>(values[0]);
  }
}

// Where a thread's piece `i` lies in a chunk.
struct Place {
  int row, column;
  DETKERN_INLINE Place(int i, int thread, bool along_rows) {
    const int index = i * PRODUCERS + thread;
    if (LOAD != VECTOR && along_rows) {
      row = index % ROWS;
      column = index / ROWS;
    } else {
      row = index / (CHUNK / PIECE);
      column = index % (CHUNK / PIECE) * PIECE;
    }
  }
};

// A thread's pieces of a chunk as they lie in memory; zeros past the end of a row, and in rows past the last.
struct Raw {
  static constexpr int WORDS = LOAD == VECTOR ? 4 : 1;
  uint32_t words[PIECES][WORDS];

  DETKERN_INLINE void load(const void* data, const int64_t* offsets, int64_t col_stride, int64_t first, int64_t n, int rows,
                           bool along_rows, int thread) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const Place place(i, thread, along_rows);
      const int64_t column = first + place.column;
      const bool inside = place.row < rows && column < n;
      const Element* source = static_cast<const Element*>(data) + (inside ? offsets[place.row] + column * col_stride : 0);
#pragma unroll
      for (int w = 0; w < WORDS; ++w) words[i][w] = 0;
      if constexpr (LOAD == VECTOR) {
        if (inside && column + PIECE <= n) {
          const uint4 four = *reinterpret_cast<const uint4*>(source);
          words[i][0] = four.x;
          words[i][1] = four.y;
          words[i][2] = four.z;
          words[i][3] = four.w;
        } else if (inside) {
#pragma unroll
          for (int j = 0; j < PIECE; ++j) {
            if (column + j < n) words[i][j * SIZE / 4] |= static_cast<uint32_t>(source[j]) << (j * SIZE % 4 * 8);
          }
        }
      } else {
        if (inside) words[i][0] = *source;
      }
    }
  }

  DETKERN_INLINE float value(int i, int j) const {
    if constexpr (LOAD != VECTOR) {
      return widened(words[i][0]);
    } else if constexpr (OPERAND == F32) {
      return __uint_as_float(words[i][j]);
    } else {
      return j % 2 == 0 ? upcast_low<OPERAND>(words[i][j / 2]) : upcast_high<OPERAND>(words[i][j / 2]);
    }
  }
};

class RowTile {
 public:
  DETKERN_INLINE RowTile(const RowParams& p, Shared& shared, int64_t first_row)
      : p_(p), shared_(shared), first_row_(first_row), thread_(threadIdx.x), along_rows_(p.along_rows != 0) {
    const int64_t left = p.rows - first_row;
    rows_ = left < ROWS ? static_cast<int>(left) : ROWS;
    chunks_ = (p.n + CHUNK - 1) / CHUNK;
  }

  DETKERN_INLINE bool produces() const { return thread_ < PRODUCERS; }

  // The rows' offsets, and the number of each that spreads.
  DETKERN_INLINE void begin() {
    if (thread_ < rows_) {
      const int64_t row = first_row_ + thread_;
      int64_t outer = p_.batch_rank == 0 ? 0 : quotient(row, p_.m);
      const int64_t inner = row - outer * p_.m;
      int64_t a = inner * p_.a_row_stride, b = inner * p_.b_row_stride, out = inner * p_.out_row_stride;
#pragma unroll 1
      for (int axis = p_.batch_rank - 1; axis >= 0; --axis) {
        const int64_t next = quotient(outer, p_.batch_shape[axis]);
        const int64_t index = outer - next * p_.batch_shape[axis];
        a += index * p_.a_batch_strides[axis];
        b += index * p_.b_batch_strides[axis];
        out += index * p_.out_batch_strides[axis];
        outer = next;
      }
      shared_.a[thread_] = a;
      shared_.b[thread_] = b;
      shared_.out[thread_] = out;
      if constexpr (SPREADS) {
        float given = load_any(p_.a, a, p_.a_dtype);
        if constexpr (KIND != SUM_BACKWARD) given = __fdiv_rn(given, width());
        if constexpr (KIND == MEAN_SQUARE_BACKWARD) given = __fadd_rn(given, given);
        shared_.given[thread_] = given;
      }
    }
    __syncthreads();
  }

  // Each row's largest element.
  DETKERN_INLINE void find_largest() {
    float* const partial = &shared_.stages[0][0][0];
    float* const fewer = partial + PRODUCERS * PIECES;
    constexpr int EACH = PRODUCERS * PIECES / ROWS, SHARE = PRODUCERS / ROWS;  // partial maxima, and threads, of a row
    const float lowest = __int_as_float(0xff800000);
    if (produces()) {
      float most[PIECES];
#pragma unroll
      for (int i = 0; i < PIECES; ++i) most[i] = lowest;
      Raw raw, none;
      load<true, false>(raw, none, chunks_ - 1);
      for (int64_t chunk = chunks_ - 1; chunk >= 0; --chunk) {
        Raw ahead;
        load<true, false>(ahead, none, chunk - 1);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
          const Place place(i, thread_, along_rows_);
#pragma unroll
          for (int j = 0; j < PIECE; ++j) {
            if (chunk * CHUNK + place.column + j < p_.n) most[i] = larger(most[i], raw.value(i, j));
          }
        }
        raw = ahead;
      }
#pragma unroll
      for (int i = 0; i < PIECES; ++i) partial[i * PRODUCERS + thread_] = most[i];
    }
    __syncthreads();
    const bool across = LOAD != VECTOR && along_rows_;
    if (produces()) {
      const int row = thread_ / SHARE;
      float found = lowest;
      for (int k = thread_ % SHARE; k < EACH; k += SHARE)
        found = larger(found, partial[across ? k * ROWS + row : row * EACH + k]);
      fewer[thread_] = found;
    }
    __syncthreads();
    if (thread_ < ROWS) {
      float found = lowest;
#pragma unroll 8
      for (int k = 0; k < SHARE; ++k) found = larger(found, fewer[thread_ * SHARE + k]);
      shared_.largest[thread_] = found;
    }
    __syncthreads();
  }

  // The chains: the other warps fill one stage while the adding warp empties the other.
  DETKERN_INLINE void run_chains() {
    if (produces()) {
      Raw a, b;
      load<true, STAGE_ARRAYS == 2>(a, b, 0);
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        Raw next_a, next_b;
        load<true, STAGE_ARRAYS == 2>(next_a, next_b, chunk + 1);
        fill(a, b, chunk, shared_.stages[chunk % 2]);
        __syncwarp();  // the lanes' ways parted above, and the barrier's instruction is a whole warp's
        named_barrier<THREADS>(STAGE_BARRIER);
        a = next_a;
        b = next_b;
      }
    } else {
      const int lane = thread_ - PRODUCERS;
      float acc = 0.0f;  // lanes without a row of their own repeat another's, so that the warp stays together
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        named_barrier<THREADS>(STAGE_BARRIER);
        const int64_t left = p_.n - chunk * CHUNK;
        acc = add(acc, shared_.stages[chunk % 2], lane % ROWS, left < CHUNK ? static_cast<int>(left) : CHUNK);
      }
      if (lane < rows_) {
        if constexpr (KIND == MEAN || KIND == MEAN_SQUARE) acc = __fdiv_rn(acc, width());
        if constexpr (KIND == LOG_SOFTMAX) acc = logarithm(acc);
        if constexpr (REDUCES) {
          store_any(p_.out, shared_.out[lane], p_.out_dtype, acc);
        } else {
          shared_.chain[lane] = acc;
        }
      }
    }
    __syncthreads();
  }

  // The results of chunks [first, last), the last one first.
  DETKERN_INLINE void write(int64_t first, int64_t last) {
    if (!produces()) return;
    Raw a, b;
    load<LOADS_A, LOADS_B>(a, b, last - 1);
    for (int64_t chunk = last - 1; chunk >= first; --chunk) {
      Raw next_a, next_b;
      load<LOADS_A, LOADS_B>(next_a, next_b, chunk > first ? chunk - 1 : -1);
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const Place place(i, thread_, along_rows_);
        if (place.row < rows_) {
          float results[PIECE];
#pragma unroll
          for (int j = 0; j < PIECE; ++j)
            results[j] = result(place.row, LOADS_A ? a.value(i, j) : 0.0f, LOADS_B ? b.value(i, j) : 0.0f);
          store(results, place.row, chunk * CHUNK + place.column);
        }
      }
      a = next_a;
      b = next_b;
    }
  }

  DETKERN_INLINE int64_t chunks() const { return chunks_; }

 private:
  DETKERN_INLINE float width() const { return __ll2float_rn(p_.n); }

  // A chunk of the operands with columns; of a chunk before the first, or past the last, nothing.
  template <bool WITH_A, bool WITH_B>
  DETKERN_INLINE void load(Raw& a, Raw& b, int64_t chunk) const {
    const int64_t end = chunk < 0 ? 0 : p_.n;
    if constexpr (WITH_A) a.load(p_.a, shared_.a, p_.a_col_stride, chunk * CHUNK, end, rows_, along_rows_, thread_);
    if constexpr (WITH_B) b.load(p_.b, shared_.b, p_.b_col_stride, chunk * CHUNK, end, rows_, along_rows_, thread_);
  }

  // What the chain adds: +0 past the end of a row, which changes no chain.
  DETKERN_INLINE void fill(const Raw& a, const Raw& b, int64_t chunk, float (&stage)[STAGE_ARRAYS][ROWS * PITCH]) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const Place place(i, thread_, along_rows_);
      float values[PIECE];
#pragma unroll
      for (int j = 0; j < PIECE; ++j) {
        values[j] = a.value(i, j);
        if constexpr (HAS_LARGEST) {
          const bool inside = place.row < rows_ && chunk * CHUNK + place.column + j < p_.n;
          values[j] = inside ? exponential(__fadd_rn(values[j], -shared_.largest[place.row])) : 0.0f;
        }
      }
      put(values, &stage[0][place.row * PITCH + place.column]);
      if constexpr (STAGE_ARRAYS == 2) {
#pragma unroll
        for (int j = 0; j < PIECE; ++j) values[j] = b.value(i, j);
        put(values, &stage[STAGE_ARRAYS - 1][place.row * PITCH + place.column]);
      }
    }
  }

  // `count` columns of a row, in order; up to three zeros behind them change nothing.
  static DETKERN_INLINE float add(float acc, const float (&stage)[STAGE_ARRAYS][ROWS * PITCH], int row, int count) {
    const float4* const x = reinterpret_cast<const float4*>(&stage[0][row * PITCH]);
    const float4* const y = reinterpret_cast<const float4*>(&stage[STAGE_ARRAYS - 1][row * PITCH]);
    const int fours = (count + 3) / 4;
#pragma unroll 8
    for (int k = 0; k < fours; ++k) {
      const float4 v = x[k];
      if constexpr (CHAINS_PRODUCTS) {
        const float4 w = STAGE_ARRAYS == 2 ? y[k] : v;
        acc = __fmaf_rn(v.x, w.x, acc);
        acc = __fmaf_rn(v.y, w.y, acc);
        acc = __fmaf_rn(v.z, w.z, acc);
        acc = __fmaf_rn(v.w, w.w, acc);
      } else {
        acc = __fadd_rn(acc, v.x);
        acc = __fadd_rn(acc, v.y);
        acc = __fadd_rn(acc, v.z);
        acc = __fadd_rn(acc, v.w);
      }
    }
    return acc;
  }

  DETKERN_INLINE float result(int row, float a, float b) const {
    if constexpr (KIND == SOFTMAX)
      return __fdiv_rn(exponential(__fadd_rn(a, -shared_.largest[row])), shared_.chain[row]);
    if constexpr (KIND == LOG_SOFTMAX) return __fadd_rn(__fadd_rn(a, -shared_.largest[row]), -shared_.chain[row]);
    if constexpr (KIND == SUM_BACKWARD || KIND == MEAN_BACKWARD) return shared_.given[row];
    if constexpr (KIND == MEAN_SQUARE_BACKWARD) return __fmul_rn(shared_.given[row], b);
    if constexpr (KIND == SOFTMAX_BACKWARD) return __fmul_rn(b, __fadd_rn(a, -shared_.chain[row]));
    return __fmaf_rn(-exponential(b), shared_.chain[row], a);
  }

  DETKERN_INLINE void store(const float (&results)[PIECE], int row, int64_t column) const {
    const int64_t offset = shared_.out[row] + column * p_.out_col_stride;
    if constexpr (PIECE >= 4) {
      if (p_.out_vector && column + PIECE <= p_.n) {
        float sums[PIECE];  // + 0, as in store_any
#pragma unroll
        for (int j = 0; j < PIECE; ++j) sums[j] = __fadd_rn(results[j], 0.0f);
        if (p_.out_dtype == F32) {
          put(sums, static_cast<float*>(p_.out) + offset);
        } else {
          uint16_t* const target = static_cast<uint16_t*>(p_.out) + offset;
          if (p_.out_dtype == F16) {
            put_rounded<F16>(sums, target);
          } else {
            put_rounded<BF16>(sums, target);
          }
        }
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < PIECE; ++j) {
      if (column + j < p_.n) store_any(p_.out, offset + j * p_.out_col_stride, p_.out_dtype, results[j]);
    }
  }

  const RowParams& p_;
  Shared& shared_;
  const int64_t first_row_;
  int64_t chunks_;
  int rows_;
  const int thread_;
  const bool along_rows_;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) detkern_kernel(const __grid_constant__ RowParams p) {
  __shared__ __align__(16) Shared shared;
  const int64_t tall = (p.rows + ROWS - 1) / ROWS, wide = HAS_CHAIN ? 1 : (p.n + CHUNK - 1) / CHUNK;
  for (int64_t index = blockIdx.x; index < tall * wide; index += gridDim.x) {
    const int64_t down = HAS_CHAIN ? index : index / wide;
    RowTile tile(p, shared, down * ROWS);
    tile.begin();
    if constexpr (HAS_CHAIN) {
      if constexpr (HAS_LARGEST) tile.find_largest();
      tile.run_chains();
      if constexpr (!REDUCES) tile.write(0, tile.chunks());
    } else {
      tile.write(index - down * wide, index - down * wide + 1);
    }
    __syncthreads();  // before the next tile reuses the rows' values
  }
}
