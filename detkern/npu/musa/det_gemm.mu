// Contracts `fma` (f32, f16, bf16) and `tree` (f16, bf16) on Moore Threads GPUs, and the bias gradient, behind abi.h.
//
// Never run on such a GPU: compiled and run on the host against tests/emulation, and by nvcc on NVIDIA's (docs/npu.md).
//
// Tile     (16 * TM) x (16 * TN) outputs of one matrix: 64 x 64 with 4 x 4 a thread, 128 x 128 with 8 x 8. No K is split.
// Launch   256 threads, grid.x = min(tiles, 4 * multiprocessors) blocks that walk the tiles; any grid.x is right as well.
// Memory   16 KiB of static shared memory: two stages of TILE_K rows of A and of B in binary32. `tree`: scratch, one slot of
//          TM * TN * 512 bytes for each block and level of the tree, for left children that wait.
// Loads    any strides, of any sign, in 64 bits; neighbouring threads read along the dimension that is contiguous.
//
// APIs: MUSA SDK 5.2.0, programming guide, "First kernel" (musaMalloc, musaMemcpy, musaFree, musaDeviceSynchronize,
// musaGetLastError, musaGetErrorString, <<<grid, threads, shared, stream>>>) and "Compute optimisation" (shared memory, at
// most 48 KB a block; __syncthreads); "Runtime API reference" (musaGetDevice, musaSetDevice, musaGetDeviceCount,
// musaGetDeviceProperties, musaDriverGetVersion, musaRuntimeGetVersion).
#include <musa_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <mutex>

#include "../../abi/checks.h"
#include "arithmetic.muh"

#ifndef DETKERN_LAUNCH
#define DETKERN_LAUNCH(kernel, grid, threads, stream, params) kernel<<<grid, threads, 0, stream>>>(params)
#endif
#ifndef DETKERN_HOST_MEMORY
#define DETKERN_HOST_MEMORY 0
#endif

namespace detkern {
namespace {

constexpr int THREADS = 256, SIDE = 16;  // threads of a block, in SIDE x SIDE
constexpr int BAND = 16;                 // tile rows that are walked together, so that blocks share columns of B in L2

struct GemmParams {
  int64_t m, n, k, tiles;
  int64_t a_row, a_col, b_row, b_col, out_row, out_col, bias_stride;
  int64_t batch_shape[DETKERN_MAX_BATCH_RANK];
  int64_t a_batch[DETKERN_MAX_BATCH_RANK], b_batch[DETKERN_MAX_BATCH_RANK], out_batch[DETKERN_MAX_BATCH_RANK];
  const void *a, *b, *bias;
  void *out, *scratch;
  int batch_rank, out_dtype, bias_dtype, accumulate, levels;
};

__device__ int64_t batch_offset(const GemmParams& p, const int64_t (&strides)[DETKERN_MAX_BATCH_RANK], int64_t batch) {
  int64_t offset = 0;
  for (int axis = p.batch_rank - 1; axis >= 0; --axis) {
    const int64_t outer = batch / p.batch_shape[axis];
    offset += (batch - outer * p.batch_shape[axis]) * strides[axis];
    batch = outer;
  }
  return offset;
}

struct Place {
  int64_t batch, row, column;  // of the tile's first element
};

// Bands of BAND tile rows, walked column by column.
template <int TILE_M, int TILE_N>
__device__ Place place_of(const GemmParams& p, int64_t tile) {
  const int64_t rows = (p.m + TILE_M - 1) / TILE_M, columns = (p.n + TILE_N - 1) / TILE_N;
  const int64_t batch = tile / (rows * columns), inside = tile % (rows * columns);
  const int64_t band = inside / (BAND * columns), in_band = inside % (BAND * columns);
  const int64_t left = rows - band * BAND, height = left < BAND ? left : BAND;
  return {batch, (band * BAND + in_band % height) * TILE_M, in_band / height * TILE_N};
}

// One operand's way into shared memory, stage by stage: `extent` lines of `depth` k each, [k][line] in binary32, zeros
// outside of the operand. Zeros in K change no bit (+0 * +0 added to an accumulator changes at most the sign of a zero,
// which the last + 0 makes + anyway).
template <int DTYPE, int EXTENT, int DEPTH>
class Stage {
 public:
  using Element = typename Storage<DTYPE>::type;
  static constexpr int PITCH = EXTENT + 4;  // 16-byte alignment stays, and stores along k hit different banks
  static constexpr int FLOATS = DEPTH * PITCH;

  __device__ Stage(const void* array, int64_t line_stride, int64_t k_stride, int64_t lines, int64_t k, int thread)
      : first_(static_cast<const Element*>(array)),
        line_stride_(line_stride),
        k_stride_(k_stride),
        lines_(lines),
        k_(k),
        thread_(thread),
        along_k_(k_stride == 1 && line_stride != 1) {}

  __device__ void fetch(int64_t k0) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int line = line_of(i), k = k_of(i);
      const bool inside = line < lines_ && k0 + k < k_;
      values_[i] = inside ? first_[line * line_stride_ + (k0 + k) * k_stride_] : Element(0);
    }
  }

  __device__ void store(float* stage) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) stage[k_of(i) * PITCH + line_of(i)] = upcast<DTYPE>(values_[i]);
  }

 private:
  static constexpr int EACH = EXTENT * DEPTH / THREADS;
  static_assert(EXTENT * DEPTH % THREADS == 0, "all threads load the same number of elements");

  __device__ int line_of(int i) const {
    const int index = thread_ + i * THREADS;
    return along_k_ ? index / DEPTH : index % EXTENT;
  }
  __device__ int k_of(int i) const {
    const int index = thread_ + i * THREADS;
    return along_k_ ? index % DEPTH : index / EXTENT;
  }

  const Element* first_;
  int64_t line_stride_, k_stride_, lines_, k_;
  int thread_;
  bool along_k_;
  Element values_[EACH];
};

// A leaf's or node's values of one thread, two to a word.
template <int DTYPE, int WORDS>
class WaitingNodes {
 public:
  __device__ WaitingNodes(const GemmParams& p, int thread)
      : mine_(static_cast<uint32_t*>(p.scratch) + static_cast<int64_t>(blockIdx.x) * p.levels * WORDS * THREADS + thread) {}

  __device__ void put(int depth, const uint32_t (&node)[WORDS]) {
    uint32_t* slot = mine_ + static_cast<int64_t>(depth - 1) * WORDS * THREADS;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) slot[i * THREADS] = node[i];
  }

  // node = the left child that waits at `depth` + node.
  __device__ void add(int depth, uint32_t (&node)[WORDS]) const {
    const uint32_t* slot = mine_ + static_cast<int64_t>(depth - 1) * WORDS * THREADS;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t left = slot[i * THREADS];
      const uint32_t low = round_to<DTYPE>(upcast<DTYPE>(left & 0xffffu) + upcast<DTYPE>(node[i] & 0xffffu));
      const uint32_t high = round_to<DTYPE>(upcast<DTYPE>(left >> 16) + upcast<DTYPE>(node[i] >> 16));
      node[i] = low | high << 16;
    }
  }

 private:
  uint32_t* mine_;
};

template <int CONTRACT, int DTYPE, int TM, int TN>
__global__ void __launch_bounds__(THREADS) gemm_kernel(const GemmParams p) {
  constexpr int TILE_M = SIDE * TM, TILE_N = SIDE * TN, TILE_K = TM == 8 ? 8 : 16;
  using StageA = Stage<DTYPE, TILE_M, TILE_K>;
  using StageB = Stage<DTYPE, TILE_N, TILE_K>;
  alignas(16) __shared__ float shared_a[2][StageA::FLOATS];
  alignas(16) __shared__ float shared_b[2][StageB::FLOATS];
  const int thread = threadIdx.x;
  const int my_row = thread / SIDE * TM, my_column = thread % SIDE * TN;

  for (int64_t tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Place place = place_of<TILE_M, TILE_N>(p, tile);
    const typename StageA::Element* a = static_cast<const typename StageA::Element*>(p.a);
    const typename StageB::Element* b = static_cast<const typename StageB::Element*>(p.b);
    StageA stage_a(a + batch_offset(p, p.a_batch, place.batch) + place.row * p.a_row, p.a_row, p.a_col,
                   p.m - place.row, p.k, thread);
    StageB stage_b(b + batch_offset(p, p.b_batch, place.batch) + place.column * p.b_col, p.b_col, p.b_row,
                   p.n - place.column, p.k, thread);
    const int64_t out_start = batch_offset(p, p.out_batch, place.batch);
    const auto out_index = [&](int m, int n) {
      return out_start + (place.row + my_row + m) * p.out_row + (place.column + my_column + n) * p.out_col;
    };
    const auto inside = [&](int m, int n) {
      return place.row + my_row + m < p.m && place.column + my_column + n < p.n;
    };

    float acc[TM][TN];
#pragma unroll
    for (int m = 0; m < TM; ++m)
#pragma unroll
      for (int n = 0; n < TN; ++n) {
        const bool starts_at_out = CONTRACT == DETKERN_FMA && p.accumulate && inside(m, n);
        acc[m][n] = starts_at_out ? static_cast<const float*>(p.out)[out_index(m, n)] : 0.0f;
      }

    constexpr int WORDS = TM * TN / 2;
    uint32_t node[CONTRACT == DETKERN_TREE ? WORDS : 1] = {};
    const int64_t leaves = (p.k + LEAF - 1) / LEAF;
    if (p.k > 0) {
      stage_a.fetch(0);
      stage_b.fetch(0);
    }
    int current = 0;
    for (int64_t k0 = 0; k0 < p.k; k0 += TILE_K, current ^= 1) {
      stage_a.store(shared_a[current]);
      stage_b.store(shared_b[current]);
      // One barrier a stage: a thread that is ahead writes the other stage, which all have left before this barrier.
      __syncthreads();
      if (k0 + TILE_K < p.k) {
        stage_a.fetch(k0 + TILE_K);
        stage_b.fetch(k0 + TILE_K);
      }
#pragma unroll
      for (int k = 0; k < TILE_K; ++k) {
        const float* row = shared_a[current] + k * StageA::PITCH + my_row;
        const float* column = shared_b[current] + k * StageB::PITCH + my_column;
#pragma unroll
        for (int m = 0; m < TM; ++m)
#pragma unroll
          for (int n = 0; n < TN; ++n) acc[m][n] = fmaf(row[m], column[n], acc[m][n]);
      }
      if constexpr (CONTRACT == DETKERN_TREE) {
        if ((k0 + TILE_K) % LEAF == 0 || k0 + TILE_K >= p.k) {
#pragma unroll
          for (int i = 0; i < WORDS; ++i) {
            const int m = 2 * i / TN, n = 2 * i % TN;
            node[i] = round_to<DTYPE>(acc[m][n]) | round_to<DTYPE>(acc[m][n + 1]) << 16;
            acc[m][n] = acc[m][n + 1] = 0.0f;
          }
          WaitingNodes<DTYPE, WORDS> waiting(p, thread);
          const LeafEnd end = end_of_leaf(k0 / LEAF, leaves);
          for (int i = 0; i < end.rights; ++i) waiting.add(end.depth - i, node);
          if (end.depth > end.rights) waiting.put(end.depth - end.rights, node);
        }
      }
    }
    __syncthreads();  // before the next tile writes the stages

#pragma unroll
    for (int n = 0; n < TN; ++n) {
      const bool has_bias = p.bias_dtype != 0 && place.column + my_column + n < p.n;
      const float bias =
          has_bias ? load_as_f32(p.bias, p.bias_dtype, (place.column + my_column + n) * p.bias_stride) : 0.0f;
#pragma unroll
      for (int m = 0; m < TM; ++m) {
        if (!inside(m, n)) continue;
        float value = acc[m][n];
        if constexpr (CONTRACT == DETKERN_TREE) {
          const int index = m * TN + n;
          value = upcast<DTYPE>(node[index / 2] >> (index % 2 * 16) & 0xffffu);
          if (p.accumulate) value = value + static_cast<const float*>(p.out)[out_index(m, n)];
        }
        value = value + 0.0f;
        if (has_bias) value = value + bias;
        store_from_f32(p.out, p.out_dtype, out_index(m, n), value);
      }
    }
  }
}

struct SumParams {
  int64_t rows, columns, row_stride, col_stride, out_stride;
  int64_t batch_shape[DETKERN_MAX_SUM_RANK], batch_strides[DETKERN_MAX_SUM_RANK];
  const void* dc;
  void* out;
  int batch_rank, dtype, out_dtype, accumulate;
};

// One thread a column: the chain is never cut. Eight rows are loaded before they are added.
__global__ void __launch_bounds__(THREADS) column_sum_kernel(const SumParams p) {
  constexpr int GROUP = 8;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t column = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; column < p.columns; column += stride) {
    float acc = p.accumulate ? static_cast<const float*>(p.out)[column * p.out_stride] : 0.0f;
    int64_t index[DETKERN_MAX_SUM_RANK] = {};
    int64_t offset = column * p.col_stride;
    for (bool more = p.rows > 0; more;) {
      for (int64_t row = 0; row < p.rows; row += GROUP) {
        float values[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
          values[i] = row + i < p.rows ? load_as_f32(p.dc, p.dtype, offset + (row + i) * p.row_stride) : 0.0f;
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
          if (row + i < p.rows) acc = acc + values[i];
      }
      int axis = p.batch_rank - 1;
      for (; axis >= 0; --axis) {
        offset += p.batch_strides[axis];
        if (++index[axis] < p.batch_shape[axis]) break;
        offset -= p.batch_shape[axis] * p.batch_strides[axis];
        index[axis] = 0;
      }
      more = axis >= 0;
    }
    store_from_f32(p.out, p.out_dtype, column * p.out_stride, acc + 0.0f);
  }
}

constexpr uint64_t OFFERS = offer(DETKERN_FMA, DETKERN_F32) | offer(DETKERN_FMA, DETKERN_F16) |
                            offer(DETKERN_FMA, DETKERN_BF16) | offer(DETKERN_TREE, DETKERN_F16) |
                            offer(DETKERN_TREE, DETKERN_BF16);

int32_t failed(const char* what, musaError_t error) {
  const int32_t status = error == musaErrorMemoryAllocation ? DETKERN_OUT_OF_MEMORY : DETKERN_DEVICE_FAULT;
  return fail(status, "%s: %s", what, musaGetErrorString(error));
}

// Makes a device current, and the one before it again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error = musaGetDevice(&before_);
    if (error == musaSuccess && before_ != device) error = musaSetDevice(device);
    changed_ = error == musaSuccess && before_ != device;
  }
  ~CurrentDevice() {
    if (changed_) musaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  musaError_t error;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// The number of multiprocessors, asked for once a device.
int32_t multiprocessors(int device, int& count) {
  constexpr int MOST = 64;
  static int known[MOST];
  static std::mutex lock;
  const std::lock_guard<std::mutex> guard(lock);
  if (device >= 0 && device < MOST && known[device]) {
    count = known[device];
    return DETKERN_OK;
  }
  musaDeviceProp properties;
  if (const musaError_t error = musaGetDeviceProperties(&properties, device))
    return failed("musaGetDeviceProperties", error);
  count = properties.multiProcessorCount;
  if (device >= 0 && device < MOST) known[device] = count;
  return DETKERN_OK;
}

struct Launch {
  bool large;     // 128 x 128 tiles
  int64_t tiles;
  unsigned grid;
  int levels;     // of waiting nodes
  uint64_t scratch_bytes;
};

int32_t plan(const detkern_gemm_descriptor* d, Launch& launch) {
  int units = 0;
  if (const int32_t status = multiprocessors(d->device, units)) return status;
  int64_t batch = 1;
  for (int i = 0; i < d->batch_rank; ++i) batch *= d->batch_shape[i];
  const auto tiles = [&](int64_t side) { return batch * ((d->m + side - 1) / side) * ((d->n + side - 1) / side); };
  launch.large = tiles(128) >= units;
  launch.tiles = tiles(launch.large ? 128 : 64);
  launch.grid = static_cast<unsigned>(std::min<int64_t>(launch.tiles, 4 * int64_t(units)));
  launch.levels = d->contract == DETKERN_TREE ? tree_depth((d->k + LEAF - 1) / LEAF) : 0;
  const uint64_t slot = (launch.large ? 64 : 16) * 2 * THREADS;
  launch.scratch_bytes = uint64_t(launch.grid) * launch.levels * slot;
  return DETKERN_OK;
}

template <int CONTRACT, int DTYPE>
void launch_kernel(const Launch& launch, musaStream_t stream, const GemmParams& params) {
  const auto kernel = launch.large ? gemm_kernel<CONTRACT, DTYPE, 8, 8> : gemm_kernel<CONTRACT, DTYPE, 4, 4>;
  DETKERN_LAUNCH(kernel, launch.grid, THREADS, stream, params);
}

int32_t gemm(const detkern_gemm_descriptor* d) {
  bool empty = true;
  if (const int32_t status = check_gemm(d, OFFERS, empty)) return status;
  if (empty) return DETKERN_OK;
  const CurrentDevice current(d->device);
  if (current.error) return failed("musaSetDevice", current.error);
  Launch launch;
  if (const int32_t status = plan(d, launch)) return status;
  if (launch.scratch_bytes && (!d->scratch || d->scratch_bytes < launch.scratch_bytes))
    return fail(DETKERN_INVALID, "%llu bytes of scratch are needed, %llu were given",
                static_cast<unsigned long long>(launch.scratch_bytes),
                static_cast<unsigned long long>(d->scratch ? d->scratch_bytes : 0));
  GemmParams p{};
  p.m = d->m;
  p.n = d->n;
  p.k = d->k;
  p.tiles = launch.tiles;
  p.a_row = d->a_row_stride;
  p.a_col = d->a_col_stride;
  p.b_row = d->b_row_stride;
  p.b_col = d->b_col_stride;
  p.out_row = d->out_row_stride;
  p.out_col = d->out_col_stride;
  p.bias_stride = d->bias_stride;
  for (int i = 0; i < d->batch_rank; ++i) {
    p.batch_shape[i] = d->batch_shape[i];
    p.a_batch[i] = d->a_batch_strides[i];
    p.b_batch[i] = d->b_batch_strides[i];
    p.out_batch[i] = d->out_batch_strides[i];
  }
  p.a = d->a;
  p.b = d->b;
  p.bias = d->bias;
  p.out = d->out;
  p.scratch = d->scratch;
  p.batch_rank = d->batch_rank;
  p.out_dtype = d->out_dtype;
  p.bias_dtype = d->bias_dtype;
  p.accumulate = d->accumulate;
  p.levels = launch.levels;
  const musaStream_t stream = static_cast<musaStream_t>(d->stream);
  if (d->contract == DETKERN_TREE) {
    if (d->operand_dtype == DETKERN_F16) launch_kernel<DETKERN_TREE, DETKERN_F16>(launch, stream, p);
    if (d->operand_dtype == DETKERN_BF16) launch_kernel<DETKERN_TREE, DETKERN_BF16>(launch, stream, p);
  } else {
    if (d->operand_dtype == DETKERN_F32) launch_kernel<DETKERN_FMA, DETKERN_F32>(launch, stream, p);
    if (d->operand_dtype == DETKERN_F16) launch_kernel<DETKERN_FMA, DETKERN_F16>(launch, stream, p);
    if (d->operand_dtype == DETKERN_BF16) launch_kernel<DETKERN_FMA, DETKERN_BF16>(launch, stream, p);
  }
  if (const musaError_t error = musaGetLastError()) return failed("launch of gemm", error);
  return DETKERN_OK;
}

int32_t column_sum(const detkern_column_sum_descriptor* d) {
  SumParams p{};
  if (const int32_t status = check_column_sum(d, p.rows)) return status;
  if (d->n == 0) return DETKERN_OK;
  const CurrentDevice current(d->device);
  if (current.error) return failed("musaSetDevice", current.error);
  p.columns = d->n;
  p.row_stride = d->row_stride;
  p.col_stride = d->col_stride;
  p.out_stride = d->out_stride;
  for (int i = 0; i < d->batch_rank; ++i) {
    p.batch_shape[i] = d->batch_shape[i];
    p.batch_strides[i] = d->batch_strides[i];
  }
  p.dc = d->dc;
  p.out = d->out;
  p.batch_rank = d->batch_rank;
  p.dtype = d->operand_dtype;
  p.out_dtype = d->out_dtype;
  p.accumulate = d->accumulate;
  const auto kernel = column_sum_kernel;
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>((d->n + THREADS - 1) / THREADS, 65535));
  DETKERN_LAUNCH(kernel, grid, THREADS, static_cast<musaStream_t>(d->stream), p);
  if (const musaError_t error = musaGetLastError()) return failed("launch of column_sum", error);
  return DETKERN_OK;
}

int32_t get_device(detkern_device* device) {
  if (!device || device->size != sizeof *device)
    return fail(DETKERN_INVALID, "device struct of another size than this library's %zu", sizeof *device);
  musaDeviceProp properties;
  if (const musaError_t error = musaGetDeviceProperties(&properties, device->index))
    return failed("musaGetDeviceProperties", error);
  int driver = 0, runtime = 0;
  musaDriverGetVersion(&driver);
  musaRuntimeGetVersion(&runtime);
  device->units = properties.multiProcessorCount;
  std::snprintf(device->name, sizeof device->name, "%.127s", properties.name);
  std::snprintf(device->driver, sizeof device->driver, "driver %d, runtime %d", driver, runtime);
  return DETKERN_OK;
}

}  // namespace
}  // namespace detkern

extern "C" {

int32_t detkern_abi_version(void) { return DETKERN_ABI_VERSION; }

const char* detkern_last_error(void) { return detkern::last_error; }

int32_t detkern_get_capabilities(detkern_capabilities* capabilities) {
  using namespace detkern;
  last_error[0] = 0;
  if (!capabilities || capabilities->size != sizeof *capabilities)
    return fail(DETKERN_INVALID, "capabilities struct of another size than this library's %zu", sizeof *capabilities);
  capabilities->abi_version = DETKERN_ABI_VERSION;
  capabilities->host_memory = DETKERN_HOST_MEMORY;
  capabilities->gemm_offers = OFFERS;
  std::snprintf(capabilities->name, sizeof capabilities->name, "musa%s", DETKERN_HOST_MEMORY ? ", emulated" : "");
  return DETKERN_OK;
}

int32_t detkern_gemm(const detkern_gemm_descriptor* descriptor) {
  detkern::last_error[0] = 0;
  return detkern::gemm(descriptor);
}

int32_t detkern_gemm_scratch(const detkern_gemm_descriptor* descriptor, uint64_t* bytes) {
  using namespace detkern;
  last_error[0] = 0;
  *bytes = 0;
  bool empty = true;
  if (const int32_t status = check_gemm_sizes(descriptor, OFFERS, empty)) return status;
  if (empty || descriptor->contract != DETKERN_TREE) return DETKERN_OK;
  Launch launch;
  if (const int32_t status = plan(descriptor, launch)) return status;
  *bytes = launch.scratch_bytes;
  return DETKERN_OK;
}

int32_t detkern_block_scaled_gemm(const detkern_block_scaled_descriptor*) {
  return detkern::fail(DETKERN_UNSUPPORTED, "there is no kernel for fp8-block128 on MUSA");
}

int32_t detkern_column_sum(const detkern_column_sum_descriptor* descriptor) {
  detkern::last_error[0] = 0;
  return detkern::column_sum(descriptor);
}

int32_t detkern_device_count(int32_t* count) {
  using namespace detkern;
  last_error[0] = 0;
  if (const musaError_t error = musaGetDeviceCount(count)) return failed("musaGetDeviceCount", error);
  return DETKERN_OK;
}

int32_t detkern_get_device(detkern_device* device) {
  detkern::last_error[0] = 0;
  return detkern::get_device(device);
}

int32_t detkern_allocate(int32_t device, uint64_t bytes, void** pointer) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("musaSetDevice", current.error);
  if (const musaError_t error = musaMalloc(pointer, bytes ? bytes : 1)) return failed("musaMalloc", error);
  return DETKERN_OK;
}

int32_t detkern_free(int32_t device, void* pointer) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("musaSetDevice", current.error);
  if (const musaError_t error = musaFree(pointer)) return failed("musaFree", error);
  return DETKERN_OK;
}

int32_t detkern_copy(int32_t device, void* to, const void* from, uint64_t bytes, int32_t direction) {
  using namespace detkern;
  last_error[0] = 0;
  const CurrentDevice current(device);
  if (current.error) return failed("musaSetDevice", current.error);
  if (const musaError_t error = musaDeviceSynchronize()) return failed("musaDeviceSynchronize", error);
  const musaMemcpyKind kind = direction == DETKERN_TO_DEVICE ? musaMemcpyHostToDevice : musaMemcpyDeviceToHost;
  if (const musaError_t error = musaMemcpy(to, from, bytes, kind)) return failed("musaMemcpy", error);
  return DETKERN_OK;
}

}  // extern "C"
