// What an allocator did to its buffers, noted by the threads that did it while
// they hold the allocator's own mutex. So the notes have the allocator's order,
// whichever way it was called, and no lock of ours stands where MLX allocates
// and frees. The books read them later, under their own lock.
//
// The allocator is watched through its words: its bytes change under the mutex
// only, so what changed since the mutex was last released was done by the
// thread that holds it now.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "books.h"
#include "clock.h"
#include "mlx_counters.h"

namespace mlxmem {

enum class Did : uint8_t {
  AllocNew,
  AllocReuse,
  FreeToCache,
  FreeToOS,
  CacheReturn,
  SetCacheLimit, // size: the new limit
  SetMemoryLimit,
  Nothing, // an allocation that failed after it was counted
};

// One cache line.
struct alignas(64) TapeEntry {
  uint64_t address;
  uint64_t size; // bytes, of the buffer
  uint64_t requested_size; // bytes
  uint64_t time_ns; // CLOCK_MONOTONIC
  Origin origin;
  uint32_t thread_id;
  Did did;
  uint8_t after_look; // of a new buffer, as in Event
  // An allocation's address and origin are known when its thread has them.
  std::atomic<bool> is_complete;

  void complete(uint64_t buffer, uint64_t requested, const Origin& whose) {
    address = buffer;
    requested_size = requested;
    origin = whose;
    is_complete.store(true, std::memory_order_release);
  }
};
static_assert(sizeof(TapeEntry) == 64, "");

class AllocatorTape {
 public:
  // ---- with the allocator's mutex and the books held

  // Forgets what was noted, and takes the allocator as it is.
  void start(const AllocatorWords& words);

  // ---- with the allocator's mutex held; these never throw

  // What was done since the last look. The entry of an allocation is returned,
  // for its thread to complete; freed: the buffer that this thread frees.
  TapeEntry* look(const AllocatorWords& words, const void* freed);
  // The cache asks for a buffer's size: it takes it, or gives it back soon.
  void cache_asked(const AllocatorWords& words, const void* buffer);
  // The cache gives a buffer back to the operating system. As look().
  TapeEntry*
  cache_frees(const AllocatorWords& words, const void* buffer, uint64_t size);

  // Whether there was no memory for an entry, since start().
  bool is_incomplete() const {
    return lost_.load(std::memory_order_relaxed);
  }

  // ---- with the books held

  // Number of entries since start().
  uint64_t end() const {
    return written_.load(std::memory_order_acquire);
  }
  // Entries that were not read yet; also without the books.
  uint64_t backlog() const {
    return end() - read_.load(std::memory_order_relaxed);
  }
  // Number of the next entry to read.
  uint64_t position() const {
    return read_.load(std::memory_order_relaxed);
  }
  // Hands the entries before `end` to visit, oldest first, up to one that is
  // not complete. If visit throws, that entry comes again.
  template <typename Visit>
  void read(uint64_t end, Visit&& visit) {
    uint64_t at = read_.load(std::memory_order_relaxed);
    for (; at < end; ++at) {
      if (!reader_ || at == reader_end_) {
        next_chunk_to_read();
      }
      auto& entry = reader_->entries[at % kChunk];
      if (!entry.is_complete.load(std::memory_order_acquire)) {
        break;
      }
      visit(entry);
      read_.store(at + 1, std::memory_order_relaxed);
    }
  }

  // In a forked child: nothing of the parent's is touched again.
  void forget();

 private:
  static constexpr size_t kChunk = 512;
  struct Chunk {
    TapeEntry entries[kChunk];
    std::atomic<Chunk*> next{nullptr};
  };

  TapeEntry* note(Did did, const void* buffer, uint64_t size);
  bool add_chunk();
  void next_chunk_to_read();
  // For the next chunk that is needed; nobody has a pointer into it.
  void set_aside(Chunk* chunk);

  // The writer's.
  alignas(64) AllocatorWords seen_;
  uint64_t owed_ = 0; // bytes that the cache gave back but counts still
  Chunk* writer_ = nullptr;
  EventClock clock_;
  std::atomic<bool> lost_{false};
  std::atomic<Chunk*> first_{nullptr};
  std::atomic<uint64_t> written_{0};

  alignas(64) std::atomic<uint64_t> read_{0};
  Chunk* reader_ = nullptr;
  uint64_t reader_end_ = 0; // of its entries
  alignas(64) std::atomic<Chunk*> spare_{nullptr};
};

extern AllocatorTape& allocator_tape;

} // namespace mlxmem
