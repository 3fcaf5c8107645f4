// A block that reverses an array through shared memory, with its barrier and without.
#include "musa_runtime.h"

namespace {

struct Params {
  int* data;
  int count;
  bool barrier;
};

__global__ void reverse(const Params params) {
  __shared__ int shared[1024];
  for (int block = blockIdx.x; block < 4; block += gridDim.x) {
    int* mine = params.data + block * params.count;
    shared[threadIdx.x] = mine[threadIdx.x];
    if (params.barrier) __syncthreads();
    const int got = shared[params.count - 1 - threadIdx.x];
    if (params.barrier) __syncthreads();
    mine[threadIdx.x] = got;
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int run(int* data, int count, int grid, int barrier) {
  DETKERN_LAUNCH(reverse, static_cast<unsigned>(grid), count, nullptr, (Params{data, count, barrier != 0}));
  return musaGetLastError();
}
