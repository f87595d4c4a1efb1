// A model of MLX's buffer cache and of what its three allocators make of it:
// what a request gets, where a freed buffer goes, what is given back. It holds
// sizes and names of buffers, no memory.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace mlxmem::cache {

constexpr uint32_t kNone = UINT32_MAX;

enum Rounding : int32_t {
  kExact = 0,
  kPages = 1, // to whole pages, above one page
  kClasses = 2, // 8 bytes, powers of two up to a page, whole pages
};

enum Reclaim : int32_t {
  kNever = 0,
  kAtCollection = 1, // what exceeds the collection limit, when it is reached
  kAboveLimit = 2, // what exceeds the memory limit
};

// Sizes in bytes. The fields are those of mlxmem.cache.policies.Policy.
struct Policy {
  uint64_t page;
  uint64_t cache_limit;
  uint64_t memory_limit;
  uint64_t collection_base; // the collection limit is at most this
  uint64_t resource_limit; // buffers, active and cached
  uint64_t slab_size; // the largest buffer that comes out of a slab
  uint64_t slab_blocks;
  int32_t rounding;
  int32_t reclaim;
  int32_t has_cache;
  int32_t keeps_only_whole; // a buffer must fit under the limit to be kept
  int32_t trims_at_once; // when the limit is set, else at the next allocation

  uint64_t rounded(uint64_t n) const {
    switch (rounding) {
      case kPages:
        return n > page ? pages(n) : n;
      case kClasses:
        if (n <= 8) {
          return 8;
        }
        return n < page ? power_of_two(n) : pages(n);
      default:
        return n;
    }
  }
  // A cached buffer serves a request for n if n <= its size < this.
  uint64_t window_end(uint64_t n) const {
    return std::min(2 * n, n + 2 * page);
  }
  uint64_t collection_limit() const {
    return std::min(memory_limit, collection_base);
  }

 private:
  uint64_t pages(uint64_t n) const {
    return (n + page - 1) / page * page;
  }
  static uint64_t power_of_two(uint64_t n) {
    uint64_t power = 1;
    while (power < n) {
      power *= 2;
    }
    return power;
  }
};

struct Buffer {
  uint64_t size = 0;
  uint64_t address = 0; // as recorded, or 0
  uint64_t order = 0; // of its caching
  uint64_t waste = 0; // bytes more than were asked for
  uint32_t newer = kNone;
  uint32_t older = kNone;
  bool in_slab = false;
  bool foreign = false; // memory of somebody else, which no cache sees
};

// Buffers, cached or not, by number.
class Buffers {
 public:
  uint32_t add(uint64_t size, uint64_t address) {
    uint32_t number;
    if (unused_.empty()) {
      number = buffers_.size();
      buffers_.emplace_back();
    } else {
      number = unused_.back();
      unused_.pop_back();
    }
    Buffer buffer;
    buffer.size = size;
    buffer.address = address;
    buffers_[number] = buffer;
    return number;
  }
  void remove(uint32_t number) {
    unused_.push_back(number);
  }
  Buffer& operator[](uint32_t number) {
    return buffers_[number];
  }
  const Buffer& at(uint32_t number) const {
    return buffers_[number];
  }

 private:
  std::vector<Buffer> buffers_;
  std::vector<uint32_t> unused_;
};

// The cached ones, by size and by age. Of equal sizes the oldest is taken.
class BufferCache {
 public:
  explicit BufferCache(Buffers& buffers) : buffers_(buffers) {}

  uint64_t bytes() const {
    return bytes_;
  }
  size_t count() const {
    return by_size_.size();
  }
  // Bytes that count, and neither serve nor leave by themselves.
  void add_unknown(uint64_t bytes) {
    bytes_ += bytes;
    unknown_ += bytes;
  }
  // Takes them away as the oldest buffers, or with all others; returns how many
  // bytes there are still to give back.
  uint64_t give_back_unknown(uint64_t bytes) {
    bool all = bytes >= 0.9 * bytes_;
    uint64_t taken = all ? unknown_ : std::min(unknown_, bytes);
    bytes_ -= taken;
    unknown_ -= taken;
    return all ? bytes_ : bytes - taken;
  }

  void add(uint32_t number) {
    Buffer& buffer = buffers_[number];
    buffer.order = next_order_++;
    buffer.newer = kNone;
    buffer.older = newest_;
    (newest_ == kNone ? oldest_ : buffers_[newest_].newer) = number;
    newest_ = number;
    by_size_.emplace(std::make_pair(buffer.size, buffer.order), number);
    bytes_ += buffer.size;
  }
  void remove(uint32_t number) {
    Buffer& buffer = buffers_[number];
    by_size_.erase({buffer.size, buffer.order});
    bytes_ -= buffer.size;
    (buffer.newer == kNone ? newest_ : buffers_[buffer.newer].older) =
        buffer.older;
    (buffer.older == kNone ? oldest_ : buffers_[buffer.older].newer) =
        buffer.newer;
  }

  // What serves a request of n bytes, kNone if nothing does.
  uint32_t find(const Policy& policy, uint64_t n) const {
    auto found = by_size_.lower_bound({n, 0});
    if (found == by_size_.end() || found->first.first >= policy.window_end(n)) {
      return kNone;
    }
    return found->second;
  }
  bool has_larger(uint64_t n) const {
    return by_size_.lower_bound({n, 0}) != by_size_.end();
  }

  // Calls visit(number) for what giving back `bytes` would take, in its order:
  // all, smallest first, where that is nearly all there is, else the oldest
  // ones; as if the buffer `without` were not there. Ends when visit says so.
  template <typename Visit>
  void visit_released(uint64_t bytes, uint32_t without, Visit&& visit) const {
    uint64_t all = bytes_ - (without == kNone ? 0 : buffers_.at(without).size);
    if (bytes >= 0.9 * all) {
      visit_all(without, visit);
      return;
    }
    uint64_t freed = 0;
    for (uint32_t number = oldest_; number != kNone && freed < bytes;
         number = buffers_.at(number).newer) {
      if (number != without) {
        freed += buffers_.at(number).size;
        if (!visit(number)) {
          return;
        }
      }
    }
  }
  template <typename Visit>
  void visit_all(uint32_t without, Visit&& visit) const {
    for (auto& entry : by_size_) {
      if (entry.second != without && !visit(entry.second)) {
        return;
      }
    }
  }
  uint32_t oldest() const {
    return oldest_;
  }

 private:
  Buffers& buffers_;
  std::map<std::pair<uint64_t, uint64_t>, uint32_t> by_size_; // size, order
  uint32_t newest_ = kNone;
  uint32_t oldest_ = kNone;
  uint64_t bytes_ = 0;
  uint64_t unknown_ = 0; // of these
  uint64_t next_order_ = 0;
};

} // namespace mlxmem::cache
