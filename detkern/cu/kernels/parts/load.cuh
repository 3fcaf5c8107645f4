// Copies of an operand's tiles from global to shared memory, as they are, for the tensor-core kernels.
//
// A tile is LINES lines of ALONG chunks of 16 bytes. A line runs along the contiguous dimension: a row (column) of A
// (B) over EXTENT_K for K_MAJOR, a k over EXTENT_MN for MN_MAJOR; each chunk is one cp.async. STRIDED has the shape of
// K_MAJOR, but comes through registers and is stored before `copy` returns, so that whatever barrier orders the
// asynchronous copies orders it as well. What lies outside the operand along k is zero.
#pragma once

#include "parts/elements.cuh"
#include "parts/params.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"

template <int LOAD, int EXTENT_MN, int EXTENT_K, int THREAD_COUNT>
class TileCopy {
 public:
  static constexpr int CHUNK = 8;  // elements
  static constexpr int ALONG = (LOAD == MN_MAJOR ? EXTENT_MN : EXTENT_K) / CHUNK;
  static constexpr int LINES = LOAD == MN_MAJOR ? EXTENT_K : EXTENT_MN;
  static constexpr int LINES_PER_PASS = THREAD_COUNT / ALONG;
  static constexpr int PASSES = (LINES + LINES_PER_PASS - 1) / LINES_PER_PASS;
  static_assert(THREAD_COUNT % ALONG == 0, "a pass must cover whole lines");
  static_assert((LOAD == MN_MAJOR ? EXTENT_MN : EXTENT_K) % CHUNK == 0, "a line must be whole chunks");

  // The tiles whose first line or element in M (N) is `mn0`. `origin` is the operand's element [0, 0] in this batch;
  // the strides are in elements.
  DETKERN_INLINE TileCopy(const uint16_t* origin, int64_t mn_stride, int64_t k_stride, int64_t mn0, int64_t mn_size,
                          int64_t k_size)
      : origin_(origin + mn0 * mn_stride), line_stride_(LOAD == MN_MAJOR ? k_stride : mn_stride), k_size_(k_size),
        mn_left_(clamp(mn_size - mn0, EXTENT_MN)) {}

  // Starts this thread's copies of the tile from `k0` on. `place(line, chunk)` is the byte offset of a chunk from
  // `stage`, a multiple of 16.
  template <typename Place>
  DETKERN_INLINE void copy(uint32_t stage, Place place, int64_t k0) const {
    // Computing from the index here is cheaper than registers kept through the main loop. The copying threads may be
    // any whole group of the CTA's.
    const int thread = thread_index() % THREAD_COUNT;
    const int first = thread / ALONG, chunk = thread % ALONG;
    const int k_left = clamp(k_size_ - k0, EXTENT_K);
    const int bytes = 2 * clamp((LOAD == MN_MAJOR ? mn_left_ : k_left) - chunk * CHUNK, CHUNK);
    const uint16_t* source =
        origin_ + (LOAD == MN_MAJOR ? (k0 + first) * line_stride_ : k0 + first * line_stride_) + chunk * CHUNK;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      const int line = first + pass * LINES_PER_PASS;
      if (LINES % LINES_PER_PASS != 0 && line >= LINES) break;
      const uint32_t target = stage + place(line, chunk);
      const uint16_t* line_source = source + pass * LINES_PER_PASS * line_stride_;
      if constexpr (LOAD == MN_MAJOR) {
        copy_async_16(target, line_source, line < k_left ? bytes : 0);
      } else if (line < mn_left_) {  // rows outside the operand may hold anything: so may the outputs that they give
        copy_async_16(target, line_source, bytes);
      }
    }
  }

  // The two kinds of `copy` for a kernel whose operands are of either: what `start` copies is there when asynchronous
  // copies are; what `fetch` brought, which may be one tile ahead, is there behind `put`.
  template <typename Place>
  DETKERN_INLINE void start(uint32_t stage, Place place, int64_t k0) const {
    copy(stage, place, k0);
  }
  DETKERN_INLINE void fetch(int64_t k0) {}
  template <typename Place>
  DETKERN_INLINE void put(uint32_t stage, Place place, int64_t k0) const {}

 private:
  const uint16_t* origin_;
  int64_t line_stride_;
  int64_t k_size_;
  int mn_left_;  // of the tile's EXTENT_MN, those inside the operand
};

// Lines along k, wherever they start, come in whole chunks as those of K_MAJOR. Else threads take pairs of neighbouring
// k, along the dimension with the smaller stride first. Nothing is written where a tile is beyond the end of K.
template <int EXTENT_MN, int EXTENT_K, int THREAD_COUNT>
class TileCopy<STRIDED, EXTENT_MN, EXTENT_K, THREAD_COUNT> {
 public:
  static constexpr int PAIRS = EXTENT_MN * EXTENT_K / 2 / THREAD_COUNT;  // a thread
  static constexpr int AT_ONCE = PAIRS < 8 ? PAIRS : 8;
  static_assert(PAIRS * 2 * THREAD_COUNT == EXTENT_MN * EXTENT_K && PAIRS % AT_ONCE == 0, "equal parts");
  static constexpr int CHUNK = 8;  // elements
  static constexpr int ALONG = EXTENT_K / CHUNK, LINES_PER_PASS = THREAD_COUNT / ALONG;
  static constexpr int PASSES = EXTENT_MN / LINES_PER_PASS;
  static constexpr int PASSES_AT_ONCE = PASSES < 4 ? PASSES : 4;
  static constexpr bool HELD = PASSES == PASSES_AT_ONCE;  // whether a tile fits the registers
  static_assert(THREAD_COUNT % ALONG == 0 && EXTENT_MN % LINES_PER_PASS == 0 && PASSES % PASSES_AT_ONCE == 0,
                "passes of whole lines");
  static_assert(LINES_PER_PASS % 2 == 0 && EXTENT_K % 2 == 0, "all chunks of a thread begin in a word alike");

  DETKERN_INLINE TileCopy(const uint16_t* origin, int64_t mn_stride, int64_t k_stride, int64_t mn0, int64_t mn_size,
                          int64_t k_size)
      : origin_(origin + mn0 * mn_stride), mn_stride_(mn_stride), k_stride_(k_stride), k_size_(k_size),
        mn_left_(clamp(mn_size - mn0, EXTENT_MN)), along_k_(llabs(k_stride) <= llabs(mn_stride)) {}

  template <typename Place>
  DETKERN_INLINE void start(uint32_t stage, Place place, int64_t k0) const {}

  // Brings the tile from `k0` on into registers, where lines along k are few enough; `put` writes it to `stage`.
  DETKERN_INLINE void fetch(int64_t k0) {
    if (HELD && k_stride_ == 1) load(held_, k0, 0);
  }

  template <typename Place>
  DETKERN_INLINE void put(uint32_t stage, Place place, int64_t k0) const {
    if (HELD && k_stride_ == 1) {
      store(held_, stage, place, 0);
    } else {
      copy(stage, place, k0);
    }
  }

  template <typename Place>
  DETKERN_INLINE void copy(uint32_t stage, Place place, int64_t k0) const {
    const int k_left = clamp(k_size_ - k0, EXTENT_K);
    if (k_left == 0) return;
    if (k_stride_ == 1) {
#pragma unroll 1
      for (int pass = 0; pass < PASSES; pass += PASSES_AT_ONCE) {
        uint32_t words[PASSES_AT_ONCE][5];
        load(words, k0, pass);
        store(words, stage, place, pass);
      }
      return;
    }
    const uint16_t* tile = origin_ + k0 * k_stride_;
#pragma unroll 1
    for (int first = thread_index(); first < EXTENT_MN * EXTENT_K / 2; first += AT_ONCE * THREAD_COUNT) {
      uint32_t low[AT_ONCE], high[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        int mn, k;
        position(first + i * THREAD_COUNT, mn, k);
        const uint16_t* source = tile + mn * mn_stride_ + k * k_stride_;
        low[i] = mn < mn_left_ && k < k_left ? *source : 0;
        high[i] = mn < mn_left_ && k + 1 < k_left ? source[k_stride_] : 0;
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        int mn, k;
        position(first + i * THREAD_COUNT, mn, k);
        store_shared(stage + place(mn, k / 8) + 2 * (k % 8), low[i] | high[i] << 16);
      }
    }
  }

 private:
  // This thread's first line and its chunk of each line, and where they lie in a tile whose first element is at `tile`.
  DETKERN_INLINE int first_line() const { return thread_index() % THREAD_COUNT / ALONG; }
  DETKERN_INLINE int chunk() const { return thread_index() % ALONG; }
  DETKERN_INLINE const uint16_t* source(int64_t k0) const {
    return origin_ + k0 + first_line() * mn_stride_ + chunk() * CHUNK;
  }

  // The bits by which its chunks begin inside of a word, the same for all of them: from one to the next is an even
  // number of elements.
  DETKERN_INLINE uint32_t shift() const { return reinterpret_cast<uint64_t>(source(0)) % 4 * 8; }

  // Loads a group of chunks, each as five words of which four are made later; zeros where there is nothing.
  DETKERN_INLINE void load(uint32_t (&words)[PASSES_AT_ONCE][5], int64_t k0, int first_pass) const {
    const int count = clamp(k_size_ - k0 - chunk() * CHUNK, CHUNK), line = first_line() + first_pass * LINES_PER_PASS;
    const uint16_t* from = source(k0) + first_pass * LINES_PER_PASS * mn_stride_;
    const bool whole_words = shift() == 0;
#pragma unroll
    for (int i = 0; i < PASSES_AT_ONCE; ++i) {
      const int there = line + i * LINES_PER_PASS < mn_left_ ? count : 0;
      const uint32_t* word = reinterpret_cast<const uint32_t*>(from - (whole_words ? 0 : 1));
      if (there == CHUNK) {
        words[i][0] = whole_words ? *word : static_cast<uint32_t>(*from) << 16;
#pragma unroll
        for (int j = 1; j < 4; ++j) words[i][j] = word[j];
        words[i][4] = whole_words ? 0 : from[CHUNK - 1];
      } else {  // one by one, and as if they began inside of a word where the others do
        uint32_t before = 0;
#pragma unroll
        for (int j = 0; j < 5; ++j) {
          const uint32_t low = 2 * j < there ? from[2 * j] : 0, high = 2 * j + 1 < there ? from[2 * j + 1] : 0;
          words[i][j] = whole_words ? low | high << 16 : before | low << 16;
          before = high;
        }
      }
      from += LINES_PER_PASS * mn_stride_;
    }
  }

  template <typename Place>
  DETKERN_INLINE void store(const uint32_t (&words)[PASSES_AT_ONCE][5], uint32_t stage, Place place,
                            int first_pass) const {
    const uint32_t bits = shift();
#pragma unroll
    for (int i = 0; i < PASSES_AT_ONCE; ++i) {
      uint4 four;
      four.x = __funnelshift_r(words[i][0], words[i][1], bits);
      four.y = __funnelshift_r(words[i][1], words[i][2], bits);
      four.z = __funnelshift_r(words[i][2], words[i][3], bits);
      four.w = __funnelshift_r(words[i][3], words[i][4], bits);
      store_shared(stage + place(first_line() + (first_pass + i) * LINES_PER_PASS, chunk()), four);
    }
  }

  DETKERN_INLINE void position(int pair, int& mn, int& k) const {
    mn = along_k_ ? pair / (EXTENT_K / 2) : pair % EXTENT_MN;
    k = 2 * (along_k_ ? pair % (EXTENT_K / 2) : pair / EXTENT_MN);
  }

  const uint16_t* origin_;
  int64_t mn_stride_;
  int64_t k_stride_;
  int64_t k_size_;
  int mn_left_;
  bool along_k_;
  uint32_t held_[PASSES_AT_ONCE][5];
};
