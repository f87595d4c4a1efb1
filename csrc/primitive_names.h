// Numbers for primitive names, the same for the whole life of the process.

#pragma once

#include "event.h"

namespace mlxmem {

// The number of a name, 0 when the numbers or the memory are used up. Locks,
// and allocates for a new name.
PrimitiveId intern_primitive_name(const char* name) noexcept;

// nullptr beyond the last number; the text lives as long as the process.
const char* primitive_name(PrimitiveId id);

// Around fork(): the child must find the lock free.
void lock_primitive_names();
void unlock_primitive_names();

} // namespace mlxmem
