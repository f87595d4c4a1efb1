// Clocks, in nanoseconds.

#pragma once

#include <time.h>

#include <cstdint>

#if defined(__linux__) && defined(__x86_64__)
#include <x86intrin.h>
#define MLXMEM_CYCLE_COUNTER 1
#else
#define MLXMEM_CYCLE_COUNTER 0
#endif

namespace mlxmem {

inline uint64_t clock_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// The time of the events' timestamps.
inline uint64_t monotonic_ns() {
  return clock_ns(CLOCK_MONOTONIC);
}

// The same time, read by the processor's cycle counter where Linux itself keeps
// its time by that counter: a third of clock_gettime()'s cost. The two are
// compared again after each second at the latest. Not synchronised.
class EventClock {
 public:
  // Once, before now_ns(): asks Linux whether the counter can be trusted.
  void start();

  // May lie a microsecond off, also backwards from one call to the next.
  uint64_t now_ns() {
#if MLXMEM_CYCLE_COUNTER
    uint64_t passed = __rdtsc() - compared_cycles_;
    if (passed < trusted_cycles_) {
      return compared_ns_ + (passed * ns_per_cycle_ >> kFraction);
    }
    return compare();
#else
    return monotonic_ns();
#endif
  }

#if MLXMEM_CYCLE_COUNTER
 private:
  static constexpr int kFraction = 26; // bits of ns_per_cycle_

  struct Moment {
    uint64_t ns;
    uint64_t cycles;
  };
  static bool read_moment(Moment* out);
  uint64_t compare();

  bool trusts_counter_ = false;
  uint64_t compared_cycles_ = 0;
  uint64_t compared_ns_ = 0;
  uint64_t trusted_cycles_ = 0; // from compared_cycles_; 0: rate not known
  uint64_t ns_per_cycle_ = 0; // fixed point
  Moment first_ = {0, 0}; // from here on the counter's rate is measured
#endif
};

} // namespace mlxmem
