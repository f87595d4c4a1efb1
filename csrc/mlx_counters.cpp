#include "mlx_counters.h"

#include <cstdlib>
#include <cstring>

namespace mlxmem {

void MlxCounters::bind(
    void* allocator,
    const char* allocator_class,
    abi::CounterFn active,
    abi::CounterFn cache,
    abi::CounterFn peak,
    abi::CounterFn memory_limit) {
  uint64_t left_out = not_allocated_;
  *this = MlxCounters();
  not_allocated_ = left_out;
  active_ = CounterWord(active);
  cache_ = CounterWord(cache);
  peak_ = CounterWord(peak);
  memory_limit_ = memory_limit;
  allocator_ = static_cast<const char*>(allocator);
  for (auto layout : {&abi::kCpuAllocator, &abi::kCudaAllocator}) {
    if (std::strcmp(allocator_class, layout->type) == 0) {
      layout_ = layout;
    }
  }
  if (std::strstr(allocator_class, abi::kMetalAllocatorName)) {
    bind_metal();
  }
  // Before 0.32.0 there is no cache, and the words lie elsewhere: peak where
  // active is looked for, which are equal at first.
  has_cache_ = knows_layout() && word(abi::kCachePageSize) == layout_->page;
  if (!has_cache_) {
    return;
  }
  auto at = [this](size_t offset) {
    return reinterpret_cast<const uint64_t*>(allocator_ + offset);
  };
  cache_limit_at_ = layout_->cache_limit;
  memory_limit_at_ = layout_->memory_limit;
  active_ = CounterWord(active, at(layout_->active));
  cache_ = CounterWord(cache, at(abi::kCacheMemory));
  mutex_word_ = reinterpret_cast<const int*>(allocator_ + layout_->mutex);
}

namespace {

// Another thread may allocate between two of the readings.
template <typename Fits>
bool fits_once(Fits&& fits) {
  for (int i = 0; i < 100; ++i) {
    if (fits()) {
      return true;
    }
  }
  return false;
}

size_t metal_offset(const abi::MetalLayout& layout, abi::MetalWord word) {
  return layout.memory_limit + word * sizeof(uint64_t);
}

} // namespace

bool MlxCounters::knows_layout() const {
  return layout_ && memory_limit_ && fits_once([this] {
           return word(layout_->memory_limit) == memory_limit_() &&
               word(layout_->active) == active_.ask() &&
               word(layout_->peak) == peak_.ask();
         });
}

bool MlxCounters::has_metal_layout(const abi::MetalLayout& layout) const {
  return memory_limit_ && fits_once([&] {
           return word(metal_offset(layout, abi::kMetalMemoryLimit)) ==
               memory_limit_() &&
               word(metal_offset(layout, abi::kMetalActive)) == active_.ask() &&
               word(metal_offset(layout, abi::kMetalPeak)) == peak_.ask() &&
               word(layout.cache_memory) == cache_.ask();
         });
}

void MlxCounters::bind_metal() {
  for (auto& layout : abi::kMetalAllocators) {
    if (has_metal_layout(layout)) {
      metal_ = &layout;
      cache_limit_at_ = metal_offset(layout, abi::kMetalCacheLimit);
      memory_limit_at_ = metal_offset(layout, abi::kMetalMemoryLimit);
      return;
    }
  }
}

bool MlxCounters::read_metal(MetalResources* out) const {
  if (!metal_) {
    return false;
  }
  auto at = [this](abi::MetalWord which) {
    return word(metal_offset(*metal_, which));
  };
  *out = {
      at(abi::kMetalGcLimit),
      at(abi::kMetalWiredLimit),
      at(abi::kMetalResources),
      at(abi::kMetalResourceLimit)};
  return true;
}

uint64_t CounterWord::ask_and_prove() {
  uint64_t value = function_();
  if (word_ && proofs_ < kProofs && value != last_) {
    if (__atomic_load_n(word_, __ATOMIC_RELAXED) == value) {
      // Only a fall proves it: the word of a peak rises with the counter.
      proofs_ += value < last_;
    } else if (function_() == value) {
      word_ = nullptr; // not the word it was taken for
    }
    last_ = value;
  }
  return value;
}

void** MlxCounters::cache_free_word() const {
  if (!has_cache_ || !knows_layout()) {
    return nullptr;
  }
  void** word = slot(abi::kCacheFree);
  return *word == reinterpret_cast<void*>(&::free) ? word : nullptr;
}

int64_t MlxCounters::cache_limit() const {
  // Without a cache, before 0.32.0, other members lie here.
  bool is_known =
      metal_ ? has_metal_layout(*metal_) : has_cache_ && knows_layout();
  return is_known ? static_cast<int64_t>(word(cache_limit_at_)) : -1;
}

int64_t MlxCounters::ask_memory_limit() const {
  return memory_limit_ ? static_cast<int64_t>(memory_limit_()) : -1;
}

} // namespace mlxmem
