#include "book_tape.h"

#include <time.h>

#include <mutex>
#include <new>

#include "allocator_tape.h"
#include "originals.h"
#include "probes.h"
#include "session.h"

namespace mlxmem {

namespace {

// Holds MLX's allocator still. Who has it never waits for the books.
class AllocatorHold {
 public:
  AllocatorHold() {
    pthread_mutex_lock(originals.tape_mutex);
  }
  ~AllocatorHold() {
    pthread_mutex_unlock(originals.tape_mutex);
  }
  AllocatorHold(const AllocatorHold&) = delete;
  AllocatorHold& operator=(const AllocatorHold&) = delete;
};

// Under the books' lock.
TapeClock& tape_clock() {
  static TapeClock* clock = new TapeClock;
  return *clock;
}

void book_entry(Books& books, const TapeEntry& entry) {
  Moment moment = {
      tape_clock().ns_of(entry.ticks), entry.thread_id, entry.after_look};
  Limits limits = books.limits();
  switch (entry.did) {
    case Did::AllocNew:
    case Did::AllocReuse: {
      uint64_t taken = entry.did == Did::AllocReuse ? entry.size : 0;
      if (!entry.address) {
        books.allocated_somewhere(entry.size, taken, entry.origin, moment);
        break;
      }
      books.allocated(
          entry.address,
          entry.size,
          entry.requested_size,
          taken,
          entry.origin,
          moment);
      break;
    }
    case Did::FreeToCache:
    case Did::FreeToOS:
      books.freed(
          entry.address,
          books.find(entry.address),
          entry.size,
          entry.did == Did::FreeToCache,
          moment);
      break;
    case Did::CacheReturn:
      books.left_cache({entry.address, entry.size, moment.ns, entry.thread_id});
      break;
    case Did::SetCacheLimit:
      limits.cache = entry.size;
      books.set_limits(limits, moment);
      break;
    case Did::SetMemoryLimit:
      limits.memory = entry.size;
      books.set_limits(limits, moment);
      break;
    case Did::Nothing:
      break;
  }
}

void book_until(Books& books, uint64_t end, bool skips) {
  tape_clock().look();
  allocator_tape.read(
      end, skips, [&](const TapeEntry& entry) { book_entry(books, entry); });
  if (allocator_tape.is_incomplete()) {
    throw std::bad_alloc();
  }
}

} // namespace

void start_tape(Books& books) {
  AllocatorHold hold;
  AllocatorWords words = mlx_counters.read_words();
  books.start_from(mlx_counters.counters_of(words));
  books.start_was_exact();
  allocator_tape.start(words);
  tape_clock().start();
  session.cache_at_start = read_cache_contents(mlx_counters, true);
  if (session.cache_at_start.is_known) {
    books.know_cache(session.cache_at_start.buffers);
  }
  session.recording.store(true, std::memory_order_release);
}

void book_tape(Books& books) {
  book_until(books, allocator_tape.end(), false);
}

void book_whole_tape(Books& books) {
  fill_own_allocation();
  uint64_t end;
  Counters counters;
  {
    AllocatorHold hold;
    end = allocator_tape.end();
    counters = mlx_counters.counters_of(mlx_counters.read_words());
  }
  // A thread that has no processor may take its time; one that an exception
  // took away from its allocation never comes.
  constexpr int kTries = 2000;
  for (int i = 0; allocator_tape.position() < end; ++i) {
    book_until(books, end, i == kTries);
    if (allocator_tape.position() < end) {
      timespec pause = {0, 1000000};
      nanosleep(&pause, nullptr);
    }
  }
  books.observe_active(counters.active);
  books.observe_cache(counters.cache);
}

} // namespace mlxmem
