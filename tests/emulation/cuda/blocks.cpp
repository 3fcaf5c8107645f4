// A kernel of one block of parameters, named by KERNEL, as a function of the host: every CTA of a grid, one after the
// other.
#include KERNEL

extern "C" void emulation_launch(const void* params, unsigned columns, unsigned rows) {
  for (blockIdx.y = 0; blockIdx.y < rows; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < columns; ++blockIdx.x)
      emulation::Fibers::of_this_thread().run(
          THREADS, [](void* argument, int) { detkern_kernel(*static_cast<const PARAMS*>(argument)); },
          const_cast<void*>(params));
}
