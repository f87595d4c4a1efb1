#include "cache_returns.h"

#include <atomic>
#include <mutex>
#include <new>

#include "clock.h"
#include "threads.h"

namespace mlxmem {

namespace {

struct Notes {
  std::mutex mutex;
  std::vector<CacheReturn> notes;
  bool lost = false;
};

// Never destroyed: MLX empties its cache when the process ends.
Notes& notes() {
  static Notes* instance = new Notes;
  return *instance;
}

std::atomic<uint64_t> returned_bytes{0};
std::atomic<bool> any{false};

} // namespace

void note_cache_return(uint64_t address, uint64_t size) noexcept {
  auto& n = notes();
  CacheReturn note = {address, size, monotonic_ns(), current_thread_id()};
  std::lock_guard<std::mutex> lock(n.mutex);
  try {
    n.notes.push_back(note);
  } catch (const std::bad_alloc&) {
    n.lost = true;
  }
  returned_bytes.fetch_add(size, std::memory_order_release);
  any.store(true, std::memory_order_release);
}

uint64_t cache_returned_bytes() {
  return returned_bytes.load(std::memory_order_acquire);
}

bool take_cache_returns(std::vector<CacheReturn>* out) {
  out->clear();
  if (!any.load(std::memory_order_acquire)) {
    return true;
  }
  auto& n = notes();
  std::lock_guard<std::mutex> lock(n.mutex);
  out->swap(n.notes);
  any.store(false, std::memory_order_release);
  bool complete = !n.lost;
  n.lost = false;
  return complete;
}

void lock_cache_returns() {
  notes().mutex.lock();
}

void unlock_cache_returns() {
  notes().mutex.unlock();
}

} // namespace mlxmem
