// What an allocator did to its buffers, numbered by the threads that did it
// while they hold the allocator's own mutex. So the notes have the allocator's
// order, whichever way it was called, and no lock of ours stands where MLX
// allocates and frees. What is slow waits until the mutex is free: the thread
// fills in its note then, and the books read it later, under their own lock.
//
// The allocator is watched through its words: its bytes change under the mutex
// only, so what changed since the mutex was last released was done by the
// thread that holds it now.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "books.h"
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

// One cache line, which its thread fills in after it has released the mutex.
struct alignas(64) TapeEntry {
  uint64_t address;
  uint64_t size; // bytes, of the buffer
  uint64_t requested_size; // bytes
  uint64_t ticks; // of TapeClock
  Origin origin;
  uint32_t thread_id;
  Did did;
  uint8_t after_look; // of a new buffer, as in Event
  std::atomic<uint64_t> filled{0}; // 1 more than its number

  bool is_filled(uint64_t number) const {
    return filled.load(std::memory_order_acquire) == number + 1;
  }
};
static_assert(sizeof(TapeEntry) == 64, "");

// A place on the tape, and what is to be written there.
struct TapeNote {
  TapeEntry* entry = nullptr; // nullptr: there is nothing to note
  uint64_t number = 0;
  uint64_t address = 0;
  uint64_t size = 0;
  uint64_t ticks = 0;
  Did did = Did::Nothing;
  uint8_t after_look = 0;

  bool is_allocation() const {
    return did == Did::AllocNew || did == Did::AllocReuse;
  }
  // An allocation's address, requested size and origin are known to its thread.
  void fill(uint64_t requested_size, const Origin& origin) const;
  void fill() const {
    fill(size, Origin());
  }
};

class AllocatorTape {
 public:
  // ---- with the allocator's mutex and the books held

  // Forgets what was noted, and takes the allocator as it is.
  void start(const AllocatorWords& words);

  // ---- with the allocator's mutex held; these never throw

  // What was done since the last look, for the thread to fill in; freed: the
  // buffer that it frees.
  TapeNote look(const AllocatorWords& words, const void* freed);
  // The cache asks for a buffer's size: it takes it, or gives it back soon.
  // Likewise.
  TapeNote cache_asked(const AllocatorWords& words, const void* buffer);
  // The cache gives a buffer back to the operating system. An allocation that
  // made it do so is returned.
  TapeNote
  cache_frees(const AllocatorWords& words, const void* buffer, uint64_t size);

  // Whether there was no memory for an entry, since start().
  bool is_incomplete() const {
    return writer_.lost.load(std::memory_order_relaxed);
  }

  // ---- with the books held

  // Number of the next entry.
  uint64_t end() const {
    return writer_.written.load(std::memory_order_acquire);
  }
  // Entries that were not read yet when it ended there; also without the books.
  uint64_t backlog(uint64_t end) const {
    return end - std::min(end, read_.load(std::memory_order_relaxed));
  }
  // Number of the next entry to read.
  uint64_t position() const {
    return read_.load(std::memory_order_relaxed);
  }
  // Hands the entries before `end` to visit, oldest first, up to one that is
  // not filled in; skips: that one is left out, for good. If visit throws, the
  // entry comes again.
  template <typename Visit>
  void read(uint64_t end, bool skips, Visit&& visit) {
    uint64_t at = read_.load(std::memory_order_relaxed);
    for (; at < end; ++at) {
      if (!reader_ || at == reader_end_) {
        next_chunk_to_read();
      }
      auto& entry = reader_->entries[at % kChunk];
      if (entry.is_filled(at)) {
        visit(entry);
      } else if (!skips) {
        break;
      }
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
    uint64_t first = 0; // of those that somebody may still fill in
    uint64_t end = 0;
  };

  TapeNote note(Did did, const void* buffer, uint64_t size);
  void begin_at(uint64_t number);
  bool add_chunk();
  void next_chunk_to_read();
  static bool is_awaited(const Chunk* chunk);
  // It was read, or nobody will; first and end are set. It is used again when
  // nobody has a place in it.
  void let_go(Chunk* chunk);
  void look_after_awaited();

  // What goes from one processor to the next with the allocator's mutex: one
  // line, no more.
  struct alignas(64) Writer {
    AllocatorWords seen;
    uint64_t owed = 0; // bytes that the cache gave back but counts still
    Chunk* chunk = nullptr;
    std::atomic<uint64_t> written{0}; // entries
    std::atomic<bool> lost{false};
  };
  static_assert(sizeof(Writer) == 64, "");

  Writer writer_;
  alignas(64) std::atomic<Chunk*> first_{nullptr};
  std::atomic<uint64_t> read_{0};
  Chunk* reader_ = nullptr;
  uint64_t reader_end_ = 0; // of its entries
  Chunk* awaited_ = nullptr; // by threads that are late, linked by next
  alignas(64) std::atomic<Chunk*> spare_{nullptr};
};

extern AllocatorTape& allocator_tape;

} // namespace mlxmem
