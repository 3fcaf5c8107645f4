// One AI core: its local memory, its pipelines, and what each of them may rely on.
//
// Instructions take effect when they are issued, in program order. On a device the pipelines (S scalar, V vector, MTE2
// global to local, MTE3 local to global) run apart, each starting an instruction when those it waits for have finished.
// So every instruction notes which blocks of local memory it reads and writes, and every flag, barrier and queue notes
// what is finished once it is passed, as vector clocks: a block that was written, or is still read, by an instruction
// which is not known to have finished is a missing wait, and the kernel ends with a message that says where. Pipelines
// other than S are taken not to order their own instructions: PipeBarrier does (the reference, "PipeBarrier", asks for
// it).
//
// Also found: reads of local memory that nothing has written, addresses that are not aligned, buffers that overflow,
// queues and flags that are used out of turn.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulation {

enum Pipe { PIPE_OF_S, PIPE_OF_V, PIPE_OF_MTE2, PIPE_OF_MTE3, PIPES };
inline const char* name_of(int pipe) {
  static const char* const names[] = {"S", "V", "MTE2", "MTE3"};
  return names[pipe];
}

struct Clock {
  uint64_t at[PIPES] = {};
  void join(const Clock& other) {
    for (int i = 0; i < PIPES; ++i) at[i] = at[i] > other.at[i] ? at[i] : other.at[i];
  }
};

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fault(const std::string& what) { throw Fault("emulated AI core: " + what); }

class Core {
 public:
  static constexpr uint32_t BYTES = 192 * 1024, BLOCK = 32;
  static constexpr uint32_t RESERVED = 8 * 1024;  // Select's

  alignas(64) unsigned char memory[BYTES];

  void reset(int64_t block, int64_t blocks) {
    std::memset(memory, 0xa5, sizeof memory);
    states_.assign(BYTES / BLOCK, State());
    for (int i = 0; i < PIPES; ++i) {
      known_[i] = Clock();
      issued_[i] = 0;
    }
    flags_.clear();
    allocated = 0;
    block_index = block;
    block_count = blocks;
  }

  void begin(Pipe pipe, const char* instruction) {
    pipe_ = pipe;
    instruction_ = instruction;
    ++issued_[pipe];
  }

  void reads(uint32_t address, uint32_t bytes) {
    const uint64_t now = issued_[pipe_];
    const Clock known = known_now();
    for (State *state = first(address, bytes), *end = past(address, bytes); state < end; ++state) {
      if (state->writer < 0) fault(std::string(instruction_) + " reads local memory that was never written");
      if (state->written > known.at[state->writer]) missing(state->writer, "reads what", "wrote");
      state->read[pipe_] = now;
    }
  }

  void writes(uint32_t address, uint32_t bytes) {
    const uint64_t now = issued_[pipe_];
    const Clock known = known_now();
    for (State *state = first(address, bytes), *end = past(address, bytes); state < end; ++state) {
      if (state->writer >= 0 && state->written > known.at[state->writer])
        missing(state->writer, "writes what", "wrote");
      for (int reader = 0; reader < PIPES; ++reader)
        // An instruction may write what it reads itself.
        if (state->read[reader] > known.at[reader] && !(reader == pipe_ && state->read[reader] == now))
          missing(reader, "writes what", "reads");
      state->writer = static_cast<int8_t>(pipe_);
      state->written = now;
    }
  }

  // What is finished once everything that `pipe` has been given is.
  Clock finished(Pipe pipe) const {
    Clock clock = known_[pipe];
    clock.at[pipe] = issued_[pipe];
    return clock;
  }
  void wait(Pipe pipe, const Clock& clock) { known_[pipe].join(clock); }
  void barrier(Pipe pipe) { known_[pipe].at[pipe] = issued_[pipe]; }

  void set_flag(int event, int id, Pipe source) {
    for (const Flag& flag : flags_)
      if (flag.event == event && flag.id == id) fault("SetFlag of a flag that is set");
    flags_.push_back({event, id, finished(source)});
  }
  void wait_flag(int event, int id, Pipe target) {
    for (size_t i = 0; i < flags_.size(); ++i) {
      if (flags_[i].event != event || flags_[i].id != id) continue;
      wait(target, flags_[i].clock);
      flags_.erase(flags_.begin() + static_cast<long>(i));
      return;
    }
    fault("WaitFlag of a flag that nobody sets: the core would hang");
  }
  void check_end() const {
    if (!flags_.empty()) fault("the kernel ends with a flag that nobody waits for");
  }

  static void check_aligned(uint32_t address, const char* what) {
    if (address % BLOCK) fault(std::string(what) + ": a local address is no multiple of 32 bytes");
  }

  // One launch runs at a time.
  static Core& current();

  uint32_t allocated = 0;
  int64_t block_index = 0, block_count = 1;

 private:
  struct State {
    uint64_t written = 0, read[PIPES] = {};
    int8_t writer = -1;
  };
  struct Flag {
    int event, id;
    Clock clock;
  };

  State* first(uint32_t address, uint32_t bytes) {
    if (address + bytes > BYTES) fault(std::string(instruction_) + " leaves local memory");
    return states_.data() + address / BLOCK;
  }
  State* past(uint32_t address, uint32_t bytes) { return states_.data() + (address + bytes + BLOCK - 1) / BLOCK; }

  // The scalar pipeline orders its own instructions.
  Clock known_now() const {
    Clock clock = known_[pipe_];
    if (pipe_ == PIPE_OF_S) clock.at[PIPE_OF_S] = issued_[PIPE_OF_S];
    return clock;
  }

  [[noreturn]] void missing(int other, const char* does, const char* did) const {
    fault(std::string("missing wait: ") + instruction_ + " on " + name_of(pipe_) + " " + does +
          " an earlier instruction on " + name_of(other) + " " + did);
  }

  std::vector<State> states_;
  std::vector<Flag> flags_;
  Clock known_[PIPES];
  uint64_t issued_[PIPES] = {};
  Pipe pipe_ = PIPE_OF_S;
  const char* instruction_ = "";
};

inline Core core;
inline Core& Core::current() { return core; }

}  // namespace emulation
