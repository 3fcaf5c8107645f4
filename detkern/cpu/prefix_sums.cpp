// The prefix sums of docs/contracts.md: exact sums of columns 0 to j of each row, or j to the last, each rounded once.
//
// A task is a row. The sum so far is an integer in units of 2^-149, of 320 bits in two's complement: a finite number
// has 277, the rest is for their count and the sign.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "floats.h"
#include "job.h"
#include "threads.h"

namespace detkern {
namespace {

constexpr int LIMBS = 5;
constexpr int UNIT = -149;
constexpr int64_t WORKER_ELEMENTS = 1 << 13;  // elements that are worth another thread

class Sum {
 public:
  void add(float term) {
    const uint32_t bits = to_bits(term), exponent = bits >> 23 & 255u, fraction = bits & 0x7fffffu;
    if (exponent == 255u) {
      nan_ |= fraction != 0;
      (bits >> 31 ? below_ : above_) |= fraction == 0;
      return;
    }
    const uint64_t magnitude = exponent ? fraction | 0x800000u : fraction;
    const uint32_t places = exponent ? exponent - 1u : 0u;
    const unsigned __int128 wide = static_cast<unsigned __int128>(magnitude) << (places & 63u);
    const uint64_t parts[2] = {uint64_t(wide), uint64_t(wide >> 64)};
    uint64_t carry = 0;
    for (uint32_t i = places >> 6, part = 0; i < LIMBS && (part < 2 || carry); ++i, ++part) {
      const uint64_t addend = part < 2 ? parts[part] : 0;
      if (bits >> 31) {
        const uint64_t less = limbs_[i] - addend;
        const uint64_t borrowed = uint64_t(less > limbs_[i]) + uint64_t(less < carry);
        limbs_[i] = less - carry;
        carry = borrowed;
      } else {
        const uint64_t more = limbs_[i] + addend;
        const uint64_t carried = uint64_t(more < addend) + uint64_t(more + carry < carry);
        limbs_[i] = more + carry;
        carry = carried;
      }
    }
  }

  float rounded() const {
    if (nan_ || (above_ && below_)) return from_bits(NAN_F32);
    if (above_ || below_) return above_ ? INFINITY : -INFINITY;
    const bool negative = limbs_[LIMBS - 1] >> 63;
    uint64_t magnitude[LIMBS];
    uint64_t carry = negative;
    for (int i = 0; i < LIMBS; ++i) {
      magnitude[i] = (negative ? ~limbs_[i] : limbs_[i]) + carry;
      carry &= magnitude[i] == 0;
    }
    int top = LIMBS - 1;
    while (top > 0 && magnitude[top] == 0) --top;
    uint64_t number = magnitude[top];
    int exponent = UNIT + 64 * top;
    if (top > 0) {
      // 64 bits; the last one also says whether anything was left, far below the 24 that are kept.
      const int free = __builtin_clzll(number);
      const uint64_t next = magnitude[top - 1];
      bool left = next << free != 0;
      if (free) number = number << free | next >> (64 - free);
      for (int i = 0; i < top - 1; ++i) left |= magnitude[i] != 0;
      number |= left;
      exponent -= free;
    }
    // What is below 2^-126 is a multiple of 2^-149 and has no more than 23 bits.
    const float value = float(std::ldexp(double(float(number)), exponent));
    return negative ? -value : value;
  }

 private:
  uint64_t limbs_[LIMBS] = {};
  bool nan_ = false, above_ = false, below_ = false;
};

template <int IN, int OUT>
void scan_row(const char* a, int64_t a_step, char* out, int64_t out_step, int64_t columns) {
  Sum sum;
  for (int64_t k = 0; k < columns; ++k) {
    sum.add(load<IN>(a + k * a_step));
    store<OUT>(out + k * out_step, sum.rounded() + 0.0f);
  }
}

template <class Body>
void with_output(int dtype, const Body& body) {
  if (dtype == DETKERN_F32) return body(Tag<DETKERN_F32>());
  if (dtype == DETKERN_F16) return body(Tag<DETKERN_F16>());
  body(Tag<DETKERN_BF16>());
}

}  // namespace

void run_prefix_sums(const RowJob& job) {
  int64_t batches = 1;
  for (int i = 0; i < job.batch_rank; ++i) batches *= job.batch_shape[i];
  const double elements = double(job.rows) * double(job.columns) * double(batches);
  const int workers = int(std::min<double>(std::max(job.threads, 1), elements / WORKER_ELEMENTS + 1));
  const bool reversed = job.kind == DETKERN_ROW_CUMSUM_BACKWARD;
  const int64_t a_step = reversed ? -job.a.col_stride : job.a.col_stride;
  const int64_t out_step = reversed ? -job.out.col_stride : job.out.col_stride;
  for_each_task(workers, batches * job.rows, [&](int, int64_t task) {
    const int64_t row = task % job.rows;
    const char* a = job.a.data + row * job.a.row_stride;
    char* out = job.out.data + row * job.out.row_stride;
    int64_t outer = task / job.rows;
    for (int axis = job.batch_rank - 1; axis >= 0; --axis) {
      const int64_t index = outer % job.batch_shape[axis];
      outer /= job.batch_shape[axis];
      a += index * job.a.batch_strides[axis];
      out += index * job.out.batch_strides[axis];
    }
    if (reversed) {
      a += (job.columns - 1) * job.a.col_stride;
      out += (job.columns - 1) * job.out.col_stride;
    }
    with_output(job.a.dtype, [&](auto in) {
      with_output(job.out.dtype, [&](auto to) {
        scan_row<decltype(in)::value, decltype(to)::value>(a, a_step, out, out_step, job.columns);
      });
    });
  });
}

}  // namespace detkern
