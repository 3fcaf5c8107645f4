// The floating-point environment of a thread: round to nearest, subnormals kept, no traps; restored on the way out.
//
// A thread may arrive in another mode (libraries linked with -ffast-math set flush-to-zero for the whole process), and
// a thread that we start inherits its creator's.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace detkern {

class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_)::"memory");
    asm volatile("msr fpcr, %0" ::"r"(uint64_t(0)) : "memory");
  }
  ~FloatEnvironment() { asm volatile("msr fpcr, %0" ::"r"(saved_) : "memory"); }
#else
  FloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&saved_); }
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#elif defined(__aarch64__)
  uint64_t saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace detkern
