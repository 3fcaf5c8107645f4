// The subset of Ascend C that det_gemm.cpp uses, on the host: tensors, queues, copies with padding, vector operations,
// casts, block index and events. core.h has what is checked. Blocks run one after the other on the calling thread.
//
// The vector unit is taken to compute as the reference says and IEEE 754 where it is silent: every operation rounds to
// nearest even by itself, subnormals are kept. A cast of a NaN gives one of odd payload, since no page says which.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <type_traits>
#include <vector>

#include "../../../detkern/cpu/environment.h"
#include "../../../detkern/cpu/floats.h"
#include "acl/acl.h"
#include "core.h"

#define __aicore__
#define __global__
#define __gm__
#define KERNEL_TASK_TYPE_DEFAULT(type)

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
struct half {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};

namespace AscendC {

using emulation::Clock;
using emulation::Core;
using emulation::Pipe;

enum class TPosition { VECIN, VECOUT, VECCALC };
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class CMPMODE { LT, GT, EQ, LE, GE, NE };
enum class SELMODE { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class HardEvent { MTE2_V, V_MTE2, MTE3_V, V_MTE3, V_S, S_V, MTE2_S, S_MTE2, MTE3_S, S_MTE3, MTE3_MTE2, MTE2_MTE3 };

inline Pipe source_of(HardEvent event) {
  constexpr Pipe pipes[] = {emulation::PIPE_OF_MTE2, emulation::PIPE_OF_V, emulation::PIPE_OF_MTE3,
                            emulation::PIPE_OF_V, emulation::PIPE_OF_V, emulation::PIPE_OF_S, emulation::PIPE_OF_MTE2,
                            emulation::PIPE_OF_S, emulation::PIPE_OF_MTE3, emulation::PIPE_OF_S,
                            emulation::PIPE_OF_MTE3, emulation::PIPE_OF_MTE2};
  return pipes[static_cast<int>(event)];
}
inline Pipe target_of(HardEvent event) {
  constexpr Pipe pipes[] = {emulation::PIPE_OF_V, emulation::PIPE_OF_MTE2, emulation::PIPE_OF_V,
                            emulation::PIPE_OF_MTE3, emulation::PIPE_OF_S, emulation::PIPE_OF_V, emulation::PIPE_OF_S,
                            emulation::PIPE_OF_MTE2, emulation::PIPE_OF_S, emulation::PIPE_OF_MTE3,
                            emulation::PIPE_OF_MTE2, emulation::PIPE_OF_MTE3};
  return pipes[static_cast<int>(event)];
}

inline int64_t GetBlockIdx() { return Core::current().block_index; }
inline int64_t GetBlockNum() { return Core::current().block_count; }

template <HardEvent EVENT>
void SetFlag(int32_t id) {
  Core::current().set_flag(static_cast<int>(EVENT), id, source_of(EVENT));
}
template <HardEvent EVENT>
void WaitFlag(int32_t id) {
  Core::current().wait_flag(static_cast<int>(EVENT), id, target_of(EVENT));
}
template <pipe_t PIPE>
void PipeBarrier() {
  static_assert(PIPE == PIPE_V || PIPE == PIPE_MTE2 || PIPE == PIPE_MTE3,
      "PIPE_S orders itself; PIPE_ALL is not emulated");
  Core::current().barrier(PIPE == PIPE_V      ? emulation::PIPE_OF_V
                          : PIPE == PIPE_MTE2 ? emulation::PIPE_OF_MTE2
                                              : emulation::PIPE_OF_MTE3);
}

template <class T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(uint32_t address, uint32_t count) : address_(address), count_(count) {}

  LocalTensor operator[](uint32_t offset) const {
    if (offset > count_) emulation::fault("a tensor is indexed beyond its end");
    return LocalTensor(address_ + offset * sizeof(T), count_ - offset);
  }
  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(address_, static_cast<uint32_t>(count_ * sizeof(T) / sizeof(U)));
  }
  T GetValue(uint32_t offset) const {
    Core& core = Core::current();
    check(offset + 1, "GetValue");
    core.begin(emulation::PIPE_OF_S, "GetValue");
    core.reads(address_ + offset * sizeof(T), sizeof(T));
    T value;
    std::memcpy(&value, data() + offset, sizeof value);
    return value;
  }
  void SetValue(uint32_t offset, T value) const {
    Core& core = Core::current();
    check(offset + 1, "SetValue");
    core.begin(emulation::PIPE_OF_S, "SetValue");
    core.writes(address_ + offset * sizeof(T), sizeof(T));
    std::memcpy(data() + offset, &value, sizeof value);
  }

  T* data() const { return reinterpret_cast<T*>(Core::current().memory + address_); }
  uint32_t address() const { return address_; }
  void check(uint32_t elements, const char* what) const {
    if (elements > count_) emulation::fault(std::string(what) + " of more elements than the tensor has");
  }

 private:
  uint32_t address_ = 0, count_ = 0;
};

template <class T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* address) { address_ = address; }
  T* data() const { return address_; }

 private:
  T* address_ = nullptr;
};

template <TPosition POSITION>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() const {
    return LocalTensor<T>(address, bytes / sizeof(T));
  }
  uint32_t address = 0, bytes = 0;
};

template <TPosition POSITION, int DEPTH>
class TQue {
 public:
  static_assert(POSITION != TPosition::VECCALC, "a queue moves data in or out");
  static constexpr Pipe PRODUCER = POSITION == TPosition::VECIN ? emulation::PIPE_OF_MTE2 : emulation::PIPE_OF_V;
  static constexpr Pipe CONSUMER = POSITION == TPosition::VECIN ? emulation::PIPE_OF_V : emulation::PIPE_OF_MTE3;

  template <class T>
  LocalTensor<T> AllocTensor() {
    if (free_.empty()) emulation::fault("AllocTensor: every buffer of the queue is in use");
    const Slot slot = free_.front();
    free_.pop_front();
    Core::current().wait(PRODUCER, slot.ready);
    return LocalTensor<T>(slot.address, bytes_ / sizeof(T));
  }
  template <class T>
  void EnQue(const LocalTensor<T>& tensor) {
    if (filled_.size() == DEPTH) emulation::fault("EnQue: the queue is full");
    filled_.push_back({tensor.address(), Core::current().finished(PRODUCER)});
  }
  template <class T>
  LocalTensor<T> DeQue() {
    if (filled_.empty()) emulation::fault("DeQue: the queue is empty");
    const Slot slot = filled_.front();
    filled_.pop_front();
    Core::current().wait(CONSUMER, slot.ready);
    return LocalTensor<T>(slot.address, bytes_ / sizeof(T));
  }
  template <class T>
  void FreeTensor(const LocalTensor<T>& tensor) {
    free_.push_back({tensor.address(), Core::current().finished(CONSUMER)});
    if (free_.size() + filled_.size() > count_) emulation::fault("FreeTensor of a tensor that is free");
  }

  void init(uint32_t address, uint32_t count, uint32_t bytes) {
    count_ = count;
    bytes_ = bytes;
    for (uint32_t i = 0; i < count; ++i) free_.push_back({address + i * bytes, Clock()});
  }

 private:
  struct Slot {
    uint32_t address;
    Clock ready;
  };
  std::deque<Slot> free_, filled_;
  uint32_t count_ = 0, bytes_ = 0;
};

class TPipe {
 public:
  TPipe() { current() = this; }
  template <TPosition POSITION, int DEPTH>
  void InitBuffer(TQue<POSITION, DEPTH>& queue, uint8_t count, uint32_t bytes) {
    const uint32_t rounded = (bytes + 31) / 32 * 32;
    queue.init(allocate(count * rounded), count, rounded);
  }
  template <TPosition POSITION>
  void InitBuffer(TBuf<POSITION>& buffer, uint32_t bytes) {
    buffer.bytes = (bytes + 31) / 32 * 32;
    buffer.address = allocate(buffer.bytes);
  }
  int8_t FetchEventID(HardEvent) { return 0; }

  static TPipe*& current() {
    static TPipe* pipe = nullptr;
    return pipe;
  }

 private:
  static uint32_t allocate(uint32_t bytes) {
    Core& core = Core::current();
    const uint32_t address = core.allocated;
    core.allocated += bytes;
    if (core.allocated > Core::BYTES - Core::RESERVED) emulation::fault("InitBuffer: local memory is too small");
    return address;
  }
};
inline TPipe* GetTPipePtr() { return TPipe::current(); }

struct DataCopyExtParams {
  uint16_t blockCount = 0;
  uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};
template <class T>
struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0, rightPadding = 0;
  T paddingValue = 0;
};

inline void check_copy(const DataCopyExtParams& copy) {
  if (copy.blockCount < 1 || copy.blockCount > 4095) emulation::fault("DataCopyPad: blockCount is not in 1..4095");
  if (copy.blockLen < 1 || copy.blockLen > 2097151) emulation::fault("DataCopyPad: blockLen is not in 1..2097151");
}

template <class T>
void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from, const DataCopyExtParams& copy,
                 const DataCopyPadExtParams<T>& pad) {
  check_copy(copy);
  Core& core = Core::current();
  Core::check_aligned(to.address(), "DataCopyPad");
  core.begin(emulation::PIPE_OF_MTE2, "DataCopyPad");
  const uint32_t left = pad.isPad ? pad.leftPadding * sizeof(T) : 0;
  const uint32_t right = pad.isPad ? pad.rightPadding * sizeof(T) : 0;
  if (left > 32 || right > 32) emulation::fault("DataCopyPad: more than 32 bytes of padding");
  const uint32_t filled = (left + copy.blockLen + right + 31) / 32 * 32;
  const unsigned char* source = reinterpret_cast<const unsigned char*>(from.data());
  for (uint32_t i = 0; i < copy.blockCount; ++i) {
    const uint32_t address = to.address() + i * (filled + copy.dstStride * 32);
    core.writes(address, filled);
    unsigned char* target = core.memory + address;
    for (uint32_t byte = 0; byte < filled; byte += sizeof(T)) std::memcpy(target + byte, &pad.paddingValue, sizeof(T));
    // Beyond the padding that was asked for is anything.
    if (filled > left + copy.blockLen + right)
      std::memset(target + left + copy.blockLen + right, 0x5a, filled - left - copy.blockLen - right);
    std::memcpy(target + left, source + static_cast<uint64_t>(i) * (copy.blockLen + uint64_t(copy.srcStride)),
        copy.blockLen);
  }
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from, const DataCopyExtParams& copy) {
  check_copy(copy);
  Core& core = Core::current();
  Core::check_aligned(from.address(), "DataCopyPad");
  core.begin(emulation::PIPE_OF_MTE3, "DataCopyPad");
  const uint32_t filled = (copy.blockLen + 31) / 32 * 32;
  unsigned char* target = reinterpret_cast<unsigned char*>(to.data());
  for (uint32_t i = 0; i < copy.blockCount; ++i) {
    const uint32_t address = from.address() + i * (filled + copy.srcStride * 32);
    core.reads(address, copy.blockLen);
    std::memcpy(target + static_cast<uint64_t>(i) * (copy.blockLen + uint64_t(copy.dstStride)), core.memory + address,
                copy.blockLen);
  }
}

// The start of a vector instruction: alignment, sizes, waits.
class Vector {
 public:
  explicit Vector(const char* name) : name_(name) { Core::current().begin(emulation::PIPE_OF_V, name); }
  template <class T>
  Vector& in(const LocalTensor<T>& tensor, uint32_t count) {
    Core::check_aligned(tensor.address(), name_);
    tensor.check(count, name_);
    Core::current().reads(tensor.address(), count * sizeof(T));
    return *this;
  }
  template <class T>
  Vector& out(const LocalTensor<T>& tensor, uint32_t count) {
    Core::check_aligned(tensor.address(), name_);
    tensor.check(count, name_);
    Core::current().writes(tensor.address(), count * sizeof(T));
    return *this;
  }

 private:
  const char* name_;
};

template <class T, class Operation>
void binary(const char* name, const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right,
            uint32_t count, const Operation& operation) {
  Vector(name).in(left, count).in(right, count).out(to, count);
  T *target = to.data(), *x = left.data(), *y = right.data();
#pragma GCC ivdep
  for (uint32_t i = 0; i < count; ++i) target[i] = operation(x[i], y[i]);
}

template <class T>
void Add(const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right, int32_t count) {
  static_assert(std::is_same_v<T, float>, "no other type is used");
  binary("Add", to, left, right, count, [](T x, T y) { return x + y; });
}
template <class T>
void Max(const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right, int32_t count) {
  static_assert(std::is_same_v<T, int16_t>, "no other type is used");
  binary("Max", to, left, right, count, [](T x, T y) { return x > y ? x : y; });
}
template <class T>
void Min(const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right, int32_t count) {
  static_assert(std::is_same_v<T, int16_t>, "no other type is used");
  binary("Min", to, left, right, count, [](T x, T y) { return x < y ? x : y; });
}
template <class T>
void And(const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right, int32_t count) {
  static_assert(std::is_same_v<T, int16_t> || std::is_same_v<T, uint16_t>, "And takes 16-bit integers");
  binary("And", to, left, right, count, [](T x, T y) { return static_cast<T>(x & y); });
}
template <class T>
void Muls(const LocalTensor<T>& to, const LocalTensor<T>& from, T scalar, int32_t count) {
  static_assert(std::is_same_v<T, float>, "no other type is used");
  Vector("Muls").in(from, count).out(to, count);
  T *target = to.data(), *x = from.data();
#pragma GCC ivdep
  for (int32_t i = 0; i < count; ++i) target[i] = x[i] * scalar;
}
template <class T>
void Adds(const LocalTensor<T>& to, const LocalTensor<T>& from, T scalar, int32_t count) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, int16_t>, "no other type is used");
  Vector("Adds").in(from, count).out(to, count);
  T *target = to.data(), *x = from.data();
#pragma GCC ivdep
  for (int32_t i = 0; i < count; ++i) target[i] = static_cast<T>(x[i] + scalar);
}
template <class T>
void Duplicate(const LocalTensor<T>& to, T value, int32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes types of 2 and 4 bytes");
  Vector("Duplicate").out(to, count);
  std::fill_n(to.data(), count, value);
}

inline float widened(half value) { return detkern::f16_to_f32(value.bits); }
inline float widened(bfloat16_t value) { return detkern::bf16_to_f32(value.bits); }
inline void narrowed(float value, half& to) {
  to.bits = value == value ? detkern::f32_to_f16(value) : uint16_t(0xfe01);
}
inline void narrowed(float value, bfloat16_t& to) {
  to.bits = value == value ? detkern::f32_to_bf16(value) : uint16_t(0xffc1);
}

template <class T>
void Cast(const LocalTensor<float>& to, const LocalTensor<T>& from, RoundMode mode, uint32_t count) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>, "from a 16-bit type");
  if (mode != RoundMode::CAST_NONE) emulation::fault("Cast to float takes CAST_NONE");
  Vector("Cast").in(from, count).out(to, count);
  for (uint32_t i = 0; i < count; ++i) to.data()[i] = widened(from.data()[i]);
}
template <class T>
void Cast(const LocalTensor<T>& to, const LocalTensor<float>& from, RoundMode mode, uint32_t count) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>, "to a 16-bit type");
  if (mode != RoundMode::CAST_RINT) emulation::fault("only CAST_RINT is emulated to 16-bit types");
  Vector("Cast").in(from, count).out(to, count);
  for (uint32_t i = 0; i < count; ++i) narrowed(from.data()[i], to.data()[i]);
}

inline void Compare(const LocalTensor<uint8_t>& to, const LocalTensor<float>& left, const LocalTensor<float>& right,
                    CMPMODE mode, uint32_t count) {
  if (mode != CMPMODE::EQ) emulation::fault("only CMPMODE::EQ is emulated");
  if (count * sizeof(float) % 256) emulation::fault("Compare: the operands are no multiple of 256 bytes");
  Vector("Compare").in(left, count).in(right, count).out(to, count / 8);
  for (uint32_t byte = 0; byte < count / 8; ++byte) {
    uint8_t bits = 0;
    for (uint32_t bit = 0; bit < 8; ++bit)
      bits |= static_cast<uint8_t>((left.data()[byte * 8 + bit] == right.data()[byte * 8 + bit]) << bit);
    to.data()[byte] = bits;
  }
}
template <class T>
void Select(const LocalTensor<T>& to, const LocalTensor<uint8_t>& mask, const LocalTensor<T>& where_one,
            const LocalTensor<T>& where_zero, SELMODE mode, uint32_t count) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, float>, "Select takes half and float");
  if (mode != SELMODE::VSEL_TENSOR_TENSOR_MODE) emulation::fault("only VSEL_TENSOR_TENSOR_MODE is emulated");
  Vector("Select").in(mask, count / 8).in(where_one, count).in(where_zero, count).out(to, count);
  for (uint32_t i = 0; i < count; ++i)
    std::memcpy(to.data() + i, (mask.data()[i / 8] >> (i % 8) & 1 ? where_one : where_zero).data() + i, sizeof(T));
}
template <class T>
void Gather(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<uint32_t>& offsets, uint32_t base,
            uint32_t count) {
  Vector vector("Gather");
  vector.in(offsets, count);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t offset = base + offsets.data()[i];
    if (offset % sizeof(T)) emulation::fault("Gather: an offset is no multiple of the element's size");
    Core::current().reads(from.address() + offset, sizeof(T));
  }
  vector.out(to, count);
  for (uint32_t i = 0; i < count; ++i) to.data()[i] = from.data()[(base + offsets.data()[i]) / sizeof(T)];
}

struct BrcbRepeatParams {
  uint16_t dstBlkStride = 1, dstRepStride = 8;
};
template <class T>
void Brcb(const LocalTensor<T>& to, const LocalTensor<T>& from, uint8_t repeats, const BrcbRepeatParams& params) {
  Vector vector("Brcb");
  vector.in(from, repeats * 8u);
  constexpr uint32_t EACH = 32 / sizeof(T);
  for (uint32_t i = 0; i < repeats * 8u; ++i) {
    const uint32_t block = i / 8 * params.dstRepStride + i % 8 * params.dstBlkStride;
    vector.out(to[block * EACH], EACH);
    std::fill_n(to.data() + block * EACH, EACH, from.data()[i]);
  }
}

}  // namespace AscendC

namespace emulation {

template <class Params>
void launch(void (*kernel)(Params), uint32_t blocks, aclrtStream stream, const Params& params) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> guard(one_at_a_time);
  last_stream = stream;
  const detkern::FloatEnvironment environment;
  try {
    if (blocks < 1 || blocks > CORES) fault("a launch of no blocks, or of more than the device has cores");
    for (uint32_t block = 0; block < blocks; ++block) {
      Core::current().reset(block, blocks);
      kernel(params);
      Core::current().check_end();
    }
  } catch (const Fault& error) {
    message = error.what();
    last_error = ACL_ERROR_RT_VECTOR_CORE_EXCEPTION;
  }
}

}  // namespace emulation
#define DETKERN_LAUNCH(kernel, blocks, stream, params) emulation::launch(kernel, blocks, stream, params)

// Not in any CANN: what the last launch of this thread was enqueued on.
extern "C" __attribute__((used, visibility("default"))) inline void* emulation_last_stream() {
  return emulation::last_stream;
}
