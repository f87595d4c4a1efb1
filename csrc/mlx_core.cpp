#include "mlx_core.h"

#include <algorithm>
#include <cstring>

#include "facts.h"
#include "mlx_abi.h"
#include "originals.h"

#if MLXMEM_MACOS
#include "direct_calls.h"
#include "macos_nodes.h"
#endif

namespace mlxmem {

void* required_symbol(const Image& image, const char* name) {
  void* address = image.symbol(name);
  require(
      address,
      std::string("libmlx exports ") + name,
      place(image, address),
      std::string("libmlx does not export ") + name);
  return address;
}

namespace {

MlxCore find_mlx(const std::vector<Image>& images) {
  begin_facts("MLX's core");
  MlxCore mlx;
  std::string found;
  size_t n = 0;
  for (auto& image : images) {
    if (image.symbol(abi::kAllocatorSymbol)) {
      mlx.image = image;
      found += (n++ ? ", " : "") + image.path();
    }
  }
  require(
      n != 0,
      std::string("a loaded library defines ") + abi::kAllocatorSymbol,
      found,
      std::string("no loaded library defines ") + abi::kAllocatorSymbol +
          " (is mlx.core imported?)");
  require(
      n == 1,
      "one MLX core is loaded in this process",
      found,
      "two MLX cores are loaded in this process");
  return mlx;
}

// Primitive has no base, UnaryPrimitive has Primitive.
void learn_types(MlxCore& mlx) {
  begin_facts("the types of operations");
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
      "the type information of Add names UnaryPrimitive as its base",
      place(mlx.image, unary),
      "the type information of Add does not name UnaryPrimitive as its base");
#else
  auto unary = type(abi::kUnaryPrimitiveTypeSymbol);
#endif
  require(
      unary->base == mlx.primitive_type,
      "UnaryPrimitive's type information names Primitive as its base",
      place(mlx.image, unary->base),
      "UnaryPrimitive's type information does not name Primitive as its base");
  mlx.kinds.learn(mlx.primitive_type, unary);
}

} // namespace

MlxCore find_mlx_core(const std::vector<Image>& images) {
  MlxCore mlx = find_mlx(images);
  learn_types(mlx);
  return mlx;
}

void use_allocator(MlxCore* core, void** allocator) {
  MlxCore& mlx = *core;
  mlx.allocator = allocator;
  auto vtable = static_cast<void**>(*mlx.allocator);
  require(
      mlx.image.contains(vtable),
      "the allocator's vtable lies in libmlx",
      place(mlx.image, vtable),
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
      "the allocator's class derives from mlx::core::allocator::Allocator "
      "alone",
      type ? type->name() : "no type information",
      "the allocator's class does not derive from "
      "mlx::core::allocator::Allocator alone");
  for (int slot = 0; slot < abi::kAllocatorSlots; ++slot) {
    require(
        mlx.image.is_code(vtable[slot]),
        "slot " + std::to_string(slot) +
            " of the allocator's vtable is a function of libmlx",
        place(mlx.image, vtable[slot]),
        "slot " + std::to_string(slot) +
            " of the allocator's vtable is not a function of libmlx (malloc, "
            "free, size, make_buffer, release and two destructors expected)");
  }
#if MLXMEM_MACOS
  // The compiler knows the class of the one allocator, and may call it so.
  size_t n_direct = direct_calls(
      mlx.image,
      {vtable[abi::kMalloc],
       vtable[abi::kFree],
       vtable[abi::kMakeBuffer],
       vtable[abi::kRelease]});
  require(
      n_direct == 0,
      "libmlx calls what is patched of the allocator through its vtable alone",
      std::to_string(n_direct) + " other calls",
      "libmlx calls the allocator past its vtable at " +
          std::to_string(n_direct) + " places");
#endif
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
}

#if MLXMEM_MACOS

void check_import_slots(const MlxCore& mlx) {
  begin_facts("import slots");
  const NodeMaker& maker = node_maker(mlx, mlx.image);
  require(
      !maker.nodes.sites.empty(),
      "libmlx makes nodes at places of its code",
      std::to_string(maker.nodes.sites.size()),
      "libmlx makes nodes at no place of its code");
}

#else

void check_import_slots(const MlxCore& mlx) {
  begin_facts("import slots");
  void** init = nullptr;
  void** destructor = nullptr;
  void** set_data = nullptr;
  void** unlock = nullptr;
  mlx.image.for_each_import([&](const char* name, void** slot) {
    auto note = [&](const char* symbol, void*** found) {
      *found = std::strcmp(name, symbol) == 0 ? slot : *found;
    };
    note(abi::kDescInitSymbol, &init);
    note(abi::kDescDtorSymbol, &destructor);
    note(abi::kSetDataSymbol, &set_data);
    note(abi::kSetDataOwnedSymbol, &set_data);
    note(abi::kUnlockSymbol, &unlock);
  });
  auto called_through = [&](void** slot, const std::string& function) {
    require(
        slot,
        "libmlx calls " + function + " through a slot",
        place(mlx.image, slot),
        "libmlx does not call " + function + " through a slot");
  };
  called_through(init, "ArrayDesc::init");
  called_through(destructor, "~ArrayDesc");
  if (originals.tape_mutex) {
    called_through(set_data, "array::set_data");
    called_through(unlock, "pthread_mutex_unlock");
  }
}

#endif

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

} // namespace mlxmem
