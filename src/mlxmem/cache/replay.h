// Replays what a program asked of MLX's allocator.
//
// predict() lets the model decide: what would have happened under this policy.
// follow() lets the recording decide, and counts where the model, which knows
// all that came before, would have decided otherwise.

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
  uint8_t reserved[5];
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
  uint64_t raced; // runs of evictions that fit in another order of two threads
  uint64_t unseen; // runs of evictions that no call explains
};

class Replay {
 public:
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

  void begin_predict(bool overrides_cache_limit, const Outputs& outputs) {
    overrides_cache_limit_ = overrides_cache_limit;
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

  void begin_follow(const Outputs& outputs) {
    outputs_ = outputs;
    classifies_ = true;
  }

  // Both go on from row i for about `count` rows, and return where they stand.
  size_t predict(size_t i, size_t count) {
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

  size_t follow(size_t i, size_t count) {
    size_t end = std::min(i + count, rows_.size());
    while (i < end) {
      set_outputs(i);
      i = follow_row(i);
      for (auto& call : calls_) {
        call.least_cached = std::min(call.least_cached, cache_.bytes());
      }
    }
    return i;
  }

  void finish() {
    if (!pending_.empty()) {
      explain_run(pending_.front(), pending_.size(), rows_.size());
      pending_.clear();
    }
    totals_.cache = cache_.bytes();
  }

  const Totals& totals() const {
    return totals_;
  }

 private:
  struct Loss { // a buffer that the cache had, or could have had
    Outcome outcome;
    int64_t cause;
  };
  struct OpenCall {
    size_t row;
    Call call;
    uint64_t value;
    bool took_effect;
    bool evicted; // what it had to
    uint64_t least_cached; // since it began
  };

  // ---- what both replays share ------------------------------------------

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

  // ---- predict -----------------------------------------------------------

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

  void set_cache_limit(uint64_t limit, int64_t row) {
    policy_.cache_limit = limit;
    limit_set_at_ = row;
  }

  // ---- follow ------------------------------------------------------------

  void check(bool agrees, size_t i) {
    totals_.checked += 1;
    if (!agrees) {
      totals_.mismatches += 1;
      if (outputs_.mismatches->size() < outputs_.most_mismatches) {
        outputs_.mismatches->push_back(i);
      }
    }
  }

  uint32_t cached_at(uint64_t address) const {
    auto found = cached_at_.find(address);
    return found == cached_at_.end() ? kNone : found->second;
  }

  // Returns the row to go on with.
  size_t follow_row(size_t i) {
    const Row& row = rows_[i];
    if (!pending_.empty() && row.op != kAlloc && row.op != kEvict) {
      explain_run(pending_.front(), pending_.size(), rows_.size());
      pending_.clear();
    }
    switch (row.op) {
      case kAlloc:
        follow_allocation(i);
        break;
      case kFree:
        follow_free(i);
        break;
      case kMakeBuffer:
        begin_use(i, foreign_buffer(row), false);
        break;
      case kRelease:
        leave(end_use(row, row.size));
        break;
      case kEvict:
        return follow_evictions(i);
      case kCallBegins:
        if (calls_.size() == kMostCalls) {
          calls_.erase(calls_.begin()); // of a damaged file
        }
        calls_.push_back(
            {i,
             static_cast<Call>(row.call),
             static_cast<uint64_t>(row.size),
             false,
             false,
             cache_.bytes()});
        break;
      case kCallEnds:
        end_call(i);
        break;
    }
    return i + 1;
  }

  void follow_allocation(size_t i) {
    const Row& row = rows_[i];
    uint64_t n = policy_.rounded(row.requested);
    uint32_t expected = policy_.has_cache ? cache_.find(policy_, n) : kNone;
    uint32_t recorded = row.recorded ? cached_at(row.address) : kNone;
    bool agrees = expected == recorded &&
        static_cast<bool>(row.recorded) == (expected != kNone);
    if (expected == kNone) {
      agrees &= static_cast<uint64_t>(row.size) == n;
      follow_own_evictions(reclaims(n) ? to_reclaim(n) : 0, kReclaimed, -1);
      if (recorded != kNone) { // a damaged file may name what has just gone
        recorded = cached_at(row.address);
      }
    }
    check(agrees, i);
    if (recorded != kNone) {
      take_from_cache(recorded);
      count(kHit, -1, row.requested);
      begin_use(i, recorded, true);
    } else if (row.recorded) { // nobody knew that it was cached
      count(kHit, -1, row.requested);
      begin_use(i, new_buffer(row.size, row.address), true);
    } else {
      Loss why = why_missed(n);
      count(why.outcome, why.cause, row.requested);
      begin_use(i, new_buffer(row.size, row.address), false);
    }
    if (!policy_.trims_at_once) {
      follow_own_evictions(excess(), kTrimmed, limit_set_at_);
    }
    if (!pending_.empty()) {
      explain_run(pending_.front(), pending_.size(), rows_.size());
      pending_.clear();
    }
  }

  // What the allocator gives back by itself stands before its allocation.
  void follow_own_evictions(uint64_t bytes, Outcome outcome, int64_t cause) {
    if (!bytes || !cache_.count()) {
      return;
    }
    size_t first = pending_.empty() ? row_ : pending_.front();
    if (!run_begins_with(first, pending_.size(), [&](auto&& visit) {
          cache_.visit_released(bytes, kNone, visit);
        })) {
      check(false, first);
      return;
    }
    for (size_t k = 0; k < list_.size(); ++k) {
      check(true, first + k);
    }
    pending_.erase(pending_.begin(), pending_.begin() + list_.size());
    evict_all(outcome, cause);
  }

  void follow_free(size_t i) {
    const Row& row = rows_[i];
    uint32_t number = end_use(row, row.size);
    uint64_t size = buffers_[number].size;
    bool agrees = keeps(size) == static_cast<bool>(row.recorded);
    // A limit that is being set by another thread holds from somewhere on.
    for (auto& call : calls_) {
      if (!agrees && call.call == kSetCacheLimit && !call.took_effect) {
        uint64_t before = policy_.cache_limit;
        int64_t before_row = limit_set_at_;
        set_cache_limit(call.value, call.row);
        agrees = keeps(size) == static_cast<bool>(row.recorded);
        call.took_effect = agrees;
        if (!agrees) {
          set_cache_limit(before, before_row);
        }
      }
    }
    check(agrees, i);
    if (row.recorded) {
      buffers_[number].address = row.address;
      add_to_cache(number);
      note_peaks();
    } else {
      lose(size, kNotKept, limit_set_at_);
      leave(number);
    }
  }

  size_t follow_evictions(size_t i) {
    size_t end = i;
    while (end < rows_.size() && rows_[end].op == kEvict) {
      ++end;
    }
    if (evicts_when_allocating() && calls_.empty()) {
      for (size_t k = i; k < end; ++k) {
        pending_.push_back(k);
      }
      return end;
    }
    return explain_run(i, end - i, end) ? end + 1 : end;
  }

  // Whether the evictions from row i on, at most `length`, begin with all the
  // buffers that visit() shows. If so they are in list_.
  template <typename Visit>
  bool run_begins_with(size_t i, size_t length, Visit&& visit) {
    list_.clear();
    bool same = true;
    visit([&](uint32_t number) {
      size_t k = list_.size();
      same = k < length && buffers_[number].address == rows_[i + k].address;
      if (same) {
        list_.push_back(number);
      }
      return same;
    });
    return same && !list_.empty();
  }

  // Shows what a call would give back now.
  template <typename Visit>
  void visit_taken(const OpenCall& call, uint32_t without, Visit&& visit) {
    if (call.call == kClearCache) {
      cache_.visit_all(without, visit);
    } else if (call.call == kSetCacheLimit && policy_.trims_at_once) {
      uint64_t bytes =
          cache_.bytes() - (without == kNone ? 0 : buffers_[without].size);
      if (bytes > call.value) {
        cache_.visit_released(bytes - call.value, without, visit);
      }
    }
  }

  bool explain_by_call(size_t* i, size_t* length, uint32_t without) {
    for (size_t k = calls_.size(); k-- > 0;) {
      OpenCall& call = calls_[k];
      if (call.evicted) {
        continue;
      }
      if (!run_begins_with(*i, *length, [&](auto&& visit) {
            visit_taken(call, without, visit);
          })) {
        continue;
      }
      size_t taken = list_.size();
      for (size_t n = 0; n < taken; ++n) {
        check(true, *i + n);
      }
      call.took_effect = call.evicted = true;
      bool clears = call.call == kClearCache;
      if (!clears) {
        set_cache_limit(call.value, call.row);
      }
      evict_all(clears ? kCleared : kTrimmed, call.row);
      *i += taken;
      *length -= taken;
      return true;
    }
    return false;
  }

  // Finds out why the cache gave back the buffers of rows [i, i + length).
  // `next` is the row after them, or none; true when that was followed, too.
  bool explain_run(size_t i, size_t length, size_t next) {
    bool took_next = false;
    while (length) {
      if (explain_by_call(&i, &length, kNone)) {
        continue;
      }
      // Two threads at once: the free before these, which still found its
      // place in the cache, or the allocation after them, may belong to the
      // other side.
      uint32_t freed = i ? cached_at(rows_[i - 1].address) : kNone;
      if (i && rows_[i - 1].op == kFree && rows_[i - 1].recorded &&
          freed != kNone && explain_by_call(&i, &length, freed)) {
        totals_.raced += 1;
        continue;
      }
      if (!took_next && next < rows_.size() && rows_[next].op == kAlloc &&
          rows_[next].recorded) {
        uint32_t taken = cached_at(rows_[next].address);
        uint64_t n = policy_.rounded(rows_[next].requested);
        if (taken != kNone && cache_.find(policy_, n) == taken &&
            explain_by_call(&i, &length, taken)) {
          set_outputs(next);
          follow_allocation(next);
          totals_.raced += 1;
          took_next = true;
          continue;
        }
      }
      explain_without_call(i, length);
      return took_next;
    }
    return took_next;
  }

  // Whether a call is under way that has to make the cache give buffers back.
  bool awaits_evictions() {
    bool found = false;
    for (auto& call : calls_) {
      if (!call.evicted) {
        visit_taken(call, kNone, [&](uint32_t) {
          found = true;
          return false;
        });
      }
    }
    return found;
  }

  bool are_oldest(size_t i, size_t length) {
    return run_begins_with(i, length, [&](auto&& visit) {
      uint32_t number = cache_.oldest();
      for (size_t k = 0; k < length && number != kNone; ++k) {
        if (!visit(number)) {
          return;
        }
        number = buffers_[number].newer;
      }
    });
  }

  void explain_without_call(size_t i, size_t length) {
    bool is_clear = run_begins_with(
        i, length, [&](auto&& visit) { cache_.visit_all(kNone, visit); });
    // A call that is under way would have been the reason: it does not fit.
    bool fits = (is_clear || are_oldest(i, length)) && !awaits_evictions();
    totals_.unseen += fits;
    if (fits && is_clear) {
      outputs_.unseen[i] = 1;
    }
    size_t explained = fits ? list_.size() : 0;
    for (size_t k = 0; k < length; ++k) {
      if (k >= explained) {
        check(false, i + k); // what an unseen call did is nobody's decision
      }
      uint32_t number = cached_at(rows_[i + k].address);
      if (number != kNone) {
        evict(number, is_clear ? kCleared : kTrimmed, -1);
      }
    }
  }

  void end_call(size_t i) {
    const Row& row = rows_[i];
    for (size_t k = 0; k < calls_.size(); ++k) {
      if (calls_[k].row != static_cast<size_t>(row.owner)) {
        continue;
      }
      OpenCall call = calls_[k];
      calls_.erase(calls_.begin() + k);
      if (!call.took_effect) {
        end_without_evictions(i, call);
      }
      return;
    }
  }

  // A call that gave nothing back found nothing to give.
  void end_without_evictions(size_t i, const OpenCall& call) {
    uint64_t least = std::min(call.least_cached, cache_.bytes());
    if (call.call == kClearCache) {
      check(!policy_.has_cache || least == 0, i);
    } else if (call.call == kSetCacheLimit) {
      set_cache_limit(call.value, call.row);
      check(!policy_.trims_at_once || least <= call.value, i);
    } else {
      policy_.memory_limit = call.value;
    }
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
  bool overrides_cache_limit_ = false;

  bool classifies_ = false;
  Outputs outputs_;
  size_t row_ = 0; // that is replayed
  std::multimap<uint64_t, Loss> lost_; // by size
  std::map<uint64_t, uint64_t> live_; // size -> buffers in use

  std::unordered_map<uint64_t, uint32_t> cached_at_; // by address
  std::vector<OpenCall> calls_;
  std::vector<size_t> pending_; // evictions of which the reason is to come
};

} // namespace mlxmem::cache
