// The main loop of Hopper's kernels: a warp group multiplies the stages of a ring by wgmma, into one chain an output.
#pragma once

#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"

// TileA, TileB: the operands' parts of a stage. Instruction: its products (ptx/wgmma.cuh, ptx/wgmma_8bit.cuh), which
// fix the elements' types. ROW_BLOCKS: of 64 rows, that a warp group has.
template <class TileA, class TileB, class Instruction, int ROW_BLOCKS>
class MainLoop {
 public:
  static constexpr int COLUMNS = TileB::LINES;
  static constexpr int STEPS = TileA::STAGE_K / Instruction::STEP_K;  // of a stage
  static_assert(TileA::STAGE_K == TileB::STAGE_K && TileA::STAGE_K % Instruction::STEP_K == 0, "whole steps");
  static_assert(TileA::ELEMENT_BYTES * Instruction::STEP_K == 32 && TileB::ELEMENT_BYTES * Instruction::STEP_K == 32,
                "a step of wgmma is 32 bytes along k");

  // The accumulators of 64 rows, as mma.sync lays them out: a lane has of columns 8 * j + 2t and the next, in rows g
  // (0, 1) and g + 8 (2, 3) of its warp's sixteen.
  using Fragments = float[COLUMNS / 8][4];

  static DETKERN_INLINE float (&registers(Fragments& fragments))[COLUMNS / 2] {
    return reinterpret_cast<float (&)[COLUMNS / 2]>(fragments);
  }

  // Keeps the compiler from moving accesses to the accumulators across the place where it stands.
  static DETKERN_INLINE void hold_all(Fragments (&acc)[ROW_BLOCKS]) {
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) hold(registers(acc[block]));
  }

  // Computes a chain's products of `blocks` stages (at least one), from the stage at `position` on; afterwards that is
  // the next chain's. FROM_ZERO: the chain starts from +0, not from what `acc` holds. row: of the group's first row in
  // the tile. meanwhile: what there is to do while the last products are on their way.
  //
  // Between a stage's first products (HEAD steps) and its others the warps see to the ring: they let the stage before
  // go and ask whether the next one is there, so that from stage to stage the tensor cores have work.
  template <bool FROM_ZERO, class RingType, class Position, class Meanwhile>
  static DETKERN_INLINE void multiply(Fragments (&acc)[ROW_BLOCKS], const RingType& ring, Position& position, int row,
                                      uint32_t blocks, const Meanwhile& meanwhile) {
    constexpr int HEAD = STEPS >= 8 ? 4 : STEPS / 2;
    constexpr uint32_t STRIDE = RingType::STAGE_BYTES / 16;
    // Low words of descriptors, of A in the ring's first stage; and from A's to B's.
    const uint32_t first = TileA::low_word(ring.a(0) + TileA::offset(row, 0));
    const uint32_t to_b = TileB::DESCRIPTOR_LOW - TileA::DESCRIPTOR_LOW + (TileA::BYTES - TileA::offset(row, 0)) / 16;
    uint32_t a = first + position.stage * STRIDE;
    // The first stage stands apart: in the loop there is always one in flight.
    ring.take(position);
    wgmma_fence();
    issue<0, HEAD, FROM_ZERO>(acc, a, a + to_b);
    uint32_t last = position.stage;
    position.step();
    uint32_t next = position.stage == 0 ? first : a + STRIDE;
    bool known = ring.full_already(position);
    issue<HEAD, STEPS>(acc, a, a + to_b);
#pragma unroll 1
    for (uint32_t block = 1; block < blocks; ++block) {
      a = next;
      ring.take(position, known);
      wgmma_fence();
      issue<0, HEAD>(acc, a, a + to_b);
      const uint32_t before = last;
      last = position.stage;
      position.step();
      next = position.stage == 0 ? first : a + STRIDE;
      known = ring.full_already(position);
      wgmma_wait<1>();
      ring.release(before);
      issue<HEAD, STEPS>(acc, a, a + to_b);
    }
    meanwhile();
    wgmma_wait<0>();
    ring.release(last);
  }

 private:
  // Starts the products of the steps numbered FIRST to LAST - 1 of a stage; a, b: low words of its descriptors.
  // FROM_ZERO: the chains start with the first of them.
  template <int FIRST, int LAST, bool FROM_ZERO = false>
  static DETKERN_INLINE void issue(Fragments (&acc)[ROW_BLOCKS], uint32_t a, uint32_t b) {
#pragma unroll
    for (int step = FIRST; step < LAST; ++step) {
#pragma unroll
      for (int block = 0; block < ROW_BLOCKS; ++block) {
        const uint64_t rows = TileA::descriptor(a, TileA::offset(64 * block, step));
        const uint64_t columns = TileB::descriptor(b, TileB::offset(0, step));
        if (FROM_ZERO && step == FIRST) {
          Instruction::template multiply<COLUMNS, true, TileA::TRANSPOSED, TileB::TRANSPOSED>(
              registers(acc[block]), rows, columns);
        } else {
          Instruction::template multiply<COLUMNS, false, TileA::TRANSPOSED, TileB::TRANSPOSED>(
              registers(acc[block]), rows, columns);
        }
      }
    }
    wgmma_commit();
  }
};
