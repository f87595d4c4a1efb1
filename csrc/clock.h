#pragma once

#include <time.h>

#include <cstdint>

namespace mlxmem {

inline uint64_t clock_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// The clock of the events' timestamps.
inline uint64_t monotonic_ns() {
  return clock_ns(CLOCK_MONOTONIC);
}

} // namespace mlxmem
