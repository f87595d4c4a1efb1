// Buffers that MLX's cache gave back to the operating system. MLX frees them
// while it holds its own mutex, on whatever thread cleared or trimmed the
// cache, where the books can't be locked: they are noted here and booked by
// the next thread that holds the books.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace mlxmem {

struct CacheReturn {
  uint64_t address;
  uint64_t size; // bytes
  uint64_t time_ns; // CLOCK_MONOTONIC
  uint32_t thread_id;
};

// Never throws; a note for which there is no memory is counted as lost.
void note_cache_return(uint64_t address, uint64_t size) noexcept;

namespace cache_returns {
extern std::atomic<uint64_t> bytes; // since the process began
extern std::atomic<bool> any; // that were not taken yet
} // namespace cache_returns

// Bytes noted since the process began.
inline uint64_t cache_returned_bytes() {
  return cache_returns::bytes.load(std::memory_order_acquire);
}

inline bool has_cache_returns() {
  return cache_returns::any.load(std::memory_order_acquire);
}

// Moves the notes taken so far into `out`, which is overwritten, oldest first.
// False when a note was lost since the last call.
bool take_cache_returns(std::vector<CacheReturn>* out);
void drop_cache_returns();

// Around fork(): the child must find the lock free.
void lock_cache_returns();
void unlock_cache_returns();

} // namespace mlxmem
