// What the allocator's malloc takes by itself, measured on some of its calls.
// Not synchronised.

#pragma once

#include <cstdint>

namespace mlxmem {

struct AllocatorTimes {
  // A thread measures one of so many: reading the clock twice takes as long as
  // a buffer from the cache.
  static constexpr uint32_t kInterval = 16;

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
