// MLX's core library in this process, and the checks of mlx_abi.h's facts on
// it.

#pragma once

#include <functional>
#include <string>
#include <vector>

#include "facts.h"
#include "image.h"
#include "rtti.h"

namespace mlxmem {

struct MlxCore {
  Image image;
  TypeKinds kinds;
  const TypeInfo* allocator_type = nullptr;
  const TypeInfo* primitive_type = nullptr;
  void** allocator = nullptr; // the object; its first word is the vptr
};

// Finds the core among the loaded images and checks every fact, without
// changing a word of it; sets what originals and mlx_counters take from there.
// Throws AttachError, which names the fact that does not hold.
MlxCore check_mlx_core(const std::vector<Image>& images);

// Throws AttachError when the core does not export the symbol.
void* required_symbol(const Image& image, const char* name);

// Calls visit(vtable) for what looks like a vtable of so many slots or more, in
// an image's constant data: the type information lies in the image too.
void for_each_vtable(
    const Image& image,
    size_t n_slots,
    const std::function<void(void** vtable)>& visit);

// Vtables in the constant data of an image whose class derives from Primitive
// and can have objects. Most of them are hidden, so they are found by their
// type information.
std::vector<void**> primitive_vtables(const Image& image, const MlxCore& mlx);

} // namespace mlxmem
