// Small kernels, each with one mistake that the emulation of Ascend C has to find; the first has none.
#include <cstdint>

#include "kernel_operator.h"

namespace {

using namespace AscendC;

struct Params {
  float* data;  // 64 of them, doubled in place
  int mistake;
};

enum {
  NONE, NO_QUEUE, NO_BARRIER, NO_WAIT_FOR_VECTOR, NO_WAIT_FOR_SCALAR, NO_WAIT_AFTER_READ, UNWRITTEN, UNALIGNED, NOT_256,
  TOO_LARGE, FULL, EMPTY, UNSET_FLAG, LEFT_FLAG, BLOCK_COUNT, BEYOND, OUT_WITHOUT_QUEUE, MISTAKES
};

void kernel(Params params) {
  TPipe pipe;
  TQue<TPosition::VECIN, 2> in;
  TQue<TPosition::VECOUT, 2> out;
  TBuf<TPosition::VECCALC> sum, other;
  pipe.InitBuffer(in, 2, 256);
  pipe.InitBuffer(out, 2, 256);
  pipe.InitBuffer(sum, 256);
  pipe.InitBuffer(other, params.mistake == TOO_LARGE ? 190 * 1024 : 512);
  GlobalTensor<uint8_t> memory;
  memory.SetGlobalBuffer(reinterpret_cast<uint8_t*>(params.data));
  const DataCopyExtParams line{static_cast<uint16_t>(params.mistake == BLOCK_COUNT ? 0 : 1), 256, 0, 0, 0};
  const DataCopyPadExtParams<uint8_t> pad{true, 0, 0, 0};
  const LocalTensor<float> total = sum.Get<float>(), scratch = other.Get<float>();

  LocalTensor<uint8_t> piece = in.AllocTensor<uint8_t>();
  DataCopyPad(piece, memory, line, pad);
  if (params.mistake != NO_QUEUE) {
    in.EnQue(piece);
    piece = in.DeQue<uint8_t>();
  }
  const LocalTensor<float> values = piece.ReinterpretCast<float>();
  Add(total, values, values, 64);
  if (params.mistake != NO_BARRIER) PipeBarrier<PIPE_V>();
  Adds(total, total, 0.0f, 64);
  in.FreeTensor(piece);
  if (params.mistake != NO_WAIT_FOR_VECTOR) {
    SetFlag<HardEvent::V_S>(0);
    WaitFlag<HardEvent::V_S>(0);
  }
  const float first = total.GetValue(0);
  if (params.mistake != NO_WAIT_AFTER_READ) {
    SetFlag<HardEvent::S_V>(0);
    WaitFlag<HardEvent::S_V>(0);
  }
  PipeBarrier<PIPE_V>();
  Adds(total, total, 0.0f, 64);
  SetFlag<HardEvent::V_S>(0);
  WaitFlag<HardEvent::V_S>(0);
  total.SetValue(0, first);
  if (params.mistake != NO_WAIT_FOR_SCALAR) {
    SetFlag<HardEvent::S_V>(0);
    WaitFlag<HardEvent::S_V>(0);
  }
  PipeBarrier<PIPE_V>();
  if (params.mistake == UNWRITTEN) Adds(scratch, scratch, 0.0f, 8);
  if (params.mistake == UNALIGNED) Duplicate(scratch[1], 0.0f, 8);
  if (params.mistake == NOT_256) Compare(other.Get<uint8_t>(), total, total, CMPMODE::EQ, 32);
  if (params.mistake == BEYOND) Duplicate(total, 0.0f, 65);
  if (params.mistake == FULL)
    for (int i = 0; i < 3; ++i) in.AllocTensor<uint8_t>();
  if (params.mistake == EMPTY) in.DeQue<uint8_t>();
  if (params.mistake == UNSET_FLAG) WaitFlag<HardEvent::MTE2_S>(0);
  if (params.mistake == LEFT_FLAG) SetFlag<HardEvent::MTE2_S>(0);
  LocalTensor<float> result = out.AllocTensor<float>();
  Adds(result, total, 0.0f, 64);
  if (params.mistake != OUT_WITHOUT_QUEUE) {
    out.EnQue(result);
    result = out.DeQue<float>();
  }
  DataCopyPad(memory, result.ReinterpretCast<uint8_t>(), line);
  out.FreeTensor(result);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int mistakes() { return MISTAKES; }

// What the emulation says of a launch, or null.
extern "C" __attribute__((visibility("default"))) const char* run(int mistake, float* data) {
  emulation::message.clear();
  emulation::launch(kernel, 1, nullptr, Params{data, mistake});
  return aclrtGetLastError(ACL_RT_THREAD_LEVEL) ? aclGetRecentErrMsg() : nullptr;
}
