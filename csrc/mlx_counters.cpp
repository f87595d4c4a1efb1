#include "mlx_counters.h"

#include <cstdlib>
#include <cstring>

namespace mlxmem {

namespace {

uint64_t word(const char* object, size_t offset) {
  return __atomic_load_n(
      reinterpret_cast<const uint64_t*>(object + offset), __ATOMIC_RELAXED);
}

} // namespace

void MlxCounters::bind(
    void* allocator,
    const char* allocator_class,
    abi::CounterFn active,
    abi::CounterFn cache,
    abi::CounterFn peak,
    abi::CounterFn memory_limit) {
  *this = MlxCounters();
  active_ = active;
  cache_ = cache;
  peak_ = peak;
  memory_limit_ = memory_limit;
  if (std::strcmp(allocator_class, abi::kCpuAllocatorType) == 0) {
    cpu_allocator_ = static_cast<const char*>(allocator);
  }
  if (knows_layout() &&
      word(cpu_allocator_, abi::kCpuPageSize) == abi::kCpuPageSizeValue) {
    cache_word_ = reinterpret_cast<const uint64_t*>(
        cpu_allocator_ + abi::kCpuCacheMemory);
    mutex_word_ = reinterpret_cast<const int*>(cpu_allocator_ + abi::kCpuMutex);
  }
}

bool MlxCounters::knows_layout() const {
  auto fits = [this] {
    return word(cpu_allocator_, abi::kCpuMemoryLimit) == memory_limit_() &&
        word(cpu_allocator_, abi::kCpuActiveMemory) == active_() &&
        word(cpu_allocator_, abi::kCpuPeakMemory) == peak_();
  };
  if (!cpu_allocator_ || !memory_limit_) {
    return false;
  }
  // Another thread may allocate between two of the readings.
  for (int i = 0; i < 100; ++i) {
    if (fits()) {
      return true;
    }
  }
  return false;
}

uint64_t MlxCounters::cache_by_function() {
  uint64_t cache = cache_();
  if (cache_word_ && proofs_ < kProofs && cache != last_) {
    if (__atomic_load_n(cache_word_, __ATOMIC_RELAXED) == cache) {
      ++proofs_;
    } else {
      cache_word_ = nullptr; // not the word it was taken for
    }
    last_ = cache;
  }
  return cache;
}

void** MlxCounters::cache_free_word() const {
  if (!cache_word_ || !knows_layout()) {
    return nullptr;
  }
  auto slot = reinterpret_cast<void**>(
      const_cast<char*>(cpu_allocator_) + abi::kCpuCacheFree);
  return *slot == reinterpret_cast<void*>(&::free) ? slot : nullptr;
}

int64_t MlxCounters::cache_limit() const {
  // Without a cache, before 0.32.0, other members lie here.
  return cache_word_ && knows_layout()
      ? static_cast<int64_t>(word(cpu_allocator_, abi::kCpuCacheLimit))
      : -1;
}

} // namespace mlxmem
