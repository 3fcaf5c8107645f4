// The states of linear_logp (docs/contracts.md): (m, s, w) of some logits of a row, and what is made of them.
#pragma once

#include "parts/exponential.cuh"
#include "ptx/numbers.cuh"

constexpr float LOWEST_DISTANCE = -104.0f;  // of a logit from the largest: exp of it is +0
constexpr int UNIT = 64;                    // columns

struct State {
  float m, s, w;
};

DETKERN_INLINE State no_state() { return {__int_as_float(0xff800000), 0.0f, 0.0f}; }

// exp of 0 and less, and of NaN, without a branch.
DETKERN_INLINE float exponential_down(float x) {
  const float value = __fmul_rn(scaled_exponential(x), 1.0f / EXP_SCALE);
  return x != x ? x : value;
}

// At least -104; NaN stays.
DETKERN_INLINE float bounded(float distance) { return distance < LOWEST_DISTANCE ? LOWEST_DISTANCE : distance; }

DETKERN_INLINE State merge_states(const State& left, const State& right) {
  const bool swap = right.m > left.m;
  const State low{swap ? left.m : right.m, swap ? left.s : right.s, swap ? left.w : right.w};
  const State high{swap ? right.m : left.m, swap ? right.s : left.s, swap ? right.w : left.w};
  const float distance = low.m == high.m ? 0.0f : bounded(__fadd_rn(low.m, -high.m));
  const float f = exponential_down(distance);
  return {high.m, __fmaf_rn(low.s, f, high.s), __fmaf_rn(f, __fmaf_rn(distance, low.s, low.w), high.w)};
}

// Whether the row has results, and then the logarithm of s.
DETKERN_INLINE bool has_results(const State& state, float& log_s) {
  const bool valid = fabsf(state.m) < __int_as_float(0x7f800000) && state.s == state.s;
  log_s = logarithm(valid ? state.s : 1.0f);
  return valid;
}

// left / right, rounded, where right is from 1 to 2 and left 0, NaN or from 2^-24 to 1: __fdiv_rn without the branch
// for numbers that would leave binary32's range on the way.
DETKERN_INLINE float tame_quotient(float left, float right) {
  float inverse = approximate_reciprocal(right);
  inverse = __fmaf_rn(__fmaf_rn(-right, inverse, 1.0f), inverse, inverse);
  float quotient = __fmul_rn(left, inverse);
  quotient = __fmaf_rn(__fmaf_rn(-right, quotient, left), inverse, quotient);
  return __fmaf_rn(__fmaf_rn(-right, quotient, left), inverse, quotient);
}

// What is done to a logit before it is folded: factors that are left out are not there at all.
struct Scaling {
  float tau, cap, inverse;
  int32_t has_tau, has_cap;
};

// y of a logit z; `tangent` is what its gradient needs under a softcap. scaled, capped: which of the two steps there
// are.
DETKERN_INLINE float scaled_logit(const Scaling& scaling, float z, float& tangent, bool scaled, bool capped) {
  tangent = 0.0f;
  if (capped) {
    const float u = __fmul_rn(z, scaling.inverse);
    const float q = exponential_down(__fmul_rn(-2.0f, fabsf(u)));
    tangent = copysignf(tame_quotient(__fadd_rn(1.0f, -q), __fadd_rn(1.0f, q)), u);
    z = __fmul_rn(scaling.cap, tangent);
  }
  return scaled ? __fmul_rn(z, scaling.tau) : z;
}

DETKERN_INLINE float scaled_logit(const Scaling& scaling, float z, float& tangent) {
  return scaled_logit(scaling, z, tangent, scaling.has_tau, scaling.has_cap);
}
