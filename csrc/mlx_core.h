// MLX's core library in this process, as far as it can be told without calling
// a function of it.

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

// Finds the core among the loaded images, and the types of its classes. Throws
// AttachError.
MlxCore find_mlx_core(const std::vector<Image>& images);

// Takes this object as its allocator: the vtable has five functions and two
// destructors, all of them code of libmlx, and is of a class derived from
// mlx::core::allocator::Allocator. Sets what originals take from there. Throws
// AttachError.
void use_allocator(MlxCore* mlx, void** allocator);

// Whether the core calls through slots what is patched there. Throws
// AttachError.
void check_import_slots(const MlxCore& mlx);

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
