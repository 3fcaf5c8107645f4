// Contract `fma` for few outputs, on CUDA cores: each output is one chain acc = fma(a[k], b[k], acc), binary32, k
// ascending from 0 to K - 1, from +0 (or from `out`). The same function as fma.cu's, for f32, f16 and bf16 operands.
//
// A chain takes 4 cycles a k, whoever computes it. Where outputs are few, tiles are so small that all multiprocessors
// work and a scheduler has hardly more chains than hide each other's latency (docs/hopper.md). Warps of their own keep
// a ring of stages filled: a copy takes as many issue slots as ten fused multiply-adds.
//
// Macros   OPERAND (F32 1, F16 2, BF16 3), LOAD_A, LOAD_B (K_MAJOR 1, MN_MAJOR 2), TILE_M, TILE_N, TILE_K, WARPS_M,
//          WARPS_N, COPYING_WARPS, THREADS = 32 * (WARPS_M * WARPS_N + COPYING_WARPS), CTAS_PER_SM (a register bound),
//          STAGES, SMEM_BYTES.
// Tile     TILE_M x TILE_N outputs; a lane has TILE_M / (4 * WARPS_M) x TILE_N / (8 * WARPS_N) of them, each 1, 2 or 4.
//          TILE_K a multiple of 64.
// Launch   THREADS threads, grid (min(tiles, 2^31 - 1), 1, 1) with tiles = batch * ceil(m / TILE_M) * ceil(n / TILE_N):
//          one tile a CTA; any smaller grid.x is right as well.
// Memory   SMEM_BYTES = STAGES * (TILE_M + TILE_N) * (4 * TILE_K + 16) of dynamic shared memory; 16-bit operands, which
//          stay as they are there, use half of it. No scratch.
// Loads    The pointer, the line stride and the batch strides of both operands are multiples of 16 bytes; a line may
//          end anywhere, and nothing beyond its end is read.
// K        The last stage is filled up with zeros, and their products are added: fma(+0, +0, acc) is acc, but for
//          acc = -0, which it makes the +0 that the finished accumulator's + 0 makes of it anyway. A NaN that a fused
//          multiply-add gave is the canonical one before and after.
#include "parts/epilogue.cuh"
#include "parts/params.cuh"
#include "parts/simt.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"

using Element = StorageOf<OPERAND>::type;

constexpr int ELEMENT_BYTES = sizeof(Element);
constexpr int CHUNK = 16 / ELEMENT_BYTES;  // elements of a copy; k of a group of fragments
constexpr int LANES_M = 4, LANES_N = 8;
constexpr int THREAD_M = TILE_M / (LANES_M * WARPS_M), THREAD_N = TILE_N / (LANES_N * WARPS_N);
constexpr int COMPUTING_THREADS = 32 * WARPS_M * WARPS_N, COPYING_THREADS = 32 * COPYING_WARPS;
constexpr int STAGE_BYTES = (TILE_M + TILE_N) * (4 * TILE_K + 16), PLACE_OF_B = TILE_M * (4 * TILE_K + 16);
constexpr int BAND = 16;
// Barriers, each of which one role arrives at and the other waits for: a stage is there, its copies complete; and the
// stage before it has been read.
constexpr int STAGE_THERE = 1, STAGE_LEFT = 2;
// Groups of fragments are read so many ahead that their latency, some 40 cycles, passes meanwhile: a scheduler may have
// no other warp to turn to.
constexpr int GROUPS = TILE_K / CHUNK;  // of a stage
constexpr int GROUP_CYCLES = CHUNK * (THREAD_M * THREAD_N < 4 ? 4 : THREAD_M * THREAD_N);
constexpr int BUFFERS = GROUP_CYCLES > 32 ? 2 : 4, AHEAD = BUFFERS - 1;

static_assert(LOAD_A != STRIDED && LOAD_B != STRIDED, "operands come by asynchronous copies");
static_assert(THREADS == COMPUTING_THREADS + COPYING_THREADS && COPYING_WARPS > 0, "threads");
static_assert(SMEM_BYTES == STAGES * STAGE_BYTES && STAGES >= 2, "shared memory");
static_assert(THREAD_M * LANES_M * WARPS_M == TILE_M && THREAD_N * LANES_N * WARPS_N == TILE_N, "lanes fill the tile");
static_assert(GROUPS % BUFFERS == 0 && GROUPS > AHEAD, "a buffer's number is known at compile time");

using Accumulators = float[THREAD_M][THREAD_N];

// Stages are numbered from 0; stage s lies in slot s % STAGES of the ring. Between the last read of stage s - 1 and the
// first of stage s the chains wait for STAGE_THERE, and then the copies for STAGE_LEFT; from there to the same place of
// the next stage, stage s + STAGES - 1 is on its way into the slot that stage s - 1 has left.
DETKERN_INLINE int64_t stage_count(const GemmParams& p) { return (p.k + TILE_K - 1) / TILE_K; }

DETKERN_INLINE uint32_t next_slot(uint32_t slot) { return slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES; }

// A stage of one operand: lines along its contiguous dimension. K_MAJOR lines are 16 bytes further apart than they are
// long, so that those of neighbouring lanes begin in different banks; MN_MAJOR ones are read along. ROWS are rows of A,
// columns of B.
template <int LOAD, int ROWS>
struct Stage {
  static constexpr int ALONG = (LOAD == MN_MAJOR ? ROWS : TILE_K) / CHUNK;  // chunks of a line
  static constexpr int LINES = LOAD == MN_MAJOR ? TILE_K : ROWS;
  static constexpr int PITCH = 16 * (ALONG + (LOAD == K_MAJOR));
  static_assert(LINES * PITCH <= ROWS * (4 * TILE_K + 16), "a stage fits its slot");
};

// One thread's copies of one operand.
template <int LOAD, int ROWS>
class Copies : Stage<LOAD, ROWS> {
  using Shape = Stage<LOAD, ROWS>;
  static constexpr int LINES_PER_PASS = COPYING_THREADS / Shape::ALONG;
  static constexpr int PASSES = Shape::LINES / LINES_PER_PASS;
  static_assert(COPYING_THREADS % Shape::ALONG == 0 && Shape::LINES % LINES_PER_PASS == 0, "a pass is whole lines");

 public:
  // thread: of those that copy. shared: where the operand lies in the first slot.
  DETKERN_INLINE Copies(const void* origin, int64_t batch, int64_t row_stride, int64_t k_stride, int64_t row0,
                        int64_t row_count, int thread, uint32_t shared)
      : line_(thread / Shape::ALONG),
        element_(thread % Shape::ALONG * CHUNK),
        rows_left_(limited(row_count - row0, ROWS)),
        line_stride_(LOAD == MN_MAJOR ? k_stride : row_stride),
        step_(LOAD == MN_MAJOR ? TILE_K * k_stride : TILE_K),
        source_(static_cast<const Element*>(origin) + batch + row0 * row_stride + line_ * line_stride_ + element_),
        target_(shared + line_ * Shape::PITCH + element_ * ELEMENT_BYTES) {}

  // Starts the copies of the next stage, `k_left` deep, or TILE_K where that is less; zeros beyond. Rows outside the
  // operand may hold anything: so may the outputs that they give.
  DETKERN_INLINE void start(uint32_t slot, int64_t k_left) {
    const int depth = limited(k_left, TILE_K);
    const int lines = LOAD == MN_MAJOR ? depth : rows_left_;
    const int bytes = limited((LOAD == MN_MAJOR ? rows_left_ : depth) - element_, CHUNK) * ELEMENT_BYTES;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const bool inside = line_ + pass * LINES_PER_PASS < lines;
      const uint32_t target = target_ + slot + pass * LINES_PER_PASS * Shape::PITCH;
      const Element* source = source_ + pass * LINES_PER_PASS * line_stride_;
      if (inside || LOAD == MN_MAJOR) copy_async_16(target, source, inside ? bytes : 0);
    }
    source_ += step_;
  }

 private:
  static DETKERN_INLINE int limited(int64_t value, int high) {
    return value < 0 ? 0 : value > high ? high : static_cast<int>(value);
  }

  int line_, element_;  // of the first chunk in the stage
  int rows_left_;       // of the tile's, those inside the operand
  int64_t line_stride_, step_;
  const Element* source_;
  uint32_t target_;
};

// What the copying threads do for a tile.
DETKERN_INLINE void copy_stages(const GemmParams& p, const OutputTile& tile, int thread, uint32_t shared) {
  Copies<LOAD_A, TILE_M> a(p.a, batch_offset(p, p.a_batch, tile.batch), p.a_row, p.a_col, tile.row, p.m, thread,
                           shared);
  Copies<LOAD_B, TILE_N> b(p.b, batch_offset(p, p.b_batch, tile.batch), p.b_col, p.b_row, tile.column, p.n, thread,
                           shared + PLACE_OF_B);
  int64_t k_left = p.k;
  uint32_t slot = 0;
  const int64_t stages = stage_count(p);
#pragma unroll 1
  for (int64_t stage = 0; stage < stages + STAGES - 1; ++stage) {
    // One group a stage, an empty one behind the last: all but the latest STAGES - 2 are complete, stages 0 to
    // stage - (STAGES - 2) among them.
    if (k_left > 0) {
      a.start(slot, k_left);
      b.start(slot, k_left);
    }
    copy_async_commit();
    k_left -= TILE_K;
    slot = next_slot(slot);
    if (stage < STAGES - 2) continue;
    copy_async_wait<STAGES - 2>();
    named_barrier_arrive<THREADS>(STAGE_THERE);  // stage - (STAGES - 2)
    named_barrier<THREADS>(STAGE_LEFT);          // the one before it
  }
}

// COUNT rows of a lane by CHUNK k of one operand, where LANES lanes share out a warp's rows.
template <int LOAD, int ROWS, int COUNT, int LANES>
class Fragment : Stage<LOAD, ROWS> {
  using Shape = Stage<LOAD, ROWS>;
  static constexpr int ROW_WORDS = (COUNT * ELEMENT_BYTES + 3) / 4;  // of one k, MN_MAJOR
  static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "a lane's rows are one vector");

 public:
  // Where a lane's i-th row lies from the first of its warp.
  static constexpr DETKERN_INLINE int row(int lane, int i) {
    return LOAD == MN_MAJOR ? lane * COUNT + i : lane + i * LANES;
  }

  // The offset of a lane's first row in a stage; `first`: the warp's.
  static DETKERN_INLINE uint32_t place(int first, int lane) {
    return (first + row(lane, 0)) * (LOAD == MN_MAJOR ? ELEMENT_BYTES : Shape::PITCH);
  }

  DETKERN_INLINE void read(uint32_t place, int group) {
    if constexpr (LOAD == MN_MAJOR) {
#pragma unroll
      for (int k = 0; k < CHUNK; ++k) {
        load_shared<ELEMENT_BYTES, COUNT>(place + (group * CHUNK + k) * Shape::PITCH, words_ + k * ROW_WORDS);
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) load_shared<4, 4>(place + i * LANES * Shape::PITCH + group * 16, words_ + i * 4);
    }
  }

  DETKERN_INLINE float value(int i, int k) const {
    const int bytes = ELEMENT_BYTES * (LOAD == MN_MAJOR ? i : k);
    const uint32_t word = words_[(LOAD == MN_MAJOR ? k * ROW_WORDS : i * 4) + bytes / 4];
    if constexpr (OPERAND == F32) {
      return __uint_as_float(word);
    } else {
      return bytes % 4 == 0 ? upcast_low<OPERAND>(word) : upcast_high<OPERAND>(word);
    }
  }

 private:
  uint32_t words_[LOAD == MN_MAJOR ? CHUNK * ROW_WORDS : 4 * COUNT];
};

using FragmentA = Fragment<LOAD_A, TILE_M, THREAD_M, LANES_M>;
using FragmentB = Fragment<LOAD_B, TILE_N, THREAD_N, LANES_N>;

// Where the outputs of a thread's warp begin in the tile.
DETKERN_INLINE int first_row(int thread) { return thread / 32 / WARPS_N * (TILE_M / WARPS_M); }
DETKERN_INLINE int first_column(int thread) { return thread / 32 % WARPS_N * (TILE_N / WARPS_N); }

// What the others do: the chains.
class Chains {
 public:
  DETKERN_INLINE Chains(int thread, uint32_t shared)
      : place_a_(shared + FragmentA::place(first_row(thread), lane_row(thread % 32))),
        place_b_(shared + PLACE_OF_B + FragmentB::place(first_column(thread), lane_column(thread % 32))) {}

  // Adds all products, of at least one k.
  DETKERN_INLINE void run(Accumulators& acc, int64_t stages) {
    take_stage();
#pragma unroll
    for (int group = 0; group < AHEAD; ++group) read(group, group);
    do add_stage(acc);
    while (--stages > 0);
  }

 private:
  // What is read behind the last stage is not used.
  DETKERN_INLINE void add_stage(Accumulators& acc) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      if (group == GROUPS - AHEAD) {
        slot_ = next_slot(slot_);
        take_stage();
      }
      read((group + AHEAD) % GROUPS, (group + AHEAD) % BUFFERS);
      multiply(acc, group % BUFFERS);
    }
  }

  // Waits for the next stage; the one before it may be filled again.
  DETKERN_INLINE void take_stage() {
    named_barrier<THREADS>(STAGE_THERE);
    named_barrier_arrive<THREADS>(STAGE_LEFT);
  }

  DETKERN_INLINE void read(int group, int buffer) {
    a_[buffer].read(place_a_ + slot_, group);
    b_[buffer].read(place_b_ + slot_, group);
  }

  DETKERN_INLINE void multiply(Accumulators& acc, int buffer) const {
#pragma unroll
    for (int k = 0; k < CHUNK; ++k) {
#pragma unroll
      for (int m = 0; m < THREAD_M; ++m) {
#pragma unroll
        for (int n = 0; n < THREAD_N; ++n) {
          acc[m][n] = __fmaf_rn(a_[buffer].value(m, k), b_[buffer].value(n, k), acc[m][n]);
        }
      }
    }
  }

  uint32_t place_a_, place_b_;  // of this lane's first rows and columns in the first slot
  uint32_t slot_ = 0;
  FragmentA a_[BUFFERS];
  FragmentB b_[BUFFERS];
};

DETKERN_INLINE void compute(const GemmParams& p, const OutputTile& tile, int thread, uint32_t shared) {
  constexpr int COUNT = LOAD_B == MN_MAJOR ? THREAD_N : 1;  // of neighbouring columns
  const Epilogue epilogue(p, tile.batch);
  const int lane_m = lane_row(thread % 32), lane_n = lane_column(thread % 32);
  const int64_t row = tile.row + first_row(thread), column = tile.column + first_column(thread);
  Accumulators acc;
#pragma unroll
  for (int m = 0; m < THREAD_M; ++m) {
#pragma unroll
    for (int n = 0; n < THREAD_N; ++n) {
      acc[m][n] = epilogue.initial(row + FragmentA::row(lane_m, m), column + FragmentB::row(lane_n, n));
    }
  }
  if (p.k > 0) Chains(thread, shared).run(acc, stage_count(p));
#pragma unroll
  for (int n = 0; n < THREAD_N; n += COUNT) {
    const int64_t first = column + FragmentB::row(lane_n, n);
    float bias[COUNT];
    epilogue.load_bias(first, bias);
#pragma unroll
    for (int m = 0; m < THREAD_M; ++m) {
      float values[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) values[i] = acc[m][n + i];
      epilogue.store(row + FragmentA::row(lane_m, m), first, values, bias);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    detkern_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(16) char shared[];
  const int thread = thread_index();
  for (int64_t tile = blockIdx.x; tile < tile_count<TILE_M, TILE_N>(p); tile += gridDim.x) {
    const OutputTile target = output_tile<TILE_M, TILE_N, BAND>(p, tile);
    if (thread < COMPUTING_THREADS) {
      compute(p, target, thread, shared_address(shared));
    } else if (p.k > 0) {
      copy_stages(p, target, thread - COMPUTING_THREADS, shared_address(shared));
    }
    __syncthreads();  // what is read behind the last stage is not used, but would race with the next tile's copies
  }
}
