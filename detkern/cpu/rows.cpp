// The row operations of docs/contracts.md: aligned sums over the last dimension, and what is made of them.
//
// A task is a block of rows of one batch index. Its columns are upcast into a buffer, all of them where they fit, else
// as many at a time as there is room for, once for each pass: the largest terms, the sum, the results. Vector lanes run
// along the rows. A term scaled to whole units lies below 2^44, so a lane adds up to 2^9 of them exactly in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include "epilogue.h"
#include "exponential.h"
#include "job.h"
#include "packing.h"
#include "simd.h"
#include "threads.h"

namespace detkern {
namespace {

constexpr int MOST_ROWS = 32;                 // of a block
constexpr int BUFFER = 1 << 14;               // numbers of a block that are worked on at a time
constexpr int PAD = 16;                       // between rows, so that they do not share a cache set
constexpr int STRIP = 128 * LANES;            // columns that a lane adds in double
constexpr int64_t WORKER_ELEMENTS = 1 << 15;  // elements that are worth another thread
constexpr int FRACTION_BITS = 43;             // of a sum's largest term

static_assert(BUFFER / MOST_ROWS % LANES == 0 && PAD % LANES == 0, "rows of a buffer are aligned");

typedef __int128 Total;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Scratch {
  alignas(64) float first[BUFFER + MOST_ROWS * PAD];
  alignas(64) float second[BUFFER + MOST_ROWS * PAD];
};

struct Place {
  const char *a, *b;
  char* out;
  int rows;
};

int padded(int count) { return (count + LANES - 1) / LANES * LANES; }

// The larger of two, or NaN where one is.
inline Float larger(Float a, Float b) { return select((b > a) | (b != b), b, a); }

float largest_lane(Float value) {
  alignas(64) float lanes[LANES];
  store_vector(lanes, value);
  float found = lanes[0];
  for (int i = 1; i < LANES; ++i) found = lanes[i] > found || lanes[i] != lanes[i] ? lanes[i] : found;
  return found;
}

// total * 2^unit, rounded once. What is below 2^-126 is a multiple of 2^-149 and needs no rounding.
float rounded(Total total, int unit) {
  const bool negative = total < 0;
  unsigned __int128 magnitude = static_cast<unsigned __int128>(total);
  if (negative) magnitude = -magnitude;
  int shift = 0;
  if (const uint64_t high = uint64_t(magnitude >> 64)) {
    shift = 64 - __builtin_clzll(high);
    const bool left = (magnitude & ((static_cast<unsigned __int128>(1) << shift) - 1)) != 0;
    magnitude = (magnitude >> shift) | left;  // far below the 24 bits that are kept
  }
  const double value = std::ldexp(double(float(uint64_t(magnitude))), unit + shift);
  return float(negative ? -value : value);
}

// ---- results --------------------------------------------------------------------------------------------------------

void store_block(const RowOperand& target, char* out, int rows, int count, const float* buffer, int pitch) {
  const auto finish = [&](auto tag) {
    constexpr int OUT = decltype(tag)::value;
    if (target.row_stride == itemsize(OUT) && rows > 1) {  // adjacent rows: stores run through adjacent lines
      for (int k = 0; k < count; ++k)
        for (int r = 0; r < rows; ++r)
          store<OUT>(out + r * target.row_stride + k * target.col_stride, canonical(buffer[r * pitch + k] + 0.0f));
    } else {
      for (int r = 0; r < rows; ++r)
        store_row<OUT>(buffer + r * pitch, count, out + r * target.row_stride, target.col_stride);
    }
  };
  if (target.dtype == DETKERN_F32) return finish(Tag<DETKERN_F32>());
  if (target.dtype == DETKERN_F16) return finish(Tag<DETKERN_F16>());
  finish(Tag<DETKERN_BF16>());
}

class Block {
 public:
  Block(const RowJob& job, const Place& place, Scratch& scratch, int chunk)
      : job_(job), place_(place), scratch_(scratch), chunk_(chunk), pitch_(chunk + PAD) {}

  void run() {
    const auto a_itself = [](Float a, Float) { return a; };
    const auto square = [](Float a, Float) { return a * a; };
    const auto product = [](Float a, Float b) { return b * a; };
    switch (job_.kind) {
      case DETKERN_ROW_SUM:
        add_aligned(a_itself);
        return store_sums();
      case DETKERN_ROW_MEAN:
        add_aligned(a_itself);
        divide(sum_);
        return store_sums();
      case DETKERN_ROW_MEAN_SQUARE:
        add_aligned(square);
        divide(sum_);
        return store_sums();
      case DETKERN_ROW_SOFTMAX:
        find_largest();
        add_exponentials();
        return softmax();
      case DETKERN_ROW_LOG_SOFTMAX:
        find_largest();
        add_exponentials();
        for (int i = 0; i < MOST_ROWS; i += LANES) store_vector(sum_ + i, logarithm(load_vector(sum_ + i)));
        return map([&](int r, Float x, Float) { return (x - splat(largest_[r])) - splat(sum_[r]); });
      case DETKERN_ROW_SUM_BACKWARD:
        load_given();
        return map([&](int r, Float, Float) { return splat(given_[r]); });
      case DETKERN_ROW_MEAN_BACKWARD:
        load_given();
        divide(given_);
        return map([&](int r, Float, Float) { return splat(given_[r]); });
      case DETKERN_ROW_MEAN_SQUARE_BACKWARD:
        load_given();
        divide(given_);
        return map([&](int r, Float, Float x) { return (splat(given_[r]) + splat(given_[r])) * x; });
      case DETKERN_ROW_SOFTMAX_BACKWARD:
        add_aligned(product);
        return map([&](int r, Float dy, Float y) { return y * (dy - splat(sum_[r])); });
      default:
        add_aligned(a_itself);
        return map([&](int r, Float dy, Float y) { return fma(-exponential(y), splat(sum_[r]), dy); });
    }
  }

 private:
  bool spreads() const {
    return job_.kind >= DETKERN_ROW_SUM_BACKWARD && job_.kind <= DETKERN_ROW_MEAN_SQUARE_BACKWARD;
  }

  float* first(int r) const { return scratch_.first + r * pitch_; }
  float* second(int r) const { return scratch_.second + r * pitch_; }

  // visit(first column, count) over all chunks.
  template <class Visit>
  void each_chunk(const Visit& visit) const {
    for (int64_t at = 0; at < job_.columns; at += chunk_) visit(at, int(std::min<int64_t>(chunk_, job_.columns - at)));
  }

  void pack(const RowOperand& operand, const char* data, int64_t at, int count, float* buffer) const {
    Side side{};
    side.dtype = operand.dtype;
    side.outer_stride = operand.row_stride;
    side.k_stride = operand.col_stride;
    pack_rows(side, data + at * operand.col_stride, place_.rows, count, padded(count), buffer, pitch_);
  }

  // The chunk's columns of the operands that have columns, unless they are there already; zeros behind them.
  void load(int64_t at, int count) {
    if (loaded_ == at) return;
    if (!spreads()) pack(job_.a, place_.a, at, count, scratch_.first);
    if (job_.b.data) pack(job_.b, place_.b, at, count, scratch_.second);
    loaded_ = at;
  }

  void load_given() {
    alignas(64) float one[MOST_ROWS * LANES];
    Side side{};
    side.dtype = job_.a.dtype;
    side.outer_stride = job_.a.row_stride;
    pack_rows(side, place_.a, place_.rows, 1, LANES, one, LANES);
    for (int r = 0; r < place_.rows; ++r) given_[r] = one[r * LANES];
  }

  void divide(float* numbers) const {
    const Float width = splat(float(job_.columns));
    for (int i = 0; i < MOST_ROWS; i += LANES) store_vector(numbers + i, load_vector(numbers + i) / width);
  }

  // ---- aligned sums -------------------------------------------------------------------------------------------------

  // Adds `count` terms, in units, each truncated.
  template <class Term>
  static void add_row(const Term& term, const float* a, const float* b, int count, double units, Total& total) {
    const Double scale = units - Double{};
    for (int strip = 0; strip < count; strip += STRIP) {
      const int end = std::min(count, strip + STRIP);
      Double low{}, high{};
      for (int k = strip; k < end; k += LANES) {
        const Float value = term(load_vector(a + k), load_vector(b + k));
        low += truncate(low_half(value) * scale);
        high += truncate(high_half(value) * scale);
      }
      low += high;
      int64_t sum = 0;
      for (int i = 0; i < LANES / 2; ++i) sum += int64_t(low[i]);
      total += sum;
    }
  }

  // sum_ = the aligned sum of term(a, b) of every row.
  template <class Term>
  void add_aligned(const Term& term) {
    float most[MOST_ROWS] = {}, least[MOST_ROWS] = {};  // least: of the negated terms the largest
    each_chunk([&](int64_t at, int count) {
      load(at, count);
      for (int r = 0; r < place_.rows; ++r) {
        Float up = splat(most[r]), down = splat(least[r]);
        for (int k = 0; k < count; k += LANES) {
          const Float value = term(load_vector(first(r) + k), load_vector(second(r) + k));
          up = larger(up, value);
          down = larger(down, -value);
        }
        most[r] = largest_lane(up);
        least[r] = largest_lane(down);
      }
    });
    int exponents[MOST_ROWS];
    Total totals[MOST_ROWS] = {};
    for (int r = 0; r < place_.rows; ++r) {
      const float largest = std::max(most[r], least[r]);
      exponents[r] = largest > 0 && largest < INFINITE ? std::max(std::ilogb(largest), -126) : -126;
    }
    const auto special = [&](int r) { return !(most[r] < INFINITE && least[r] < INFINITE); };
    each_chunk([&](int64_t at, int count) {
      load(at, count);
      for (int r = 0; r < place_.rows; ++r)
        if (!special(r))
          add_row(term, first(r), second(r), count, std::ldexp(1.0, FRACTION_BITS - exponents[r]), totals[r]);
    });
    for (int r = 0; r < place_.rows; ++r)
      sum_[r] = special(r) ? most[r] - least[r] : rounded(totals[r], exponents[r] - FRACTION_BITS);
  }

  void find_largest() {
    std::fill(largest_, largest_ + MOST_ROWS, -INFINITE);
    each_chunk([&](int64_t at, int count) {
      load(at, count);
      for (int r = 0; r < place_.rows; ++r) {
        std::fill(first(r) + count, first(r) + padded(count), -INFINITE);
        Float most = splat(largest_[r]);
        for (int k = 0; k < count; k += LANES) most = larger(most, load_vector(first(r) + k));
        largest_[r] = largest_lane(most);
      }
    });
  }

  // The chunk's exp(x - largest), in the second buffer, unless they are there already; zeros behind them.
  void load_exponentials(int64_t at, int count) {
    if (exponentials_ == at) return;
    load(at, count);
    for (int r = 0; r < place_.rows; ++r) {
      std::fill(first(r) + count, first(r) + padded(count), -INFINITE);
      const Float largest = splat(largest_[r]);
      for (int k = 0; k < count; k += LANES)
        store_vector(second(r) + k, exponential(load_vector(first(r) + k) - largest));
    }
    exponentials_ = at;
  }

  // sum_ = the aligned sum of exp(x - largest), whose largest term is 1; NaN where the largest element is not finite.
  void add_exponentials() {
    Total totals[MOST_ROWS] = {};
    const auto special = [&](int r) { return !(std::fabs(largest_[r]) < INFINITE); };
    each_chunk([&](int64_t at, int count) {
      load_exponentials(at, count);
      for (int r = 0; r < place_.rows; ++r)
        if (!special(r))
          add_row([](Float e, Float) { return e; }, second(r), second(r), count, double(int64_t(1) << FRACTION_BITS),
                  totals[r]);
    });
    for (int r = 0; r < place_.rows; ++r)
      sum_[r] = special(r) ? std::numeric_limits<float>::quiet_NaN() : rounded(totals[r], -FRACTION_BITS);
  }

  // ---- results ------------------------------------------------------------------------------------------------------

  void store_chunk(int64_t at, int count) const {
    store_block(job_.out, place_.out + at * job_.out.col_stride, place_.rows, count, scratch_.first, pitch_);
  }

  void softmax() {
    each_chunk([&](int64_t at, int count) {
      load_exponentials(at, count);
      loaded_ = -1;
      for (int r = 0; r < place_.rows; ++r)
        for (int k = 0; k < count; k += LANES)
          store_vector(first(r) + k, load_vector(second(r) + k) / splat(sum_[r]));
      store_chunk(at, count);
    });
  }

  // out = each(row, a, b) for every element; an operand that has no columns is not to be looked at.
  template <class Each>
  void map(const Each& each) {
    each_chunk([&](int64_t at, int count) {
      load(at, count);
      loaded_ = -1;  // the results take its place
      for (int r = 0; r < place_.rows; ++r)
        for (int k = 0; k < count; k += LANES)
          store_vector(first(r) + k, each(r, load_vector(first(r) + k), load_vector(second(r) + k)));
      store_chunk(at, count);
    });
  }

  void store_sums() const {
    alignas(64) float buffer[MOST_ROWS * LANES] = {};
    for (int r = 0; r < place_.rows; ++r) buffer[r * LANES] = sum_[r];
    RowOperand target = job_.out;
    target.col_stride = itemsize(target.dtype);
    store_block(target, place_.out, place_.rows, 1, buffer, LANES);
  }

  const RowJob& job_;
  const Place& place_;
  Scratch& scratch_;
  const int chunk_, pitch_;
  int64_t loaded_ = -1, exponentials_ = -1;  // the first column of what the buffers hold
  alignas(64) float largest_[MOST_ROWS] = {};
  alignas(64) float sum_[MOST_ROWS] = {};
  alignas(64) float given_[MOST_ROWS] = {};
};

// Rows of a block: as many as fit with all of their columns; where neighbouring rows lie closer than columns, whole
// cache lines.
int64_t rows_of_block(const RowJob& job) {
  const RowOperand& wide = job.b.data ? job.b : job.a.col_stride ? job.a : job.out;
  if (std::abs(wide.row_stride) < std::abs(wide.col_stride)) return MOST_ROWS;
  return std::clamp<int64_t>(BUFFER / std::max<int64_t>(job.columns, 1), 1, MOST_ROWS);
}

}  // namespace

void run_rows(const RowJob& job) {
  double elements = double(job.rows) * double(job.columns + 16);
  int64_t batches = 1;
  for (int i = 0; i < job.batch_rank; ++i) batches *= job.batch_shape[i];
  elements *= double(batches);
  const int workers = int(std::min<double>(std::max(job.threads, 1), elements / WORKER_ELEMENTS + 1));
  // Smaller blocks where there are fewer rows than that for each worker.
  const int64_t rows = std::clamp<int64_t>((job.rows * batches + workers - 1) / workers, 1, rows_of_block(job));
  const int64_t blocks = (job.rows + rows - 1) / rows;
  const int chunk = BUFFER / int(rows) / LANES * LANES;
  const std::unique_ptr<Scratch[]> scratches(new Scratch[workers]());
  for_each_task(workers, batches * blocks, [&](int worker, int64_t task) {
    const int64_t first = task % blocks * rows;
    Place place{job.a.data + first * job.a.row_stride, job.b.data ? job.b.data + first * job.b.row_stride : nullptr,
                job.out.data + first * job.out.row_stride, int(std::min(rows, job.rows - first))};
    int64_t outer = task / blocks;
    for (int axis = job.batch_rank - 1; axis >= 0; --axis) {
      const int64_t index = outer % job.batch_shape[axis];
      outer /= job.batch_shape[axis];
      place.a += index * job.a.batch_strides[axis];
      if (place.b) place.b += index * job.b.batch_strides[axis];
      place.out += index * job.out.batch_strides[axis];
    }
    Block(job, place, scratches[worker], chunk).run();
  });
}

}  // namespace detkern
