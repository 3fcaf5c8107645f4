// The CUDA-core main loop: tiles of A and B in binary32 in shared memory, register tiles of fused multiply-adds.
//
// Shared memory holds two stages of A [EXTENT_K][EXTENT_M] and B [EXTENT_K][EXTENT_N], binary32: 8 * EXTENT_K *
// (EXTENT_M + EXTENT_N) bytes. 16-bit operands are upcast once, when a tile is staged, not in the inner loop, whose
// issue slots are all needed for FFMA. f32 operands contiguous in M (N) go there by cp.async; all others through
// registers, fetched one or two tiles ahead and transposed or upcast on the way. Each thread owns THREAD_M x THREAD_N
// outputs, as 4 x 4 blocks spread over the warp's tile, so that a warp reads whole banks and writes whole sectors.
#pragma once

#include "parts/elements.cuh"
#include "parts/params.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"

// Four elements in registers, as they came: PACKED 16-bit ones two to a register, gathered ones one each, since packing
// would wait for the loads.
template <int DTYPE, bool PACKED>
struct Chunk {
  using Element = typename StorageOf<DTYPE>::type;
  static constexpr bool HALVES = PACKED && sizeof(Element) == 2;
  uint32_t words[HALVES ? 2 : 4];

  DETKERN_INLINE void load(const Element* source, bool wanted) {
    static_assert(PACKED, "vectors of 16-bit elements stay packed");
    load_global_if(wanted, source, words);
  }

  DETKERN_INLINE void gather(const Element* source, int64_t stride, int elements) {
    if constexpr (HALVES) words[0] = words[1] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= elements) continue;
      const uint32_t bits = source[i * stride];
      if constexpr (HALVES) {
        words[i / 2] |= bits << (i % 2 * 16);
      } else {
        words[i] = bits;
      }
    }
  }

  DETKERN_INLINE uint32_t binary32(int i) const {
    if constexpr (DTYPE == F32) {
      return words[i];
    } else if constexpr (HALVES) {
      return __float_as_uint(i % 2 == 0 ? upcast_low<DTYPE>(words[i / 2]) : upcast_high<DTYPE>(words[i / 2]));
    } else {
      return __float_as_uint(upcast<DTYPE>(words[i]));
    }
  }
};

// One operand's tiles on their way from global memory to a stage.
template <int LOAD, int DTYPE, int EXTENT_MN, int EXTENT_K, int THREAD_COUNT>
class OperandStage {
 public:
  using Element = typename StorageOf<DTYPE>::type;
  static constexpr int CHUNK = 4;  // elements: one 16-byte store of binary32 values
  static constexpr bool ASYNC = DTYPE == F32 && LOAD == MN_MAJOR;
  static constexpr int ALONG = (LOAD == MN_MAJOR ? EXTENT_MN : EXTENT_K) / CHUNK;
  static constexpr int LINES = LOAD == MN_MAJOR ? EXTENT_K : EXTENT_MN;
  static constexpr int LINES_PER_PASS = THREAD_COUNT / ALONG;
  static constexpr int PASSES = (LINES + LINES_PER_PASS - 1) / LINES_PER_PASS;
  static_assert(THREAD_COUNT % ALONG == 0, "a pass must cover whole lines");
  static_assert(EXTENT_K % CHUNK == 0 && EXTENT_MN % 16 == 0, "tiles are whole chunks");

  DETKERN_INLINE OperandStage(const void* origin, int64_t mn_stride, int64_t k_stride, int64_t mn0, int64_t mn_size,
                              int thread)
      : thread_(thread),
        line_stride_(LOAD == MN_MAJOR ? k_stride : mn_stride),
        k_stride_(LOAD == K_MAJOR ? 1 : k_stride) {
    const Element* first = static_cast<const Element*>(origin);
    if constexpr (LOAD == MN_MAJOR) {
      pointer_ = first + (mn0 + chunk() * CHUNK) + line() * k_stride;
      inside_ = clamp(mn_size - mn0 - chunk() * CHUNK, CHUNK);
      cut_ = mn_size - mn0 < EXTENT_MN && mn_size % CHUNK != 0;
    } else {
      pointer_ = first + (mn0 + line()) * mn_stride + chunk() * CHUNK * k_stride_;
      inside_ = clamp(mn_size - mn0 - line(), LINES);
    }
  }

  // Starts the copy of the tile that `step` last went to, `k_in_tile` deep (EXTENT_K where not TAIL), where `wanted`.
  // What is outside in M (N) may be anything, what is beyond `k_in_tile` as well. `stage` is where an asynchronous copy
  // goes. `wanted` is a predicate of the loads, not a branch, behind which the compiler would move them.
  template <bool TAIL>
  DETKERN_INLINE void fetch(uint32_t stage, int k_in_tile, bool wanted) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const Element* source = pointer_ + pass * LINES_PER_PASS * line_stride_;
      if constexpr (LOAD == MN_MAJOR) {
        const int k = line() + pass * LINES_PER_PASS;
        const int elements = wanted && inside_tile<TAIL>(k, k_in_tile) ? inside_ : 0;
        if constexpr (ASYNC) {
          if (LINES % LINES_PER_PASS != 0 && k >= LINES) break;
          copy_async_16(stage + (k * EXTENT_MN + chunk() * CHUNK) * 4, source, elements * 4);
        } else {
          values_[pass].load(source, elements == CHUNK);
        }
      } else {
        const bool inside = wanted && pass * LINES_PER_PASS < inside_;
        if constexpr (LOAD == K_MAJOR && !TAIL) {
          values_[pass].load(source, inside);
        } else {
          values_[pass].gather(source, k_stride_, inside ? k_in_tile - chunk() * CHUNK : 0);
        }
      }
    }
    if constexpr (LOAD == MN_MAJOR && !ASYNC) {
      if (cut_) fetch_cut<TAIL>(k_in_tile, wanted);
    }
  }

  // Goes `tiles` on along k.
  DETKERN_INLINE void step(int tiles) { pointer_ += tiles * EXTENT_K * k_stride_; }

  // Writes what `fetch` brought into registers.
  DETKERN_INLINE void commit(uint32_t stage) const {
    if constexpr (!ASYNC) {
#pragma unroll
      for (int pass = 0; pass < PASSES; ++pass) {
        const int at = line() + pass * LINES_PER_PASS;
        if (LINES % LINES_PER_PASS != 0 && at >= LINES) break;
        if constexpr (LOAD == MN_MAJOR) {
          store_shared(stage + (at * EXTENT_MN + chunk() * CHUNK) * 4,
                       make_uint4(values_[pass].binary32(0), values_[pass].binary32(1), values_[pass].binary32(2),
                                  values_[pass].binary32(3)));
        } else {
          const int column = LINES_PER_PASS % 32 == 0 ? (line() ^ swizzle(chunk())) + pass * LINES_PER_PASS
                                                      : at ^ swizzle(chunk());
#pragma unroll
          for (int i = 0; i < CHUNK; ++i) {
            store_shared(stage + ((chunk() * CHUNK + i) * EXTENT_MN + column) * 4, values_[pass].binary32(i));
          }
        }
      }
    }
  }

  // The columns of row k of a stage are exchanged by xor with this number: a warp that transposes 32 / (EXTENT_K / 4)
  // lines of EXTENT_K / 4 chunks then stores to 32 different banks.
  static constexpr DETKERN_INLINE int swizzle(int k_chunk) {
    return LOAD == MN_MAJOR ? 0 : k_chunk * (32 / (EXTENT_K / CHUNK)) & (EXTENT_MN < 32 ? EXTENT_MN - 1 : 31);
  }

 private:
  template <bool TAIL>
  static DETKERN_INLINE bool inside_tile(int k, int k_in_tile) {
    return !(TAIL || LINES % LINES_PER_PASS != 0) || k < k_in_tile;
  }

  // Loads the chunks that the end of a line cuts. Only the CTAs at that end come here: all of them or none.
  template <bool TAIL>
  DETKERN_INLINE void fetch_cut(int k_in_tile, bool wanted) {
    const Element* first = forgotten(pointer_);  // else the compiler steps another pointer for this path alone
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int k = line() + pass * LINES_PER_PASS;
      if (wanted && inside_ < CHUNK && inside_tile<TAIL>(k, k_in_tile)) {
        values_[pass].gather(first + pass * LINES_PER_PASS * line_stride_, 1, inside_);
      }
    }
  }

  DETKERN_INLINE int line() const { return thread_ / ALONG; }
  DETKERN_INLINE int chunk() const { return thread_ % ALONG; }

  int thread_;
  const Element* pointer_;
  int64_t line_stride_;
  int64_t k_stride_;
  Chunk<DTYPE, LOAD != STRIDED> values_[ASYNC ? 1 : PASSES];
  int inside_;  // MN_MAJOR: elements of this thread's chunks inside the operand; else: its lines from the first on
  bool cut_;    // MN_MAJOR: the operand ends inside a chunk of this CTA's tiles
};

// A warp's lanes as four rows of eight. Neighbouring lanes share a row and every other pair a column: 16-byte fragment
// reads then take two passes, not four.
DETKERN_INLINE int lane_row(int lane) { return (lane >> 1 & 1) | (lane >> 4 & 1) << 1; }
DETKERN_INLINE int lane_column(int lane) { return (lane & 1) | (lane >> 2 & 3) << 1; }

// How the threads share out a tile: warps in a WARP_ROWS x WARP_COLUMNS grid, lanes 4 x 8 in each, 4 x 4 blocks per
// lane.
template <int EXTENT_M, int EXTENT_N, int WARP_ROWS, int WARP_COLUMNS>
struct ThreadLayout {
  static constexpr int LANES_M = 4;
  static constexpr int LANES_N = 8;
  static constexpr int STEP_M = 4 * LANES_M;  // rows between two blocks of a thread
  static constexpr int STEP_N = 4 * LANES_N;
  static constexpr int WARP_M = EXTENT_M / WARP_ROWS;
  static constexpr int WARP_N = EXTENT_N / WARP_COLUMNS;
  static constexpr int BLOCKS_M = WARP_M / STEP_M;
  static constexpr int BLOCKS_N = WARP_N / STEP_N;
  static constexpr int THREAD_M = 4 * BLOCKS_M;
  static constexpr int THREAD_N = 4 * BLOCKS_N;
  static_assert(BLOCKS_M * STEP_M * WARP_ROWS == EXTENT_M && BLOCKS_N * STEP_N * WARP_COLUMNS == EXTENT_N,
                "blocks fill the tile");

  // Where a thread's m-th row and n-th column lie from its first.
  static constexpr DETKERN_INLINE int row(int m) { return m / 4 * STEP_M + m % 4; }
  static constexpr DETKERN_INLINE int column(int n) { return n / 4 * STEP_N + n % 4; }

  static DETKERN_INLINE int first_row(int thread) {
    return thread / 32 / WARP_COLUMNS * WARP_M + lane_row(thread % 32) * 4;
  }
  static DETKERN_INLINE int first_column(int thread) {
    return thread / 32 % WARP_COLUMNS * WARP_N + lane_column(thread % 32) * 4;
  }
};

// The chains of one output tile, k tile by k tile. Asynchronous copies are always of the next tile. AHEAD is 1 where
// loads into registers are too, and 2 where they are of the tile after it: they start as soon as the registers are
// free, before the barrier, beyond which the compiler cannot postpone them; it does postpone those of the next tile.
template <int DTYPE, int LOAD_OF_A, int LOAD_OF_B, int AHEAD, int EXTENT_K, typename Layout, int EXTENT_M, int EXTENT_N,
          int THREAD_COUNT>
class SimtMainLoop {
 public:
  static constexpr int STAGE_BYTES = EXTENT_K * (EXTENT_M + EXTENT_N) * 4;
  static constexpr int SHARED_BYTES = 2 * STAGE_BYTES;
  using Accumulators = float[Layout::THREAD_M][Layout::THREAD_N];
  using StageA = OperandStage<LOAD_OF_A, DTYPE, EXTENT_M, EXTENT_K, THREAD_COUNT>;
  using StageB = OperandStage<LOAD_OF_B, DTYPE, EXTENT_N, EXTENT_K, THREAD_COUNT>;

  DETKERN_INLINE SimtMainLoop(const GemmParams& p, int64_t batch_a, int64_t batch_b, int64_t row, int64_t column,
                              uint32_t shared)
      : thread_(thread_index()),
        a_(static_cast<const typename StageA::Element*>(p.a) + batch_a, p.a_row, p.a_col, row, p.m, thread_),
        b_(static_cast<const typename StageB::Element*>(p.b) + batch_b, p.b_col, p.b_row, column, p.n, thread_),
        stage_(shared),
        shared_sum_(2 * shared + STAGE_BYTES) {}

  // Brings in the first of `whole` tiles, EXTENT_K deep. All threads must have left the shared memory before.
  DETKERN_INLINE void start(int64_t whole) {
    fetch<false, true>(stage_, EXTENT_K, true);
    fetch<false, false>(stage_, EXTENT_K, true);
    commit(stage_);
    step(1);
    if (AHEAD == 2) fetch<false, false>(stage_, EXTENT_K, whole > 1);
    synchronize();
    load_fragments(0, 0);
  }

  // Adds the current tile's products to the chains and brings in the next; `left` whole tiles follow the current one.
  DETKERN_INLINE void advance(Accumulators& acc, int64_t left) {
#pragma unroll
    for (int k = 0; k < EXTENT_K; ++k) {
      if (k == 0) {
        fetch<false, true>(shared_sum_ - stage_, EXTENT_K, left > 0);
        if (AHEAD == 1) fetch<false, false>(shared_sum_ - stage_, EXTENT_K, left > 0);
      }
      if (k == EXTENT_K - 1) {
        stage_ = shared_sum_ - stage_;
        commit(stage_);
        step(1);
        if (AHEAD == 2) fetch<false, false>(stage_, EXTENT_K, left > 1);
        synchronize();
        load_fragments(0, 0);
      } else {
        load_fragments(k + 1, (k + 1) % 2);
      }
      multiply(acc, k % 2);
    }
  }

  // Adds the last k % EXTENT_K products, after every whole tile.
  DETKERN_INLINE void finish(Accumulators& acc, int64_t k_size) {
    const int depth = static_cast<int>(k_size % EXTENT_K);
    if (k_size >= EXTENT_K) step(-1);  // the last whole tile stepped over this one
    stage_ = shared_sum_ - stage_;
    fetch<true, true>(stage_, depth, true);
    fetch<true, false>(stage_, depth, true);
    commit(stage_);
    synchronize();
#pragma unroll 1
    for (int k = 0; k < depth; ++k) {
      load_fragments(k, 0);
      multiply(acc, 0);
    }
  }

 private:
  static_assert(EXTENT_K % 2 == 0, "fragments are double buffered");

  // The operands that are copied asynchronously, or those that are not.
  template <bool TAIL, bool ASYNC>
  DETKERN_INLINE void fetch(uint32_t stage, int k_in_tile, bool wanted) {
    if constexpr (StageA::ASYNC == ASYNC) a_.template fetch<TAIL>(stage, k_in_tile, wanted);
    if constexpr (StageB::ASYNC == ASYNC) b_.template fetch<TAIL>(stage + EXTENT_K * EXTENT_M * 4, k_in_tile, wanted);
  }

  DETKERN_INLINE void commit(uint32_t stage) {
    a_.commit(stage);
    b_.commit(stage + EXTENT_K * EXTENT_M * 4);
  }

  DETKERN_INLINE void step(int tiles) {
    a_.step(tiles);
    b_.step(tiles);
  }

  static DETKERN_INLINE void synchronize() {
    if constexpr (StageA::ASYNC || StageB::ASYNC) {
      copy_async_commit();
      copy_async_wait<0>();
    }
    __syncthreads();
  }

  DETKERN_INLINE void multiply(Accumulators& acc, int buffer) const {
#pragma unroll
    for (int m = 0; m < Layout::THREAD_M; ++m) {
#pragma unroll
      for (int n = 0; n < Layout::THREAD_N; ++n) {
        acc[m][n] = __fmaf_rn(fragment_a_[buffer][m], fragment_b_[buffer][n], acc[m][n]);
      }
    }
  }

  DETKERN_INLINE void load_fragments(int k, int buffer) {
    load_fragment<Layout::BLOCKS_M, Layout::STEP_M>(stage_ + k * EXTENT_M * 4, Layout::first_row(thread_),
                                                    StageA::swizzle(k / 4), fragment_a_[buffer]);
    load_fragment<Layout::BLOCKS_N, Layout::STEP_N>(stage_ + EXTENT_K * EXTENT_M * 4 + k * EXTENT_N * 4,
                                                    Layout::first_column(thread_), StageB::swizzle(k / 4),
                                                    fragment_b_[buffer]);
  }

  // The part of the exchange that reaches beyond a block's step is folded into the block's number, at compile time.
  template <int BLOCKS, int STEP>
  static DETKERN_INLINE void load_fragment(uint32_t line, int first, int swizzle, float* fragment) {
    const int inner = BLOCKS == 1 ? swizzle : swizzle & (STEP - 1);
    const int outer = swizzle ^ inner;
    const uint32_t address = line + (first ^ inner) * 4;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const uint4 words = load_shared_v4(address + ((block * STEP) ^ outer) * 4);
      fragment[block * 4 + 0] = __uint_as_float(words.x);
      fragment[block * 4 + 1] = __uint_as_float(words.y);
      fragment[block * 4 + 2] = __uint_as_float(words.z);
      fragment[block * 4 + 3] = __uint_as_float(words.w);
    }
  }

  int thread_;
  StageA a_;
  StageB b_;
  uint32_t stage_;
  uint32_t shared_sum_;  // of the two stages' addresses
  float fragment_a_[2][Layout::THREAD_M];
  float fragment_b_[2][Layout::THREAD_N];
};
