#include "cache_contents.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "own_memory.h"

namespace mlxmem {

namespace {

constexpr uint64_t kMost = 200000; // buffers, which take half a second
constexpr int kTries = 3;
constexpr size_t kBatch = 1 << 14; // sizes

// Reads memory by the page and keeps some pages: a system call takes longer
// than all that a page holds, and MLX's holders lie close together.
class PageReader {
 public:
  // False where the memory can't be read. Throws std::bad_alloc.
  bool read(uint64_t address, size_t size, void* out) {
    auto target = static_cast<char*>(out);
    while (size) {
      uint64_t offset = address % kPage;
      size_t n = std::min<size_t>(size, kPage - offset);
      const char* page = find(address - offset);
      if (!page) {
        return false;
      }
      std::memcpy(target, page + offset, n);
      target += n;
      address += n;
      size -= n;
    }
    return true;
  }

 private:
  static constexpr uint64_t kPage = 4096; // divides that of every system
  static constexpr size_t kPages = 256;

  const char* find(uint64_t page) {
    size_t slot = page / kPage % kPages;
    char* memory = memory_.get() + slot * kPage;
    if (pages_[slot] != page) {
      pages_[slot] = 0;
      address_.assign(1, reinterpret_cast<const void*>(page));
      if (!read_own_memory(address_, kPage, memory, &readable_) ||
          !readable_[0]) {
        return nullptr;
      }
      pages_[slot] = page;
    }
    return memory;
  }

  std::unique_ptr<char[]> memory_{new char[kPages * kPage]};
  uint64_t pages_[kPages] = {}; // 0: none
  std::vector<const void*> address_;
  std::vector<bool> readable_;
};

// The addresses, oldest first.
bool read_list(const CacheList& list, std::vector<CachedBuffer>* out) {
  PageReader memory;
  out->clear();
  out->reserve(list.count);
  uint64_t older = 0;
  uint64_t at = list.oldest;
  while (at && out->size() < list.count) {
    abi::CacheHolder holder;
    if (!memory.read(at, sizeof(holder), &holder) || holder.older != older ||
        !holder.buffer) {
      return false;
    }
    out->push_back({holder.buffer, 0});
    older = at;
    at = holder.newer;
  }
  return !at && older == list.newest && out->size() == list.count;
}

bool read_sizes(size_t offset, std::vector<CachedBuffer>* buffers) {
  std::vector<const void*> addresses;
  std::vector<uint64_t> sizes(std::min(kBatch, buffers->size()));
  std::vector<bool> readable;
  for (size_t at = 0; at < buffers->size(); at += kBatch) {
    size_t n = std::min(kBatch, buffers->size() - at);
    addresses.clear();
    for (size_t i = 0; i < n; ++i) {
      addresses.push_back(
          reinterpret_cast<const void*>((*buffers)[at + i].address + offset));
    }
    if (!read_own_memory(
            addresses, sizeof(uint64_t), sizes.data(), &readable) ||
        std::find(readable.begin(), readable.end(), false) != readable.end()) {
      return false;
    }
    for (size_t i = 0; i < n; ++i) {
      (*buffers)[at + i].size = sizes[i];
    }
  }
  return true;
}

bool adds_up(const std::vector<CachedBuffer>& buffers, uint64_t bytes) {
  uint64_t sum = 0;
  for (auto& buffer : buffers) {
    if (buffer.size == 0 || buffer.size > bytes - sum) {
      return false;
    }
    sum += buffer.size;
  }
  return sum == bytes;
}

bool read_once(const MlxCounters& counters, bool is_held, CacheContents* out) {
  CacheList before, after;
  if (!counters.peek_cache_list(&before, is_held) || before.count > kMost ||
      !read_list(before, &out->buffers) ||
      !read_sizes(counters.buffer_size_offset(), &out->buffers) ||
      !adds_up(out->buffers, before.bytes)) {
    return false;
  }
  out->bytes = before.bytes;
  return counters.peek_cache_list(&after, is_held) && after == before;
}

} // namespace

CacheContents read_cache_contents(
    const MlxCounters& counters,
    bool is_held) noexcept {
  try {
    for (int i = 0; counters.knows_cache() && i < kTries; ++i) {
      CacheContents contents;
      if (read_once(counters, is_held, &contents)) {
        contents.is_known = true;
        return contents;
      }
      timespec pause = {0, 20000};
      nanosleep(&pause, nullptr);
    }
  } catch (const std::bad_alloc&) {
    // Then nothing is known.
  }
  return {};
}

} // namespace mlxmem
