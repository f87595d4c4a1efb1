// What the allocator's malloc takes by itself, measured on some of its calls.
// Not synchronised.

#pragma once

#include <cstdint>

#include "threads.h"

namespace mlxmem {

// Which of a thread's calls are measured: one of 16 on average, since reading
// the clock twice takes as long as a buffer from the cache. The distance to the
// next is random, 1 to 31: programs repeat themselves.
class CallSampler {
 public:
  bool is_due() {
    if (left_) {
      --left_;
      return false;
    }
    return draw();
  }

 private:
  static constexpr uint32_t kLongest = 31;

  [[gnu::noinline]] bool draw() {
    bool is_first = state_ == 0;
    if (is_first) {
      state_ = current_thread_id() * 2654435761u; // not 0
    }
    state_ ^= state_ << 13; // xorshift32
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    left_ = static_cast<uint32_t>(uint64_t{state_} * kLongest >> 32);
    return !is_first;
  }

  uint32_t state_ = 0; // 0: not seeded
  uint32_t left_ = 0; // calls before the next that is measured
};

struct AllocatorTimes {
  struct Calls {
    uint64_t count = 0;
    uint64_t ns = 0; // together
  };
  Calls got_new; // memory of the operating system
  Calls reused; // a buffer of the cache

  void add(bool is_reuse, uint64_t ns) {
    auto& calls = is_reuse ? reused : got_new;
    ++calls.count;
    calls.ns += ns;
  }
};

} // namespace mlxmem
