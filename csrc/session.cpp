#include "session.h"

#include <time.h>

#include <algorithm>
#include <cstdio>

#include "allocator_tape.h"
#include "book_tape.h"
#include "cache_state.h"
#include "free_memory.h"
#include "originals.h"
#include "threads.h"

namespace mlxmem {

Session& session = *new Session;

namespace {

// At a moment when nothing is under way.
void book_counters(Books& books) {
  if (originals.tape_mutex) {
    book_whole_tape(books);
    return;
  }
  CacheState cache = read_cache_state();
  book_before(books, cache);
  if (originals.notes_cache_returns &&
      cache.returned == cache_returned_bytes()) {
    books.observe_cache(cache.bytes);
  }
}

// Threads that entered the allocator before the session began finish unseen.
// With the books locked nobody else enters: wait until the counters stand
// still.
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

// What is there when a session begins, and drops what the cache returned
// before; what it returns later is not counted here.
Counters counters_at_start() {
  Counters counters;
  for (int i = 0; i < 10; ++i) {
    uint64_t returned = cache_returned_bytes();
    drop_cache_returns();
    counters = settled_counters();
    if (returned == cache_returned_bytes()) {
      break;
    }
  }
  return counters;
}

int64_t saturated(uint64_t limit) {
  return static_cast<int64_t>(std::min<uint64_t>(limit, INT64_MAX));
}

// Throws std::bad_alloc.
std::unique_ptr<NodesCopy> read_nodes() {
  auto copy = std::make_unique<NodesCopy>();
  auto& registry = nodes();
  if (!read_live_nodes(registry, session.number.load(), &copy->live) ||
      !registry.is_complete()) {
    return nullptr;
  }
  return copy;
}

// With the mutex held, as what follows.
Position session_position_locked() {
  if (is_recording()) {
    session.position = session.books.position();
  }
  return session.position;
}

std::unique_ptr<NodesCopy> kept_copy() {
  return session.kept_nodes ? std::make_unique<NodesCopy>(*session.kept_nodes)
                            : nullptr;
}

void copy_node_samples(NodesCopy* copy) {
  take_node_sample();
  auto& samples = session.node_samples;
  copy->samples.assign(samples.begin(), samples.end());
}

void keep_nodes() {
  std::unique_ptr<NodesCopy> copy;
  try {
    copy = copy_nodes();
  } catch (const std::bad_alloc&) {
    // Then nothing is known of them.
  }
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  session.kept_nodes = std::move(copy);
  session.nodes_can_be_read = false;
}

} // namespace

Session::Session() : nodes(&registries_[0]) {}

void start_session(uint64_t max_entries) {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  session.recording.store(false, std::memory_order_release);
  session.out_of_memory = false;
  session.position = Position();
  Limits limits;
  session.limits_at_start = {-1, mlx_counters.ask_memory_limit()};
  if (mlx_counters.peek_limits(&limits)) {
    session.limits_at_start = {
        saturated(limits.cache), saturated(limits.memory)};
  }
  session.books.start(max_entries, limits);
  session.number.store(session.books.session());
  auto& registry = session.registries_[session.books.session() % 2];
  registry.clear(session.books.session());
  session.nodes.store(&registry, std::memory_order_release);
  session.nodes_can_be_read = true;
  session.kept_nodes.reset();
  session.node_samples.clear();
  session.failures.clear();
  session.times = AllocatorTimes();
  if (originals.tape_mutex) {
    book(start_tape);
  } else {
    session.recording.store(true, std::memory_order_release);
    session.books.start_from(counters_at_start()); // now that others must wait
    session.cache_at_start = read_cache_contents(mlx_counters, false);
  }
  take_node_sample();
}

void stop_session() {
  {
    std::lock_guard<AdaptiveMutex> lock(session.mutex);
    if (is_recording()) {
      book(book_counters);
      take_node_sample();
      session_position_locked();
      session.recording.store(false, std::memory_order_release);
    }
  }
  keep_nodes();
}

void take_node_sample() {
  if (!is_recording()) {
    return;
  }
  Position position = originals.tape_mutex
      ? session.books.rough_position(
            allocator_tape.backlog(allocator_tape.end()))
      : session_position_locked();
  NodeCounts counts = nodes().counts();
  session.node_samples.add(
      {position.events, position.us, counts.live, counts.pending});
}

std::unique_ptr<NodesCopy> copy_nodes() {
  {
    std::lock_guard<AdaptiveMutex> lock(session.mutex);
    if (session.kept_nodes || !session.nodes_can_be_read) {
      return kept_copy();
    }
  }
  auto copy = read_nodes(); // a long list; the program allocates meanwhile
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  // When the session ended meanwhile, some nodes may have gone unseen.
  if (session.kept_nodes || !session.nodes_can_be_read) {
    return kept_copy();
  }
  if (copy) {
    copy_node_samples(copy.get());
  }
  return copy;
}

Position session_position() {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  if (is_recording()) {
    book(originals.tape_mutex ? book_whole_tape : book_limits);
  }
  take_node_sample(); // a mark shows the nodes of its moment
  return session_position_locked();
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
  } else if (session.out_of_memory && allocator_tape.is_incomplete()) {
    book(book_tape); // what was noted until the tape had no memory
  }
  copy.totals = books.totals();
  if (with_events) {
    copy.events = books.events();
    copy.older_buffers = books.older_buffers();
  }
  return copy;
}

bool note_failure(
    uint64_t size,
    const char* message,
    const Origin& origin,
    FailedAllocation* out) {
  *out = {};
  out->size = size;
  out->free =
      originals.uses_host_memory ? free_host_memory() : free_cuda_memory();
  out->stream = origin.stream;
  out->primitive = origin.primitive;
  out->thread_id = current_thread_id();
  std::snprintf(out->message, sizeof(out->message), "%s", message);
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  if (!is_recording()) {
    return false;
  }
  if (originals.tape_mutex) {
    book(book_tape);
  }
  Position position = session_position_locked();
  out->event = position.events;
  out->timestamp_us = position.us;
  auto totals = session.books.totals();
  out->active = totals.now.active;
  out->cache = totals.now.cache;
  out->traceback =
      origin.session == session.books.session() ? origin.traceback : 0;
  session.failures.add(*out);
  return true;
}

std::vector<FailedAllocation> copy_failures() {
  std::vector<FailedAllocation> copy;
  copy.reserve(FailedAllocations::kMost);
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  for (size_t i = 0; i < session.failures.size(); ++i) {
    copy.push_back(session.failures[i]);
  }
  return copy;
}

std::vector<LimitChange> copy_limit_changes() {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  if (is_recording() && originals.tape_mutex) {
    book(book_tape);
  }
  return session.books.limit_changes().copy();
}

LimitsAtStart limits_at_start() {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  return session.limits_at_start;
}

CacheContents cache_at_start() {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  if (is_recording()) {
    book(book_counters);
  }
  auto totals = session.books.totals();
  auto& found = session.cache_at_start;
  if (session.books.session() == 0) {
    return {};
  }
  if (totals.at_start.cache == 0 && found.bytes == 0) {
    return {true, 0, {}};
  }
  return found.is_known && found.bytes == totals.at_start.cache
      ? found
      : CacheContents();
}

AllocatorTimes allocator_times() {
  std::lock_guard<AdaptiveMutex> lock(session.mutex);
  return session.times;
}

void lock_books() {
  session.mutex.lock();
  // Who writes the tape holds the allocator's mutex, not the books.
  if (originals.tape_mutex) {
    pthread_mutex_lock(originals.tape_mutex);
  }
}

void unlock_books() {
  if (originals.tape_mutex) {
    pthread_mutex_unlock(originals.tape_mutex);
  }
  session.mutex.unlock();
}

void forget_session() {
  allocator_tape.forget();
  session.recording.store(false, std::memory_order_release);
  session.nodes_can_be_read = false;
  session.kept_nodes.reset();
  nodes().close();
  node_threads::forget_others();
}

} // namespace mlxmem
