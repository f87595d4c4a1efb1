// Where events go: a ring that keeps the last max_entries, or a list that
// grows without limit. Not synchronised; Books calls it under its lock.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "event.h"

namespace mlxmem {

class EventLog {
 public:
  // max_entries 0: no limit. Drops what was logged.
  void reset(uint64_t max_entries);

  // The next append() will not throw. Throws std::bad_alloc when a new chunk
  // can't be had.
  void make_room() {
    if (free_ == free_end_) {
      next_run();
    }
  }
  void append(const Event& event) {
    make_room();
    *free_++ = event;
    ++next_;
  }

  // Number of the next event; the first one of a session is 0.
  uint64_t next() const {
    return next_;
  }
  // Number of the oldest event that is still here.
  uint64_t first() const {
    return max_entries_ && next_ > max_entries_ ? next_ - max_entries_ : 0;
  }

  // Copies the events first() to next() - 1, oldest first.
  void copy_to(Event* out) const;

 private:
  // Chunks come when they are first written: a short recording with a large
  // limit stays small, and growing never moves an event.
  static constexpr size_t kChunk = 1 << 14;

  // Moves on to the places after those that are used up.
  void next_run();

  std::vector<std::unique_ptr<Event[]>> chunks_;
  Event* free_ = nullptr; // the next events' places, in one chunk
  Event* free_end_ = nullptr;
  uint64_t max_entries_ = 0;
  uint64_t next_ = 0;
};

} // namespace mlxmem
