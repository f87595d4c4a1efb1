// Run-time type information as the Itanium C++ ABI lays it out: enough to tell
// which class a vtable is of, and whether it derives from another.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <typeinfo>
#include <vector>

#include "platform.h"

namespace mlxmem {

struct TypeInfo {
  void* kind; // which class of type_info this is
  const char* name_word;
  const TypeInfo* base; // of a class with one base

  // On Apple's arm64 the highest bit says that the name is not unique.
  const char* name() const {
    constexpr uintptr_t kFlag = MLXMEM_MACOS ? uintptr_t(1) << 63 : 0;
    return reinterpret_cast<const char*>(
        reinterpret_cast<uintptr_t>(name_word) & ~kFlag);
  }
};

// Tells the kinds of type information apart. A process can hold several copies
// of the C++ library, each with kinds of its own (CUDA's libraries bring some),
// so they are learnt from classes whose kind is known.
class TypeKinds {
 public:
  TypeKinds() {
    learn(
        reinterpret_cast<const TypeInfo*>(&typeid(Plain)),
        reinterpret_cast<const TypeInfo*>(&typeid(Derived)));
  }

  void learn(const TypeInfo* no_base, const TypeInfo* one_base) {
    no_base_.push_back(no_base->kind);
    one_base_.push_back(one_base->kind);
  }

  bool has_one_base(const TypeInfo* type) const {
    return contains(one_base_, type->kind);
  }

  bool is_class(const TypeInfo* type) const {
    return contains(no_base_, type->kind) || has_one_base(type);
  }

  // Along single inheritance only; base: an RTTI name.
  bool derives_from(const TypeInfo* type, const char* base) const {
    for (int depth = 0; type && depth < 16; ++depth) {
      if (std::strcmp(type->name(), base) == 0) {
        return true;
      }
      if (!has_one_base(type)) {
        return false;
      }
      type = type->base;
    }
    return false;
  }

 private:
  struct Plain {
    virtual ~Plain() = default;
  };
  struct Derived : Plain {};

  static bool contains(const std::vector<void*>& kinds, void* kind) {
    return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
  }

  std::vector<void*> no_base_;
  std::vector<void*> one_base_;
};

// The vtable's first function follows the offset to the top and the type.
inline const TypeInfo* type_of_vtable(void* const* vtable) {
  return static_cast<const TypeInfo*>(vtable[-1]);
}

} // namespace mlxmem
