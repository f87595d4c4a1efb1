// The C functions that Python calls through ctypes. Strings are UTF-8; a
// function that can fail returns 0 or an error code and writes a message.

#pragma once

#include <cstddef>
#include <cstdint>

#include "cache_contents.h"
#include "event.h"
#include "limit_changes.h"
#include "live_nodes.h"
#include "node_samples.h"
#include "out_of_memory.h"

#if defined(_WIN32)
#define MLXMEM_API extern "C" __declspec(dllexport)
#else
#define MLXMEM_API extern "C" __attribute__((visibility("default")))
#endif

enum mlxmem_status {
  MLXMEM_OK = 0,
  MLXMEM_UNSUPPORTED = 1, // a fact about MLX does not hold; nothing changed
  MLXMEM_NO_MEMORY = 2,
  MLXMEM_NOT_RESTORED = 3, // somebody else changed a patched word meanwhile
};

struct mlxmem_totals {
  uint64_t active, cache, peak; // bytes, now or at the session's end
  uint64_t active_at_enable, cache_at_enable, peak_at_enable; // bytes
  int64_t start_us; // Unix epoch, microseconds
  uint64_t events, dropped, max_entries;
  uint64_t live_buffers, allocations, reuses, frees;
  uint64_t unexplained; // bytes
};

struct mlxmem_copy {
  mlxmem_totals totals;
  uint64_t n_events;
  const mlxmem::Event* events; // oldest first
  uint64_t n_buffers;
  const mlxmem::Event* buffers; // there now, last event no longer retained
  void* owner; // for mlxmem_free_copy
};

struct mlxmem_nodes {
  uint64_t n_live;
  const mlxmem::LiveNode* live;
  uint64_t n_samples;
  const mlxmem::NodeSample* samples; // oldest first
  void* owner; // for mlxmem_free_nodes; null: nothing is known of the nodes
};

struct mlxmem_times {
  uint64_t got_new, got_new_ns; // calls that were measured, nanoseconds
  uint64_t reused, reused_ns;
};

// A fact that attach relies on: what it is about, what it says, what was found,
// what is said of it where it does not hold, and whether it holds.
typedef void (*mlxmem_fact_visitor)(
    const char* group,
    const char* text,
    const char* found,
    const char* otherwise,
    int holds);
// Words that attach changes: what they are, of which library, "" for memory
// that is no library's, and how many.
typedef void (
    *mlxmem_patch_visitor)(const char* what, const char* image, uint64_t count);

// What only Metal's allocator has, as it is now. Limits in bytes, resources in
// buffers, cached ones included.
struct mlxmem_metal {
  uint64_t gc_limit, wired_limit, resources, resource_limit;
};

struct mlxmem_word {
  uint64_t address, original, replacement;
};

// Checks the running MLX and puts the probes in; no effect when they are in.
MLXMEM_API int mlxmem_attach(char* message, size_t message_size);
// Checks the running MLX as mlxmem_attach does, and changes no word of it;
// while the probes are in, visits what was found when they were put in. A fact
// is visited as soon as it was checked, and may call nothing of this file. The
// facts end with the first that does not hold: the later ones depend on it.
// Then there are no patches, and MLXMEM_UNSUPPORTED is returned.
MLXMEM_API int mlxmem_check(
    mlxmem_fact_visitor fact,
    mlxmem_patch_visitor patch,
    char* message,
    size_t message_size);
// Restores every word.
MLXMEM_API int mlxmem_detach(char* message, size_t message_size);
// A session can start while attached. max_entries 0: unlimited.
MLXMEM_API void mlxmem_start_session(uint64_t max_entries);
MLXMEM_API void mlxmem_stop_session(void);
MLXMEM_API int mlxmem_is_enabled(void);
// Whether a session ended because memory for its events ran out.
MLXMEM_API int mlxmem_ran_out_of_memory(void);

// How many events the session recorded, dropped ones included, and how many
// microseconds it runs, or ran.
MLXMEM_API void mlxmem_position(uint64_t* events, int64_t* us);

// The function that gives the id of the calling thread's Python stack, 0 when
// it holds no GIL; and whether it is asked.
MLXMEM_API void mlxmem_set_traceback_capture_func(uint32_t (*capture)(void));
MLXMEM_API void mlxmem_set_traceback_tracking(int tracking);

// A copy of the session as it is now; with_events 0: the totals only.
MLXMEM_API int mlxmem_copy_session(int with_events, mlxmem_copy* out);
MLXMEM_API void mlxmem_free_copy(mlxmem_copy* copy);
// The array nodes of the session that live, and their totals over its time.
MLXMEM_API int mlxmem_copy_nodes(mlxmem_nodes* out);
MLXMEM_API void mlxmem_free_nodes(mlxmem_nodes* nodes);
// Writes up to capacity of the session's failed allocations, the last ones and
// the oldest first, and returns how many there are.
MLXMEM_API size_t
mlxmem_copy_failures(mlxmem::FailedAllocation* out, size_t capacity);
// Who is told of one before MLX is, see out_of_memory.h; handle null: nobody.
MLXMEM_API void mlxmem_set_failure_handler(
    void (*handle)(const mlxmem::FailedAllocation*),
    void* (*current_state)(void),
    void* (*own_state)(void));
// Writes up to capacity of the changes of MLX's limits in the session, the last
// ones and the oldest first, and returns how many there are.
MLXMEM_API size_t
mlxmem_copy_limit_changes(mlxmem::LimitChange* out, size_t capacity);
// The limits in bytes when the session began, -1 where they are not known.
MLXMEM_API void mlxmem_limits_at_start(
    int64_t* cache_limit,
    int64_t* memory_limit);
// Writes up to capacity of the buffers that lay in MLX's cache when the session
// began, the oldest first, and to *count how many there were. 0: not known.
MLXMEM_API int mlxmem_cache_at_start(
    mlxmem::CachedBuffer* out,
    size_t capacity,
    size_t* count);
// What the allocator's malloc took in the session. 0: it is not measured.
MLXMEM_API int mlxmem_allocator_times(mlxmem_times* out);
// nullptr beyond the last primitive.
MLXMEM_API const char* mlxmem_primitive_name(uint32_t id);

// Patches libraries that were loaded since; the number of words, or -1.
MLXMEM_API int64_t mlxmem_attach_new_images(char* message, size_t message_size);
// Writes up to capacity changed words and returns how many there are.
MLXMEM_API size_t mlxmem_patched_words(mlxmem_word* out, size_t capacity);
// "cpu", "cuda", "metal"; "" before the first attach.
MLXMEM_API void mlxmem_backend(char* out, size_t size);
// The cache limit in bytes, -1 where this MLX does not show it.
MLXMEM_API int64_t mlxmem_cache_limit(void);
// 0: the allocator is not Metal's, or its words are not known.
MLXMEM_API int mlxmem_metal_resources(mlxmem_metal* out);
