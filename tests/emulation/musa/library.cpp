// det_gemm.mu as a C++ compiler's own kind of file.
#include "../../../detkern/npu/musa/det_gemm.mu"
