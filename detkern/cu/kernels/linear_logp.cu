// linear_logp (docs/contracts.md) from blocks of finished logits, binary32, that a product has left in scratch memory:
// any contract and device that has products.
//
// PHASE. FOLD: a block to the states of nodes of four units, 256 columns of a part. MERGE: the nodes of a shard to its
// state, from here (TILE_UNITS 4) or from linear_logp_wgmma.cu, whose tiles have 2 to 4 units of a row. RESULTS: the
// states of shards to log-probabilities, lse and entropy. DELTA: a block to the gradient of its logits.
// Launch. 256 threads. FOLD: grid (ceil(rows / 8), nodes), a warp a row, eight lanes a unit. MERGE: grid
// ceil(rows / MERGE_ROWS), a warp a part, of MERGE_ROWS rows (1, 8) 32 / MERGE_ROWS slices each; DEPENDENT (1), behind
// linear_logp_wgmma.cu, a dependent launch. RESULTS: grid ceil(rows / 256). DELTA: grid (rows,
// ceil(columns / 2048)).
// Memory. No dynamic shared memory. `nodes`: [nodes][2, or 3 with entropy][rows] binary32, read by MERGE.
#include "parts/logp_gradient.cuh"
#include "parts/logp_params.cuh"
#include "parts/logp_state.cuh"
#include "ptx/barrier.cuh"
#include "ptx/numbers.cuh"
#include "ptx/types.cuh"

#ifndef TILE_UNITS
#define TILE_UNITS 4
#endif
#ifndef MERGE_ROWS
#define MERGE_ROWS 8
#endif
#ifndef DEPENDENT
#define DEPENDENT 0
#endif

enum Phase : int32_t { FOLD = 0, MERGE = 1, RESULTS = 2, DELTA = 3 };

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int GROUP = 4 * UNIT;
constexpr int NODE_UNITS = TILE_UNITS == 4 ? 4 : 2;  // of a node of MERGE
constexpr int SLICES = 32 / MERGE_ROWS;
constexpr int DELTA_COLUMNS = 8 * THREADS;
constexpr int PARTS = 8;
// Of a tree over the blocks of a slice of a part: for vocabularies to 2^31, of linear_logp_wgmma.cu to 2^22.
constexpr int LEVELS = DEPENDENT ? 8 : 18;

DETKERN_INLINE State shuffled(const State& state, int lanes) {
  return {__shfl_xor_sync(~0u, state.m, lanes), __shfl_xor_sync(~0u, state.s, lanes),
          __shfl_xor_sync(~0u, state.w, lanes)};
}

// states[0] = the state of all: pairs, pairs of these, and so on. no_state(), behind those that there are, changes
// nothing.
DETKERN_INLINE void merge_all(State (&states)[PARTS]) {
#pragma unroll
  for (int count = PARTS; count > 1; count /= 2)
#pragma unroll
    for (int i = 0; i < PARTS / 2; ++i)
      if (i < count / 2) states[i] = merge_states(states[2 * i], states[2 * i + 1]);
}

// The sum of a unit's 64: of columns 8 j + lane, j first (bits 3, 4, 5), then the lanes (bits 0, 1, 2).
DETKERN_INLINE float unit_sum(const float (&terms)[8]) {
  const float low = __fadd_rn(__fadd_rn(terms[0], terms[1]), __fadd_rn(terms[2], terms[3]));
  const float high = __fadd_rn(__fadd_rn(terms[4], terms[5]), __fadd_rn(terms[6], terms[7]));
  float sum = __fadd_rn(low, high);
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, lanes));
  return sum;
}

DETKERN_INLINE void fold(const LogpParams& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = lane % 8;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + warp;
  const int64_t node = p.node + blockIdx.y;
  const int part = p.first_part + static_cast<int>(node / p.part_nodes);
  const int64_t end = part_edge(p, part + 1);
  const int64_t first = part_edge(p, part) + node % p.part_nodes * GROUP;
  if (row >= p.rows || first >= end) return;  // whole warps
  const int64_t column = first + lane / 8 * UNIT + place;
  const float* source = p.logits + row * p.logits_row + (column - p.column);
  float y[8], m = __int_as_float(0xff800000);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float tangent;
    y[j] = column + 8 * j < end ? scaled_logit(p.scaling, source[8 * j], tangent) : __int_as_float(0xff800000);
    m = fmaxf(m, y[j]);
  }
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
  m = __fadd_rn(m, 0.0f);
  for (int k = 0; k < p.targets; ++k) {
    const int64_t behind = target_of(p, row, k) - column;
    if (behind < 0 || behind >= UNIT || behind % 8 != 0 || column + behind >= end) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (behind == 8 * j) p.state[(3 + k) * p.state_line + row * p.state_row] = __fadd_rn(y[j], 0.0f);
  }
  float e[8], weighted[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float d = m == __int_as_float(0xff800000) ? y[j] : __fadd_rn(y[j], -m);
    e[j] = exponential_down(d);
    weighted[j] = __fmul_rn(e[j], bounded(d));
  }
  State state{m, unit_sum(e), p.entropy ? unit_sum(weighted) : 0.0f};
#pragma unroll
  for (int lanes = 8; lanes < 32; lanes *= 2) {
    const State other = shuffled(state, lanes);
    const bool right = lane & lanes;
    const State left_one{right ? other.m : state.m, right ? other.s : state.s, right ? other.w : state.w};
    const State right_one{right ? state.m : other.m, right ? state.s : other.s, right ? state.w : other.w};
    const State merged = merge_states(left_one, right_one);
    // Where the right one begins beyond the part, the left one passes.
    const int64_t right_unit = first + ((lane / 8 | lanes / 8) & ~(lanes / 8 - 1)) * UNIT;
    if (right_unit < end) state = merged;
  }
  if (lane == 0) {
    float* target = p.nodes + node * node_lines(p) * p.rows + row;
    target[0] = state.m, target[p.rows] = state.s;
    if (p.entropy) target[2 * p.rows] = state.w;
  }
}

// State number `node` of a part, of NODE_UNITS units. source: the row's first number of the part. A tile of three units
// leaves two states, that of the pair of which it has both and that of the other unit, whose second is the next tile's.
DETKERN_INLINE State node_state(const LogpParams& p, const float* source, int64_t node, int64_t units) {
  const int lines = node_lines(p);
  const auto stored = [&](int64_t at) {
    const float* place = source + at * lines * p.rows;
    return State{place[0], place[p.rows], lines == 3 ? place[2 * p.rows] : 0.0f};
  };
  if (TILE_UNITS != 3) return stored(node);
  const int64_t unit = 2 * node, place = unit / 3 * 2 + (unit % 3 != 0);
  State state = stored(place);
  if (unit % 3 == 2 && unit + 1 < units) state = merge_states(state, stored(place + 1));
  return state;
}

// States of a part's nodes [first, last), merged by a binary counter of blocks of nodes, whose levels are registers.
DETKERN_INLINE State merged_nodes(const LogpParams& p, const float* source, int64_t first, int64_t last,
                                  int64_t units) {
  constexpr int BLOCK = 4;
  State waiting[LEVELS];
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) waiting[level] = no_state();
  int64_t blocks = 0;
#pragma unroll 1
  for (int64_t node = first; node < last; node += BLOCK, ++blocks) {
    State block[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; ++i)
      if (node + i < last) block[i] = node_state(p, source, node + i, units);
#pragma unroll
    for (int distance = 1; distance < BLOCK; distance *= 2)
#pragma unroll
      for (int i = 0; i < BLOCK; i += 2 * distance)
        if (node + i + distance < last) block[i] = merge_states(block[i], block[i + distance]);
    bool done = false;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
      if (done) continue;
      done = !(blocks >> level & 1);
      if (done) waiting[level] = block[0];
      else block[0] = merge_states(waiting[level], block[0]);
    }
  }
  State state = no_state();
  bool any = false;
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    if (!(blocks >> level & 1)) continue;
    state = any ? merge_states(waiting[level], state) : waiting[level];
    any = true;
  }
  return state;
}

DETKERN_INLINE void merge(const LogpParams& p) {
  if constexpr (DEPENDENT) wait_for_earlier_grid();
  __shared__ float shared[3][PARTS][MERGE_ROWS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, place = lane % MERGE_ROWS;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * MERGE_ROWS + place;
  const bool inside = row < p.rows;
  State state = no_state();
  int64_t slices = 0;
  if (warp < p.parts) {
    const int part = p.first_part + warp;
    const int64_t units = (part_edge(p, part + 1) - part_edge(p, part) + UNIT - 1) / UNIT;
    const int64_t nodes = (units + NODE_UNITS - 1) / NODE_UNITS;
    int64_t slice = 1;  // nodes of a whole slice: a power of two, so that slices are subtrees
    while (slice * SLICES < nodes) slice *= 2;
    slices = (nodes + slice - 1) / slice;
    const int64_t first = lane / MERGE_ROWS * slice;
    if (inside) {
      const float* source = p.nodes + warp * p.part_nodes * node_lines(p) * p.rows + row;
      state = merged_nodes(p, source, first, first + slice < nodes ? first + slice : nodes, units);
    }
  }
#pragma unroll
  for (int distance = 1; distance < SLICES; distance *= 2) {
    const State right = shuffled(state, distance * MERGE_ROWS);
    const int slice = lane / MERGE_ROWS;
    if (slice % (2 * distance) == 0 && slice + distance < slices) state = merge_states(state, right);
  }
  if (lane < MERGE_ROWS) {
    shared[0][warp][place] = state.m;
    shared[1][warp][place] = state.s;
    shared[2][warp][place] = state.w;
  }
  __syncthreads();
  if (warp != 0 || lane >= MERGE_ROWS || !inside) return;
  State parts[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; ++i) parts[i] = {shared[0][i][place], shared[1][i][place], shared[2][i][place]};
  merge_all(parts);
  float* target = p.state + row * p.state_row;
  target[0] = __fadd_rn(parts[0].m, 0.0f);
  target[p.state_line] = __fadd_rn(parts[0].s, 0.0f);
  target[2 * p.state_line] = p.entropy ? __fadd_rn(parts[0].w, 0.0f) : 0.0f;
  for (int k = 0; k < p.targets; ++k) {
    const int64_t behind = target_of(p, row, k) - p.column;
    if (behind < 0 || behind >= p.columns) target[(3 + k) * p.state_line] = __int_as_float(0xff800000);
  }
}

DETKERN_INLINE void results(const LogpParams& p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (row >= p.rows) return;
  const float nan = __int_as_float(0x7fffffff);
  const float* source = p.state + row * p.state_row;
  State states[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const float* shard = source + i * p.state_shard;
    if (i < p.shards) states[i] = {shard[0], shard[p.state_line], shard[2 * p.state_line]};
    else states[i] = no_state();
  }
  merge_all(states);
  const State state{__fadd_rn(states[0].m, 0.0f), __fadd_rn(states[0].s, 0.0f), __fadd_rn(states[0].w, 0.0f)};
  float log_s;
  const bool valid = has_results(state, log_s);
  float* target = static_cast<float*>(p.out) + row * p.out_col;
  for (int k = 0; k < p.targets; ++k) {
    const int64_t column = target_of(p, row, k);
    float y = source[(3 + k) * p.state_line];
    for (int i = 1; i < p.shards; ++i) y = fmaxf(y, source[i * p.state_shard + (3 + k) * p.state_line]);
    float logp = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(y, 0.0f), -state.m), -log_s), 0.0f);
    if (!valid || column < 0 || column >= p.vocabulary) logp = nan;
    if (column == p.ignore_index) logp = 0.0f;
    target[k * p.out_row] = logp;
  }
  target[p.targets * p.out_row] = valid ? __fadd_rn(__fadd_rn(state.m, log_s), 0.0f) : nan;
  if (p.entropy) {
    const float entropy = __fadd_rn(__fadd_rn(log_s, -__fdiv_rn(state.w, state.s)), 0.0f);
    target[(p.targets + 1) * p.out_row] = valid ? entropy : nan;
  }
}

DETKERN_INLINE void delta(const LogpParams& p) {
  const int64_t row = blockIdx.x;
  const RowGradient gradient(p, row, p.entropy);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * DELTA_COLUMNS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < DELTA_COLUMNS / THREADS; ++i) {
    const int64_t at = first + i * THREADS;
    if (at >= p.columns) continue;
    float tangent;
    const float y = scaled_logit(p.scaling, p.logits[row * p.logits_row + at], tangent);
    const float d = __fadd_rn(y, -gradient.m);
    float value = gradient.of_others(d, exponential(d), p.entropy);
    value = with_targets(p, row, p.column + at, value);
    value = before_scaling(p.scaling, value, tangent, p.scaling.has_tau, p.scaling.has_cap);
    const int64_t to = row * p.out_row + at * p.out_col;
    if (p.out_dtype == F32) {
      static_cast<float*>(p.out)[to] = value;
    } else {
      static_cast<uint16_t*>(p.out)[to] = p.out_dtype == F16 ? round_one<F16>(value) : round_one<BF16>(value);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) detkern_kernel(const __grid_constant__ LogpParams p) {
  if constexpr (PHASE == FOLD) fold(p);
  if constexpr (PHASE == MERGE) merge(p);
  if constexpr (PHASE == RESULTS) results(p);
  if constexpr (PHASE == DELTA) delta(p);
}
