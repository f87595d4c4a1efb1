// Five kinds of words are changed: import slots of the libraries that use MLX,
// the slots of eval_cpu and eval_gpu in each primitive's vtable, the vtable
// pointer of the allocator object, the pointers to the functions that its
// cache calls, and on macOS a slot of the control blocks' vtables. Each is a
// Patch; they are applied together or not at all, and
// PatchSet::undo() puts them back.

#include "attach.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "facts.h"
#include "image.h"
#include "mlx_abi.h"
#include "mlx_checks.h"
#include "mlx_core.h"
#include "originals.h"
#include "primitive_classes.h"
#include "probes.h"

#if MLXMEM_MACOS
#include "macos_nodes.h"
#endif

namespace mlxmem {

namespace {

std::mutex& attach_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}

PatchSet& patches() {
  static PatchSet* set = new PatchSet;
  return *set;
}

// ---- primitive classes -----------------------------------------------------

bool allocates_on_worker(const MlxCore& mlx, void** vtable) {
  if (!mlx.image.contains(vtable)) {
    return true; // an extension's kernel may do anything
  }
  const char* name = type_of_vtable(vtable)->name();
  for (auto known : abi::kAllocatesOnWorker) {
    if (std::strcmp(name, known) == 0) {
      return true;
    }
  }
  return false;
}

// Adds the patches of one class. No effect when it is patched already.
void add_class(const MlxCore& mlx, const Image& image, void** vtable) {
  if (patches().contains(vtable + abi::kEvalCpu)) {
    return;
  }
  auto added = primitive_class(vtable);
  if (!added) {
    return; // allocations of the classes beyond the supply name no operation
  }
  added->eval_cpu = reinterpret_cast<abi::EvalFn>(vtable[abi::kEvalCpu]);
  added->eval_gpu = reinterpret_cast<abi::EvalFn>(vtable[abi::kEvalGpu]);
  added->allocates_on_worker = allocates_on_worker(mlx, vtable);
  added->constants = image.span();
  added->last_name.store(0);
  std::string what = "a primitive's vtable";
  patches().add(
      {vtable + abi::kEvalCpu,
       vtable[abi::kEvalCpu],
       eval_cpu_replacement(added),
       image.base(),
       what});
  patches().add(
      {vtable + abi::kEvalGpu,
       vtable[abi::kEvalGpu],
       eval_gpu_replacement(added),
       image.base(),
       what});
}

// ---- import slots ----------------------------------------------------------

struct Import {
  const char* symbol;
  void* replacement;
  void** original; // in originals
  bool in_mlx; // libmlx defines it; else the program that imports libmlx
  bool for_tape; // wanted only where the allocator is followed by its mutex
};

#define MLXMEM_IMPORT(symbol, probe, in_mlx, for_tape)               \
  Import {                                                           \
    symbol, reinterpret_cast<void*>(&probes::probe),                 \
        reinterpret_cast<void**>(&originals.probe), in_mlx, for_tape \
  }

const Import kImports[] = {
#if !MLXMEM_MACOS // whose libmlx calls them directly
    MLXMEM_IMPORT(abi::kDescInitSymbol, desc_init, true, false),
    MLXMEM_IMPORT(abi::kDescDtorSymbol, desc_destroy, true, false),
    MLXMEM_IMPORT(abi::kDescBaseDtorSymbol, desc_destroy, true, false),
    MLXMEM_IMPORT(abi::kSetDataSymbol, set_data, true, true),
    MLXMEM_IMPORT(abi::kSetDataLongSymbol, set_data_long, true, true),
    MLXMEM_IMPORT(abi::kSetDataOffsetSymbol, set_data_offset, true, true),
    MLXMEM_IMPORT(abi::kSetDataOwnedSymbol, set_data_owned, true, true),
    MLXMEM_IMPORT(
        abi::kSetDataOwnedLongSymbol,
        set_data_owned_long,
        true,
        true),
    MLXMEM_IMPORT(abi::kUnlockSymbol, mutex_unlock, false, true),
    MLXMEM_IMPORT(abi::kEnqueueSymbol, enqueue, true, false),
#endif
    MLXMEM_IMPORT(abi::kReleaseGilSymbol, release_gil, false, false),
    MLXMEM_IMPORT(abi::kAcquireGilSymbol, acquire_gil, false, false),
};

// MLX's mutex is released by its own library; the others have no use for that.
bool is_wanted(const Import& import, const MlxCore& mlx, const Image& image) {
  bool is_unlock = std::strcmp(import.symbol, abi::kUnlockSymbol) == 0;
  return (!import.for_tape || originals.tape_mutex) &&
      (!is_unlock || image.base() == mlx.image.base());
}

#undef MLXMEM_IMPORT

// Adds the patches of one image's import slots.
void add_imports(const MlxCore& mlx, const Image& image) {
  struct Found {
    const Import* import;
    void** slot;
  };
  begin_facts("import slots");
  std::vector<Found> found;
  image.for_each_import([&](const char* name, void** slot) {
    for (auto& import : kImports) {
      if (std::strcmp(name, import.symbol) == 0 &&
          is_wanted(import, mlx, image)) {
        found.push_back({&import, slot});
      }
    }
  });
  for (auto& [import, slot] : found) {
    if (patches().contains(slot)) {
      continue;
    }
    void* target = *slot;
    *import->original = import->in_mlx
        ? required_symbol(mlx.image, import->symbol)
        : dlsym(RTLD_DEFAULT, import->symbol);
    if (!import->in_mlx) {
      require(
          *import->original,
          std::string("the process defines ") + import->symbol,
          place(image, *import->original),
          std::string("the process does not define ") + import->symbol);
    }
    // A slot that was never called through still points into its own image.
    require(
        target == *import->original || image.contains(target),
        std::string("the import slot of ") + import->symbol + " in " +
            image.path() + " points to the function",
        place(mlx.image.contains(target) ? mlx.image : image, target),
        std::string("the import slot of ") + import->symbol + " in " +
            image.path() + " does not point to the function");
    patches().add(
        {slot,
         target,
         import->replacement,
         image.base(),
         "the import slot of " + std::string(import->symbol)});
  }
}

#if MLXMEM_MACOS

void add_node_maker(const MlxCore& mlx, const Image& image) {
  const NodeMaker& maker = node_maker(mlx, image);
  if (maker.nodes.sites.empty() || patches().contains(maker.operator_new)) {
    return;
  }
  for (auto& patch : patches_of(maker, image)) {
    patches().add(std::move(patch));
  }
}

#endif

void add_image(const MlxCore& mlx, const Image& image) {
  add_imports(mlx, image);
#if MLXMEM_MACOS
  add_node_maker(mlx, image);
#endif
  for (auto vtable : primitive_vtables(image, mlx)) {
    add_class(mlx, image, vtable);
  }
}

// ---- the allocator's own vtable --------------------------------------------

// The object gets a copy of its vtable, from the two words before it that hold
// the type. The copy stays: another thread may be calling through it.
constexpr size_t kVtableHead = 2;
void* allocator_vtable[kVtableHead + abi::kAllocatorSlots];

constexpr const char* kCacheFreeText =
    "the function through which the cache frees";

// The cache, where the tape follows the allocator.
void add_cache() {
  void** get_size = mlx_counters.cache_get_size_word();
  void** free = mlx_counters.cache_free_invoker_word();
  originals.cache_get_size = reinterpret_cast<abi::CacheInvoker>(*get_size);
  originals.cache_free_invoker = reinterpret_cast<abi::CacheInvoker>(*free);
  patches().add(
      {get_size,
       *get_size,
       reinterpret_cast<void*>(&probes::cache_get_size),
       0,
       "the function that tells the cache a buffer's size"});
  patches().add(
      {free,
       *free,
       reinterpret_cast<void*>(&probes::cache_free_invoker),
       0,
       kCacheFreeText});
}

// The CPU's cache frees through a pointer to std::free.
void add_cache_free() {
  void** free = mlx_counters.cache_free_word();
  originals.notes_cache_returns = free != nullptr;
  if (free) {
    originals.cache_free = reinterpret_cast<abi::CacheFreeFn>(*free);
    patches().add(
        {free,
         *free,
         reinterpret_cast<void*>(&probes::cache_free),
         0,
         kCacheFreeText});
  }
}

void add_allocator(const MlxCore& mlx) {
  auto vtable = static_cast<void**>(*mlx.allocator);
  std::copy(
      vtable - kVtableHead, vtable + abi::kAllocatorSlots, allocator_vtable);
  auto copy = allocator_vtable + kVtableHead;
  copy[abi::kMalloc] = reinterpret_cast<void*>(&probes::malloc);
  copy[abi::kFree] = reinterpret_cast<void*>(&probes::free);
  copy[abi::kMakeBuffer] = reinterpret_cast<void*>(&probes::make_buffer);
  copy[abi::kRelease] = reinterpret_cast<void*>(&probes::release);
  if (originals.tape_mutex) {
    originals.notes_cache_returns = false;
    add_cache();
  } else {
    add_cache_free();
  }
  patches().add(
      {mlx.allocator, vtable, copy, 0, "the allocator's vtable pointer"});
}

// ---- all of it -------------------------------------------------------------

bool attached = false;
MlxCore attached_mlx;

// Of the last attach that was tried.
std::vector<Fact>& attach_facts() {
  static std::vector<Fact>* facts = new std::vector<Fact>;
  return *facts;
}

// Libraries that define or use MLX's core, and this one.
std::vector<Image> images_of_mlx() {
  return Image::loaded([](const Image& image) {
    bool wanted = image.symbol(abi::kAllocatorSymbol) ||
        image.contains(reinterpret_cast<void*>(&probes::malloc));
    image.for_each_import([&](const char* name, void**) {
      wanted = wanted || std::strncmp(name, "_ZN3mlx4core", 12) == 0;
    });
    return wanted;
  });
}

MemoryRange own_code(const std::vector<Image>& images) {
  MemoryRange range;
  for (auto& image : images) {
    if (image.is_code(reinterpret_cast<void*>(&probes::malloc))) {
      range = image.code_of(reinterpret_cast<void*>(&probes::malloc));
    }
  }
  return range;
}

// Checks every fact, which are noted, and prepares the patches; without any
// when one does not hold.
MlxCore prepare(
    const std::vector<Image>& images,
    std::vector<Fact>* facts,
    const FactVisitor& visit = {}) {
  FactNotes notes(facts, visit);
  try {
    MlxCore mlx = check_mlx_core(images);
    for (auto& image : images) {
      add_image(mlx, image);
    }
    add_allocator(mlx); // last: from here on allocations are seen
    return mlx;
  } catch (...) {
    patches().discard_pending();
    throw;
  }
}

size_t patch_new_images() {
  patches().drop_unloaded(Image::loaded_bases());
  size_t before = patches().applied().size();
  for (auto& image : images_of_mlx()) {
    add_image(attached_mlx, image);
  }
  patches().apply();
  return patches().applied().size() - before;
}

// A node was created with a primitive whose class is not patched: its library
// is new, or hides its type information.
void patch_class_of_node(void** vtable) {
  static std::vector<void**>* refused = new std::vector<void**>;
  std::unique_lock<std::mutex> lock(attach_mutex(), std::try_to_lock);
  // When another thread attaches, the class's next node comes here again.
  if (!lock || !attached ||
      std::find(refused->begin(), refused->end(), vtable) != refused->end()) {
    return;
  }
  try {
    patch_new_images();
    for (auto& image : images_of_mlx()) {
      if (image.contains(vtable) && image.is_code(vtable[abi::kEvalCpu]) &&
          image.is_code(vtable[abi::kEvalGpu])) {
        add_class(attached_mlx, image, vtable);
      }
    }
    patches().apply();
    if (!patches().contains(vtable + abi::kEvalCpu)) {
      refused->push_back(vtable);
    }
  } catch (const std::exception&) {
    patches().discard_pending();
    refused->push_back(vtable);
  }
}

} // namespace

void attach() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  if (attached) {
    return;
  }
  auto images = images_of_mlx();
  MlxCore mlx = prepare(images, &attach_facts());
  set_unknown_class_handler(patch_class_of_node, own_code(images));
  patches().apply();
  attached_mlx = mlx;
  attached = true;
}

Check check_attach(const FactVisitor& visit) {
  std::lock_guard<std::mutex> lock(attach_mutex());
  Check check;
  if (attached) {
    std::for_each(attach_facts().begin(), attach_facts().end(), visit);
    check.patches = patches().applied();
    check.is_attached = true;
  } else {
    std::vector<Fact> noted;
    try {
      prepare(images_of_mlx(), &noted, visit);
      check.patches = patches().pending();
    } catch (const AttachError& error) {
      check.refusal = error.what();
    }
    patches().discard_pending();
  }
  check.images = images_of_mlx();
  return check;
}

std::string detach() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  if (!attached) {
    return "";
  }
  std::string changed = patches().undo(Image::loaded_bases());
  attached = false;
  return changed;
}

void detach_in_child(const std::vector<uintptr_t>& loaded_bases) {
  std::lock_guard<std::mutex> lock(attach_mutex());
  if (attached) {
    patches().undo(loaded_bases);
    attached = false;
  }
}

bool is_attached() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  return attached;
}

size_t attach_new_images() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  if (!attached) {
    return 0;
  }
  try {
    return patch_new_images();
  } catch (...) {
    patches().discard_pending();
    throw;
  }
}

std::vector<Patch> patched_words() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  return patches().applied();
}

std::string backend() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  if (!attached_mlx.allocator_type) {
    return "";
  }
  std::string name = attached_mlx.allocator_type->name();
  if (name.find(abi::kCudaAllocatorName) != std::string::npos) {
    return "cuda";
  }
  return name.find(abi::kMetalAllocatorName) != std::string::npos ? "metal"
                                                                  : "cpu";
}

int64_t cache_limit() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  return mlx_counters.cache_limit();
}

bool metal_resources(MetalResources* out) {
  std::lock_guard<std::mutex> lock(attach_mutex());
  return mlx_counters.read_metal(out);
}

void lock_attach() {
  attach_mutex().lock();
}

void unlock_attach() {
  attach_mutex().unlock();
}

} // namespace mlxmem
