// The recording session: whether one runs, its books, and its beginning and
// end. The probes read it on every call.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "adaptive_mutex.h"
#include "allocator_times.h"
#include "books.h"
#include "cache_contents.h"
#include "live_nodes.h"
#include "node_registry.h"
#include "node_samples.h"
#include "out_of_memory.h"

namespace mlxmem {

// What is known of array nodes.
struct NodesCopy {
  std::vector<LiveNode> live;
  std::vector<NodeSample> samples;
};

// Bytes, -1: not known.
struct LimitsAtStart {
  int64_t cache = -1;
  int64_t memory = -1;
};

struct Session {
  // On a line of their own, since every probe reads them.
  alignas(64) std::atomic<bool> recording{false};
  std::atomic<uint32_t> number{0};
  std::atomic<bool> out_of_memory{false};
  std::atomic<NodeRegistry*> nodes;
  // Held around the booking, and but for the tape around the allocator's call.
  alignas(64) AdaptiveMutex mutex;
  Books books; // under the mutex, as is the rest
  Position position; // when it was last asked for, or at the end
  NodeSamples node_samples;
  FailedAllocations failures;
  AllocatorTimes times;
  LimitsAtStart limits_at_start;
  CacheContents cache_at_start; // as it was found

  // Nodes of the session. They are seen to go until the words are restored, so
  // they are read before that, and kept.
  bool nodes_can_be_read = false;
  std::unique_ptr<NodesCopy> kept_nodes;

  Session();

 private:
  friend void start_session(uint64_t max_entries);
  // Sessions take turns: a thread that is late disturbs the last one's.
  NodeRegistry registries_[2];
};

// Never destroyed: worker threads free buffers after static destructors ran.
extern Session& session;

inline NodeRegistry& nodes() {
  return *session.nodes.load(std::memory_order_acquire);
}

inline bool is_recording() {
  return session.recording.load(std::memory_order_acquire);
}

// There is no memory for the log: the session ends, and says so.
inline void end_without_memory() {
  session.out_of_memory = true;
  session.recording.store(false, std::memory_order_release);
}

// Runs work(books) with the mutex held.
template <typename Work>
void book(Work&& work) {
  try {
    work(session.books);
  } catch (const std::bad_alloc&) {
    end_without_memory();
  }
}

void start_session(uint64_t max_entries);
void stop_session();
// Whether memory for the log ran out, which ends a session.
bool ran_out_of_memory();

struct SessionCopy {
  Totals totals;
  std::vector<Event> events;
  std::vector<Event> older_buffers;
};
// What was recorded so far; with_events false: the totals only.
SessionCopy copy_session(bool with_events);

// Where the session stands; a session that ended stands still.
Position session_position();

// What is known of the nodes now, or was at the session's end; nullptr when
// that is nothing. Throws std::bad_alloc.
std::unique_ptr<NodesCopy> copy_nodes();
// With the mutex held.
void take_node_sample();

// An allocation failed; the origin is whose it was. False when no session
// records. What was noted goes to *out.
bool note_failure(
    uint64_t size,
    const char* message,
    const Origin& origin,
    FailedAllocation* out);
// Throws std::bad_alloc.
std::vector<FailedAllocation> copy_failures();

// Throws std::bad_alloc.
std::vector<LimitChange> copy_limit_changes();
LimitsAtStart limits_at_start();
// Known where it adds up to the cached bytes at the start. Throws
// std::bad_alloc.
CacheContents cache_at_start();

AllocatorTimes allocator_times();

// Around fork(): no other thread holds the books in the child, and the child
// has no session.
void lock_books();
void unlock_books();
void forget_session();

} // namespace mlxmem
