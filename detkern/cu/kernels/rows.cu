// The row operations of docs/contracts.md: each row's sum is the aligned sum of its terms (x, x * x, exp(x - largest),
// y * dy or dy), exact in integers up to one rounding, and so the same in any order; what follows is done to each
// element on its own; + 0 and one rounding at the end. f32, f16 and bf16. No team, tile, grid or load changes a bit.
//
// A row belongs to a team of threads: a warp, a CTA or the CTAs of a cluster. Its columns are in pieces of 16 bytes at
// multiples of 16 bytes, wherever the row begins, dealt to the team's threads in turn. HELD: each thread keeps its
// pieces in registers, so that a row is read once. Else it is read for each pass: the largest terms, the sum, the
// results.
//
// Macros   KIND (detkern_row_kind), OPERAND (F32 1, F16 2, BF16 3; of the operand with columns), LOAD (STRIDED 0,
//          VECTOR 1, ACROSS 2), THREADS, ROWS, VALUES, CLUSTER, HELD.
// Tile     ROWS rows of a CTA: 1, one a warp, or (ACROSS) one a lane. VALUES columns of a thread at a time. CLUSTER
//          CTAs a row.
// Launch   THREADS threads. Grid (any multiple of CLUSTER, 1, 1): tiles are taken in turn; a tile is ROWS rows, and
//          where there is no sum, as many columns of them as the threads have at a time.
// Memory   static shared memory for the reductions, 25 KiB at most; no scratch.
// Loads    VECTOR wants column stride 1 and, of two operands, rows that begin equally far past a multiple of 16 bytes.
//          STRIDED goes element by element. ACROSS too, neighbouring lanes in neighbouring rows, where those lie closer
//          than columns.
#include "parts/aligned_sum.cuh"
#include "parts/elements.cuh"
#include "parts/exponential.cuh"
#include "parts/team.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"

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
constexpr int VECTOR = 1, ACROSS = 2;
constexpr int MAX_SUM_RANK = 62;  // as DETKERN_MAX_SUM_RANK in abi/abi.h

// rows.py packs the same fields in the same order; strides are in elements, of any sign.
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
  int32_t batch_rank;
  int32_t unused;
  int64_t batch_shape[MAX_SUM_RANK];
  int64_t a_batch_strides[MAX_SUM_RANK];
  int64_t b_batch_strides[MAX_SUM_RANK];
  int64_t out_batch_strides[MAX_SUM_RANK];
};

constexpr bool REDUCES = KIND <= MEAN_SQUARE;
constexpr bool SPREADS = KIND >= SUM_BACKWARD && KIND <= MEAN_SQUARE_BACKWARD;
constexpr bool HAS_LARGEST = KIND == SOFTMAX || KIND == LOG_SOFTMAX;
constexpr bool LOADS_A = !SPREADS, LOADS_B = KIND >= MEAN_SQUARE_BACKWARD;
constexpr bool KEEPS_EXPONENTIALS = KIND == SOFTMAX && HELD;

constexpr int SIZE = OPERAND == F32 ? 4 : 2;
constexpr int PIECE = LOAD == VECTOR ? 16 / SIZE : 1;  // adjacent columns that a thread has at once
constexpr int PIECES = VALUES / PIECE;
constexpr int WORDS = LOAD == VECTOR ? 4 : 1;  // of a piece
constexpr int WARPS = THREADS / 32;
constexpr int TEAM_WARPS = LOAD == ACROSS ? WARPS : WARPS / ROWS;
constexpr int MEMBERS = LOAD == ACROSS ? WARPS : THREADS / ROWS;  // threads of one CTA in a team
constexpr int STEP = MEMBERS * CLUSTER * PIECE;                   // columns from one piece of a thread to its next
constexpr int SLAB = STEP * PIECES;                               // columns that a team has at once
static_assert(VALUES % PIECE == 0 && (ROWS == 1 || (LOAD == ACROSS ? ROWS == 32 : ROWS == WARPS)), "teams are whole");
static_assert(CLUSTER == 1 || ROWS == 1, "a cluster has one row");

// CTAs of a multiprocessor, as far as registers go: 64 of a thread; 128 where it holds many numbers of two operands, or
// the exponentials of the most that there is room for. The compiler needs some more for other architectures than sm_90.
constexpr bool LOADS_TWO = LOADS_A && LOADS_B;
constexpr bool HOLDS_MANY =
    LOADS_TWO && HELD ? VALUES > 16 : KIND == SOFTMAX && VALUES > 32 && (OPERAND == F32 || __CUDA_ARCH__ >= 1000);
constexpr bool NEEDS_MORE = LOADS_TWO && VALUES > 8 && (__CUDA_ARCH__ >= 1000 || (HELD && __CUDA_ARCH__ < 900));
constexpr int REGISTERS = HOLDS_MANY ? NEEDS_MORE && THREADS < 512 ? 144 : 128 : NEEDS_MORE ? 80 : 64;
constexpr int RESIDENT = 65536 / (THREADS * REGISTERS);

// Beyond the end of a row: changes no sum; for a softmax, no largest element either.
constexpr uint32_t FILL = !HAS_LARGEST ? 0 : OPERAND == F32 ? 0xff800000u : OPERAND == F16 ? 0xfc00fc00u : 0xff80ff80u;

using Element = StorageOf<OPERAND>::type;

template <bool WIDE>
struct SumOf {
  using Type = Sum;
};
template <>
struct SumOf<true> {
  using Type = WideSum;
};
// A team that holds a row has at most 2^18 of its columns, so the sum is below 2^62.
using Total = SumOf<!HELD>::Type;
static_assert(!HELD || SLAB <= 1 << 18, "the sum stays within 64 bits");

template <class T>
using TeamRoom = Room<T, TEAM_WARPS, CLUSTER, LOAD == ACROSS>;

struct Shared {
  union {
    TeamRoom<Largest> largest;
    TeamRoom<Extent> extent;
  };
  TeamRoom<Total> total;
};

// PIECE numbers (4 or 8) at an address that is a multiple of 16 bytes, or of all of them where they are fewer.
DETKERN_INLINE void put(const float (&values)[PIECE], float* target) {
  if constexpr (PIECE >= 4) {
#pragma unroll
    for (int j = 0; j < PIECE; j += 4)
      *reinterpret_cast<float4*>(target + j) = make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
  }
}

template <int DTYPE>
DETKERN_INLINE void put_rounded(const float (&values)[PIECE], uint16_t* target) {
  if constexpr (PIECE >= 4) {
    uint32_t pairs[PIECE / 2];
#pragma unroll
    for (int j = 0; j < PIECE; j += 2) pairs[j / 2] = round_pair<DTYPE>(values[j], values[j + 1]);
    if constexpr (PIECE == 8) {
      *reinterpret_cast<uint4*>(target) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      *reinterpret_cast<uint2*>(target) = make_uint2(pairs[0], pairs[1]);
    }
  }
}

// Where one row lies, in elements.
struct Offsets {
  int64_t a, b, out;

  DETKERN_INLINE Offsets(const RowParams& p, int64_t row) {
    int64_t outer = p.batch_rank == 0 ? 0 : quotient(row, p.m);
    const int64_t inner = row - outer * p.m;
    a = inner * p.a_row_stride;
    b = inner * p.b_row_stride;
    out = inner * p.out_row_stride;
#pragma unroll 1
    for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
      const int64_t next = quotient(outer, p.batch_shape[axis]);
      const int64_t index = outer - next * p.batch_shape[axis];
      a += index * p.a_batch_strides[axis];
      b += index * p.b_batch_strides[axis];
      out += index * p.out_batch_strides[axis];
      outer = next;
    }
  }
};

// The columns of a thread at one time: piece i begins at first + i * STEP.
struct Span {
  int64_t first;
  int left;  // columns from `first` to the row's end, 0 at least, SLAB at most
  int lead;  // columns of piece 0 that lie before the row

  DETKERN_INLINE Span(int64_t first, int64_t n) : first(first) {
    const int64_t beyond = n - first;
    left = beyond < 0 ? 0 : beyond > SLAB ? SLAB : static_cast<int>(beyond);
    lead = PIECE > 1 && first < 0 ? static_cast<int>(-first) : 0;
  }
  DETKERN_INLINE bool some(int i) const { return i * STEP < left; }
  DETKERN_INLINE bool whole(int i) const { return i * STEP + PIECE <= left && (i > 0 || lead == 0); }
  DETKERN_INLINE bool has(int i, int j) const { return i * STEP + j < left && (i > 0 || j >= lead); }
};

// A thread's pieces as they lie in memory, FILL where there is no column.
struct Pieces {
  uint32_t words[PIECES][WORDS];

  DETKERN_INLINE void load(const void* data, int64_t row, int64_t col_stride, const Span& span) {
    const int64_t step = LOAD == VECTOR ? 1 : col_stride;
    const Element* const source = static_cast<const Element*>(data) + row + span.first * step;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) words[i][w] = FILL;
      load_piece(span.whole(i), source + i * STEP * step, words[i]);
    }
    if constexpr (LOAD == VECTOR) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        if (span.some(i) && !span.whole(i)) {
#pragma unroll
          for (int j = 0; j < PIECE; ++j) {
            constexpr uint32_t MASK = SIZE == 4 ? 0xffffffffu : 0xffffu;
            const int low = j * SIZE % 4 * 8;
            if (span.has(i, j)) {
              uint32_t& word = words[i][j * SIZE / 4];
              word = (word & ~(MASK << low)) | static_cast<uint32_t>(source[i * STEP + j]) << low;
            }
          }
        }
      }
    }
  }

  DETKERN_INLINE float value(int i, int j) const {
    if constexpr (OPERAND == F32) {
      return __uint_as_float(words[i][j]);
    } else if constexpr (LOAD != VECTOR) {
      return upcast<OPERAND>(words[i][0] & 0xffffu);
    } else {
      return j % 2 == 0 ? upcast_low<OPERAND>(words[i][j / 2]) : upcast_high<OPERAND>(words[i][j / 2]);
    }
  }
};

class Row {
 public:
  // row: beyond the last, a row without columns, for lanes that only help to reduce.
  DETKERN_INLINE Row(const RowParams& p, Shared& shared, int64_t row, bool exists)
      : p_(p), shared_(shared), at_(p, exists ? row : 0), exists_(exists) {
    member_ = LOAD == ACROSS ? threadIdx.x / 32 : threadIdx.x % MEMBERS;
    if constexpr (CLUSTER > 1) member_ += cluster_rank() * MEMBERS;
    shift_ = 0;
    if constexpr (LOAD == VECTOR) {
      const int out_size = p.out_dtype == F32 ? 4 : 2;
      const uint64_t out = reinterpret_cast<uint64_t>(p.out) + at_.out * out_size;
      uint64_t start = out / out_size;
      if constexpr (LOADS_A) start = reinterpret_cast<uint64_t>(p.a) / SIZE + at_.a;
      if constexpr (LOADS_B) start = reinterpret_cast<uint64_t>(p.b) / SIZE + at_.b;
      shift_ = start % PIECE;
      const int together = PIECE * out_size < 16 ? PIECE * out_size : 16;
      out_pieces_ = p.out_col_stride == 1 && (out - shift_ * out_size) % together == 0;
    }
  }

  DETKERN_INLINE void hold() {
    if constexpr (HELD) load(0);
  }

  DETKERN_INLINE void run() {
    float sum;
    if constexpr (HAS_LARGEST) {
      sum = exponentials();
    } else {
      sum = aligned_sum();
    }
    if constexpr (KIND == MEAN || KIND == MEAN_SQUARE) sum = __fdiv_rn(sum, width());
    if constexpr (REDUCES) {
      if (member_ == 0 && exists_) store_any(p_.out, at_.out, p_.out_dtype, sum);
    } else {
      if constexpr (KIND == LOG_SOFTMAX) sum = logarithm(sum);
      divisor_ = sum;
      if constexpr (KIND == SOFTMAX) {
        reciprocal_ = __frcp_rn(sum);
        // From here on neither the quotient nor a remainder below leaves the normal numbers.
        plain_ = sum <= 0x1p+24f ? 0x1p-96f : __int_as_float(0x7f800000);
      }
      for_each_slab([&](const Span& span) { write(span); });
    }
  }

  // Without a sum: the columns of one slab.
  DETKERN_INLINE void spread(int64_t slab) {
    divisor_ = load_any(p_.a, at_.a, p_.a_dtype);
    if constexpr (KIND != SUM_BACKWARD) divisor_ = __fdiv_rn(divisor_, width());
    if constexpr (KIND == MEAN_SQUARE_BACKWARD) divisor_ = __fadd_rn(divisor_, divisor_);
    const Span here = span(slab);
    load(slab);
    write(here);
  }

 private:
  DETKERN_INLINE float width() const { return __ll2float_rn(p_.n); }
  DETKERN_INLINE int64_t columns() const { return LOAD != ACROSS || exists_ ? p_.n : 0; }

  DETKERN_INLINE Span span(int64_t slab) const {
    return Span(slab * SLAB + static_cast<int64_t>(member_) * PIECE - shift_, columns());
  }

  DETKERN_INLINE void load(int64_t slab) {
    const Span here = span(slab);
    if constexpr (LOADS_A) a_.load(p_.a, at_.a, p_.a_col_stride, here);
    if constexpr (LOADS_B) b_.load(p_.b, at_.b, p_.b_col_stride, here);
  }

  // visit(span) with every slab of the row in a_ and b_, in turn.
  template <class Visit>
  DETKERN_INLINE void for_each_slab(const Visit& visit) {
    if constexpr (HELD) {
      visit(span(0));
    } else {
      const int64_t slabs = (columns() + shift_ + SLAB - 1) / SLAB;
#pragma unroll 1
      for (int64_t slab = 0; slab < slabs; ++slab) {
        load(slab);
        visit(span(slab));
      }
    }
  }

  // visit(i, j) for every column that the thread has, and for what fills the pieces.
  template <class Visit>
  static DETKERN_INLINE void for_each_column(const Visit& visit) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
      for (int j = 0; j < PIECE; ++j) visit(i, j);
    }
  }

  template <class T>
  DETKERN_INLINE T combined(const T& value, TeamRoom<T>& room) const {
    return combine_team<TEAM_WARPS, CLUSTER, LOAD == ACROSS>(value, room);
  }

  // What the sum adds; +0 beyond the row.
  DETKERN_INLINE float term(int i, int j) const {
    if constexpr (KIND == MEAN_SQUARE) return __fmul_rn(a_.value(i, j), a_.value(i, j));
    if constexpr (KIND == SOFTMAX_BACKWARD) return __fmul_rn(b_.value(i, j), a_.value(i, j));
    return a_.value(i, j);
  }

  // The terms in units of 2^-c, each truncated, where 2^c is scale * more; more is 1 unless TWICE.
  template <bool TWICE>
  DETKERN_INLINE Total units(float scale, float more) {
    Total total{};
    for_each_slab([&](const Span&) {
      int64_t part = 0;
      for_each_column([&](int i, int j) {
        float value = __fmul_rn(term(i, j), scale);
        if constexpr (TWICE) value = __fmul_rn(value, more);
        part += __float2ll_rz(value);
      });
      total.add(part);
    });
    return total;
  }

  DETKERN_INLINE float aligned_sum() {
    Extent extent{0.0f, 0.0f};
    for_each_slab([&](const Span&) {
      for_each_column([&](int i, int j) {
        extent.most = larger(extent.most, term(i, j));
        if constexpr (KIND != MEAN_SQUARE) extent.least = larger(extent.least, -term(i, j));
      });
    });
    extent = combined(extent, shared_.extent);
    const float top = larger(extent.most, extent.least);
    const bool finite = top < __int_as_float(0x7f800000);
    const int biased = finite ? __float_as_int(top) >> 23 : 0, exponent = (biased > 0 ? biased : 1) - 127;
    const int places = FRACTION_BITS - exponent;
    Total total;
    if (places <= 127) {
      total = units<false>(power(places), 1.0f);
    } else {
      total = units<true>(power(127), power(places - 127));
    }
    const float sum = rounded(combined(total, shared_.total), exponent);
    return finite ? sum : __fadd_rn(extent.most, -extent.least);
  }

  // largest_ and the sum of exp(x - largest_), whose exponent is 0: its largest term is 1. NaN where the largest is not
  // finite.
  DETKERN_INLINE float exponentials() {
    Largest largest{__int_as_float(0xff800000)};
    for_each_slab([&](const Span&) {
      for_each_column([&](int i, int j) { largest.value = larger(largest.value, a_.value(i, j)); });
    });
    largest_ = combined(largest, shared_.largest).value;
    Total total{};
    for_each_slab([&](const Span&) {
      int64_t part = 0;
      for_each_column([&](int i, int j) {
        const float scaled = scaled_exponential(__fadd_rn(a_.value(i, j), -largest_));
        // Truncated to multiples of 2^-43; of a number so small that its binary32 rounding differs nothing is left.
        part += __float2ll_rz(__fmul_rn(scaled, 0x1p+43f / EXP_SCALE));
        if constexpr (KEEPS_EXPONENTIALS) exponentials_[i * PIECE + j] = __fmul_rn(scaled, 1 / EXP_SCALE);
      });
      total.add(part);
    });
    const float sum = rounded(combined(total, shared_.total), 0);
    return fabsf(largest_) < __int_as_float(0x7f800000) ? sum : __int_as_float(0x7fffffff);
  }

  DETKERN_INLINE float exponential_of(int i, int j) const {
    if constexpr (KEEPS_EXPONENTIALS) return exponentials_[i * PIECE + j];
    return __fmul_rn(scaled_exponential(__fadd_rn(a_.value(i, j), -largest_)), 1 / EXP_SCALE);
  }

  // The quotients of a piece by divisor_, each rounded once: the steps of a division (Markstein 1990), whose reciprocal
  // all share. Where a remainder could be subnormal, the division itself.
  DETKERN_INLINE void divide(float (&numbers)[PIECE]) const {
    bool plain = true;
#pragma unroll
    for (int j = 0; j < PIECE; ++j) plain &= numbers[j] >= plain_ || numbers[j] == 0.0f;
    if (plain) {
#pragma unroll
      for (int j = 0; j < PIECE; ++j) {
        float q = __fmul_rn(numbers[j], reciprocal_);
        q = __fmaf_rn(__fmaf_rn(-divisor_, q, numbers[j]), reciprocal_, q);
        numbers[j] = __fmaf_rn(__fmaf_rn(-divisor_, q, numbers[j]), reciprocal_, q);
      }
    } else {
#pragma unroll 1
      for (int turn = 0; turn < PIECE; ++turn) {  // one division in the code; the numbers go round
        const float q = __fdiv_rn(numbers[0], divisor_);
#pragma unroll
        for (int j = 0; j + 1 < PIECE; ++j) numbers[j] = numbers[j + 1];
        numbers[PIECE - 1] = q;
      }
    }
  }

  DETKERN_INLINE void write(const Span& span) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      if (!span.some(i)) continue;
      float results[PIECE];
#pragma unroll
      for (int j = 0; j < PIECE; ++j) {
        if constexpr (KIND == SOFTMAX) {
          results[j] = exponential_of(i, j);
        } else if constexpr (KIND == LOG_SOFTMAX) {
          results[j] = __fadd_rn(__fadd_rn(a_.value(i, j), -largest_), -divisor_);
        } else if constexpr (KIND == MEAN_SQUARE_BACKWARD) {
          results[j] = __fmul_rn(divisor_, b_.value(i, j));
        } else if constexpr (KIND == SOFTMAX_BACKWARD) {
          results[j] = __fmul_rn(b_.value(i, j), __fadd_rn(a_.value(i, j), -divisor_));
        } else if constexpr (KIND == LOG_SOFTMAX_BACKWARD) {
          results[j] = __fmaf_rn(-exponential(b_.value(i, j)), divisor_, a_.value(i, j));
        } else {
          results[j] = divisor_;
        }
      }
      if constexpr (KIND == SOFTMAX) divide(results);
      store(results, span, i);
    }
  }

  DETKERN_INLINE void store(float (&results)[PIECE], const Span& span, int i) const {
    if constexpr (PIECE > 1) {
      if (out_pieces_ && span.whole(i)) {
        const int64_t offset = at_.out + span.first + i * STEP;
#pragma unroll
        for (int j = 0; j < PIECE; ++j) results[j] = __fadd_rn(results[j], 0.0f);  // as in store_any
        uint16_t* const halves = static_cast<uint16_t*>(p_.out) + offset;
        if (p_.out_dtype == F32) {
          put(results, static_cast<float*>(p_.out) + offset);
        } else if (p_.out_dtype == F16) {
          put_rounded<F16>(results, halves);
        } else {
          put_rounded<BF16>(results, halves);
        }
        return;
      }
    }
    // Computed anew for each piece: there is no room to keep what many share.
    const int64_t offset = at_.out + afresh(span.first + i * STEP) * p_.out_col_stride;
#pragma unroll
    for (int j = 0; j < PIECE; ++j) {
      if (span.has(i, j)) store_any(p_.out, offset + j * p_.out_col_stride, p_.out_dtype, results[j]);
    }
  }

  const RowParams& p_;
  Shared& shared_;
  const Offsets at_;
  const bool exists_;
  int member_, shift_;
  bool out_pieces_ = false;
  float largest_ = 0.0f, divisor_ = 0.0f, reciprocal_ = 0.0f, plain_ = 0.0f;
  Pieces a_, b_;
  float exponentials_[KEEPS_EXPONENTIALS ? VALUES : 1];
};

#if CLUSTER > 1
#define DETKERN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define DETKERN_CLUSTER
#endif

extern "C" __global__ void DETKERN_CLUSTER __launch_bounds__(THREADS, RESIDENT)
    detkern_kernel(const __grid_constant__ RowParams p) {
  __shared__ __align__(16) Shared shared;
  if constexpr (CLUSTER > 1) cluster_arrive();  // nobody writes into a CTA that has not begun
  const int64_t tall = (p.rows + ROWS - 1) / ROWS, wide = SPREADS ? (p.n + PIECE - 1 + SLAB - 1) / SLAB : 1;
  bool first = true;
  for (int64_t tile = blockIdx.x / CLUSTER; tile < tall * wide; tile += gridDim.x / CLUSTER) {
    const int64_t down = SPREADS ? tile / wide : tile;
    int64_t row = down * ROWS;
    if constexpr (ROWS > 1) row += LOAD == ACROSS ? threadIdx.x % 32 : threadIdx.x / 32;
    const bool exists = row < p.rows;
    if constexpr (LOAD != ACROSS) {
      if (!exists) break;  // a whole warp
    }
    Row one(p, shared, row, exists);
    if constexpr (SPREADS) {
      if (exists) one.spread(tile - down * wide);
    } else {
      one.hold();
      if constexpr (CLUSTER > 1) {
        if (first) cluster_wait();
        first = false;
      }
      one.run();
    }
  }
}
