// One block of GPU threads on one host thread: a fiber for each, switched at barriers.
//
// Between two barriers the threads run one after the other, in ascending order in one phase and in descending order in
// the next, so that what is read without a barrier after it was written is, for some threads, still what was there
// before. A fiber is started by ucontext and switched by _setjmp and _longjmp, which take nanoseconds; it outlives the
// block and serves the next one.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <ucontext.h>

namespace emulation {

class Fibers {
 public:
  using Body = void (*)(void* argument, int index);

  // Runs body(argument, 0) to body(argument, count - 1) as the threads of one block.
  void run(int count, Body body, void* argument) {
    body_ = body;
    argument_ = argument;
    while (static_cast<int>(fibers_.size()) < count) fibers_.push_back(std::make_unique<Fiber>());
    for (int i = 0; i < count; ++i) fibers_[i]->done = false;
    for (int left = count; left > 0; descending_ = !descending_)
      for (int i = 0; i < count; ++i) {
        index_ = descending_ ? count - 1 - i : i;
        if (fibers_[index_]->done) continue;
        resume(*fibers_[index_]);
        left -= fibers_[index_]->done;
      }
  }

  // Called by a fiber: comes back once every other one is here too, or has ended.
  void barrier() {
    if (!_setjmp(fibers_[index_]->place)) _longjmp(scheduler_, 1);
  }

  int index() const { return index_; }

  static Fibers& of_this_thread() {
    static thread_local Fibers fibers;
    return fibers;
  }

 private:
  static constexpr std::size_t STACK = 1 << 16;

  struct Fiber {
    ucontext_t start;
    jmp_buf place;
    std::unique_ptr<char[]> stack;  // none: not started yet
    bool done = true;
  };

  __attribute__((noinline)) void resume(Fiber& fiber) {
    if (_setjmp(scheduler_)) return;
    if (fiber.stack) _longjmp(fiber.place, 1);
    fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, &Fibers::live, 0);
    setcontext(&fiber.start);
    std::abort();
  }

  static void live() {
    Fibers& fibers = of_this_thread();
    const int mine = fibers.index_;
    for (;;) {
      fibers.body_(fibers.argument_, mine);
      fibers.fibers_[mine]->done = true;
      fibers.barrier();
    }
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  jmp_buf scheduler_;
  Body body_ = nullptr;
  void* argument_ = nullptr;
  int index_ = 0;
  bool descending_ = false;
};

}  // namespace emulation
