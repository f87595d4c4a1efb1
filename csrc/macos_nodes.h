// How nodes are seen where libmlx calls the functions of its arrays directly,
// on macOS: by the memory they are made in, and by the control block that
// destroys them.

#pragma once

#include <vector>

#include "image.h"
#include "mlx_core.h"
#include "node_sites.h"
#include "patch_set.h"

namespace mlxmem {

struct NodeMaker {
  void** operator_new = nullptr; // the import slot
  NodeSites nodes;
  std::vector<void**> control_blocks; // vtables, by their first function
};

// What a library makes nodes with, checked; without any sites when it makes
// none. Its code is read once, and its sites are known from then on. Under the
// attach lock. Throws AttachError.
const NodeMaker& node_maker(const MlxCore& mlx, const Image& image);

// The patches of a library that makes nodes. Throws AttachError.
std::vector<Patch> patches_of(const NodeMaker& maker, const Image& image);

} // namespace mlxmem
