// The gradient of linear_logp's logits (docs/contracts.md): what a row's are made with, and one of them.
#pragma once

#include "parts/logp_params.cuh"

// Of a row. factor: what p is multiplied by, or with the entropy a part of it; NaN makes the whole row NaN.
struct RowGradient {
  float m, inverse, factor, back, log_s;

  RowGradient() = default;

  DETKERN_INLINE RowGradient(const LogpParams& p, int64_t row, bool entropy) {
    const float* source = p.state + row * p.state_row;
    const State state{source[0], source[p.state_line], source[2 * p.state_line]};
    const float* grads = p.grads + row * p.grads_row;
    bool valid = has_results(state, log_s);
    float total = 0.0f;
#pragma unroll 1
    for (int k = 0; k < p.targets; ++k) {
      const int64_t column = target_of(p, row, k);
      const bool ignored = column == p.ignore_index;
      total = __fadd_rn(total, ignored ? 0.0f : grads[k * p.grads_line]);
      valid &= ignored || (column >= 0 && column < p.vocabulary);
    }
    m = state.m, inverse = __frcp_rn(state.s);
    factor = __fadd_rn(grads[p.targets * p.grads_line], -total), back = 0.0f;
    if (entropy) {
      back = -grads[(p.targets + 1) * p.grads_line];
      factor = __fmaf_rn(back, __fadd_rn(log_s, -__fdiv_rn(state.w, state.s)), factor);
    }
    if (!valid) factor = __int_as_float(0x7fffffff);
  }

  // The gradient that y has without its being a target. d: its distance from m; e: exp(d).
  DETKERN_INLINE float of_others(float d, float e, bool entropy) const {
    const float x = entropy ? __fmaf_rn(back, __fadd_rn(bounded(d), -log_s), factor) : factor;
    return __fmul_rn(__fmul_rn(e, inverse), x);
  }
};

// `value` with the gradients of those of the row's targets added that are this column of the vocabulary.
DETKERN_INLINE float with_targets(const LogpParams& p, int64_t row, int64_t column, float value) {
#pragma unroll 1
  for (int k = 0; k < p.targets; ++k) {
    const int64_t target = target_of(p, row, k);
    if (target == column && target != p.ignore_index)
      value = __fadd_rn(value, p.grads[k * p.grads_line + row * p.grads_row]);
  }
  return value;
}

// The gradient of a logit before scaling, of that of y, still to be rounded. capped, scaled: whether there is a
// softcap, a factor.
DETKERN_INLINE float before_scaling(const Scaling& scaling, float value, float tangent, bool scaled, bool capped) {
  if (scaled) value = __fmul_rn(value, scaling.tau);
  if (capped) value = __fmul_rn(value, __fmaf_rn(-tangent, tangent, 1.0f));
  return __fadd_rn(value, 0.0f);
}
