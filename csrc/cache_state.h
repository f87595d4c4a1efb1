// MLX's cache as one allocator call finds and leaves it, with the books locked.

#pragma once

#include <cstdint>

#include "books.h"
#include "cache_returns.h"
#include "originals.h"

namespace mlxmem {

// The cached bytes, and how many the cache had returned by then.
struct CacheState {
  uint64_t bytes;
  uint64_t returned;
};

inline CacheState read_cache_state() {
  CacheState state;
  do {
    state.returned = cache_returned_bytes();
    state.bytes = mlx_counters.cache();
  } while (state.returned != cache_returned_bytes());
  return state;
}

// Bytes that left the cache between two readings other than to the OS.
inline uint64_t taken_between(
    const CacheState& before,
    const CacheState& after) {
  int64_t taken =
      before.bytes - after.bytes - (after.returned - before.returned);
  return taken > 0 ? taken : 0;
}

inline bool went_to_cache(
    const CacheState& before,
    const CacheState& after,
    uint64_t size) {
  return size &&
      after.bytes + (after.returned - before.returned) == before.bytes + size;
}

// Notes limits that changed since the last look. Throws std::bad_alloc.
inline void book_limits(Books& books) {
  Limits limits;
  if (mlx_counters.peek_limits(&limits)) {
    books.observe_limits(limits);
  }
}

// Books the buffers that the cache gave back since the last time, after the
// limit that made it do so. Throws std::bad_alloc.
void book_cache_returns(Books& books);

// Books what left the cache: what was noted there where it can be noted, else
// what the counter tells. Throws std::bad_alloc.
inline void book_cache(Books& books, const CacheState& state) {
  if (!originals.notes_cache_returns) {
    book_limits(books);
    books.observe_cache(state.bytes);
  } else if (has_cache_returns()) {
    book_cache_returns(books);
  }
}

// Inlined by force: it runs at every allocation and free.
[[gnu::always_inline]] inline void book_before(
    Books& books,
    const CacheState& state) {
  books.observe_active(mlx_counters.active());
  book_cache(books, state); // which looks at the limits if anything left it
  book_limits(books);
}

} // namespace mlxmem
