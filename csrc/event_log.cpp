#include "event_log.h"

#include <algorithm>

namespace mlxmem {

void EventLog::reset(uint64_t max_entries) {
  chunks_.clear();
  chunks_.shrink_to_fit();
  free_ = free_end_ = nullptr;
  max_entries_ = max_entries;
  next_ = 0;
}

void EventLog::next_run() {
  uint64_t position = max_entries_ ? next_ % max_entries_ : next_;
  size_t chunk = position / kChunk;
  if (chunk == chunks_.size()) {
    chunks_.push_back(std::unique_ptr<Event[]>(new Event[kChunk]));
  }
  uint64_t end = (chunk + 1) * kChunk;
  if (max_entries_) {
    end = std::min(end, max_entries_);
  }
  free_ = &chunks_[chunk][position % kChunk];
  free_end_ = free_ + (end - position);
}

void EventLog::copy_to(Event* out) const {
  uint64_t n = next_ - first();
  uint64_t position = max_entries_ ? first() % max_entries_ : 0;
  while (n) {
    uint64_t in_chunk = position % kChunk;
    uint64_t run = std::min<uint64_t>(n, kChunk - in_chunk);
    if (max_entries_) {
      run = std::min(run, max_entries_ - position);
    }
    const Event* from = &chunks_[position / kChunk][in_chunk];
    out = std::copy(from, from + run, out);
    n -= run;
    position += run;
    if (position == max_entries_) {
      position = 0;
    }
  }
}

} // namespace mlxmem
