#include "node_registry.h"

#include <sys/mman.h>

#include <algorithm>

#include "platform.h"

namespace mlxmem {

namespace {

// Memory full of zeros; at a place that was mapped so before, if given.
void* map_zeros(size_t size, void* place = nullptr) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | (place ? MAP_FIXED : 0);
  void* memory = mmap(place, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

// Gives the memory back, and leaves zeros.
bool make_zeros(void* memory, size_t size) {
#if MLXMEM_MACOS
  return map_zeros(size, memory); // MADV_DONTNEED may keep the contents there
#else
  return madvise(memory, size, MADV_DONTNEED) == 0;
#endif
}

} // namespace

void NodeRegistry::clear(uint32_t epoch) {
  node_threads::prepare();
  close();
  for (auto& chunk : chunks_) {
    auto entries = chunk.load();
    if (!entries) {
      break;
    }
    if (!make_zeros(entries, kChunk * sizeof(Entry))) {
      std::fill_n(reinterpret_cast<uint64_t*>(entries), kChunk, 0);
    }
  }
  // Not the count of taken ones: see take_magazine().
  magazines_.store(((magazines_.load() >> 32) + 1) << 32);
  used_.store(kBatch);
  lost_.store(false);
  epoch_.store(epoch, std::memory_order_release);
}

void NodeRegistry::created_slowly(void* desc, bool pending) {
  auto thread = this_thread();
  uint32_t slot = thread ? take_slot(thread) : 0;
  *word_at(desc, abi::kDescTracerPadding) = slot;
  if (slot) {
    hold(thread, entry(slot), desc, pending);
  }
}

bool NodeRegistry::destroyed_slowly(uint32_t slot, Entry* entry) {
  auto thread = this_thread();
  if (!thread) {
    return false;
  }
  if (thread->length == kMagazine) {
    put_aside(thread);
  }
  let_go(thread, slot, entry);
  return true;
}

void NodeRegistry::evaluated(const void* desc) {
  auto found = find(desc, *word_at(desc, abi::kDescTracerPadding));
  uint64_t value = found ? found->load(std::memory_order_relaxed) : 0;
  auto thread = value & kPending ? this_thread() : nullptr;
  if (thread) {
    found->store(value & ~kPending, std::memory_order_relaxed);
    thread->add(-kOnePending);
  }
}

NodeThread* NodeRegistry::this_thread() {
  uint32_t epoch = epoch_.load(std::memory_order_acquire);
  if (!epoch) {
    return nullptr;
  }
  auto thread = node_threads::current;
  if (!thread) {
    thread = node_threads::take();
  }
  if (!thread) {
    lost_.store(true, std::memory_order_relaxed);
    return nullptr;
  }
  uint32_t old = thread->epoch.load(std::memory_order_relaxed);
  if (old > epoch) {
    return nullptr; // the call is late: another registry counts
  }
  if (old < epoch) {
    thread->start(epoch, static_cast<uint64_t>(epoch) << kEpochShift | kFree);
  }
  return thread;
}

uint32_t NodeRegistry::take_slot(NodeThread* thread) {
  // A chain that a late thread has written into is dropped, so this may take
  // the spare one, a magazine and fresh slots.
  for (int i = 0; i < 4; ++i) {
    uint32_t slot = thread->head;
    uint64_t next = slot ? next_in_chain(thread, entry(slot)) : ~0ull;
    if (next <= kSlotMask) {
      thread->head = static_cast<uint32_t>(next);
      --thread->length;
      return slot;
    }
    refill(thread);
  }
  lost_.store(true, std::memory_order_relaxed);
  return 0;
}

void NodeRegistry::refill(NodeThread* thread) {
  if (thread->spare) {
    thread->head = thread->spare;
    thread->length = kMagazine;
    thread->spare = 0;
  } else if ((thread->head = take_magazine(thread))) {
    thread->length = kMagazine;
  } else {
    thread->head = take_fresh(thread);
    thread->length = thread->head ? kBatch : 0;
  }
}

void NodeRegistry::put_aside(NodeThread* thread) {
  uint32_t slot = thread->spare;
  uint64_t next = slot ? next_in_chain(thread, entry(slot)) : ~0ull;
  if (next <= kSlotMask) {
    uint64_t first = magazines_.load(std::memory_order_relaxed);
    uint64_t given;
    do {
      entry(slot)->store(
          thread->free_tag | next << kNextShift |
              (first & kSlotMask) << kMagazineShift,
          std::memory_order_relaxed);
      given = first >> 32 << 32 | slot;
    } while (!magazines_.compare_exchange_weak(
        first, given, std::memory_order_release, std::memory_order_relaxed));
  }
  thread->spare = thread->head;
  thread->head = thread->length = 0;
}

uint32_t NodeRegistry::take_magazine(const NodeThread* thread) {
  uint64_t first = magazines_.load(std::memory_order_acquire);
  while (auto slot = static_cast<uint32_t>(first)) {
    // When another thread takes it first, this is anything, and the exchange
    // fails. When a late thread has written here, all of them are dropped.
    uint64_t value = entry(slot)->load(std::memory_order_relaxed);
    bool valid = (value & kTagMask) == thread->free_tag;
    uint64_t rest = valid ? value >> kMagazineShift & kSlotMask : 0;
    uint64_t taken = ((first >> 32) + 1) << 32 | rest;
    if (magazines_.compare_exchange_weak(
            first, taken, std::memory_order_acquire)) {
      if (valid) {
        entry(slot)->store(
            value & ~(kSlotMask << kMagazineShift), std::memory_order_relaxed);
        return slot;
      }
      return 0;
    }
  }
  return 0;
}

uint32_t NodeRegistry::take_fresh(const NodeThread* thread) {
  uint32_t slot = used_.load(std::memory_order_relaxed);
  do {
    if (slot >> kChunkBits >= kMaxChunks) {
      return 0;
    }
    auto& chunk = chunks_[slot >> kChunkBits];
    if (!chunk.load(std::memory_order_acquire)) {
      void* memory = map_zeros(kChunk * sizeof(Entry));
      if (!memory) {
        return 0;
      }
      Entry* none = nullptr;
      if (!chunk.compare_exchange_strong(none, static_cast<Entry*>(memory))) {
        munmap(memory, kChunk * sizeof(Entry)); // another thread was first
      }
    }
  } while (!used_.compare_exchange_weak(
      slot,
      slot + kBatch,
      std::memory_order_acq_rel,
      std::memory_order_relaxed));
  auto entries = entry(slot);
  for (uint32_t i = 0; i < kBatch; ++i) {
    uint64_t next = i + 1 < kBatch ? slot + i + 1 : 0;
    entries[i].store(
        thread->free_tag | next << kNextShift, std::memory_order_relaxed);
  }
  return slot;
}

NodeCounts NodeRegistry::counts() const {
  uint32_t epoch = epoch_.load(std::memory_order_acquire);
  uint64_t sum = 0;
  for (auto thread = node_threads::all(); epoch && thread;
       thread = thread->next) {
    if (thread->epoch.load(std::memory_order_acquire) == epoch) {
      sum += thread->totals.load(std::memory_order_relaxed);
    }
  }
  // While threads go on, one may be seen to drop what another is not yet seen
  // to have made: then the low half is below 0, and has borrowed.
  auto live = static_cast<int32_t>(sum);
  auto pending = static_cast<int32_t>((sum - live) >> 32);
  return {
      static_cast<uint64_t>(std::max(live, 0)),
      static_cast<uint64_t>(std::max(pending, 0))};
}

std::vector<NodeRegistry::Slot> NodeRegistry::slots() const {
  std::vector<Slot> slots;
  slots.reserve(counts().live);
  uint32_t used = used_.load(std::memory_order_acquire);
  for (uint32_t slot = kBatch; slot < used; ++slot) {
    auto desc = node_in(entry(slot)->load(std::memory_order_acquire));
    if (desc) {
      slots.push_back({slot, desc});
    }
  }
  return slots;
}

} // namespace mlxmem
