#include "clock.h"

#if MLXMEM_CYCLE_COUNTER

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace mlxmem {

namespace {

constexpr uint64_t kSecond = 1000000000;
// Over a tenth of a second the error of reading two clocks, some 0.1 us, is a
// millionth; the rate is trusted for as long as it was measured, so the error
// stays at that.
constexpr uint64_t kShortest = kSecond / 10;
// More than this off: the machine slept, or moved to another processor.
constexpr uint64_t kTooFarOff = kSecond / 1000;
// Between the two readings of the counter around one of the clock; above it
// the thread was interrupted.
constexpr uint64_t kLongestReading = 5000;

// Linux trusts the counter only where it runs evenly and equally on all cores.
bool linux_keeps_time_by_it() {
  char name[16] = "";
  FILE* file = std::fopen(
      "/sys/devices/system/clocksource/clocksource0/current_clocksource", "re");
  if (file) {
    if (!std::fgets(name, sizeof(name), file)) {
      name[0] = 0;
    }
    std::fclose(file);
  }
  return std::strcmp(name, "tsc\n") == 0;
}

} // namespace

bool EventClock::read_moment(Moment* out) {
  for (int i = 0; i < 3; ++i) {
    uint64_t before = __rdtsc();
    out->ns = monotonic_ns();
    uint64_t after = __rdtsc();
    out->cycles = before + (after - before) / 2;
    if (after - before < kLongestReading) {
      return true;
    }
  }
  return false;
}

void EventClock::start() {
  trusts_counter_ = linux_keeps_time_by_it();
}

uint64_t EventClock::compare() {
  Moment now;
  if (!trusts_counter_ || !read_moment(&now)) {
    return monotonic_ns();
  }
  if (trusted_cycles_) {
    double passed = static_cast<double>(now.cycles - compared_cycles_) *
        ns_per_cycle_ / (1 << kFraction);
    double off = passed - static_cast<double>(now.ns - compared_ns_);
    if (std::abs(off) > kTooFarOff + passed / 10000) {
      first_ = Moment();
      trusted_cycles_ = 0;
    }
  }
  if (!first_.ns || now.cycles <= first_.cycles) {
    first_ = now;
    return now.ns;
  }
  uint64_t ns = now.ns - first_.ns;
  if (ns < kShortest) {
    return now.ns;
  }
  double rate = static_cast<double>(ns) / (now.cycles - first_.cycles);
  ns_per_cycle_ = static_cast<uint64_t>(rate * (1 << kFraction));
  compared_cycles_ = now.cycles;
  compared_ns_ = now.ns;
  trusted_cycles_ = static_cast<uint64_t>(std::min(ns, kSecond) / rate);
  return now.ns;
}

} // namespace mlxmem

#else

namespace mlxmem {

void EventClock::start() {}

} // namespace mlxmem

#endif
