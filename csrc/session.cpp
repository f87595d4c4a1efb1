#include "session.h"

#include <time.h>

#include "cache_state.h"
#include "originals.h"

namespace mlxmem {

Session& session = *new Session;

namespace {

// At a moment when nothing is under way.
void book_counters(Books& books) {
  CacheState cache = read_cache_state();
  book_before(books, cache);
  if (originals.notes_cache_returns &&
      cache.returned == cache_returned_bytes()) {
    books.observe_cache(cache.bytes);
  }
}

// Threads that entered the allocator before its vtable was swapped finish
// unseen. With the books locked nobody else enters: wait until the counters
// stand still.
Counters settled_counters() {
  Counters counters = mlx_counters.read();
  for (int i = 0; i < 50; ++i) {
    timespec pause = {0, 20000};
    nanosleep(&pause, nullptr);
    Counters again = mlx_counters.read();
    if (again.active == counters.active && again.cache == counters.cache) {
      return again;
    }
    counters = again;
  }
  return counters;
}

} // namespace

void start_session(uint64_t max_entries) {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  session.recording.store(false, std::memory_order_release);
  session.out_of_memory = false;
  session.position = Position();
  Counters counters = settled_counters();
  drop_cache_returns(); // of before
  session.books.start(max_entries, counters);
  session.number.store(session.books.session());
  session.recording.store(true, std::memory_order_release);
}

void stop_session() {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  if (is_recording()) {
    book(book_counters);
    session.position = session.books.position();
    session.recording.store(false, std::memory_order_release);
  }
}

Position session_position() {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  if (is_recording()) {
    session.position = session.books.position();
  }
  return session.position;
}

bool ran_out_of_memory() {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  return session.out_of_memory;
}

SessionCopy copy_session(bool with_events) {
  SessionCopy copy;
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  auto& books = session.books;
  if (is_recording()) {
    book(book_counters);
  }
  copy.totals = books.totals();
  if (with_events) {
    copy.events = books.events();
    copy.older_buffers = books.older_buffers();
  }
  return copy;
}

void lock_books() {
  session.mutex.lock();
}

void unlock_books() {
  session.mutex.unlock();
}

void forget_session() {
  session.recording.store(false, std::memory_order_release);
}

} // namespace mlxmem
