// MLX's cache and memory limits as they change during a session. They are seen
// by value, whoever sets them: a limit that is set and set back between two
// looks goes unseen, but for CUDA, whose tape has each. Not synchronised.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mlx_counters.h"

namespace mlxmem {

enum class Limit : uint32_t { Cache, Memory };

// The record that Python reads, see _hook.py.
struct LimitChange {
  uint64_t event; // number of the next one
  int64_t timestamp_us; // since the session began
  uint64_t previous; // bytes
  uint64_t value;
  uint32_t thread_id; // that noticed it
  Limit which;
};
static_assert(sizeof(LimitChange) == 40, "_hook.py reads 40 bytes");

class LimitChanges {
 public:
  static constexpr size_t kMost = 10000; // that are kept, the last ones

  // What was allocated for changes stays, for the next session.
  void start(const Limits& limits) {
    seen_ = limits;
    kept_.clear();
    count_ = 0;
  }

  const Limits& seen() const {
    return seen_;
  }
  bool is_new(const Limits& limits) const {
    return limits.cache != seen_.cache || limits.memory != seen_.memory;
  }

  // moment: where and when the new limits were noticed, and by whom; the rest
  // of it is filled in. Throws std::bad_alloc.
  void note(const Limits& limits, const LimitChange& moment);

  // Oldest first. Throws std::bad_alloc.
  std::vector<LimitChange> copy() const;

 private:
  void note_one(
      Limit which,
      uint64_t value,
      uint64_t* seen,
      const LimitChange& moment);

  Limits seen_;
  std::vector<LimitChange> kept_; // a ring once it is full
  uint64_t count_ = 0; // since the session began
};

} // namespace mlxmem
