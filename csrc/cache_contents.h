// What lies in the cache of MLX's allocator, read while other threads may empty
// it.

#pragma once

#include <cstdint>
#include <vector>

#include "mlx_counters.h"

namespace mlxmem {

// The record that Python reads as RAW_CACHED.
struct CachedBuffer {
  uint64_t address;
  uint64_t size; // bytes
};
static_assert(sizeof(CachedBuffer) == 16, "events.py reads 16-byte records");

struct CacheContents {
  bool is_known = false;
  uint64_t bytes = 0; // of all
  std::vector<CachedBuffer> buffers; // oldest first
};

// Takes no lock, and can't fault. Known only where every link and sum agrees
// with the cache's own count and bytes, and these stood still meanwhile. A list
// of more than 200,000 buffers is not read. is_held: this thread has the
// allocator's mutex.
CacheContents read_cache_contents(
    const MlxCounters& counters,
    bool is_held) noexcept;

} // namespace mlxmem
