#pragma once

#include <cstdint>

namespace mlxmem {

namespace threads {
inline thread_local uint32_t current_id = 0;
uint32_t ask_current_id();
} // namespace threads

// The operating system's id of the calling thread, Python's native id; a system
// call only once per thread. macOS counts its threads in 64 bits from the boot
// on: these are the low 32, so they are all of it for the first 4 billion.
inline uint32_t current_thread_id() {
  return threads::current_id ? threads::current_id : threads::ask_current_id();
}

// In a forked child, whose thread has a new id.
void forget_current_thread_id();

} // namespace mlxmem
