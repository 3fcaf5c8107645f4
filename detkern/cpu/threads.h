// Work over threads that live for one call: nothing survives that a fork could break, and callers share no state.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

#include "environment.h"

namespace detkern {

// Keeps a new thread off the core that its creator is busy on, where the scheduler may otherwise queue it for a third
// of a short call. A hint: whatever fails leaves the thread where it is.
inline void leave_this_core(std::thread& thread) {
#ifdef __linux__
  cpu_set_t allowed;
  const int here = sched_getcpu();
  if (here < 0 || here >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  CPU_CLR(here, &allowed);
  if (CPU_COUNT(&allowed) > 0) pthread_setaffinity_np(thread.native_handle(), sizeof allowed, &allowed);
#else
  (void)thread;
#endif
}

// Calls body(worker, task) for every task in [0, tasks), each once, on at most `workers` threads, the caller's among
// them. Tasks are taken in order as threads become free. A machine that grants fewer threads is slower, not wrong.
// Throws std::bad_alloc or std::runtime_error after all threads have ended if any task threw.
template <class Body>
void for_each_task(int workers, int64_t tasks, const Body& body) {
  std::atomic<int64_t> next{0};
  std::atomic<int> failure{0};
  auto work = [&](int worker) noexcept {
    FloatEnvironment environment;
    try {
      for (int64_t task; failure.load(std::memory_order_relaxed) == 0 && (task = next.fetch_add(1)) < tasks;)
        body(worker, task);
    } catch (const std::bad_alloc&) {
      failure = 1;
    } catch (...) {
      failure = 2;
    }
  };
  std::vector<std::thread> threads;
  if (workers > 1) threads.reserve(size_t(workers) - 1);
  for (int worker = 1; worker < workers && worker < tasks; ++worker) {
    try {
      threads.emplace_back(work, worker);
      leave_this_core(threads.back());
    } catch (const std::system_error&) {
      break;
    }
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
  if (failure == 1) throw std::bad_alloc();
  if (failure == 2) throw std::runtime_error("a worker thread failed");
}

}  // namespace detkern
