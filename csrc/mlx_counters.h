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
    return {active_(), cache_(), peak_()};
  }

  // Cheap: on the CPU it reads a word.
  uint64_t active() const {
    return active_();
  }

  // The cached bytes. MLX's function takes a mutex; once its values have proved
  // to be those of the allocator's own word, the word is read instead, unless
  // somebody holds that mutex. Called with the books locked.
  uint64_t cache() {
    if (proofs_ >= kProofs && mutex_is_free()) {
      return __atomic_load_n(cache_word_, __ATOMIC_RELAXED);
    }
    return cache_by_function();
  }

  // The word through which the CPU's cache frees a buffer, holding that mutex;
  // nullptr when this allocator has none.
  void** cache_free_word() const;

  // The cache limit in bytes, -1 where it can't be told.
  int64_t cache_limit() const;

 private:
  static constexpr int kProofs = 16;

  bool mutex_is_free() const {
    return __atomic_load_n(mutex_word_, __ATOMIC_ACQUIRE) == 0;
  }
  bool knows_layout() const;
  uint64_t cache_by_function();

  abi::CounterFn active_ = nullptr;
  abi::CounterFn cache_ = nullptr;
  abi::CounterFn peak_ = nullptr;
  abi::CounterFn memory_limit_ = nullptr;
  const char* cpu_allocator_ = nullptr; // the object, if it is the CPU's
  const uint64_t* cache_word_ = nullptr;
  const int* mutex_word_ = nullptr;
  uint64_t last_ = 0;
  int proofs_ = 0; // how often word and function agreed on a new value
};

} // namespace mlxmem
