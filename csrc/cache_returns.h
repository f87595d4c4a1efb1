// Buffers that MLX's cache gave back to the operating system. MLX frees them
// while it holds its own mutex, on whatever thread cleared or trimmed the
// cache, where the books can't be locked: they are noted here and booked by
// the next thread that holds the books.

#pragma once

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

// Bytes noted since the process began.
uint64_t cache_returned_bytes();

// Moves the notes taken so far into `out`, which is overwritten, oldest first.
// False when a note was lost since the last call.
bool take_cache_returns(std::vector<CacheReturn>* out);

// Around fork(): the child must find the lock free.
void lock_cache_returns();
void unlock_cache_returns();

} // namespace mlxmem
