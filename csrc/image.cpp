#include "image.h"

#include <algorithm>

namespace mlxmem {

bool Image::contains(const void* address) const {
  for (auto& range : mapped_) {
    if (range.contains(address)) {
      return true;
    }
  }
  return false;
}

MemoryRange Image::code_of(const void* address) const {
  for (auto& range : code_) {
    if (range.contains(address)) {
      return range;
    }
  }
  return MemoryRange();
}

MemoryRange Image::span() const {
  MemoryRange span = mapped_.empty() ? MemoryRange() : mapped_.front();
  for (auto& range : mapped_) {
    span.begin = std::min(span.begin, range.begin);
    span.end = std::max(span.end, range.end);
  }
  return span;
}

} // namespace mlxmem
