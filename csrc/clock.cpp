#include "clock.h"

#if MLXMEM_CYCLE_COUNTER

#include <cmath>
#include <cstdio>
#include <cstring>

namespace mlxmem {

namespace {

// The rate is measured over such a time and trusted for as long: the error of
// reading two clocks, some 0.1 us, stays at that. In ns.
constexpr uint64_t kInterval = 100000000;
// Rates that differ by more, as a share: the machine slept, or moved to another
// processor.
constexpr double kUneven = 0.002;
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
  if (!trusts_counter_) {
    compared_ = Moment();
    trusted_cycles_ = ns_per_cycle_ = 0;
  }
}

uint64_t EventClock::compare() {
  Moment now;
  if (!trusts_counter_ || !read_moment(&now)) {
    return monotonic_ns();
  }
  if (!compared_.ns || now.cycles <= compared_.cycles) {
    compared_ = now;
    trusted_cycles_ = ns_per_cycle_ = 0;
    return now.ns;
  }
  uint64_t ns = now.ns - compared_.ns;
  if (ns < kInterval) {
    return now.ns;
  }
  double before = static_cast<double>(ns_per_cycle_) / (1 << kFraction);
  double rate = static_cast<double>(ns) / (now.cycles - compared_.cycles);
  compared_ = now;
  ns_per_cycle_ = static_cast<uint64_t>(rate * (1 << kFraction));
  trusted_cycles_ = before && std::abs(rate / before - 1) > kUneven
      ? 0
      : static_cast<uint64_t>(kInterval / rate);
  return now.ns;
}

void TapeClock::start() {
  counts_cycles = linux_keeps_time_by_it() && EventClock::read_moment(&now_);
  first_ = now_;
  ns_per_cycle_ = 0;
}

void TapeClock::look() {
  EventClock::Moment moment;
  if (!counts_cycles || !EventClock::read_moment(&moment) ||
      moment.cycles <= now_.cycles) {
    return;
  }
  auto rate_since = [&](const EventClock::Moment& earlier) {
    return static_cast<double>(moment.ns - earlier.ns) /
        static_cast<double>(moment.cycles - earlier.cycles);
  };
  double before = ns_per_cycle_;
  ns_per_cycle_ = rate_since(first_);
  if (before && std::abs(ns_per_cycle_ / before - 1) > kUneven &&
      now_.ns - first_.ns > kInterval) {
    first_ = now_;
    ns_per_cycle_ = rate_since(first_);
  }
  now_ = moment;
}

uint64_t TapeClock::ns_of(uint64_t ticks) const {
  if (!counts_cycles) {
    return ticks;
  }
  auto since = static_cast<int64_t>(ticks - now_.cycles);
  return now_.ns + static_cast<int64_t>(since * ns_per_cycle_);
}

} // namespace mlxmem

#else

namespace mlxmem {

void EventClock::start() {}
void TapeClock::start() {}
void TapeClock::look() {}

uint64_t TapeClock::ns_of(uint64_t ticks) const {
  return ticks;
}

} // namespace mlxmem

#endif
