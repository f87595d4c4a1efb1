#include "buffer_table.h"

namespace mlxmem {

void BufferTable::clear() {
  *this = BufferTable();
}

uint32_t BufferTable::insert(uint64_t address) {
  if (2 * (used_ + 1) > index_.size()) {
    grow();
  }
  uint32_t slot;
  if (free_slots_.empty()) {
    slot = slots_.size();
    slots_.emplace_back();
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[slot] = TrackedBuffer();
  }
  slots_[slot].event.address = address;
  size_t mask = index_.size() - 1;
  size_t i = home(address);
  while (index_[i] != kNone) {
    i = (i + 1) & mask;
  }
  index_[i] = slot;
  ++used_;
  return slot;
}

void BufferTable::erase(uint32_t slot) {
  size_t mask = index_.size() - 1;
  size_t i = home(slots_[slot].event.address);
  while (index_[i] != slot) {
    i = (i + 1) & mask;
  }
  // Close the gap: move up every later entry of the run whose home allows it.
  for (size_t j = (i + 1) & mask; index_[j] != kNone; j = (j + 1) & mask) {
    size_t wanted = home(slots_[index_[j]].event.address);
    if (((j - wanted) & mask) >= ((j - i) & mask)) {
      index_[i] = index_[j];
      i = j;
    }
  }
  index_[i] = kNone;
  free_slots_.push_back(slot);
  --used_;
}

void BufferTable::grow() {
  // Room for every erase() to come: it must not allocate.
  free_slots_.reserve(index_.empty() ? 1024 : index_.size());
  std::vector<uint32_t> index(index_.empty() ? 1024 : 2 * index_.size(), kNone);
  index_.swap(index);
  size_t mask = index_.size() - 1;
  for (uint32_t slot : index) {
    if (slot != kNone) {
      size_t i = home(slots_[slot].event.address);
      while (index_[i] != kNone) {
        i = (i + 1) & mask;
      }
      index_[i] = slot;
    }
  }
}

} // namespace mlxmem
