// The subset of the AscendCL runtime that det_gemm.cpp uses, on the host.
//
// Memory of the "device" is memory of the host, and the library says so in its capabilities, unless the environment
// variable DETKERN_EMULATE_DEVICE is set: then it claims to be a real one, for tests of what happens on a device.
// DETKERN_EMULATE_SATURATION makes the device one that saturates on overflow; DETKERN_EMULATE_LEVEL_BYTES gives the
// waiting nodes of a tree less memory than the kernel's own choice.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#define DETKERN_HOST_MEMORY (std::getenv("DETKERN_EMULATE_DEVICE") == nullptr)

#define DETKERN_LEVEL_BYTES \
  (std::getenv("DETKERN_EMULATE_LEVEL_BYTES") ? std::atoi(std::getenv("DETKERN_EMULATE_LEVEL_BYTES")) : 49152)

typedef int aclError;
typedef void* aclrtStream;
constexpr aclError ACL_SUCCESS = 0;
constexpr aclError ACL_ERROR_REPEAT_INITIALIZE = 100002;
constexpr aclError ACL_ERROR_RT_PARAM_INVALID = 107000;
constexpr aclError ACL_ERROR_RT_INVALID_DEVICEID = 107001;
constexpr aclError ACL_ERROR_RT_MEMORY_ALLOCATION = 207001;
constexpr aclError ACL_ERROR_RT_VECTOR_CORE_EXCEPTION = 507035;
enum aclrtMemMallocPolicy { ACL_MEM_MALLOC_HUGE_FIRST };
enum aclrtMemcpyKind { ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_HOST };
enum aclrtDevAttr { ACL_DEV_ATTR_AICORE_CORE_NUM = 101, ACL_DEV_ATTR_VECTOR_CORE_NUM = 201 };
enum aclrtFloatOverflowMode {
  ACL_RT_OVERFLOW_MODE_SATURATION = 0,
  ACL_RT_OVERFLOW_MODE_INFNAN,
  ACL_RT_OVERFLOW_MODE_UNDEF,
};
enum aclrtLastErrLevel { ACL_RT_THREAD_LEVEL = 0 };

namespace emulation {
constexpr int DEVICES = 2, CORES = 3;
inline thread_local int device = -1;
inline thread_local aclError last_error = ACL_SUCCESS;
inline thread_local std::string message;
inline thread_local aclrtStream last_stream = nullptr;
}  // namespace emulation

inline aclError aclInit(const char*) {
  static bool done = false;
  const aclError error = done ? ACL_ERROR_REPEAT_INITIALIZE : ACL_SUCCESS;
  done = true;
  return error;
}
inline const char* aclGetRecentErrMsg() { return emulation::message.empty() ? nullptr : emulation::message.c_str(); }
inline aclError aclrtGetLastError(aclrtLastErrLevel) {
  const aclError error = emulation::last_error;
  emulation::last_error = ACL_SUCCESS;
  return error;
}
inline aclError aclrtGetDevice(int32_t* device) {
  if (emulation::device < 0) return ACL_ERROR_RT_PARAM_INVALID;
  *device = emulation::device;
  return ACL_SUCCESS;
}
inline aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= emulation::DEVICES) {
    emulation::message = "no such device";
    return ACL_ERROR_RT_INVALID_DEVICEID;
  }
  emulation::device = device;
  return ACL_SUCCESS;
}
inline aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = emulation::DEVICES;
  return ACL_SUCCESS;
}
inline aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  if (attribute != ACL_DEV_ATTR_VECTOR_CORE_NUM) return ACL_ERROR_RT_PARAM_INVALID;
  *value = emulation::CORES;
  return ACL_SUCCESS;
}
inline aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
  *mode = std::getenv("DETKERN_EMULATE_SATURATION") ? ACL_RT_OVERFLOW_MODE_SATURATION : ACL_RT_OVERFLOW_MODE_INFNAN;
  return ACL_SUCCESS;
}
inline const char* aclrtGetSocName() { return "emulated Ascend"; }
inline aclError aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
  *major = *minor = *patch = 0;
  return ACL_SUCCESS;
}
inline aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  *pointer = std::malloc(bytes);
  return *pointer ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
inline aclError aclrtFree(void* pointer) {
  std::free(pointer);
  return ACL_SUCCESS;
}
inline aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind) {
  if (bytes > room) return ACL_ERROR_RT_PARAM_INVALID;
  std::memcpy(to, from, bytes);
  return ACL_SUCCESS;
}
inline aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }
