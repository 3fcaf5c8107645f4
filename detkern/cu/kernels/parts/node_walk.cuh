// The walk of tree-mma16's kernels over nodes of at most NODE_LEAVES leaves, which are merged in registers.
//
// At the smallest depth D where no node has more leaves, node j has floor((L + bitreverse_D(j)) / 2^D) of the L leaves
// (merge.cuh says why), its left half the smaller one. The 2^D nodes are the leaves of a perfect tree, whose waiting
// left children MergeLevels keeps.
#pragma once

#include "ptx/types.cuh"

template <uint32_t NODE_LEAVES>
class NodeWalk {
 public:
  // leaves: at least 1.
  DETKERN_INLINE explicit NodeWalk(uint32_t leaves) : leaves_(leaves), node_(0) {
    const uint32_t quotient = (leaves - 1) / NODE_LEAVES;
    depth_ = quotient > 0 ? 32 - __clz(quotient) : 0;
  }

  // D, the depth of these nodes.
  DETKERN_INLINE int depth() const { return depth_; }

  // Leaves of the current node.
  DETKERN_INLINE uint32_t size() const {
    const uint64_t reversed = depth_ == 0 ? 0 : __brev(node_) >> (32 - depth_);
    return static_cast<uint32_t>((leaves_ + reversed) >> depth_);
  }

  // How many nodes above the current one end with it.
  DETKERN_INLINE int nodes_ended() const { return __ffs(static_cast<int>(~node_)) - 1; }

  DETKERN_INLINE bool at_last_node() const { return node_ + 1 == 1u << depth_; }

  DETKERN_INLINE void step() { ++node_; }

 private:
  uint32_t leaves_;
  uint32_t node_;
  int depth_;
};
