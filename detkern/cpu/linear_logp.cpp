// linear_logp of docs/contracts.md: a product leaves a block of logits in scratch memory, in binary32, and its rows are
// folded into states, or become the gradient of these logits.
//
// Blocks are of at most 256 rows, whole units wide, and of one part where they are folded; how they are cut changes no
// bit.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "epilogue.h"
#include "exponential.h"
#include "job.h"
#include "simd.h"
#include "tiling.h"

namespace detkern {
namespace {

constexpr int UNIT = 64, PARTS = 8;
constexpr int MOST_ROWS = 256;
constexpr int64_t BLOCK_LOGITS = 1 << 21;     // 8 MB
constexpr int64_t WORKER_LOGITS = 1 << 16;    // that are worth another thread
constexpr int LEVELS = 60, PART_LEVELS = 4;   // of a tree over the units of a part, and over parts
constexpr float LOWEST = -104.0f;             // of a distance from the largest: exp of it is +0
constexpr float INFINITE = std::numeric_limits<float>::infinity();

static_assert(UNIT % LANES == 0, "a unit is whole vectors");

struct State {
  float m, s, w;
};

constexpr State NOTHING = {-INFINITE, 0.0f, 0.0f};

float bounded(float distance) { return distance < LOWEST ? LOWEST : distance; }
Float bounded(Float distance) { return select(distance < splat(LOWEST), splat(LOWEST), distance); }

State merge(const State& left, const State& right) {
  const bool swap = right.m > left.m;
  const State &low = swap ? left : right, &high = swap ? right : left;
  const float distance = low.m == high.m ? 0.0f : bounded(low.m - high.m);
  const float f = exponential(splat(distance))[0];
  return {high.m, std::fma(low.s, f, high.s), std::fma(f, std::fma(distance, low.s, low.w), high.w)};
}

// States of a tree whose leaves come in order: a binary counter, in which what has waited longest has the most leaves.
template <int MOST>
struct Counter {
  State waiting[MOST];

  // `leaf`: how many there were before.
  void add(int64_t leaf, State state) {
    int level = __builtin_popcountll(uint64_t(leaf));
    for (int64_t full = leaf; full & 1; full >>= 1) state = merge(waiting[--level], state);
    waiting[level] = state;
  }

  State root(int64_t leaves) const {
    int level = __builtin_popcountll(uint64_t(leaves));
    if (level == 0) return NOTHING;
    State state = waiting[--level];
    while (level) state = merge(waiting[--level], state);
    return state;
  }
};

struct Row {
  Counter<LEVELS> units;
  Counter<PART_LEVELS> parts;
};

// y of logits, and under a softcap the hyperbolic tangent.
Float scaled(const LogpJob& job, Float z, Float& tangent) {
  if (job.cap != 0) {
    const Float u = z * splat(job.inverse);
    const Int sign = as_int(u) & splat_int(INT32_MIN);
    const Float q = exponential(splat(-2.0f) * as_float(as_int(u) ^ sign));
    tangent = as_float(as_int((splat(1.0f) - q) / (splat(1.0f) + q)) | sign);
    z = splat(job.cap) * tangent;
  }
  return job.tau != 0 ? z * splat(job.tau) : z;
}

// Of 64: places that differ in bit 3 first, then 4, 5, 0, 1, 2.
float unit_sum(const float* terms) {
  float sums[UNIT / 2];
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 8; ++i) sums[8 * j + i] = terms[16 * j + i] + terms[16 * j + 8 + i];
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 8; ++i) sums[8 * j + i] = sums[16 * j + i] + sums[16 * j + 8 + i];
  for (int i = 0; i < 8; ++i) sums[i] += sums[8 + i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

State unit_state(const float* y, bool entropy) {
  Float most = splat(-INFINITE);
  for (int k = 0; k < UNIT; k += LANES) {
    const Float value = load_vector(y + k);
    most = select(value > most, value, most);  // a comparison that a NaN fails
  }
  float m = -INFINITE;
  for (int i = 0; i < LANES; ++i) m = most[i] > m ? most[i] : m;
  m += 0.0f;
  alignas(64) float e[UNIT], weighted[UNIT];
  for (int k = 0; k < UNIT; k += LANES) {
    const Float value = load_vector(y + k), d = m == -INFINITE ? value : value - splat(m);
    const Float term = exponential(d);
    store_vector(e + k, term);
    if (entropy) store_vector(weighted + k, term * bounded(d));
  }
  return {m, unit_sum(e), entropy ? unit_sum(weighted) : 0.0f};
}

int64_t target_of(const LogpJob& job, int64_t row, int k) {
  const char* address = job.target + row * job.target_row_stride + k * job.target_col_stride;
  return job.wide_targets ? load_raw<int64_t>(address) : load_raw<int32_t>(address);
}

float number(const Lines& lines, int line, int64_t row) {
  return load_raw<float>(lines.data + line * lines.line_stride + row * lines.row_stride);
}

void set_number(const Lines& lines, int line, int64_t row, float value) {
  store<DETKERN_F32>(lines.data + line * lines.line_stride + row * lines.row_stride, canonical(value + 0.0f));
}

struct Block {
  int64_t row, column;
  int rows;
  int64_t columns;
  float* logits;
  int64_t pitch;

  const float* of(int r) const { return logits + r * pitch; }
};

void multiply(const LogpJob& job, const Block& block) {
  Job product = job.product;
  product.a.data += block.row * product.a.outer_stride;
  product.a.outer = block.rows;
  product.b.data += block.column * product.b.outer_stride;
  product.b.outer = block.columns;
  if (product.bias.data) product.bias.data += block.column * product.bias.stride;
  product.out = reinterpret_cast<char*>(block.logits);
  product.out_dtype = DETKERN_F32;
  product.out_row_stride = block.pitch * 4;
  product.out_col_stride = 4;
  job.multiply(product);
}

int rows_of_block(const LogpJob& job) { return int(std::min<int64_t>(job.product.a.outer, MOST_ROWS)); }

// Whole units.
int64_t columns_of_block(int rows, int64_t columns) {
  return std::clamp<int64_t>(BLOCK_LOGITS / rows / UNIT, 1, ceil_div(std::max<int64_t>(columns, 1), UNIT)) * UNIT;
}

template <class Visit>
void each_row(const LogpJob& job, const Block& block, const Visit& visit) {
  const int64_t worth = block.rows * block.columns / WORKER_LOGITS + 1;
  const int workers = int(std::min<int64_t>({std::max(job.threads, 1), worth, block.rows}));
  for_each_task(workers, block.rows, [&](int, int64_t r) { visit(int(r)); });
}

// first: the number of the block's first unit in its part.
void fold_row(const LogpJob& job, const Block& block, int64_t first, int r, Row& counters) {
  const float* logits = block.of(r);
  alignas(64) float y[UNIT];
  for (int64_t at = 0; at < block.columns; at += UNIT) {
    const int count = int(std::min<int64_t>(UNIT, block.columns - at));
    Float tangent;
    for (int k = 0; k < UNIT; k += LANES) store_vector(y + k, scaled(job, load_vector(logits + at + k), tangent));
    std::fill(y + count, y + UNIT, -INFINITE);
    const int64_t column = job.start + block.column + at;
    for (int k = 0; k < job.targets; ++k) {
      const int64_t behind = target_of(job, block.row + r, k) - column;
      if (behind >= 0 && behind < count) set_number(job.state, 3 + k, block.row + r, y[behind]);
    }
    counters.units.add(first + at / UNIT, unit_state(y, job.entropy));
  }
}

// What a row's gradient has of its results.
struct Incoming {
  bool valid;
  float m, log_s, inverse, factor, back;
};

Incoming incoming(const LogpJob& job, int64_t row) {
  Incoming in{};
  const float s = number(job.state, 1, row);
  in.m = number(job.state, 0, row);
  in.valid = std::fabs(in.m) < INFINITE && s == s;
  in.log_s = logarithm(splat(in.valid ? s : 1.0f))[0];
  in.inverse = 1.0f / s;
  float total = 0.0f;
  for (int k = 0; k < job.targets; ++k) {
    const int64_t target = target_of(job, row, k);
    const bool ignored = target == job.ignore_index;
    in.valid &= ignored || (target >= 0 && target < job.vocabulary);
    total += ignored ? 0.0f : number(job.grads, k, row);
  }
  in.factor = number(job.grads, job.targets, row) - total;
  if (job.entropy) {
    in.back = -number(job.grads, job.targets + 1, row);
    in.factor = std::fma(in.back, in.log_s - number(job.state, 2, row) / s, in.factor);
  }
  return in;
}

template <int OUT>
void delta_row(const LogpJob& job, const Block& block, int r) {
  constexpr int CHUNK = 512;
  const int64_t row = block.row + r;
  const Incoming in = incoming(job, row);
  const float* logits = block.of(r);
  char* out = job.out + row * job.out_row_stride + block.column * job.out_col_stride;
  alignas(64) float values[CHUNK], tangents[CHUNK] = {};
  for (int64_t at = 0; at < block.columns; at += CHUNK) {
    const int count = int(std::min<int64_t>(CHUNK, block.columns - at));
    for (int k = 0; k < count; k += LANES) {
      Float tangent{};
      const Float d = scaled(job, load_vector(logits + at + k), tangent) - splat(in.m);
      const Float p = exponential(d) * splat(in.inverse);
      Float x = splat(in.factor);
      if (job.entropy) x = fma(splat(in.back), bounded(d) - splat(in.log_s), x);
      store_vector(values + k, p * x);
      store_vector(tangents + k, tangent);
    }
    for (int k = 0; k < job.targets; ++k) {
      const int64_t target = target_of(job, row, k), behind = target - (job.start + block.column + at);
      if (target != job.ignore_index && behind >= 0 && behind < count) values[behind] += number(job.grads, k, row);
    }
    for (int k = 0; k < count; k += LANES) {
      Float value = in.valid ? load_vector(values + k) : splat(std::numeric_limits<float>::quiet_NaN());
      const Float tangent = load_vector(tangents + k);
      if (job.tau != 0) value = value * splat(job.tau);
      if (job.cap != 0) value = value * fma(-tangent, tangent, splat(1.0f));
      store_vector(values + k, value);
    }
    store_row<OUT>(values, count, out + at * job.out_col_stride, job.out_col_stride);
  }
}

size_t bytes_of(int rows, int64_t columns) { return size_t(rows) * size_t(columns) * sizeof(float); }

}  // namespace

void run_logp_fold(const LogpJob& job) {
  const int64_t m = job.product.a.outer, n = job.product.b.outer;
  const int64_t length = PARTS * ceil_div(job.vocabulary, UNIT);
  const int most = rows_of_block(job);
  const int64_t width = columns_of_block(most, std::min(length, n));
  const Scratch scratch(1, bytes_of(most, width) + size_t(most) * sizeof(Row));
  float* logits = reinterpret_cast<float*>(scratch.of(0));
  Row* counters = reinterpret_cast<Row*>(logits + size_t(most) * size_t(width));
  for (int64_t row = 0; row < m; row += most) {
    Block block{row, 0, int(std::min<int64_t>(most, m - row)), 0, logits, width};
    for (int k = 0; k < job.targets; ++k)
      for (int r = 0; r < block.rows; ++r) set_number(job.state, 3 + k, row + r, -INFINITE);
    int64_t parts = 0;
    while (block.column < n) {
      const int64_t begin = (job.start + block.column) / length * length;  // of the part
      const int64_t end = std::min(begin + length - job.start, n), first = (job.start + block.column - begin) / UNIT;
      block.columns = std::min(width, end - block.column);
      const bool last = block.column + block.columns == end;
      multiply(job, block);
      each_row(job, block, [&](int r) {
        fold_row(job, block, first, r, counters[r]);
        if (last) counters[r].parts.add(parts, counters[r].units.root(first + ceil_div(block.columns, UNIT)));
      });
      parts += last;
      block.column += block.columns;
    }
    // Parts of no columns lie behind the others and change nothing.
    for (int r = 0; r < block.rows; ++r) {
      const State state = counters[r].parts.root(parts);
      set_number(job.state, 0, row + r, state.m);
      set_number(job.state, 1, row + r, state.s);
      set_number(job.state, 2, row + r, job.entropy ? state.w : 0.0f);
    }
  }
}

void run_logp_delta(const LogpJob& job) {
  const int64_t m = job.product.a.outer, n = job.product.b.outer;
  const int most = rows_of_block(job);
  const int64_t width = columns_of_block(most, n);
  const Scratch scratch(1, bytes_of(most, width));
  Block block{0, 0, 0, 0, reinterpret_cast<float*>(scratch.of(0)), width};
  for (; block.row < m; block.row += most)
    for (block.column = 0; block.column < n; block.column += width) {
      block.rows = int(std::min<int64_t>(most, m - block.row));
      block.columns = std::min(width, n - block.column);
      multiply(job, block);
      each_row(job, block, [&](int r) {
        if (job.out_dtype == DETKERN_F32) return delta_row<DETKERN_F32>(job, block, r);
        if (job.out_dtype == DETKERN_F16) return delta_row<DETKERN_F16>(job, block, r);
        delta_row<DETKERN_BF16>(job, block, r);
      });
    }
}

}  // namespace detkern
