// Which of MLX's array nodes live, and how many of them are not evaluated. A
// node knows its slot here, and the slot the node: only where both agree is it
// one of this registry, so a stray value in a node does no harm. Nothing here
// waits for a lock or throws; each node's calls follow one another, as MLX
// makes them.
//
// Totals and free slots are each thread's own (node_threads.h). A thread that
// has too many free ones passes on a magazine of them.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "node.h"
#include "node_threads.h"

namespace mlxmem {

struct NodeCounts {
  uint64_t live;
  uint64_t pending; // of these, not evaluated
};

class NodeRegistry {
 public:
  // Forgets every node. The epoch is not 0, and larger than any registry had.
  // Memory stays mapped: a thread that is late may still look here.
  void clear(uint32_t epoch);
  // Nothing is counted until it is cleared.
  void close() {
    epoch_.store(0, std::memory_order_release);
  }

  // A node was made; pending: it has a primitive.
  void created(void* desc, bool pending) {
    auto thread = node_threads::current;
    uint32_t slot = is_mine(thread) ? thread->head : 0;
    if (slot) {
      auto found = entry(slot);
      uint64_t next = next_in_chain(thread, found);
      if (next <= kSlotMask) {
        thread->head = static_cast<uint32_t>(next);
        --thread->length;
        *word_at(desc, abi::kDescTracerPadding) = slot;
        hold(thread, found, desc, pending);
        return;
      }
    }
    created_slowly(desc, pending);
  }

  // Its primitive has run.
  void evaluated(const void* desc);

  // It is about to go; false when it is not one of this registry.
  bool destroyed(const void* desc) {
    uint32_t slot = *word_at(desc, abi::kDescTracerPadding);
    auto found = find(desc, slot);
    if (!found) {
      return false;
    }
    auto thread = node_threads::current;
    if (!is_mine(thread) || thread->length == kMagazine) {
      return destroyed_slowly(slot, found);
    }
    let_go(thread, slot, found);
    return true;
  }

  NodeCounts counts() const;

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

  // How many slots were ever used, free ones included.
  uint32_t used() const {
    return used_.load(std::memory_order_relaxed) - kBatch;
  }

 private:
  // An entry is 0, the node's address with kPending, or that of a free slot:
  // kFree, the next slot of its chain, the next magazine, and the last bits of
  // the epoch. So an entry that a late thread wrote is told from the others.
  using Entry = std::atomic<uint64_t>;
  static constexpr uint64_t kFree = 1;
  static constexpr uint64_t kPending = 2;
  static constexpr uint64_t kOneLive = 1; // of a thread's totals
  static constexpr uint64_t kOnePending = 1ull << 32;
  static constexpr int kSlotBits = 29; // half a billion nodes
  static constexpr uint64_t kSlotMask = (1u << kSlotBits) - 1;
  static constexpr int kNextShift = 1;
  static constexpr int kMagazineShift = kNextShift + kSlotBits;
  static constexpr int kEpochShift = kMagazineShift + kSlotBits;
  static constexpr uint64_t kTagMask = ~0ull << kEpochShift | kFree;

  static constexpr int kChunkBits = 16;
  static constexpr uint32_t kChunk = 1u << kChunkBits;
  static constexpr uint32_t kMaxChunks = 1u << (kSlotBits - kChunkBits);
  static constexpr uint32_t kBatch = 64; // fresh slots that a thread takes
  static constexpr uint32_t kMagazine = 1024;
  static_assert(kChunk % kBatch == 0, "a batch lies in one chunk");

  static const void* node_in(uint64_t value) {
    return value & kFree ? nullptr
                         : reinterpret_cast<const void*>(value & ~kPending);
  }

  Entry* entry(uint32_t slot) const {
    return chunks_[slot >> kChunkBits].load(std::memory_order_acquire) +
        slot % kChunk;
  }

  Entry* find(const void* desc, uint32_t slot) const {
    if (slot >> kChunkBits >= kMaxChunks) {
      return nullptr;
    }
    auto chunk = chunks_[slot >> kChunkBits].load(std::memory_order_acquire);
    auto found = chunk ? chunk + slot % kChunk : nullptr;
    return found && node_in(found->load(std::memory_order_relaxed)) == desc
        ? found
        : nullptr;
  }

  bool is_mine(const NodeThread* thread) const {
    return thread &&
        thread->epoch.load(std::memory_order_relaxed) ==
        epoch_.load(std::memory_order_acquire);
  }

  // Above kSlotMask when a late thread has written there.
  uint64_t next_in_chain(const NodeThread* thread, const Entry* entry) const {
    // Rotated, so that all that must be 0 is above the slot.
    uint64_t rest = entry->load(std::memory_order_relaxed) ^ thread->free_tag;
    return rest >> kNextShift | rest << (64 - kNextShift);
  }

  void hold(NodeThread* thread, Entry* entry, const void* desc, bool pending) {
    entry->store(
        reinterpret_cast<uint64_t>(desc) | (pending ? kPending : 0),
        std::memory_order_release);
    thread->add(kOneLive + (pending ? kOnePending : 0));
  }

  void let_go(NodeThread* thread, uint32_t slot, Entry* entry) {
    uint64_t value = entry->load(std::memory_order_relaxed);
    entry->store(
        thread->free_tag | static_cast<uint64_t>(thread->head) << kNextShift,
        std::memory_order_relaxed);
    // The slot is seen to be free before MLX writes over the node.
    std::atomic_thread_fence(std::memory_order_release);
    thread->head = slot;
    ++thread->length;
    thread->add(-kOneLive - (value & kPending) * (kOnePending / kPending));
  }

  // What the calling thread keeps of this registry; nullptr when it may not
  // change it.
  NodeThread* this_thread();

  [[gnu::noinline, gnu::cold]] void created_slowly(void* desc, bool pending);
  [[gnu::noinline, gnu::cold]] bool destroyed_slowly(
      uint32_t slot,
      Entry* entry);
  // These return 0 when there is none.
  uint32_t take_slot(NodeThread* thread);
  uint32_t take_magazine(const NodeThread* thread);
  uint32_t take_fresh(const NodeThread* thread);
  void refill(NodeThread* thread); // its chain is empty
  void put_aside(NodeThread* thread); // its chain is full

  alignas(64) std::atomic<uint32_t> epoch_{0}; // 0: closed
  // Magazines that no thread has: the first slot of the first in the low half,
  // in the high one how often one was taken, so that a head that left and came
  // back is another one.
  alignas(64) std::atomic<uint64_t> magazines_{0};
  std::atomic<uint32_t> used_{kBatch}; // 0 is none, and its batch unused
  std::atomic<bool> lost_{false};
  alignas(64) std::atomic<Entry*> chunks_[kMaxChunks] = {};
};

} // namespace mlxmem
