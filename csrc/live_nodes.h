// A list of the array nodes that live, read while the program goes on.

#pragma once

#include <cstdint>
#include <vector>

#include "node_registry.h"

namespace mlxmem {

// The record that Python reads as RAW_NODE.
struct LiveNode {
  uint64_t nbytes; // elements times the size of one
  uint64_t buffer; // 0: none
  TracebackId traceback;
  uint32_t pending; // 1: not evaluated
};
static_assert(sizeof(LiveNode) == 24, "events.py reads 24-byte records");

// The nodes of a registry, with the tracebacks of this session. A node that
// goes while it is read is left out. Takes no lock, and can't fault. False when
// memory can't be read so. Throws std::bad_alloc.
bool read_live_nodes(
    const NodeRegistry& registry,
    uint32_t session,
    std::vector<LiveNode>* out);

} // namespace mlxmem
