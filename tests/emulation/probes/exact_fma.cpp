// The integer fused multiply-add beside the host's.
#include <cmath>
#include <cstddef>
#include <cstring>

#define __aicore__
#include "../../../detkern/npu/ascend/exact_fma.h"

// How many of `count` triples differ from fmaf; a NaN is 0x7fffffff.
extern "C" __attribute__((visibility("default"))) size_t differing(const uint32_t* a, const uint32_t* b,
                                                                   const uint32_t* c, size_t count) {
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) {
    float x, y, z;
    std::memcpy(&x, a + i, 4);
    std::memcpy(&y, b + i, 4);
    std::memcpy(&z, c + i, 4);
    const float value = std::fma(x, y, z);
    uint32_t want;
    std::memcpy(&want, &value, 4);
    if (value != value) want = detkern::NAN_BITS;
    found += detkern::ExactFma(a[i], b[i], c[i]) != want;
  }
  return found;
}
