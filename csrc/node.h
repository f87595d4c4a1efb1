// What mlxmem keeps in an array's node, in bytes that MLX never writes: the
// traceback id, a tag that tells whether it is one, and the node's slot in the
// registry.

#pragma once

#include <cstddef>
#include <cstdint>

#include "event.h"
#include "mlx_abi.h"

namespace mlxmem {

inline uint32_t* word_at(void* object, size_t offset) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(object) + offset);
}

inline const uint32_t* word_at(const void* object, size_t offset) {
  return word_at(const_cast<void*>(object), offset);
}

// A node made while nothing was attached holds whatever the heap held. The
// second padding holds a tag of session and address, so that neither an old
// session's id nor a stray value passes for a traceback of this one.
inline uint32_t node_tag(const void* desc, uint32_t session) {
  return session * 0x9E3779B1u ^
      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(desc) >> 4);
}

inline void set_traceback(void* desc, TracebackId id, uint32_t session) {
  *word_at(desc, abi::kDescTailPadding) = id;
  *word_at(desc, abi::kDescStatusPadding) = node_tag(desc, session);
}

} // namespace mlxmem
