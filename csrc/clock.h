// Clocks, in nanoseconds.

#pragma once

#include <time.h>

#include <atomic>
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

// The time of the events' timestamps; it stands still while the machine sleeps.
inline uint64_t monotonic_ns() {
#if defined(__APPLE__)
  // CLOCK_MONOTONIC goes on in sleep there, and counts whole microseconds.
  return clock_gettime_nsec_np(CLOCK_UPTIME_RAW);
#else
  return clock_ns(CLOCK_MONOTONIC);
#endif
}

// The same time, read by the processor's cycle counter where Linux itself keeps
// its time by that counter: a third of clock_gettime()'s cost. The two are
// compared again after a tenth of a second. Not synchronised.
class EventClock {
 public:
  // Before now_ns(), when a session begins: asks Linux whether the counter can
  // be trusted.
  void start();

  // May lie a microsecond off, also backwards from one call to the next; while
  // the system's time is being corrected some tens, which is 500 millionths of
  // a tenth of a second.
  uint64_t now_ns() {
#if MLXMEM_CYCLE_COUNTER
    uint64_t passed = __rdtsc() - compared_.cycles;
    if (passed < trusted_cycles_) {
      return compared_.ns + (passed * ns_per_cycle_ >> kFraction);
    }
    return compare();
#else
    return monotonic_ns();
#endif
  }

#if MLXMEM_CYCLE_COUNTER
  struct Moment {
    uint64_t ns;
    uint64_t cycles;
  };
  static bool read_moment(Moment* out);

 private:
  static constexpr int kFraction = 26; // bits of ns_per_cycle_

  uint64_t compare();

  bool trusts_counter_ = false;
  Moment compared_ = {0, 0}; // when both were read
  uint64_t trusted_cycles_ = 0; // from then on; 0: the rate is not known
  uint64_t ns_per_cycle_ = 0; // fixed point
#endif
};

// The time of events that are read later than they happen: a thread takes
// ticks, and the reader turns them into time.
class TapeClock {
 public:
  // Any thread's, also while the others are called.
  static uint64_t ticks() {
#if MLXMEM_CYCLE_COUNTER
    return counts_cycles ? __rdtsc() : monotonic_ns();
#else
    return monotonic_ns();
#endif
  }

  // Not synchronised: a session begins; and what happened until now is read.
  void start();
  void look();
  // monotonic_ns() of ticks of before the last look: exact near it, and else
  // by the rate since the session began.
  uint64_t ns_of(uint64_t ticks) const;

#if MLXMEM_CYCLE_COUNTER
 private:
  static inline std::atomic<bool> counts_cycles{false};
  EventClock::Moment first_ = {0, 0};
  EventClock::Moment now_ = {0, 0};
  double ns_per_cycle_ = 0;
#endif
};

} // namespace mlxmem
