// Fragments of matrices and their products by mma.sync (9.7.14.5). Section numbers are those of the PTX ISA 8.x.
#pragma once

#include "ptx/types.cuh"

DETKERN_INLINE void load_matrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

DETKERN_INLINE void load_matrix_x4_transposed(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// Stores 16 rows of eight 16-bit elements, each row at the address that the lane of its number gives, from words as
// mma.sync lays them out: of rows g and g + 8 (stmatrix, 9.7.14.5.16; sm_90 and newer).
DETKERN_INLINE void store_matrices(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high)
               : "memory");
}

// The same of two pieces; lanes 16 and beyond give the addresses of the second one's rows.
DETKERN_INLINE void store_matrices(uint32_t address, uint32_t low, uint32_t high, uint32_t low2, uint32_t high2) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(low), "r"(high),
               "r"(low2), "r"(high2)
               : "memory");
}

// Stores the words of two pieces as columns: each lane gives the address of eight elements of one column. Lanes 0 to 7
// those of `low`, 8 to 15 of `high`, and so on.
DETKERN_INLINE void store_matrices_transposed(uint32_t address, uint32_t low, uint32_t high, uint32_t low2,
                                              uint32_t high2) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(low),
               "r"(high), "r"(low2), "r"(high2)
               : "memory");
}

DETKERN_INLINE void store_matrices_transposed(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high)
               : "memory");
}

// acc += A B on a 16 x 8 tile, one step of 16 k: A 16 x 16 by rows, B 16 x 8 by columns.
template <int DTYPE>
DETKERN_INLINE void mma_m16n8k16(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "mma.sync m16n8k16 is used for f16 and bf16");
  if constexpr (DTYPE == BF16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// acc += A B on a 16 x 8 tile, one step of 8 k: A 16 x 8 by rows, B 8 x 8 by columns.
template <int DTYPE>
DETKERN_INLINE void mma_m16n8k8(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  static_assert(DTYPE == F16 || DTYPE == BF16, "mma.sync m16n8k8 is used for f16 and bf16");
  if constexpr (DTYPE == BF16) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(b0));
  } else {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(b0));
  }
}
