// The walk of tree-mma16's kernels over their leaves, in nodes of at most four, which are merged in registers.
//
// At the smallest depth D where no node has more than four leaves, node j has floor((L + bitreverse_D(j)) / 2^D) of the L
// leaves (merge.cuh says why), its left half the smaller one. The 2^D nodes are the leaves of a perfect tree, whose waiting
// left children MergeLevels keeps.
#pragma once

#include "ptx.cuh"

class NodeWalk {
 public:
  static constexpr uint32_t NODE_LEAVES = 4;

  DETKERN_INLINE explicit NodeWalk(uint32_t leaves) : leaves_(leaves), node_(0), leaf_(0) { size_ = size(); }

  // D, the depth of these nodes.
  DETKERN_INLINE int depth() const {
    const uint32_t quarter = leaves_ / NODE_LEAVES + (leaves_ % NODE_LEAVES != 0);
    return quarter > 1 ? 32 - __clz(quarter - 1) : 0;
  }

  DETKERN_INLINE bool ends_left_half() const { return leaf_ + 1 == size_ / 2; }
  DETKERN_INLINE bool ends_node() const { return leaf_ + 1 == size_; }

  // How many nodes above the current one end with it.
  DETKERN_INLINE int nodes_ended() const { return __ffs(static_cast<int>(~node_)) - 1; }

  DETKERN_INLINE void step() {
    if (ends_node()) {
      leaf_ = 0;
      ++node_;
      size_ = size();
    } else {
      ++leaf_;
    }
  }

 private:
  DETKERN_INLINE uint32_t size() const {
    const int depth = this->depth();
    const uint64_t reversed = depth == 0 ? 0 : __brev(node_) >> (32 - depth);
    return static_cast<uint32_t>((leaves_ + reversed) >> depth);
  }

  uint32_t leaves_;
  uint32_t node_;
  uint32_t size_;  // leaves of the current node
  uint32_t leaf_;  // within it
};
