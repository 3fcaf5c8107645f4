// The order in which scattered sums are made: the sources in ascending order of the row that their index names, those
// of one row in their own order. A stable radix sort of (row, source) pairs, eight bits a pass, lowest first. Counts
// are whole numbers, so the outcome depends on nothing but the indices. An index outside of [0, rows) becomes `rows`,
// the largest key.
//
// Macros   PHASE, THREADS, ITEMS (pairs of a thread; a tile is THREADS * ITEMS pairs), SMEM_BYTES.
// Phases   ALL 0: every pass of at most one tile, in one CTA. Of each pass over more pairs: COUNT 1 counts the digits
//          of each tile, SCAN 2 gives each tile its place among those of one digit, MOVE 3 moves the pairs.
// Launch   THREADS threads. Grid: 1 for ALL, 256 for SCAN, the tiles for COUNT and MOVE.
// Memory   SMEM_BYTES of dynamic shared memory: counters of every warp, and for ALL the pairs of the tile. Scratch: two
//          arrays each of keys and of sources, 256 counters a tile, 256 totals.
#include "ptx/registers.cuh"

constexpr int ALL = 0, COUNT = 1, SCAN = 2, MOVE = 3;
constexpr int DIGITS = 256, WARPS = THREADS / 32, TILE = THREADS * ITEMS;
constexpr int COUNTERS_BYTES = PHASE == ALL || PHASE == MOVE ? WARPS * DIGITS * 4 : 0;
static_assert(SMEM_BYTES == COUNTERS_BYTES + (PHASE == ALL ? 8 * TILE : 0), "shared memory");
static_assert(THREADS >= DIGITS && THREADS % 32 == 0, "a thread for each digit");

// cu/scatter_sum.py packs the same fields in the same order.
struct SortParams {
  const void* index;
  uint32_t* keys_in;
  uint32_t* sources_in;
  uint32_t* keys_out;
  uint32_t* sources_out;
  uint32_t* counts;  // [DIGITS, tiles], then what stands before a tile's own
  uint32_t* totals;  // [DIGITS]
  int64_t index_stride;
  int64_t m;
  int64_t rows;
  int64_t tiles;
  int32_t wide;    // 1: int64 indices, 0: int32
  int32_t first;   // 1: the pairs are still in `index`
  int32_t shift;   // of the digit; of ALL's first pass
  int32_t passes;  // of ALL
};

DETKERN_INLINE uint32_t key_of(const SortParams& p, int64_t source) {
  const int64_t place = source * p.index_stride;
  const int64_t row = p.wide ? static_cast<const int64_t*>(p.index)[place]
                             : static_cast<const int32_t*>(p.index)[place];
  return row >= 0 && row < p.rows ? static_cast<uint32_t>(row) : static_cast<uint32_t>(p.rows);
}

DETKERN_INLINE int digit_of(uint32_t key, int shift) { return key >> shift & (DIGITS - 1); }

// What stands before each thread's value among those of threads 0 to DIGITS - 1. All threads of the CTA call it.
DETKERN_INLINE uint32_t exclusive_sum(uint32_t value, uint32_t* warp_sums) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
  uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31 && warp < DIGITS / 32) warp_sums[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
  for (int w = 0; w < DIGITS / 32; ++w) before += w < warp ? warp_sums[w] : 0;
  return before + sum - value;
}

// The pairs of a tile, a run of 32 * ITEMS for each warp, in order: item i of a lane is number 32 * i + lane of the
// run.
struct Pairs {
  uint32_t key[ITEMS], source[ITEMS];
  uint32_t places[ITEMS / 2];  // among those of the tile with its digit, two in a word

  DETKERN_INLINE uint32_t place(int i) const { return i % 2 == 0 ? places[i / 2] & 0xffff : places[i / 2] >> 16; }
};
static_assert(ITEMS % 2 == 0 && TILE <= 65536, "16 bits for a place");

DETKERN_INLINE int number_in_tile(int item) {
  return thread_index() / 32 * 32 * ITEMS + 32 * item + thread_index() % 32;
}

// Finds the places of the first `count` pairs of the tile. Afterwards counters[warp][digit] is what stands before the
// warp's own in the tile, and the digit's total comes back to the thread of its number.
DETKERN_INLINE uint32_t find_places(Pairs& pairs, int64_t count, int shift, uint32_t (*counters)[DIGITS]) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32;
  for (int i = thread; i < WARPS * DIGITS; i += THREADS) counters[0][i] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const bool there = number_in_tile(i) < count;
    const int digit = there ? digit_of(pairs.key[i], shift) : DIGITS;
    const uint32_t peers = __match_any_sync(0xffffffffu, digit);
    const uint32_t before = there ? counters[warp][digit] : 0;
    const uint32_t place = before + __popc(peers & ((1u << lane) - 1));
    pairs.places[i / 2] = i % 2 == 0 ? place : pairs.places[i / 2] | place << 16;
    __syncwarp();
    if (there && lane == __ffs(peers) - 1) counters[warp][digit] = before + __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  uint32_t total = 0;
  if (thread < DIGITS) {
    for (int w = 0; w < WARPS; ++w) {
      const uint32_t own = counters[w][thread];
      counters[w][thread] = total;
      total += own;
    }
  }
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS) detkern_kernel(const __grid_constant__ SortParams p) {
  extern __shared__ __align__(16) char shared[];
  __shared__ uint32_t warp_sums[DIGITS / 32];
  __shared__ uint32_t starts[DIGITS];
  const int thread = thread_index();
  const int64_t tile = blockIdx.x, first = tile * TILE;

  if constexpr (PHASE == COUNT) {
    if (thread < DIGITS) starts[thread] = 0;
    __syncthreads();
    for (int i = thread; i < TILE; i += THREADS) {
      if (first + i < p.m) {
        const uint32_t key = p.first ? key_of(p, first + i) : p.keys_in[first + i];
        atomicAdd(&starts[digit_of(key, p.shift)], 1u);
      }
    }
    __syncthreads();
    if (thread < DIGITS) p.counts[thread * p.tiles + tile] = starts[thread];
  }

  if constexpr (PHASE == SCAN) {
    uint32_t* const counts = p.counts + tile * p.tiles;  // of the digit that is this CTA's
    uint32_t carried = 0;
    for (int64_t start = 0; start < p.tiles; start += DIGITS) {
      const bool there = thread < DIGITS && start + thread < p.tiles;
      const uint32_t own = there ? counts[start + thread] : 0;
      const uint32_t before = exclusive_sum(own, warp_sums);
      if (there) counts[start + thread] = carried + before;
      if (thread == DIGITS - 1) starts[0] = carried + before + own;
      __syncthreads();
      carried = starts[0];
    }
    if (thread == 0) p.totals[tile] = carried;
  }

  if constexpr (PHASE == MOVE) {
    uint32_t(*counters)[DIGITS] = reinterpret_cast<uint32_t(*)[DIGITS]>(shared);
    Pairs pairs;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int64_t number = first + number_in_tile(i);
      const bool there = number < p.m;
      pairs.key[i] = !there ? 0 : p.first ? key_of(p, number) : p.keys_in[number];
      pairs.source[i] = !there ? 0 : p.first ? static_cast<uint32_t>(number) : p.sources_in[number];
    }
    find_places(pairs, p.m - first, p.shift, counters);
    const uint32_t before = exclusive_sum(thread < DIGITS ? p.totals[thread] : 0, warp_sums);
    if (thread < DIGITS) starts[thread] = before + p.counts[thread * p.tiles + tile];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (first + number_in_tile(i) < p.m) {
        const int digit = digit_of(pairs.key[i], p.shift);
        const uint32_t place = starts[digit] + counters[thread / 32][digit] + pairs.place(i);
        p.keys_out[place] = pairs.key[i];
        p.sources_out[place] = pairs.source[i];
      }
    }
  }

  if constexpr (PHASE == ALL) {
    uint32_t(*counters)[DIGITS] = reinterpret_cast<uint32_t(*)[DIGITS]>(shared);
    uint32_t* const keys = reinterpret_cast<uint32_t*>(shared + COUNTERS_BYTES);
    uint32_t* const sources = keys + TILE;
    Pairs pairs;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int number = number_in_tile(i);
      pairs.key[i] = number < p.m ? key_of(p, number) : 0;
      pairs.source[i] = number;
    }
    for (int pass = 0; pass < p.passes; ++pass) {
      const int shift = 8 * pass;
      const uint32_t total = find_places(pairs, p.m, shift, counters);
      const uint32_t before = exclusive_sum(total, warp_sums);
      if (thread < DIGITS) starts[thread] = before;
      __syncthreads();
      uint32_t* const to_keys = pass + 1 < p.passes ? keys : p.keys_out;
      uint32_t* const to_sources = pass + 1 < p.passes ? sources : p.sources_out;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (number_in_tile(i) < p.m) {
          const int digit = digit_of(pairs.key[i], shift);
          const uint32_t place = starts[digit] + counters[thread / 32][digit] + pairs.place(i);
          to_keys[place] = pairs.key[i];
          to_sources[place] = pairs.source[i];
        }
      }
      __syncthreads();
      if (pass + 1 < p.passes) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          const int number = number_in_tile(i);
          pairs.key[i] = number < p.m ? keys[number] : 0;
          pairs.source[i] = number < p.m ? sources[number] : 0;
        }
      }
    }
  }
}
