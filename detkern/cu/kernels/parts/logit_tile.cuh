// What linear_logp makes of the accumulators of wgmma (docs/contracts.md): states of units, or gradients of logits.
#pragma once

#include "parts/epilogue.cuh"
#include "parts/logp_gradient.cuh"
#include "parts/logp_params.cuh"
#include "parts/logp_state.cuh"
#include "parts/part_walk.cuh"
#include "ptx/registers.cuh"

// Of 64 rows of a tile, COLUMNS wide. A lane has of columns 8 * j + 2 * t and the next, t = lane % 4, in rows g and g +
// 8 of its warp's sixteen: acc[j][2 * half] and the next. So a lane's columns of a unit differ in bits 3, 4, 5 and 0 of
// their places, and the lanes of a row in bits 1 and 2. WITH_ENTROPY, WITH_CAP: whether there is an entropy, a softcap.
template <int COLUMNS, bool WITH_BIAS, bool WITH_ENTROPY, bool WITH_CAP>
class LogitBlock {
 public:
  static constexpr int UNITS = COLUMNS / UNIT;
  // Of a tile, in `nodes`: all of its units together, but of three the pair that merges and the other one.
  static constexpr int NODES = UNITS == 3 ? 2 : 1;
  using Accumulators = float[COLUMNS / 8][4];
  static_assert(COLUMNS % UNIT == 0 && UNITS >= 2 && UNITS <= 4, "whole units");

  // product: of the logits. tile: whose first row is row_of(0) of the whole block.
  DETKERN_INLINE LogitBlock(const GemmParams& product, const LogpParams& p, const LogitTile& tile, Accumulators& acc)
      : product_(product), p_(p), tile_(tile), acc_(acc), scaling_(p.scaling) {
    if (!p.scaling.has_tau) scaling_.tau = 1.0f;  // which changes nothing
    const int lane = thread_index() % 32;
    row_ = tile.row + thread_index() / 32 % 4 * 16 + lane / 4;
    first_ = tile.column + lane % 4 * 2;
  }

  // Writes the states of the units that the tile has, and the logits of targets.
  DETKERN_INLINE void fold() {
    finish_logits();
    pick_targets();
    if (tile_.end - tile_.column < COLUMNS) leave_out_columns();
    float m[UNITS][2];
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) m[unit][half] = maximum<true>(unit, half);
    }
    const uint32_t spoiled = clean(m);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      State states[UNITS];
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
        states[unit] = unit_state(unit, half, m[unit][half]);
        if (spoiled >> (2 * unit + half) & 1) {
          states[unit].s = __int_as_float(0x7fffffff);
          if (WITH_ENTROPY) states[unit].w = __int_as_float(0x7fffffff);
        }
      }
      store(half, states);
    }
  }

  // Puts the gradients of the logits in their place.
  DETKERN_INLINE void differentiate() {
    if (WITH_BIAS) add_bias();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(row_ + 8 * half, last_row());
      const RowGradient gradient(p_, row, WITH_ENTROPY);
      const uint64_t done = differentiate_targets(half, row, gradient);
      if (__any_sync(~0u, done != 0)) {
        differentiate_others<true>(half, gradient, done);
      } else {
        differentiate_others<false>(half, gradient, 0);
      }
    }
  }

 private:
  DETKERN_INLINE int last_row() const { return static_cast<int>(p_.rows) - 1; }

  DETKERN_INLINE void add_bias() {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float bias = bias_at(product_, first_ + 8 * j + i, product_.n);
        acc_[j][i] = __fadd_rn(acc_[j][i], bias);
        acc_[j][2 + i] = __fadd_rn(acc_[j][2 + i], bias);
      }
    }
  }

  DETKERN_INLINE void finish_logits() {
    if (WITH_BIAS) add_bias();
    if (!WITH_CAP && !p_.scaling.has_tau) return;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float tangent;
        acc_[j][i] = scaled_logit(scaling_, acc_[j][i], tangent, true, WITH_CAP);
      }
    }
  }

  // Where a target is, behind the tile's first column.
  DETKERN_INLINE int64_t behind(int row, int k) const { return target_of(p_, row, k) - p_.column - tile_.column; }

  DETKERN_INLINE bool inside(int64_t behind) const {
    return behind >= 0 && behind < min(COLUMNS, tile_.end - tile_.column);
  }

  // The logit at a place of this lane.
  DETKERN_INLINE float pick(int half, int place) const {
    float y = 0.0f;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      set_if(place / 8 == j, y, place % 2 ? acc_[j][2 * half + 1] : acc_[j][2 * half]);
    }
    return y;
  }

  DETKERN_INLINE void pick_targets() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      if (row > last_row()) continue;
#pragma unroll 1
      for (int k = 0; k < p_.targets; ++k) {
        const int64_t found = behind(row, k);
        if (!inside(found) || found / 2 % 4 != thread_index() % 4) continue;
        const float y = pick(half, static_cast<int>(found));
        p_.state[(3 + k) * p_.state_line + row * p_.state_row] = __fadd_rn(y, 0.0f);
      }
    }
  }

  DETKERN_INLINE void leave_out_columns() {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first_ + 8 * j + i % 2 >= tile_.end) acc_[j][i] = __int_as_float(0xff800000);
      }
    }
  }

  // Of a unit of a row: NaN where one is (PASSES_NAN), else the largest of the others.
  template <bool PASSES_NAN>
  DETKERN_INLINE float maximum(int unit, int half) const {
    const auto larger = [](float left, float right) {
      float result;
      if (PASSES_NAN) {
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(left), "f"(right));
      } else {
        result = fmaxf(left, right);
      }
      return result;
    };
    float m = larger(acc_[8 * unit][2 * half], acc_[8 * unit][2 * half + 1]);
#pragma unroll
    for (int j = 1; j < 8; ++j) {
      m = larger(m, larger(acc_[8 * unit + j][2 * half], acc_[8 * unit + j][2 * half + 1]));
    }
    m = larger(m, __shfl_xor_sync(~0u, m, 1));
    return larger(m, __shfl_xor_sync(~0u, m, 2));
  }

  // Which units have a NaN or a largest logit of infinity, whose sums are NaN. Units with a NaN are without it
  // afterwards, and m is their largest logit: hardly any warp has one, so that sums need not see to it.
  DETKERN_INLINE uint32_t clean(float (&m)[UNITS][2]) {
    uint32_t spoiled = 0;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        spoiled |= !(m[unit][half] < __int_as_float(0x7f800000)) ? 1u << (2 * unit + half) : 0u;
      }
    }
    if (!__any_sync(~0u, spoiled != 0)) return 0;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& y = acc_[8 * unit + j][2 * half + i];
            y = y != y ? __int_as_float(0xff800000) : y;
          }
        }
        m[unit][half] = maximum<false>(unit, half);
      }
    }
    return spoiled;
  }

  // The sum of a unit's terms in the contract's order.
  DETKERN_INLINE static float unit_sum(const float (&terms)[8][2]) {
    float sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = __fadd_rn(__fadd_rn(terms[0][i], terms[1][i]), __fadd_rn(terms[2][i], terms[3][i]));
      const float high = __fadd_rn(__fadd_rn(terms[4][i], terms[5][i]), __fadd_rn(terms[6][i], terms[7][i]));
      sums[i] = __fadd_rn(low, high);
    }
    float sum = __fadd_rn(sums[0], sums[1]);
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  }

  DETKERN_INLINE State unit_state(int unit, int half, float m) const {
    m = __fadd_rn(m, 0.0f);
    const float base = m == __int_as_float(0xff800000) ? 0.0f : m;
    float e[8][2], weighted[8][2];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float d = __fadd_rn(acc_[8 * unit + j][2 * half + i], -base);
        e[j][i] = __fmul_rn(scaled_exponential(d), 1.0f / EXP_SCALE);
        if (WITH_ENTROPY) weighted[j][i] = __fmul_rn(e[j][i], fmaxf(d, LOWEST_DISTANCE));
      }
    }
    return {m, unit_sum(e), WITH_ENTROPY ? unit_sum(weighted) : 0.0f};
  }

  // By number: a chosen struct would be one in memory.
  static DETKERN_INLINE State either(bool first, const State& left, const State& right) {
    return {first ? left.m : right.m, first ? left.s : right.s, first ? left.w : right.w};
  }

  // The lanes of a row write a number each. Units beyond the part's end have no states.
  DETKERN_INLINE void store(int half, const State (&states)[UNITS]) const {
    const int64_t node = tile_.part * p_.part_nodes + NODES * tile_.place;
    const int units = (tile_.end - tile_.column + UNIT - 1) / UNIT;
    if constexpr (UNITS == 2) {
      store(half, node, units > 1 ? merge_states(states[0], states[1]) : states[0]);
    } else if constexpr (UNITS == 3) {
      // The pair begins at an even unit of the part.
      const bool odd = tile_.place % 2;
      const State left = either(odd, states[1], states[0]), right = either(odd, states[2], states[1]);
      const State pair = units > (odd ? 2 : 1) ? merge_states(left, right) : left;
      if (units > odd) store(half, node + odd, pair);
      if (odd || units > 2) store(half, node + 1 - odd, either(odd, states[0], states[2]));
    } else {
      const State left = units > 1 ? merge_states(states[0], states[1]) : states[0];
      const State right = units > 3 ? merge_states(states[2], states[3]) : states[2];
      store(half, node, units > 2 ? merge_states(left, right) : left);
    }
  }

  DETKERN_INLINE void store(int half, int64_t node, const State& state) const {
    constexpr int LINES = WITH_ENTROPY ? 3 : 2;
    const int line = thread_index() % 4, row = row_ + 8 * half;
    if (line >= LINES || row > last_row()) return;
    p_.nodes[(node * LINES + line) * p_.rows + row] = line == 0 ? state.m : line == 1 ? state.s : state.w;
  }

  // The gradient of a logit z before scaling. column: of the vocabulary, where it may be a target.
  template <bool MAY_BE_TARGET>
  DETKERN_INLINE float gradient_of(const RowGradient& gradient, float z, int row, int64_t column) const {
    float tangent;
    const float y = scaled_logit(scaling_, z, tangent, true, WITH_CAP);
    const float d = __fadd_rn(y, -gradient.m);
    // No logit is above the row's largest, and a row with a NaN has a factor of NaN.
    const float e = __fmul_rn(scaled_exponential(d), 1.0f / EXP_SCALE);
    float value = gradient.of_others(d, e, WITH_ENTROPY);
    if (MAY_BE_TARGET) value = with_targets(p_, row, column, value);
    return before_scaling(scaling_, value, tangent, true, WITH_CAP);
  }

  // Puts the gradients of those of this lane's logits of a row in their place that are targets, and tells which these
  // are: bit 2 * j + i for acc_[j][2 * half + i].
  DETKERN_INLINE uint64_t differentiate_targets(int half, int row, const RowGradient& gradient) {
    uint64_t done = 0;
#pragma unroll 1
    for (int k = 0; k < p_.targets; ++k) {
      const int64_t found = behind(row, k);
      if (!inside(found) || found / 2 % 4 != thread_index() % 4) continue;
      const int place = static_cast<int>(found);
      const uint64_t bit = uint64_t{1} << (place / 8 * 2 + place % 2);
      if (done & bit) continue;  // with an earlier target
      done |= bit;
      const float value =
          gradient_of<true>(gradient, pick(half, place), row, p_.column + tile_.column + place);
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        set_if(place == 8 * j + place % 8 && place % 2 == 0, acc_[j][2 * half], value);
        set_if(place == 8 * j + place % 8 && place % 2 == 1, acc_[j][2 * half + 1], value);
      }
    }
    return done;
  }

  // The same of all logits of a row, but for those that are done.
  template <bool SOME_DONE>
  DETKERN_INLINE void differentiate_others(int half, const RowGradient& gradient, uint64_t done) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& z = acc_[j][2 * half + i];
        const float value = gradient_of<false>(gradient, z, 0, 0);
        z = SOME_DONE && (done >> (2 * j + i) & 1) ? z : value;
      }
    }
  }

  const GemmParams& product_;
  const LogpParams& p_;
  const LogitTile& tile_;
  Accumulators& acc_;
  Scaling scaling_;
  int row_, first_;  // of the lane: its first row, its first column
};
