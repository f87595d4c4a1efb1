// Reads this process's memory where another thread may unmap it meanwhile.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mlxmem {

// Copies size bytes from each address into out, one after the other, and tells
// in readable which of them could be read. False when this system offers no way
// to read without a fault. Throws std::bad_alloc.
bool read_own_memory(
    const std::vector<const void*>& addresses,
    size_t size,
    void* out,
    std::vector<bool>* readable);

} // namespace mlxmem
