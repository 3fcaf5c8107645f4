// From finished accumulators to the output: + 0, bias, one rounding, stores. The same for every contract.
//
// A NaN comes out canonical (0x7fffffff, 0x7fff): every path adds +0 in binary32, and the GPU's add and its conversions
// give the canonical NaN.
#pragma once

#include "parts/params.cuh"
#include "parts/schedule.cuh"
#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"

// Of those that are there, the bias numbered `index`; else zero, which changes no bit after the +0.
DETKERN_INLINE float bias_at(const GemmParams& p, int64_t index, int64_t count) {
  if (p.bias_dtype == NONE || index >= count) return 0.0f;
  const int64_t offset = index * p.bias_stride;
  if (p.bias_dtype == F32) return static_cast<const float*>(p.bias)[offset];
  const uint32_t bits = static_cast<const uint16_t*>(p.bias)[offset];
  return p.bias_dtype == F16 ? upcast<F16>(bits) : upcast<BF16>(bits);
}

class Epilogue {
 public:
  DETKERN_INLINE Epilogue(const GemmParams& p, int64_t batch) : p_(p) {
    const int size = p.out_dtype == F32 ? 4 : 2;
    out_ = static_cast<char*>(p.out) + batch_offset(p, p.out_batch, batch) * size;
    // Rows of the output can be written by vectors of up to 16 bytes.
    const uint64_t addresses = reinterpret_cast<uint64_t>(out_) | static_cast<uint64_t>(p.out_row * size);
    vector_ = p.out_col == 1 && addresses % 16 == 0;
  }

  // What the chain starts from at [row, column]: the output where it accumulates, else +0.
  DETKERN_INLINE float initial(int64_t row, int64_t column) const {
    const bool inside = p_.accumulate && row < p_.m && column < p_.n;
    return load_global_if(inside, reinterpret_cast<const float*>(out_) + row * p_.out_row + column * p_.out_col);
  }

  // The bias of COUNT columns from `column` on.
  template <int COUNT>
  DETKERN_INLINE void load_bias(int64_t column, float (&bias)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) bias[i] = bias_at(p_, column + i, p_.n);
  }

  // Finishes and writes COUNT accumulators of one row, at `column`, a multiple of COUNT, and beyond; those outside the
  // output are dropped.
  template <int COUNT>
  DETKERN_INLINE void store(int64_t row, int64_t column, const float (&accumulators)[COUNT],
                            const float (&bias)[COUNT]) const {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4, "a vector is 1, 2 or 4 columns");
    if (row >= p_.m || column >= p_.n) return;
    float values[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = __fadd_rn(__fadd_rn(accumulators[i], 0.0f), bias[i]);
    const bool vector = vector_ && column + COUNT <= p_.n;
    if (p_.out_dtype == F32) {
      uint32_t words[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) words[i] = __float_as_uint(values[i]);
      write<uint32_t>(row, column, words, vector);
    } else if (p_.out_dtype == F16) {
      write_rounded<F16>(row, column, values, vector);
    } else {
      write_rounded<BF16>(row, column, values, vector);
    }
  }

 private:
  template <int DTYPE, int COUNT>
  DETKERN_INLINE void write_rounded(int64_t row, int64_t column, const float (&values)[COUNT], bool vector) const {
    uint16_t bits[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) bits[i] = round_one<DTYPE>(values[i]);
    write<uint16_t>(row, column, bits, vector);
  }

  template <typename Bits, int COUNT>
  DETKERN_INLINE void write(int64_t row, int64_t column, const Bits (&bits)[COUNT], bool vector) const {
    struct alignas(sizeof(Bits) * COUNT) Vector {
      Bits bits[COUNT];
    };
    Bits* target = reinterpret_cast<Bits*>(out_) + row * p_.out_row + column * p_.out_col;
    if (vector) {
      Vector packed;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) packed.bits[i] = bits[i];
      *reinterpret_cast<Vector*>(target) = packed;
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (column + i < p_.n) target[i * p_.out_col] = bits[i];
      }
    }
  }

  const GemmParams& p_;
  char* out_;
  bool vector_;
};
