// MLX's own counters, which the books must equal.

#pragma once

#include <cstddef>
#include <cstdint>

#include "mlx_abi.h"

namespace mlxmem {

struct Counters {
  uint64_t active = 0; // bytes
  uint64_t cache = 0;
  uint64_t peak = 0;
};

// MLX's limits, which anybody may set.
struct Limits {
  uint64_t cache = 0; // bytes
  uint64_t memory = 0;
};

// What only Metal's allocator has, as it is now.
struct MetalResources {
  uint64_t gc_limit = 0; // bytes
  uint64_t wired_limit = 0; // bytes
  uint64_t resources = 0; // buffers, cached ones included
  uint64_t resource_limit = 0;
};

// The words of an allocator with a cache, which change under its mutex only.
struct AllocatorWords {
  uint64_t active = 0; // bytes
  uint64_t cache = 0;
  Limits limits;
};

// The cache of an allocator that has one: how many buffers and bytes, and the
// ends of the list of them, 0 when it is empty.
struct CacheList {
  uint64_t count = 0;
  uint64_t bytes = 0;
  uint64_t newest = 0;
  uint64_t oldest = 0;

  bool operator==(const CacheList& other) const {
    return count == other.count && bytes == other.bytes &&
        newest == other.newest && oldest == other.oldest;
  }
};

// A counter of MLX: its function, and where it is known the word that the
// function returns. The word is read instead once it has proved itself, since
// the functions take locks or come by many calls.
class CounterWord {
 public:
  CounterWord() = default;
  explicit CounterWord(abi::CounterFn function, const uint64_t* word = nullptr)
      : function_(function), word_(word) {}

  // As MLX's function says.
  uint64_t ask() const {
    return function_();
  }
  // Called with the books locked, at moments when nobody changes the word.
  uint64_t read() {
    return is_proved() ? __atomic_load_n(word_, __ATOMIC_ACQUIRE)
                       : ask_and_prove();
  }
  bool is_proved() const {
    return __atomic_load_n(&proofs_, __ATOMIC_RELAXED) >= kProofs;
  }
  // As ask(), and compares the word with it. With the books locked.
  uint64_t ask_and_prove();

 private:
  static constexpr int kProofs = 16;

  abi::CounterFn function_ = nullptr;
  const uint64_t* word_ = nullptr;
  uint64_t last_ = 0;
  int proofs_ = 0; // how often word and function agreed after a fall
};

class MlxCounters {
 public:
  // allocator: the object, of the class with this RTTI name.
  void bind(
      void* allocator,
      const char* allocator_class,
      abi::CounterFn active,
      abi::CounterFn cache,
      abi::CounterFn peak,
      abi::CounterFn memory_limit);

  Counters read() const {
    return {active_.ask() - not_allocated(), cache_.ask(), peak_.ask()};
  }

  // The active and the cached bytes, with the books locked.
  uint64_t active() {
    return active_.read() - not_allocated();
  }
  // The CPU's allocator counts bytes as active, for good, that it asked for and
  // did not get.
  void leave_out(uint64_t bytes) {
    __atomic_fetch_add(&not_allocated_, bytes, __ATOMIC_RELAXED);
  }
  uint64_t cache() {
    // The cache's word is not atomic: its mutex guards it.
    return cache_.is_proved() && !mutex_is_free() ? cache_.ask()
                                                  : cache_.read();
  }

  // The word through which the CPU's cache frees a buffer, holding that mutex;
  // nullptr when this allocator has none.
  void** cache_free_word() const;
  // The words through which the cache asks for a buffer's size, when it takes
  // it or gives it back, and frees it; only where knows_cache().
  void** cache_get_size_word() const {
    return slot(abi::kCacheGetSizeInvoker);
  }
  void** cache_free_invoker_word() const {
    return slot(abi::kCacheFreeInvoker);
  }
  // The allocator's std::mutex; only where knows_cache().
  pthread_mutex_t* mutex() const {
    return reinterpret_cast<pthread_mutex_t*>(slot(layout_->mutex));
  }
  // With that mutex held; only where knows_cache().
  AllocatorWords read_words() const {
    return {
        word(layout_->active),
        word(abi::kCacheMemory),
        {word(layout_->cache_limit), word(layout_->memory_limit)}};
  }
  // The counters by these words. With that mutex held.
  Counters counters_of(const AllocatorWords& words) const {
    return {words.active - not_allocated(), words.cache, peak_.ask()};
  }

  // The cache limit in bytes, -1 where it can't be told.
  int64_t cache_limit() const;

  // The limits as they are, with the books locked. False where the words that
  // hold them are not known.
  bool peek_limits(Limits* out) const {
    if (!memory_limit_at_) {
      return false;
    }
    *out = {word(cache_limit_at_), word(memory_limit_at_)};
    return true;
  }
  // False where these words are not known, or it is another's allocator.
  bool read_metal(MetalResources* out) const;
  // Whether the words of an allocator with a cache are known.
  bool knows_cache() const {
    return has_cache_;
  }
  size_t buffer_size_offset() const {
    return layout_->buffer_size;
  }
  // The cache as it is. False without one, and while somebody else is inside
  // it; is_held: this thread has the allocator's mutex.
  bool peek_cache_list(CacheList* out, bool is_held) const {
    if (!has_cache_ || !(is_held || mutex_is_free())) {
      return false;
    }
    *out = {
        word(abi::kCacheCount),
        word(abi::kCacheMemory),
        word(abi::kCacheNewest),
        word(abi::kCacheOldest)};
    return is_held || mutex_is_free();
  }

  // The memory limit in bytes by MLX's function, -1 where it has none.
  int64_t ask_memory_limit() const;

 private:
  uint64_t word(size_t offset) const {
    return __atomic_load_n(
        reinterpret_cast<const uint64_t*>(allocator_ + offset),
        __ATOMIC_RELAXED);
  }
  bool mutex_is_free() const {
    return __atomic_load_n(mutex_word_, __ATOMIC_ACQUIRE) == 0;
  }
  // Whether the words are where a layout says: those of which MLX's functions
  // tell the values.
  bool knows_layout() const;
  bool has_metal_layout(const abi::MetalLayout& layout) const;
  void bind_metal();
  uint64_t not_allocated() const {
    return __atomic_load_n(&not_allocated_, __ATOMIC_RELAXED);
  }

  uint64_t not_allocated_ = 0;
  CounterWord active_;
  CounterWord cache_;
  CounterWord peak_; // its word is looked at once, not read later
  abi::CounterFn memory_limit_ = nullptr;
  void** slot(size_t offset) const {
    return reinterpret_cast<void**>(const_cast<char*>(allocator_) + offset);
  }

  const char* allocator_ = nullptr; // the object
  const abi::AllocatorLayout* layout_ = nullptr; // if its class has one
  bool has_cache_ = false; // and its words are where they should be
  const abi::MetalLayout* metal_ = nullptr; // the same, of Metal's
  size_t cache_limit_at_ = 0; // 0: not known
  size_t memory_limit_at_ = 0;
  const int* mutex_word_ = nullptr;
};

} // namespace mlxmem
