#include "hook_api.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <new>

#include "attach.h"
#include "cache_returns.h"
#include "image.h"
#include "originals.h"
#include "primitive_names.h"
#include "probes.h"
#include "session.h"

using namespace mlxmem;

namespace {

void write_text(const std::string& text, char* out, size_t size) {
  if (out && size) {
    std::snprintf(out, size, "%s", text.c_str());
  }
}

// A child of fork() has one thread, and no session: it must find every lock
// free and MLX as it was before the attach.
std::vector<uintptr_t>* images_before_fork = nullptr;

void before_fork() {
  bool attached = is_attached();
  auto images = attached ? Image::loaded_bases() : std::vector<uintptr_t>();
  lock_attach();
  images_before_fork->swap(images);
  lock_books();
  lock_primitive_names();
  lock_cache_returns();
}

void unlock_all() {
  unlock_cache_returns();
  unlock_primitive_names();
  unlock_books();
  unlock_attach();
}

void in_child() {
  unlock_all();
  forget_session();
  set_failure_handler({});
  forget_thread_state();
  try {
    detach_in_child(*images_before_fork);
  } catch (const std::exception&) {
    // The probes stay, and pass through: nothing records in this process.
  }
}

void handle_forks() {
  if (!images_before_fork) {
    images_before_fork = new std::vector<uintptr_t>;
  }
  static int registered = pthread_atfork(before_fork, unlock_all, in_child);
  (void)registered;
}

std::string path_of(const Patch& patch, const std::vector<Image>& images) {
  for (auto& image : images) {
    if (patch.image_base && image.base() == patch.image_base) {
      return image.path();
    }
  }
  return "";
}

template <typename Work>
int guarded(char* message, size_t message_size, Work&& work) {
  try {
    return work();
  } catch (const AttachError& error) {
    write_text(error.what(), message, message_size);
    return MLXMEM_UNSUPPORTED;
  } catch (const std::bad_alloc&) {
    write_text("out of memory", message, message_size);
    return MLXMEM_NO_MEMORY;
  }
}

} // namespace

int mlxmem_attach(char* message, size_t message_size) {
  return guarded(message, message_size, [] {
    handle_forks();
    bool was_attached = is_attached();
    attach();
    try {
      attach_new_images();
    } catch (...) {
      if (!was_attached) {
        detach();
      }
      throw;
    }
    return MLXMEM_OK;
  });
}

int mlxmem_check(
    mlxmem_fact_visitor visit_fact,
    mlxmem_patch_visitor visit_patch,
    char* message,
    size_t message_size) {
  return guarded(message, message_size, [&] {
    Check check = check_attach([&](const Fact& fact) {
      visit_fact(
          fact.group.c_str(),
          fact.text.c_str(),
          fact.found.c_str(),
          fact.otherwise.c_str(),
          fact.holds);
    });
    std::map<std::pair<std::string, std::string>, uint64_t> counts;
    for (auto& patch : check.patches) {
      ++counts[{patch.what, path_of(patch, check.images)}];
    }
    for (auto& [place, count] : counts) {
      visit_patch(place.first.c_str(), place.second.c_str(), count);
    }
    write_text(check.refusal, message, message_size);
    return check.refusal.empty() ? MLXMEM_OK : MLXMEM_UNSUPPORTED;
  });
}

int mlxmem_detach(char* message, size_t message_size) {
  return guarded(message, message_size, [&] {
    std::string changed = detach();
    write_text(changed, message, message_size);
    return changed.empty() ? MLXMEM_OK : MLXMEM_NOT_RESTORED;
  });
}

void mlxmem_start_session(uint64_t max_entries) {
  start_session(max_entries);
}

void mlxmem_stop_session(void) {
  stop_session();
}

int mlxmem_is_enabled(void) {
  return is_recording();
}

int mlxmem_ran_out_of_memory(void) {
  return ran_out_of_memory();
}

void mlxmem_position(uint64_t* events, int64_t* us) {
  Position position = session_position();
  *events = position.events;
  *us = position.us;
}

void mlxmem_set_traceback_capture_func(uint32_t (*capture)(void)) {
  set_traceback_capture_func(capture);
}

void mlxmem_set_traceback_tracking(int tracking) {
  set_traceback_tracking(tracking != 0);
}

int mlxmem_copy_session(int with_events, mlxmem_copy* out) {
  return guarded(nullptr, 0, [&] {
    auto copy = std::make_unique<SessionCopy>(copy_session(with_events != 0));
    auto& t = copy->totals;
    out->totals = {
        t.now.active,
        t.now.cache,
        t.now.peak,
        t.at_start.active,
        t.at_start.cache,
        t.at_start.peak,
        t.start_us,
        t.events,
        t.dropped,
        t.max_entries,
        t.live_buffers,
        t.allocations,
        t.reuses,
        t.frees,
        t.unexplained};
    out->n_events = copy->events.size();
    out->events = copy->events.data();
    out->n_buffers = copy->older_buffers.size();
    out->buffers = copy->older_buffers.data();
    out->owner = copy.release();
    return MLXMEM_OK;
  });
}

void mlxmem_free_copy(mlxmem_copy* copy) {
  delete static_cast<SessionCopy*>(copy->owner);
  copy->owner = nullptr;
}

int mlxmem_copy_nodes(mlxmem_nodes* out) {
  return guarded(nullptr, 0, [&] {
    *out = {};
    if (auto copy = copy_nodes()) {
      out->n_live = copy->live.size();
      out->live = copy->live.data();
      out->n_samples = copy->samples.size();
      out->samples = copy->samples.data();
      out->owner = copy.release();
    }
    return MLXMEM_OK;
  });
}

void mlxmem_free_nodes(mlxmem_nodes* nodes) {
  delete static_cast<NodesCopy*>(nodes->owner);
  nodes->owner = nullptr;
}

size_t mlxmem_copy_failures(FailedAllocation* out, size_t capacity) {
  size_t n = 0;
  guarded(nullptr, 0, [&] {
    auto failures = copy_failures();
    n = failures.size();
    std::copy_n(failures.begin(), std::min(n, capacity), out);
    return MLXMEM_OK;
  });
  return n;
}

size_t mlxmem_copy_limit_changes(LimitChange* out, size_t capacity) {
  size_t n = 0;
  guarded(nullptr, 0, [&] {
    auto changes = copy_limit_changes();
    n = changes.size();
    std::copy_n(changes.begin(), std::min(n, capacity), out);
    return MLXMEM_OK;
  });
  return n;
}

void mlxmem_limits_at_start(int64_t* cache_limit, int64_t* memory_limit) {
  auto limits = limits_at_start();
  *cache_limit = limits.cache;
  *memory_limit = limits.memory;
}

int mlxmem_cache_at_start(CachedBuffer* out, size_t capacity, size_t* count) {
  *count = 0;
  int is_known = 0;
  guarded(nullptr, 0, [&] {
    auto cache = cache_at_start();
    *count = cache.buffers.size();
    std::copy_n(cache.buffers.begin(), std::min(*count, capacity), out);
    is_known = cache.is_known;
    return MLXMEM_OK;
  });
  return is_known;
}

int mlxmem_allocator_times(mlxmem_times* out) {
  auto times = allocator_times();
  *out = {
      times.got_new.count,
      times.got_new.ns,
      times.reused.count,
      times.reused.ns};
  return !originals.tape_mutex; // its threads do not time their calls
}

void mlxmem_set_failure_handler(
    void (*handle)(const FailedAllocation*),
    void* (*current_state)(void),
    void* (*own_state)(void)) {
  set_failure_handler({handle, current_state, own_state});
}

const char* mlxmem_primitive_name(uint32_t id) {
  return id < (1u << 16) ? primitive_name(static_cast<PrimitiveId>(id))
                         : nullptr;
}

int64_t mlxmem_attach_new_images(char* message, size_t message_size) {
  int64_t changed = -1;
  guarded(message, message_size, [&] {
    changed = static_cast<int64_t>(attach_new_images());
    return MLXMEM_OK;
  });
  return changed;
}

size_t mlxmem_patched_words(mlxmem_word* out, size_t capacity) {
  auto words = patched_words();
  for (size_t i = 0; i < std::min(capacity, words.size()); ++i) {
    out[i] = {
        reinterpret_cast<uint64_t>(words[i].address),
        reinterpret_cast<uint64_t>(words[i].original),
        reinterpret_cast<uint64_t>(words[i].replacement)};
  }
  return words.size();
}

void mlxmem_backend(char* out, size_t size) {
  write_text(backend(), out, size);
}

int64_t mlxmem_cache_limit(void) {
  return cache_limit();
}

int mlxmem_metal_resources(mlxmem_metal* out) {
  MetalResources found;
  if (!metal_resources(&found)) {
    return 0;
  }
  *out = {
      found.gc_limit, found.wired_limit, found.resources, found.resource_limit};
  return 1;
}
