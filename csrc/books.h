// Keeps account of MLX's buffers: turns what the allocator did into events and
// holds the totals that must equal MLX's own counters at every quiet moment.
// Not synchronised: the probes hold one lock around the allocator's call and
// the booking of it, so that the log has the order of the allocator; on CUDA
// they book the tape, which has that order.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "buffer_table.h"
#include "cache_contents.h"
#include "cache_returns.h"
#include "clock.h"
#include "event.h"
#include "event_log.h"
#include "limit_changes.h"
#include "mlx_counters.h"
#include "threads.h"

namespace mlxmem {

// To whom an allocation belongs.
struct Origin {
  TracebackId traceback = 0;
  uint32_t session = 0; // in which traceback was captured
  int32_t stream = -1;
  PrimitiveId primitive = 0;
};

struct Totals {
  Counters now; // peak: the highest active since the session began
  Counters at_start;
  int64_t start_us = 0; // Unix epoch, microseconds
  uint64_t events = 0; // of the session, dropped ones included
  uint64_t dropped = 0;
  uint64_t max_entries = 0;
  uint64_t live_buffers = 0; // allocated in this session and active
  uint64_t allocations = 0;
  uint64_t reuses = 0;
  uint64_t frees = 0;
  // Bytes that MLX's counters moved without a call that was seen, other than
  // what was under way when the session began.
  uint64_t unexplained = 0;
};

// When something happened, and on which thread.
struct Moment {
  uint64_t ns; // CLOCK_MONOTONIC
  uint32_t thread_id; // the operating system's
  uint8_t after_look = 0; // as in Event
};

// A moment of a session.
struct Position {
  uint64_t events = 0; // recorded until then, dropped ones included
  int64_t us = 0; // since the session began
};

class Books {
 public:
  void start(uint64_t max_entries, const Limits& limits);
  // What was there at the start. Before anything is booked.
  void start_from(const Counters& counters);
  // What lies in the cache then. Throws std::bad_alloc.
  void know_cache(const std::vector<CachedBuffer>& buffers);
  // The counters at the start were exact: no call was under way.
  void start_was_exact() {
    start_was_exact_ = true;
  }

  // Active bytes as MLX counts them while no call of its allocator is under
  // way. They move without the books only by calls that were inside the
  // allocator when the session began: those belong to its start.
  void observe_active(uint64_t active) {
    if (active != totals_.now.active) {
      correct_start(active - totals_.now.active, 0);
    }
  }

  // Cached bytes likewise. What left the cache since the last look was cleared
  // or trimmed: everything, or the oldest buffers.
  void observe_cache(uint64_t cache);

  // The cache gave a buffer back to the operating system.
  void left_cache(const CacheReturn& buffer);

  // MLX's limits as they are; time_ns: since when at the latest, 0: now.
  void observe_limits(const Limits& limits, uint64_t time_ns = 0) {
    if (limit_changes_.is_new(limits)) {
      set_limits(
          limits, {time_ns ? time_ns : clock_.now_ns(), current_thread_id()});
    }
  }
  // The limits that were set at a moment, where each is seen to be set.
  [[gnu::cold]] void set_limits(const Limits& limits, const Moment& moment);
  const Limits& limits() const {
    return limit_changes_.seen();
  }

  // The allocator handed out a buffer; from_cache: how many bytes left the
  // cache for it. Tells whether it was AllocNew or AllocReuse.
  Action allocated(
      uint64_t address,
      uint64_t size,
      uint64_t requested_size,
      uint64_t from_cache,
      const Origin& origin,
      const Moment& moment);
  // One of which nobody knows the address: it counts, and is unexplained.
  void allocated_somewhere(
      uint64_t size,
      uint64_t from_cache,
      const Origin& origin,
      const Moment& moment);

  // The allocator wrapped memory that it doesn't own.
  void made_buffer(uint64_t address, uint64_t size, const Origin& origin);

  // The allocator took a buffer back, which has this slot. size counts only for
  // a buffer that is not known, one from before the session.
  void freed(
      uint64_t address,
      uint32_t slot,
      uint64_t size,
      bool to_cache,
      const Moment& moment);
  void released(uint64_t address, uint64_t size);

  // Where the table has a buffer, BufferTable::kNone when it is not known.
  uint32_t find(uint64_t address) const {
    return table_.find(address);
  }

  uint64_t size_of(uint32_t slot) const {
    return table_[slot].event.size;
  }
  uint64_t active() const {
    return totals_.now.active;
  }

  uint32_t session() const {
    return session_;
  }
  // Where the log stands now, for what is noted beside it: no later event has a
  // lower number or an earlier time.
  Position position() {
    return position_at(clock_.now_ns());
  }
  // The same for what may lie a little off: events of before now may follow.
  Position rough_position(uint64_t unbooked_events) {
    uint64_t ns = std::max(last_ns_, clock_.now_ns());
    return {
        log_.next() + unbooked_events,
        static_cast<int64_t>((ns - start_ns_) / 1000)};
  }
  Moment now() {
    return {clock_.now_ns(), current_thread_id()};
  }
  const LimitChanges& limit_changes() const {
    return limit_changes_;
  }
  Totals totals() const;
  // The retained events, oldest first, and the buffers that are there now but
  // whose last event is no longer retained.
  std::vector<Event> events() const;
  std::vector<Event> older_buffers() const;

 private:
  Position position_at(uint64_t ns) {
    last_ns_ = std::max(last_ns_, ns);
    return {log_.next(), static_cast<int64_t>((last_ns_ - start_ns_) / 1000)};
  }
  void allocated_as(
      Action action,
      uint32_t slot,
      uint64_t size,
      uint64_t requested_size,
      const Origin& origin,
      const Moment& moment);
  void removed_as(
      Action action,
      uint64_t address,
      uint32_t slot,
      uint64_t size,
      const Moment& moment);
  // Stamps the event and appends a copy of it.
  void log(Action action, Event& event, const Moment& moment);
  void correct_start(int64_t active, int64_t cache);
  bool is_starting() const;
  void evict(uint64_t bytes);
  void drop_cached(uint32_t slot, const Moment& moment);
  void forget_cached(uint32_t slot);
  void forget_active(uint32_t slot, const Moment& moment);

  EventClock clock_;
  EventLog log_;
  BufferTable table_;
  Totals totals_;
  LimitChanges limit_changes_;
  bool start_was_exact_ = false;
  uint64_t unseen_addresses_ = 0;
  uint64_t unknown_cached_ = 0; // bytes cached before the session began
  uint64_t start_ns_ = 0; // CLOCK_MONOTONIC
  uint64_t last_ns_ = 0; // of the last event: the log never runs backwards
  uint32_t session_ = 0;
};

} // namespace mlxmem
