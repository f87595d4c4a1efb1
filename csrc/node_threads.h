// What a thread keeps of the node registry for itself, so that it counts a node
// without an atomic exchange, which would cost more than all the rest.

#pragma once

#include <atomic>
#include <cstdint>

namespace mlxmem {

// Written by its owner alone. It is never freed: a thread that exits leaves it,
// totals, slots and all, to the next that begins.
struct alignas(64) NodeThread {
  // What the owners added and took away: live nodes and, in the high half,
  // pending ones. A node that one thread makes and another drops adds 1 here
  // and -1 there.
  std::atomic<uint64_t> totals{0};
  std::atomic<uint32_t> epoch{0}; // of the registry that all this belongs to
  // Free slots: a chain of some length, and another one that is full.
  uint32_t head = 0;
  uint64_t free_tag = 0; // what the chains' entries carry
  uint32_t length = 0;
  uint32_t spare = 0;

  NodeThread* next = nullptr; // of all there are
  std::atomic<bool> taken{true};

  void add(uint64_t more) {
    totals.store(
        totals.load(std::memory_order_relaxed) + more,
        std::memory_order_relaxed);
  }
  void start(uint32_t new_epoch, uint64_t new_free_tag);
};
static_assert(sizeof(NodeThread) == 64, "one line of the cache");

namespace node_threads {

inline thread_local NodeThread* current = nullptr;

// Before the first take(). A thread that exits gives its own back from then on.
void prepare();

// The calling thread's own from now on; nullptr without memory.
NodeThread* take();

// All there are, by `next`.
NodeThread* all();

// In a forked child: the others' owners are gone, in the middle of anything.
void forget_others();

} // namespace node_threads

} // namespace mlxmem
