#include "probes.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "allocator_tape.h"
#include "book_tape.h"
#include "cache_state.h"
#include "node.h"
#include "originals.h"
#include "primitive_classes.h"
#include "session.h"
#include "threads.h"

#if MLXMEM_MACOS
#include "control_blocks.h"
#include "known_sites.h"
#endif

namespace mlxmem {

Originals originals;
MlxCounters mlx_counters;

namespace {

// ---- state ---------------------------------------------------------------

std::atomic<TracebackCaptureFunc> capture_func{nullptr};
std::atomic<bool> tracking{true};
std::atomic<UnknownClassHandler> unknown_class{nullptr};
MemoryRange own_code; // where every replaced eval_cpu points to

// The primitive that this thread evaluates.
struct Operation {
  const void* primitive = nullptr; // nullptr on a worker: the name is known
  PrimitiveClass* primitive_class = nullptr; // nullptr: no operation
  TracebackId traceback = 0;
  uint32_t session = 0;
  int32_t stream = -1;
  PrimitiveId name = 0;
};

struct ThreadState {
  Operation operation;
  // Captured when MLX's binding released the GIL, for what it does until it
  // takes it again.
  TracebackId released_traceback = 0;
  uint32_t released_session = 0;
  CallSampler timed_calls; // of the allocator's malloc
  uint32_t since_sample = 0; // events and nodes that came or went
  bool in_allocator = false;
  // Of the tape: an allocation that is to be filled in, and its session.
  TapeNote allocation;
  uint32_t allocation_session = 0;
  TapeNote recycled; // in the hold of the mutex that is under way
  uint64_t seen_end = 0; // the tape's end when it last released the mutex
  // Nothing changed then, in this session: it may have been a look into the
  // cache.
  bool has_looked = false;
  uint32_t looked_session = 0;
  bool noted_failure = false; // of the operation
  const void* being_freed = nullptr;
};

thread_local ThreadState thread;

TracebackId capture() {
  auto function = capture_func.load(std::memory_order_relaxed);
  if (!function || !tracking.load(std::memory_order_relaxed)) {
    return 0;
  }
  return function();
}

uint32_t session_number() {
  return session.number.load(std::memory_order_relaxed);
}

struct CapturedTraceback {
  TracebackId id;
  uint32_t session; // in which it was captured
};

// The Python stack of this thread, or the one with which it released the GIL.
CapturedTraceback capture_or_released() {
  TracebackId id = capture();
  if (!id && thread.released_traceback) {
    return {thread.released_traceback, thread.released_session};
  }
  return {id, session_number()};
}

// ---- to whom an allocation belongs ----------------------------------------

Origin origin_of_node(const void* desc) {
  Origin origin;
  origin.session = session_number();
  origin.traceback = traceback_of(desc);
  return origin;
}

Origin origin_of_allocation() {
  Origin origin;
  auto& operation = thread.operation;
  if (operation.primitive_class) {
    if (!operation.name && operation.primitive) {
      operation.name = operation.primitive_class->name_of(operation.primitive);
    }
    origin.traceback = operation.traceback;
    origin.session = operation.session;
    origin.stream = operation.stream;
    origin.primitive = operation.name;
    return origin;
  }
  CapturedTraceback captured = capture_or_released();
  origin.traceback = captured.id;
  origin.session = captured.session;
  return origin;
}

class OperationScope {
 public:
  explicit OperationScope(const Operation& operation)
      : outer_(thread.operation) {
    thread.operation = operation;
  }
  ~OperationScope() {
    thread.operation = outer_;
  }
  OperationScope(const OperationScope&) = delete;
  OperationScope& operator=(const OperationScope&) = delete;

 private:
  Operation outer_;
};

// ---- samples of the nodes' totals ------------------------------------------

bool is_sample_due() {
  return ++thread.since_sample >= session.node_samples.interval();
}

// When the books are locked, the next node takes the sample.
[[gnu::noinline]] void try_node_sample() {
  if (is_recording() && session.mutex.try_lock()) {
    thread.since_sample = 0;
    take_node_sample();
    session.mutex.unlock();
  }
}

// A node came or went.
void count_node_change() {
  if (is_sample_due()) {
    try_node_sample();
  }
}

// ---- bookkeeping that must not disturb MLX --------------------------------

// Holds the books while the allocator works, which calls nobody back. An
// allocator that did call back would find in_allocator set and pass through.
// The session may have ended while the thread waited for them.
class AllocatorScope {
 public:
  AllocatorScope() : lock_(session.mutex), thread_(thread) {
    thread_.in_allocator = true;
  }
  ~AllocatorScope() {
    if (is_sample_due()) {
      thread_.since_sample = 0;
      take_node_sample();
    }
    thread_.in_allocator = false;
  }

 private:
  std::lock_guard<AdaptiveMutex> lock_;
  ThreadState& thread_;
};

bool passes_through() {
  return !is_recording() || thread.in_allocator;
}

uint64_t address_of(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

} // namespace

// ---- the tape ------------------------------------------------------------

namespace {

// How many entries a thread leaves for others to book. A thread that frees is
// seldom one that the program waits for.
constexpr uint64_t kAfterFree = 256;
constexpr uint64_t kAfterAllocation = 8192;
// So many wait for one that is not filled in.
constexpr uint64_t kTooMany = 1 << 18;

void book_tape_beyond(uint64_t most) {
  // The end as this thread saw it last: it costs nothing to look at.
  uint64_t backlog = allocator_tape.backlog(thread.seen_end);
  if (backlog > most && session.mutex.try_lock()) {
    if (is_recording()) {
      book(backlog > kTooMany ? book_whole_tape : book_tape);
    }
    session.mutex.unlock();
  }
}

// The allocation that this thread has to fill in, if it is of this session.
TapeNote take_allocation() {
  TapeNote note = thread.allocation;
  thread.allocation = TapeNote();
  if (note.entry && thread.allocation_session != session_number()) {
    note.did = Did::Nothing; // nobody reads it, but its place is free now
    note.fill();
    return TapeNote();
  }
  return note;
}

void remember_allocation(const TapeNote& note, uint64_t end) {
  fill_own_allocation();
  thread.allocation = note;
  thread.allocation_session = session_number();
  // For a new buffer MLX looks into the cache, releases the mutex, and counts
  // the buffer when it has it.
  if (note.did == Did::AllocNew && thread.has_looked &&
      thread.looked_session == session_number()) {
    thread.allocation.after_look = static_cast<uint8_t>(
        std::min<uint64_t>(end - 1 - thread.seen_end, 255));
  }
}

void fill_allocation(
    TapeNote note,
    void* buffer,
    uint64_t requested_size,
    const Origin& origin) {
  note.address = address_of(buffer);
  bool fits = requested_size && requested_size <= note.size;
  note.fill(fits ? requested_size : note.size, origin);
  count_node_change();
  book_tape_beyond(kAfterAllocation);
}

bool is_of_allocation(void* buffer) {
  return buffer && thread.allocation.entry &&
      originals.size(originals.allocator, buffer) == thread.allocation.size;
}

void* taped_malloc(void* self, size_t size, const Origin& origin) {
  fill_own_allocation();
  void* buffer = originals.malloc(self, size);
  if (buffer && !is_of_allocation(buffer)) {
    return buffer;
  }
  TapeNote note = take_allocation();
  if (buffer && note.entry) {
    fill_allocation(note, buffer, size, origin);
  } else if (note.entry) {
    mlx_counters.leave_out(note.size);
    note.did = Did::Nothing;
    note.fill();
  }
  return buffer;
}

void taped_free(void* self, void* buffer) {
  thread.being_freed = buffer;
  originals.free(self, buffer);
  thread.being_freed = nullptr;
  if (is_recording()) {
    count_node_change();
    book_tape_beyond(kAfterFree);
  }
}

// A buffer is given to an array. Where the allocator's vtable was not called,
// this tells the address of what was allocated.
void note_bound_buffer(const void* array, void* buffer, uint64_t bytes) {
  if (!is_of_allocation(buffer)) {
    return;
  }
  TapeNote note = take_allocation();
  if (note.entry) {
    Origin origin = thread.operation.primitive_class
        ? origin_of_allocation()
        : origin_of_node(*static_cast<void* const*>(array));
    fill_allocation(note, buffer, bytes, origin);
  }
}

uint64_t item_size(const void* array) {
  auto desc = *static_cast<const char* const*>(array);
  return static_cast<uint8_t>(desc[abi::kDescDtype + abi::kDtypeSize]);
}

uint64_t bytes_of(const void* array) {
  auto desc = *static_cast<const char* const*>(array);
  uint64_t elements;
  std::memcpy(&elements, desc + abi::kDescElements, sizeof(elements));
  return elements * item_size(array);
}

} // namespace

int probes::mutex_unlock(pthread_mutex_t* mutex) {
  if (mutex != originals.tape_mutex || !is_recording()) {
    return originals.mutex_unlock(mutex);
  }
  TapeNote note =
      allocator_tape.look(mlx_counters.read_words(), thread.being_freed);
  uint64_t end = allocator_tape.end();
  bool is_incomplete = allocator_tape.is_incomplete();
  uint32_t number = session_number();
  int result = originals.mutex_unlock(mutex);

  if (is_incomplete && number == session_number()) {
    end_without_memory();
  }
  bool did_nothing = !note.entry && !thread.recycled.entry;
  thread.recycled.fill();
  thread.recycled = TapeNote();
  if (note.is_allocation()) {
    remember_allocation(note, end);
  } else {
    note.fill();
  }
  thread.seen_end = end;
  thread.has_looked = did_nothing;
  thread.looked_session = number;
  return result;
}

size_t probes::cache_get_size(const void* function, void** buffer) {
  if (is_recording()) {
    TapeNote note =
        allocator_tape.cache_asked(mlx_counters.read_words(), *buffer);
    if (note.entry) {
      thread.recycled = note;
    }
  }
  return originals.cache_get_size(function, buffer);
}

size_t probes::cache_free_invoker(const void* function, void** buffer) {
  if (is_recording()) {
    TapeNote note = allocator_tape.cache_frees(
        mlx_counters.read_words(),
        *buffer,
        originals.size(originals.allocator, *buffer));
    if (note.is_allocation()) {
      remember_allocation(note, allocator_tape.end() - 1);
    } else {
      note.fill();
    }
  }
  return originals.cache_free_invoker(function, buffer);
}

// ---- allocator -----------------------------------------------------------

namespace {

// One of the thread's allocations whose time is to be measured.
bool is_time_due(size_t size) {
  return size && thread.timed_calls.is_due();
}

void* timed_malloc(void* self, size_t size, uint64_t* ns) {
  uint64_t before = session.books.now().ns;
  void* buffer = originals.malloc(self, size);
  uint64_t after = session.books.now().ns;
  *ns = after > before ? after - before : 0; // the clock may step back
  return buffer;
}

void* recorded_malloc(void* self, size_t size, const Origin& origin) {
  AllocatorScope scope;
  if (!is_recording()) {
    return originals.malloc(self, size);
  }
  CacheState before = read_cache_state();
  book([&](Books& books) { book_before(books, before); });
  bool measured = is_time_due(size);
  uint64_t ns = 0;
  void* buffer =
      measured ? timed_malloc(self, size, &ns) : originals.malloc(self, size);
  if (!buffer && size && is_recording()) {
    mlx_counters.leave_out(mlx_counters.active() - session.books.active());
  }
  if (buffer && is_recording()) {
    size_t real_size = originals.size(self, buffer);
    CacheState after = read_cache_state();
    book([&](Books& books) {
      // The OS may have handed out an address that the cache just returned.
      if (originals.notes_cache_returns) {
        book_cache(books, after);
      }
      Action action = books.allocated(
          address_of(buffer),
          real_size,
          size,
          taken_between(before, after),
          origin,
          books.now());
      if (measured) {
        session.times.add(action == Action::AllocReuse, ns);
      }
      book_cache(books, after);
    });
  }
  return buffer;
}

// What is on the tape came before what is booked by itself.
void book_earlier(Books& books) {
  if (originals.tape_mutex) {
    book_tape(books);
  }
}

void* recorded_make_buffer(
    void* self,
    void* pointer,
    size_t size,
    const Origin& origin) {
  AllocatorScope scope;
  void* buffer = originals.make_buffer(self, pointer, size);
  if (buffer && is_recording()) {
    book([&](Books& books) {
      book_earlier(books);
      books.made_buffer(address_of(buffer), size, origin);
    });
  }
  return buffer;
}

void allocation_failed(size_t size, const char* message, const Origin& origin) {
  thread.noted_failure = true;
  FailedAllocation failure;
  if (note_failure(size, message, origin, &failure)) {
    tell_of_failure(failure);
  }
}

// Notes what allocate() throws, with the books unlocked, and lets it pass.
template <typename Allocate>
void* noting_failure(size_t size, const Origin& origin, Allocate&& allocate) {
  try {
    return allocate();
  } catch (const std::exception& error) {
    allocation_failed(size, error.what(), origin);
    throw;
  } catch (...) {
    allocation_failed(size, "", origin);
    throw;
  }
}

} // namespace

void* probes::malloc(void* self, size_t size) {
  if (passes_through()) {
    // A session may begin before this ends.
    return originals.tape_mutex ? taped_malloc(self, size, Origin())
                                : originals.malloc(self, size);
  }
  Origin origin = origin_of_allocation();
  void* buffer = noting_failure(size, origin, [&] {
    return originals.tape_mutex ? taped_malloc(self, size, origin)
                                : recorded_malloc(self, size, origin);
  });
  if (!buffer && size) {
    allocation_failed(size, "", origin);
  }
  return buffer;
}

void probes::free(void* self, void* buffer) {
  if (originals.tape_mutex) {
    return taped_free(self, buffer); // a session may begin before this ends
  }
  if (!buffer || passes_through()) {
    return originals.free(self, buffer);
  }
  AllocatorScope scope;
  if (!is_recording()) {
    return originals.free(self, buffer);
  }
  CacheState before = read_cache_state();
  book([&](Books& books) { book_before(books, before); });
  uint32_t slot = session.books.find(address_of(buffer));
  uint64_t size = slot == BufferTable::kNone ? originals.size(self, buffer)
                                             : session.books.size_of(slot);
  originals.free(self, buffer);
  if (!is_recording()) {
    return; // memory for the log ran out
  }
  CacheState after = read_cache_state();
  book([&](Books& books) {
    bool to_cache = went_to_cache(before, after, size);
    books.freed(address_of(buffer), slot, size, to_cache, books.now());
    book_cache(books, after);
  });
}

void probes::cache_free(void* buffer) {
  if (is_recording()) {
    note_cache_return(
        address_of(buffer), originals.size(originals.allocator, buffer));
  }
  originals.cache_free(buffer);
}

void* probes::make_buffer(void* self, void* pointer, size_t size) {
  if (passes_through()) {
    return originals.make_buffer(self, pointer, size);
  }
  Origin origin = origin_of_allocation();
  // It gives nothing where the memory can't be used as it is: MLX copies then.
  return noting_failure(size, origin, [&] {
    return recorded_make_buffer(self, pointer, size, origin);
  });
}

void probes::release(void* self, void* buffer) {
  if (!buffer || passes_through()) {
    return originals.release(self, buffer);
  }
  AllocatorScope scope;
  size_t size = originals.size(self, buffer);
  originals.release(self, buffer);
  if (is_recording()) {
    book([&](Books& books) {
      book_earlier(books);
      books.released(address_of(buffer), size);
    });
  }
}

// ---- arrays --------------------------------------------------------------

namespace {

// While a session records.
[[gnu::always_inline]] inline void note_node(void* desc, bool pending) {
  auto& operation = thread.operation;
  CapturedTraceback captured = operation.primitive_class
      ? CapturedTraceback{operation.traceback, operation.session}
      : capture_or_released();
  set_traceback(desc, captured.id, captured.session);
  nodes().created(desc, pending);
  count_node_change();
}

// Also when no session records any more: its nodes can still be read.
inline void note_node_gone(void* desc) {
  if (nodes().destroyed(desc)) {
    count_node_change();
  }
}

} // namespace

void probes::desc_init(void* desc) {
  originals.desc_init(desc);
  if (!is_recording()) {
    return;
  }
  auto primitive = *reinterpret_cast<void****>(
      static_cast<char*>(desc) + abi::kDescPrimitive);
  note_node(desc, primitive != nullptr);

  // A class of a library that was loaded after the attach.
  if (primitive && !own_code.contains((*primitive)[abi::kEvalCpu])) {
    auto handler = unknown_class.load(std::memory_order_relaxed);
    if (handler) {
      handler(*primitive);
    }
  }
}

void probes::desc_destroy(void* desc) {
  note_node_gone(desc);
  originals.desc_destroy(desc);
}

#if MLXMEM_MACOS

void* probes::operator_new(size_t size) {
  void* block = originals.operator_new(size);
  if (size != abi::kNodeBlockSize || !is_recording()) {
    return block;
  }
  MadeHere made = made_at(__builtin_return_address(0));
  if (made != MadeHere::Nothing) {
    // Its constructor comes later; who reads the nodes meanwhile finds zeros.
    void* desc = static_cast<char*>(block) + abi::kControlBlockHead;
    std::memset(desc, 0, abi::kDescSize);
    note_node(desc, made == MadeHere::Node);
  }
  return block;
}

void destroy_node(void* block, abi::OnZeroSharedFn original) {
  note_node_gone(static_cast<char*>(block) + abi::kControlBlockHead);
  original(block);
}

#endif

TracebackId traceback_of(const void* desc) {
  return desc &&
          *word_at(desc, abi::kDescStatusPadding) ==
              node_tag(desc, session_number())
      ? *word_at(desc, abi::kDescTailPadding)
      : 0;
}

void probes::set_data(void* self, void* buffer, void* deleter) {
  note_bound_buffer(self, buffer, bytes_of(self));
  originals.set_data(self, buffer, deleter);
}

void probes::set_data_long(
    void* self,
    void* buffer,
    size_t data_size,
    void* strides,
    abi::Flags flags,
    void* deleter) {
  note_bound_buffer(self, buffer, data_size * item_size(self));
  originals.set_data_long(self, buffer, data_size, strides, flags, deleter);
}

void probes::set_data_offset(
    void* self,
    void* buffer,
    size_t data_size,
    void* strides,
    abi::Flags flags,
    int64_t offset,
    void* deleter) {
  note_bound_buffer(self, buffer, data_size * item_size(self));
  originals.set_data_offset(
      self, buffer, data_size, strides, flags, offset, deleter);
}

void probes::set_data_owned(void* self, void* data) {
  note_bound_buffer(self, *static_cast<void**>(data), bytes_of(self));
  originals.set_data_owned(self, data);
}

void probes::set_data_owned_long(
    void* self,
    void* data,
    size_t data_size,
    void* strides,
    abi::Flags flags,
    int64_t offset) {
  note_bound_buffer(
      self, *static_cast<void**>(data), data_size * item_size(self));
  originals.set_data_owned_long(self, data, data_size, strides, flags, offset);
}

// ---- primitives ----------------------------------------------------------

namespace {

// CUDA's runtime names the call and says "out of memory", MLX "[malloc]".
bool is_of_memory(const char* message) {
  return std::strstr(message, "cudaMalloc") ||
      std::strstr(message, "out of memory") || std::strstr(message, "[malloc]");
}

// Of the first output that has no buffer, which is most likely the one that
// could not be had; 0: it was scratch memory.
uint64_t missing_bytes(const void* outputs) {
  auto words = static_cast<void* const*>(outputs);
  auto end = static_cast<void* const*>(words[abi::kVectorEnd]);
  for (auto output = static_cast<void* const*>(words[abi::kVectorBegin]);
       output < end;
       output += abi::kArrayWords) {
    auto desc = static_cast<const char*>(*output);
    void* data;
    std::memcpy(&data, desc + abi::kDescData, sizeof(data));
    if (!data) {
      return bytes_of(output);
    }
  }
  return 0;
}

// Kernels allocate by other ways than the allocator's vtable: an allocation
// that fails there shows by what the kernel throws.
void evaluate_noting_failure(
    abi::EvalFn original,
    void* primitive,
    const void* inputs,
    void* outputs) {
  thread.noted_failure = false;
  try {
    original(primitive, inputs, outputs);
  } catch (const std::exception& error) {
    if (!thread.noted_failure && is_of_memory(error.what())) {
      allocation_failed(
          missing_bytes(outputs), error.what(), origin_of_allocation());
    }
    throw;
  }
}

} // namespace

void evaluate_primitive(
    PrimitiveClass& primitive_class,
    abi::EvalFn original,
    void* primitive,
    const void* inputs,
    void* outputs) {
  if (!is_recording()) {
    return original(primitive, inputs, outputs);
  }
  Operation operation;
  operation.primitive = primitive;
  operation.primitive_class = &primitive_class;
  operation.session = session_number();
  operation.stream =
      static_cast<int32_t>(*word_at(primitive, abi::kPrimitiveStream));
  // outputs is a std::vector<array>; the first output's node was created at
  // the line that called the operation.
  auto begin = static_cast<void**>(outputs)[abi::kVectorBegin];
  auto end = static_cast<void**>(outputs)[abi::kVectorEnd];
  if (begin != end) {
    operation.traceback = traceback_of(*static_cast<void**>(begin));
  }
  {
    OperationScope scope(operation);
    if (originals.tape_mutex) {
      evaluate_noting_failure(original, primitive, inputs, outputs);
    } else {
      original(primitive, inputs, outputs);
    }
  }
  for (auto output = static_cast<void**>(begin); output < end;
       output += abi::kArrayWords) {
    nodes().evaluated(*output);
  }
}

namespace {

// A kernel's part that runs on the stream's worker, with the operation it
// belongs to.
struct WorkerTask {
  std::function<void()> task;
  Operation operation;

  void operator()() {
    OperationScope scope(operation);
    task();
  }
};

} // namespace

void probes::enqueue(
    void* self,
    abi::Stream stream,
    std::function<void()>* task) {
  auto* primitive_class = thread.operation.primitive_class;
  if (primitive_class && primitive_class->allocates_on_worker && *task &&
      is_recording()) {
    // The primitive may be gone when the worker comes to it: name it now.
    Origin origin = origin_of_allocation();
    WorkerTask wrapped;
    wrapped.operation = thread.operation;
    wrapped.operation.primitive = nullptr;
    wrapped.operation.name = origin.primitive;
    wrapped.task.swap(*task);
    try {
      std::function<void()> with_operation(std::move(wrapped));
      return originals.enqueue(self, stream, &with_operation);
    } catch (const std::bad_alloc&) {
      if (!wrapped.task) {
        throw; // MLX's own
      }
      wrapped.task.swap(*task);
    }
  }
  originals.enqueue(self, stream, task);
}

// ---- the GIL -------------------------------------------------------------

void* probes::release_gil() {
  if (is_recording()) {
    thread.released_traceback = capture();
    thread.released_session = session_number();
  }
  return originals.release_gil();
}

void probes::acquire_gil(void* thread_state) {
  thread.released_traceback = 0;
  originals.acquire_gil(thread_state);
}

// ---- what the probes work with --------------------------------------------

void set_traceback_capture_func(TracebackCaptureFunc function) {
  capture_func.store(function);
}

void fill_own_allocation() {
  if (auto older = take_allocation(); older.entry) {
    older.fill(); // under MLX's mutex, perhaps: no stack is taken
  }
}

void set_traceback_tracking(bool on) {
  tracking.store(on);
}

void set_unknown_class_handler(
    UnknownClassHandler handler,
    const MemoryRange& code) {
  own_code = code;
  unknown_class.store(handler);
}

void forget_thread_state() {
  thread.released_traceback = 0;
  forget_current_thread_id();
}

} // namespace mlxmem
