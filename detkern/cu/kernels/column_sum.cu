// The bias gradient: out[n] is one chain acc = acc + dc[row, n], binary32 to nearest even, rows ascending, from +0 (or
// from `out`); + 0 and one rounding at the end. f32, f16 and bf16 operands. No column's rows are ever split, so no
// tile, grid or load changes a bit.
//
// A chain takes one addition's latency (4 cycles) a row whatever the device, so the rest of the work must stay out of
// its way: TILE_N threads each keep the chain of one column and read nothing but shared memory, while the other warps
// fill a ring of stages, STAGES - 1 of them ahead, of ROWS rows each.
//
// Macros   OPERAND (F32 1, F16 2, BF16 3), LOAD (STRIDED 0; K_MAJOR 1: rows are adjacent; MN_MAJOR 2: columns are),
//          TILE_N, ROWS, STAGES, LOADERS (threads that copy), THREADS = TILE_N + LOADERS, SMEM_BYTES.
// Tile     TILE_N columns, a multiple of 32.
// Launch   THREADS threads, grid (min(ceil(n / TILE_N), 2^31 - 1), 1, 1); any smaller grid.x is right as well.
// Memory   SMEM_BYTES of dynamic shared memory, no scratch. K_MAJOR: STAGES stages of TILE_N lines, each of ROWS
//          elements and 16 bytes. MN_MAJOR: STAGES stages of ROWS lines of TILE_N elements, and 16 * ROWS bytes for the
//          rows' offsets; STRIDED: the same, a line 4 bytes longer.
// Loads    MN_MAJOR wants the pointer, the row stride and the batch strides at multiples of 16 bytes; K_MAJOR the
//          pointer and the column stride, and no batch. A line may end anywhere.
#include "parts/column_sum_params.cuh"
#include "parts/elements.cuh"
#include "parts/params.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"

constexpr int SIZE = OPERAND == F32 ? 4 : 2;
constexpr int CHUNK = 16 / SIZE;  // elements of one copy
constexpr int LINES = LOAD == K_MAJOR ? TILE_N : ROWS;
constexpr int ALONG = LOAD == K_MAJOR ? ROWS : TILE_N;
// Sixteen bytes more let 8 threads read 16 bytes each of neighbouring columns at once, four more let the threads of a
// warp write neighbouring rows at once.
constexpr int PITCH = ALONG * SIZE + (LOAD == K_MAJOR ? 16 : LOAD == STRIDED ? 4 : 0);
constexpr int STAGE_BYTES = LINES * PITCH;
static_assert(THREADS == TILE_N + LOADERS && TILE_N % 32 == 0 && LOADERS % 32 == 0, "whole warps");
constexpr int OFFSETS_BYTES = LOAD == K_MAJOR ? 0 : 2 * ROWS * 8;
static_assert(SMEM_BYTES == OFFSETS_BYTES + STAGES * STAGE_BYTES, "shared memory");
static_assert(OFFSETS_BYTES % 16 == 0 && (LOAD == STRIDED || STAGE_BYTES % 16 == 0), "stages of vectors are aligned");
static_assert(ROWS <= LOADERS, "a thread finds the offset of one row of a stage");

using Element = StorageOf<OPERAND>::type;

// Copies stages of the columns from `column0` on. Rows and columns past the end become zeros: no chain that is stored
// reads them.
class StageCopy {
 public:
  // The offsets of the rows lie in `shared`, those of one stage in one half: finding them (a division for each batch
  // dimension) is one thread's work a row, not every thread's that copies a piece of it.
  DETKERN_INLINE StageCopy(const ColumnSumParams& p, char* shared, int64_t column0)
      : p_(p), offsets_(reinterpret_cast<int64_t*>(shared)), column0_(column0), loader_(thread_index() - TILE_N) {}

  // Before the CTA meets for stage `number`; the half's last readers were done at the meeting before.
  DETKERN_INLINE void find_rows(int64_t number) const {
    if constexpr (LOAD != K_MAJOR) {
      const int64_t row = number * ROWS + loader_;
      if (loader_ < ROWS && row < p_.rows) offsets_[number % 2 * ROWS + loader_] = row_offset(p_, row);
    }
  }

  DETKERN_INLINE void copy(char* stage, int64_t number) const {
    const int64_t row0 = number * ROWS;
    const int rows = clamp(p_.rows - row0, ROWS);
    const int64_t* offsets = offsets_ + number % 2 * ROWS;
    if constexpr (LOAD == K_MAJOR) {
      copy_columns(stage, row0);
    } else if constexpr (LOAD == MN_MAJOR) {
      copy_rows(stage, offsets, rows);
    } else {
      gather(stage, offsets, rows);
    }
  }

 private:
  static constexpr int CHUNKS = ALONG / CHUNK, LINES_PER_PASS = LOADERS / CHUNKS, PASSES = LINES / LINES_PER_PASS;
  static_assert(LOAD == STRIDED || (LOADERS % CHUNKS == 0 && LINES % LINES_PER_PASS == 0), "a pass covers whole lines");

  DETKERN_INLINE void copy_rows(char* stage, const int64_t* offsets, int rows) const {
    const int first = loader_ / CHUNKS, chunk = loader_ % CHUNKS;
    const uint32_t target = shared_address(stage) + first * PITCH + chunk * 16;
    const int64_t column = column0_ + chunk * CHUNK;
    const int bytes = SIZE * clamp(p_.n - column, CHUNK);
    const char* source = static_cast<const char*>(p_.dc) + (bytes > 0 ? column : 0) * SIZE;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int line = first + pass * LINES_PER_PASS;
      const int64_t offset = line < rows ? offsets[line] : 0;
      copy_async_16(target + pass * LINES_PER_PASS * PITCH, source + offset * SIZE, line < rows ? bytes : 0);
    }
  }

  DETKERN_INLINE void copy_columns(char* stage, int64_t row0) const {
    const int first = loader_ / CHUNKS, chunk = loader_ % CHUNKS;
    const uint32_t target = shared_address(stage) + first * PITCH + chunk * 16;
    const int64_t row = row0 + chunk * CHUNK;
    const int bytes = SIZE * clamp(p_.rows - row, CHUNK);
    const char* source = static_cast<const char*>(p_.dc) + (bytes > 0 ? row : 0) * SIZE;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int64_t column = column0_ + first + pass * LINES_PER_PASS;
      const int64_t offset = column < p_.n ? column * p_.col_stride : 0;
      copy_async_16(target + pass * LINES_PER_PASS * PITCH, source + offset * SIZE, column < p_.n ? bytes : 0);
    }
  }

  // Element by element, along the dimension with the smaller stride first, all loads of a thread in flight at once.
  DETKERN_INLINE void gather(char* stage, const int64_t* offsets, int rows) const {
    constexpr int EACH = ROWS * TILE_N / LOADERS;
    static_assert(LOAD != STRIDED || (ROWS == LOADERS && LOADERS % TILE_N == 0), "equal parts");
    const bool along_rows = llabs(p_.row_stride) < llabs(p_.col_stride);
    const int line0 = along_rows ? loader_ : loader_ / TILE_N, line_step = along_rows ? 0 : LOADERS / TILE_N;
    const int column0 = along_rows ? 0 : loader_ % TILE_N, column_step = along_rows ? 1 : 0;
    const int columns = clamp(p_.n - column0_, TILE_N);
    const Element* source = static_cast<const Element*>(p_.dc) + column0_ * p_.col_stride;
    Element values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int line = line0 + i * line_step, column = column0 + i * column_step;
      values[i] = line < rows && column < columns ? source[offsets[line] + column * p_.col_stride] : Element(0);
    }
    char* target = stage + line0 * PITCH + column0 * SIZE;
    const int step = line_step * PITCH + column_step * SIZE;
#pragma unroll
    for (int i = 0; i < EACH; ++i) *reinterpret_cast<Element*>(target + i * step) = values[i];
  }

  const ColumnSumParams& p_;
  int64_t* const offsets_;
  const int64_t column0_;
  const int loader_;
};

// ---- the chain of one column --------------------------------------------------------------------------------------

// Rows are read in groups, each group before the one ahead of it is added.
constexpr int GROUP = 16;
static_assert(ROWS % GROUP == 0, "whole groups");

// GROUP rows of a column, from row `first` of the stage on, as they lie there.
struct Group {
  static constexpr int WORDS = LOAD == K_MAJOR ? GROUP * SIZE / 4 : GROUP;
  uint32_t words[WORDS];

  DETKERN_INLINE void load(const char* stage, int column, int first) {
    if constexpr (LOAD == K_MAJOR) {
      const uint4* source = reinterpret_cast<const uint4*>(stage + column * PITCH + first * SIZE);
#pragma unroll
      for (int i = 0; i < WORDS / 4; ++i) {
        const uint4 four = source[i];
        words[4 * i] = four.x;
        words[4 * i + 1] = four.y;
        words[4 * i + 2] = four.z;
        words[4 * i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        const char* source = stage + (first + i) * PITCH + column * SIZE;
        if constexpr (OPERAND == F32) {
          words[i] = *reinterpret_cast<const uint32_t*>(source);
        } else {
          words[i] = *reinterpret_cast<const uint16_t*>(source);
        }
      }
    }
  }

  DETKERN_INLINE float value(int i) const {
    if constexpr (LOAD == K_MAJOR && OPERAND != F32) {
      return i % 2 == 0 ? upcast_low<OPERAND>(words[i / 2]) : upcast_high<OPERAND>(words[i / 2]);
    } else {
      return widened<OPERAND>(words[i]);
    }
  }
};

// Adds the first `count` rows of a stage to the chain, in order.
DETKERN_INLINE void add_rows(float& acc, const char* stage, int column, int count) {
  if (count == ROWS) {
    Group groups[2];
    groups[0].load(stage, column, 0);
#pragma unroll
    for (int g = 0; g < ROWS / GROUP; ++g) {
      if (g + 1 < ROWS / GROUP) groups[(g + 1) % 2].load(stage, column, (g + 1) * GROUP);
#pragma unroll
      for (int i = 0; i < GROUP; ++i) acc = __fadd_rn(acc, groups[g % 2].value(i));
    }
    return;
  }
#pragma unroll 1
  for (int first = 0; first < count; first += GROUP) {
    Group group;
    group.load(stage, column, first);
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
      if (first + i < count) acc = __fadd_rn(acc, group.value(i));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) detkern_kernel(const __grid_constant__ ColumnSumParams p) {
  extern __shared__ __align__(16) char shared[];
  char* const ring = shared + OFFSETS_BYTES;
  const int thread = thread_index();
  const bool loads = thread >= TILE_N;
  const int64_t stages = (p.rows + ROWS - 1) / ROWS;
  for (int64_t column0 = int64_t(blockIdx.x) * TILE_N; column0 < p.n; column0 += int64_t(gridDim.x) * TILE_N) {
    const StageCopy copy(p, shared, column0);
    const int64_t column = column0 + thread;
    float acc = 0.0f;
    if (!loads && p.accumulate && column < p.n) acc = static_cast<const float*>(p.out)[column * p.out_stride];
    int loaded = 0, added = 0;  // slots of the ring
    if (loads) copy.find_rows(0);
    // The first rounds, in which nothing is added, fill the ring.
    for (int64_t next = 0; next < stages + STAGES - 1; ++next) {
      const int64_t stage = next - (STAGES - 1);
      if (loads) copy_async_wait<STAGES - 2>();
      __syncthreads();  // `stage` is in place, the one before it is added, the rows of `next` are found
      if (loads) {
        if (next < stages) {
          copy.copy(ring + loaded * STAGE_BYTES, next);
          copy.find_rows(next + 1);
        }
        copy_async_commit();
        loaded = loaded + 1 == STAGES ? 0 : loaded + 1;
      } else if (stage >= 0) {
        add_rows(acc, ring + added * STAGE_BYTES, thread, clamp(p.rows - stage * ROWS, ROWS));
        added = added + 1 == STAGES ? 0 : added + 1;
      }
    }
    if (!loads && column < p.n) store_any(p.out, column * p.out_stride, p.out_dtype, acc);
  }
}
