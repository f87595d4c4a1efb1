// Where in the code nodes are made: what the probe of operator new looks a
// return address up in, on any thread, while libraries are loaded.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "node_sites.h"

namespace mlxmem {

enum class MadeHere { Nothing, Leaf, Node };

// Replaces the known sites by these. Under the attach lock; a thread may look
// into the older ones meanwhile, so they stay in memory.
void know_sites(const std::vector<NodeSite>& sites);

MadeHere made_at(const void* return_address);

} // namespace mlxmem
