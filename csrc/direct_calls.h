// Calls of virtual functions that pass by their table, for macOS: a patched
// table does not see them.

#pragma once

#include <cstddef>
#include <vector>

#include "image.h"

namespace mlxmem {

// How many instructions of the image call one of these functions, or jump to
// it, by its address. A look takes milliseconds, so an image that has none is
// remembered.
size_t direct_calls(const Image& image, const std::vector<void*>& functions);

} // namespace mlxmem
