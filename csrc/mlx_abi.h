// Every fact about MLX's binary interface that mlxmem relies on stands here.
// The values were read from the wheels of MLX 0.30.6 to 0.32.4, for Linux and,
// where MLXMEM_MACOS chooses another one, for macOS on arm64.
// mlx_checks.cpp checks symbols, vtables, names and the node's layout on the
// running process before a word is changed; what a mangled name says of a
// function's arguments is taken from the name.

#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "platform.h"

namespace mlxmem::abi {

// ---- mlx::core::allocator ------------------------------------------------

// Buffer is one pointer and travels in a register; it is void* here.
using MallocFn = void* (*)(void* self, size_t size);
using FreeFn = void (*)(void* self, void* buffer);
using SizeFn = size_t (*)(const void* self, void* buffer);
using MakeBufferFn = void* (*)(void* self, void* pointer, size_t size);

enum AllocatorSlot {
  kMalloc = 0,
  kFree = 1,
  kSize = 2,
  kMakeBuffer = 3,
  kRelease = 4,
  kAllocatorSlots = 7, // then the complete and the deleting destructor
};

constexpr const char* kAllocatorSymbol = "_ZN3mlx4core9allocator9allocatorEv";
constexpr const char* kAllocatorTypeSymbol =
    "_ZTIN3mlx4core9allocator9AllocatorE";
// libmlx.dylib does not export it: there the class is known by its RTTI name.
constexpr const char* kAllocatorTypeName = "N3mlx4core9allocator9AllocatorE";
using AllocatorGetter = void* (*)();

// size_t(void), MLX's own counters in bytes.
constexpr const char* kActiveMemorySymbol = "_ZN3mlx4core17get_active_memoryEv";
constexpr const char* kCacheMemorySymbol = "_ZN3mlx4core16get_cache_memoryEv";
constexpr const char* kPeakMemorySymbol = "_ZN3mlx4core15get_peak_memoryEv";
constexpr const char* kMemoryLimitSymbol = "_ZN3mlx4core16get_memory_limitEv";
using CounterFn = size_t (*)();

// CUDA's kernels allocate by a function that is not in the vtable.
constexpr const char* kCudaAllocatorName = "CudaAllocator";
constexpr const char* kMetalAllocatorName = "MetalAllocator";
// Set in the environment, the CPU's allocator is followed as CUDA's is, which
// is how that is tested where there is no GPU.
constexpr const char* kFollowMutexVariable = "MLXMEM_FOLLOW_MUTEX";

// An allocator with a BufferCache, from 0.32.0. MLX has no getter of the cache
// limit, and its getter of the cached bytes takes a mutex. Used only where the
// words that MLX's functions also return have the values that they return.
struct AllocatorLayout {
  const char* type; // RTTI name
  size_t memory_limit;
  size_t cache_limit;
  size_t active;
  size_t peak;
  size_t mutex; // glibc: an int that is 0 while it is free
  uint64_t page; // what the cache has as its page size
  size_t buffer_size; // where a buffer holds its size, a size_t
};
constexpr AllocatorLayout kCpuAllocator =
    {"N3mlx4core9allocator15CommonAllocatorE", 8, 16, 24, 32, 40, 4096, 0};
constexpr AllocatorLayout kCudaAllocator =
    {"N3mlx4core2cu13CudaAllocatorE", 48, 72, 224, 232, 8, 16384, 8};

// Metal's allocator: eight words that follow one another, and the cached bytes.
// They are read, and no other word of it.
struct MetalLayout {
  size_t memory_limit;
  size_t cache_memory;
};
enum MetalWord {
  kMetalMemoryLimit,
  kMetalGcLimit, // from here on the cache is given back for new buffers
  kMetalActive,
  kMetalPeak,
  kMetalCacheLimit,
  kMetalWiredLimit,
  kMetalResources, // how many buffers there are, cached ones included
  kMetalResourceLimit,
};
constexpr MetalLayout kMetalAllocators[] = {
    {200, 64}, // 0.30.6
    {152, 72}, // from 0.31.2
};

// BufferCache, at 80 in both: a std::multimap by size, which keeps its count
// last, and a list of what it holds by age.
constexpr size_t kCacheCount = 120;
constexpr size_t kCacheNewest = 128; // BufferHolder*, null: it is empty
constexpr size_t kCacheOldest = 136;
constexpr size_t kCacheMemory = 144;
constexpr size_t kCachePageSize = 152;
// Two std::function: two words for what they hold, a manager and an invoker.
// The cache calls both with the allocator's mutex held.
constexpr size_t kCacheGetSizeInvoker = 184;
constexpr size_t kCacheFree = 192; // on the CPU it holds the pointer std::free
constexpr size_t kCacheFreeInvoker = 216;
using CacheFreeFn = void (*)(void* buffer);
using CacheInvoker = size_t (*)(const void* function, void** buffer);

// libmlx calls it through a slot for every std::mutex.
constexpr const char* kUnlockSymbol = "pthread_mutex_unlock";
using UnlockFn = int (*)(pthread_mutex_t* mutex);

// BufferCache::BufferHolder.
struct CacheHolder {
  uint64_t newer; // CacheHolder*, prev there
  uint64_t older; // next
  uint64_t buffer;
};

// ---- mlx::core::Primitive ------------------------------------------------

using EvalFn = void (*)(void* self, const void* inputs, void* outputs);
using NameFn = const char* (*)(const void* self);

enum PrimitiveSlot { kEvalCpu = 0, kEvalGpu = 1, kName = 5 };

constexpr const char* kPrimitiveTypeSymbol = "_ZTIN3mlx4core9PrimitiveE";
constexpr const char* kUnaryPrimitiveTypeSymbol =
    "_ZTIN3mlx4core14UnaryPrimitiveE";
// Nor this one, which is Add's base.
constexpr const char* kUnaryPrimitiveTypeName = "N3mlx4core14UnaryPrimitiveE";
constexpr size_t kPrimitiveStream = 8; // Stream: int index, then the device

struct Stream {
  int index;
  int device_type;
  int device_index;
};

// Exported vtables whose classes have a fixed name(): the check that the RTTI
// scan and the name slot are right.
struct KnownPrimitive {
  const char* vtable_symbol;
  const char* name;
};
constexpr KnownPrimitive kKnownPrimitives[] = {
    {"_ZTVN3mlx4core3AddE", "Add"},
    {"_ZTVN3mlx4core3ExpE", "Exp"},
};

// CPU kernels that allocate scratch memory on the stream's worker thread
// (LAPACK workspaces); RTTI names.
constexpr const char* kAllocatesOnWorker[] = {
    "N3mlx4core3SVDE",
    "N3mlx4core3QRFE",
    "N3mlx4core3LUFE",
    "N3mlx4core3EigE",
    "N3mlx4core4EighE",
    "N3mlx4core7InverseE",
    "N3mlx4core8CholeskyE",
};

// ---- mlx::core::array ----------------------------------------------------

// array is one shared_ptr; its first word is the ArrayDesc.
// std::vector<array>: begin, end, capacity.
enum VectorWord { kVectorBegin = 0, kVectorEnd = 1 };
constexpr size_t kArrayWords = 2;

// ArrayDesc. The three paddings are never written by MLX: every store to
// `status` and to `position` is 32 bits wide, every one to `is_tracer` 8.
constexpr size_t kDescSize = 368;
constexpr size_t kDescShape = 0; // SmallVector: begin at 8, end at 16
constexpr size_t kDescStrides = 72;
constexpr size_t kDescElements = 184;
constexpr size_t kDescDtype = 192; // Dtype, with kDtypeSize
constexpr size_t kDtypeSize = 4;
constexpr size_t kDescPrimitive = 200;
constexpr size_t kDescStatus = 216;
constexpr uint32_t kUnscheduled = 0; // array::Status
constexpr size_t kDescStatusPadding = 220;
constexpr size_t kDescTracerPadding = 268;
constexpr size_t kDescData = 272; // shared_ptr<Data>; Data's first word: buffer
constexpr size_t kDescTailPadding = 364;

// SmallVector<int, 10>: the allocator's byte, begin, end, capacity, storage.
struct Shape {
  void* allocator;
  int* begin;
  int* end;
  int* capacity;
  int storage[10];
};
static_assert(sizeof(Shape) == kDescStrides - kDescShape, "");
constexpr size_t kSmallVectorBegin = 8;
constexpr size_t kSmallVectorEnd = 16;

// Dtype is {int32 val, uint8 size} and travels in one register.
using DescLeafCtor = void (*)(void* self, Shape* shape, uint64_t dtype);
using DescNodeCtor = void (*)(
    void* self,
    Shape* shape,
    uint64_t dtype,
    void* primitive_shared_ptr,
    void* inputs_vector);
using DescDtor = void (*)(void* self);
using DescInitFn = void (*)(void* self);

constexpr const char* kDescInitSymbol = "_ZN3mlx4core5array9ArrayDesc4initEv";
#if MLXMEM_MACOS
#define MLXMEM_LEAF_CTOR(which)                        \
  "_ZN3mlx4core5array9ArrayDesc" which                 \
  "ENS0_11SmallVectorIiLm10ENSt3__19allocatorIiEEEENS" \
  "0_5DtypeE"
#define MLXMEM_NODE_CTOR(which)                               \
  "_ZN3mlx4core5array9ArrayDesc" which                        \
  "ENS0_11SmallVectorIiLm10ENSt3__19allocatorIiEEEENS"        \
  "0_5DtypeENS4_10shared_ptrINS0_9PrimitiveEEENS4_6vectorIS1" \
  "_NS5_IS1_EEEE"
// Inside libmlx.dylib either form of a constructor is called.
constexpr const char* kDescLeafBaseCtorSymbol = MLXMEM_LEAF_CTOR("C2");
constexpr const char* kDescNodeBaseCtorSymbol = MLXMEM_NODE_CTOR("C2");
#else
#define MLXMEM_LEAF_CTOR(which)        \
  "_ZN3mlx4core5array9ArrayDesc" which \
  "ENS0_11SmallVectorIiLm10ESaIiEEENS0_5DtypeE"
#define MLXMEM_NODE_CTOR(which)                  \
  "_ZN3mlx4core5array9ArrayDesc" which           \
  "ENS0_11SmallVectorIiLm10ESaIiEEENS0_5DtypeES" \
  "t10shared_ptrINS0_9PrimitiveEESt6vectorIS1_SaIS1_EE"
#endif
constexpr const char* kDescLeafCtorSymbol = MLXMEM_LEAF_CTOR("C1");
constexpr const char* kDescNodeCtorSymbol = MLXMEM_NODE_CTOR("C1");
#undef MLXMEM_LEAF_CTOR
#undef MLXMEM_NODE_CTOR
constexpr const char* kDescDtorSymbol = "_ZN3mlx4core5array9ArrayDescD1Ev";
// The same function, which no library of MLX imports by this name; a compiler
// of an extension may.
constexpr const char* kDescBaseDtorSymbol = "_ZN3mlx4core5array9ArrayDescD2Ev";

// ---- nodes on macOS, where libmlx calls its own functions directly ---------

// std::make_shared<ArrayDesc>() of libc++: one block of memory by operator new,
// which both libraries call through a slot; the node follows the block's head.
constexpr const char* kOperatorNewSymbol = "_Znwm";
using OperatorNewFn = void* (*)(size_t size);
constexpr size_t kControlBlockHead = 24;
constexpr size_t kNodeBlockSize = kControlBlockHead + kDescSize;

// Its class, by RTTI name. The vtable's slot that destroys the node when the
// last reference goes; the slots are the two destructors, this one, get_deleter
// and the one that frees the block.
constexpr const char* kControlBlockTypeName =
    "NSt3__120__shared_ptr_emplaceIN3mlx4core5array9ArrayDescENS_"
    "9allocatorIS4_EEEE";
enum ControlBlockSlot { kOnZeroShared = 2, kControlBlockSlots = 5 };
using OnZeroSharedFn = void (*)(void* block);

// array::set_data in its three eras. Flags is a one-byte struct in a register;
// Strides, std::function and Data travel by invisible reference.
struct Flags {
  uint8_t bits;
};
using SetDataFn = void (*)(void* self, void* buffer_or_data, void* deleter);
using SetDataLongFn = void (*)(
    void* self,
    void* buffer,
    size_t data_size,
    void* strides,
    Flags flags,
    void* deleter);
using SetDataOffsetFn = void (*)(
    void* self,
    void* buffer,
    size_t data_size,
    void* strides,
    Flags flags,
    int64_t offset,
    void* deleter);
using SetDataOwnedFn = void (*)(void* self, void* data);
using SetDataOwnedLongFn = void (*)(
    void* self,
    void* data,
    size_t data_size,
    void* strides,
    Flags flags,
    int64_t offset);

// 0.30.6 to 0.32.3
constexpr const char* kSetDataSymbol =
    "_ZN3mlx4core5array8set_dataENS0_9allocator6BufferESt8functionIFvS3_EE";
// 0.30.6 to 0.31.2
constexpr const char* kSetDataLongSymbol =
    "_ZN3mlx4core5array8set_dataENS0_9allocator6BufferEmNS0_11SmallVectorIlLm"
    "10ESaIlEEENS1_5FlagsESt8functionIFvS3_EE";
// 0.32.0 to 0.32.3
constexpr const char* kSetDataOffsetSymbol =
    "_ZN3mlx4core5array8set_dataENS0_9allocator6BufferEmNS0_11SmallVectorIlLm"
    "10ESaIlEEENS1_5FlagsElSt8functionIFvS3_EE";
// from 0.32.4; Data's first word is the buffer
constexpr const char* kSetDataOwnedSymbol =
    "_ZN3mlx4core5array8set_dataENS0_9allocator4DataE";
constexpr const char* kSetDataOwnedLongSymbol =
    "_ZN3mlx4core5array8set_dataENS0_9allocator4DataEmNS0_11SmallVectorIlLm10"
    "ESaIlEEENS1_5FlagsEl";

// ---- mlx::core::scheduler (out of line from 0.31.2) -----------------------

constexpr const char* kEnqueueSymbol =
    "_ZN3mlx4core9scheduler9Scheduler7enqueueENS0_6StreamESt8functionIFvvEE";
using EnqueueFn =
    void (*)(void* self, Stream stream, std::function<void()>* task);

// ---- the Python binding ---------------------------------------------------

// MLX's binding releases the GIL through these; both take or return a thread
// state that is only handed on.
constexpr const char* kReleaseGilSymbol = "PyEval_SaveThread";
constexpr const char* kAcquireGilSymbol = "PyEval_RestoreThread";
using ReleaseGilFn = void* (*)();
using AcquireGilFn = void (*)(void* thread_state);

} // namespace mlxmem::abi
