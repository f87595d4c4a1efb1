// One transition of a buffer, and one buffer that is there: the records that
// the event log keeps and that Python reads as numpy arrays.

#pragma once

#include <cstdint>

namespace mlxmem {

using TracebackId = uint32_t; // 0: no traceback
using PrimitiveId = uint16_t; // 0: no primitive

// The numbers are those of mlxmem.events.Action.
enum class Action : uint8_t {
  AllocNew,
  AllocReuse,
  AllocMakeBuffer,
  FreeActiveToCache,
  FreeActiveToOS,
  Release,
  FreeCacheToOS,
};

enum class BufferState : uint8_t { Active, Cached };

struct Event {
  uint64_t address;
  uint64_t size; // bytes, of the buffer
  uint64_t requested_size; // bytes
  int64_t timestamp_us; // since the session began
  TracebackId traceback; // a free carries its allocation's
  PrimitiveId primitive; // likewise
  uint8_t kind; // Action; in a list of buffers BufferState
  // AllocNew: how many events of other threads came after MLX had looked into
  // the cache for it, at most 255, where that is known.
  uint8_t after_look;
  int32_t stream; // -1: none
  uint32_t thread_id; // the operating system's
};
static_assert(sizeof(Event) == 48, "events.py reads 48-byte records");

} // namespace mlxmem
