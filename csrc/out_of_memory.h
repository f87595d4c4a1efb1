// Allocations that failed: what is kept of each, and how Python hears of it
// before MLX does.

#pragma once

#include <cstddef>
#include <cstdint>

#include "event.h"

namespace mlxmem {

// The record that Python reads, see _hook.py.
struct FailedAllocation {
  uint64_t event; // number of the next one
  int64_t timestamp_us; // since the session began
  uint64_t size; // bytes
  int64_t free; // bytes that could still be had, -1: not known
  uint64_t active; // bytes
  uint64_t cache;
  TracebackId traceback;
  int32_t stream;
  uint32_t thread_id;
  PrimitiveId primitive;
  uint16_t reserved;
  char message[128]; // the exception's; empty where there was none
};
static_assert(sizeof(FailedAllocation) == 192, "_hook.py reads 192 bytes");

// The last failures of a session, oldest first. Not synchronised.
class FailedAllocations {
 public:
  static constexpr size_t kMost = 64;

  void clear() {
    count_ = 0;
  }
  void add(const FailedAllocation& failure) {
    kept_[count_++ % kMost] = failure;
  }
  size_t size() const {
    return count_ < kMost ? count_ : kMost;
  }
  const FailedAllocation& operator[](size_t i) const {
    return kept_[(count_ - size() + i) % kMost];
  }

 private:
  FailedAllocation kept_[kMost];
  size_t count_ = 0;
};

// Python's side. handle takes the GIL; the other two tell whether the calling
// thread has it: then they return the same state.
struct FailureHandler {
  void (*handle)(const FailedAllocation*) = nullptr;
  void* (*current_state)() = nullptr;
  void* (*own_state)() = nullptr;
};

// handle nullptr: nobody is told. Keeps some address space free for the
// handler.
void set_failure_handler(const FailureHandler& handler);

// Runs the handler: at once on a thread that has the GIL, else on a new one for
// which this one waits, for a limited time, since somebody may hold the GIL and
// wait for this thread. Call it without any lock. Never throws.
void tell_of_failure(const FailedAllocation& failure);

} // namespace mlxmem
