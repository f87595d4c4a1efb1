#include "live_nodes.h"

#include <cstring>
#include <memory>

#include "own_memory.h"

namespace mlxmem {

namespace {

// The part of a node that is read.
constexpr size_t kFirst = abi::kDescElements;
constexpr size_t kPart = abi::kDescSize - kFirst;

class NodePart {
 public:
  explicit NodePart(const char* bytes) : bytes_(bytes) {}

  template <typename Value>
  Value at(size_t offset) const {
    Value value;
    std::memcpy(&value, bytes_ + offset - kFirst, sizeof(value));
    return value;
  }

 private:
  const char* bytes_;
};

LiveNode read_node(const NodePart& part, const void* desc, uint32_t session) {
  LiveNode node = {};
  node.nbytes = part.at<uint64_t>(abi::kDescElements) *
      part.at<uint8_t>(abi::kDescDtype + abi::kDtypeSize);
  node.pending = part.at<uint32_t>(abi::kDescStatus) == abi::kUnscheduled &&
      part.at<uint64_t>(abi::kDescPrimitive) != 0;
  if (part.at<uint32_t>(abi::kDescStatusPadding) == node_tag(desc, session)) {
    node.traceback = part.at<TracebackId>(abi::kDescTailPadding);
  }
  return node;
}

constexpr size_t kBatch = 1 << 14; // nodes, 3 MB of memory

} // namespace

bool read_live_nodes(
    const NodeRegistry& registry,
    uint32_t session,
    std::vector<LiveNode>* out) {
  auto slots = registry.slots();
  out->clear();
  out->reserve(slots.size());
  auto memory = std::make_unique<char[]>(kBatch * kPart);
  auto buffers = std::make_unique<uint64_t[]>(kBatch);
  std::vector<const void*> addresses;
  std::vector<bool> readable;
  std::vector<size_t> with_data; // nodes of out, in the order of addresses
  for (size_t at = 0; at < slots.size(); at += kBatch) {
    size_t n = std::min(kBatch, slots.size() - at);
    addresses.clear();
    for (size_t i = at; i < at + n; ++i) {
      addresses.push_back(static_cast<const char*>(slots[i].desc) + kFirst);
    }
    if (!read_own_memory(addresses, kPart, memory.get(), &readable)) {
      return false;
    }
    addresses.clear();
    with_data.clear();
    for (size_t i = 0; i < n; ++i) {
      auto& slot = slots[at + i];
      NodePart part(memory.get() + i * kPart);
      if (!readable[i] ||
          part.at<uint32_t>(abi::kDescTracerPadding) != slot.number ||
          !registry.holds(slot)) {
        continue;
      }
      auto data = part.at<uint64_t>(abi::kDescData);
      if (data) {
        addresses.push_back(reinterpret_cast<const void*>(data));
        with_data.push_back(out->size());
      }
      out->push_back(read_node(part, slot.desc, session));
    }
    // array::Data begins with the buffer.
    if (!read_own_memory(
            addresses, sizeof(uint64_t), buffers.get(), &readable)) {
      return false;
    }
    for (size_t i = 0; i < with_data.size(); ++i) {
      if (readable[i]) {
        (*out)[with_data[i]].buffer = buffers[i];
      }
    }
  }
  return true;
}

} // namespace mlxmem
