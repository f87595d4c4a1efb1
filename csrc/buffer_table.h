// The recorder's own picture of MLX's buffers: which are active, which lie in
// the cache and in what order they would leave it. Not synchronised.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "event.h"

namespace mlxmem {

struct TrackedBuffer {
  Event event; // of its last transition, with its allocation's attribution
  uint64_t event_number = 0;
  bool cached = false;
  // Neighbours in the cache's LRU list, by slot; kNone ends it.
  uint32_t newer = 0;
  uint32_t older = 0;
};

class BufferTable {
 public:
  static constexpr uint32_t kNone = ~0u;

  void clear();

  // The slot of a buffer, kNone when it is not known. Slots stay valid until
  // erase().
  uint32_t find(uint64_t address) const {
    if (index_.empty()) {
      return kNone;
    }
    size_t mask = index_.size() - 1;
    for (size_t i = home(address);; i = (i + 1) & mask) {
      uint32_t slot = index_[i];
      if (slot == kNone || slots_[slot].event.address == address) {
        return slot;
      }
    }
  }
  uint32_t insert(uint64_t address);
  void erase(uint32_t slot);

  TrackedBuffer& operator[](uint32_t slot) {
    return slots_[slot];
  }
  const TrackedBuffer& operator[](uint32_t slot) const {
    return slots_[slot];
  }

  // The cache's LRU list, as MLX's BufferCache keeps it: a recycled buffer is
  // the newest, the oldest leaves first.
  void push_cached(uint32_t slot) {
    auto& buffer = slots_[slot];
    buffer.cached = true;
    buffer.older = newest_;
    buffer.newer = kNone;
    if (newest_ != kNone) {
      slots_[newest_].newer = slot;
    } else {
      oldest_ = slot;
    }
    newest_ = slot;
  }
  void remove_cached(uint32_t slot) {
    auto& buffer = slots_[slot];
    (buffer.newer == kNone ? newest_ : slots_[buffer.newer].older) =
        buffer.older;
    (buffer.older == kNone ? oldest_ : slots_[buffer.older].newer) =
        buffer.newer;
    buffer.cached = false;
  }
  uint32_t oldest_cached() const {
    return oldest_;
  }

  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (auto slot : index_) {
      if (slot != kNone) {
        visit(slots_[slot]);
      }
    }
  }

 private:
  size_t home(uint64_t address) const {
    // Buffers are at least 16 bytes apart; the multiplication spreads the rest.
    return ((address >> 4) * 0x9E3779B97F4A7C15ull >> 20) & (index_.size() - 1);
  }
  void grow();

  std::vector<TrackedBuffer> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> index_; // open addressing, linear probing
  size_t used_ = 0;
  uint32_t newest_ = kNone;
  uint32_t oldest_ = kNone;
};

} // namespace mlxmem
