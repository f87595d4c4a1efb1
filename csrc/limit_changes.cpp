#include "limit_changes.h"

namespace mlxmem {

void LimitChanges::note(const Limits& limits, const LimitChange& moment) {
  note_one(Limit::Cache, limits.cache, &seen_.cache, moment);
  note_one(Limit::Memory, limits.memory, &seen_.memory, moment);
}

void LimitChanges::note_one(
    Limit which,
    uint64_t value,
    uint64_t* seen,
    const LimitChange& moment) {
  if (value == *seen) {
    return;
  }
  LimitChange change = moment;
  change.which = which;
  change.previous = *seen;
  change.value = value;
  if (kept_.size() < kMost) {
    kept_.push_back(change);
  } else {
    kept_[count_ % kMost] = change;
  }
  ++count_;
  *seen = value;
}

std::vector<LimitChange> LimitChanges::copy() const {
  std::vector<LimitChange> changes;
  changes.reserve(kept_.size());
  size_t oldest = kept_.size() < kMost ? 0 : count_ % kMost;
  changes.insert(changes.end(), kept_.begin() + oldest, kept_.end());
  changes.insert(changes.end(), kept_.begin(), kept_.begin() + oldest);
  return changes;
}

} // namespace mlxmem
