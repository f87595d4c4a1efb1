// The classes of control blocks that hold an ArrayDesc, one in each library
// that makes nodes: each that is patched gets a function of its own for
// __on_zero_shared, which knows its original.

#pragma once

#include <cstddef>

#include "mlx_abi.h"

namespace mlxmem {

// What goes into the vtable's slot of __on_zero_shared. nullptr when the supply
// of functions is used up.
void* on_zero_shared_replacement(void** vtable);

// Defined by the probes: what every replacement does.
void destroy_node(void* block, abi::OnZeroSharedFn original);

} // namespace mlxmem
