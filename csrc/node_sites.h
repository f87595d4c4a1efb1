// Where the code of a library makes nodes with std::make_shared, for macOS,
// where libmlx calls its own constructors directly.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "image.h"

namespace mlxmem {

// A constructor of ArrayDesc in libmlx.
struct NodeConstructor {
  uintptr_t address;
  bool is_leaf; // without a primitive
};

// A call of operator new for a node and its control block.
struct NodeSite {
  uintptr_t return_address;
  bool is_leaf;
};

struct NodeSites {
  std::vector<NodeSite> sites; // by address
  // Where the library constructs nodes. Another number than that of the sites
  // means that some are made in a way that is not known.
  size_t constructor_calls = 0;
};

// operator_new_slot: through which the image imports operator new. Milliseconds
// for each 10 MB of code.
NodeSites find_node_sites(
    const Image& image,
    void* const* operator_new_slot,
    const std::vector<NodeConstructor>& constructors);

} // namespace mlxmem
