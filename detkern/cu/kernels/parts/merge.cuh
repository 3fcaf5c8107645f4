// The online merge of a mid-split tree: leaves come in order, and each node is added as soon as its right child is
// done.
//
// Shape. Node [lo, hi) splits at lo + (hi - lo) // 2, so the right child has the half rounded up, and a node of depth d
// whose path from the root spells the bits b0 .. b(d-1) has floor((L + b0 + 2 b1 + .. + 2^(d-1) b(d-1)) / 2^d) leaves.
// At depth D = floor(log2 L) that is 1 or 2: the tree is a perfect one of 2^D bottom nodes, of which number j is a pair
// exactly when L - 2^D + bitreverse_D(j) >= 2^D. So after bottom node j as many nodes end as j has trailing ones, as in
// a binary counter, and nothing has to be stored about the tree, whatever L is.
//
// Memory. At most ceil(log2 L) left children wait at a time. The LEVELS_IN_SHARED lowest, which are used most, lie in
// shared memory (LEVELS_IN_SHARED * WORDS * THREAD_COUNT * 4 bytes), the others in global scratch, one slot a CTA; none
// in registers. Scratch bytes = gridDim.x * max(0, ceil(log2 max(L, 1)) - LEVELS_IN_SHARED) * WORDS * THREAD_COUNT * 4.
// A thread reads what it wrote itself, so no barrier is needed.
#pragma once

#include "ptx/memory.cuh"
#include "ptx/numbers.cuh"
#include "ptx/registers.cuh"

// The position in a tree of `leaves` leaves (at least 1; their k would fill 2^38 bytes before 32 bits overflow), walked
// leaf by leaf: each step is taken beside 32 k of products, and 64 bits would be a percent of them.
class MidSplitWalk {
 public:
  DETKERN_INLINE explicit MidSplitWalk(uint32_t leaves) : node_(0), inside_pair_(false) {
    depth_ = 31 - __clz(leaves);
    extra_ = leaves - (1u << depth_);
  }

  // Whether the tree has pairs at all: then level 0 of the stack holds the left leaf of a pair.
  DETKERN_INLINE bool has_pairs() const { return extra_ != 0; }

  // Whether the current leaf is the left one of a pair; if so, it only waits.
  DETKERN_INLINE bool at_left_of_pair() const {
    const uint32_t reversed = depth_ == 0 ? 0 : __brev(node_) >> (32 - depth_);
    return !inside_pair_ && reversed >= (1u << depth_) - extra_;
  }

  DETKERN_INLINE bool at_right_of_pair() const { return inside_pair_; }

  // How many nodes above the current bottom node end with it.
  DETKERN_INLINE int nodes_ended() const { return __ffs(static_cast<int>(~node_)) - 1; }

  DETKERN_INLINE bool at_last_node() const { return node_ + 1 == 1u << depth_; }

  DETKERN_INLINE void step() {
    if (at_left_of_pair()) {
      inside_pair_ = true;
    } else {
      inside_pair_ = false;
      ++node_;
    }
  }

 private:
  uint32_t node_;
  uint32_t extra_;
  int depth_;
  bool inside_pair_;
};

// The waiting left children of one output tile, one a level. Each thread has WORDS words of two 16-bit values.
template <int DTYPE, int WORDS, int LEVELS_IN_SHARED, int THREAD_COUNT>
class MergeLevels {
 public:
  static constexpr int LEVEL_BYTES = WORDS * THREAD_COUNT * 4;
  static_assert(WORDS % 4 == 0, "levels are moved by 16 bytes a thread");

  // `levels`: how many there are. `shared`: the address of LEVELS_IN_SHARED * LEVEL_BYTES, 16-byte aligned; `scratch`:
  // GemmParams::scratch.
  DETKERN_INLINE MergeLevels(int levels, uint32_t shared, void* scratch)
      : shared_(shared + thread_index() * 16),
        scratch_(static_cast<char*>(scratch)),
        levels_in_scratch_(max(levels - LEVELS_IN_SHARED, 0)) {}

  DETKERN_INLINE void put(int level, const uint32_t (&value)[WORDS]) {
    if (level < LEVELS_IN_SHARED) {
      const uint32_t target = shared_ + level * LEVEL_BYTES;
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        store_shared(target + i * THREAD_COUNT * 4, make_uint4(value[i], value[i + 1], value[i + 2], value[i + 3]));
      }
    } else {
      char* target = in_scratch(level);
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        *reinterpret_cast<uint4*>(target + i * THREAD_COUNT * 4) =
            make_uint4(value[i], value[i + 1], value[i + 2], value[i + 3]);
      }
    }
  }

  DETKERN_INLINE void add(int level, uint32_t (&value)[WORDS]) const {
    if (level < LEVELS_IN_SHARED) {
      const uint32_t source = shared_ + level * LEVEL_BYTES;
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) add_words(load_shared_v4(source + i * THREAD_COUNT * 4), value + i);
    } else {
      const char* source = in_scratch(level);
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        add_words(*reinterpret_cast<const uint4*>(source + i * THREAD_COUNT * 4), value + i);
      }
    }
  }

 private:
  // This thread's first words of a level. Computed where it is used, since it would be kept in registers otherwise.
  DETKERN_INLINE char* in_scratch(int level) const {
    const int64_t slot = static_cast<int64_t>(blockIdx.x) * levels_in_scratch_ + (level - LEVELS_IN_SHARED);
    return scratch_ + slot * LEVEL_BYTES + thread_index() * 16;
  }

  static DETKERN_INLINE void add_words(uint4 left, uint32_t* right) {
    right[0] = add_pair<DTYPE>(left.x, right[0]);
    right[1] = add_pair<DTYPE>(left.y, right[1]);
    right[2] = add_pair<DTYPE>(left.z, right[2]);
    right[3] = add_pair<DTYPE>(left.w, right[3]);
  }

  uint32_t shared_;  // this thread's
  char* scratch_;
  int levels_in_scratch_;
};

// The merge of a tree leaf by leaf.
template <int DTYPE, int WORDS, int LEVELS_IN_SHARED, int THREAD_COUNT>
class MergeStack {
 public:
  static constexpr int LEVEL_BYTES = WORDS * THREAD_COUNT * 4;

  DETKERN_INLINE MergeStack(uint32_t leaves, uint32_t shared, void* scratch)
      : walk_(leaves), levels_(leaves > 1 ? 32 - __clz(leaves - 1) : 0, shared, scratch) {}

  // Takes the next leaf and leaves in `value` the largest node that ends with it: after the last leaf, the root.
  DETKERN_INLINE void push(uint32_t (&value)[WORDS]) {
    if (walk_.at_left_of_pair()) {
      levels_.put(0, value);
    } else {
      if (walk_.at_right_of_pair()) levels_.add(0, value);
      const int bottom = walk_.has_pairs() ? 1 : 0;
      const int top = bottom + walk_.nodes_ended();
      for (int level = bottom; level < top; ++level) levels_.add(level, value);
      if (!walk_.at_last_node()) levels_.put(top, value);
    }
    walk_.step();
  }

 private:
  MidSplitWalk walk_;
  MergeLevels<DTYPE, WORDS, LEVELS_IN_SHARED, THREAD_COUNT> levels_;
};
