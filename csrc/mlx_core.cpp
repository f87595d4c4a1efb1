#include "mlx_core.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "mlx_abi.h"
#include "originals.h"
#include "patch_set.h"

#if MLXMEM_MACOS
#include "macos_nodes.h"
#endif

namespace mlxmem {

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

namespace {

MlxCore find_mlx(const std::vector<Image>& images) {
  MlxCore mlx;
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

// Primitive has no base, UnaryPrimitive has Primitive.
void learn_types(MlxCore& mlx) {
  auto type = [&](const char* symbol) {
    return static_cast<const TypeInfo*>(required_symbol(mlx.image, symbol));
  };
  mlx.primitive_type = type(abi::kPrimitiveTypeSymbol);
#if MLXMEM_MACOS
  auto add = static_cast<void**>(
      required_symbol(mlx.image, abi::kKnownPrimitives[0].vtable_symbol));
  auto unary = type_of_vtable(add + 2)->base;
  require(
      mlx.image.contains(unary) &&
          std::strcmp(unary->name(), abi::kUnaryPrimitiveTypeName) == 0,
      "the type information of Add does not name UnaryPrimitive as its base");
#else
  auto unary = type(abi::kUnaryPrimitiveTypeSymbol);
#endif
  require(
      unary->base == mlx.primitive_type,
      "UnaryPrimitive's type information does not name Primitive as its base");
  mlx.kinds.learn(mlx.primitive_type, unary);
}

// The words of an allocator that is followed by its mutex.
void check_cache_words(const MlxCore& mlx) {
  require(
      mlx_counters.knows_cache(),
      "the limits, the counters and the cache's page size do not lie where "
      "they do in this class of allocator");
  require(
      mlx.image.is_code(*mlx_counters.cache_get_size_word()) &&
          mlx.image.is_code(*mlx_counters.cache_free_invoker_word()),
      "the cache's functions do not lie where they do in this class of "
      "allocator");
}

// The allocator's vtable: five functions and two destructors, all of them code
// of libmlx, of a class derived from mlx::core::allocator::Allocator.
void check_allocator(MlxCore& mlx) {
  auto getter = reinterpret_cast<abi::AllocatorGetter>(
      required_symbol(mlx.image, abi::kAllocatorSymbol));
  mlx.allocator = static_cast<void**>(getter());
  require(mlx.allocator, "allocator() returns a null pointer");
  auto vtable = static_cast<void**>(*mlx.allocator);
  require(
      mlx.image.contains(vtable),
      "the allocator's vtable does not lie in libmlx (has another tool, or "
      "another copy of mlxmem, patched it?)");
  auto type = type_of_vtable(vtable);
  mlx.allocator_type = type;
#if !MLXMEM_MACOS
  required_symbol(mlx.image, abi::kAllocatorTypeSymbol);
#endif
  require(
      type && mlx.kinds.has_one_base(type) &&
          mlx.kinds.derives_from(type, abi::kAllocatorTypeName),
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
  bool is_cuda = std::strstr(type->name(), abi::kCudaAllocatorName) != nullptr;
  originals.uses_host_memory =
      !is_cuda && !std::strstr(type->name(), abi::kMetalAllocatorName);
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
      type->name(),
      counter(abi::kActiveMemorySymbol),
      counter(abi::kCacheMemorySymbol),
      counter(abi::kPeakMemorySymbol),
      reinterpret_cast<abi::CounterFn>(
          mlx.image.symbol(abi::kMemoryLimitSymbol)));
  bool follows_mutex = is_cuda || std::getenv(abi::kFollowMutexVariable);
  if (follows_mutex) {
    check_cache_words(mlx);
  }
  originals.tape_mutex = follows_mutex ? mlx_counters.mutex() : nullptr;
}

// An empty buffer moves no counter, so this can be tried in any program.
void check_empty_buffer(const MlxCore& mlx) {
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
  explicit DescCheck(const MlxCore& mlx) {
    destroy_ = reinterpret_cast<abi::DescDtor>(
        required_symbol(mlx.image, abi::kDescDtorSymbol));
#if !MLXMEM_MACOS // where no call of it is patched
    require(
        mlx.image.symbol(abi::kDescBaseDtorSymbol) ==
            reinterpret_cast<void*>(destroy_),
        "ArrayDesc has two destructors");
#endif
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
        node_status == abi::kUnscheduled && leaf_status != node_status &&
            leaf_status < 8,
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
        word(abi::kDescTracerPadding) == untouched,
        "ArrayDesc: the bytes after is_tracer of " + what + " are written");
    require(
        pointer(abi::kDescData) == nullptr,
        "ArrayDesc: the data of " + what + " is not at offset 272");
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

void check_primitives(MlxCore& mlx, const std::vector<void**>& vtables) {
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

#if MLXMEM_MACOS

void check_imports(const MlxCore& mlx) {
  const NodeMaker& maker = node_maker(mlx, mlx.image);
  require(
      maker.operator_new, "libmlx does not call operator new through a slot");
  require(
      !maker.nodes.sites.empty(), "libmlx makes nodes at no place of its code");
}

#else

void check_imports(const MlxCore& mlx) {
  bool init = false;
  bool destructor = false;
  bool set_data = false;
  bool unlock = false;
  mlx.image.for_each_import([&](const char* name, void**) {
    init = init || std::strcmp(name, abi::kDescInitSymbol) == 0;
    destructor = destructor || std::strcmp(name, abi::kDescDtorSymbol) == 0;
    set_data = set_data || std::strcmp(name, abi::kSetDataSymbol) == 0 ||
        std::strcmp(name, abi::kSetDataOwnedSymbol) == 0;
    unlock = unlock || std::strcmp(name, abi::kUnlockSymbol) == 0;
  });
  require(init, "libmlx does not call ArrayDesc::init through a slot");
  require(destructor, "libmlx does not call ~ArrayDesc through a slot");
  if (originals.tape_mutex) {
    require(set_data, "libmlx does not call array::set_data through a slot");
    require(unlock, "libmlx does not call pthread_mutex_unlock through a slot");
  }
}

#endif

} // namespace

void for_each_vtable(
    const Image& image,
    size_t n_slots,
    const std::function<void(void** vtable)>& visit) {
  for (auto& range : image.constant_data()) {
    auto begin = reinterpret_cast<void**>((range.begin + 7) & ~uintptr_t(7));
    auto end = reinterpret_cast<void**>(range.end);
    for (auto word = begin; word + 2 + n_slots <= end; ++word) {
      auto type = static_cast<const TypeInfo*>(word[1]);
      if (word[0] == nullptr && image.contains(type) &&
          reinterpret_cast<uintptr_t>(type) % alignof(TypeInfo) == 0) {
        visit(word + 2);
      }
    }
  }
}

std::vector<void**> primitive_vtables(const Image& image, const MlxCore& mlx) {
  std::vector<void**> vtables;
  for_each_vtable(image, abi::kName + 1, [&](void** vtable) {
    auto type = type_of_vtable(vtable);
    if (image.is_code(vtable[abi::kEvalCpu]) &&
        image.is_code(vtable[abi::kEvalGpu]) &&
        image.is_code(vtable[abi::kName]) && mlx.kinds.is_class(type) &&
        mlx.kinds.derives_from(type, mlx.primitive_type->name())) {
      vtables.push_back(vtable);
    }
  });
  return vtables;
}

MlxCore check_mlx_core(const std::vector<Image>& images) {
  MlxCore mlx = find_mlx(images);
  learn_types(mlx);
  check_allocator(mlx);
  check_empty_buffer(mlx);
  DescCheck check(mlx);
  check_imports(mlx);
  check_primitives(mlx, primitive_vtables(mlx.image, mlx));
  return mlx;
}

} // namespace mlxmem
