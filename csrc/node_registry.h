// Which of MLX's array nodes live, and how many of them are not evaluated. A
// node knows its slot here, and the slot the node: only where both agree is it
// one of this registry, so a stray value in a node does no harm. Nothing here
// waits for a lock or throws; each node's calls follow one another, as MLX
// makes them.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "node.h"

namespace mlxmem {

struct NodeCounts {
  uint64_t live;
  uint64_t pending; // of these, not evaluated
};

class NodeRegistry {
 public:
  // Forgets every node. Memory stays mapped: a thread that is late may still
  // look here.
  void clear();

  // A node was made; pending: it has a primitive.
  void created(void* desc, bool pending) {
    uint32_t slot = take_slot();
    *word_at(desc, abi::kDescTracerPadding) = slot;
    if (slot) {
      entry(slot)->store(
          reinterpret_cast<uint64_t>(desc) | (pending ? kPending : 0),
          std::memory_order_release);
      counts_.fetch_add(
          kOneLive + (pending ? kOnePending : 0), std::memory_order_relaxed);
    }
  }

  // Its primitive has run.
  void evaluated(const void* desc) {
    auto found = find(desc);
    if (found) {
      uint64_t value = found->load(std::memory_order_relaxed);
      if (value & kPending) {
        found->store(value & ~kPending, std::memory_order_relaxed);
        counts_.fetch_sub(kOnePending, std::memory_order_relaxed);
      }
    }
  }

  // It is about to go; false when it is not one of this registry.
  bool destroyed(const void* desc) {
    auto found = find(desc);
    if (!found) {
      return false;
    }
    uint64_t value = found->load(std::memory_order_relaxed);
    give_back(*word_at(desc, abi::kDescTracerPadding), found);
    counts_.fetch_sub(
        kOneLive + (value & kPending ? kOnePending : 0),
        std::memory_order_relaxed);
    return true;
  }

  NodeCounts counts() const {
    uint64_t counts = counts_.load(std::memory_order_relaxed);
    return {counts % kOnePending, counts / kOnePending};
  }

  // Whether every node found a slot.
  bool is_complete() const {
    return !lost_.load(std::memory_order_relaxed);
  }

  struct Slot {
    uint32_t number;
    const void* desc;
  };
  // The slots that hold a node; it may go at any time. Throws std::bad_alloc.
  std::vector<Slot> slots() const;
  // Whether it holds it still.
  bool holds(const Slot& slot) const {
    return node_in(entry(slot.number)->load(std::memory_order_acquire)) ==
        slot.desc;
  }

 private:
  // An entry is 0, the node's address with kPending, or the next free slot with
  // kFree.
  using Entry = std::atomic<uint64_t>;
  static constexpr uint64_t kFree = 1;
  static constexpr uint64_t kPending = 2;
  static constexpr int kFreeShift = 1;

  static constexpr uint64_t kOneLive = 1;
  static constexpr uint64_t kOnePending = 1ull << 32;

  static constexpr int kChunkBits = 16;
  static constexpr uint32_t kChunk = 1u << kChunkBits;
  static constexpr uint32_t kMaxChunks = 1u << 13; // half a billion nodes

  static const void* node_in(uint64_t value) {
    return value & kFree ? nullptr
                         : reinterpret_cast<const void*>(value & ~kPending);
  }

  Entry* entry(uint32_t slot) const {
    return chunks_[slot >> kChunkBits].load(std::memory_order_acquire) +
        slot % kChunk;
  }

  Entry* find(const void* desc) const {
    uint32_t slot = *word_at(desc, abi::kDescTracerPadding);
    if (slot >> kChunkBits >= kMaxChunks) {
      return nullptr;
    }
    auto chunk = chunks_[slot >> kChunkBits].load(std::memory_order_acquire);
    auto found = chunk ? chunk + slot % kChunk : nullptr;
    return found && node_in(found->load(std::memory_order_relaxed)) == desc
        ? found
        : nullptr;
  }

  // The list of free slots: its head in the low half, in the high one how often
  // a slot was taken, so that a head that left and came back is another one.
  uint32_t take_slot() {
    uint64_t head = free_.load(std::memory_order_acquire);
    while (auto slot = static_cast<uint32_t>(head)) {
      // When another thread takes the slot first, this is no list entry any
      // more, and the exchange fails.
      uint64_t next = entry(slot)->load(std::memory_order_relaxed);
      uint64_t taken =
          ((head >> 32) + 1) << 32 | static_cast<uint32_t>(next >> kFreeShift);
      if (free_.compare_exchange_weak(head, taken, std::memory_order_acquire)) {
        return slot;
      }
    }
    return fresh_slot();
  }

  void give_back(uint32_t slot, Entry* entry) {
    uint64_t head = free_.load(std::memory_order_relaxed);
    uint64_t given;
    do {
      entry->store(
          (head & 0xFFFFFFFFu) << kFreeShift | kFree,
          std::memory_order_relaxed);
      given = head >> 32 << 32 | slot;
    } while (!free_.compare_exchange_weak(
        head, given, std::memory_order_release, std::memory_order_relaxed));
  }

  uint32_t fresh_slot(); // 0 when there is none

  alignas(64) std::atomic<uint64_t> free_{0};
  std::atomic<uint64_t> counts_{0};
  std::atomic<uint32_t> used_{1}; // slots ever given out; 0 is none
  std::atomic<bool> lost_{false};
  alignas(64) std::atomic<Entry*> chunks_[kMaxChunks] = {};
};

} // namespace mlxmem
