#pragma once

#include <cstdint>

namespace mlxmem {

// The operating system's id of the calling thread; a system call only once per
// thread.
uint32_t current_thread_id();

// In a forked child, whose thread has a new id.
void forget_current_thread_id();

} // namespace mlxmem
