// What the probes stand in front of: MLX's functions, its allocator and its
// counters.

#pragma once

#include <pthread.h>

#include "mlx_abi.h"
#include "mlx_counters.h"

namespace mlxmem {

// MLX's own functions. Set once, before the first patch; the probes stay
// callable after the patches are gone, for threads that are still inside.
struct Originals {
  abi::MallocFn malloc = nullptr;
  abi::FreeFn free = nullptr;
  abi::SizeFn size = nullptr;
  abi::MakeBufferFn make_buffer = nullptr;
  abi::FreeFn release = nullptr;
  abi::CacheFreeFn cache_free = nullptr;
  abi::CacheInvoker cache_get_size = nullptr; // these three: of the tape
  abi::CacheInvoker cache_free_invoker = nullptr;
  abi::UnlockFn mutex_unlock = nullptr;
  abi::DescInitFn desc_init = nullptr;
  abi::DescDtor desc_destroy = nullptr;
  abi::OperatorNewFn operator_new = nullptr; // of macOS
  abi::SetDataFn set_data = nullptr;
  abi::SetDataLongFn set_data_long = nullptr;
  abi::SetDataOffsetFn set_data_offset = nullptr;
  abi::SetDataOwnedFn set_data_owned = nullptr;
  abi::SetDataOwnedLongFn set_data_owned_long = nullptr;
  abi::EnqueueFn enqueue = nullptr;
  abi::ReleaseGilFn release_gil = nullptr;
  abi::AcquireGilFn acquire_gil = nullptr;
  void* allocator = nullptr; // the object
  bool uses_host_memory = false; // the CPU's allocator
  bool notes_cache_returns = false; // what the cache frees with is patched
  // Where not every allocation takes the vtable: the allocator's mutex, under
  // which allocator_tape.h notes what it does.
  pthread_mutex_t* tape_mutex = nullptr;
};
extern Originals originals;
extern MlxCounters mlx_counters;

} // namespace mlxmem
