#include "node_registry.h"

#include <sys/mman.h>

#include <algorithm>

namespace mlxmem {

void NodeRegistry::clear() {
  for (auto& chunk : chunks_) {
    auto entries = chunk.load();
    if (!entries) {
      break;
    }
    // Gives the memory back, and leaves zeros.
    if (madvise(entries, kChunk * sizeof(Entry), MADV_DONTNEED) != 0) {
      std::fill_n(reinterpret_cast<uint64_t*>(entries), kChunk, 0);
    }
  }
  // Not the count of taken slots: see take_slot().
  free_.store(((free_.load() >> 32) + 1) << 32);
  counts_.store(0);
  used_.store(1);
  lost_.store(false);
}

uint32_t NodeRegistry::fresh_slot() {
  uint32_t slot = used_.load(std::memory_order_relaxed);
  do {
    if (slot >> kChunkBits >= kMaxChunks) {
      lost_.store(true, std::memory_order_relaxed);
      return 0;
    }
    auto& chunk = chunks_[slot >> kChunkBits];
    if (!chunk.load(std::memory_order_acquire)) {
      void* memory = mmap(
          nullptr,
          kChunk * sizeof(Entry),
          PROT_READ | PROT_WRITE,
          MAP_PRIVATE | MAP_ANONYMOUS,
          -1,
          0);
      if (memory == MAP_FAILED) {
        lost_.store(true, std::memory_order_relaxed);
        return 0;
      }
      Entry* none = nullptr;
      if (!chunk.compare_exchange_strong(none, static_cast<Entry*>(memory))) {
        munmap(memory, kChunk * sizeof(Entry)); // another thread was first
      }
    }
  } while (!used_.compare_exchange_weak(
      slot, slot + 1, std::memory_order_acq_rel, std::memory_order_relaxed));
  return slot;
}

std::vector<NodeRegistry::Slot> NodeRegistry::slots() const {
  std::vector<Slot> slots;
  slots.reserve(counts().live);
  uint32_t used = used_.load(std::memory_order_acquire);
  for (uint32_t slot = 1; slot < used; ++slot) {
    auto desc = node_in(entry(slot)->load(std::memory_order_acquire));
    if (desc) {
      slots.push_back({slot, desc});
    }
  }
  return slots;
}

} // namespace mlxmem
