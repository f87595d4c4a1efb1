#pragma once

#include <cstdint>

namespace mlxmem {

// Bytes that the operating system could still give to this process: the least
// of what is available, what its limit of address space leaves and what its
// control group leaves. On macOS the free and the inactive pages: it can give
// more, by compressing and swapping. -1 where none of them is known. Allocates
// nothing.
int64_t free_host_memory();

// Bytes that the CUDA driver could still hand out on the device of this
// thread's context. -1 where there is no driver or no context.
int64_t free_cuda_memory();

} // namespace mlxmem
