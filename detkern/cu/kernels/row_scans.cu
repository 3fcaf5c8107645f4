// The prefix sums of docs/contracts.md: out[row, j] = the exact sum of columns 0 to j of a row, rounded once.
//
// A sum so far is an integer of 32 * WORDS bits in two's complement, in units of 2^UNIT, which holds any numbers of the
// type without loss; infinities and NaN are flags beside it. Integers are added in any order, so no team, tile, part or
// grid changes a bit.
//
// A row belongs to a team: a warp or a CTA. A thread has VALUES neighbouring columns of the team's TEAM * VALUES at a
// time. What the threads hold is summed, the sums are scanned over the team, and each thread adds its columns anew to
// what stands before them. Few long rows are cut into parts, a CTA each: a first launch (TOTALS) leaves the sum of each
// part in scratch memory, the second one (SCAN) begins a part at the sum of those before it.
//
// Macros   OPERAND (F32 1, F16 2, BF16 3), TEAM (32; 256), VALUES, PHASE (SCAN 0, TOTALS 1).
// Launch   256 threads. Grid (any, 1, 1): rows, or parts of rows, are taken in turn, 256 / TEAM of them by a CTA.
// Memory   static shared memory, 352 bytes. Scratch where parts > 1: WORDS + 1 words for each part of a row.
// Loads    element by element, any strides; a scan from the last column on is one of negative strides.
#include "parts/aligned_sum.cuh"
#include "parts/elements.cuh"
#include "ptx/numbers.cuh"

enum Phase { SCAN = 0, TOTALS = 1 };
constexpr int MAX_SUM_RANK = 62;  // as DETKERN_MAX_SUM_RANK in abi/abi.h
constexpr int THREADS = 256;
constexpr int TEAMS = THREADS / TEAM;  // of a CTA
constexpr int WARPS = TEAM / 32;       // of a team
constexpr int UNIT = OPERAND == F16 ? -24 : -149;
constexpr int WORDS = OPERAND == F16 ? 3 : 10;  // 41 or 278 bits of a number, the rest for their count

// cu/row_scans.py packs the same fields in the same order; strides are in elements, of any sign.
struct RowScanParams {
  const void* a;
  const void* unused;
  void* out;
  int64_t rows;  // of all batch indices together
  int64_t m, n;  // rows of one batch index; columns
  int64_t a_first, a_row_stride, a_col_stride;
  int64_t out_first, out_row_stride, out_col_stride;
  int64_t parts, part_columns;  // of a row
  int32_t out_dtype;            // F32, F16 or BF16
  int32_t batch_rank;
  int64_t batch_shape[MAX_SUM_RANK];
  int64_t a_batch_strides[MAX_SUM_RANK];
  int64_t out_batch_strides[MAX_SUM_RANK];
  uint32_t* scratch;
};

// One chain of carries (PTX ISA 9.7.2.1, 9.7.2.2): the flag does not outlive an asm statement.
DETKERN_INLINE void add_words(uint32_t (&a)[3], const uint32_t (&b)[3]) {
  asm("add.cc.u32 %0, %0, %3;\n\taddc.cc.u32 %1, %1, %4;\n\taddc.u32 %2, %2, %5;"
      : "+r"(a[0]), "+r"(a[1]), "+r"(a[2])
      : "r"(b[0]), "r"(b[1]), "r"(b[2]));
}

DETKERN_INLINE void add_words(uint32_t (&a)[10], const uint32_t (&b)[10]) {
  asm("add.cc.u32 %0, %0, %10;\n\taddc.cc.u32 %1, %1, %11;\n\taddc.cc.u32 %2, %2, %12;\n\taddc.cc.u32 %3, %3, %13;\n\t"
      "addc.cc.u32 %4, %4, %14;\n\taddc.cc.u32 %5, %5, %15;\n\taddc.cc.u32 %6, %6, %16;\n\taddc.cc.u32 %7, %7, %17;\n\t"
      "addc.cc.u32 %8, %8, %18;\n\taddc.u32 %9, %9, %19;"
      : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+r"(a[4]), "+r"(a[5]), "+r"(a[6]), "+r"(a[7]), "+r"(a[8]),
        "+r"(a[9])
      : "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(b[4]), "r"(b[5]), "r"(b[6]), "r"(b[7]), "r"(b[8]), "r"(b[9]));
}

constexpr uint32_t IS_NAN = 1, ABOVE = 2, BELOW = 4;  // what a row has held so far

struct Prefix {
  uint32_t words[WORDS];
  uint32_t flags;

  DETKERN_INLINE static Prefix zero() {
    Prefix made;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) made.words[i] = 0;
    made.flags = 0;
    return made;
  }

  DETKERN_INLINE void add(float term) {
    const uint32_t bits = __float_as_uint(term), exponent = bits >> 23 & 255u, fraction = bits & 0x7fffffu;
    if (exponent == 255u) {
      flags |= fraction != 0 ? IS_NAN : bits >> 31 ? BELOW : ABOVE;
      return;
    }
    const uint32_t magnitude = exponent ? fraction | 0x800000u : fraction;
    int places = static_cast<int>(exponent ? exponent : 1u) - 150 - UNIT;  // of the last bit, above UNIT
    uint64_t wide = magnitude;
    if constexpr (OPERAND == F16) {
      // What f16 has is a multiple of UNIT: below it there are zeros alone.
      wide = places < 0 ? magnitude >> (places < -31 ? 31 : -places) : magnitude;
      places = places < 0 ? 0 : places;
    }
    wide <<= places & 31;
    wide = bits >> 31 ? 0 - wide : wide;
    const uint32_t low = static_cast<uint32_t>(wide), high = static_cast<uint32_t>(wide >> 32);
    const uint32_t rest = static_cast<int64_t>(wide) < 0 ? 0xffffffffu : 0u;
    uint32_t addend[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const int from = i - (places >> 5);
      addend[i] = from < 0 ? 0u : from == 0 ? low : from == 1 ? high : rest;
    }
    add_words(words, addend);
  }

  DETKERN_INLINE void combine(const Prefix& other) {
    add_words(words, other.words);
    flags |= other.flags;
  }

  // That of another lane; zero where `wanted` is false.
  template <class Shuffle>
  DETKERN_INLINE Prefix moved(const Shuffle& shuffle, bool wanted) const {
    Prefix found;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t word = shuffle(words[i]);
      found.words[i] = wanted ? word : 0u;
    }
    const uint32_t theirs = shuffle(flags);
    found.flags = wanted ? theirs : 0u;
    return found;
  }

  DETKERN_INLINE float rounded() const {
    if (flags != 0) {
      const bool nan = flags & IS_NAN || (flags & ABOVE && flags & BELOW);
      return __uint_as_float(nan ? 0x7fffffffu : flags & BELOW ? 0xff800000u : 0x7f800000u);
    }
    const bool negative = static_cast<int32_t>(words[WORDS - 1]) < 0;
    uint32_t magnitude[WORDS], one[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      magnitude[i] = negative ? ~words[i] : words[i];
      one[i] = i == 0 && negative;
    }
    add_words(magnitude, one);
    // The two highest words; the last bit also says whether anything was left below, far below the 24 bits that are
    // kept.
    int exponent = UNIT;
    uint32_t high = magnitude[1], low = magnitude[0], below = magnitude[0];
    bool left = false;
#pragma unroll
    for (int i = 2; i < WORDS; ++i) {
      if (magnitude[i] != 0) {
        exponent = 32 * (i - 1) + UNIT;
        high = magnitude[i];
        low = magnitude[i - 1];
        left = below != 0;
      }
      below |= magnitude[i - 1];
    }
    const float significand = __ull2float_rn(static_cast<uint64_t>(high) << 32 | low | left);
    // What is below 2^-126 is a multiple of 2^-149 and has no more than 23 bits.
    const int first = exponent < -100 ? -100 : exponent;
    const float value = __fmul_rn(__fmul_rn(significand, power(first)), power(exponent - first));
    return negative ? -value : value;
  }
};

// A part of a row: where it begins in both operands, in elements, and its columns.
struct Place {
  int64_t a, out, columns;

  DETKERN_INLINE Place(const RowScanParams& p, int64_t row, int64_t part) {
    int64_t outer = quotient(row, p.m);
    const int64_t inner = row - outer * p.m, column = part * p.part_columns;
    a = p.a_first + inner * p.a_row_stride + column * p.a_col_stride;
    out = p.out_first + inner * p.out_row_stride + column * p.out_col_stride;
    columns = min(p.part_columns, p.n - column);
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

class Team {
 public:
  DETKERN_INLINE Team(const RowScanParams& p, Prefix* shared)
      : p_(p), shared_(shared), member_(threadIdx.x % TEAM), lane_(threadIdx.x % 32) {}

  DETKERN_INLINE void load(const Place& place, int64_t at, float (&values)[VALUES]) const {
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const int64_t column = at + member_ * VALUES + i;
      values[i] = column < place.columns ? element(place.a + column * p_.a_col_stride) : 0.0f;
    }
  }

  // The sum of all members' prefixes, for all of them.
  DETKERN_INLINE Prefix total(Prefix mine) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
      mine.combine(mine.moved([mask](uint32_t word) { return __shfl_xor_sync(0xffffffffu, word, mask); }, true));
    if constexpr (WARPS > 1) {
      if (lane_ == 0) shared_[member_ / 32] = mine;
      __syncthreads();
      mine = shared_[0];
#pragma unroll 1
      for (int warp = 1; warp < WARPS; ++warp) mine.combine(shared_[warp]);
      __syncthreads();
    }
    return mine;
  }

  // What stands before this member's `mine`: `carried` and the members before it. carried: then with all of them.
  DETKERN_INLINE Prefix before(Prefix mine, Prefix& carried) {
#pragma unroll
    for (int by = 1; by < 32; by *= 2)
      mine.combine(mine.moved([by](uint32_t word) { return __shfl_up_sync(0xffffffffu, word, by); }, lane_ >= by));
    Prefix found = mine.moved([](uint32_t word) { return __shfl_up_sync(0xffffffffu, word, 1); }, lane_ > 0);
    if constexpr (WARPS > 1) {
      if (lane_ == 31) shared_[member_ / 32] = mine;
      __syncthreads();
#pragma unroll 1
      for (int warp = 0; warp < WARPS; ++warp) {
        if (warp == member_ / 32) found.combine(carried);
        carried.combine(shared_[warp]);
      }
      __syncthreads();
    } else {
      found.combine(carried);
      carried.combine(mine.moved([](uint32_t word) { return __shfl_sync(0xffffffffu, word, 31); }, true));
    }
    return found;
  }

  DETKERN_INLINE void add_up(int64_t row, int64_t part) {
    const Place place(p_, row, part);
    Prefix sum = Prefix::zero();
    for (int64_t at = 0; at < place.columns; at += TEAM * VALUES) {
      float values[VALUES];
      load(place, at, values);
#pragma unroll
      for (int i = 0; i < VALUES; ++i) sum.add(values[i]);
    }
    sum = total(sum);
    if (member_ == 0) slot(row, part, [&](uint32_t* target, int i) { *target = i < WORDS ? sum.words[i] : sum.flags; });
  }

  DETKERN_INLINE void scan(int64_t row, int64_t part) {
    const Place place(p_, row, part);
    Prefix carried = Prefix::zero();
    if (TEAM == THREADS && p_.parts > 1) {
      for (int64_t earlier = member_; earlier < part; earlier += TEAM) {
        Prefix sum;
        slot(row, earlier, [&](const uint32_t* source, int i) { (i < WORDS ? sum.words[i] : sum.flags) = *source; });
        carried.combine(sum);
      }
      carried = total(carried);
    }
    for (int64_t at = 0; at < place.columns; at += TEAM * VALUES) {
      float values[VALUES];
      load(place, at, values);
      Prefix mine = Prefix::zero();
#pragma unroll
      for (int i = 0; i < VALUES; ++i) mine.add(values[i]);
      Prefix prefix = before(mine, carried);
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        const int64_t column = at + member_ * VALUES + i;
        prefix.add(values[i]);
        if (column >= place.columns) continue;
        store_any(p_.out, place.out + column * p_.out_col_stride, p_.out_dtype, prefix.rounded());
      }
    }
  }

 private:
  DETKERN_INLINE float element(int64_t offset) const {
    if constexpr (OPERAND == F32) {
      return static_cast<const float*>(p_.a)[offset];
    } else {
      return upcast<OPERAND>(static_cast<const uint16_t*>(p_.a)[offset]);
    }
  }

  // visit(address, word) for the words of a part's sum in scratch memory; the flags come last.
  template <class Visit>
  DETKERN_INLINE void slot(int64_t row, int64_t part, const Visit& visit) const {
    uint32_t* first = p_.scratch + (row * p_.parts + part) * (WORDS + 1);
#pragma unroll
    for (int i = 0; i <= WORDS; ++i) visit(first + i, i);
  }

  const RowScanParams& p_;
  Prefix* shared_;
  const int member_, lane_;
};

extern "C" __global__ void __launch_bounds__(THREADS) detkern_kernel(const __grid_constant__ RowScanParams p) {
  __shared__ Prefix shared[WARPS];
  Team team(p, shared);
  const int64_t units = p.rows * p.parts;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * TEAMS + threadIdx.x / TEAM; unit < units;
       unit += static_cast<int64_t>(gridDim.x) * TEAMS) {
    const int64_t row = p.parts == 1 ? unit : quotient(unit, p.parts);
    if constexpr (PHASE == TOTALS) {
      team.add_up(row, unit - row * p.parts);
    } else {
      team.scan(row, unit - row * p.parts);
    }
  }
}
