// The one argument of linear_logp.cu, and a part of that of linear_logp_wgmma.cu; detkern/cu/linear_logp.py packs it.
#pragma once

#include "parts/logp_state.cuh"
#include "ptx/types.cuh"

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
  int64_t node, part_nodes;  // the first of FOLD's nodes; how many a whole part has
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

// Numbers of a state in `nodes`, which is [nodes][node_lines][rows]: m, s and, for the entropy, w.
DETKERN_INLINE int node_lines(const LogpParams& p) { return p.entropy ? 3 : 2; }
