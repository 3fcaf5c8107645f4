// Copies of operand tiles from global to shared memory, in chunks of 16 bytes that cp.async can move.
//
// A tile is LINES lines of ALONG chunks. A line runs along the contiguous dimension: a row (column) of A (B) over EXTENT_K
// for K_MAJOR, a k over EXTENT_MN for MN_MAJOR. STRIDED has the shape of K_MAJOR, gathers each chunk element by element and
// stores it before `copy` returns, so that whatever barrier orders the asynchronous copies orders it as well. What lies
// outside the operand is zero.
#pragma once

#include "ptx.cuh"

template <int LOAD, typename Element, int EXTENT_MN, int EXTENT_K, int THREAD_COUNT>
class TileCopy {
 public:
  static constexpr int CHUNK = 16 / sizeof(Element);  // elements
  static constexpr int ALONG = (LOAD == MN_MAJOR ? EXTENT_MN : EXTENT_K) / CHUNK;
  static constexpr int LINES = LOAD == MN_MAJOR ? EXTENT_K : EXTENT_MN;
  static constexpr int LINES_PER_PASS = THREAD_COUNT / ALONG;
  static constexpr int PASSES = (LINES + LINES_PER_PASS - 1) / LINES_PER_PASS;
  static_assert(THREAD_COUNT % ALONG == 0, "a pass must cover whole lines");
  static_assert((LOAD == MN_MAJOR ? EXTENT_MN : EXTENT_K) % CHUNK == 0, "a line must be whole chunks");

  // The tiles whose first line or element in M (N) is `mn0`, from k = 0 on. `origin` is the operand's element [0, 0] in
  // this batch, `mn_stride` and `k_stride` are in elements, `mn_size` and `k_size` the operand's sizes.
  DETKERN_INLINE TileCopy(const Element* origin, int64_t mn_stride, int64_t k_stride, int64_t mn0, int64_t mn_size,
                          int64_t k_size)
      : k_left_(k_size), k_stride_(k_stride) {
    line_ = static_cast<int>(threadIdx.x) / ALONG;
    chunk_ = static_cast<int>(threadIdx.x) % ALONG;
    const int64_t mn_left = mn_size - mn0;
    if constexpr (LOAD == MN_MAJOR) {
      pointer_ = origin + (mn0 + chunk_ * CHUNK) + line_ * k_stride;
      line_stride_ = k_stride;
      limit_ = clamp(mn_left - chunk_ * CHUNK, CHUNK) * static_cast<int>(sizeof(Element));
    } else {
      pointer_ = origin + (mn0 + line_) * mn_stride + chunk_ * CHUNK * k_stride;
      line_stride_ = mn_stride;
      limit_ = clamp(mn_left, LINES);
    }
  }

  // Starts this thread's copies of the current tile and steps to the next one along k. `place(line, chunk)` is the byte
  // offset of a chunk from `stage`, a multiple of 16.
  template <typename Place>
  DETKERN_INLINE void copy(uint32_t stage, Place place) {
    const int k_in_tile = clamp(k_left_, EXTENT_K);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int line = line_ + pass * LINES_PER_PASS;
      if (LINES % LINES_PER_PASS != 0 && line >= LINES) break;
      const Element* source = pointer_ + pass * LINES_PER_PASS * line_stride_;
      const uint32_t target = stage + place(line, chunk_);
      if constexpr (LOAD == MN_MAJOR) {
        copy_async_16(target, source, line < k_in_tile ? limit_ : 0);
      } else {
        const int elements = line < limit_ ? clamp(k_in_tile - chunk_ * CHUNK, CHUNK) : 0;
        if constexpr (LOAD == K_MAJOR) {
          copy_async_16(target, source, elements * static_cast<int>(sizeof(Element)));
        } else {
          store_shared(target, gather(source, elements));
        }
      }
    }
    k_left_ -= EXTENT_K;
    pointer_ += EXTENT_K * k_stride_;
  }

 private:
  static DETKERN_INLINE int clamp(int64_t value, int high) {
    return value < 0 ? 0 : value > high ? high : static_cast<int>(value);
  }

  DETKERN_INLINE uint4 gather(const Element* source, int elements) const {
    static_assert(sizeof(Element) == 4 || sizeof(Element) == 2, "chunks are of 4-byte or 2-byte elements");
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
      const uint32_t bits = i < elements ? static_cast<uint32_t>(source[i * k_stride_]) : 0;
      words[i * sizeof(Element) / 4] |= bits << (i * sizeof(Element) % 4 * 8);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  const Element* pointer_;  // this thread's first chunk of the current tile
  int64_t line_stride_;
  int64_t k_left_;
  int64_t k_stride_;
  int line_;
  int chunk_;
  int limit_;  // MN_MAJOR: bytes of this thread's chunks inside the operand; else: lines of the tile inside it
};
