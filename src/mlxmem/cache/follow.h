// What was recorded, and where the model would have decided otherwise.

#pragma once

#include <algorithm>
#include <unordered_set>

#include "replay.h"

namespace mlxmem::cache {

class Following : public Replay {
 public:
  Following(
      const Policy& policy,
      const Rows& rows,
      const Cached* cached,
      size_t cached_count,
      uint64_t unknown,
      uint64_t active,
      const Outputs& outputs)
      : Replay(policy, rows, cached, cached_count, unknown, active, true) {
    outputs_ = outputs;
    classifies_ = true;
    find_looks();
  }

  size_t run(size_t i, size_t count) override {
    size_t end = std::min(i + count, rows_.size());
    while (i < end) {
      follow_looks(i);
      set_outputs(i);
      i = follow_row(i);
      for (auto& call : calls_) {
        call.least_cached = std::min(call.least_cached, cache_.bytes());
      }
    }
    return i;
  }

  void finish() override {
    if (!pending_.empty()) {
      explain_run(pending_.front(), pending_.size(), rows_.size());
      pending_.clear();
    }
    Replay::finish();
  }

 private:
  struct OpenCall {
    size_t row;
    Call call;
    uint64_t value;
    bool took_effect;
    bool evicted; // what it had to
    uint64_t least_cached; // since it began
  };

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
        return follow_allocation(i);
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

  // Returns the row to go on with.
  size_t follow_allocation(size_t i) {
    const Row& row = rows_[i];
    uint64_t n = policy_.rounded(row.requested);
    bool has_looked = looked_.erase(i) != 0;
    uint32_t expected =
        policy_.has_cache && !has_looked ? cache_.find(policy_, n) : kNone;
    uint32_t recorded = row.recorded ? cached_at(row.address) : kNone;
    bool agrees = expected == recorded &&
        static_cast<bool>(row.recorded) == (expected != kNone);
    if (expected == kNone) {
      agrees &= static_cast<uint64_t>(row.size) == n;
      if (!has_looked && reclaims(n)) {
        follow_own_evictions(to_reclaim(n), kReclaimed, -1, i + 1);
      }
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
    size_t next = i + 1;
    if (!policy_.trims_at_once && !calls_.empty()) {
      agrees_under_a_limit([&] { return trims(next); });
    }
    if (!policy_.trims_at_once && excess()) {
      next = follow_own_evictions(excess(), kTrimmed, limit_set_at_, next);
      for (size_t k = i + 1; k < next; ++k) {
        set_outputs(k);
      }
    }
    if (!pending_.empty()) {
      explain_run(pending_.front(), pending_.size(), rows_.size());
      pending_.clear();
    }
    return next;
  }

  // For a new buffer MLX looks into the cache, and counts the buffer when it
  // has it: where other threads went on in between, the look has a place of its
  // own.
  struct Look {
    size_t at; // row before which it was
    size_t row; // of the allocation

    bool operator<(const Look& other) const {
      return at < other.at;
    }
  };

  void find_looks() {
    for (size_t row = 0; row < rows_.size(); ++row) {
      size_t left = rows_[row].after_look;
      size_t at = row;
      while (left && at) {
        left -= rows_[--at].op < kCallBegins;
      }
      if (at < row && !left && rows_[row].op == kAlloc) {
        looks_.push_back({at, row});
      }
    }
    std::sort(looks_.begin(), looks_.end());
  }

  // Follows the looks before row i that found nothing and took nothing.
  void follow_looks(size_t i) {
    for (; next_look_ < looks_.size() && looks_[next_look_].at <= i;
         ++next_look_) {
      size_t row = looks_[next_look_].row;
      uint64_t n = policy_.rounded(rows_[row].requested);
      if (looks_[next_look_].at == i && cache_.find(policy_, n) == kNone &&
          !reclaims(n)) {
        looked_.insert(row);
      }
    }
  }

  // Evictions from i on, at most to end, that a look of its own place made.
  // Returns the row to go on with, 0 where they have another reason.
  size_t follow_look(size_t i, size_t end) {
    for (size_t k = next_look_; k < looks_.size() && looks_[k].at <= end; ++k) {
      size_t at = looks_[k].at;
      size_t row = looks_[k].row;
      uint64_t n = policy_.rounded(rows_[row].requested);
      if (at <= i || cache_.find(policy_, n) != kNone || !reclaims(n) ||
          !run_begins_with(i, at - i, [&](auto&& visit) {
            cache_.visit_released(to_reclaim(n), kNone, visit);
          })) {
        continue;
      }
      if (list_.size() != at - i) {
        continue;
      }
      for (size_t eviction = i; eviction < at; ++eviction) {
        check(true, eviction);
      }
      evict_all(kReclaimed, -1);
      looked_.insert(row);
      return at;
    }
    return 0;
  }

  // What the allocator gives back by itself: for a new buffer it stands before
  // the allocation, to keep the cache's limit before or after it, as it was
  // seen. Returns the row to go on with, `next` or later.
  size_t follow_own_evictions(
      uint64_t bytes,
      Outcome outcome,
      int64_t cause,
      size_t next) {
    if (!cache_.count()) {
      return next;
    }
    auto released = [&](auto&& visit) {
      cache_.visit_released(bytes, kNone, visit);
    };
    size_t first = pending_.empty() ? row_ : pending_.front();
    bool stands_before = run_begins_with(first, pending_.size(), released);
    if (!stands_before) {
      size_t differs = first + list_.size();
      size_t after = outcome == kTrimmed ? evictions_from(next) : 0;
      if (!run_begins_with(next, after, released)) {
        check(false, after ? next + list_.size() : differs);
        return next;
      }
      first = next;
      next += list_.size();
    } else {
      pending_.erase(pending_.begin(), pending_.begin() + list_.size());
    }
    for (size_t k = 0; k < list_.size(); ++k) {
      check(true, first + k);
    }
    evict_all(outcome, cause);
    return next;
  }

  // A cache limit that is being set by another thread holds from somewhere on:
  // from here, where only it makes the recording agree.
  template <typename Agrees>
  bool agrees_under_a_limit(Agrees&& agrees) {
    if (agrees()) {
      return true;
    }
    for (auto& call : calls_) {
      if (call.call != kSetCacheLimit || call.took_effect) {
        continue;
      }
      uint64_t before = policy_.cache_limit;
      int64_t before_row = limit_set_at_;
      set_cache_limit(call.value, call.row);
      if (agrees()) {
        call.took_effect = true;
        totals_.raced += 1;
        return true;
      }
      set_cache_limit(before, before_row);
    }
    return false;
  }

  // Whether what stands from row i on is what the cache's limit trims now.
  bool trims(size_t i) {
    size_t evicted = evictions_from(i);
    if (!excess()) {
      return !evicted;
    }
    return run_begins_with(i, evicted, [&](auto&& visit) {
      cache_.visit_released(excess(), kNone, visit);
    });
  }

  size_t evictions_from(size_t i) const {
    size_t end = i;
    while (end < rows_.size() && rows_[end].op == kEvict) {
      ++end;
    }
    return end - i;
  }

  void follow_free(size_t i) {
    const Row& row = rows_[i];
    uint32_t number = end_use(row, row.size);
    uint64_t size = buffers_[number].size;
    bool agrees = agrees_under_a_limit(
        [&] { return keeps(size) == static_cast<bool>(row.recorded); });
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
    size_t end = i + evictions_from(i);
    if (evicts_when_allocating() && calls_.empty()) {
      if (size_t next = follow_look(i, end)) {
        return next;
      }
      for (size_t k = i; k < end; ++k) {
        pending_.push_back(k);
      }
      return end;
    }
    return explain_run(i, end - i, end);
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
  // `next` is the row after them, or none. Returns the row to go on with, which
  // is another one when that was followed, too.
  size_t explain_run(size_t i, size_t length, size_t next) {
    size_t going_on = next;
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
      if (going_on == next && next < rows_.size() && rows_[next].op == kAlloc &&
          rows_[next].recorded) {
        uint32_t taken = cached_at(rows_[next].address);
        uint64_t n = policy_.rounded(rows_[next].requested);
        if (taken != kNone && cache_.find(policy_, n) == taken &&
            explain_by_call(&i, &length, taken)) {
          set_outputs(next);
          going_on = follow_allocation(next);
          totals_.raced += 1;
          continue;
        }
      }
      explain_without_call(i, length);
      return going_on;
    }
    return going_on;
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

  std::vector<OpenCall> calls_;
  std::vector<Look> looks_; // by place
  size_t next_look_ = 0;
  std::unordered_set<size_t> looked_; // rows of allocations that have looked
  std::vector<size_t> pending_; // evictions of which the reason is to come
};

} // namespace mlxmem::cache
