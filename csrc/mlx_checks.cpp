#include "mlx_checks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "facts.h"
#include "mlx_abi.h"
#include "originals.h"

namespace mlxmem {

namespace {

// The words of an allocator that is followed by its mutex.
void check_cache_words(const MlxCore& mlx) {
  require(
      mlx_counters.knows_cache(),
      "the limits, the counters and the cache's page size lie where they do in "
      "this class of allocator",
      "",
      "the limits, the counters and the cache's page size do not lie where "
      "they do in this class of allocator");
  void* get_size = *mlx_counters.cache_get_size_word();
  void* free = *mlx_counters.cache_free_invoker_word();
  require(
      mlx.image.is_code(get_size) && mlx.image.is_code(free),
      "the cache's functions lie where they do in this class of allocator",
      place(mlx.image, get_size) + ", " + place(mlx.image, free),
      "the cache's functions do not lie where they do in this class of "
      "allocator");
}

void check_allocator(MlxCore& mlx) {
  begin_facts("the allocator");
  auto getter = reinterpret_cast<abi::AllocatorGetter>(
      required_symbol(mlx.image, abi::kAllocatorSymbol));
  try {
    mlx.allocator = static_cast<void**>(getter());
  } catch (const std::exception& error) { // there is no GPU, say
    require(
        false,
        "allocator() can be called",
        error.what(),
        std::string("MLX can't make its allocator: ") + error.what());
  }
  require(
      mlx.allocator,
      "allocator() returns an object",
      place(mlx.image, mlx.allocator),
      "allocator() returns a null pointer");
  use_allocator(&mlx, mlx.allocator);

  auto counter = [&](const char* symbol) {
    return reinterpret_cast<abi::CounterFn>(required_symbol(mlx.image, symbol));
  };
  mlx_counters.bind(
      mlx.allocator,
      mlx.allocator_type->name(),
      counter(abi::kActiveMemorySymbol),
      counter(abi::kCacheMemorySymbol),
      counter(abi::kPeakMemorySymbol),
      reinterpret_cast<abi::CounterFn>(
          mlx.image.symbol(abi::kMemoryLimitSymbol)));
  bool follows_mutex =
      std::strstr(mlx.allocator_type->name(), abi::kCudaAllocatorName) ||
      std::getenv(abi::kFollowMutexVariable);
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
  require(
      size == 0,
      "malloc(0) of the allocator gives no buffer, or one without a size",
      buffer ? "size " + std::to_string(size) : "no buffer",
      "malloc(0) of the allocator gives a buffer with a size");
}

// ArrayDesc's layout: constructs one for a shape and a dtype that are known,
// in memory filled with a pattern, and looks where they went and what stayed.
class DescCheck {
 public:
  explicit DescCheck(const MlxCore& mlx) {
    begin_facts("array nodes");
    destroy_ = reinterpret_cast<abi::DescDtor>(
        required_symbol(mlx.image, abi::kDescDtorSymbol));
#if !MLXMEM_MACOS // where no call of it is patched
    void* other = mlx.image.symbol(abi::kDescBaseDtorSymbol);
    require(
        other == reinterpret_cast<void*>(destroy_),
        "ArrayDesc has one destructor by two names",
        place(mlx.image, other),
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
        "ArrayDesc: a leaf has no primitive",
        bytes(abi::kDescPrimitive, 8),
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
        "ArrayDesc: the primitive is at offset 200",
        pointer(abi::kDescPrimitive) == this ? "the one that it was given"
                                             : bytes(abi::kDescPrimitive, 8),
        "ArrayDesc: the primitive is not at offset 200");
    require(
        node_status == abi::kUnscheduled && leaf_status != node_status &&
            leaf_status < 8,
        "ArrayDesc: the status is at offset 216",
        std::to_string(leaf_status) + " of a leaf, " +
            std::to_string(node_status) + " of a node",
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
    int shape[3] = {3, 5, 7};
    int64_t strides[3] = {35, 7, 1};
    check_at(
        abi::kDescShape,
        "the shape",
        "is",
        what,
        holds_vector(abi::kDescShape, shape, sizeof(shape)),
        vector_bytes(abi::kDescShape));
    check_at(
        abi::kDescStrides,
        "the strides",
        "are",
        what,
        holds_vector(abi::kDescStrides, strides, sizeof(strides)),
        vector_bytes(abi::kDescStrides));
    check_at(
        abi::kDescElements,
        "the number of elements",
        "is",
        what,
        word(abi::kDescElements) == 105 && word(abi::kDescElements + 4) == 0,
        bytes(abi::kDescElements, 8));
    check_at(
        abi::kDescDtype,
        "the dtype",
        "is",
        what,
        word(abi::kDescDtype) == 11 && memory_[abi::kDescDtype + 4] == 4,
        bytes(abi::kDescDtype, 5));
    check_untouched(
        abi::kDescStatusPadding, "the bytes after the status of " + what);
    check_untouched(
        abi::kDescTracerPadding, "the bytes after is_tracer of " + what);
    check_at(
        abi::kDescData,
        "the data",
        "is",
        what,
        pointer(abi::kDescData) == nullptr,
        bytes(abi::kDescData, 8));
    check_untouched(abi::kDescTailPadding, "the last four bytes of " + what);
    auto end = memory_ + abi::kDescSize;
    require(
        std::all_of(
            end,
            memory_ + sizeof(memory_),
            [](unsigned char byte) { return byte == kPattern; }),
        "ArrayDesc is not larger than 368 bytes",
        bytes(abi::kDescSize, 8),
        "ArrayDesc is larger than 368 bytes");
  }

  // "the shape of a leaf is at offset 0"
  void check_at(
      size_t offset,
      const char* member,
      const char* verb,
      const std::string& what,
      bool holds,
      const std::string& found) const {
    auto begin =
        std::string("ArrayDesc: ") + member + " of " + what + " " + verb;
    auto end = "at offset " + std::to_string(offset);
    require(holds, begin + " " + end, found, begin + " not " + end);
  }

  void check_untouched(size_t offset, const std::string& what) const {
    require(
        word(offset) == kPattern * 0x01010101u,
        "ArrayDesc: " + what + " are not written",
        bytes(offset, 4),
        "ArrayDesc: " + what + " are written");
  }

  // Whether a SmallVector with these numbers, in itself, lies there.
  bool holds_vector(size_t offset, const void* numbers, ptrdiff_t size) const {
    auto begin = static_cast<char*>(pointer(offset + abi::kSmallVectorBegin));
    auto end = static_cast<char*>(pointer(offset + abi::kSmallVectorEnd));
    return end - begin == size && inside(begin) &&
        std::memcmp(begin, numbers, size) == 0;
  }

  // What the vector there holds, or where it points to.
  std::string vector_bytes(size_t offset) const {
    auto begin = static_cast<char*>(pointer(offset + abi::kSmallVectorBegin));
    auto end = static_cast<char*>(pointer(offset + abi::kSmallVectorEnd));
    return inside(begin) && inside(end) && begin < end
        ? bytes(reinterpret_cast<unsigned char*>(begin) - memory_, end - begin)
        : bytes(offset + abi::kSmallVectorBegin, 2 * sizeof(void*));
  }

  std::string bytes(size_t offset, size_t size) const {
    std::string text;
    char hex[4];
    for (size_t i = offset; i < offset + size; ++i) {
      std::snprintf(hex, sizeof(hex), " %02x", memory_[i]);
      text += hex;
    }
    return text.substr(1);
  }

  bool inside(const char* address) const {
    auto a = reinterpret_cast<const unsigned char*>(address);
    return a >= memory_ && a < memory_ + abi::kDescSize;
  }

  abi::DescDtor destroy_ = nullptr;
  alignas(16) unsigned char memory_[abi::kDescSize + 128];
};

void check_primitives(MlxCore& mlx, const std::vector<void**>& vtables) {
  begin_facts("operations");
  unsigned char no_object[256] = {};
  for (auto& known : abi::kKnownPrimitives) {
    auto table =
        static_cast<void**>(required_symbol(mlx.image, known.vtable_symbol));
    auto vtable = table + 2;
    require(
        std::find(vtables.begin(), vtables.end(), vtable) != vtables.end(),
        std::string("the vtable of ") + known.name +
            " is found by its type information",
        "one of " + std::to_string(vtables.size()) + " classes",
        std::string("the vtable of ") + known.name +
            " is not found by its type information");
    // name() of these classes returns a literal and reads no member.
    auto name = reinterpret_cast<abi::NameFn>(vtable[abi::kName]);
    require(
        mlx.image.contains(reinterpret_cast<void*>(name)),
        std::string("name() of ") + known.name + " is code of libmlx",
        place(mlx.image, reinterpret_cast<void*>(name)),
        std::string("name() of ") + known.name + " is not code of libmlx");
    const char* text = name(no_object);
    bool is_literal = text && mlx.image.contains(text);
    require(
        is_literal && std::strcmp(text, known.name) == 0,
        std::string("slot 5 of the vtable of ") + known.name +
            " returns its name",
        is_literal ? text : place(mlx.image, text),
        std::string("slot 5 of the vtable of ") + known.name +
            " does not return its name");
  }
}

} // namespace

MlxCore check_mlx_core(const std::vector<Image>& images) {
  MlxCore mlx = find_mlx_core(images);
  check_allocator(mlx);
  check_empty_buffer(mlx);
  DescCheck check(mlx);
  check_import_slots(mlx);
  check_primitives(mlx, primitive_vtables(mlx.image, mlx));
  return mlx;
}

} // namespace mlxmem
