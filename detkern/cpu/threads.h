// Work over threads that live for one call: nothing survives that a fork could break, and callers share no state.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <new>
#include <stdexcept>
#include <system_error>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#else
#include <thread>
#endif

#include "environment.h"

namespace detkern {

// A thread that runs work(worker), which throws nothing. It starts off the core that its creator is busy on, where the
// scheduler may otherwise queue it for a third of a short call. A hint: where that fails it starts anywhere.
template <class Work>
class Thread {
 public:
  // Throws std::system_error where the machine grants no thread. `work` and this object must outlive `join`.
  Thread(const Work& work, int worker) : work_(&work), worker_(worker) {
#ifdef __linux__
    // By an attribute: pthread_setaffinity_np of a thread that has ended already sets the affinity of its caller.
    cpu_set_t allowed;
    pthread_attr_t attributes;
    const int here = sched_getcpu();
    bool placed = here >= 0 && here < CPU_SETSIZE && sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    if (placed) CPU_CLR(here, &allowed);
    placed = placed && CPU_COUNT(&allowed) > 0 && pthread_attr_init(&attributes) == 0;
    if (placed) {
      const bool started = pthread_attr_setaffinity_np(&attributes, sizeof allowed, &allowed) == 0 &&
                           pthread_create(&thread_, &attributes, run, this) == 0;
      pthread_attr_destroy(&attributes);
      if (started) return;
    }
    if (const int status = pthread_create(&thread_, nullptr, run, this)) {
      throw std::system_error(status, std::generic_category());
    }
#else
    thread_ = std::thread([this] { run(this); });
#endif
  }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  void join() {
#ifdef __linux__
    pthread_join(thread_, nullptr);
#else
    thread_.join();
#endif
  }

 private:
  static void* run(void* self) {
    (*static_cast<Thread*>(self)->work_)(static_cast<Thread*>(self)->worker_);
    return nullptr;
  }

  const Work* work_;
  int worker_;
#ifdef __linux__
  pthread_t thread_;
#else
  std::thread thread_;
#endif
};

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
  std::deque<Thread<decltype(work)>> threads;  // which stay where they are
  for (int worker = 1; worker < workers && worker < tasks; ++worker) {
    try {
      threads.emplace_back(work, worker);
    } catch (const std::system_error&) {
      break;
    }
  }
  work(0);
  for (auto& thread : threads) thread.join();
  if (failure == 1) throw std::bad_alloc();
  if (failure == 2) throw std::runtime_error("a worker thread failed");
}

}  // namespace detkern
