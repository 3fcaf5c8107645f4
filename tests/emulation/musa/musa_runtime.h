// The subset of the MUSA runtime that det_gemm.mu uses, on the host. Kernels run on the calling thread, block by block.
//
// Memory of the "device" is memory of the host, and the library says so in its capabilities, unless the environment
// variable DETKERN_EMULATE_DEVICE is set: then it claims to be a real one, for tests of what happens on a device.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../../detkern/cpu/environment.h"
#include "../fibers.h"

#define DETKERN_HOST_MEMORY (std::getenv("DETKERN_EMULATE_DEVICE") == nullptr)

#define __device__
#define __host__
#define __global__
// All fibers of a block run on one thread, and so share what is local to the thread.
#define __shared__ static thread_local
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() {
  emulation::Fibers& fibers = emulation::Fibers::of_this_thread();
  fibers.barrier();
  threadIdx.x = fibers.index();
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

enum musaError_t {
  musaSuccess = 0,
  musaErrorInvalidValue = 1,
  musaErrorMemoryAllocation = 2,
  musaErrorInvalidDevice = 101,
};
enum musaMemcpyKind { musaMemcpyHostToDevice = 1, musaMemcpyDeviceToHost = 2 };
typedef struct MUstream_st* musaStream_t;
struct musaDeviceProp {
  char name[256];
  int multiProcessorCount;
};

inline const char* musaGetErrorString(musaError_t error) {
  switch (error) {
    case musaSuccess: return "no error";
    case musaErrorMemoryAllocation: return "out of memory";
    case musaErrorInvalidDevice: return "invalid device ordinal";
    default: return "invalid argument";
  }
}

namespace emulation {

constexpr int DEVICES = 2;
inline thread_local int device = 0;
inline thread_local musaError_t last_error = musaSuccess;
// What a test asks for: the streams that work was enqueued on, newest last.
inline thread_local musaStream_t last_stream = nullptr;

template <class Params>
void launch(void (*kernel)(Params), unsigned grid, int threads, musaStream_t stream, const Params& params) {
  if (grid == 0 || threads < 1 || threads > 1024) {
    last_error = musaErrorInvalidValue;
    return;
  }
  last_stream = stream;
  struct Call {
    void (*kernel)(Params);
    const Params& params;
  } call = {kernel, params};
  const detkern::FloatEnvironment environment;
  gridDim.x = grid;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    Fibers::of_this_thread().run(
        threads,
        [](void* argument, int index) {
          threadIdx.x = index;
          const Call& call = *static_cast<const Call*>(argument);
          call.kernel(call.params);
        },
        &call);
}

}  // namespace emulation

template <class Params>
void launch_(void (*kernel)(Params), unsigned grid, int threads, musaStream_t stream,
             const std::remove_const_t<Params>& params) {
  emulation::launch(kernel, grid, threads, stream, params);
}
#define DETKERN_LAUNCH(kernel, grid, threads, stream, params) launch_(kernel, grid, threads, stream, params)

inline musaError_t musaGetLastError() {
  const musaError_t error = emulation::last_error;
  emulation::last_error = musaSuccess;
  return error;
}
inline musaError_t musaGetDevice(int* device) {
  *device = emulation::device;
  return musaSuccess;
}
inline musaError_t musaSetDevice(int device) {
  if (device < 0 || device >= emulation::DEVICES) return musaErrorInvalidDevice;
  emulation::device = device;
  return musaSuccess;
}
inline musaError_t musaGetDeviceCount(int* count) {
  *count = emulation::DEVICES;
  return musaSuccess;
}
inline musaError_t musaGetDeviceProperties(musaDeviceProp* properties, int device) {
  if (device < 0 || device >= emulation::DEVICES) return musaErrorInvalidDevice;
  std::snprintf(properties->name, sizeof properties->name, "emulated MUSA device");
  properties->multiProcessorCount = 2;
  return musaSuccess;
}
inline musaError_t musaDriverGetVersion(int* version) {
  *version = 0;
  return musaSuccess;
}
inline musaError_t musaRuntimeGetVersion(int* version) {
  *version = 0;
  return musaSuccess;
}
inline musaError_t musaMalloc(void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes);
  return *pointer ? musaSuccess : musaErrorMemoryAllocation;
}
inline musaError_t musaFree(void* pointer) {
  std::free(pointer);
  return musaSuccess;
}
inline musaError_t musaMemcpy(void* to, const void* from, size_t bytes, musaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return musaSuccess;
}
inline musaError_t musaDeviceSynchronize() { return musaSuccess; }

// Not in any MUSA: what the last launch of this thread was enqueued on.
extern "C" __attribute__((used, visibility("default"))) inline void* emulation_last_stream() {
  return emulation::last_stream;
}
