#include "attach.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <typeinfo>

#include "image.h"
#include "mlx_abi.h"
#include "primitive_classes.h"
#include "probes.h"

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

// ---- run-time type information of the C++ ABI -----------------------------

struct TypeInfo {
  void* kind; // which class of type_info this is
  const char* name;
  const TypeInfo* base; // of a class with one base
};

struct OneBase {
  virtual ~OneBase() = default;
};
struct Derived : OneBase {};

bool has_one_base(const TypeInfo* type) {
  static void* const kind = *reinterpret_cast<void* const*>(&typeid(Derived));
  return type->kind == kind;
}

bool is_class(const TypeInfo* type) {
  static void* const kind = *reinterpret_cast<void* const*>(&typeid(OneBase));
  return type->kind == kind || has_one_base(type);
}

bool derives_from(const TypeInfo* type, const TypeInfo* base) {
  for (int depth = 0; type && depth < 16; ++depth) {
    if (type == base || std::strcmp(type->name, base->name) == 0) {
      return true;
    }
    if (!has_one_base(type)) {
      return false;
    }
    type = type->base;
  }
  return false;
}

// The vtable's first function follows the offset to the top and the type.
const TypeInfo* type_of_vtable(void* const* vtable) {
  return static_cast<const TypeInfo*>(vtable[-1]);
}

// ---- what is known of MLX's core ------------------------------------------

struct Mlx {
  Image image;
  const TypeInfo* primitive_type = nullptr;
  void** allocator = nullptr; // the object; its first word is the vptr
};

void require(bool holds, const std::string& fact) {
  if (!holds) {
    throw AttachError(fact);
  }
}

void* required_symbol(const Image& image, const char* name) {
  void* address = image.symbol(name);
  require(address, std::string("libmlx does not export ") + name);
  return address;
}

Mlx find_mlx(const std::vector<Image>& images) {
  Mlx mlx;
  bool found = false;
  for (auto& image : images) {
    if (image.symbol(abi::kAllocatorSymbol)) {
      require(!found, "two MLX cores are loaded in this process");
      mlx.image = image;
      found = true;
    }
  }
  require(
      found,
      std::string("no loaded library defines ") + abi::kAllocatorSymbol +
          " (is mlx.core imported?)");
  return mlx;
}

// The allocator's vtable: five functions and two destructors, all of them code
// of libmlx, of a class derived from mlx::core::allocator::Allocator.
void check_allocator(Mlx& mlx) {
  auto getter = reinterpret_cast<abi::AllocatorGetter>(
      required_symbol(mlx.image, abi::kAllocatorSymbol));
  mlx.allocator = static_cast<void**>(getter());
  require(mlx.allocator, "allocator() returns a null pointer");
  auto vtable = static_cast<void**>(*mlx.allocator);
  require(
      mlx.image.contains(vtable),
      "the allocator's vtable does not lie in libmlx");
  auto type = type_of_vtable(vtable);
  auto base = static_cast<const TypeInfo*>(
      required_symbol(mlx.image, abi::kAllocatorTypeSymbol));
  require(
      type && has_one_base(type) && derives_from(type, base),
      "the allocator's class does not derive from "
      "mlx::core::allocator::Allocator alone");
  for (int slot = 0; slot < abi::kAllocatorSlots; ++slot) {
    require(
        mlx.image.is_code(vtable[slot]),
        "slot " + std::to_string(slot) +
            " of the allocator's vtable is not a function of libmlx (malloc, "
            "free, size, make_buffer, release and two destructors expected)");
  }
  originals.allocator = mlx.allocator;
  originals.malloc = reinterpret_cast<abi::MallocFn>(vtable[abi::kMalloc]);
  originals.free = reinterpret_cast<abi::FreeFn>(vtable[abi::kFree]);
  originals.size = reinterpret_cast<abi::SizeFn>(vtable[abi::kSize]);
  originals.make_buffer =
      reinterpret_cast<abi::MakeBufferFn>(vtable[abi::kMakeBuffer]);
  originals.release = reinterpret_cast<abi::FreeFn>(vtable[abi::kRelease]);

  auto counter = [&](const char* symbol) {
    return reinterpret_cast<abi::CounterFn>(required_symbol(mlx.image, symbol));
  };
  mlx_counters.bind(
      mlx.allocator,
      type->name,
      counter(abi::kActiveMemorySymbol),
      counter(abi::kCacheMemorySymbol),
      counter(abi::kPeakMemorySymbol),
      reinterpret_cast<abi::CounterFn>(
          mlx.image.symbol(abi::kMemoryLimitSymbol)));
}

// An empty buffer moves no counter, so this can be tried in any program.
void check_empty_buffer(const Mlx& mlx) {
  void* buffer = originals.malloc(mlx.allocator, 0);
  size_t size = buffer ? originals.size(mlx.allocator, buffer) : 0;
  if (buffer) {
    originals.free(mlx.allocator, buffer);
  }
  require(size == 0, "malloc(0) of the allocator gives a buffer with a size");
}

// ArrayDesc's layout: constructs one for a shape and a dtype that are known,
// in memory filled with a pattern, and looks where they went and what stayed.
class DescCheck {
 public:
  explicit DescCheck(const Mlx& mlx) {
    destroy_ = reinterpret_cast<abi::DescDtor>(
        required_symbol(mlx.image, abi::kDescDtorSymbol));
    auto leaf = reinterpret_cast<abi::DescLeafCtor>(
        required_symbol(mlx.image, abi::kDescLeafCtorSymbol));
    auto node = reinterpret_cast<abi::DescNodeCtor>(
        required_symbol(mlx.image, abi::kDescNodeCtorSymbol));
    originals.desc_init = reinterpret_cast<abi::DescInitFn>(
        required_symbol(mlx.image, abi::kDescInitSymbol));

    abi::Shape shape;
    set_known(&shape);
    fill();
    leaf(memory_, &shape, kDtype);
    uint32_t leaf_status = word(abi::kDescStatus);
    check("a leaf");
    require(
        pointer(abi::kDescPrimitive) == nullptr,
        "ArrayDesc: a leaf has a primitive");
    destroy_(memory_);

    // A shared_ptr without a control block owns nothing.
    void* primitive[2] = {this, nullptr};
    void* inputs[3] = {nullptr, nullptr, nullptr};
    set_known(&shape);
    fill();
    node(memory_, &shape, kDtype, primitive, inputs);
    uint32_t node_status = word(abi::kDescStatus);
    check("a node");
    require(
        pointer(abi::kDescPrimitive) == this,
        "ArrayDesc: the primitive is not at offset 200");
    require(
        leaf_status != node_status && leaf_status < 8 && node_status < 8,
        "ArrayDesc: the status is not at offset 216");
    std::memset(memory_ + abi::kDescPrimitive, 0, 2 * sizeof(void*));
    destroy_(memory_);
  }

 private:
  static constexpr uint64_t kDtype = 11 | 4ull << 32;
  static constexpr unsigned char kPattern = 0xA5;

  static void set_known(abi::Shape* shape) {
    *shape = {};
    shape->begin = shape->storage;
    shape->end = shape->storage + 3;
    shape->capacity = shape->storage + 10;
    shape->storage[0] = 3;
    shape->storage[1] = 5;
    shape->storage[2] = 7;
  }

  void fill() {
    std::memset(memory_, kPattern, sizeof(memory_));
  }

  uint32_t word(size_t offset) const {
    uint32_t value;
    std::memcpy(&value, memory_ + offset, sizeof(value));
    return value;
  }

  void* pointer(size_t offset) const {
    void* value;
    std::memcpy(&value, memory_ + offset, sizeof(value));
    return value;
  }

  void check(const std::string& what) const {
    auto begin =
        static_cast<char*>(pointer(abi::kDescShape + abi::kSmallVectorBegin));
    auto end =
        static_cast<char*>(pointer(abi::kDescShape + abi::kSmallVectorEnd));
    require(
        end - begin == 3 * sizeof(int) && inside(begin) &&
            std::memcmp(begin, "\3\0\0\0\5\0\0\0\7\0\0\0", 12) == 0,
        "ArrayDesc: the shape of " + what + " is not at offset 0");
    begin =
        static_cast<char*>(pointer(abi::kDescStrides + abi::kSmallVectorBegin));
    end = static_cast<char*>(pointer(abi::kDescStrides + abi::kSmallVectorEnd));
    int64_t strides[3] = {35, 7, 1};
    require(
        end - begin == sizeof(strides) && inside(begin) &&
            std::memcmp(begin, strides, sizeof(strides)) == 0,
        "ArrayDesc: the strides of " + what + " are not at offset 72");
    require(
        word(abi::kDescElements) == 105 && word(abi::kDescElements + 4) == 0,
        "ArrayDesc: the number of elements of " + what +
            " is not at offset 184");
    require(
        word(abi::kDescDtype) == 11 && memory_[abi::kDescDtype + 4] == 4,
        "ArrayDesc: the dtype of " + what + " is not at offset 192");
    uint32_t untouched = kPattern * 0x01010101u;
    require(
        word(abi::kDescStatusPadding) == untouched,
        "ArrayDesc: the bytes after the status of " + what + " are written");
    require(
        word(abi::kDescTailPadding) == untouched,
        "ArrayDesc: the last four bytes of " + what + " are written");
    for (size_t i = abi::kDescSize; i < sizeof(memory_); ++i) {
      require(memory_[i] == kPattern, "ArrayDesc is larger than 368 bytes");
    }
  }

  bool inside(const char* address) const {
    auto a = reinterpret_cast<const unsigned char*>(address);
    return a >= memory_ && a < memory_ + abi::kDescSize;
  }

  abi::DescDtor destroy_ = nullptr;
  alignas(16) unsigned char memory_[abi::kDescSize + 128];
};

// ---- primitive classes -----------------------------------------------------

// Vtables in the constant data of an image whose class derives from Primitive
// and can have objects. Most of them are hidden, so they are found by their
// type information.
std::vector<void**> primitive_vtables(const Image& image, const Mlx& mlx) {
  std::vector<void**> vtables;
  for (auto& range : image.constant_data()) {
    auto begin = reinterpret_cast<void**>((range.begin + 7) & ~uintptr_t(7));
    auto end = reinterpret_cast<void**>(range.end);
    for (auto word = begin; word + abi::kName + 3 <= end; ++word) {
      auto type = static_cast<const TypeInfo*>(word[1]);
      if (word[0] != nullptr || !image.contains(type) ||
          reinterpret_cast<uintptr_t>(type) % alignof(TypeInfo) ||
          !image.is_code(word[2 + abi::kEvalCpu]) ||
          !image.is_code(word[2 + abi::kEvalGpu]) ||
          !image.is_code(word[2 + abi::kName])) {
        continue;
      }
      if (is_class(type) && derives_from(type, mlx.primitive_type)) {
        vtables.push_back(word + 2);
      }
    }
  }
  return vtables;
}

void check_primitives(Mlx& mlx, const std::vector<void**>& vtables) {
  unsigned char no_object[256] = {};
  for (auto& known : abi::kKnownPrimitives) {
    auto table =
        static_cast<void**>(required_symbol(mlx.image, known.vtable_symbol));
    auto vtable = table + 2;
    require(
        std::find(vtables.begin(), vtables.end(), vtable) != vtables.end(),
        std::string("the vtable of ") + known.name +
            " is not found by its type information");
    // name() of these classes returns a literal and reads no member.
    auto name = reinterpret_cast<abi::NameFn>(vtable[abi::kName]);
    require(
        mlx.image.contains(reinterpret_cast<void*>(name)),
        std::string("name() of ") + known.name + " is not code of libmlx");
    const char* text = name(no_object);
    require(
        text && mlx.image.contains(text) && std::strcmp(text, known.name) == 0,
        std::string("slot 5 of the vtable of ") + known.name +
            " does not return its name");
  }
}

bool allocates_on_worker(const Mlx& mlx, void** vtable) {
  if (!mlx.image.contains(vtable)) {
    return true; // an extension's kernel may do anything
  }
  const char* name = type_of_vtable(vtable)->name;
  for (auto known : abi::kAllocatesOnWorker) {
    if (std::strcmp(name, known) == 0) {
      return true;
    }
  }
  return false;
}

// Adds the patches of one class. No effect when it is patched already.
void add_class(const Mlx& mlx, const Image& image, void** vtable) {
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
};

#define MLXMEM_IMPORT(symbol, probe, member, in_mlx)        \
  Import {                                                  \
    symbol, reinterpret_cast<void*>(&probes::probe),        \
        reinterpret_cast<void**>(&originals.member), in_mlx \
  }

const Import kImports[] = {
    MLXMEM_IMPORT(abi::kDescInitSymbol, desc_init, desc_init, true),
    MLXMEM_IMPORT(abi::kSetDataSymbol, set_data, set_data, true),
    MLXMEM_IMPORT(abi::kSetDataLongSymbol, set_data_long, set_data_long, true),
    MLXMEM_IMPORT(
        abi::kSetDataOffsetSymbol,
        set_data_offset,
        set_data_offset,
        true),
    MLXMEM_IMPORT(
        abi::kSetDataOwnedSymbol,
        set_data_owned,
        set_data_owned,
        true),
    MLXMEM_IMPORT(
        abi::kSetDataOwnedLongSymbol,
        set_data_owned_long,
        set_data_owned_long,
        true),
    MLXMEM_IMPORT(abi::kEnqueueSymbol, enqueue, enqueue, true),
    MLXMEM_IMPORT(abi::kReleaseGilSymbol, release_gil, release_gil, false),
    MLXMEM_IMPORT(abi::kAcquireGilSymbol, acquire_gil, acquire_gil, false),
};

#undef MLXMEM_IMPORT

// Adds the patches of one image's import slots, if it uses MLX at all.
void add_imports(const Mlx& mlx, const Image& image) {
  struct Found {
    const Import* import;
    void** slot;
  };
  std::vector<Found> found;
  bool uses_mlx = image.base() == mlx.image.base();
  image.for_each_import([&](const char* name, void** slot) {
    uses_mlx = uses_mlx || std::strncmp(name, "_ZN3mlx4core", 12) == 0;
    for (auto& import : kImports) {
      if (std::strcmp(name, import.symbol) == 0) {
        found.push_back({&import, slot});
      }
    }
  });
  if (!uses_mlx) {
    return;
  }
  for (auto& [import, slot] : found) {
    if (patches().contains(slot)) {
      continue;
    }
    void* target = *slot;
    if (import->in_mlx) {
      *import->original = required_symbol(mlx.image, import->symbol);
    } else if (!*import->original) {
      *import->original = target;
    }
    // A slot that was never called through still points into its own image.
    require(
        target == *import->original || image.contains(target),
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

void check_imports(const Mlx& mlx) {
  bool init = false;
  bool set_data = false;
  mlx.image.for_each_import([&](const char* name, void**) {
    init = init || std::strcmp(name, abi::kDescInitSymbol) == 0;
    set_data = set_data || std::strcmp(name, abi::kSetDataSymbol) == 0 ||
        std::strcmp(name, abi::kSetDataOwnedSymbol) == 0;
  });
  require(init, "libmlx does not call ArrayDesc::init through a slot");
  require(set_data, "libmlx does not call array::set_data through a slot");
}

// ---- the allocator's own vtable
// ------------------------------------------------

// The object gets a copy of its vtable, from the two words before it that hold
// the type. The copy stays: another thread may be calling through it.
constexpr size_t kVtableHead = 2;
void* allocator_vtable[kVtableHead + abi::kAllocatorSlots];

void add_allocator(const Mlx& mlx) {
  auto vtable = static_cast<void**>(*mlx.allocator);
  std::copy(
      vtable - kVtableHead, vtable + abi::kAllocatorSlots, allocator_vtable);
  auto copy = allocator_vtable + kVtableHead;
  copy[abi::kMalloc] = reinterpret_cast<void*>(&probes::malloc);
  copy[abi::kFree] = reinterpret_cast<void*>(&probes::free);
  copy[abi::kMakeBuffer] = reinterpret_cast<void*>(&probes::make_buffer);
  copy[abi::kRelease] = reinterpret_cast<void*>(&probes::release);
  patches().add(
      {mlx.allocator, vtable, copy, 0, "the allocator's vtable pointer"});
}

// ---- all of it -------------------------------------------------------------

bool attached = false;
Mlx attached_mlx;
std::vector<uintptr_t> seen_images;

void remember(const std::vector<Image>& images) {
  seen_images.clear();
  for (auto& image : images) {
    seen_images.push_back(image.base());
  }
}

// The copy of the allocator's vtable has the type in its head.
std::string allocator_class() {
  auto type = static_cast<const TypeInfo*>(allocator_vtable[kVtableHead - 1]);
  return type ? type->name : "";
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

size_t patch_new_images() {
  auto images = Image::loaded();
  size_t before = patches().applied().size();
  for (auto& image : images) {
    if (std::find(seen_images.begin(), seen_images.end(), image.base()) ==
        seen_images.end()) {
      add_imports(attached_mlx, image);
      for (auto vtable : primitive_vtables(image, attached_mlx)) {
        add_class(attached_mlx, image, vtable);
      }
    }
  }
  remember(images);
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
    for (auto& image : Image::loaded()) {
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
  auto images = Image::loaded();
  Mlx mlx = find_mlx(images);
  mlx.primitive_type = static_cast<const TypeInfo*>(
      required_symbol(mlx.image, abi::kPrimitiveTypeSymbol));
  check_allocator(mlx);
  check_empty_buffer(mlx);
  DescCheck check(mlx);
  check_imports(mlx);
  auto vtables = primitive_vtables(mlx.image, mlx);
  check_primitives(mlx, vtables);

  try {
    for (auto& image : images) {
      add_imports(mlx, image);
      if (image.base() != mlx.image.base()) {
        for (auto vtable : primitive_vtables(image, mlx)) {
          add_class(mlx, image, vtable);
        }
      }
    }
    for (auto vtable : vtables) {
      add_class(mlx, mlx.image, vtable);
    }
    add_allocator(mlx); // last: from here on allocations are seen
    set_unknown_class_handler(patch_class_of_node, own_code(images));
    patches().apply();
  } catch (...) {
    patches().discard_pending();
    throw;
  }
  attached_mlx = mlx;
  attached = true;
  remember(images);
}

std::string detach() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  if (!attached) {
    return "";
  }
  std::string changed = patches().undo();
  attached = false;
  return changed;
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
  std::string name = allocator_class();
  if (name.empty()) {
    return "";
  }
  if (name.find("CudaAllocator") != std::string::npos) {
    return "cuda";
  }
  return name.find("MetalAllocator") != std::string::npos ? "metal" : "cpu";
}

int64_t cache_limit() {
  std::lock_guard<std::mutex> lock(attach_mutex());
  return mlx_counters.cache_limit();
}

void lock_attach() {
  attach_mutex().lock();
}

void unlock_attach() {
  attach_mutex().unlock();
}

} // namespace mlxmem
