// Replays what a program asked of MLX's allocator.
//
// A Prediction (predict.h) lets the model decide: what would have happened
// under this policy. A Following (follow.h) lets the recording decide, and
// counts where the model, which knows all that came before, would have decided
// otherwise. Here is what they have in common.

#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "buffer_cache.h"

namespace mlxmem::cache {

enum Op : uint8_t {
  kAlloc = 0,
  kFree = 1,
  kMakeBuffer = 2, // memory of somebody else, which no cache sees
  kRelease = 3,
  kEvict = 4, // recorded: the cache gave a buffer back
  kCallBegins = 5,
  kCallEnds = 6,
};

enum Call : uint8_t {
  kClearCache = 0,
  kSetCacheLimit = 1,
  kSetMemoryLimit = 2,
  kUnseenClear = 3, // at a kEvict: the first of a clear that no call explains
};

enum Outcome : uint8_t {
  kNotAsked = 0, // no allocation
  kHit = 1,
  kCold = 2, // no buffer of such a size was there before
  kInUse = 3, // all of such a size are in use, and no larger one is cached
  kOutsideWindow = 4, // a larger one was cached, too large to be taken
  kCleared = 5, // one was there and went: by clear_cache()
  kTrimmed = 6, // ..., for the cache limit
  kReclaimed = 7, // ..., for the memory limit
  kNotKept = 8, // one was there, and was not kept when it was freed
  kOutcomes = 9,
};

constexpr size_t kMostCalls = 256; // under way at a time

struct Row {
  uint64_t address;
  int64_t size; // of the buffer; the value of a call, bytes
  int64_t requested;
  int64_t owner; // row of the allocation, or of a call's beginning; -1 = none
  uint8_t op;
  uint8_t recorded; // allocation: taken from the cache; free: given to it
  uint8_t call;
  uint8_t after_look; // of an allocation, as in csrc/event.h
  uint8_t reserved[4];
};

struct Rows {
  const Row* first;
  size_t count;

  const Row& operator[](size_t i) const {
    return first[i];
  }
  size_t size() const {
    return count;
  }
};

struct Cached { // before the first row
  uint64_t address;
  uint64_t size;
};

struct Totals {
  uint64_t count[kOutcomes];
  uint64_t requested[kOutcomes]; // bytes
  uint64_t system_allocations; // buffers that the system had to give
  uint64_t system_bytes;
  uint64_t evictions;
  uint64_t evicted_bytes;
  uint64_t peak_active; // bytes, as the three below
  uint64_t peak_cache;
  uint64_t peak_reserved;
  uint64_t peak_waste; // of reused buffers that were in use at a time
  uint64_t waste; // over all reuses
  uint64_t active; // at the end
  uint64_t cache;
  uint64_t checked; // decisions of the recording
  uint64_t mismatches; // of these, how many the model takes otherwise
  uint64_t raced; // decisions that fit in another order of two threads
  uint64_t unseen; // runs of evictions that no call explains
};

class Replay {
 public:
  // What the replay writes, one for each row, or nullptr. A cause is the row of
  // the call that took what would have served, or that set the limit for which
  // it went; or -1. unseen: 1 at the first eviction of a clear that no call
  // explains. mismatches: up to `most` rows whose decision the model takes
  // otherwise.
  struct Outputs {
    uint8_t* outcomes = nullptr; // with it, causes
    int64_t* causes = nullptr;
    int64_t* reserved = nullptr; // bytes after the row
    uint8_t* unseen = nullptr;
    std::vector<int64_t>* mismatches = nullptr;
    size_t most_mismatches = 0;
  };

  virtual ~Replay() = default;

  // Goes on from row i for about `count` rows, and returns where it stands.
  virtual size_t run(size_t i, size_t count) = 0;
  virtual void finish() {
    totals_.cache = cache_.bytes();
  }

  const Totals& totals() const {
    return totals_;
  }

 protected:
  Replay(
      const Policy& policy,
      const Rows& rows,
      const Cached* cached, // oldest first
      size_t cached_count,
      uint64_t unknown, // bytes that stay cached, whatever they are
      uint64_t active,
      bool follows)
      : policy_(policy), rows_(rows), cache_(buffers_), follows_(follows) {
    totals_.active = active;
    cache_.add_unknown(unknown);
    for (size_t k = 0; k < cached_count; ++k) {
      add_to_cache(new_buffer(cached[k].size, cached[k].address));
    }
    of_row_.assign(rows.size(), kNone);
    note_peaks();
  }

  struct Loss { // a buffer that the cache had, or could have had
    Outcome outcome;
    int64_t cause;
  };
  void set_outputs(size_t i) {
    row_ = i;
    if (classifies_) {
      outputs_.outcomes[i] = kNotAsked;
      outputs_.causes[i] = -1;
    }
  }

  void note_peaks() {
    uint64_t reserved = totals_.active + cache_.bytes();
    totals_.peak_active = std::max(totals_.peak_active, totals_.active);
    totals_.peak_cache = std::max(totals_.peak_cache, cache_.bytes());
    totals_.peak_reserved = std::max(totals_.peak_reserved, reserved);
  }

  void add_to_cache(uint32_t number) {
    cache_.add(number);
    if (follows_) {
      cached_at_[buffers_[number].address] = number;
    }
  }

  void take_from_cache(uint32_t number) {
    cache_.remove(number);
    if (!follows_) {
      return;
    }
    auto found = cached_at_.find(buffers_[number].address);
    if (found != cached_at_.end() && found->second == number) {
      cached_at_.erase(found);
    }
  }

  void evict(uint32_t number, Outcome outcome, int64_t cause) {
    uint64_t size = buffers_[number].size;
    take_from_cache(number);
    totals_.evictions += 1;
    totals_.evicted_bytes += size;
    lose(size, outcome, cause);
    leave(number);
  }

  void leave(uint32_t number) {
    if (buffers_[number].in_slab) {
      --in_slab_;
    }
    --resources_;
    buffers_.remove(number);
  }

  void lose(uint64_t size, Outcome outcome, int64_t cause) {
    if (classifies_) {
      lost_.emplace(size, Loss{outcome, cause});
    }
  }

  void count(Outcome outcome, int64_t cause, uint64_t requested) {
    totals_.count[outcome] += 1;
    totals_.requested[outcome] += requested;
    if (classifies_) {
      outputs_.outcomes[row_] = outcome;
      outputs_.causes[row_] = cause;
    }
  }

  // Why nothing serves a request of n bytes.
  Loss why_missed(uint64_t n) {
    if (!classifies_) {
      return {kCold, -1};
    }
    uint64_t end = policy_.window_end(n);
    auto lost = lost_.lower_bound(n);
    if (lost != lost_.end() && lost->first < end) {
      Loss loss = lost->second;
      lost_.erase(lost); // it would have served once
      return loss;
    }
    if (cache_.has_larger(n)) {
      return {kOutsideWindow, -1};
    }
    auto live = live_.lower_bound(n);
    bool in_use = live != live_.end() && live->first < end;
    return {in_use ? kInUse : kCold, -1};
  }

  void begin_use(size_t row, uint32_t number, bool reused) {
    Buffer& buffer = buffers_[number];
    of_row_[row] = number;
    totals_.active += buffer.size;
    if (classifies_ && !buffer.foreign) {
      ++live_[buffer.size];
    }
    buffer.waste = 0;
    if (reused) {
      buffer.waste =
          buffer.size - std::min<uint64_t>(buffer.size, rows_[row].requested);
      totals_.waste += buffer.waste;
      waste_ += buffer.waste;
      totals_.peak_waste = std::max(totals_.peak_waste, waste_);
    } else if (!buffer.in_slab && !buffer.foreign) {
      totals_.system_allocations += 1;
      totals_.system_bytes += buffer.size;
    }
    note_peaks();
  }

  uint32_t foreign_buffer(const Row& row) {
    uint32_t number = buffers_.add(row.size, row.address);
    buffers_[number].foreign = true;
    ++resources_;
    return number;
  }

  uint32_t new_buffer(uint64_t size, uint64_t address) {
    uint32_t number = buffers_.add(size, address);
    if (size <= policy_.slab_size && in_slab_ < policy_.slab_blocks) {
      buffers_[number].in_slab = true;
      ++in_slab_;
    }
    ++resources_;
    return number;
  }

  // The buffer of an allocation, which is in use no more. One from before the
  // first row is made up.
  uint32_t end_use(const Row& row, uint64_t size) {
    uint32_t number = row.owner >= 0 ? of_row_[row.owner] : kNone;
    if (number == kNone) {
      number = new_buffer(size, row.address);
    } else {
      of_row_[row.owner] = kNone;
      if (classifies_ && !buffers_[number].foreign) {
        auto live = live_.find(buffers_[number].size);
        if (--live->second == 0) {
          live_.erase(live);
        }
      }
      waste_ -= buffers_[number].waste;
    }
    totals_.active -= std::min(totals_.active, buffers_[number].size);
    return number;
  }

  bool keeps(uint64_t size) const {
    if (!policy_.has_cache) {
      return false;
    }
    return policy_.keeps_only_whole
        ? cache_.bytes() + size <= policy_.cache_limit
        : cache_.bytes() < policy_.cache_limit;
  }

  // How many bytes a new buffer of this size makes the cache give back.
  uint64_t to_reclaim(uint64_t size) const {
    uint64_t needed = totals_.active + cache_.bytes() + size;
    if (policy_.reclaim == kAtCollection) {
      uint64_t limit = policy_.collection_limit();
      if (needed >= limit) {
        return needed - limit;
      }
      // MLX subtracts all the same, below zero, which takes everything.
      return resources_ >= policy_.resource_limit ? UINT64_MAX : 0;
    }
    if (policy_.reclaim == kAboveLimit && needed > policy_.memory_limit) {
      return needed - policy_.memory_limit;
    }
    return 0;
  }

  bool reclaims(uint64_t size) const {
    return policy_.reclaim != kNever && cache_.count() && to_reclaim(size);
  }

  uint64_t excess() const {
    return cache_.bytes() - std::min(cache_.bytes(), policy_.cache_limit);
  }

  bool evicts_when_allocating() const {
    return policy_.reclaim != kNever || !policy_.trims_at_once;
  }

  void list_all() {
    list_.clear();
    cache_.visit_all(kNone, [&](uint32_t number) {
      list_.push_back(number);
      return true;
    });
  }

  void list_released(uint64_t bytes) {
    list_.clear();
    cache_.visit_released(bytes, kNone, [&](uint32_t number) {
      list_.push_back(number);
      return true;
    });
  }

  void evict_all(Outcome outcome, int64_t cause) {
    for (uint32_t number : list_) {
      evict(number, outcome, cause);
    }
  }

  void set_cache_limit(uint64_t limit, int64_t row) {
    policy_.cache_limit = limit;
    limit_set_at_ = row;
  }

  Policy policy_;
  Rows rows_;
  Buffers buffers_;
  BufferCache cache_;
  Totals totals_ = {};
  std::vector<uint32_t> of_row_; // buffer of each allocation that is in use
  std::vector<uint32_t> list_; // of the moment
  uint64_t in_slab_ = 0;
  uint64_t resources_ = 0;
  uint64_t waste_ = 0; // in use now
  int64_t limit_set_at_ = -1; // row of the call that set the cache limit
  bool follows_;

  bool classifies_ = false;
  Outputs outputs_;
  size_t row_ = 0; // that is replayed
  std::multimap<uint64_t, Loss> lost_; // by size
  std::map<uint64_t, uint64_t> live_; // size -> buffers in use

  std::unordered_map<uint64_t, uint32_t> cached_at_; // by address
};

} // namespace mlxmem::cache
