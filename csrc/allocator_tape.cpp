#include "allocator_tape.h"

#include <algorithm>
#include <new>

#include "clock.h"
#include "threads.h"

namespace mlxmem {

// Never destroyed: worker threads free buffers after static destructors ran.
AllocatorTape& allocator_tape = *new AllocatorTape;

void TapeNote::fill(uint64_t requested_size, const Origin& origin) const {
  if (!entry) {
    return;
  }
  entry->address = address;
  entry->size = size;
  entry->requested_size = requested_size;
  entry->ticks = ticks;
  entry->origin = origin;
  entry->thread_id = current_thread_id();
  entry->did = did;
  entry->after_look = after_look;
  entry->filled.store(number + 1, std::memory_order_release);
}

void AllocatorTape::start(const AllocatorWords& words) {
  look_after_awaited();
  uint64_t end = writer_.written.load(std::memory_order_relaxed);
  uint64_t first = reader_ ? reader_end_ - kChunk : read_.load();
  for (auto chunk = reader_ ? reader_ : first_.load(); chunk;) {
    auto next = chunk->next.load(std::memory_order_relaxed);
    chunk->first = std::min(first, end);
    chunk->end = std::min(first += kChunk, end);
    let_go(chunk);
    chunk = next;
  }
  begin_at((end + kChunk - 1) / kChunk * kChunk);
  writer_.lost.store(false, std::memory_order_relaxed);
  writer_.seen = words;
  writer_.owed = 0;
}

// An entry's number never comes again, which tells whether it is filled in.
void AllocatorTape::begin_at(uint64_t number) {
  reader_ = writer_.chunk = nullptr;
  first_.store(nullptr, std::memory_order_relaxed);
  writer_.written.store(number, std::memory_order_relaxed);
  read_.store(number, std::memory_order_relaxed);
  reader_end_ = number;
}

TapeNote AllocatorTape::look(const AllocatorWords& words, const void* freed) {
  TapeNote found;
  if (words.limits.cache != writer_.seen.limits.cache) {
    note(Did::SetCacheLimit, nullptr, words.limits.cache).fill();
  }
  if (words.limits.memory != writer_.seen.limits.memory) {
    note(Did::SetMemoryLimit, nullptr, words.limits.memory).fill();
  }
  if (words.active > writer_.seen.active) {
    uint64_t size = words.active - writer_.seen.active;
    bool from_cache = writer_.seen.cache - writer_.owed == words.cache + size;
    found = note(from_cache ? Did::AllocReuse : Did::AllocNew, nullptr, size);
  } else if (words.active < writer_.seen.active) {
    found = note(Did::FreeToOS, freed, writer_.seen.active - words.active);
  }
  writer_.seen = words;
  writer_.owed = 0;
  return found;
}

TapeNote AllocatorTape::cache_asked(
    const AllocatorWords& words,
    const void* buffer) {
  // A buffer that is freed left the active bytes just now.
  if (words.active >= writer_.seen.active) {
    return {};
  }
  uint64_t size = writer_.seen.active - words.active;
  writer_.seen.active = words.active;
  writer_.seen.cache += size;
  return note(Did::FreeToCache, buffer, size);
}

TapeNote AllocatorTape::cache_frees(
    const AllocatorWords& words,
    const void* buffer,
    uint64_t size) {
  // An allocation or a new limit makes the cache do it, which comes first.
  TapeNote allocation;
  if (words.active != writer_.seen.active ||
      words.limits.cache != writer_.seen.limits.cache) {
    allocation = look(words, nullptr);
  }
  note(Did::CacheReturn, buffer, size).fill();
  writer_.owed += size;
  return allocation;
}

TapeNote AllocatorTape::note(Did did, const void* buffer, uint64_t size) {
  uint64_t at = writer_.written.load(std::memory_order_relaxed);
  if (at % kChunk == 0 && !add_chunk()) {
    writer_.lost.store(true, std::memory_order_relaxed);
    return {};
  }
  TapeNote found;
  found.entry = &writer_.chunk->entries[at % kChunk];
  __builtin_prefetch(found.entry, 1); // another thread read it last
  found.number = at;
  found.address = reinterpret_cast<uint64_t>(buffer);
  found.size = size;
  found.ticks = TapeClock::ticks();
  found.did = did;
  writer_.written.store(at + 1, std::memory_order_release);
  return found;
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
  (writer_.chunk ? writer_.chunk->next : first_)
      .store(chunk, std::memory_order_release);
  writer_.chunk = chunk;
  return true;
}

void AllocatorTape::next_chunk_to_read() {
  auto left = reader_;
  reader_ = (left ? left->next : first_).load(std::memory_order_acquire);
  if (left) {
    left->first = reader_end_ - kChunk;
    left->end = reader_end_;
    let_go(left);
  }
  reader_end_ += kChunk;
}

bool AllocatorTape::is_awaited(const Chunk* chunk) {
  for (uint64_t at = chunk->first; at < chunk->end; ++at) {
    if (!chunk->entries[at % kChunk].is_filled(at)) {
      return true;
    }
  }
  return false;
}

void AllocatorTape::let_go(Chunk* chunk) {
  if (is_awaited(chunk)) {
    chunk->next.store(awaited_, std::memory_order_relaxed);
    awaited_ = chunk;
  } else {
    delete spare_.exchange(chunk, std::memory_order_acq_rel);
  }
}

void AllocatorTape::look_after_awaited() {
  auto chunk = awaited_;
  awaited_ = nullptr;
  while (chunk) {
    auto next = chunk->next.load(std::memory_order_relaxed);
    let_go(chunk);
    chunk = next;
  }
}

void AllocatorTape::forget() {
  spare_.store(nullptr, std::memory_order_relaxed);
  awaited_ = nullptr;
  begin_at(writer_.written.load() / kChunk * kChunk + kChunk);
}

} // namespace mlxmem
