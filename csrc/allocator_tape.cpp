#include "allocator_tape.h"

#include <new>

#include "threads.h"

namespace mlxmem {

// Never destroyed: worker threads free buffers after static destructors ran.
AllocatorTape& allocator_tape = *new AllocatorTape;

void AllocatorTape::start(const AllocatorWords& words) {
  // A chunk with an entry that its thread has yet to complete stays as it is:
  // that thread will write there.
  uint64_t end = written_.load(std::memory_order_relaxed);
  uint64_t at = read_.load(std::memory_order_relaxed) / kChunk * kChunk;
  for (auto chunk = reader_ ? reader_ : first_.load(); chunk;) {
    auto next = chunk->next.load(std::memory_order_relaxed);
    bool is_awaited = false;
    for (size_t i = 0; i < kChunk && at < end; ++i, ++at) {
      is_awaited = is_awaited ||
          !chunk->entries[i].is_complete.load(std::memory_order_acquire);
    }
    if (!is_awaited) {
      set_aside(chunk);
    }
    chunk = next;
  }
  reader_ = writer_ = nullptr;
  first_.store(nullptr, std::memory_order_relaxed);
  written_.store(0, std::memory_order_relaxed);
  read_.store(0, std::memory_order_relaxed);
  reader_end_ = 0;
  lost_.store(false, std::memory_order_relaxed);
  clock_.start();
  seen_ = words;
  owed_ = 0;
}

TapeEntry* AllocatorTape::look(const AllocatorWords& words, const void* freed) {
  TapeEntry* allocation = nullptr;
  if (words.limits.cache != seen_.limits.cache) {
    note(Did::SetCacheLimit, nullptr, words.limits.cache);
  }
  if (words.limits.memory != seen_.limits.memory) {
    note(Did::SetMemoryLimit, nullptr, words.limits.memory);
  }
  if (words.active > seen_.active) {
    uint64_t size = words.active - seen_.active;
    bool from_cache = seen_.cache - owed_ == words.cache + size;
    auto did = from_cache ? Did::AllocReuse : Did::AllocNew;
    allocation = note(did, nullptr, size);
  } else if (words.active < seen_.active) {
    note(Did::FreeToOS, freed, seen_.active - words.active);
  }
  seen_ = words;
  owed_ = 0;
  return allocation;
}

void AllocatorTape::cache_asked(
    const AllocatorWords& words,
    const void* buffer) {
  // A buffer that is freed left the active bytes just now.
  if (words.active < seen_.active) {
    uint64_t size = seen_.active - words.active;
    note(Did::FreeToCache, buffer, size);
    seen_.active = words.active;
    seen_.cache += size;
  }
}

TapeEntry* AllocatorTape::cache_frees(
    const AllocatorWords& words,
    const void* buffer,
    uint64_t size) {
  // An allocation or a new limit makes the cache do it, which comes first.
  TapeEntry* allocation = nullptr;
  if (words.active != seen_.active ||
      words.limits.cache != seen_.limits.cache) {
    allocation = look(words, nullptr);
  }
  note(Did::CacheReturn, buffer, size);
  owed_ += size;
  return allocation;
}

TapeEntry* AllocatorTape::note(Did did, const void* buffer, uint64_t size) {
  uint64_t at = written_.load(std::memory_order_relaxed);
  if (at % kChunk == 0 && !add_chunk()) {
    lost_.store(true, std::memory_order_relaxed);
    return nullptr;
  }
  auto& entry = writer_->entries[at % kChunk];
  entry.address = reinterpret_cast<uint64_t>(buffer);
  entry.size = entry.requested_size = size;
  entry.time_ns = clock_.now_ns();
  entry.thread_id = current_thread_id();
  entry.did = did;
  entry.after_look = 0;
  bool is_allocation = did == Did::AllocNew || did == Did::AllocReuse;
  entry.is_complete.store(!is_allocation, std::memory_order_relaxed);
  written_.store(at + 1, std::memory_order_release);
  return &entry;
}

bool AllocatorTape::add_chunk() {
  auto chunk = spare_.exchange(nullptr, std::memory_order_acquire);
  if (!chunk) {
    chunk = new (std::nothrow) Chunk;
  }
  if (!chunk) {
    return false;
  }
  chunk->next.store(nullptr, std::memory_order_relaxed);
  (writer_ ? writer_->next : first_).store(chunk, std::memory_order_release);
  writer_ = chunk;
  return true;
}

void AllocatorTape::next_chunk_to_read() {
  auto left = reader_;
  reader_ = (left ? left->next : first_).load(std::memory_order_acquire);
  reader_end_ += kChunk;
  if (left) {
    set_aside(left);
  }
}

void AllocatorTape::set_aside(Chunk* chunk) {
  delete spare_.exchange(chunk, std::memory_order_acq_rel);
}

void AllocatorTape::forget() {
  reader_ = writer_ = nullptr;
  first_.store(nullptr);
  spare_.store(nullptr);
  written_.store(0);
  read_.store(0);
  reader_end_ = 0;
}

} // namespace mlxmem
