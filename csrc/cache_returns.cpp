#include "cache_returns.h"

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

} // namespace

namespace cache_returns {
std::atomic<uint64_t> bytes{0};
std::atomic<bool> any{false};
} // namespace cache_returns

void note_cache_return(uint64_t address, uint64_t size) noexcept {
  auto& n = notes();
  CacheReturn note = {address, size, monotonic_ns(), current_thread_id()};
  std::lock_guard<std::mutex> lock(n.mutex);
  try {
    n.notes.push_back(note);
  } catch (const std::bad_alloc&) {
    n.lost = true;
  }
  cache_returns::bytes.fetch_add(size, std::memory_order_release);
  cache_returns::any.store(true, std::memory_order_release);
}

bool take_cache_returns(std::vector<CacheReturn>* out) {
  out->clear();
  auto& n = notes();
  std::lock_guard<std::mutex> lock(n.mutex);
  out->swap(n.notes);
  cache_returns::any.store(false, std::memory_order_release);
  bool complete = !n.lost;
  n.lost = false;
  return complete;
}

void drop_cache_returns() {
  std::vector<CacheReturn> dropped;
  take_cache_returns(&dropped);
}

void lock_cache_returns() {
  notes().mutex.lock();
}

void unlock_cache_returns() {
  notes().mutex.unlock();
}

} // namespace mlxmem
