// What would have happened under a policy.

#pragma once

#include "replay.h"

namespace mlxmem::cache {

class Prediction : public Replay {
 public:
  Prediction(
      const Policy& policy,
      const Rows& rows,
      const Cached* cached,
      size_t cached_count,
      uint64_t unknown,
      uint64_t active,
      bool overrides_cache_limit, // whatever limits the program set
      const Outputs& outputs)
      : Replay(policy, rows, cached, cached_count, unknown, active, false),
        overrides_cache_limit_(overrides_cache_limit) {
    outputs_ = outputs;
    classifies_ = outputs.outcomes != nullptr;
    if (overrides_cache_limit && excess()) {
      // Under this limit they would not have been there.
      list_released(cache_.give_back_unknown(excess()));
      for (uint32_t number : list_) {
        lose(buffers_[number].size, kNotKept, -1);
        take_from_cache(number);
        leave(number);
      }
      totals_.peak_cache = totals_.peak_reserved = 0;
      note_peaks();
    }
  }

  size_t run(size_t i, size_t count) override {
    size_t end = std::min(i + count, rows_.size());
    for (; i < end; ++i) {
      set_outputs(i);
      predict_row(i);
      if (outputs_.reserved) {
        outputs_.reserved[i] = totals_.active + cache_.bytes();
      }
    }
    return i;
  }

 private:
  void predict_row(size_t i) {
    const Row& row = rows_[i];
    switch (row.op) {
      case kAlloc:
        predict_allocation(i);
        break;
      case kFree: {
        uint32_t number = end_use(row, policy_.rounded(row.size));
        if (keeps(buffers_[number].size)) {
          add_to_cache(number);
          note_peaks();
        } else {
          lose(buffers_[number].size, kNotKept, limit_set_at_);
          leave(number);
        }
        break;
      }
      case kMakeBuffer:
        begin_use(i, foreign_buffer(row), false);
        break;
      case kRelease:
        leave(end_use(row, row.size));
        break;
      case kEvict:
        if (row.call == kUnseenClear) {
          list_all();
          evict_all(kCleared, i);
        }
        break;
      case kCallEnds:
        predict_call(row);
        break;
      default:
        break;
    }
  }

  void predict_allocation(size_t i) {
    const Row& row = rows_[i];
    uint64_t n = policy_.rounded(row.requested);
    uint32_t number = cache_.find(policy_, n);
    if (number != kNone) {
      take_from_cache(number);
      count(kHit, -1, row.requested);
      begin_use(i, number, true);
    } else {
      Loss why = why_missed(n);
      count(why.outcome, why.cause, row.requested);
      if (reclaims(n)) {
        list_released(to_reclaim(n));
        evict_all(kReclaimed, -1);
      }
      begin_use(i, new_buffer(n, row.address), false);
    }
    if (!policy_.trims_at_once && excess()) {
      list_released(excess());
      evict_all(kTrimmed, limit_set_at_);
    }
  }

  void predict_call(const Row& row) {
    switch (row.call) {
      case kClearCache:
        list_all();
        evict_all(kCleared, row.owner);
        break;
      case kSetCacheLimit:
        if (!overrides_cache_limit_) {
          set_cache_limit(row.size, row.owner);
          if (policy_.trims_at_once && excess()) {
            list_released(excess());
            evict_all(kTrimmed, row.owner);
          }
        }
        break;
      default:
        policy_.memory_limit = row.size;
    }
  }

  bool overrides_cache_limit_;
};

} // namespace mlxmem::cache
