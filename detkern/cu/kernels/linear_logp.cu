// linear_logp (docs/contracts.md) from blocks of finished logits, binary32, that a product has left in scratch memory:
// any contract and device that has products.
//
// PHASE. FOLD: a block to the states of groups of four units, 256 columns of a part. MERGE: the groups of a shard to
// its state. RESULTS: the states of shards to log-probabilities, lse and entropy. DELTA: a block to the gradient of its
// logits.
// Launch. 256 threads. FOLD: grid (ceil(rows / 8), groups), a warp a row, eight lanes a unit. MERGE: grid
// ceil(rows / 32), a warp a part. RESULTS: grid ceil(rows / 256). DELTA: grid (rows, ceil(columns / 2048)).
// Memory. No dynamic shared memory. `nodes`: [groups][3][rows] binary32, written by FOLD, read by MERGE.
#include "parts/logp_state.cuh"
#include "ptx/numbers.cuh"
#include "ptx/types.cuh"

enum Phase : int32_t { FOLD = 0, MERGE = 1, RESULTS = 2, DELTA = 3 };

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int GROUP = 4 * UNIT;
constexpr int DELTA_COLUMNS = 8 * THREADS;
constexpr int PARTS = 8, LEVELS = 24;  // of a tree over the groups of a part: for vocabularies to 2^35

struct LogpParams {
  const float* logits;  // of a block [rows, columns]
  float* nodes;
  const void* target;
  float* state;  // of RESULTS: those of all shards
  const float* grads;
  void* out;
  int64_t rows, logits_row;
  int64_t target_row, target_col;
  int64_t state_shard, state_line, state_row;
  int64_t grads_line, grads_row;
  int64_t out_row, out_col;  // of RESULTS: between lines and between rows
  int64_t vocabulary, part_length;
  int64_t column, columns;  // of the block, FOLD and DELTA; of the shard, MERGE: the first one, and how many
  int64_t node, part_groups;  // the first of FOLD's groups; how many a whole part has
  int64_t ignore_index;
  int32_t first_part, parts, shards, targets;
  int32_t entropy, wide_targets, out_dtype;
  Scaling scaling;
};

DETKERN_INLINE int64_t target_of(const LogpParams& p, int64_t row, int k) {
  const int64_t at = row * p.target_row + k * p.target_col;
  return p.wide_targets ? static_cast<const int64_t*>(p.target)[at] : static_cast<const int32_t*>(p.target)[at];
}

DETKERN_INLINE int64_t part_edge(const LogpParams& p, int part) {
  const int64_t edge = part * p.part_length;
  return edge < p.vocabulary ? edge : p.vocabulary;
}

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
  const int part = p.first_part + static_cast<int>(node / p.part_groups);
  const int64_t end = part_edge(p, part + 1);
  const int64_t first = part_edge(p, part) + node % p.part_groups * GROUP;
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
    float* target = p.nodes + node * 3 * p.rows + row;
    target[0] = state.m, target[p.rows] = state.s, target[2 * p.rows] = state.w;
  }
}

DETKERN_INLINE void merge(const LogpParams& p) {
  __shared__ float shared[3][PARTS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  const bool inside = row < p.rows;
  State state = no_state();
  if (inside && warp < p.parts) {
    const int part = p.first_part + warp;
    const int64_t groups = (part_edge(p, part + 1) - part_edge(p, part) + GROUP - 1) / GROUP;
    // A binary counter, whose levels are registers.
    State waiting[LEVELS];
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) waiting[level] = no_state();
    for (int64_t group = 0; group < groups; ++group) {
      const float* source = p.nodes + (warp * p.part_groups + group) * 3 * p.rows + row;
      State leaf{source[0], source[p.rows], source[2 * p.rows]};
      bool done = false;
#pragma unroll
      for (int level = 0; level < LEVELS; ++level) {
        if (done) continue;
        done = !(group >> level & 1);
        if (done) waiting[level] = leaf;
        else leaf = merge_states(waiting[level], leaf);
      }
    }
    bool any = false;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
      if (!(groups >> level & 1)) continue;
      state = any ? merge_states(waiting[level], state) : waiting[level];
      any = true;
    }
  }
  shared[0][warp][lane] = state.m, shared[1][warp][lane] = state.s, shared[2][warp][lane] = state.w;
  __syncthreads();
  if (warp != 0 || !inside) return;
  State parts[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; ++i) parts[i] = {shared[0][i][lane], shared[1][i][lane], shared[2][i][lane]};
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
  const State state{p.state[row * p.state_row], p.state[p.state_line + row * p.state_row],
                    p.state[2 * p.state_line + row * p.state_row]};
  const float* grads = p.grads + row * p.grads_row;
  float log_s;
  bool valid = has_results(state, log_s);
  float total = 0.0f;
  for (int k = 0; k < p.targets; ++k) {
    const int64_t column = target_of(p, row, k);
    const bool ignored = column == p.ignore_index;
    total = __fadd_rn(total, ignored ? 0.0f : grads[k * p.grads_line]);
    valid &= ignored || (column >= 0 && column < p.vocabulary);
  }
  float factor = __fadd_rn(grads[p.targets * p.grads_line], -total), back = 0.0f;
  if (p.entropy) {
    back = -grads[(p.targets + 1) * p.grads_line];
    factor = __fmaf_rn(back, __fadd_rn(log_s, -__fdiv_rn(state.w, state.s)), factor);
  }
  const float inverse = __frcp_rn(state.s);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * DELTA_COLUMNS + threadIdx.x;
#pragma unroll
  for (int i = 0; i < DELTA_COLUMNS / THREADS; ++i) {
    const int64_t at = first + i * THREADS;
    if (at >= p.columns) continue;
    float tangent;
    const float y = scaled_logit(p.scaling, p.logits[row * p.logits_row + at], tangent);
    const float d = __fadd_rn(y, -state.m);
    float x = factor;
    if (p.entropy) x = __fmaf_rn(back, __fadd_rn(bounded(d), -log_s), factor);
    float value = __fmul_rn(__fmul_rn(exponential(d), inverse), x);
    for (int k = 0; k < p.targets; ++k) {
      const int64_t column = target_of(p, row, k);
      if (column == p.column + at && column != p.ignore_index) value = __fadd_rn(value, grads[k * p.grads_line]);
    }
    value = valid ? value : __int_as_float(0x7fffffff);
    if (p.scaling.has_tau) value = __fmul_rn(value, p.scaling.tau);
    if (p.scaling.has_cap) value = __fmul_rn(value, __fmaf_rn(-tangent, tangent, 1.0f));
    value = __fadd_rn(value, 0.0f);
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
