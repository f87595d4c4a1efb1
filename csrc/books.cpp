#include "books.h"

#include <algorithm>
#include <cstdlib>

#include "clock.h"
#include "threads.h"

namespace mlxmem {

void Books::start(uint64_t max_entries, const Limits& limits) {
  clock_.start();
  log_.reset(max_entries);
  table_.clear();
  totals_ = Totals();
  totals_.max_entries = max_entries;
  limit_changes_.start(limits);
  start_was_exact_ = false;
  unseen_addresses_ = 0;
  unknown_cached_ = 0;
  totals_.start_us = clock_ns(CLOCK_REALTIME) / 1000;
  start_ns_ = monotonic_ns();
  last_ns_ = start_ns_;
  ++session_;
}

void Books::start_from(const Counters& counters) {
  totals_.at_start = counters;
  totals_.now = counters;
  totals_.now.peak = counters.active;
  unknown_cached_ = counters.cache;
}

void Books::know_cache(const std::vector<CachedBuffer>& buffers) {
  for (auto& buffer : buffers) {
    uint32_t slot = table_.insert(buffer.address);
    table_[slot].event.size = buffer.size;
    table_[slot].event.requested_size = buffer.size;
    table_.push_cached(slot);
    unknown_cached_ -= buffer.size;
  }
}

void Books::set_limits(const Limits& limits, const Moment& moment) {
  Position position = position_at(moment.ns);
  LimitChange change = {};
  change.event = position.events;
  change.timestamp_us = position.us;
  change.thread_id = moment.thread_id;
  limit_changes_.note(limits, change);
}

void Books::observe_cache(uint64_t cache) {
  if (cache < totals_.now.cache) {
    evict(totals_.now.cache - cache);
  } else if (cache > totals_.now.cache) {
    correct_start(0, cache - totals_.now.cache);
  }
}

void Books::left_cache(const CacheReturn& returned) {
  Moment moment = {returned.time_ns, returned.thread_id};
  uint32_t slot = table_.find(returned.address);
  if (slot != BufferTable::kNone && table_[slot].cached) {
    drop_cached(slot, moment);
    return;
  }
  if (slot != BufferTable::kNone) {
    forget_active(slot, moment); // its free was not seen
  }
  // A buffer from before the session.
  if (returned.size > unknown_cached_) {
    correct_start(0, returned.size - unknown_cached_);
  }
  Event event = {};
  event.address = returned.address;
  event.size = returned.size;
  event.requested_size = returned.size;
  log(Action::FreeCacheToOS, event, moment);
  unknown_cached_ -= returned.size;
  totals_.now.cache -= returned.size;
}

void Books::correct_start(int64_t active, int64_t cache) {
  totals_.at_start.active += active;
  totals_.now.active += active;
  totals_.now.peak += active;
  totals_.at_start.cache += cache;
  totals_.now.cache += cache;
  unknown_cached_ += cache;
  if (!is_starting()) {
    totals_.unexplained += std::abs(active ? active : cache);
  }
}

// A call that was under way when the session began may be noticed late, when
// its thread gets no processor.
bool Books::is_starting() const {
  return !start_was_exact_ && monotonic_ns() - start_ns_ < 5000000000ull;
}

Action Books::allocated(
    uint64_t address,
    uint64_t size,
    uint64_t requested_size,
    uint64_t from_cache,
    const Origin& origin,
    const Moment& moment) {
  log_.make_room(); // before anything is changed
  uint32_t slot = table_.find(address);
  Action action = Action::AllocNew;
  if (slot == BufferTable::kNone) {
    if (size && from_cache >= size && unknown_cached_ >= size) {
      action = Action::AllocReuse;
      unknown_cached_ -= size;
    }
    slot = table_.insert(address);
  } else if (!table_[slot].cached) {
    forget_active(slot, moment);
    slot = table_.insert(address);
  } else if (size && from_cache >= size && table_[slot].event.size == size) {
    action = Action::AllocReuse;
    table_.remove_cached(slot);
  } else {
    // The address left the cache and came back from the OS.
    drop_cached(slot, moment);
    slot = table_.insert(address);
  }
  if (action == Action::AllocReuse) {
    totals_.now.cache -= size;
  }
  allocated_as(action, slot, size, requested_size, origin, moment);
  return action;
}

void Books::allocated_somewhere(
    uint64_t size,
    uint64_t from_cache,
    const Origin& origin,
    const Moment& moment) {
  totals_.unexplained += size;
  // Odd: no buffer lies there.
  allocated(++unseen_addresses_ * 2 - 1, size, size, 0, origin, moment);
  evict(from_cache);
}

void Books::made_buffer(uint64_t address, uint64_t size, const Origin& origin) {
  uint32_t slot = table_.find(address);
  Moment moment = now();
  if (slot != BufferTable::kNone) {
    table_[slot].cached ? drop_cached(slot, moment)
                        : forget_active(slot, moment);
  }
  slot = table_.insert(address);
  allocated_as(Action::AllocMakeBuffer, slot, size, size, origin, moment);
}

void Books::allocated_as(
    Action action,
    uint32_t slot,
    uint64_t size,
    uint64_t requested_size,
    const Origin& origin,
    const Moment& moment) {
  auto& buffer = table_[slot];
  buffer.event_number = log_.next();
  buffer.event.size = size;
  buffer.event.requested_size = requested_size;
  buffer.event.traceback = origin.session == session_ ? origin.traceback : 0;
  buffer.event.primitive = origin.primitive;
  buffer.event.stream = origin.stream;
  log(action, buffer.event, moment);
  totals_.now.active += size;
  totals_.now.peak = std::max(totals_.now.peak, totals_.now.active);
  ++totals_.live_buffers;
  ++totals_.allocations;
  totals_.reuses += action == Action::AllocReuse;
}

void Books::freed(
    uint64_t address,
    uint32_t slot,
    uint64_t size,
    bool to_cache,
    const Moment& moment) {
  removed_as(
      to_cache ? Action::FreeActiveToCache : Action::FreeActiveToOS,
      address,
      slot,
      slot == BufferTable::kNone ? size : table_[slot].event.size,
      moment);
}

void Books::released(uint64_t address, uint64_t size) {
  uint32_t slot = table_.find(address);
  removed_as(
      Action::Release,
      address,
      slot,
      slot == BufferTable::kNone ? size : table_[slot].event.size,
      now());
}

void Books::removed_as(
    Action action,
    uint64_t address,
    uint32_t slot,
    uint64_t size,
    const Moment& moment) {
  log_.make_room(); // before anything is changed
  if (slot == BufferTable::kNone) {
    slot = table_.insert(address);
    table_[slot].event.size = size;
    table_[slot].event.requested_size = size;
  } else if (table_[slot].cached) {
    // Freed though it lies in the cache: its allocation was not seen.
    table_.remove_cached(slot);
    totals_.now.cache -= size;
    totals_.now.active += size;
    totals_.unexplained += size;
  } else {
    --totals_.live_buffers;
  }
  auto& buffer = table_[slot];
  buffer.event_number = log_.next();
  log(action, buffer.event, moment);
  totals_.now.active -= size;
  ++totals_.frees;
  if (action == Action::FreeActiveToCache) {
    table_.push_cached(slot);
    totals_.now.cache += size;
  } else {
    table_.erase(slot);
  }
}

// MLX handed out an address that the table holds as active: its free was not
// seen.
void Books::forget_active(uint32_t slot, const Moment& moment) {
  uint64_t size = table_[slot].event.size;
  totals_.unexplained += size;
  removed_as(
      Action::FreeActiveToOS, table_[slot].event.address, slot, size, moment);
}

void Books::evict(uint64_t bytes) {
  Moment moment = now();
  // Buffers cached before the session began are older than every known one.
  uint64_t unknown = std::min(bytes, unknown_cached_);
  if (unknown) {
    Event event = {};
    event.size = unknown;
    event.requested_size = unknown;
    log(Action::FreeCacheToOS, event, moment);
    unknown_cached_ -= unknown;
    totals_.now.cache -= unknown;
    bytes -= unknown;
  }
  while (bytes && table_.oldest_cached() != BufferTable::kNone) {
    uint64_t size = table_[table_.oldest_cached()].event.size;
    if (size > bytes) {
      break;
    }
    drop_cached(table_.oldest_cached(), moment);
    bytes -= size;
  }
  // Buffer by buffer it doesn't add up: some other one went. The totals stay
  // right, and the difference is shown.
  if (bytes) {
    uint64_t known = table_[table_.oldest_cached()].event.size;
    drop_cached(table_.oldest_cached(), moment);
    unknown_cached_ += known - bytes;
    totals_.now.cache += known - bytes;
    totals_.unexplained += bytes;
  }
}

void Books::drop_cached(uint32_t slot, const Moment& moment) {
  log(Action::FreeCacheToOS, table_[slot].event, moment);
  forget_cached(slot);
}

void Books::forget_cached(uint32_t slot) {
  totals_.now.cache -= table_[slot].event.size;
  table_.remove_cached(slot);
  table_.erase(slot);
}

void Books::log(Action action, Event& event, const Moment& moment) {
  // What was noted is booked a little later than it happened.
  last_ns_ = std::max(last_ns_, moment.ns);
  event.timestamp_us = (last_ns_ - start_ns_) / 1000;
  event.kind = static_cast<uint8_t>(action);
  event.thread_id = moment.thread_id;
  event.after_look = moment.after_look;
  if (action > Action::AllocMakeBuffer) {
    event.stream = -1;
  }
  log_.append(event);
}

Totals Books::totals() const {
  Totals totals = totals_;
  totals.events = log_.next();
  totals.dropped = log_.first();
  return totals;
}

std::vector<Event> Books::events() const {
  std::vector<Event> events(log_.next() - log_.first());
  log_.copy_to(events.data());
  return events;
}

std::vector<Event> Books::older_buffers() const {
  std::vector<Event> buffers;
  table_.for_each([&](const TrackedBuffer& buffer) {
    if (buffer.event_number < log_.first()) {
      buffers.push_back(buffer.event);
      buffers.back().kind = static_cast<uint8_t>(
          buffer.cached ? BufferState::Cached : BufferState::Active);
    }
  });
  return buffers;
}

} // namespace mlxmem
