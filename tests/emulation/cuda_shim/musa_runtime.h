// The names of the MUSA runtime that det_gemm.mu uses, as CUDA's, so that nvcc compiles it and an NVIDIA GPU runs it.
#pragma once

#include <cuda_runtime.h>

#define musaError_t cudaError_t
#define musaSuccess cudaSuccess
#define musaErrorMemoryAllocation cudaErrorMemoryAllocation
#define musaGetErrorString cudaGetErrorString
#define musaGetLastError cudaGetLastError
#define musaStream_t cudaStream_t
#define musaGetDevice cudaGetDevice
#define musaSetDevice cudaSetDevice
#define musaGetDeviceCount cudaGetDeviceCount
#define musaDeviceProp cudaDeviceProp
#define musaGetDeviceProperties cudaGetDeviceProperties
#define musaDriverGetVersion cudaDriverGetVersion
#define musaRuntimeGetVersion cudaRuntimeGetVersion
#define musaMalloc cudaMalloc
#define musaFree cudaFree
#define musaMemcpy cudaMemcpy
#define musaMemcpyKind cudaMemcpyKind
#define musaMemcpyHostToDevice cudaMemcpyHostToDevice
#define musaMemcpyDeviceToHost cudaMemcpyDeviceToHost
#define musaDeviceSynchronize cudaDeviceSynchronize
