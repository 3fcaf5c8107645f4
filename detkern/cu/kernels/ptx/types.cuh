// What every kernel is written in: integers of fixed width, which NVRTC has no header for, and the codes of types.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

// The values of detkern_dtype in abi/abi.h.
enum DType : int32_t { NONE = 0, F32 = 1, F16 = 2, BF16 = 3, E4M3 = 4, E5M2 = 5 };

// What an element of a type of 4 or 2 bytes lies in.
template <int DTYPE>
struct StorageOf {
  using type = uint16_t;
};
template <>
struct StorageOf<F32> {
  using type = uint32_t;
};

#define DETKERN_INLINE __device__ __forceinline__
