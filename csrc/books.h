// Keeps account of MLX's buffers: turns what the allocator did into events and
// holds the totals that must equal MLX's own counters at every quiet moment.
// Not synchronised: the probes hold one lock around the allocator's call and
// the booking of it, so that the log has the order of the allocator.

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
  // What lies in the cache when the session begins, where each buffer that it
  // takes or gives back later is seen, too: then the books alone tell a reused
  // buffer from a new one. Throws std::bad_alloc.
  void know_cache(const std::vector<CachedBuffer>& buffers);

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
      note_limits(limits, time_ns);
    }
  }

  // The allocator handed out a buffer; from_cache: how many bytes left the
  // cache for it. Tells whether it was AllocNew or AllocReuse.
  Action allocated(
      uint64_t address,
      uint64_t size,
      uint64_t requested_size,
      uint64_t from_cache,
      const Origin& origin);

  // The allocator wrapped memory that it doesn't own.
  void made_buffer(uint64_t address, uint64_t size, const Origin& origin);

  // The allocator took a buffer back, which has this slot. size counts only for
  // a buffer that is not known, one from before the session.
  void freed(uint64_t address, uint32_t slot, uint64_t size, bool to_cache);
  void released(uint64_t address, uint64_t size);

  // An array was given a buffer that may have bypassed the allocator's vtable.
  void bound(uint64_t address, uint64_t size, const Counters&, const Origin&);

  // Where the table has a buffer, BufferTable::kNone when it is not known.
  uint32_t find(uint64_t address) const {
    return table_.find(address);
  }
  bool is_active(uint64_t address) const {
    uint32_t slot = table_.find(address);
    return slot != BufferTable::kNone && !table_[slot].cached;
  }

  uint64_t size_of(uint32_t slot) const {
    return table_[slot].event.size;
  }
  // The active bytes without the lock: what they were a moment ago.
  uint64_t peek_active() const {
    return __atomic_load_n(&totals_.now.active, __ATOMIC_RELAXED);
  }

  uint32_t session() const {
    return session_;
  }
  // Where the log stands now, for what is noted beside it: no later event has a
  // lower number or an earlier time.
  Position position() {
    return position_at(clock_.now_ns());
  }
  // Nanoseconds of the events' clock, for what is measured.
  uint64_t now_ns() {
    return clock_.now_ns();
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
  [[gnu::cold]] void note_limits(const Limits& limits, uint64_t time_ns);
  void allocated_as(
      Action action,
      uint32_t slot,
      uint64_t size,
      uint64_t requested_size,
      const Origin& origin);
  void
  removed_as(Action action, uint64_t address, uint32_t slot, uint64_t size);
  // Stamps the event and appends a copy of it.
  void log(Action action, Event& event);
  void append(Event& event, Action action, uint64_t time_ns, uint32_t thread);
  void correct_start(int64_t active, int64_t cache);
  bool is_starting() const;
  void evict(uint64_t bytes);
  void drop_cached(uint32_t slot);
  void forget_cached(uint32_t slot);
  void forget_active(uint32_t slot);

  EventClock clock_;
  EventLog log_;
  BufferTable table_;
  Totals totals_;
  LimitChanges limit_changes_;
  bool knows_cache_ = false;
  uint64_t unknown_cached_ = 0; // bytes cached before the session began
  uint64_t start_ns_ = 0; // CLOCK_MONOTONIC
  uint64_t last_ns_ = 0; // of the last event: the log never runs backwards
  uint32_t session_ = 0;
};

} // namespace mlxmem
