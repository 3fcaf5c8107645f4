// A CUDA-core kernel, named by KERNEL, as a function of the host: every CTA of a grid, one after the other.
#include KERNEL

alignas(16) char shared[SMEM_BYTES];

extern "C" void emulation_launch(const GemmParams* params, int grid, int late, const char* const* readable,
                                 const int64_t* sizes) {
  for (int i = 0; i < 2; ++i) {
    emulation::readable[i] = readable[i];
    emulation::readable_end[i] = readable[i] + sizes[i];
  }
  emulation::late = late != 0;
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    std::memset(shared, 0xff, SMEM_BYTES);  // NaNs
    emulation::groups.assign(THREADS, {});
    for (auto& groups : emulation::groups) groups.emplace_back();
    emulation::Fibers::of_this_thread().run(
        THREADS, [](void* argument, int) { detkern_kernel(*static_cast<const GemmParams*>(argument)); },
        const_cast<GemmParams*>(params));
  }
}
