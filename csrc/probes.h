// What runs inside MLX while mlxmem is attached. attach.cpp puts these
// functions in the place of MLX's; each calls the original and, while a session
// records, notes what happened. The order is always: guard (is this thread
// inside the allocator already? Is it the allocator's mutex?), flag (does a
// session record?), work.

#pragma once

#include <cstddef>
#include <cstdint>

#include "event.h"
#include "image.h"
#include "mlx_abi.h"

namespace mlxmem {

using TracebackCaptureFunc = TracebackId (*)();

namespace probes {

// The allocator's virtual functions, and the function with which the CPU's
// cache frees.
void* malloc(void* self, size_t size);
void free(void* self, void* buffer);
void* make_buffer(void* self, void* pointer, size_t size);
void release(void* self, void* buffer);
void cache_free(void* buffer);

// What the tape of an allocator is noted by: the functions that its cache
// calls, and the release of its mutex.
size_t cache_get_size(const void* function, void** buffer);
size_t cache_free_invoker(const void* function, void** buffer);
int mutex_unlock(pthread_mutex_t* mutex);

// ArrayDesc::init(): a node was created.
void desc_init(void* desc);

// ~ArrayDesc().
void desc_destroy(void* desc);

#if MLXMEM_MACOS
// operator new: a node is about to be constructed, if it is for one.
void* operator_new(size_t size);
#endif

// The forms of array::set_data(): a buffer was bound to an array.
void set_data(void* self, void* buffer, void* deleter);
void set_data_long(
    void* self,
    void* buffer,
    size_t data_size,
    void* strides,
    abi::Flags flags,
    void* deleter);
void set_data_offset(
    void* self,
    void* buffer,
    size_t data_size,
    void* strides,
    abi::Flags flags,
    int64_t offset,
    void* deleter);
void set_data_owned(void* self, void* data);
void set_data_owned_long(
    void* self,
    void* data,
    size_t data_size,
    void* strides,
    abi::Flags flags,
    int64_t offset);
void enqueue(void* self, abi::Stream stream, std::function<void()>* task);

// MLX's binding releases and takes Python's lock.
void* release_gil();
void acquire_gil(void* thread_state);

} // namespace probes

// ---- what the probes work with --------------------------------------------

// nullptr or false: nodes and allocations get no traceback.
void set_traceback_capture_func(TracebackCaptureFunc capture);
void set_traceback_tracking(bool tracking);

// Called when a node is created whose primitive's eval_cpu lies outside of
// own_code, the code of this library: a class that is not patched. It must not
// throw.
using UnknownClassHandler = void (*)(void** vtable);
void set_unknown_class_handler(
    UnknownClassHandler handler,
    const MemoryRange& own_code);

// Writes down an allocation of the calling thread of which no array will have
// the buffer: before its next one, and before the tape is read as a whole.
void fill_own_allocation();

// The traceback id that a node carries; 0 when it was created outside the
// running session.
TracebackId traceback_of(const void* desc);

// In a forked child: what the calling thread remembers of its parent.
void forget_thread_state();

} // namespace mlxmem
